"""What becomes of each value of a program, in one walk back from its outputs.

For each value: which outputs depend on it, from which of them a gradient may come back,
and which equations read the value. This explains; ``pullback.py`` proves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Var

from flax_sg.flow.pullback import Reach, has_tangent
from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import Bodies, opened

UNKNOWN = 'unknown'
# Primitives of many operands that do not meet.
_EACH_FOR_ITSELF = frozenset(('device_put', 'optimization_barrier', 'psum', 'psum2'))


class Fact(NamedTuple):
    """What becomes of a value.

    Attributes:
        read: the outputs of the program that depend on it, as bits.
        live: those from which a gradient may come back.
    """

    read: int = 0
    live: int = 0


UNREAD = Fact()


def merged(facts: Iterable[Fact]) -> Fact:
    """What becomes of a value of which several things become."""
    read, live = 0, 0
    for fact in facts:
        read, live = read | fact.read, live | fact.live
    return Fact(read | live, live)


class Place(NamedTuple):
    """A place in the program, as a body knows it.

    Attributes:
        source: the line of the user.
        function: the jitted function that the place is in, see ``source_of``.
    """

    source: str = UNKNOWN
    function: str = ''

    def at(self, eqn: JaxprEqn) -> str:
        """The line of an equation in a body that stands here."""
        return jaxprs.source_of(eqn, self.function) or self.source

    def inside(self, eqn: JaxprEqn) -> Place:
        """The place of the bodies of an equation in a body that stands here."""
        is_jitted = eqn.primitive.name in jaxprs.JITTED
        return Place(
            self.at(eqn), jaxprs.function_in(eqn) if is_jitted else self.function
        )

    def stop(self, eqn: JaxprEqn) -> str:
        """An equation that stops a gradient, or the block that made it, in words."""
        _, block, said = jaxprs.name_stack_of(eqn).rpartition(jaxprs.BLOCK)
        return said if block else f'{jaxprs.operation(eqn)} at {self.at(eqn)}'


class Read(NamedTuple):
    """An equation that reads a value, or None and the number of an output."""

    eqn: JaxprEqn | None
    operand: int
    fact: Fact


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The facts of the values in a body.

    Attributes:
        jaxpr: the open jaxpr.
        place: where it stands.
        facts: of each value that is read.
        reads: the equations that read it, from the last to the first.
        inner: the tables of the bodies of an equation.
    """

    jaxpr: Any
    place: Place
    facts: dict[Any, Fact] = dataclasses.field(default_factory=dict)
    reads: dict[Any, list[Read]] = dataclasses.field(default_factory=dict)
    inner: dict[JaxprEqn, list[Table]] = dataclasses.field(default_factory=dict)

    def of(self, var: Any) -> Fact:
        """What becomes of a value."""
        return self.facts.get(var, UNREAD)

    def inputs(self) -> list[Fact]:
        """The facts of the inputs."""
        return list(map(self.of, self.jaxpr.invars))

    def note(self, var: Any, fact: Fact, eqn: JaxprEqn | None, operand: int) -> None:
        """Adds one reader of a value."""
        if not isinstance(var, Var) or not fact.read:
            return
        if not has_tangent(var.aval):
            fact = Fact(fact.read)
        self.facts[var] = merged((self.of(var), fact))
        self.reads.setdefault(var, []).append(Read(eqn, operand, fact))


class Facts:
    """The walk back through a program.

    Attributes:
        visits: the number of equations that were looked at.
    """

    def __init__(self, reach: Reach | None = None) -> None:
        """Begins with nothing known.

        Args:
            reach: tells through which equations a gradient comes back. Without it, only
                what is read is found, in a fraction of the time.
        """
        self.visits = 0
        self._reach = reach
        # A function that is called twice is walked once.
        self._tables: dict[Hashable, Table] = {}

    def of(self, jaxpr: Any) -> Table:
        """The facts of a program."""
        ends = [
            Fact(1 << n, (self._reach is not None and has_tangent(var.aval)) << n)
            for n, var in enumerate(jaxpr.outvars)
        ]
        return self._table(jaxpr, tuple(ends), Place())

    def _table(self, jaxpr: Any, ends: Sequence[Fact], place: Place) -> Table:
        key = id(jaxpr), ends, place
        if key in self._tables:
            return self._tables[key]
        table = self._tables[key] = Table(jaxpr, place)
        for number, (var, end) in enumerate(zip(jaxpr.outvars, ends, strict=True)):
            table.note(var, end, None, number)
        for eqn in reversed(jaxpr.eqns):
            outs = list(map(table.of, eqn.outvars))
            # What is written to a mutable array is read from there later.
            refs = [table.of(var) for var in eqn.invars if jaxprs.is_ref(var)]
            if any(fact.read for fact in (*outs, *refs)):
                self.visits += 1
                ins = self._inside(table, eqn, outs) or self._operands(eqn, outs)
                for number, fact in reversed(list(enumerate(ins))):
                    table.note(eqn.invars[number], merged((fact, *refs)), eqn, number)
        return table

    def _operands(self, eqn: JaxprEqn, outs: Sequence[Fact]) -> list[Fact]:
        """The facts of the inputs of an equation that runs no jaxpr."""
        every, each = merged(outs).read, eqn.primitive.name in _EACH_FOR_ITSELF
        rows = self._reach.rows(eqn) if self._reach else [0] * len(eqn.invars)
        ins: list[Fact] = []
        for number, row in enumerate(rows):
            later = merged(out for n, out in enumerate(outs) if row >> n & 1)
            read = outs[number].read if each else every
            ins.append(Fact(read | later.live, later.live))
        return ins

    def _inside(
        self, table: Table, eqn: JaxprEqn, outs: Sequence[Fact]
    ) -> list[Fact] | None:
        """The facts of the inputs of an equation that runs jaxprs."""
        bodies, ends = Bodies.of(eqn), tuple(outs)
        if not bodies.jaxprs:
            return None
        every, place = Fact(merged(outs).read), table.place.inside(eqn)
        while True:
            inner = [self._table(opened(x), ends, place) for x in bodies.jaxprs]
            columns = zip(*(body.inputs() for body in inner), strict=True)
            ins = [UNREAD] * bodies.first + list(map(merged, columns))
            # The next turn of a loop reads what is carried.
            turned = [merged((ends[k], ins[n])) for k, n in enumerate(bodies.carry)]
            after = (*turned, *ends[len(turned) :])
            if after == ends:
                break
            ends = after
        table.inner[eqn] = inner
        for number, fact in zip(bodies.carry, turned, strict=True):
            ins[number] = fact
        if eqn.primitive.name == 'cond':
            ins[0] = every
        if eqn.primitive.name == 'while':
            asked = self._table(opened(eqn.params['cond_jaxpr']), (every,), place)
            numbers = (*range(bodies.first), *bodies.carry)
            for number, fact in zip(numbers, asked.inputs(), strict=True):
                ins[number] = merged((ins[number], Fact(fact.read)))
        return ins


class Scope(NamedTuple):
    """A body in one of its calls: JAX has one body of a function that is called twice.

    Attributes:
        table: the facts of the body.
        call: the equation that runs it; None for the program.
        around: the scope of that equation.
    """

    table: Table
    call: JaxprEqn | None = None
    around: Scope | None = None

    def is_carried(self, read: Read) -> bool:
        """Whether a loop takes the value as its carry, or a turn returns it so."""
        if read.eqn is not None:
            return read.operand in Bodies.of(read.eqn).carry
        return self.call is not None and read.operand < len(Bodies.of(self.call).carry)

    def passed(self, read: Read) -> list[tuple[Scope, Var]]:
        """The same value in the bodies that take it in, or where a body returns it."""
        if read.eqn is not None:
            first = Bodies.of(read.eqn).first
            inner = self.table.inner.get(read.eqn, ()) if read.operand >= first else ()
            return [
                (Scope(body, read.eqn, self), body.jaxpr.invars[read.operand - first])
                for body in inner
            ]
        if self.call is None or self.around is None:
            return []
        found = [(self.around, self.call.outvars[read.operand])]
        if self.is_carried(read):
            bodies = Bodies.of(self.call)
            again = bodies.carry[read.operand] - bodies.first
            found.append((self, self.table.jaxpr.invars[again]))
        return found

"""What becomes of each value of a program, in one walk back from its outputs.

For each value: which outputs depend on it, from which of them a gradient may come back,
what stops the gradient otherwise, and which equations read the value. This explains;
``pullback.py`` proves.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn, Var

from flax_sg.flow.pullback import Reach, has_tangent
from flax_sg.flow.report import Use
from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import CALLS, JITTED, body_of, opened

UNKNOWN = 'unknown'
# Primitives of many operands that do not meet.
EACH_FOR_ITSELF = frozenset(('device_put', 'optimization_barrier', 'psum', 'psum2'))
# Primitives that return their inputs in another form.
SAME_VALUE = frozenset(
    (
        *('stop_gradient', 'convert_element_type', 'reduce_precision', 'copy', 'name'),
        *('reshape', 'broadcast_in_dim', 'transpose', 'squeeze', 'copy_p'),
        *('sharding_constraint', 'reshard', 'pvary', 'pcast', 'device_put'),
        'optimization_barrier',
    )
)
# Primitives that return their first input, with other elements in some places.
_OVERWRITE = frozenset(('scatter', 'dynamic_update_slice'))


class Fact(NamedTuple):
    """What becomes of a value.

    Attributes:
        read: the outputs of the program that depend on it, as bits.
        live: those from which a gradient may come back.
        by: what stops the gradient, if none of them is live.
    """

    read: int = 0
    live: int = 0
    by: str = ''


UNREAD = Fact()


def merged(facts: Iterable[Fact]) -> Fact:
    """What becomes of a value of which several things become."""
    read, live, by = 0, 0, ''
    for fact in facts:
        read, live, by = read | fact.read, live | fact.live, by or fact.by
    return Fact(read | live, live, '' if live else by)


class Place(NamedTuple):
    """A place in the program, as a body knows it.

    Attributes:
        source: the line of the user.
        function: the jitted function that the place is in, see ``source_of``.
    """

    source: str = UNKNOWN
    function: str = ''

    def at(self, eqn: JaxprEqn) -> Place:
        """The place of an equation in a body that stands here."""
        source = jaxprs.source_of(eqn, self.function) or self.source
        return self._replace(source=source)

    def inside(self, eqn: JaxprEqn) -> Place:
        """The place of the bodies of an equation in a body that stands here."""
        here = self.at(eqn)
        if eqn.primitive.name not in JITTED:
            return here
        return here._replace(function=jaxprs.function_in(eqn))

    def stop(self, eqn: JaxprEqn) -> str:
        """An equation that stops a gradient, or the block that made it, in words."""
        _, block, said = jaxprs.name_stack_of(eqn).rpartition(jaxprs.BLOCK)
        if block:
            return said
        return f'{jaxprs.operation(eqn)} at {self.at(eqn).source}'


class Bodies(NamedTuple):
    """The jaxprs that an equation runs.

    Their inputs are those of the equation from ``first`` on. Their outputs are all of
    the equation's.

    Attributes:
        jaxprs: the open jaxprs: the branches of a ``cond``, otherwise one or none.
        first: the number of the first input of the equation that goes into them.
        carry: the inputs that a loop carries from turn to turn. The first outputs of
            the body are their next values.
    """

    jaxprs: tuple[Any, ...]
    first: int = 0
    carry: range = range(0)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Bodies:
        """The jaxprs in an equation."""
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            return cls((body_of(eqn),))
        if name == 'cond':
            return cls(tuple(map(opened, params['branches'])), 1)
        if name == 'scan':
            return cls((opened(params['jaxpr']),), 0, jaxprs.carried_by(eqn))
        if name == 'while':
            first = params['cond_nconsts']
            carry = range(first + params['body_nconsts'], len(eqn.invars))
            return cls((opened(params['body_jaxpr']),), first, carry)
        return cls(())


class Read(NamedTuple):
    """An equation that reads a value, or None and the number of an output."""

    eqn: JaxprEqn | None
    operand: int
    fact: Fact


class Table(NamedTuple):
    """The facts of the values in a body.

    Attributes:
        jaxpr: the open jaxpr.
        place: where it stands.
        facts: of each value that is read.
        reads: the equations that read it, from the last to the first.
        inner: the tables of the bodies of an equation, by its id.
    """

    jaxpr: Any
    place: Place
    facts: dict[Any, Fact]
    reads: dict[Any, list[Read]]
    inner: dict[int, list[Table]]

    def inputs(self) -> list[Fact]:
        """The facts of the inputs."""
        return [self.facts.get(var, UNREAD) for var in self.jaxpr.invars]

    def note(self, var: Any, fact: Fact, eqn: JaxprEqn | None, operand: int) -> None:
        """Adds one reader of a value."""
        if not isinstance(var, Var) or not fact.read:
            return
        if not has_tangent(var.aval):
            fact = Fact(fact.read)
        elif eqn and not (fact.live or fact.by):
            fact = fact._replace(by=self.place.stop(eqn))
        self.facts[var] = merged((self.facts.get(var, UNREAD), fact))
        self.reads.setdefault(var, []).append(Read(eqn, operand, fact))


# How often each use is met. In a body, outputs stand for what reads them outside: the
# number of the output, and what stopped the value before. A use has the id of its
# equation if uses of one equation are to be compared.
Found: TypeAlias = 'Counter[tuple[int, Use | str]]'


class Facts:
    """The walk through a program.

    Attributes:
        visits: the number of equations that were looked at.
    """

    def __init__(self) -> None:
        self.visits = 0
        self._reach = Reach()
        # A function that is called twice is walked once.
        self._tables: dict[Hashable, Table] = {}
        self._uses: dict[Hashable, Found] = {}

    def of(self, jaxpr: Any) -> Table:
        """The facts of a program."""
        ends = [
            Fact(1 << n, has_tangent(var.aval) << n)
            for n, var in enumerate(jaxpr.outvars)
        ]
        return self._table(jaxpr, tuple(ends), Place())

    def _table(self, jaxpr: Any, ends: Sequence[Fact], place: Place) -> Table:
        key = id(jaxpr), ends, place
        if key in self._tables:
            return self._tables[key]
        table = self._tables[key] = Table(jaxpr, place, {}, {}, {})
        for number, (var, end) in enumerate(zip(jaxpr.outvars, ends, strict=True)):
            table.note(var, end, None, number)
        for eqn in reversed(jaxpr.eqns):
            outs = [table.facts.get(var, UNREAD) for var in eqn.outvars]
            # What is written to a mutable array is read from there later.
            refs = [table.facts.get(v, UNREAD) for v in eqn.invars if jaxprs.is_ref(v)]
            if any(fact.read for fact in (*outs, *refs)):
                self.visits += 1
                ins = self._inside(table, eqn, outs) or self._operands(eqn, outs)
                for number, fact in reversed(list(enumerate(ins))):
                    table.note(eqn.invars[number], merged((fact, *refs)), eqn, number)
        return table

    def _operands(self, eqn: JaxprEqn, outs: Sequence[Fact]) -> list[Fact]:
        """The facts of the inputs of an equation that runs no jaxpr."""
        every, each = merged(outs).read, eqn.primitive.name in EACH_FOR_ITSELF
        ins: list[Fact] = []
        for number, row in enumerate(self._reach.rows(eqn)):
            later = merged(out for n, out in enumerate(outs) if row >> n & 1)
            read = outs[number].read if each else every
            ins.append(later._replace(read=read | later.live))
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
            inner = [self._table(jaxpr, ends, place) for jaxpr in bodies.jaxprs]
            columns = zip(*(body.inputs() for body in inner), strict=True)
            ins = [UNREAD] * bodies.first + list(map(merged, columns))
            # The next turn of a loop reads what is carried.
            turned = [merged((ends[k], ins[n])) for k, n in enumerate(bodies.carry)]
            after = (*turned, *ends[len(turned) :])
            if after == ends:
                break
            ends = after
        table.inner[id(eqn)] = inner
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

    def uses(self, table: Table, slots: Iterable[int]) -> Counter[Use]:
        """The uses of some inputs of a program, which are one parameter."""
        found: Found = Counter()
        for slot in slots:
            found.update(self._uses_of(table, table.jaxpr.invars[slot]))
        uses: Counter[Use] = Counter()
        for (site, use), times in found.items():
            if isinstance(use, str):
                use = Use(UNKNOWN, UNKNOWN, bool(use), by=use)
            # ``jnp.where`` of a parameter and the same one stopped: see ``sg.at``.
            beside = [x for n, x in found if site == n and isinstance(x, Use)]
            stops = [x.by for x in beside if x.by]
            if site and stops and not use.by:
                use = dataclasses.replace(use, part=True, by=max(stops))
            if not (use.stopped and len(stops) < len(beside)) or not site:
                uses[use] += times
        return uses

    def _uses_of(self, table: Table, var: Any) -> Found:
        """The equations that read a value, in whatever form."""
        key = id(table), var
        if key not in self._uses:
            found = self._uses[key] = Counter()
            # An equation that reads a value twice, as ``x * x`` does, is one use.
            reads = {
                (
                    id(read.eqn),
                    read.fact,
                    id(read.eqn) in table.inner and read.operand,
                ): read
                for read in table.reads.get(var, ())
            }
            for read in reversed(reads.values()):
                found.update(self._used(table, *read))
        return self._uses[key]

    def _used(
        self, table: Table, eqn: JaxprEqn | None, operand: int, fact: Fact
    ) -> Found:
        if eqn is None:
            return Counter({(operand, fact.by): 1})
        name, stack = eqn.primitive.name, jaxprs.name_stack_of(eqn)
        by = '' if fact.live else fact.by or table.place.stop(eqn)
        if name in SAME_VALUE:
            return self._output(table, eqn, operand, by)
        bodies = Bodies.of(eqn)
        if not bodies.jaxprs or operand < bodies.first or operand in bodies.carry:
            part = name in _OVERWRITE and not operand and not by
            source = table.place.at(eqn).source
            use = Use(stack or UNKNOWN, source, bool(by), part, by)
            return Counter({(id(eqn) * (name == 'select_n'), use): 1})
        found: Found = Counter()
        within = [
            (
                body.place.source,
                self._uses_of(body, body.jaxpr.invars[operand - bodies.first]),
            )
            for body in table.inner[id(eqn)]
        ]
        below = _below(stack, _name_of(eqn))
        outputs = dict[tuple[int, str], None]()
        for source, inner in within:
            for (number, use), times in inner.items():
                if isinstance(use, str) and number >= len(bodies.carry):
                    outputs[number, use] = None
                    continue
                if isinstance(use, str):
                    use = Use(UNKNOWN, source, bool(use), by=use)
                place = _below(below, use.place.removeprefix(UNKNOWN))
                found[number, dataclasses.replace(use, place=place)] += times
        for number, by in outputs:
            found.update(self._output(table, eqn, number, by))
        return found

    def _output(self, table: Table, eqn: JaxprEqn, number: int, by: str) -> Found:
        """The uses of an output of an equation that is an input in another form.

        Args:
            table: the facts around the equation.
            eqn: the equation.
            number: the number of the output.
            by: what stops the gradient of the input.
        """
        var = eqn.outvars[number]
        found = self._uses_of(table, var)
        if not by or table.facts.get(var, UNREAD).by:
            return found
        stopped: Found = Counter()
        for (key, use), times in found.items():
            if isinstance(use, Use):
                use = dataclasses.replace(use, stopped=True, part=False, by=by)
            stopped[key, by if isinstance(use, str) else use] += times
        return stopped


def _below(stack: str, name: str) -> str:
    return '/'.join(filter(None, (stack, name)))


def _name_of(eqn: JaxprEqn) -> str:
    """How the bodies of an equation are called in a stack of names."""
    name = eqn.primitive.name
    if name in JITTED:
        return f'jit({eqn.params.get("name", "")})'
    return 'checkpoint' if jaxprs.checkpoint_of(eqn) else name

"""A program as a list of steps: an equation each, and where its body stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn, Literal, Var

from flax_sg.internals import jaxprs
from flax_sg.internals.types import AnyJaxpr, Array, Atom, Aval
from flax_sg.programs import sources

UNKNOWN = 'unknown'

# A value by its number, or a constant as it is.
Value: TypeAlias = int | Literal


class Site(NamedTuple):
    """Where a body stands: JAX has one body of a function that is called twice.

    Attributes:
        call: the equation that runs it; None for the program.
        outer: the site of that equation.
    """

    call: JaxprEqn | None = None
    outer: Site | None = None

    def frames(self, eqn: JaxprEqn) -> Iterator[sources.Frame]:
        """The lines of the user that made an equation of the body, innermost first."""
        yield from sources.frames_of(eqn, self.function())
        if self.call is not None and self.outer is not None:
            yield from self.outer.frames(self.call)

    def source(self, eqn: JaxprEqn) -> str:
        """The nearest of these lines, in words."""
        return sources.nearest(self.frames(eqn)) or UNKNOWN

    def is_backward(self, eqn: JaxprEqn) -> bool:
        """Whether an equation of the body is of a backward pass in the program."""
        if 'transpose(' in jaxprs.name_stack_of(eqn):
            return True
        if self.call is None or self.outer is None:
            return False
        return self.outer.is_backward(self.call)

    def function(self) -> str:
        """The innermost jitted function that has the body in it, see ``frames_of``."""
        if self.call is None or self.outer is None:
            return ''
        if self.call.primitive.name in jaxprs.JITTED:
            return sources.function_in(self.call)
        return self.outer.function()


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation, with the numbers of the values that it reads and makes.

    Attributes:
        eqn: the equation.
        site: where the body stands that it is in.
        ins: what it reads.
        outs: what it makes.
    """

    eqn: JaxprEqn
    site: Site
    ins: Sequence[Value]
    outs: Sequence[int]

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.eqn.primitive.name

    @property
    def source(self) -> str:
        """The line of the user."""
        return self.site.source(self.eqn)

    @property
    def described(self) -> str:
        """What it does, and the line of the user."""
        return f'{sources.operation(self.eqn)} at {self.source}'

    def read(self) -> list[int]:
        """The values that it reads, without constants."""
        return numbers_in(self.ins)


class Program:
    """The steps of a program so far; ``flow`` and ``ahead`` each look into bodies.

    Attributes:
        steps: the steps, in order.
        avals: the type of each value.
    """

    def __init__(self) -> None:
        """Begins a program."""
        self.steps = list[Step]()
        self.avals = list[Aval]()

    def new(self, aval: Aval) -> int:
        """Adds a value of a type; returns its number."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, var: Var, value: Array) -> Value:
        """The value of a constant that a jaxpr is closed over."""
        return Literal(value, var.aval)

    def whole(self, eqn: JaxprEqn, read: Sequence[Value], site: Site) -> Sequence[int]:
        """Adds an equation as it is; returns its outputs."""
        outs = tuple(self.new(var.aval) for var in eqn.outvars)
        self.steps.append(Step(eqn, site, tuple(read), outs))
        return outs

    def add(self, eqn: JaxprEqn, read: Sequence[Value], site: Site) -> Sequence[Value]:
        """Adds an equation, as it is or in parts; returns its outputs."""
        return self.whole(eqn, read, site)

    def walk(
        self,
        jaxpr: AnyJaxpr,
        ins: Iterable[Value],
        site: Site,
        add: Callable[..., Sequence[Value]] | None = None,
    ) -> list[Value]:
        """Adds the steps of a jaxpr, open or closed; returns its outputs.

        Args:
            jaxpr: the jaxpr.
            ins: its inputs.
            site: where it stands.
            add: adds one equation, by default as ``self.add``.
        """
        body, add = jaxprs.opened(jaxpr), add or self.add
        values: dict[Atom, Value] = dict(zip(body.invars, ins, strict=True))
        for var, value in zip(
            body.constvars, getattr(jaxpr, 'consts', ()), strict=True
        ):
            values[var] = self.constant(var, value)

        def at(atom: Atom) -> Value:
            return atom if isinstance(atom, Literal) else values[atom]

        for eqn in body.eqns:
            outs = add(eqn, [*map(at, eqn.invars)], site)
            values.update(zip(eqn.outvars, outs, strict=True))
        return [*map(at, body.outvars)]


def numbers_in(values: Iterable[Value]) -> list[int]:
    """The numbers among some values, without constants."""
    return [x for x in values if isinstance(x, int)]


def is_in(value: Value, values: set[int]) -> bool:
    """Whether a value is in a set; a constant never is."""
    return isinstance(value, int) and value in values


def makers_of(steps: Iterable[Step]) -> dict[int, Step]:
    """For each value the step that makes it."""
    return {n: step for step in steps for n in step.outs}


def made_by(
    steps: Sequence[Step],
    values: Iterable[int],
    wanted: Iterable[Step] = (),
    known: Iterable[int] = (),
) -> list[Step]:
    """The steps that make some values and all that those need, in order."""
    maker = makers_of(steps)
    needed, done = {*wanted}, {*known}
    todo = [*values, *(x for step in wanted for x in step.read())]
    while todo:
        value = todo.pop()
        if value not in done and value in maker:
            done.add(value)
            needed.add(maker[value])
            todo += maker[value].read()
    return [step for step in steps if step in needed]


def run(
    steps: Iterable[Step], values: Mapping[int, Array], asked: Iterable[Value]
) -> list[Array]:
    """Runs some steps on the values that they read; returns the values asked for."""
    known = dict(values)

    def value_of(x: Value) -> Array:
        return known[x] if isinstance(x, int) else x.val

    for step in steps:
        out = jaxprs.bind(step.eqn, [*map(value_of, step.ins)])
        known.update(zip(step.outs, out, strict=True))
    return [*map(value_of, asked)]

"""Writes a program out as steps, and notes of each value what it depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import Literal

from flax_sg.ahead.steps import Step, Value, numbers_in
from flax_sg.flow.flat import Site
from flax_sg.internals import jaxprs

# Adds the parts of an equation to a walk, and returns the outputs; None if the equation
# has to stay whole. It is called with the walk, the equation, what it reads, and where
# the equation stands.
Rule: TypeAlias = Callable[['Walk', Any, Sequence[Value], Site], Sequence[Value] | None]


class Walk:
    """The steps of a program so far, and what their values depend on.

    Calls of ``jax.jit`` are inlined. Of an equation that reads what changes, such as a
    loop, the part that does not becomes steps of its own.

    Attributes:
        steps: the steps, in order.
        avals: the type of each value.
        constants: the values that are constants of the program.
        changing: the values that change from step to step.
        data: the values that depend on the data of a batch, and do not change.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        """Begins a walk.

        Args:
            rules: how equations are taken apart, by the name of the primitive.
        """
        self._rules = rules
        self.steps = list[Step]()
        self.avals = list[Any]()
        self.constants = dict[int, Any]()
        self.changing, self.data = set[int](), set[int]()

    def new(self, aval: Any) -> int:
        """Another value."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def add(self, step: Step) -> None:
        """Another step."""
        self.steps.append(step)
        read = step.read()
        if not self.changing.isdisjoint(read):
            self.changing.update(step.outs)
        elif not self.data.isdisjoint(read):
            self.data.update(step.outs)

    def walk(self, closed: Any, ins: Sequence[Value], site: Site) -> list[Value]:
        """Adds the steps of a jaxpr; returns its outputs."""
        jaxpr = jaxprs.opened(closed)
        numbers: dict[Any, Value] = dict(zip(jaxpr.invars, ins, strict=True))
        consts = getattr(closed, 'consts', ())
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            numbers[var] = number = self.new(var.aval)
            self.constants[number] = value

        def at(atom: Any) -> Value:
            return atom if isinstance(atom, Literal) else numbers[atom]

        for eqn in jaxpr.eqns:
            read = tuple(map(at, eqn.invars))
            outs: Sequence[Value] | None = None
            if jaxprs.is_plain_jit(eqn):
                outs = self.walk(eqn.params['jaxpr'], read, Site(eqn, site))
            elif self._is_mixed(eqn, read):
                rule = self._rules.get(eqn.primitive.name)
                outs = rule and rule(self, eqn, read, site)
            if outs is None:
                outs = tuple(self.new(var.aval) for var in eqn.outvars)
                self.add(Step(eqn, site, read, outs))
            numbers.update(zip(eqn.outvars, outs, strict=True))
        return [at(atom) for atom in jaxpr.outvars]

    def _is_mixed(self, eqn: Any, read: Sequence[Value]) -> bool:
        """Whether an equation reads what changes, and data, and has no effect."""
        numbers = set(numbers_in(read))
        is_split = numbers & self.changing and numbers & self.data
        return bool(is_split) and not eqn.effects

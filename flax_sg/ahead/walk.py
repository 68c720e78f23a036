"""Writes a program out as steps, and notes of each value whether it changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import Literal

from flax_sg.ahead.examples import Batch
from flax_sg.ahead.steps import Step, Value, is_in
from flax_sg.flow.flat import Site
from flax_sg.internals import jaxprs
from flax_sg.internals.equal import identity_of

# Adds the parts of an equation to a walk, and returns the outputs; None if the equation
# has to stay whole. It is called with the walk, the equation, what it reads, and where
# the equation stands.
Rule: TypeAlias = Callable[['Walk', Any, Sequence[Value], Site], Sequence[Value] | None]


class Walk:
    """The steps of a program so far, and what their values depend on.

    Calls of ``jax.jit`` are inlined. Of an equation that reads what changes, such as a
    loop, the part that does not becomes steps of its own.

    Attributes:
        batch: with ``examples=True`` where the examples are in each value.
        steps: the steps, in order.
        avals: the type of each value.
        constants: the values that are constants of the program.
        changing: the values that change from step to step.
        data: the values that depend on the data of a batch, and do not change.
        runs: the values that are joined of others, along the first axis.
    """

    def __init__(self, rules: Sequence[Rule], batch: Batch | None) -> None:
        """Begins a walk.

        Args:
            rules: what takes an equation apart; the first that does.
            batch: where the examples are in the inputs.
        """
        self._rules, self.batch = rules, batch
        self.steps = list[Step]()
        self.avals = list[Any]()
        self.constants = dict[int, Any]()
        self.changing, self.data = set[int](), set[int]()
        self.runs: dict[Value, Sequence[Value]] = {}
        # The numbers of constants by their id, and what fixed steps have made.
        self._numbers = dict[int, int]()
        self._made = dict[Any, tuple[int, ...]]()

    def new(self, aval: Any) -> int:
        """Another value."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def walk(self, closed: Any, ins: Sequence[Value], site: Site) -> list[Value]:
        """Adds the steps of a jaxpr; returns its outputs."""
        jaxpr = jaxprs.opened(closed)
        numbers: dict[Any, Value] = dict(zip(jaxpr.invars, ins, strict=True))
        for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = self.new(var.aval)
                self.constants[self._numbers[id(value)]] = value
                if self.batch is not None:
                    self.batch.note(self._numbers[id(value)], value)
            numbers[var] = self._numbers[id(value)]

        def at(atom: Any) -> Value:
            return atom if isinstance(atom, Literal) else numbers[atom]

        for eqn in jaxpr.eqns:
            read = [*map(at, eqn.invars)]
            outs = self._in_parts(eqn, read, site)
            if outs is None:
                outs = self.whole(eqn, read, site)
            numbers.update(zip(eqn.outvars, outs, strict=True))
        return [*map(at, jaxpr.outvars)]

    def traced(
        self, fun: Callable[..., Any], ins: Sequence[Value], site: Site
    ) -> list[Value]:
        """Adds the steps of a function of arrays; returns its outputs."""
        avals = (x.aval if isinstance(x, Literal) else self.avals[x] for x in ins)
        return self.walk(jax.make_jaxpr(fun)(*map(jaxprs.shape_of, avals)), ins, site)

    def whole(self, eqn: Any, read: Sequence[Value], site: Site) -> Sequence[int]:
        """Adds an equation as it is; returns its outputs.

        Of equal ones that do not change there is one.
        """
        is_new = any(is_in(x, self.changing) for x in read)
        same = None if is_new else identity_of(eqn, read)
        if same in self._made:
            return self._made[same]
        outs = tuple(self.new(var.aval) for var in eqn.outvars)
        self._add(Step(eqn, site, tuple(read), outs))
        if same is not None and self.changing.isdisjoint(outs):
            self._made[same] = outs
        return outs

    def _add(self, step: Step) -> None:
        self.steps.append(step)
        read = step.read()
        # What an effect returns, such as a read of a ref, is another value each time.
        if jaxprs.has_effect(step.eqn) or not self.changing.isdisjoint(read):
            self.changing.update(step.outs)
        elif self.batch is not None:
            self.changing.update(self.batch.mixed_in(step))
        if not self.data.isdisjoint(read):
            self.data.update(step.outs)
            self.data -= self.changing

    def _in_parts(
        self, eqn: Any, read: Sequence[Value], site: Site
    ) -> Sequence[Value] | None:
        """Adds the parts of an equation; None if it has to stay whole."""
        if jaxprs.is_plain_jit(eqn) or eqn.primitive.name in jaxprs.CLOSED:
            return self.walk(jaxprs.closed_body_of(eqn), read, Site(eqn, site))
        if jaxprs.has_effect(eqn):
            return None
        found = (rule(self, eqn, read, site) for rule in self._rules)
        return next((outs for outs in found if outs is not None), None)

"""Writes a program out as steps, and notes of each value whether it changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from flax_sg.ahead.examples import Batch
from flax_sg.ahead.writes import handed_through
from flax_sg.internals import jaxprs
from flax_sg.internals.types import Array
from flax_sg.programs.equal import identity_of
from flax_sg.programs.steps import Program, Site, Step, Value, is_in

# Adds the parts of an equation to a walk, and returns the outputs; None if the equation
# has to stay whole. It is called with the walk, the equation, what it reads, and where
# the equation stands.
Rule: TypeAlias = Callable[
    ['Walk', JaxprEqn, Sequence[Value], Site], Sequence[Value] | None
]


def _handed_on(eqn: JaxprEqn, read: Sequence[Value]) -> list[Value] | None:
    """The values that an equation returns as they are, in order; None for others.

    A stop, or a function whose rule alone does something, only says how a value is
    differentiated. Late stops what does not change: there it says nothing.
    """
    if eqn.primitive.name == 'stop_gradient':
        return [*read]
    if eqn.primitive.name not in jaxprs.CUSTOM_CALLS:
        return None
    places = handed_through(jaxprs.closed_body_of(eqn))
    return None if None in places else [read[n] for n in places if n is not None]


class Walk(Program):
    """The steps of a program so far, and what their values depend on.

    Calls of ``jax.jit`` are inlined. Of an equation that reads what changes, such as a
    loop, the part that does not becomes steps of its own.

    Attributes:
        batch: with ``examples=True`` where the examples are in each value.
        constants: the values that are constants of the program.
        changing: the values that change from step to step.
        data: the values that depend on the data of a batch.
        runs: the values that are joined of others, along the first axis.
    """

    def __init__(self, rules: Sequence[Rule], batch: Batch | None) -> None:
        """Begins a walk.

        Args:
            rules: what takes an equation apart; the first that does.
            batch: where the examples are in the inputs.
        """
        super().__init__()
        self._rules, self.batch = rules, batch
        self.constants = dict[int, Array]()
        self.changing, self.data = set[int](), set[int]()
        self.runs: dict[Value, Sequence[Value]] = {}
        # The numbers of constants by their id, and what fixed steps have made.
        self._numbers = dict[int, int]()
        self._made = dict[Hashable, Sequence[int]]()

    def constant(self, var: Var, value: Array) -> Value:
        """The value of a constant: one of each array."""
        if id(value) not in self._numbers:
            number = self._numbers[id(value)] = self.new(var.aval)
            self.constants[number] = value
            if self.batch is not None:
                self.batch.note(number, value)
        return self._numbers[id(value)]

    def traced(
        self, fun: Callable[..., Any], ins: Sequence[Value], site: Site
    ) -> list[Value]:
        """Adds the steps of a function of arrays; returns its outputs."""
        avals = (x.aval if isinstance(x, Literal) else self.avals[x] for x in ins)
        return self.walk(jax.make_jaxpr(fun)(*map(jaxprs.shape_of, avals)), ins, site)

    def whole(self, eqn: JaxprEqn, read: Sequence[Value], site: Site) -> Sequence[int]:
        """Adds an equation as it is; returns its outputs.

        Of equal ones that do not change there is one.
        """
        is_new = any(is_in(x, self.changing) for x in read)
        same = None if is_new else identity_of(eqn, read)
        if same in self._made:
            return self._made[same]
        outs = super().whole(eqn, read, site)
        self._note(self.steps[-1])
        if same is not None and self.changing.isdisjoint(outs):
            self._made[same] = outs
        return outs

    def _note(self, step: Step) -> None:
        read = step.read()
        # What an effect returns, such as a read of a ref, is another value each time.
        if jaxprs.has_effect(step.eqn) or not self.changing.isdisjoint(read):
            self.changing.update(step.outs)
        elif self.batch is not None:
            self.changing.update(self.batch.mixed_in(step))
        if not self.data.isdisjoint(read):
            self.data.update(step.outs)

    def add(self, eqn: JaxprEqn, read: Sequence[Value], site: Site) -> Sequence[Value]:
        """Adds an equation, or the parts that it can be taken apart into."""
        is_new = any(is_in(x, self.changing) for x in read)
        if not is_new and (same := _handed_on(eqn, read)) is not None:
            return same
        if jaxprs.is_plain_jit(eqn) or eqn.primitive.name in jaxprs.CLOSED:
            return self.walk(jaxprs.closed_body_of(eqn), read, Site(eqn, site))
        if not jaxprs.has_effect(eqn):
            for rule in self._rules:
                if (outs := rule(self, eqn, read, site)) is not None:
                    return outs
        return self.whole(eqn, read, site)

"""Writes a program out as steps, and notes of each value what it depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from flax_sg.ahead.constants import constant, folded, has_zeros
from flax_sg.ahead.rows import Mask, Operation, Rows, changing_rows
from flax_sg.ahead.steps import Split, Step, Value, numbers_in
from flax_sg.flow.flat import Site
from flax_sg.internals import jaxprs

# Adds the parts of an equation to a walk, and returns the outputs; None if the equation
# has to stay whole. It is called with the walk, the equation, what it reads, and where
# the equation stands.
Rule: TypeAlias = Callable[['Walk', Any, Sequence[Value], Site], Sequence[Value] | None]

# Whether a step mixes the examples of a batch, by the step and the types of all values.
# What it makes then changes with the batch.
Mixes: TypeAlias = Callable[[Step, Sequence[Any]], bool]


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
        rows: the values of which some rows change.
        makers: the step that makes each value.
    """

    def __init__(self, rules: Mapping[str, Rule], mixes: Mixes | None = None) -> None:
        """Begins a walk.

        Args:
            rules: how equations are taken apart, by the name of the primitive.
            mixes: by default no step mixes examples.
        """
        self._rules, self._mixes = rules, mixes
        self.steps = list[Step]()
        self.avals = list[Any]()
        self.constants = dict[int, Any]()
        self.changing, self.data = set[int](), set[int]()
        self.rows: dict[int, Rows] = {}
        self.makers: dict[int, Step] = {}
        self._known: dict[int, Any] = {}

    def new(self, aval: Any) -> int:
        """Another value."""
        self.avals.append(aval)
        return len(self.avals) - 1

    def add(self, step: Step) -> None:
        """Another step."""
        self.steps.append(step)
        self.makers.update(dict.fromkeys(step.outs, step))
        read = step.read()
        is_new = not self.changing.isdisjoint(read)
        if is_new or (self._mixes is not None and self._mixes(step, self.avals)):
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
            outs = self._in_parts(eqn, read, site)
            if outs is None:
                outs = self.whole(eqn, read, site)
            numbers.update(zip(eqn.outvars, outs, strict=True))
        return [at(atom) for atom in jaxpr.outvars]

    def traced(
        self, fun: Callable[..., Any], ins: Sequence[Value], site: Site
    ) -> list[Value]:
        """Adds the steps of a function of arrays; returns its outputs."""
        shapes = (jaxprs.shape_of(self._aval(x)) for x in ins)
        return self.walk(jax.make_jaxpr(fun)(*shapes), ins, site)

    def _aval(self, value: Value) -> Any:
        return value.aval if isinstance(value, Literal) else self.avals[value]

    def whole(self, eqn: Any, read: Sequence[Value], site: Site) -> Sequence[int]:
        """Adds an equation as it is; returns its outputs."""
        outs = tuple(self.new(var.aval) for var in eqn.outvars)
        self.add(Step(eqn, site, tuple(read), outs))
        return outs

    def _in_parts(
        self, eqn: Any, read: Sequence[Value], site: Site
    ) -> Sequence[Value] | None:
        """Adds the parts of an equation; None if it has to stay whole."""
        if jaxprs.is_plain_jit(eqn):
            return self.walk(eqn.params['jaxpr'], read, Site(eqn, site))
        numbers = set(numbers_in(read))
        if jaxprs.has_effect(eqn) or not numbers & self.changing:
            return None
        rule = self._rules.get(eqn.primitive.name) if numbers & self.data else None
        if rule is not None:
            return rule(self, eqn, read, site)
        return self._by_rows(eqn, read, site)

    def _by_rows(
        self, eqn: Any, read: Sequence[Value], site: Site
    ) -> Sequence[Value] | None:
        """Adds an equation of which some rows are known, and the part that is."""
        masks = [*map(self.changes, read)]
        masks = changing_rows(
            Operation(eqn, masks, lambda number: self.constant(read[number]))
        )
        if masks is None or all(mask.all() for mask in masks):
            return None
        if any(self._is_without_twin(x) for x in read):
            return None
        fixed = [self.fixed(x, Site(eqn, site)) for x in read]
        twins = self.whole(eqn, fixed, site)
        if not any(mask.any() for mask in masks):
            return twins
        outs = [*self.whole(eqn, read, site)]
        for n, (mask, twin) in enumerate(zip(masks, twins, strict=True)):
            if not mask.any():
                outs[n] = twin
            elif not mask.all():
                self.rows[outs[n]] = Rows(mask, twin)
        return outs

    def is_of_data(self, step: Step) -> bool:
        """Whether a step depends on data, and on nothing that changes."""
        read = step.read()
        return self.changing.isdisjoint(read) and not self.data.isdisjoint(read)

    def change(self, value: Value) -> bool | Mask:
        """Whether a value changes, or which of its rows."""
        mask = self.changes(value)
        return mask if mask.any() and not mask.all() else bool(mask.any())

    def twins(self, read: Sequence[Value], parts: Split) -> list[Value]:
        """What the body of an equation reads besides, for rows that do not change."""
        return [self.rows[n].twin for n in numbers_in(read[n] for n in parts.rows)]

    def changes(self, value: Value) -> Mask:
        """Which rows of a value change."""
        aval = self._aval(value)
        if isinstance(value, Literal) or value not in self.changing:
            return np.zeros(aval.shape[:1], bool)
        rows = self.rows.get(value)
        return rows.changes if rows else np.ones(aval.shape[:1], bool)

    def _is_without_twin(self, value: Value) -> bool:
        """Whether a value changes as a whole, and zeros cannot stand for it."""
        if isinstance(value, Literal) or value in self.rows:
            return False
        return value in self.changing and not has_zeros(self.avals[value])

    def fixed(self, value: Value, site: Site) -> Value:
        """What stands for a value where the rows that change are not read."""
        if isinstance(value, Literal) or value not in self.changing:
            return value
        if value in self.rows:
            return self.rows[value].twin
        aval = self.avals[value]
        return self.traced(lambda: [jnp.zeros(aval.shape, aval.dtype)], [], site)[0]

    def constant(self, value: Value) -> Any:
        """The value of a constant of the program, or what is made of these; or None."""
        if isinstance(value, Literal):
            return constant(value.val)
        if value not in self._known:
            found, step = None, self.makers.get(value)
            if value in self.constants:
                found = constant(self.constants[value])
            elif step is not None:
                ins = [*map(self.constant, step.ins)]
                found = folded(step, ins, step.outs.index(value))
            self._known[value] = found
        return self._known[value]

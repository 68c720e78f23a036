"""Through which equations of a jaxpr a derivative flows: JAX is asked.

The equation alone is differentiated, on shapes: of the program that comes out, only the
tangents count, and which of them depends on which. So a rule of ``custom_jvp`` or
``custom_vjp`` counts as it is written, and a primitive is cut if its own rule cuts it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Literal, Var

from flax_sg.flow.dependence import (
    FROM_NOTHING,
    REFUSED,
    Dependence,
    Rows,
    bit_of,
    every,
    opened,
)
from flax_sg.internals import jaxprs

# What hands on zeros as zeros; enough for the zeros that people write in a rule.
_SHAPES_ONLY = frozenset(
    (
        *('broadcast_in_dim', 'convert_element_type', 'reshape', 'squeeze', 'copy'),
        *('transpose', 'stop_gradient', 'neg'),
    )
)


def has_tangent(aval: Any) -> bool:
    """Whether a derivative may flow through values of a type."""
    dtype = getattr(aval, 'dtype', np.int32)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        # Keys have none; others have, as those by which fp8 layers hand on a maximum.
        return not jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return jnp.issubdtype(dtype, np.inexact)


def values() -> Dependence:
    """Dependence on values, whether or not there is a derivative."""
    return Dependence(every, lambda aval: True, control=True)


class Derivatives:
    """Answers for equations, remembered.

    Attributes:
        refused: what JAX said of the equations that it cannot differentiate, with
            them.
        unknown: the equations that cannot be asked about alone, such as collectives
            without their axis, and why: there all is taken to flow.
    """

    def __init__(self) -> None:
        self.unknown: list[tuple[JaxprEqn, Exception]] = []
        self.refused: list[tuple[JaxprEqn, Exception | None]] = []
        # Primitives through which everything was seen to flow. To say the same again
        # for other shapes is on the safe side.
        self._smooth: set[Hashable] = set()
        self._known: dict[Hashable, Rows] = {}

    def __call__(self, eqn: JaxprEqn) -> Rows:
        """The rows of an equation without control flow."""
        name = eqn.primitive.name
        if any(map(_is_ref, eqn.invars)) or name.endswith('callback'):
            return self._refuse(eqn, None)
        safe = _all_that_has_tangents(eqn)
        if any(map(_is_ref, eqn.outvars)):
            return safe  # What it is read for is asked there.
        # A primitive of a user, whose rule stands in its class; see
        # ``jax.experimental.hijax``.
        owner = eqn.params.get('_prim')
        has_rule = 'vjp' in name or owner is not None
        if has_rule:  # And it may make cotangents out of nothing.
            safe = [row and row | bit_of(eqn, FROM_NOTHING) for row in safe]
        # A rule that is told which inputs are perturbed may do anything for others.
        params = eqn.params if owner is None else owner.params
        if not any(safe) or params.get('symbolic_zeros'):
            return safe
        # Each rule is a rule of its own.
        own = has_rule or name.startswith('custom_')
        kind = None if own else _kind_of(eqn)
        if kind in self._smooth:
            return safe
        key = kind and _key_of(kind, eqn)
        if key in self._known:
            return self._known[key]
        try:
            rows = _backward(eqn) if has_rule else _forward(eqn)
        except NotImplementedError as error:
            return self._refuse(eqn, error)
        except Exception as error:  # It may need what is known in its place only.
            self.unknown.append((eqn, error))
            return safe
        if kind is not None and rows == safe:
            self._smooth.add(kind)
        elif key is not None:
            self._known[key] = rows
        return rows

    def _refuse(self, eqn: JaxprEqn, error: Exception | None) -> Rows:
        self.refused.append((eqn, error))
        bit = bit_of(eqn, REFUSED)
        return [bit if has_tangent(var.aval) else 0 for var in eqn.invars]


def _is_ref(var: Any) -> bool:
    """Whether a variable of a jaxpr is a mutable array."""
    return 'Ref' in type(var.aval).__name__


def _all_that_has_tangents(eqn: JaxprEqn) -> Rows:
    outs = sum(1 << n for n, var in enumerate(eqn.outvars) if has_tangent(var.aval))
    return [
        outs if isinstance(var, Var) and has_tangent(var.aval) else 0
        for var in eqn.invars
    ]


def _kind_of(eqn: JaxprEqn) -> Hashable:
    ins = tuple(str(getattr(var.aval, 'dtype', '')) for var in eqn.invars)
    outs = tuple(str(getattr(var.aval, 'dtype', '')) for var in eqn.outvars)
    return eqn.primitive, ins, outs


def _key_of(kind: Hashable, eqn: JaxprEqn) -> Hashable:
    """What says all of an equation, if it can be compared."""
    if any(isinstance(var, Literal) for var in eqn.invars):
        return None
    places = tuple(eqn.invars.index(var) for var in eqn.invars)
    shapes = tuple(getattr(var.aval, 'shape', ()) for var in eqn.invars)
    return kind, places, shapes, frozenset(eqn.params.items())


class _Function:
    """An equation as a function of what has tangents in it.

    Attributes:
        inputs: the shapes of its variables.
        takes: which of them have tangents.
        gives: which outputs of the equation have.
    """

    def __init__(self, eqn: JaxprEqn) -> None:
        self._vars: list[Any] = list(
            dict.fromkeys(v for v in eqn.invars if not isinstance(v, Literal))
        )
        self._run = jaxprs.function_of(eqn, self._vars)
        self.inputs = list(map(shape_of, self._vars))
        self.takes = [n for n, v in enumerate(self._vars) if has_tangent(v.aval)]
        self.gives = [n for n, v in enumerate(eqn.outvars) if has_tangent(v.aval)]

    def at(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The function near some values."""

        def call(*taken: Any) -> list[Any]:
            full = list(inputs)
            for number, value in zip(self.takes, taken, strict=True):
                full[number] = value
            out = self._run(*full)
            return [out[number] for number in self.gives]

        return call

    def taken(self, inputs: Sequence[Any]) -> list[Any]:
        """Those of some inputs that have tangents."""
        return [inputs[number] for number in self.takes]

    def rows(self, eqn: JaxprEqn, found: Sequence[int], constant: int = 0) -> Rows:
        """The rows of the equation, from those of what has tangents in it.

        Args:
            eqn: the equation.
            found: the rows, of outputs that have tangents alone.
            constant: the inputs that have a cotangent whatever those of outputs are.
        """
        nothing = bit_of(eqn, FROM_NOTHING)
        spread = [
            sum(1 << out for n, out in enumerate(self.gives) if row >> n & 1)
            | (nothing if constant >> number & 1 else 0)
            for number, row in enumerate(found)
        ]
        of = dict(zip(self.taken(self._vars), spread, strict=True))
        return [0 if isinstance(v, Literal) else of.get(v, 0) for v in eqn.invars]


def shape_of(var: Any) -> jax.ShapeDtypeStruct:
    """The type of a variable of a jaxpr, to trace with."""
    weak = getattr(var.aval, 'weak_type', False)
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=weak)


def _forward(eqn: JaxprEqn) -> Rows:
    """The rows of an equation, from its tangents."""
    function = _Function(eqn)

    def tangents(inputs: Sequence[Any], given: Sequence[Any]) -> Any:
        return jax.jvp(function.at(inputs), function.taken(inputs), given)[1]

    shapes = function.inputs
    closed = jax.make_jaxpr(tangents)(shapes, function.taken(shapes))
    rows = values().of(closed)[len(shapes) :]
    # A tangent out of nothing is there whatever comes in.
    constant = _constants(closed, rows)
    return function.rows(eqn, [row | constant for row in rows])


def _backward(eqn: JaxprEqn) -> Rows:
    """The rows of an equation, from its cotangents."""
    function = _Function(eqn)

    def cotangents(inputs: Sequence[Any], given: Sequence[Any]) -> Any:
        return jax.vjp(function.at(inputs), *function.taken(inputs))[1](list(given))

    given = [shape_of(eqn.outvars[number]) for number in function.gives]
    closed = jax.make_jaxpr(cotangents)(function.inputs, given)
    columns = values().of(closed)[len(function.inputs) :]
    constant = _constants(closed, columns)
    found = [
        sum(1 << n for n, column in enumerate(columns) if column >> number & 1)
        for number in range(len(function.takes))
    ]
    return function.rows(eqn, found, constant)


def _constants(closed: Any, rows: Sequence[int]) -> int:
    """The outputs that depend on nothing, and are not zeros."""
    reached = 0
    for row in rows:
        reached |= row
    zeros = _zeros(opened(closed), [_is_zero(const) for const in closed.consts])
    return sum(
        1 << n for n, zero in enumerate(zeros) if not zero and not reached >> n & 1
    )


def _zeros(jaxpr: Any, consts: Sequence[bool]) -> list[bool]:
    """For each output of a jaxpr whether it is written as zeros."""
    known: dict[Any, bool] = dict(zip(jaxpr.constvars, consts, strict=True))

    def zero(var: Any) -> bool:
        if isinstance(var, Literal):
            return _is_zero(var.val)
        return known.get(var, False)

    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _SHAPES_ONLY:
            known[eqn.outvars[0]] = zero(eqn.invars[0])
        elif eqn.primitive.name in jaxprs.JITTED:
            body = eqn.params['jaxpr']
            inner = _zeros(body.jaxpr, list(map(_is_zero, body.consts)))
            known.update(zip(eqn.outvars, inner, strict=True))
    return [zero(var) for var in jaxpr.outvars]


def _is_zero(value: Any) -> bool:
    return not isinstance(value, Tracer) and not np.any(np.asarray(value))

"""Through which equations of a jaxpr a derivative flows: JAX is asked.

JAX differentiates one equation alone, on shapes. The jaxpr of that derivative says
which tangent depends on which. So a rule of ``custom_jvp`` or ``custom_vjp`` counts as
it is written, and a primitive stops a gradient if its own rule stops it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable
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
    bit,
    bits,
)
from flax_sg.internals import jaxprs

# Primitives that make zeros of zeros: those by which people write zeros in a rule.
_KEEPS_ZEROS = frozenset(
    (
        *('broadcast_in_dim', 'convert_element_type', 'reshape', 'squeeze', 'copy'),
        *('transpose', 'stop_gradient', 'neg'),
    )
)


def has_tangent(aval: Any) -> bool:
    """Whether a derivative may flow through values of a type."""
    dtype = getattr(aval, 'dtype', np.int32)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        # Random keys have none. The maxima that fp8 layers keep have one.
        return not jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return jnp.issubdtype(dtype, np.inexact)


class Derivatives(Dependence):
    """Differentiable dependence.

    Attributes:
        refused: the equations that JAX cannot differentiate, with its errors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[tuple[JaxprEqn, Exception | None]] = []
        # Primitives through which everything flowed once. Saying the same of other
        # shapes is safe.
        self._smooth: set[Hashable] = set()
        # The rows of others, by all that is known of the equation.
        self._others: dict[Hashable, Rows] = {}

    def carries(self, aval: Any) -> bool:
        """Whether a derivative may flow through values of a type."""
        return has_tangent(aval)

    def leaf(self, eqn: JaxprEqn) -> Rows:
        """The rows of an equation that runs no jaxpr."""
        name = eqn.primitive.name
        if any(map(_is_ref, eqn.invars)) or name.endswith('callback'):
            return self._refuse(eqn, None)
        outs = bits(n for n, var in enumerate(eqn.outvars) if has_tangent(var.aval))
        safe = [
            outs if isinstance(var, Var) and has_tangent(var.aval) else 0
            for var in eqn.invars
        ]
        if any(map(_is_ref, eqn.outvars)):
            return safe  # The equations that read the new array are refused.
        # A primitive of a user, ``jax.experimental.hijax``: its class holds the rule.
        owner = jaxprs.user_primitive_of(eqn)
        has_rule = 'vjp' in name or owner is not None
        if has_rule:
            safe = [row and row | FROM_NOTHING for row in safe]
        # A rule that sees which inputs are perturbed may do anything for others.
        params = eqn.params if owner is None else owner.params
        if not any(safe) or params.get('symbolic_zeros'):
            return safe
        # Two equations of one primitive may have two rules of users.
        kind = None if has_rule or name.startswith('custom_') else _kind_of(eqn)
        if kind in self._smooth:
            return safe
        known = kind and (kind, str(eqn.params), tuple(map(_text_of, eqn.invars)))
        if known in self._others:
            return self._others[known]
        try:
            rows = _differentiated(eqn, backwards=has_rule)
        except NotImplementedError as error:
            return self._refuse(eqn, error)
        except Exception:
            return safe  # Not alone: collectives need their axis.
        if kind is not None and rows == safe:
            self._smooth.add(kind)
        elif kind is not None:
            self._others[known] = rows
        return rows

    def _refuse(self, eqn: JaxprEqn, error: Exception | None) -> Rows:
        self.refused.append((eqn, error))
        return [REFUSED if has_tangent(var.aval) else 0 for var in eqn.invars]


def _is_ref(var: Any) -> bool:
    """Whether a variable of a jaxpr is a mutable array."""
    return 'Ref' in type(var.aval).__name__


def _text_of(var: Any) -> str:
    return str(var.val) if isinstance(var, Literal) else str(var.aval)


def _kind_of(eqn: JaxprEqn) -> Hashable:
    """The primitive of an equation and the types that it maps."""
    ins, outs = (
        tuple(str(getattr(var.aval, 'dtype', '')) for var in variables)
        for variables in (eqn.invars, eqn.outvars)
    )
    return eqn.primitive, ins, outs


def _differentiated(eqn: JaxprEqn, backwards: bool) -> Rows:
    """The rows of an equation, from the jaxpr of its derivative.

    Args:
        eqn: the equation.
        backwards: whether to ask for cotangents, as rules of ``custom_vjp`` give them,
            instead of tangents.
    """
    variables = dict.fromkeys(var for var in eqn.invars if isinstance(var, Var))
    takes = [var for var in variables if has_tangent(var.aval)]
    rest = [var for var in variables if not has_tangent(var.aval)]
    gives = [n for n, var in enumerate(eqn.outvars) if has_tangent(var.aval)]
    given = [eqn.outvars[n] for n in gives] if backwards else takes
    run = jaxprs.function_of(eqn, [*takes, *rest])

    def derivative(taken: Any, rest: Any, given: Any) -> Any:
        def near(*taken: Any) -> list[Any]:
            out = run(*taken, *rest)
            return [out[n] for n in gives]

        if backwards:
            return jax.vjp(near, *taken)[1](given)
        return jax.jvp(near, taken, given)[1]

    shapes = [list(map(_shape_of, some)) for some in (takes, rest, given)]
    closed = jax.make_jaxpr(derivative)(*shapes)
    found = Dependence().of(closed)[-len(given) :]
    constant = _constants(closed, found)
    if backwards:
        rows = [
            bits(out for out, row in zip(gives, found, strict=True) if row & bit(n))
            | (FROM_NOTHING if n in constant else 0)
            for n in range(len(takes))
        ]
    else:  # A constant tangent is there whatever comes in.
        rows = [
            bits(out for n, out in enumerate(gives) if row & bit(n) or n in constant)
            for row in found
        ]
    by_var = dict(zip(takes, rows, strict=True))
    return [by_var.get(v, 0) if isinstance(v, Var) else 0 for v in eqn.invars]


def _shape_of(var: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(var.aval, 'weak_type', False)
    return jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, weak_type=weak)


def _constants(closed: Any, rows: Rows) -> set[int]:
    """The outputs on which no row has a bit, and that are not written as zeros."""
    reached = functools.reduce(operator.or_, rows)
    zeros = _zeros(closed)
    return {n for n, zero in enumerate(zeros) if not zero and not reached & bit(n)}


def _zeros(closed: Any) -> list[bool]:
    """For each output of a jaxpr whether it is written as zeros."""
    known: dict[Any, bool] = dict(
        zip(closed.jaxpr.constvars, map(_is_zero, closed.consts), strict=True)
    )

    def zero(var: Any) -> bool:
        if isinstance(var, Literal):
            return _is_zero(var.val)
        return known.get(var, False)

    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name in _KEEPS_ZEROS:
            known[eqn.outvars[0]] = zero(eqn.invars[0])
        elif eqn.primitive.name in jaxprs.JITTED:
            inner = _zeros(eqn.params['jaxpr'])
            known.update(zip(eqn.outvars, inner, strict=True))
    return [zero(var) for var in closed.jaxpr.outvars]


def _is_zero(value: Any) -> bool:
    return not isinstance(value, Tracer) and not np.any(np.asarray(value))

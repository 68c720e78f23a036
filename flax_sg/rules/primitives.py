"""Identity functions with derivatives of their own.

Values pass unchanged, so a second derivative differentiates the mapped gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from flax_sg.internals import tracing
from flax_sg.internals.types import Array, Scalar


@jax.custom_jvp
def stop_one_level(x: Array) -> Array:
    """``x``, a constant for the innermost derivative alone."""
    return x


def _stop_one_level_jvp(primals: Sequence[Array], _: Sequence[Array]) -> Any:
    (x,) = primals
    return x, SymbolicZero(jax.typeof(x).to_tangent_aval())


stop_one_level.defjvp(_stop_one_level_jvp, symbolic_zeros=True)


def scale(x: Array, factor: Scalar) -> Array:
    """``x``; its tangents and cotangents are multiplied by ``factor``."""
    alike = _alike([x, factor])

    @jax.custom_jvp
    def identity(x: Array, factor: Scalar) -> Array:
        return alike([x], [factor])[0]

    def jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> Any:
        tangent = tangents[0]
        if not isinstance(tangent, SymbolicZero):
            tangent = tangent * jnp.asarray(primals[1]).astype(tangent.dtype)
        return alike(primals[:1], primals[1:])[0], tangent

    identity.defjvp(jvp, symbolic_zeros=True)
    return identity(x, factor)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Differentiated:
    """For each of some values whether it is differentiated."""

    flags: tuple[bool, ...]


def map_cotangents(
    fn: Callable[..., Sequence[Any]],
    values: Sequence[Any],
    operands: Sequence[Any] = (),
) -> list[Any]:
    """``values``; in the backward pass their cotangents go through ``fn`` together.

    Args:
        fn: called once as ``fn(cotangents, differentiated, *operands)`` if any of the
            values has a cotangent; the others have zeros. ``differentiated`` says for
            each value whether its cotangent is used. Returns the new cotangents.
        values: arrays of real or complex numbers.
        operands: other arrays that ``fn`` needs; they may be tracers.
    """
    alike = _alike([*values, *operands])
    identity = jax.custom_vjp(alike)

    def forward(values: Sequence[Array], operands: Sequence[Array]) -> Any:
        flags = tuple(value.perturbed for value in values)
        values, operands = ([x.value for x in arrays] for arrays in (values, operands))
        return alike(values, operands), (operands, _Differentiated(flags))

    def backward(residuals: Sequence[Array], cotangents: Sequence[Array]) -> Any:
        operands, differentiated = residuals
        if not any(differentiated.flags):  # An operand alone is differentiated.
            return None, None
        new = [
            tracing.zeros_of(ct.aval) if isinstance(ct, SymbolicZero) else ct
            for ct in cotangents
        ]
        # JAX may hand over numbers of Python, which are literals of its programs.
        operands = map(jnp.asarray, operands)
        return list(fn(new, differentiated.flags, *operands)), None

    identity.defvjp(forward, backward, symbolic_zeros=True)
    return identity(list(values), list(operands))


def _alike(arrays: Sequence[Any]) -> Callable[..., list[Any]]:
    """The identity of values, whose results are mapped by ``vmap`` if any array is.

    A rule for each example gets the cotangent of each example. If ``vmap`` shared a
    value among the examples, JAX would sum its cotangents before the rule. So each
    value depends on all arrays, by a choice that always falls on it. XLA removes it.
    """
    if sum(isinstance(x, Tracer) for x in arrays) < 2:
        return lambda values, operands: list(values)

    def alike(values: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        same = [x == x for x in (*values, *operands)]
        never = functools.reduce(operator.or_, [jnp.any(s != s) for s in same])
        return [jax.lax.select(never, jnp.zeros_like(x), x) for x in values]

    return alike

"""Identities with a derivative of their own: what they return is what they are given.

The naive attempt is one ``jax.custom_vjp`` for all. It has no forward mode, where a
scaled cotangent has one, and where a derivative forwards is asked for nonetheless, the
error names neither the parameter nor the rule. So what is linear has a tangent map,
which JAX transposes; what is not has a primitive that can be transposed alone.

In each of them the value goes through as it is: a second derivative is that of the
first one, taken as the function that it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flax_sg import errors

# From the cotangents, which of the values are differentiated, and operands.
CotangentMap: TypeAlias = Callable[..., Sequence[Any]]


@jax.custom_jvp
def stop_one_level(x: Any) -> Any:
    """``x``; whatever differentiates it first finds a constant, and no other does."""
    return x


def _stop_one_level_jvp(primals: Any, _: Any) -> Any:
    (x,) = primals
    return x, _no_tangent(x)


stop_one_level.defjvp(_stop_one_level_jvp, symbolic_zeros=True)


def _no_tangent(x: Any) -> SymbolicZero:
    return SymbolicZero(jax.typeof(x).to_tangent_aval())


@jax.custom_jvp
def scale(x: Any, factor: Any) -> Any:
    """``x``; its tangents and cotangents are multiplied by ``factor``."""
    del factor
    return x


def _scale_jvp(primals: Any, tangents: Any) -> Any:
    (x, factor), (tangent, _) = primals, tangents
    if isinstance(tangent, SymbolicZero):
        return x, tangent
    return x, tangent * factor


scale.defjvp(_scale_jvp, symbolic_zeros=True)


def map_cotangents(
    fn: CotangentMap, what: str, values: Sequence[Any], operands: Sequence[Any] = ()
) -> list[Any]:
    """``values``, whose cotangents go through ``fn`` together, and once.

    Args:
        fn: called as ``fn(cotangents, differentiated, *operands)`` on the way back, if
            any of the values has a cotangent; those that have none are zero.
            ``differentiated`` says for each value whether its cotangent goes anywhere.
            Returns the cotangents to go on with.
        what: says in an error whose cotangents these are.
        values: arrays of real or complex numbers.
        operands: other arrays that ``fn`` needs, traced ones among them.
    """
    number = len(values)

    @jax.custom_jvp
    def identity(*args: Any) -> Any:
        return args[:number]

    def jvp(primals: Any, tangents: Any) -> Any:
        values, operands = primals[:number], primals[number:]
        given = [not isinstance(t, SymbolicZero) for t in tangents[:number]]
        if not any(given):
            return values, tuple(map(_no_tangent, values))
        out = _mapped_p.bind(
            *operands,
            *(t for t, there in zip(tangents, given, strict=False) if there),
            avals=tuple(jax.typeof(x).to_tangent_aval() for x in values),
            given=tuple(given),
            fn=fn,
            what=what,
        )
        return values, tuple(out)

    identity.defjvp(jvp, symbolic_zeros=True)
    return list(identity(*values, *operands))


# Takes operands and then tangents, gives a tangent for each of the values. It stands
# for the transpose of ``fn``, which nobody can evaluate.
_mapped_p = Primitive('map_cotangents')
_mapped_p.multiple_results = True
_mapped_p.def_abstract_eval(lambda *_, avals, **__: list(avals))


def _refuse(*_: Any, what: str, **__: Any) -> NoReturn:
    raise _forward_mode(what)


_mapped_p.def_impl(_refuse)
mlir.register_lowering(_mapped_p, _refuse)
ad.primitive_jvps[_mapped_p] = _refuse


def _transpose(
    cotangents: Any, *args: Any, avals: Any, given: Any, fn: CotangentMap, what: str
) -> list[Any]:
    del what
    # A number may come as JAX has it in its programs, which is no array.
    operands = [jnp.asarray(x) for x in args[: len(args) - sum(given)]]
    there = [
        jnp.zeros(aval.shape, aval.dtype)
        if isinstance(ct, ad.Zero)
        else jnp.asarray(ct)
        for ct, aval in zip(cotangents, avals, strict=True)
    ]
    mapped = fn(there, given, *operands)
    back = [ct for ct, there in zip(mapped, given, strict=True) if there]
    return [None] * len(operands) + back


ad.primitive_transposes[_mapped_p] = _transpose


def _batch(
    axis: Any,
    args: Any,
    dims: Any,
    *,
    avals: Any,
    given: Any,
    fn: CotangentMap,
    **more: Any,
) -> tuple[list[Any], list[Any]]:
    if all(dim is None for dim in dims):  # As a jitted function under ``vmap`` asks.
        out = _mapped_p.bind(*args, avals=avals, given=given, fn=fn, **more)
        return out, [None] * len(out)
    number = len(args) - sum(given)
    operands, tangents = args[:number], args[number:]
    of_operands = dims[:number]
    tangents = [
        batching.bdim_at_front(t, d, axis.size)
        for t, d in zip(tangents, dims[number:], strict=True)
    ]

    def batched(cotangents: Any, given: Any, *operands: Any) -> Sequence[Any]:
        return jax.vmap(
            lambda cotangents, *operands: fn(cotangents, given, *operands),
            in_axes=(0, *of_operands),
            axis_size=axis.size,
            axis_name=axis.name,
        )(cotangents, *operands)

    avals = tuple(a.update(shape=(axis.size, *a.shape)) for a in avals)
    out = _mapped_p.bind(
        *operands, *tangents, avals=avals, given=given, fn=batched, **more
    )
    return out, [0] * len(out)


batching.fancy_primitive_batchers[_mapped_p] = _batch


def _forward_mode(what: str) -> errors.CotangentError:
    """A derivative forwards was asked for of a parameter whose cotangent is mapped."""
    return errors.CotangentError(
        f'{what} has no derivative forwards (jax.jvp, jax.jacfwd, jax.linearize): '
        'what is to happen is known for cotangents, on the way back.\n'
        'Use jax.grad, jax.vjp or jax.jacrev (for a Hessian jax.jacrev twice, or '
        'jax.jacfwd of jax.grad), or leave the parameter out of what is '
        'differentiated forwards.'
    )

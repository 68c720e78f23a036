"""Identity functions with derivatives of their own.

The naive attempt is ``jax.custom_vjp``. It has no forward mode, though a scaled
cotangent has one, and its error in forward mode names neither the parameter nor the
rule. So scaling is a ``jax.custom_jvp``, which JAX transposes. Other rules bind a
primitive that can only be transposed.

Values pass unchanged, so a second derivative differentiates the mapped gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from flax_sg import errors


@jax.custom_jvp
def stop_one_level(x: Any) -> Any:
    """``x``, a constant for the innermost derivative alone."""
    return x


def _stop_one_level_jvp(primals: Any, _: Any) -> Any:
    (x,) = primals
    return x, _no_tangent(x)


stop_one_level.defjvp(_stop_one_level_jvp, symbolic_zeros=True)


def _no_tangent(x: Any) -> SymbolicZero:
    return SymbolicZero(jax.typeof(x).to_tangent_aval())


def scale(x: Any, factor: Any) -> Any:
    """``x``; its tangents and cotangents are multiplied by ``factor``."""
    [x] = _mapped_alike([x], [factor])
    return _scale(x, factor)


@jax.custom_jvp
def _scale(x: Any, factor: Any) -> Any:
    del factor
    return x


def _scale_jvp(primals: Any, tangents: Any) -> Any:
    (x, factor), (tangent, _) = primals, tangents
    if isinstance(tangent, SymbolicZero):
        return x, tangent
    return x, tangent * factor


_scale.defjvp(_scale_jvp, symbolic_zeros=True)


def map_cotangents(
    fn: Callable[..., Sequence[Any]],
    what: str,
    values: Sequence[Any],
    operands: Sequence[Any] = (),
) -> list[Any]:
    """``values``; in the backward pass their cotangents go through ``fn`` together.

    Args:
        fn: called once as ``fn(cotangents, differentiated, *operands)`` if any of the
            values has a cotangent; the others have zeros. ``differentiated`` says for
            each value whether its cotangent is used. Returns the new cotangents.
        what: the name of the values and the rule, for errors.
        values: arrays of real or complex numbers.
        operands: other arrays that ``fn`` needs; they may be tracers.
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
    return list(identity(*_mapped_alike(values, operands), *operands))


# Takes values and operands, and returns the values: under ``vmap`` all of them mapped
# if one of the arguments is. JAX traces a ``custom_jvp`` once, and its rule later. It
# takes for granted that ``vmap`` maps the values of both alike.
_alike_p = Primitive('mapped_alike')
_alike_p.multiple_results = True
_alike_p.def_impl(lambda *args, count: list(args[:count]))
_alike_p.def_abstract_eval(lambda *avals, count: list(avals[:count]))
mlir.register_lowering(_alike_p, lambda _, *args, count: list(args[:count]))


def _mapped_alike(values: Sequence[Any], operands: Sequence[Any]) -> Sequence[Any]:
    """``values``, mapped by ``vmap`` wherever one of the arrays is."""
    traced = [x for x in (*values, *operands) if isinstance(x, Tracer)]
    if len(traced) < 2:
        return values
    return _alike_p.bind(*values, *operands, count=len(values))


def _alike_jvp(primals: Any, tangents: Any, *, count: int) -> tuple[Any, Any]:
    return _alike_p.bind(*primals, count=count), list(tangents[:count])


ad.primitive_jvps[_alike_p] = _alike_jvp


def _alike_batch(
    axis: Any, args: Any, dims: Any, *, count: int
) -> tuple[list[Any], list[Any]]:
    values = args[:count]
    if any(dim is not None for dim in dims):
        pairs = zip(values, dims[:count], strict=True)
        values = [batching.bdim_at_front(x, dim, axis.size) for x, dim in pairs]
        dims = [0] * count
    # Again, for a ``vmap`` around this one.
    return _alike_p.bind(*values, *args[count:], count=count), dims[:count]


batching.fancy_primitive_batchers[_alike_p] = _alike_batch


# Takes operands and tangents, and returns a tangent for each value. Its transpose is
# ``fn``; it cannot be evaluated itself.
_mapped_p = Primitive('map_cotangents')
_mapped_p.multiple_results = True
_mapped_p.def_abstract_eval(lambda *_, avals, **__: list(avals))


def _refuse(*_: Any, what: str, **__: Any) -> NoReturn:
    raise errors.CotangentError(
        f'{what} has no forward mode (jax.jvp, jax.jacfwd, jax.linearize): it maps '
        'cotangents, which only the backward pass has.\n'
        'Use jax.grad, jax.vjp or jax.jacrev; for a Hessian jax.jacfwd of jax.grad. Or '
        'do not differentiate the parameter in forward mode.'
    )


_mapped_p.def_impl(_refuse)
mlir.register_lowering(_mapped_p, _refuse)
ad.primitive_jvps[_mapped_p] = _refuse


def _transpose(
    cotangents: Any, *args: Any, given: Any, fn: Callable[..., Any], **_: Any
) -> list[Any]:
    # JAX may hand over the literals of its programs, which are no arrays.
    operands = [jnp.asarray(x) for x in args[: len(args) - sum(given)]]
    there = [jnp.asarray(ad.instantiate_zeros(ct)) for ct in cotangents]
    mapped = zip(fn(there, given, *operands), given, strict=True)
    return [None] * len(operands) + [ct for ct, there in mapped if there]


ad.primitive_transposes[_mapped_p] = _transpose


def _batch(
    axis: Any, args: Any, dims: Any, **params: Any
) -> tuple[list[Any], list[Any]]:
    if all(dim is None for dim in dims):  # JAX asks so for a jitted function.
        out = _mapped_p.bind(*args, **params)
        return out, [None] * len(out)
    fn, number = params['fn'], len(args) - sum(params['given'])

    def batched(cotangents: Any, given: Any, *operands: Any) -> Sequence[Any]:
        return jax.vmap(
            lambda cotangents, *operands: fn(cotangents, given, *operands),
            in_axes=(0, *dims[:number]),
            axis_size=axis.size,
            axis_name=axis.name,
        )(cotangents, *operands)

    tangents = zip(args[number:], dims[number:], strict=True)
    moved = [batching.bdim_at_front(t, d, axis.size) for t, d in tangents]
    avals = tuple(a.update(shape=(axis.size, *a.shape)) for a in params['avals'])
    params = {**params, 'fn': batched, 'avals': avals}
    out = _mapped_p.bind(*args[:number], *moved, **params)
    return out, [0] * len(out)


batching.fancy_primitive_batchers[_mapped_p] = _batch

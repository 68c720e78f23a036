"""Runs traced programs one primitive at a time.

XLA may fuse two programs differently, and then their last bits differ. Compiling each
of some hundred programs would also take most of the test time. So a program is traced
as a whole, with transforms and derivatives, and its jaxpr is evaluated here. Each
primitive is compiled once per shape for all tests.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from flax_sg.internals import jaxprs
from tests.helpers import oracle


def evaluate(fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)``, traced and then evaluated step by step."""
    return trace(fn, *args)()


def trace(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Traces ``fn(*args)`` now. The returned function evaluates it when called."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)

    def run() -> Any:
        out = _run_closed(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


def outputs_and_grads(fn: Callable[..., Any], *args: Any) -> Any:
    """What ``fn`` returns, and the gradient of each output with respect to all args.

    Args:
        fn: a function that returns a dict of vectors, which are differentiated one by
            one, and anything else, which is not.
        *args: trees of arrays of real numbers.
    """
    return trace_outputs_and_grads(fn, *args)()


def trace_outputs_and_grads(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """``outputs_and_grads``, traced now and evaluated when called."""

    def both(*args: Any) -> Any:
        out, pull_back, rest = jax.vjp(fn, *args, has_aux=True)
        zeros = jax.tree.map(jnp.zeros_like, out)
        ramps = {
            name: 1 + jnp.arange(y.size, dtype=y.dtype) % 7 for name, y in out.items()
        }
        grads = {name: pull_back({**zeros, name: ramps[name]}) for name in out}
        return out, grads, rest

    return trace(both, *args)


def flat(tree: Any) -> jax.Array:
    """All real leaves in one vector, so that one backward pass covers them."""
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.concatenate([jnp.ravel(leaf) for leaf in leaves] or [jnp.zeros(0)])


def assert_same_grads(
    actual: Callable[..., Any], expected: Callable[..., Any], *args: Any
) -> None:
    """Compares dicts of trees; each tree is differentiated separately."""

    def vectors(fn: Callable[..., Any]) -> Callable[..., Any]:
        def with_aux(*args: Any) -> Any:
            out = fn(*args)
            return {name: flat(tree) for name, tree in out.items()}, out

        return with_aux

    oracle.assert_same(
        outputs_and_grads(vectors(actual), *args),
        outputs_and_grads(vectors(expected), *args),
    )


def _run_closed(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    return _run(closed.jaxpr, closed.consts, args)


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(var: Any) -> Any:
        value = var.val if isinstance(var, Literal) else env[var]
        # jax 0.7.2 has a class of its own for some constants, and cannot add them.
        return np.array(value) if 'LiteralArray' in str(type(value)) else value

    for eqn in jaxpr.eqns:
        out = _bind(eqn, [read(var) for var in eqn.invars])
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _bind(eqn: Any, args: list[Any]) -> Sequence[Any]:
    run = _RUN.get(eqn.primitive.name)
    if run is not None:
        return run(eqn, args)
    for name in ('jaxpr', 'call_jaxpr', 'fun_jaxpr'):
        inner = eqn.params.get(name)
        if isinstance(inner, ClosedJaxpr):
            return _run_closed(inner, args)
        if isinstance(inner, Jaxpr):
            return _run(inner, (), args)
    out = eqn.primitive.bind(*args, **eqn.params)
    return out if eqn.primitive.multiple_results else [out]


def _scan(eqn: Any, args: list[Any]) -> list[Any]:
    turning = jaxprs.carried_by(eqn)
    consts, xs = args[: turning.start], args[turning.stop :]
    carry = args[turning.start : turning.stop]
    steps, backwards = range(eqn.params['length']), eqn.params['reverse']
    body = eqn.params['jaxpr']
    ys = []
    for i in reversed(steps) if backwards else steps:
        out = _run_closed(body, [*consts, *carry, *(_item(x, i) for x in xs)])
        carry = out[: len(turning)]
        ys.append(out[len(turning) :])
    stacked = zip(*(reversed(ys) if backwards else ys), strict=True)
    return [*carry, *map(_stack, stacked)]


def _item(x: Any, i: int) -> Any:
    return x[i] if _is_key(x) else np.asarray(x)[i]


def _stack(ys: Sequence[Any]) -> Any:
    return jnp.stack(ys) if _is_key(ys[0]) else np.stack([np.asarray(y) for y in ys])


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _while(eqn: Any, args: list[Any]) -> list[Any]:
    params = eqn.params
    first = params['cond_nconsts']
    second = first + params['body_nconsts']
    tests, consts, carry = args[:first], args[first:second], args[second:]
    while np.any(goes_on := _run_closed(params['cond_jaxpr'], [*tests, *carry])[0]):
        new = _run_closed(params['body_jaxpr'], [*consts, *carry])
        if goes_on.ndim:  # A mapped loop: its rows end by themselves.
            flags = [goes_on.reshape(-1, *[1] * (x.ndim - 1)) for x in new]
            new = [*map(jnp.where, flags, new, carry)]
        carry = new
    return carry


def _cond(eqn: Any, args: list[Any]) -> list[Any]:
    index, *operands = args
    branches = eqn.params['branches']
    return _run_closed(branches[min(max(int(index), 0), len(branches) - 1)], operands)


_RUN = {'scan': _scan, 'while': _while, 'cond': _cond}

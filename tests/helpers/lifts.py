"""Flax's transforms of a function of a module, in one form: ``lift(fn, module, x)``.

Steps and examples share parameters, and ``ema``; ``state`` goes from step to step.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flax_sg import linen as nn

SHARED = ('params', 'ema')


def skip(module: Any, x: Any) -> Any:
    return x


def cond(fn: Any, module: Any, x: Any) -> Any:
    def twice(module: Any, x: Any) -> Any:
        return 2.0 * fn(module, x)

    return nn.cond(jnp.sum(x) > 0, fn, twice, module, x)


def switch(fn: Any, module: Any, x: Any) -> Any:
    return nn.switch(jnp.int32(jnp.sum(x) > 0), [skip, fn, skip], module, x)


def scan(fn: Any, module: Any, x: Any) -> Any:
    def step(module: Any, x: Any, _: Any) -> Any:
        return fn(module, x), None

    shared: Any = {'variable_broadcast': SHARED, 'split_rngs': {'params': False}}
    each: Any = {'variable_carry': 'state', 'variable_axes': {'intermediates': 0}}
    return nn.scan(step, length=2, **shared, **each)(module, x, None)[0]


def vmap(fn: Any, module: Any, x: Any) -> Any:
    axes = {**dict.fromkeys((*SHARED, 'state')), 'intermediates': 0}
    options: Any = {'in_axes': None, 'axis_size': 2, 'split_rngs': {'params': False}}
    return nn.vmap(fn, variable_axes=axes, **options)(module, x).mean(0)


def while_loop(fn: Any, module: Any, x: Any) -> Any:
    """Of this there is no reverse mode."""

    def step(module: Any, carry: Any) -> Any:
        return carry[0] + 1, fn(module, carry[1])

    options: Any = {'carry_variables': 'state', 'broadcast_variables': SHARED}
    return nn.while_loop(lambda _, c: c[0] < 2, step, module, (0, x), **options)[1]


def map_variables(fn: Any, module: Any, x: Any) -> Any:
    def doubled(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * 2.0, tree)

    return nn.map_variables(fn, 'params', trans_in_fn=doubled)(module, x)


def remat_of_jit(fn: Any, module: Any, x: Any) -> Any:
    return nn.remat(lambda module, x: nn.jit(fn)(module, x))(module, x)


def jvp(fn: Any, module: Any, x: Any) -> Any:
    params = jax.lax.stop_gradient(module.variables['params'])
    tangents = {'params': jax.tree.map(jnp.cos, params)}
    return nn.jvp(fn, module, (x,), (jnp.sin(x),), tangents)


def value_and_grad(fn: Any, module: Any, x: Any) -> Any:
    return nn.value_and_grad(lambda m, x: jnp.sum(fn(m, x)), module, x)


def vjp(fn: Any, module: Any, x: Any) -> Any:
    y, pull_back = nn.vjp(fn, module, x)
    return y + pull_back(y)[1]


def custom_vjp(fn: Any, module: Any, x: Any) -> Any:
    def backward(pull_back: Any, y_t: Any) -> Any:
        return pull_back(y_t * 3.0)

    return nn.custom_vjp(fn, functools.partial(nn.vjp, fn), backward)(module, x)


LIFTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    'none': lambda fn, module, x: fn(module, x),
    'jit': lambda fn, module, x: nn.jit(fn)(module, x),
    'remat': lambda fn, module, x: nn.remat(fn)(module, x),
    'remat of jit': remat_of_jit,
    **{fn.__name__: fn for fn in (map_variables, cond, switch, scan, vmap, while_loop)},
}
DERIVATIVES = {fn.__name__: fn for fn in (jvp, value_and_grad, vjp, custom_vjp)}

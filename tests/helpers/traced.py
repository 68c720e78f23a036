"""A model with transforms in it, and programs in which what a filter says is traced."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

import flax_sg as sg
from flax_sg import linen as nn
from tests.helpers import oracle

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


class Cell(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return linen.tanh(linen.Dense(3, name='dense')(x)), None


def bare(cls: Any) -> Any:
    return cls


class Net(linen.Module):
    lift: Any = bare

    @linen.compact
    def __call__(self, x):
        x = linen.tanh(linen.Dense(3, name='one')(x))
        x = nn.jit(linen.Dense)(3, name='two')(x)
        cells = linen.scan(self.lift(Cell), length=2, **oracle.STACKED)
        x, _ = cells(name='cells')(x, None)
        return linen.Dense(2, name='head')(x)


PARAMS = jax.jit(Net().init)(jax.random.key(0), X)['params']


def loss(params: Any, net: Any = Net()) -> Any:  # noqa: B008
    return jnp.sum(net.apply({'params': params}, X) ** 2)


jitted_loss = jax.jit(loss)


# What a filter stops, in a program of the parameters and of the filter.


def in_block(params: Any, where: Any) -> Any:
    with nn.stop_gradient(where):
        return loss(params)


def of_tree(params: Any, where: Any) -> Any:
    return loss(sg.stop_gradient(params, where))


def around_jit(params: Any, where: Any) -> Any:
    with nn.stop_gradient(where):
        return jitted_loss(params)


def of_steps(fn: Any, one: Any, other: Any) -> Any:
    """What a function gives in each step of a scan, in which the value changes."""
    stacked = stack(one, other)

    def run(params):
        def body(total, value):
            return total + fn(params, value), None

        return jax.lax.scan(body, 0.0, stacked)[0]

    return jax.grad(run)(PARAMS)


def stack(*trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def second_order(fn: Any) -> Any:
    def norm(params, value):
        return jnp.sum(jax.grad(fn)(params, value)['one']['bias'] ** 2)

    return jax.grad(norm)


# Each runs a function of the parameters and of a value, which is traced. Given are two
# values, and a function that makes one of the parameters.
TRACED: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    'jit': lambda fn, one, other, of: [
        jax.jit(jax.grad(fn))(PARAMS, value) for value in (one, other)
    ],
    'grad of jit': lambda fn, one, other, of: [
        jax.grad(jax.jit(fn))(PARAMS, value) for value in (one, other)
    ],
    'parameters from outside': lambda fn, one, other, of: jax.grad(
        lambda p: jax.jit(lambda value: fn(p, value))(one)
    )(PARAMS),
    'scan': lambda fn, one, other, of: of_steps(fn, one, other),
    'vmap': lambda fn, one, other, of: jax.vmap(jax.grad(fn), (None, 0))(
        PARAMS, stack(one, other)
    ),
    'vmap of all': lambda fn, one, other, of: jax.vmap(jax.grad(fn))(
        jax.tree.map(lambda w: jnp.stack([w, 2 * w]), PARAMS), stack(one, other)
    ),
    'checkpoint': lambda fn, one, other, of: jax.jit(jax.grad(jax.checkpoint(fn)))(
        PARAMS, one
    ),
    'of the parameters': lambda fn, one, other, of: jax.jit(
        jax.grad(lambda p: fn(p, of(p)))
    )(PARAMS),
    'second order': lambda fn, one, other, of: jax.jit(second_order(fn))(PARAMS, one),
    'jvp': lambda fn, one, other, of: jax.jit(
        lambda p, value: jax.jvp(lambda p: fn(p, value), (p,), (p,))
    )(PARAMS, one),
}

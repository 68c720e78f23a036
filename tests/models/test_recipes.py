"""Uses of the rules: models that train, and the gradients they train with."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np

import oracle
import stepwise
from flax_sg import linen as nn

X = jnp.array([[1.0, -2.0], [0.5, 0.75], [-1.0, 2.0]])


class Net(fnn.Module):
    """Features, and a head that reads them."""

    width: int = 4

    @fnn.compact
    def __call__(self, x):
        x = jnp.tanh(fnn.Dense(self.width, name='features')(x))
        return fnn.Dense(1, name='head')(x)


def plain(params: Any, x: Any) -> jax.Array:
    return Net().apply({'params': params}, x)


def shielded(params: Any, x: Any, **options: Any) -> jax.Array:
    with nn.stop_gradient('features/**', **options):
        return plain(params, x)


PARAMS = Net().init(jax.random.key(0), X)['params']
RATE = 0.1

# One level.


def adapted(apply: Any, params: Any) -> jax.Array:
    """The loss after one step of gradient descent on all that has a gradient."""
    inner = lambda p: jnp.mean((apply(p, X) - 1.0) ** 2)  # noqa: E731
    params = jax.tree.map(lambda p, g: p - RATE * g, params, jax.grad(inner)(params))
    return jnp.mean((plain(params, 2.0 * X) - 1.0) ** 2)


def adapted_by_hand(params: Any) -> jax.Array:
    """The same, where the inner derivative is taken of the head alone."""

    def inner(head: Any) -> jax.Array:
        return jnp.mean((plain({**params, 'head': head}, X) - 1.0) ** 2)

    grads = jax.grad(inner)(params['head'])
    head = jax.tree.map(lambda p, g: p - RATE * g, params['head'], grads)
    return jnp.mean((plain({**params, 'head': head}, 2.0 * X) - 1.0) ** 2)


def test_one_level_is_the_inner_one_of_two():
    one_level = functools.partial(shielded, levels=1)
    ours = stepwise.evaluate(jax.grad(functools.partial(adapted, one_level)), PARAMS)
    by_hand = stepwise.evaluate(jax.grad(adapted_by_hand), PARAMS)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), ours, by_hand
    )
    # Stopping all levels loses the effect of the features on the step of the head.
    all_levels = jax.grad(functools.partial(adapted, shielded))(PARAMS)
    assert not np.allclose(
        all_levels['features']['kernel'], by_hand['features']['kernel'], rtol=1e-2
    )


# Gradient penalties: the inner derivative is with respect to the input.


def slope(apply: Any, params: Any) -> jax.Array:
    return jnp.mean(jax.grad(lambda x: jnp.sum(apply(params, x)))(X) ** 2)


def test_a_gradient_penalty_takes_two_applies():
    def loss(params: Any) -> jax.Array:
        with nn.stop_gradient('features/**'):
            score = jnp.mean(plain(params, X))  # trains the head
        return score + slope(plain, params)  # trains all

    def by_hand(params: Any) -> jax.Array:
        fixed = jax.lax.stop_gradient(params['features'])
        return jnp.mean(plain({**params, 'features': fixed}, X)) + slope(plain, params)

    ours = stepwise.evaluate(jax.grad(loss), PARAMS)
    oracle.assert_same(ours, stepwise.evaluate(jax.grad(by_hand), PARAMS))
    assert not oracle.is_zero(ours['features'])


def test_one_level_would_stop_the_penalty():
    # No inner level differentiates a parameter here. So the outer level is the
    # innermost.
    one_level = functools.partial(shielded, levels=1)
    grads = jax.grad(functools.partial(slope, one_level))(PARAMS)
    assert oracle.is_zero(grads['features']) and not oracle.is_zero(grads['head'])

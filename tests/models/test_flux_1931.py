"""The assertion of Flux.jl #1931 about a frozen layer, in linen."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from flax_sg import linen as nn
from tests.helpers.oracle import assert_same, is_zero

X = jax.random.normal(jax.random.key(1), (5, 3))


def chain(freeze: Any = lambda layer: layer) -> Any:
    layers = [linen.Dense(4), linen.Dense(4), linen.Dense(2)]
    return linen.Sequential([layers[0], jnp.tanh, freeze(layers[1]), layers[2]])


PARAMS = chain().init(jax.random.key(0), X)['params']


def gradient(model: Any) -> Any:
    return jax.grad(lambda p: jnp.sum(model.apply({'params': p}, X)))(PARAMS)


def test_the_difference_of_a_model_and_its_frozen_self() -> None:
    def loss(params: Any) -> Any:
        m0, m1 = (m.apply({'params': params}, X) for m in (chain(), chain(nn.Frozen)))
        return jnp.sum(m0 - m1)

    value, found = jax.value_and_grad(loss)(PARAMS)
    assert value == 0
    frozen = found.pop('layers_2')
    assert is_zero(found)
    assert_same(frozen, gradient(chain())['layers_2'])

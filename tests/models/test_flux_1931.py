"""The assertions of Flux.jl #1931 about frozen layers, in linen.

The model is a chain of three layers. The middle layer is frozen in one of two models,
or in one of two uses of the same layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

import flax_sg as sg
from flax_sg import linen as nn
from oracle import assert_same, is_zero

X = jax.random.normal(jax.random.key(1), (5, 3))


def chain(freeze: Any = lambda layer: layer) -> Any:
    layers = [linen.Dense(4), linen.Dense(4), linen.Dense(2)]
    return linen.Sequential([layers[0], jnp.tanh, freeze(layers[1]), layers[2]])


NAMES = ('layers_0', 'layers_2', 'layers_3')
FROZEN = 'layers_2'
PARAMS = chain().init(jax.random.key(0), X)['params']


def gradient(model: Any, params: Any = PARAMS) -> Any:
    return jax.grad(lambda p: jnp.sum(model.apply({'params': p}, X)))(params)


def test_free_gradients_are_those_of_the_bare_model() -> None:
    frozen, bare = gradient(chain(nn.Frozen)), gradient(chain())
    assert tuple(frozen) == NAMES
    for name in NAMES:
        if name == FROZEN:
            assert is_zero(frozen[name])
            assert not is_zero(bare[name])
        else:
            assert_same(frozen[name], bare[name])


def test_no_gradient_of_a_fully_frozen_model() -> None:
    frozen = nn.Frozen(chain())
    assert is_zero(gradient(frozen))

    def loss(params: Any) -> Any:
        return jnp.sum(frozen.apply({'params': params}, X))

    absent = sg.grad(loss, wrt=False, unused='ignore')(PARAMS)
    assert tuple(absent) == NAMES
    assert not jax.tree.leaves(absent)
    # And no gradient is computed for it: no operation of the program reads a cotangent.
    jaxpr = jax.make_jaxpr(lambda p: gradient(frozen, p))(PARAMS).jaxpr
    assert all(
        not set(e.outvars) & set(jaxpr.outvars) or is_constant(e) for e in jaxpr.eqns
    )
    x_gradient = jax.grad(lambda x: jnp.sum(frozen.apply({'params': PARAMS}, x)))(X)
    expected = jax.grad(lambda x: jnp.sum(chain().apply({'params': PARAMS}, x)))(X)
    assert_same(x_gradient, expected)


def is_constant(equation: Any) -> bool:
    return equation.primitive.name == 'broadcast_in_dim' and not [
        v for v in equation.invars if not hasattr(v, 'val')
    ]


def test_the_difference_of_a_model_and_its_frozen_self() -> None:
    """The gradient is exactly zero for the free layers, which are in both terms."""

    def loss(params: Any) -> Any:
        m0, m1 = (m.apply({'params': params}, X) for m in (chain(), chain(nn.Frozen)))
        return jnp.sum(m0 - m1)

    value, found = jax.value_and_grad(loss)(PARAMS)
    assert value == 0
    for name in NAMES:
        assert is_zero(found[name]) == (name != FROZEN), name
    assert_same(found[FROZEN], gradient(chain())[FROZEN])

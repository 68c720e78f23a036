"""Rules for gradients of some rows, or for a while: the rest is as without them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import flax_sg as sg
from flax_sg import linen as nn
from tests.helpers import oracle

X = jnp.linspace(-1.0, 2.0, 6).reshape(2, 3)
NET = linen.Dense(2, name='dense')
PARAMS = oracle.init(NET, jax.random.key(0), X)['params']
ROWS = sg.at('kernel', np.s_[1:])


def loss(params: Any) -> Any:
    return jnp.sum(NET.apply({'params': params}, X) ** 2)


def clipped(g: Any) -> Any:
    norm = jnp.sqrt(jnp.sum(g * g))
    return g * jnp.where(norm > 0.5, 0.5 / norm, 1)


# Each rule, and the cotangent of rows by hand: a part counts as an array of its own.
RULES: dict[str, Any] = {
    'scale': (lambda w: nn.scale_gradient(w, 0.5), lambda g: 0.5 * g),
    'reverse': (nn.reverse_gradient, lambda g: -g),
    'replace': (lambda w: nn.replace_cotangent(w, 3.0), lambda g: jnp.full_like(g, 3)),
    'map': (lambda w: nn.map_cotangent(w, lambda _, g: g + 1.0), lambda g: g + 1.0),
    'clip': (lambda w: nn.clip_gradient(w, value=0.25), lambda g: g.clip(-0.25, 0.25)),
    'norm': (lambda w: nn.clip_gradient(w, norm=0.5), clipped),
    'global norm': (lambda w: nn.clip_gradient(w, global_norm=0.5), clipped),
}


def in_block(rule: Any, params: Any) -> Any:
    with rule:
        return loss(params)


def of_tree(rule: Any, params: Any) -> Any:
    return loss(sg.rewrite(params, rule))


def around_jit(rule: Any, params: Any) -> Any:
    with rule:
        return jitted_loss(params)


jitted_loss = jax.jit(loss)


@pytest.mark.parametrize('way', [in_block, of_tree, around_jit])
@pytest.mark.parametrize('name', RULES)
def test_the_other_rows_are_left_alone(name, way):
    make, change = RULES[name]
    expected = jax.grad(loss)(PARAMS)
    kernel = expected['kernel']
    expected['kernel'] = jnp.concatenate([kernel[:1], change(kernel[1:])])
    grads = jax.grad(lambda p: way(make(ROWS), p))(PARAMS)
    oracle.assert_same(grads['bias'], expected['bias'])
    if 'norm' in name:  # A sum with zeros may be rounded otherwise.
        np.testing.assert_allclose(grads['kernel'], expected['kernel'], rtol=1e-6)
        return
    oracle.assert_same(grads, expected)
    # Values are what they are without the rule.
    oracle.assert_same(way(make(ROWS), PARAMS), loss(PARAMS))


@pytest.mark.parametrize('name', RULES)
def test_gradients_are_changed_while_a_condition_holds(name):
    make, change = RULES[name]
    where = sg.where('kernel')
    step = jax.jit(jax.grad(lambda p, flag: in_block(make(where & flag), p)))
    plain = jax.jit(jax.grad(loss))(PARAMS)
    for flag, fn in (True, change), (False, lambda g: g):
        grads = step(PARAMS, flag)
        oracle.assert_same(grads['bias'], plain['bias'])
        np.testing.assert_allclose(grads['kernel'], fn(plain['kernel']), rtol=1e-6)

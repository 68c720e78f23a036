"""The lift on scopes: ``core.stop_gradient`` and ``core.lift``."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax.core import apply, init, lift, unfreeze
from flax.core import nn as core_nn
from flax.core.scope import DenyList

from flax_sg import core
from flax_sg import linen as nn
from tests.helpers import oracle

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
KEY = jax.random.key(0)
ones = jax.nn.initializers.ones


def layer(scope, x):
    kernel = scope.param('kernel', jax.nn.initializers.lecun_normal(), (3, 3))
    bias = scope.param('bias', ones, (1, 3))
    state = scope.variable('state', 'last', jnp.zeros, (2, 3))
    y = x @ kernel + bias + state.value
    if scope.has_rng('noise'):
        y = y + jax.random.normal(scope.make_rng('noise'), (2, 3))
    if scope.is_mutable_collection('state'):
        state.value = y
    if scope.is_mutable_collection('sown'):
        scope.put_variable('sown', 'y', (y,))
    return y


def model(scope, x, first=layer):
    x = jnp.tanh(scope.child(first, 'enc')(x))
    return scope.child(layer, 'dec')(x) * scope.param('scale', ones, (1, 3))


def core_dense(scope, x):
    return core_nn.dense(scope, x, features=3, bias=True)


def bare(scope, x):
    kernel, bias = (scope.get_variable('params', name) for name in ('kernel', 'bias'))
    return x @ kernel + bias


RNGS = {'params': KEY, 'noise': jax.random.key(1)}
_, VARIABLES = init(model)(RNGS, X)
ENC = {kind: VARIABLES[kind]['enc'] for kind in ('params', 'state')}


FROZEN: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    'children': (
        core.stop_gradient(model, ['enc/**', 'scale']),
        model,
        ('enc', 'scale'),
    ),
    'a child': (
        functools.partial(model, first=core.stop_gradient(layer, 'kernel')),
        model,
        ('enc/kernel',),
    ),
    'of flax.core': (core.stop_gradient(core_dense, 'kernel'), core_dense, ('kernel',)),
    'by a rewrite': (core.lift(layer, nn.train_only('bias')), layer, ('kernel',)),
}


@pytest.mark.parametrize('name', FROZEN)
def test_a_function_of_a_scope(name):
    fn, plain, paths = FROZEN[name]
    oracle.assert_same(init(fn)(RNGS, X), init(plain)(RNGS, X))
    _, variables = init(plain)(RNGS, X)
    noise = {'noise': jax.random.key(2)}
    for mutable in (False, True, DenyList('params')):

        def actual(v, x, fn=fn, mutable=mutable):
            out = apply(fn, mutable=mutable)(v, x, rngs=noise)
            return (out[0], unfreeze(out[1])) if mutable else out

        def expected(v, x, mutable=mutable):
            seen = {**v, 'params': oracle.stopped(v['params'], oracle.below(*paths))}
            out = actual(seen, x, plain, mutable)
            if mutable is True:  # What is stored is what was given.
                return out[0], {**out[1], 'params': unfreeze(v['params'])}
            return out

        oracle.assert_same_function(actual, expected, variables, X)


@pytest.mark.parametrize('place', ['over', 'under'])
def test_with_a_lift_of_flax(place):
    def jitted(fn):
        lifted = lift.jit(lambda scope, hash_key, x: fn(scope, x))
        return lambda scope, x: lifted(scope, 'key', x)

    stop = functools.partial(core.stop_gradient, where='kernel')
    fn = stop(jitted(bare)) if place == 'over' else jitted(stop(bare))

    def expected(params, x):
        copy = oracle.stopped(params, oracle.below('kernel'))
        return apply(jitted(bare))({'params': copy}, x)

    def actual(params, x):
        return apply(fn)({'params': params}, x)

    for _ in range(2):
        oracle.assert_same_function(actual, expected, ENC['params'], X)

"""The lift on scopes: ``core.stop_gradient`` and ``core.lift``."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax.core import apply, freeze, init, lift
from flax.core import nn as core_nn
from flax.core.scope import DenyList

import oracle
from flax_sg import core, errors, filters
from flax_sg import linen as nn
from flax_sg.forms import rewrites
from flax_sg.rules import rules

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
KEY = jax.random.key(0)
ones = jax.nn.initializers.ones


def layer(scope, x):
    """A kernel and a bias, random numbers, a state, a value that is sown."""
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
    """Two layers in child scopes and a parameter of its own."""
    x = jnp.tanh(scope.child(first, 'enc')(x))
    return scope.child(layer, 'dec')(x) * scope.param('scale', ones, (1, 3))


def core_dense(scope, x):
    """A module of flax.core."""
    return core_nn.dense(scope, x, features=3, bias=True)


def bare(scope, x):
    """Reads parameters, and makes none."""
    kernel, bias = (scope.get_variable('params', name) for name in ('kernel', 'bias'))
    return x @ kernel + bias


RNGS = {'params': KEY, 'noise': jax.random.key(1)}
_, VARIABLES = init(model)(RNGS, X)
ENC = {kind: VARIABLES[kind]['enc'] for kind in ('params', 'state')}


def plain_dicts(tree: Any) -> Any:
    """Nested dicts in place of Flax's frozen ones."""
    return jax.tree.map(
        lambda x: x.unfreeze() if hasattr(x, 'unfreeze') else x,
        tree,
        is_leaf=lambda x: hasattr(x, 'unfreeze'),
    )


def assert_same(actual: Any, expected: Any, *args: Any) -> None:
    """The values and all gradients of two functions."""
    oracle.assert_same(plain_dicts(actual(*args)), plain_dicts(expected(*args)))
    oracle.assert_same(
        oracle.grads(lambda *args: plain_dicts(actual(*args)), *args),
        oracle.grads(lambda *args: plain_dicts(expected(*args)), *args),
    )


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
    'of flax.core': (
        core.stop_gradient(core_dense, 'kernel'),
        core_dense,
        ('kernel',),
    ),
    'by a rewrite': (core.lift(layer, nn.train_only('bias')), layer, ('kernel',)),
}


@pytest.mark.parametrize('name', FROZEN)
def test_a_function_of_a_scope(name):
    fn, plain, paths = FROZEN[name]
    oracle.assert_same(init(fn)(RNGS, X), init(plain)(RNGS, X))
    _, variables = init(plain)(RNGS, X)
    noise = {'noise': jax.random.key(2)}

    def selects(path):
        return any(path == p or path.startswith(p + '/') for p in paths)

    for mutable in (False, True, DenyList('params')):

        def actual(v, x, mutable=mutable):
            return apply(fn, mutable=mutable)(v, x, rngs=noise)

        def expected(v, x, mutable=mutable):
            seen = {**v, 'params': oracle.stopped(v['params'], selects)}
            out = apply(plain, mutable=mutable)(seen, x, rngs=noise)
            if mutable is True:  # What is stored is what was given.
                return out[0], {**out[1], 'params': dict(v['params'])}
            return out

        assert_same(actual, expected, variables, X)


def test_nothing_before_or_after_is_stopped():
    frozen = core.stop_gradient(bare, 'kernel')

    def three(scope, x):
        child = scope.push('enc')
        return tuple(f(child, x) for f in (bare, frozen, bare))

    def expected(v, x):
        p = v['params']['enc']
        stop = jax.lax.stop_gradient(p['kernel'])
        return tuple(x @ w + p['bias'] for w in (p['kernel'], stop, p['kernel']))

    for mutable in (False, True):

        def actual(v, x, mutable=mutable):
            out = apply(three, mutable=mutable)(v, x)
            return out[0] if mutable else out

        assert_same(actual, expected, {'params': VARIABLES['params']}, X)


@pytest.mark.parametrize('place', ['over', 'under'])
def test_with_a_lift_of_flax(place):
    def jitted(fn):
        lifted = lift.jit(lambda scope, hash_key, x: fn(scope, x))
        return lambda scope, x: lifted(scope, 'key', x)

    stop = functools.partial(core.stop_gradient, where='kernel')
    fn = stop(jitted(bare)) if place == 'over' else jitted(stop(bare))

    def expected(params, x):
        copy = oracle.stopped(params, lambda path: path == 'kernel')
        return apply(jitted(bare))({'params': copy}, x)

    for _ in range(2):
        assert_same(
            lambda p, x: apply(fn)({'params': p}, x), expected, ENC['params'], X
        )


def test_arguments_and_results():
    def fn(scope, a, *rest, scale, **more):
        y = a * scope.param('w', ones, (1, 3)) * scale
        return {'y': y, 'rest': rest, **more}

    lifted = core.stop_gradient(fn, 'w')
    assert lifted.__name__ == 'fn'
    args, kwargs = (X, 2 * X, {'k': X}), {'scale': 3.0, 'last': (X,)}
    actual, variables = init(lifted)(KEY, *args, **kwargs)
    oracle.assert_same((actual, variables), init(fn)(KEY, *args, **kwargs))

    def loss(v: Any) -> Any:
        return jnp.sum(apply(lifted)(v, *args, **kwargs)['y'])

    assert oracle.is_zero(jax.grad(loss)(variables))
    frozen = jax.grad(loss)(freeze(variables))
    assert isinstance(frozen, type(freeze({}))) and oracle.is_zero(frozen)


def test_a_function_may_declare_what_is_there():
    def twice(scope, x):
        frozen = core.stop_gradient(layer, 'kernel')
        return frozen(scope, layer(scope, x))

    with pytest.raises(ValueError, match='Duplicate use of scope name'):
        init(lambda scope, x: layer(scope, layer(scope, x)))(RNGS, X)
    oracle.assert_same(
        init(twice)(RNGS, X)[1]['params'], init(layer)(RNGS, X)[1]['params']
    )


def test_collections_and_options():
    def fn(scope, x):
        return scope.get_variable('a', 'v') * scope.get_variable('b', 'v') * x

    variables = {'a': {'v': X}, 'b': {'v': 2 * X}}
    for collections, names in (('a', 'a'), (True, 'ab')):
        lifted = core.stop_gradient(fn, 'v', collections)
        grads = jax.grad(lambda v, f=lifted: jnp.sum(apply(f)(v, X)))(variables)
        assert {k for k in 'ab' if oracle.is_zero(grads[k])} == set(names)
    with pytest.raises(errors.UnusedFilterError):
        apply(core.stop_gradient(fn, 'v', 'c'))(variables, X)
    apply(core.stop_gradient(fn, 'v', 'c', unused='ignore'))(variables, X)
    with pytest.raises(errors.FilterValueError):
        core.stop_gradient(fn, 'v', unused='no')(None)


def test_paths_are_relative_to_the_scope():
    seen: list[str] = []

    def where(path):
        seen.append(f'{path} {path.absolute}')
        return True

    def fn(scope, x):
        return scope.child(core.stop_gradient(layer, where), 'enc')(x)

    apply(fn)({kind: {'enc': tree} for kind, tree in ENC.items()}, X)
    assert sorted(seen) == ['bias enc/bias', 'kernel enc/kernel']


@dataclasses.dataclass(frozen=True)
class Twice(rules.Rule):
    """Reads see twice the value: a new rule is one small class."""

    name = 'twice'

    def __call__(self, path, leaf):
        return 2.0 * leaf


def test_lift_takes_any_rule():
    twice = rewrites.BlockDecorator(filters.as_filter('kernel'), Twice())
    lifted = core.lift(layer, twice)

    def expected(params, x):
        seen = {**params, 'kernel': 2.0 * params['kernel']}
        return apply(layer)({**ENC, 'params': seen}, x)

    def actual(params, x):
        return apply(lifted)({**ENC, 'params': params}, x)

    assert_same(actual, expected, ENC['params'], X)
    # What is stored stays as it is, and is initialised as without the rule.
    stored = init(lifted)(RNGS, X)[1]['params']
    oracle.assert_same(stored, init(layer)(RNGS, X)[1]['params'])

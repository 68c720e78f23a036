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
    scope.put_variable('sown', 'y', (y,)) if scope.is_mutable_collection(
        'sown'
    ) else None
    return y


def model(scope, x):
    """Two layers in child scopes and a parameter of its own."""
    x = jnp.tanh(scope.child(layer, 'enc')(x))
    return scope.child(layer, 'dec')(x) * scope.param('scale', ones, (1, 3))


RNGS = {'params': KEY, 'noise': jax.random.key(1)}
_, VARIABLES = init(model)(RNGS, X)


def assert_stops(fn: Any, plain: Any, *paths: str, variables: Any = None) -> None:
    """``fn`` is ``plain`` but for the gradient of these parameters."""
    noise = {'noise': jax.random.key(2)}
    oracle.assert_same(init(fn)(RNGS, X), init(plain)(RNGS, X))
    variables = init(plain)(RNGS, X)[1] if variables is None else variables

    def by_hand(variables):
        def selects(path):
            return any(path == p or path.startswith(p + '/') for p in paths)

        params = oracle.stopped(variables['params'], selects)
        return {**variables, 'params': params}

    for mutable in (False, ['state', 'sown'], True, DenyList('params')):

        def actual(v, x, mutable=mutable):
            return apply(fn, mutable=mutable)(v, x, rngs=noise)

        def expected(v, x, mutable=mutable):
            out = apply(plain, mutable=mutable)(by_hand(v), x, rngs=noise)
            if mutable is True:  # What is stored is what was given.
                return out[0], {**out[1], 'params': dict(v['params'])}
            return out

        def values(v, x, mutable=mutable):
            return apply(plain, mutable=mutable)(v, x, rngs=noise)

        oracle.assert_same(_plain(actual(variables, X)), _plain(values(variables, X)))
        oracle.assert_same(
            oracle.grads(lambda v, x, f=actual: _plain(f(v, x)), variables, X),
            oracle.grads(lambda v, x, f=expected: _plain(f(v, x)), variables, X),
        )


def _plain(tree: Any) -> Any:
    """Nested dicts in place of Flax's frozen ones."""
    return jax.tree.map(
        lambda x: x.unfreeze() if hasattr(x, 'unfreeze') else x,
        tree,
        is_leaf=lambda x: hasattr(x, 'unfreeze'),
    )


def test_a_function_of_a_scope():
    assert_stops(core.stop_gradient(layer, 'kernel'), layer, 'kernel')


def test_child_scopes():
    assert_stops(core.stop_gradient(model, ['enc/**', 'scale']), model, 'enc', 'scale')
    assert_stops(core.stop_gradient(model, True), model, 'enc', 'dec', 'scale')
    assert_stops(core.stop_gradient(model, False), model)


def test_a_lift_of_a_child():
    def fn(scope, x):
        x = jnp.tanh(scope.child(core.stop_gradient(layer, 'kernel'), 'enc')(x))
        return scope.child(layer, 'dec')(x) * scope.param('scale', ones, (1, 3))

    assert_stops(fn, model, 'enc/kernel')


def test_nothing_before_or_after_is_stopped():
    frozen = core.stop_gradient(layer, 'kernel')

    def fn(scope, x, lifted=frozen):
        child = scope.push('enc')
        first = layer(child.rewound(), x)
        second = lifted(child.rewound(), x)
        return first, second, layer(child.rewound(), x)

    variables = {'params': VARIABLES['params']}

    def expected(v, x):
        p = v['params']['enc']
        stop = jax.lax.stop_gradient(p['kernel'])
        return tuple(x @ w + p['bias'] for w in (p['kernel'], stop, p['kernel']))

    def bare(scope, x):
        kernel, bias = (
            scope.get_variable('params', 'kernel'),
            scope.get_variable('params', 'bias'),
        )
        return x @ kernel + bias

    bare_frozen = core.stop_gradient(bare, 'kernel')

    def three(scope, x):
        child = scope.push('enc')
        return tuple(f(child, x) for f in (bare, bare_frozen, bare))

    for mutable in (False, ['params'], True):

        def actual(v, x, mutable=mutable):
            out = apply(three, mutable=mutable)(v, x)
            return out[0] if mutable else out

        oracle.assert_same(
            oracle.grads(actual, variables, X), oracle.grads(expected, variables, X)
        )
    y = apply(fn, mutable=['state'])(VARIABLES, X)[0]
    plain = apply(lambda s, x: fn(s, x, layer), mutable=['state'])(VARIABLES, X)[0]
    oracle.assert_same(y, plain)


def test_a_write_inside_is_kept_and_a_read_of_it_stopped():
    def fn(scope, x):
        scope.put_variable('params', 'kernel', x)
        return scope.get_variable('params', 'kernel') * scope.get_variable(
            'params', 'bias'
        )

    lifted = core.stop_gradient(fn, 'kernel')

    def actual(v, x):
        return apply(lifted, mutable=['params'])({'params': v}, x)

    def expected(v, x):
        return jax.lax.stop_gradient(x) * v['bias'], {'params': {**v, 'kernel': x}}

    v = {'kernel': 2 * X, 'bias': 3 * X}
    oracle.assert_same(_plain(actual(v, X)), expected(v, X))
    oracle.assert_same(
        oracle.grads(lambda v, x: _plain(actual(v, x)), v, X),
        oracle.grads(expected, v, X),
    )


@pytest.mark.parametrize('transform', ['jit', 'checkpoint', 'scan', 'vmap', 'cond'])
@pytest.mark.parametrize('place', ['over', 'under'])
def test_with_the_lifts_of_flax(transform, place):
    def bare(scope, x):
        return jnp.tanh(
            x @ scope.get_variable('params', 'kernel')
            + scope.get_variable('params', 'bias')
        )

    def lifted(fn):
        if transform == 'jit':
            jitted = lift.jit(lambda scope, hash_key, x: fn(scope, x))
            return lambda scope, x: jitted(scope, 'key', x)
        if transform == 'checkpoint':
            return lift.checkpoint(fn)
        if transform == 'vmap':
            rows = lift.vmap(fn, variable_axes={'params': None}, split_rngs={})
            return lambda scope, x: rows(scope, x[:, None])
        if transform == 'cond':
            return lambda scope, x: lift.cond(
                True, fn, lambda s, x: -fn(s, x), scope, x
            )

        def body(scope, x):
            return fn(scope, x), None

        scanned = lift.scan(body, variable_broadcast='params', split_rngs={}, length=2)
        return lambda scope, x: scanned(scope, x)[0]

    stop = functools.partial(core.stop_gradient, where='kernel')
    fn = stop(lifted(bare)) if place == 'over' else lifted(stop(bare))
    params = VARIABLES['params']['enc']

    def actual(params, x):
        return apply(fn)({'params': params}, x)

    def expected(params, x):
        copy = oracle.stopped(params, lambda path: path == 'kernel')
        return apply(lifted(bare))({'params': copy}, x)

    for _ in range(2):
        oracle.assert_same(actual(params, X), expected(params, X))
        oracle.assert_same(
            oracle.grads(actual, params, X), oracle.grads(expected, params, X)
        )


def test_the_modules_of_flax_core():
    def fn(scope, x):
        return core_nn.dense(scope, x, features=3, bias=True)

    assert_stops(core.stop_gradient(fn, 'kernel'), fn, 'kernel')


def test_arguments_and_results():
    def fn(scope, a, *rest, scale, **more):
        y = a * scope.param('w', ones, (1, 3)) * scale
        return {'y': y, 'rest': rest, **more}

    lifted = core.stop_gradient(fn, 'w')
    assert lifted.__name__ == 'fn'
    args, kwargs = (X, 2 * X, {'k': X}), {'scale': 3.0, 'last': (X,)}
    actual, variables = init(lifted)(KEY, *args, **kwargs)
    oracle.assert_same((actual, variables), init(fn)(KEY, *args, **kwargs))
    grads = jax.grad(lambda v: jnp.sum(apply(lifted)(v, *args, **kwargs)['y']))(
        variables
    )
    assert oracle.is_zero(grads)


def test_frozen_dicts():
    variables = freeze({'params': VARIABLES['params']['enc']})

    def bare(scope, x):
        return x @ scope.get_variable('params', 'kernel') + scope.get_variable(
            'params', 'bias'
        )

    grads = jax.grad(
        lambda v: jnp.sum(apply(core.stop_gradient(bare, 'kernel'))(v, X))
    )(variables)
    assert isinstance(grads, type(variables))
    assert oracle.is_zero(grads['params']['kernel'])
    assert not oracle.is_zero(grads['params']['bias'])


def test_collections():
    def fn(scope, x):
        return scope.get_variable('a', 'v') * scope.get_variable('b', 'v') * x

    variables = {'a': {'v': X}, 'b': {'v': 2 * X}}
    for collections, names in (('a', 'a'), (['a', 'b'], 'ab'), (True, 'ab')):
        lifted = core.stop_gradient(fn, 'v', collections)
        grads = jax.grad(lambda v, f=lifted: jnp.sum(apply(f)(v, X)))(variables)
        assert {k for k in 'ab' if oracle.is_zero(grads[k])} == set(names)
    with pytest.raises(errors.UnusedFilterError):
        apply(core.stop_gradient(fn, 'v', 'c'))(variables, X)
    apply(core.stop_gradient(fn, 'v', 'c', unused='ignore'))(variables, X)


def test_paths_are_relative_to_the_scope():
    seen: list[str] = []

    def where(path):
        seen.append(f'{path} {path.absolute}')
        return True

    def fn(scope, x):
        return scope.child(core.stop_gradient(layer, where), 'enc')(x)

    apply(fn)({k: {'enc': VARIABLES[k]['enc']} for k in ('params', 'state')}, X)
    assert sorted(seen) == ['bias enc/bias', 'kernel enc/kernel']


def test_errors():
    with pytest.raises(errors.FilterTypeError):
        core.stop_gradient(layer, None)
    with pytest.raises(errors.FilterValueError):
        core.stop_gradient(layer, 'enc/')
    with pytest.raises(errors.UnusedFilterError):
        init(core.stop_gradient(layer, 'kernle'))(RNGS, X)
    with pytest.raises(errors.FilterValueError):
        core.stop_gradient(layer, 'kernel', unused='no')


@dataclasses.dataclass(frozen=True)
class Twice(rules.Rule):
    """Reads see twice the value: a new rule is one small class."""

    name = 'twice'

    def __call__(self, path, leaf):
        return 2.0 * leaf


def test_lift_takes_any_rule():
    lifted = core.lift(
        layer, rewrites.BlockDecorator(filters.as_filter('kernel'), Twice())
    )
    variables = {
        'params': VARIABLES['params']['enc'],
        'state': VARIABLES['state']['enc'],
    }

    def actual(params, x):
        return apply(lifted)({**variables, 'params': params}, x)

    def expected(params, x):
        twice = {**params, 'kernel': 2.0 * params['kernel']}
        return apply(layer)({**variables, 'params': twice}, x)

    params = variables['params']
    oracle.assert_same(actual(params, X), expected(params, X))
    oracle.assert_same(
        oracle.grads(actual, params, X), oracle.grads(expected, params, X)
    )
    # What is stored stays as it is, and is initialised as without the rule.
    stored = init(lifted)(RNGS, X)[1]['params']
    oracle.assert_same(stored, init(layer)(RNGS, X)[1]['params'])


def test_lift_takes_the_value_of_the_linen_form():
    lifted = core.lift(layer, nn.train_only('bias'))
    assert_stops(lifted, layer, 'kernel')

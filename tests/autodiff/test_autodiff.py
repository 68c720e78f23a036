"""Derivatives of what is selected: exactly those of a tree split by hand."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flax_sg as sg
from flax_sg import errors, testing
from tests.helpers import oracle

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


class Net(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        x = jnp.tanh(fnn.Dense(4, name='body')(x))
        x = jnp.tanh(fnn.Dense(4, name='neck')(x))
        return fnn.Dense(2, name='head')(x)


NET = Net()
PARAMS = jax.jit(NET.init)(jax.random.key(0), X)['params']


def loss(params: Any, x: Any = X) -> Any:
    return jnp.sum(NET.apply({'params': params}, x) ** 2)


SELECTIONS = {
    'kernels': '**/kernel',
    'several': ['head/bias', 'neck/**'],
    'all': True,
    'none': False,
}


def by_hand(fun: Callable[..., Any], params: Any, where: Any) -> Any:
    """The arguments of ``jax.vjp`` for a tree of dicts, split by hand."""
    where, leaves = sg.filters.as_filter(where), flatten_dict(params).items()
    live = {k: leaf for k, leaf in leaves if where(sg.Path.of('params', k))}
    return lambda live, params: fun(rebuilt(params, live)), live


def rebuilt(params: Any, live: Any, others: Any = lambda leaf: leaf) -> Any:
    """The parameters, with others in the place of those that are not live."""
    leaves = flatten_dict(params).items()
    return unflatten_dict({k: others(leaf) for k, leaf in leaves} | live)


@pytest.mark.parametrize('name', SELECTIONS)
def test_grads_are_those_of_a_split_by_hand(name):
    where = SELECTIONS[name]
    fun, live = by_hand(loss, PARAMS, where)
    value, expected = jax.jit(jax.value_and_grad(fun))(live, PARAMS)
    expected = rebuilt(PARAMS, expected, lambda _: sg.ABSENT)
    options: Any = {'wrt': where, 'unused': 'ignore'}
    actual = jax.jit(sg.value_and_grad(loss, **options))(PARAMS)
    oracle.assert_same(actual, (value, expected))


def test_what_stands_for_the_others():
    fun, live = by_hand(loss, PARAMS, 'head/**')
    value, grads = jax.value_and_grad(fun)(live, PARAMS)
    for absent, stands in (
        ('drop', lambda _: sg.ABSENT),
        ('none', lambda _: None),
        ('zeros', jnp.zeros_like),
    ):
        expected = rebuilt(PARAMS, grads, stands)
        actual = sg.grad(loss, wrt='head/**', absent=absent)(PARAMS)
        oracle.assert_same(actual, expected)
        y, back = sg.vjp(loss, PARAMS, wrt='head/**', absent=absent)
        oracle.assert_same((y, back(1.0)), (value, (expected,)))


class Thing:
    """No number, no pytree."""


@pytest.mark.usefixtures('standard_promotion')
def test_leaves_of_any_kind():
    # Hazard 26: integers, booleans, keys, strings, objects.
    params = {
        'w': jnp.ones(3),
        'f': 2.0,
        'np': np.float32(2),
        'c': jnp.ones(2, jnp.complex64),
        'half': jnp.ones(2, jnp.bfloat16),
        'i': jnp.arange(3),
        'n': 4,
        'b': jnp.array([True]),
        'k': jax.random.key(0),
        's': 'text',
        'o': Thing(),
        'e': None,
        'u': np.uint8(3),
        'm': sg.NonDifferentiable(7),
    }

    def fun(p):
        assert p['s'] == 'text'
        assert isinstance(p['o'], Thing)
        noise = jax.random.normal(p['k'], (3,))
        return (
            jnp.sum(p['w'] * p['i'] * p['n'] * noise) * p['f'] * p['np'] * p['m']
            + jnp.sum(jnp.abs(p['c']))
            + jnp.sum(p['half'].astype(jnp.float32))
        )

    grads = sg.grad(fun)(params)
    found = {name for name, grad in grads.items() if jax.tree.leaves(grad)}
    assert found == {'w', 'f', 'np', 'c', 'half'}
    live = {name: params[name] for name in found}
    expected = jax.grad(lambda live: fun({**params, **live}))(live)
    oracle.assert_same({name: grads[name] for name in found}, expected)
    zeros = sg.grad(fun, absent='zeros')(params)
    assert zeros['i'].dtype == jnp.int32
    assert int(zeros['m']) == 0
    assert zeros['s'] is sg.ABSENT
    for name in ('i', 'n', 'b', 'k', 's', 'o', 'u', 'm'):
        with pytest.raises(errors.ArgumentTypeError, match=f"'{name}'"):
            sg.grad(fun, wrt=name)(params)
    with pytest.raises(errors.ArgumentTypeError):
        sg.grad(fun, wrt=['w', 'n'])(params)
    # A leaf that a filter excludes by name is not selected by name.
    assert sg.grad(fun, wrt=~sg.filters.as_filter('n'))(params)['n'] is sg.ABSENT


def test_a_gradient_penalty_on_other_leaves_than_the_inner_gradient():
    def penalty(grad, params):
        return jnp.sum(grad(params)['head']['kernel'] ** 2) + loss(params)

    def hand(params):
        of_head = jax.grad(lambda head: loss({**params, 'head': head}))
        return penalty(lambda p: {'head': of_head(p['head'])}, params)

    body = PARAMS['body']
    expected = jax.grad(lambda body: hand({**PARAMS, 'body': body}))(body)
    ours = functools.partial(penalty, sg.grad(loss, wrt='head/**'))
    oracle.assert_same(sg.grad(ours, wrt='body/**')(PARAMS)['body'], expected)
    # What the inner call leaves out, the outer one differentiates.
    full = jax.grad(ours)(PARAMS)
    oracle.assert_same(full, jax.grad(hand)(PARAMS))
    assert not oracle.is_zero(full['body'])


def two(p: Any, q: Any, x: Any, scale: float = 1.0) -> Any:
    return jnp.sum(jnp.sin(p['a'] * x) * q['a'] + p['b'] * q['c']) * scale


FIRST, SECOND = {'a': 0.3, 'b': 0.2}, {'a': 0.7, 'c': 1.5}


def test_several_arguments():
    def hand(a, b):
        return two({**FIRST, 'a': a}, {**SECOND, 'a': b}, X, scale=2.0)

    got = sg.grad(two, (0, 1), wrt='*/a')(FIRST, SECOND, X, scale=2.0)
    a, b = jax.grad(hand, (0, 1))(0.3, 0.7)
    oracle.assert_same(got, ({'a': a, 'b': sg.ABSENT}, {'a': b, 'c': sg.ABSENT}))
    last = sg.grad(two, np.int64(-2), wrt='c')(FIRST, SECOND, X)
    oracle.assert_same(last['c'], jnp.array(12 * 0.2))
    # A pattern has to match somewhere, in any of the arguments.
    both = sg.grad(two, [0, 1], wrt=['0/b', '1/c'])(FIRST, SECOND, X)
    assert both[0]['a'] is both[1]['a'] is sg.ABSENT
    masks: Any = {'a': False, 'b': True}, {'a': False, 'c': True}
    oracle.assert_same(sg.grad(two, (0, 1), wrt=masks)(FIRST, SECOND, X), both)
    # A path begins with the position of its argument, as in reports.
    full = jax.grad(two, 1)(FIRST, SECOND, X)
    for argnums in (0, 1), (1, 0), (-2, 0):
        grads = sg.grad(two, argnums, wrt='1/**')(FIRST, SECOND, X)
        first, second = grads if argnums == (0, 1) else grads[::-1]
        assert first == {'a': sg.ABSENT, 'b': sg.ABSENT}
        oracle.assert_same(second, full)
    with pytest.raises(errors.UnusedFilterError):
        sg.grad(two, 0, wrt=['b', 'c'])(FIRST, SECOND, X)
    _, back = sg.vjp(two, FIRST, SECOND, X, wrt='a')
    assert back(1.0)[2] is sg.ABSENT


def with_aux(p: Any) -> Any:
    return p['a'] ** 2 * p['b'], {'seen': p['a']}


def test_auxiliary_outputs():
    p = {'a': 3.0, 'b': 2.0}
    grads, aux = sg.grad(with_aux, has_aux=True, wrt='a')(p)
    assert (float(grads['a']), float(aux['seen'])) == (12.0, 3.0)
    (value, aux), grads = sg.value_and_grad(with_aux, has_aux=True, wrt='a')(p)
    assert (float(value), float(grads['a']), float(aux['seen'])) == (18.0, 12.0, 3.0)
    y, back, aux = sg.vjp(with_aux, p, has_aux=True, wrt='a')
    assert (float(y), float(back(1.0)[0]['a'])) == (18.0, 12.0)


def vector(p: Any) -> Any:
    return {'u': jnp.sin(p['a']) * p['b'], 'v': (jnp.sum(p['a'] ** 3) * p['n'],)}


V = {'a': jnp.array([1.0, 2.0]), 'b': jnp.array([3.0, 4.0]), 'n': 2.0}


def test_back_is_called_several_times_and_leaves_a_jit():
    y, back = jax.jit(lambda p: sg.vjp(vector, p, wrt='a'))(V)
    expected, pull = jax.vjp(lambda a: vector({**V, 'a': a}), V['a'])
    oracle.assert_same(y, expected)
    for scale in (1.0, 2.0, -3.0):
        seed = jax.tree.map(lambda leaf, s=scale: s * jnp.ones_like(leaf), y)
        oracle.assert_same(back(seed)[0]['a'], pull(seed)[0])
    once = jax.jit(lambda back, seed: back(seed))(back, seed)
    oracle.assert_same(once[0]['a'], pull(seed)[0])
    with pytest.raises(ValueError, match='unexpected tree structure') as caught:
        back({'other': y})
    assert 'fun_of_live' not in str(caught.value)  # Newer versions name the function.


def test_a_dict_of_collections():
    class Normed(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            return fnn.BatchNorm(use_running_average=True, name='norm')(x)

    variables = oracle.init(Normed(), jax.random.key(0), X)

    def fun(variables):
        return jnp.sum(Normed().apply(variables, X) ** 2)

    oracle.assert_same(sg.grad(fun, wrt='norm/*')(variables), jax.grad(fun)(variables))

    grads = sg.grad(fun, wrt=lambda path: path.collection == 'params')(variables)
    assert jax.tree.leaves(grads['batch_stats']) == []
    expected = jax.grad(lambda p: fun({**variables, 'params': p}))(variables['params'])
    oracle.assert_same(grads['params'], expected)


def test_new_values_as_gradients_are_always_there():
    # Hazard 38: fp8 layers receive these values as their gradient.
    variables = {
        'params': {'a': {'w': 2.0}, 'b': {'w': 3.0}},
        '_overwrite_with_gradient': {'a': {'scale': 5.0}},
    }

    def fun(v):
        scale = v['_overwrite_with_gradient']['a']['scale']
        return v['params']['a']['w'] * v['params']['b']['w'] * scale

    for wrt in ('b/w', False, True, sg.DECLARED):
        grads = sg.grad(fun, wrt=wrt, unused='ignore')(variables)
        assert float(grads['_overwrite_with_gradient']['a']['scale']) == 6.0


# One program, and that of the split by hand.


def test_the_program_is_that_of_the_split_by_hand():
    where = ['neck/kernel', 'head/**']
    fun, live = by_hand(loss, PARAMS, where)

    def hand(params):
        given = {k: params[k[0]][k[1]] for k in live}
        value, grads = jax.value_and_grad(fun)(given, params)
        return value, [grads[k] for k in sorted(grads)]

    ours = sg.value_and_grad(loss, wrt=where)
    testing.assert_same_program(ours, hand, PARAMS)
    with pytest.raises(AssertionError):
        testing.assert_same_program(ours, jax.value_and_grad(loss), PARAMS)


@pytest.mark.usefixtures('leaks')
def test_no_tracer_is_kept():
    """JAX raises if one outlives its trace."""
    marked = {'a': sg.NonDifferentiable(1.0), 'b': 2.0}
    jax.jit(jax.grad(lambda p: p['a'] * p['b']))(marked)
    jax.jit(sg.grad(lambda p: p['a'] * p['b'], wrt='b'))(marked)


CALLS = {
    'grad': lambda fun, p, **options: sg.grad(fun, **options)(p),
    'value_and_grad': lambda fun, p, **options: sg.value_and_grad(fun, **options)(p),
    'vjp': lambda fun, p, **options: sg.vjp(fun, p, **options)[1](1.0)[0],
}


# What is given has to be what it seems.


@pytest.mark.parametrize('wrt', [[], (), set(), False, np.False_])
def test_nothing_to_differentiate(wrt):
    for call in CALLS.values():
        with pytest.raises(errors.UnusedFilterError, match='differentiates nothing'):
            call(loss, PARAMS, wrt=wrt)
        call(loss, PARAMS, wrt=wrt, unused='ignore')
    # What a program made of filters may come to nothing.
    nothing = sg.filters.as_filter(wrt)
    assert jax.tree.leaves(sg.grad(loss, wrt=nothing)(PARAMS)) == []


# Zeros have the type that gradients have.


def placed() -> dict[str, Any]:
    mesh = jax.make_mesh((8,), ('x',), axis_types=(AxisType.Explicit,))
    cut, every = (P('x'), P())
    return {
        'w': jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, cut)),
        'b': jax.device_put(jnp.ones(4), NamedSharding(mesh, every)),
    }


def of_b(p: Any) -> Any:
    return jnp.sum(p['b'] ** 2)


ZEROS = sg.grad(of_b, wrt='b', absent='zeros')


def zeros_like(p: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, p)


def test_zeros_are_sharded_as_the_parameter():
    p = placed()
    with jax.set_mesh(p['w'].sharding.mesh):
        expected = jax.grad(of_b)(p)
        for grads in (
            ZEROS(p),
            jax.jit(ZEROS)(p),
            jax.jit(lambda p: jax.lax.cond(p['b'][0] > 0, ZEROS, zeros_like, p))(p),
        ):
            oracle.assert_same(grads, expected)
            assert grads['w'].sharding == expected['w'].sharding
            assert jax.typeof(grads['w']) == jax.typeof(p['w'])


def test_zeros_vary_as_the_parameter():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ('x',))
    specs = {'w': P('x'), 'b': P()}

    def step(p):
        p = jax.lax.cond(p['b'][0] > 0, ZEROS, zeros_like, p)
        return jax.lax.fori_loop(0, 2, lambda _, p: ZEROS(p), p)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=specs)
    grads = jax.jit(mapped)({'w': jnp.ones((8, 4)), 'b': jnp.ones(4)})
    oracle.assert_same(grads, {'w': jnp.zeros((8, 4)), 'b': jnp.full(4, 8.0)})


def test_zeros_are_in_the_memory_of_the_parameter():
    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind='pinned_host')
    p = {'w': jax.device_put(jnp.ones(3), host), 'b': jnp.ones(4)}
    assert ZEROS(p)['w'].sharding.memory_kind == 'pinned_host'
    assert ZEROS({**p, 'w': jnp.ones(3)})['w'].sharding.memory_kind == 'device'

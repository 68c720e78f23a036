"""Filters, rules and lifted classes in fields of jitted modules.

Of a field ``nn.jit`` keeps the hash alone, so what differs may never have one hash.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

import flax_sg as sg
from flax_sg import linen as nn
from tests.helpers import oracle

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)
PARAMS = oracle.init(fnn.Dense(2), jax.random.key(0), X)['params']


@fnn.jit
class Opens(fnn.Module):
    """A block of something in a field."""

    block: Any

    @fnn.compact
    def __call__(self, x):
        dense = fnn.Dense(2, name='dense')
        with self.block:
            return dense(x)


@fnn.jit
class Makes(fnn.Module):
    """A module of a class in a field."""

    cls: Any

    @fnn.compact
    def __call__(self, x):
        return self.cls(2, name='dense')(x)


@fnn.jit
class Holds(fnn.Module):
    """A module in a field."""

    inner: Any

    @fnn.compact
    def __call__(self, x):
        return self.inner(x)


def grads(model: Any, name: str = 'dense') -> Any:
    def loss(params: Any) -> Any:
        return jnp.sum(model.apply({'params': {name: params}}, X))

    gc.collect()  # What was made before is gone, and its id is free.
    return jax.grad(loss)(PARAMS)


PLAIN = jax.grad(lambda p: jnp.sum(fnn.Dense(2).apply({'params': p}, X)))(PARAMS)


def scaled(kernel: float) -> Any:
    return {'bias': PLAIN['bias'], 'kernel': kernel * PLAIN['kernel']}


def stopped(row: int) -> Any:
    return {'bias': PLAIN['bias'], 'kernel': PLAIN['kernel'].at[row].set(0.0)}


class Takes:
    """A callable object: a filter."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, path: sg.Path) -> bool:
        return path.name == self.name

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0

    def method(self, path: sg.Path) -> bool:
        return self(path)


def _without(name: str) -> Any:
    return {**PLAIN, name: jnp.zeros_like(PLAIN[name])}


# An object may get the id of one that is gone.
MANY = 40 if settings.get_current_profile_name() == 'long' else 6

FUNCTIONS: dict[str, Callable[[str], Any]] = {
    'lambda': lambda name: lambda path: path.name == name,
    'partial': lambda name: functools.partial(lambda n, path: path.name == n, name),
    'object': Takes,
    'method': lambda name: Takes(name).method,
}


@pytest.mark.parametrize('kind', FUNCTIONS)
def test_functions(kind):
    make = FUNCTIONS[kind]
    for i in range(MANY):
        name = ('kernel', 'bias')[i * i % 3 % 2]
        model = Opens(nn.stop_gradient(make(name)))
        oracle.assert_same(grads(model), _without(name))
        frozen = Holds(nn.Frozen(fnn.Dense(2), make(name)))
        oracle.assert_same(grads(frozen, 'inner'), _without(name))


# In each row values with one hash of Python.
FACTORS = {'hash(-1)': (-1.0, -2.0), 'zeros': (0.0, -0.0), 'int': (-1, -2)}


@pytest.mark.parametrize('case', FACTORS)
@pytest.mark.parametrize('turned', [False, True])
def test_factors(case, turned):
    for factor in FACTORS[case][:: -1 if turned else 1]:
        block = nn.scale_gradient('**/kernel', factor)
        oracle.assert_same(grads(Opens(block)), scaled(factor))
        reverse = nn.reverse_gradient('kernel', -factor)
        for rewrite in block, reverse:
            oracle.assert_same(grads(Makes(rewrite(fnn.Dense))), scaled(factor))


@pytest.mark.parametrize('rows', [(-1, -2), (-2, -1)])
def test_indices(rows):
    for row in rows:
        block = nn.stop_gradient(sg.at('**/kernel', row))
        oracle.assert_same(grads(Opens(block)), stopped(row))
    for cut, row in ((np.s_[:-1], 0), (np.s_[-1:], 1), (np.s_[:1], 0)):
        block = nn.stop_gradient(sg.at('**/kernel', cut))
        oracle.assert_same(grads(Opens(block)), stopped(row))


def plus(path: sg.Path, ct: Any, number: Any) -> Any:
    assert number.aval.weak_type == WEAK[-1]
    return (ct + number).astype(ct.dtype)


WEAK: list[bool] = []


def test_weak_types():
    strong, weak = jnp.float32(1.0), jax.jit(lambda: 1.0)()
    for factor in (strong, weak, strong):
        WEAK.append(factor.weak_type)
        block = nn.map_cotangent('**/kernel', plus, factor)
        expected = {**PLAIN, 'kernel': PLAIN['kernel'] + 1.0}
        oracle.assert_same(grads(Opens(block)), expected)


base = fnn.Dense(2)


class Shares(fnn.Module):
    """Two modules around one that was made outside of all modules."""

    wrap: Callable[[Any], Any]

    @fnn.compact
    def __call__(self, x):
        return fnn.Sequential([base])(x) * self.wrap(base)(x)


@pytest.mark.parametrize(
    'wrap', [nn.Frozen, lambda module: nn.Frozen(nn.Frozen(module)), nn.mirror]
)
def test_a_module_from_outside_is_the_one_that_another_module_has_adopted(wrap):
    params = oracle.init(Shares(wrap), jax.random.key(0), X)['params']
    assert jax.tree.map(jnp.shape, params) == {
        'Sequential_0': {'layers_0': {'kernel': (2, 2), 'bias': (2,)}}
    }

    def by_hand(params, x):
        stopped = oracle.stopped(params)
        dense = [p['Sequential_0']['layers_0'] for p in (params, stopped)]
        live, frozen = (fnn.Dense(2).apply({'params': p}, x) for p in dense)
        return live * frozen

    oracle.assert_same_grads(
        lambda params, x: Shares(wrap).apply({'params': params}, x), by_hand, params, X
    )

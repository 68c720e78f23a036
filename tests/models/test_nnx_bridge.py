"""Linen in NNX and NNX in linen, by ``nnx.bridge``, with blocks and wrappers.

Each model is compared with the same model whose parameters are stopped by hand before
they are passed in. Values and gradients are equal to the last bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import flax_sg as sg
import oracle
from flax_sg import linen as nn

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Net(linen.Module):
    def setup(self):
        self.body, self.norm = linen.Dense(4), linen.BatchNorm()
        self.head = linen.Dense(2)

    def __call__(self, x):
        x = self.norm(linen.tanh(self.body(x)), use_running_average=False)
        return self.head(x)


class Inside(Net):
    def __call__(self, x):
        with nn.stop_gradient('body/**'):
            x = linen.tanh(self.body(x))
        return self.head(self.norm(x, use_running_average=False))


# Linen in NNX


class InNNX(nnx.Module):
    """An NNX layer, and a linen module on top of it."""

    def __init__(self, net: Any):
        self.lower = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.net = nnx.bridge.ToNNX(net, rngs=nnx.Rngs(1))
        self.net.lazy_init(X)

    def __call__(self, x):
        return self.net(self.lower(x), mutable=['batch_stats'])


def loss_of(model: Any) -> jax.Array:
    return jnp.mean((model(X) - 1.0) ** 2)


def nnx_grads(model: Any, stop: Any = (), where: Any = None) -> Any:
    """Value, gradients and state after the call, as plain dicts.

    Args:
        model: an NNX module.
        stop: by hand: the names in ``'net'`` whose parameters are stopped.
        where: the filter of a block around the loss.
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def loss(params, rest):
        tree = nnx.to_pure_dict(params)
        tree['net'] = oracle.stopped(tree['net'], lambda path: path.startswith(stop))
        nnx.replace_by_pure_dict(params, tree)
        model = nnx.merge(graph, params, rest)
        if where is None:
            value = loss_of(model)
        else:
            with nn.stop_gradient(where):
                value = loss_of(model)
        return value, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, rest)
    return value, stats, nnx.to_pure_dict(grads)


def test_a_block_around_a_call_of_linen_in_nnx():
    expected = nnx_grads(InNNX(Net()), ('body/kernel', 'head/kernel'))
    oracle.assert_same(nnx_grads(InNNX(Net()), where='**/kernel'), expected)
    # Layers below the stop are trained, and batch statistics are updated.
    _, stats, grads = expected
    assert all(leaf.any() for leaf in jax.tree.leaves(grads['lower']))
    assert stats['net']['norm']['mean'].any()


@pytest.mark.parametrize(
    'net',
    [Inside(), nn.Frozen(Net(), 'body/**')],
    ids=['block', 'Frozen'],
)
def test_a_stop_inside_of_linen_in_nnx(net):
    oracle.assert_same(nnx_grads(InNNX(net)), nnx_grads(InNNX(Net()), 'body/'))


def test_transforms_of_nnx():
    expected = nnx_grads(InNNX(Net()), 'body/')[-1]

    def blocked(model):
        with nn.stop_gradient('body/**'):
            return loss_of(model)

    for model, loss in ((InNNX(Net()), blocked), (InNNX(Inside()), loss_of)):
        grads = nnx.jit(nnx.grad(loss))(model)
        oracle.assert_same(nnx.to_pure_dict(grads), expected)


def test_paths_begin_at_each_linen_module():
    class Two(nnx.Module):
        def __init__(self):
            self.one = nnx.bridge.ToNNX(linen.Dense(4), rngs=nnx.Rngs(0)).lazy_init(X)
            self.two = nnx.bridge.ToNNX(linen.Dense(4), rngs=nnx.Rngs(1)).lazy_init(X)

        def __call__(self, x):
            return self.two(self.one(x))

    def loss(model):
        with nn.stop_gradient('kernel'):
            return loss_of(model)

    grads = nnx.to_pure_dict(nnx.grad(loss)(Two()))
    trained = {
        (module, name): bool(leaf.any())
        for module, leaves in grads.items()
        for name, leaf in leaves.items()
    }
    assert trained == {
        ('one', 'bias'): True,
        ('one', 'kernel'): False,
        ('two', 'bias'): True,
        ('two', 'kernel'): False,
    }


def test_variables_of_nnx_are_out_of_reach_and_that_raises():
    model = InNNX(Net())
    with (
        pytest.raises(sg.errors.UnusedFilterError, match=r"Glob\('lower/\*\*'\)"),
        nn.stop_gradient('lower/**'),
    ):
        loss_of(model)


# NNX in linen


class Inner(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.second = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.second(self.norm(nnx.tanh(self.first(x))))


class InLinen(nn.Module):
    """A module of NNX between two of linen."""

    where: str = ''
    wrapped: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, name='below')(x)
        inner = nnx.bridge.to_linen(Inner, name='inner')
        if self.wrapped:
            inner = nn.Frozen(inner)
        if self.where:
            with nn.stop_gradient(self.where):
                x = inner(x)
        else:
            x = inner(x)
        return nn.Dense(2, name='head')(x)


def linen_grads(model: Any, stop: Any = (), where: Any = None) -> Any:
    """Value, gradients and state after the call, by hand or in a block."""
    variables = jax.jit(InLinen().init)(jax.random.key(0), X)

    @jax.jit
    def loss(params):
        stopped = oracle.stopped(params, lambda path: path.startswith(stop))
        given = {**variables, 'params': stopped}

        def call():
            return model.apply(given, X, mutable=['batch_stats'])

        if where is None:
            y, state = call()
        else:
            with nn.stop_gradient(where):
                y, state = call()
        return jnp.mean((y - 1.0) ** 2), state

    (value, state), grads = jax.value_and_grad(loss, has_aux=True)(variables['params'])
    return value, state, grads


KERNELS = ('below/kernel', 'inner/first/kernel', 'inner/second/kernel', 'head/kernel')


@pytest.mark.parametrize(
    ('where', 'stop'),
    [
        ('**/kernel', KERNELS),
        (['below/**', 'inner/second/bias'], ('below/', 'inner/second/bias')),
    ],
)
def test_a_block_around_linen_with_nnx_inside(where, stop):
    expected = linen_grads(InLinen(), stop)
    oracle.assert_same(linen_grads(InLinen(), where=where), expected)
    assert any(leaf.any() for leaf in jax.tree.leaves(expected[-1]))


def test_a_block_inside_of_linen_around_nnx():
    where = 'inner/first/**'
    expected = linen_grads(InLinen(), where.removesuffix('**'))
    oracle.assert_same(linen_grads(InLinen(where=where)), expected)
    # Gradients pass through the frozen part.
    assert all(leaf.any() for leaf in jax.tree.leaves(expected[-1]['below']['kernel']))


@pytest.mark.parametrize(
    ('model', 'stop'),
    [
        (InLinen(wrapped=True), 'inner/'),
        (nn.Frozen(InLinen(), 'inner/second/**'), 'inner/second/'),
    ],
    ids=['around the bridge', 'around the model'],
)
def test_frozen_around_nnx(model, stop):
    oracle.assert_same(linen_grads(model), linen_grads(InLinen(), stop))

"""Linen in NNX, by ``nnx.bridge``, with blocks and wrappers.

Each model is compared with the same model whose parameters are stopped by hand before
they are passed in. Values and gradients are equal to the last bit.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import nnx
from tests.helpers import oracle

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


def nnx_grads(
    model: Any, stop: Any = (), where: Any = None, viewed: Any = False
) -> Any:
    """Value, gradients and state after the call, as plain dicts.

    Args:
        model: an NNX module.
        stop: by hand: the names in ``'net'`` whose parameters are stopped.
        where: the filter of a block around the loss.
        viewed: the filter of a view of the NNX model. ``ToNNX`` assigns batch
            statistics, so the view has them.
    """
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def loss(params, rest):
        tree = nnx.to_pure_dict(params)
        tree['net'] = oracle.stopped(tree['net'], lambda path: path.startswith(stop))
        nnx.replace_by_pure_dict(params, tree)
        model = nnx.merge(graph, params, rest)
        with nn.stop_gradient(where or False):
            model = nnx.stop_gradient(model, viewed) if viewed else model
            value = loss_of(model)
        return value, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, rest)
    return value, stats, nnx.to_pure_dict(grads)


@pytest.mark.parametrize(
    ('net', 'how', 'stop'),
    [
        (Net(), {'where': '**/kernel'}, ('body/kernel', 'head/kernel')),
        (Inside(), {}, 'body/'),
        (nn.Frozen(Net(), 'body/**'), {}, 'body/'),
        (Net(), {'viewed': 'net/body/**'}, 'body/'),
        (nn.Frozen(Net(), 'body/*'), {'viewed': 'net/head/*'}, ('body/', 'head/')),
    ],
    ids=['around', 'inside', 'Frozen', 'view', 'both'],
)
def test_linen_in_nnx(net, how, stop):
    expected = nnx_grads(InNNX(Net()), stop)
    oracle.assert_same(nnx_grads(InNNX(net), **how), expected)
    # Layers below the stop are trained, and batch statistics are updated.
    _, stats, grads = expected
    assert all(leaf.any() for leaf in jax.tree.leaves(grads['lower']))
    assert stats['net']['norm']['mean'].any()


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

    grads = nnx.to_pure_dict(nnx.jit(nnx.grad(loss))(Two()))
    for module in ('one', 'two'):
        zero = {name: oracle.is_zero(leaf) for name, leaf in grads[module].items()}
        assert zero == {'bias': False, 'kernel': True}


def test_a_block_around_a_compiled_program_is_silent():
    """It reads nothing when it runs again: the model has linen in it."""
    model, step = InNNX(Net()), nnx.jit(nnx.grad(loss_of))
    for _ in range(2):
        with nn.stop_gradient(True):
            step(model)


def test_a_block_around_a_compiled_program_of_linen_is_silent_beside_nnx():
    net, beside = Net(), nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    variables = oracle.init(net, jax.random.key(0), X)
    step = jax.jit(lambda v: net.apply(v, beside(X), mutable=['batch_stats'])[0])
    for _ in range(2):
        with nn.stop_gradient(True):
            step(variables)


def test_variables_of_nnx_are_out_of_reach_and_that_raises():
    model = InNNX(Net())
    with (
        pytest.raises(sg.errors.UnusedFilterError, match=r"Glob\('lower/\*\*'\)"),
        nn.stop_gradient('lower/**'),
    ):
        loss_of(model)

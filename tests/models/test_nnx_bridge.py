"""Linen in NNX and NNX in linen, by ``nnx.bridge``, with blocks and wrappers.

Each model is compared with the same model whose parameters are stopped by hand before
they are passed in. Values and gradients are equal to the last bit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen
from flax.traverse_util import flatten_dict

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
    """It reads nothing when it runs again: linen is in it, in NNX or beside it."""
    net, beside = Net(), nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    variables = oracle.init(net, jax.random.key(0), X)
    of_linen = jax.jit(lambda v: net.apply(v, beside(X), mutable=['batch_stats'])[0])
    for step, given in (
        (nnx.jit(nnx.grad(loss_of)), InNNX(Net())),
        (of_linen, variables),
    ):
        for _ in range(2):
            with nn.stop_gradient(True):
                step(given)


def test_variables_of_nnx_are_out_of_reach_and_that_raises():
    model = InNNX(Net())
    with (
        pytest.raises(sg.errors.UnusedFilterError, match=r"Glob\('lower/\*\*'\)"),
        nn.stop_gradient('lower/**'),
    ):
        loss_of(model)


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, deterministic=None):
        return self.drop(self.norm(self.linear(x)), deterministic=deterministic)


class Stack(nnx.Module):
    """Its list has numbers as keys in the variables of linen."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Layer(rngs), Layer(rngs)])

    def __call__(self, x, deterministic=None):
        for layer in self.layers:
            x = layer(x, deterministic)
        return x

    def doubled(self, x):
        return 2.0 * self(x)


def in_linen(wrap: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
    """Output and batch statistics of an NNX model in linen."""
    kwargs |= {'rngs': {'dropout': jax.random.key(3)}, 'mutable': ['batch_stats']}
    return wrap(nnx.bridge.to_linen(Stack)).apply(variables, X, *args, **kwargs)


def variables_of_stack() -> Any:
    model = nnx.bridge.to_linen(Stack)
    keys = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
    variables = oracle.init(model, keys, X)
    assert variables['params']['layers'].keys() == {0, 1}
    return variables


# A wrapper, of a module and other values; the layers that it stops; those whose state
# it holds; whether it reads the other values.
IN_LINEN = {
    'a part': (lambda m, _: nn.Frozen(m, 'layers/0/**'), {0}, (), False),
    'held': (lambda m, _: nn.Frozen(m, state='hold'), {0, 1}, (0, 1), False),
    'a view': (lambda m, _: nn.mirror(m, 'layers/1/**'), {1}, (1,), False),
    'other values': (lambda m, v: nn.mirror(m, variables=v), {0, 1}, (0, 1), True),
}


@pytest.mark.parametrize('compiled', [False, True])
@pytest.mark.parametrize('row', IN_LINEN.values(), ids=IN_LINEN)
def test_nnx_in_linen(row: Any, compiled: bool) -> None:
    wrap, layers, held, is_other = row
    variables = variables_of_stack()
    other = jax.tree.map(jnp.sin, variables['params'])

    def loss(wrap: Any, read: Any) -> Any:
        def of_params(params: Any) -> Any:
            given = {**variables, 'params': read(params)}
            out, updates = in_linen(wrap, given)
            return jnp.sum(out), updates['batch_stats']

        of_params = jax.jit(of_params) if compiled else of_params
        return jax.value_and_grad(of_params, has_aux=True)(variables['params'])

    def by_hand(params: Any) -> Any:
        read = (other if is_other else params)['layers']
        stopped = {n: jax.lax.stop_gradient(read[n]) for n in layers}
        return {'layers': {**read, **stopped}}

    (value, stats), grads = loss(lambda m: wrap(m, other), lambda params: params)
    (expected, updated), expected_grads = loss(lambda module: module, by_hand)
    kept = {n: variables['batch_stats']['layers'][n] for n in held}
    updated = {'layers': {**updated['layers'], **kept}}
    oracle.assert_same((value, stats, grads), (expected, updated, expected_grads))


@pytest.mark.parametrize('kwargs', [{}, {'deterministic': False}])
@pytest.mark.parametrize('method', [None, '__call__', Stack.__call__, 'doubled'])
def test_nnx_in_linen_evaluates(method: Any, kwargs: Any) -> None:
    """As after ``model.eval()``, whatever the caller says."""
    if method == 'doubled' and kwargs:
        return  # It takes no flag.
    variables, by_hand = variables_of_stack(), Stack(nnx.Rngs(0))
    by_hand.eval()
    for collection in ('params', 'batch_stats'):
        for n, parts in variables[collection]['layers'].items():
            for (part, name), value in flatten_dict(parts).items():
                getattr(getattr(by_hand.layers[n], part), name)[...] = value
    out, updates = in_linen(
        lambda module: nn.Frozen(module, state='eval'),
        variables,
        nnx_method=method,
        **kwargs,
    )
    oracle.assert_same(out, (2.0 if method == 'doubled' else 1.0) * by_hand(X))
    oracle.assert_same(updates['batch_stats'], variables['batch_stats'])


def test_a_part_of_nnx_in_linen_evaluates() -> None:
    """One layer uses what is stored, without dropout; the other one trains."""
    variables = variables_of_stack()
    part = functools.partial(nn.Frozen, where='layers/1/**', state='eval')
    out, updates = in_linen(part, variables)
    plain, updated = in_linen(lambda module: module, variables)
    stats = {0: updated['batch_stats']['layers'][0]}
    stats |= {1: variables['batch_stats']['layers'][1]}
    oracle.assert_same(updates['batch_stats'], {'layers': stats})
    assert bool(plain.any(axis=1).all()) and not bool((out == 0.0).any())
    assert bool((plain == 0.0).any())  # Dropout of the last layer.


def test_parameters_that_nnx_writes_back_are_not_written() -> None:
    model, variables = nnx.bridge.to_linen(Stack), variables_of_stack()
    with nn.read_only('layers/**', collections='params'):
        model.apply(variables, X, rngs={'dropout': jax.random.key(0)}, mutable=True)

"""Stacks of which some layers are trained: the frozen ones below are computed once."""

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flax_sg as sg
from flax_sg import linen as nn
from tests.ahead import splits
from tests.helpers import oracle

LAYERS = 5
STACK = jax.random.normal(jax.random.key(0), (LAYERS, 4, 4)) / 2
PARAMS: Any = {'stack': STACK, 'head': jnp.linspace(-1.0, 1.0, 4)}
X = jax.random.normal(jax.random.key(1), (3, 4))
KEY = jax.random.key(4)
ABOVE = sg.at('stack', np.s_[2:])


def turns(fun: Any, *args: Any) -> list[int]:
    """For each loop with a product in it how many turns it has, in order."""

    def of(jaxpr: Any) -> Iterator[int]:
        for eqn in jaxpr.eqns:
            body = eqn.params.get('jaxpr')
            if eqn.primitive.name != 'scan' and body is not None:
                yield from of(getattr(body, 'jaxpr', body))
            elif 'dot_general[' in str(body):
                yield eqn.params['length']

    return [*of(jax.make_jaxpr(fun)(*args).jaxpr)]


def assert_same(ours: Any, right: Any) -> None:
    splits.assert_same(ours, right, 1e-4)
    for a, b in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
        np.testing.assert_array_equal(a == 0, b == 0)


def assert_split(
    fun: Any, params: Any, wrt: Any, once: list[int], then: list[int]
) -> None:
    """Some turns are made once, and the others by a step; the gradients are those."""
    with warnings.catch_warnings(action='ignore'):
        ahead = sg.precompute(fun, params, X, wrt=wrt)
    kept = ahead.early(params, X)
    ours = sg.value_and_grad(ahead.late, wrt=wrt)(params, kept)
    assert_same(ours, sg.value_and_grad(fun, wrt=wrt)(params, X))
    assert turns(ahead.early, params, X) == once
    assert turns(ahead.late, params, kept) == then
    moved = jax.tree.map(lambda x: x + 1, params)
    moved = sg.combine(sg.partition(moved, wrt)[0], sg.partition(params, wrt)[1])
    oracle.assert_same(ahead.early(moved, X), kept)


def layer(h: Any, w: Any) -> Any:
    return jnp.tanh(h @ w), h.sum()


@pytest.mark.parametrize('reverse', (False, True))
def test_a_loop_over_a_stack(reverse: bool):
    """The turns below the first trained layer leave the loop."""

    def loss(params: Any, x: Any) -> Any:
        h, sums = lax.scan(layer, x, params['stack'], reverse=reverse)
        return jnp.sum(h @ params['head']) + jnp.sum(sums * jnp.arange(5.0))

    above = sg.at('stack', np.s_[:3] if reverse else np.s_[2:])
    assert_split(loss, PARAMS, [above, 'head'], [2], [3])
    assert_split(loss, PARAMS, above, [2], [3])
    assert_split(loss, PARAMS, 'head', [5], [])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return jnp.tanh(nn.Dense(4, name='dense')(x)) + x, None


class Tower(nn.Module):
    """A stack of layers by ``nn.scan``, and a head."""

    frozen: Any = None
    lift: Any = lambda cls: cls

    @nn.compact
    def __call__(self, x: Any) -> Any:
        options = {'length': LAYERS, 'frozen_layers': self.frozen, **oracle.STACKED}
        layers = nn.scan(self.lift(Layer), **options)(name='layers')
        return nn.Dense(2, name='head')(layers(x, None)[0])


def of_tower(*fields: Any) -> tuple[Any, Any]:
    net = Tower(*fields)
    params = oracle.init(net, jax.random.key(2), X)['params']
    return params, lambda p, x: jnp.mean(net.apply({'params': p}, x) ** 2)


@pytest.mark.parametrize('lift', (lambda cls: cls, nn.remat))
def test_frozen_layers_of_a_scan(lift: Any):
    """``frozen_layers=`` reads the whole stack, by an index."""
    params, loss = of_tower(slice(3), lift)
    assert_split(loss, params, sg.live(loss, params, X), [3], [2])


def test_a_stack_with_a_mask():
    """A block around a plain scan, and a filter without a stop."""
    params, plain = of_tower()

    def loss(params: Any, x: Any) -> Any:
        with nn.stop_gradient(sg.at('layers/**', np.s_[:4])):
            return plain(params, x)

    assert_split(loss, params, sg.live(loss, params, X), [4], [1])
    above = [sg.at('layers/**', np.s_[4:]), 'head/**']
    assert_split(plain, params, above, [4], [1])


def test_layers_that_are_put_together():
    """Frozen layers joined with trained ones in the loss."""

    def joined(params: Any, x: Any) -> Any:
        stack = jnp.concatenate([params['below'] * 2, params['above']])
        return jnp.sum(lax.scan(layer, x, stack)[0])

    params = {'below': STACK[:2], 'above': STACK[2:]}
    assert_split(joined, params, 'above', [2], [3])


def test_frozen_rows_have_no_gradient():
    """What goes through the kept values would be missing from it."""

    def loss(params: Any, x: Any) -> Any:
        h, _ = lax.scan(layer, x, params['stack'])
        return jnp.sum(h) + jnp.sum(params['stack'] ** 2)

    ahead = sg.precompute(loss, PARAMS, X, wrt=ABOVE)
    grads = jax.grad(ahead.late)(PARAMS, ahead.early(PARAMS, X))['stack']
    assert not grads[:2].any()
    right = sg.grad(loss, wrt=ABOVE)(PARAMS, X)['stack']
    np.testing.assert_allclose(grads[2:], right[2:], rtol=1e-5)


def test_frozen_rows_that_are_returned_or_sliced_have_no_gradient():
    """Beside a slice of trained rows, which needs no mask."""

    def fun(params: Any, x: Any) -> Any:
        stack = params['stack']
        h, _ = lax.scan(layer, x, stack)
        pairs = params['pairs'].reshape(2, 2, 4, 4)
        written = params['written'].at[np.array([4])].set(1.0)
        out = stack, params['twice'][1:4] * x[0, 0], stack[2:], pairs, written
        return jnp.sum(h), *out

    params = {**PARAMS, 'twice': STACK, 'pairs': STACK[:4], 'written': STACK}
    wrt = sg.at(['stack', 'twice', 'written'], np.s_[2:]), sg.at('pairs', np.s_[1::2])
    ahead = sg.precompute(fun, params, X, wrt=[*wrt])
    kept = ahead.early(params, X)
    grads = jax.grad(lambda p: sum(map(jnp.sum, ahead.late(p, kept))))(params)
    live = {'stack': [2, 3, 4], 'twice': [2, 3], 'pairs': [1, 3], 'written': [2, 3]}
    for name, rows in live.items():
        assert [n for n, row in enumerate(grads[name]) if row.any()] == rows
        assert grads[name][np.array(rows)].all()


def by_index(params: Any, more: Any = 0.0) -> Any:
    """A turn that reads the layer of a number."""

    def turn(h: Any, t: Any) -> Any:
        w = lax.dynamic_index_in_dim(params['stack'], t, keepdims=False)
        return jnp.tanh(h @ w) + more, None

    return turn


def test_layers_by_an_index() -> None:
    """Loops that read some layers alone: those of frozen layers are computed once."""

    def loss(params: Any, x: Any) -> Any:
        turn = by_index(params)
        h, _ = lax.scan(turn, x, jnp.array([1, 0], jnp.uint32))
        return jnp.sum(lax.scan(turn, h, jnp.array([3, 4, 2], jnp.uint32))[0])

    assert_split(loss, PARAMS, ABOVE, [2], [3])


def test_loops_that_stay_whole():
    """Frozen layers behind a trained one; cheap layers; a stack as output."""

    def loss(params: Any, x: Any) -> Any:
        first = x * params['head'][None]
        h, _ = lax.scan(by_index(params, x), first, jnp.array([0, 1, 1]))
        a, _ = lax.scan(lambda a, w: (a * w[:1], None), x, params['stack'])
        twice = lax.scan(lambda a, _: (a, params['stack']), x, None, 2)[1]
        return jnp.sum(h) + jnp.sum(a) + jnp.sum(twice)

    assert_split(loss, PARAMS, [ABOVE, 'head'], [], [3])


def test_rows_of_keys():
    """Keys have no zeros: of fixed keys and others that change, all are made anew."""

    def loss(params: Any, keys: Any) -> Any:
        every = jnp.concatenate([jax.random.split(KEY, 3), keys])
        noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(every)
        return jnp.sum(noise @ params['head'])

    keys = jax.random.split(jax.random.key(5))
    with pytest.warns(UserWarning, match='Nothing is computed once'):
        ahead = sg.precompute(loss, PARAMS, keys, wrt='head', each=1)
    ours = sg.grad(ahead.late, wrt='head')(PARAMS, ahead.early(PARAMS), keys)
    assert_same(ours, sg.grad(loss, wrt='head')(PARAMS, keys))


def test_rows_that_cannot_be_told():
    """An index that depends on data; a loop that reads the whole stack in each turn."""

    def loss(params: Any, x: Any) -> Any:
        a, _ = lax.scan(by_index(params), x, (x[:, 0] > 0).astype(int))
        b, _ = lax.scan(lambda h, _: (h @ params['stack'].sum(0), None), x, None, 2)
        return jnp.sum(a @ b.T)

    assert_split(loss, PARAMS, ABOVE, [], [3, 2])


def test_a_stop_on_a_stack_of_which_some_layers_are_trained() -> None:
    """The frozen layers are those of both branches; the others are stopped in one."""

    def loss(params: Any, x: Any) -> Any:
        def run(stack: Any) -> Any:
            return lax.scan(layer, x, stack)[0]

        target = run(lax.stop_gradient(params['stack']))
        return jnp.mean((run(params['stack']) @ params['head'] - target[:, 0]) ** 2)

    assert_split(loss, PARAMS, [ABOVE, 'head'], [2], [3, 3])
    assert len(sg.precompute(loss, PARAMS, X, wrt=[ABOVE, 'head']).kept) == 1

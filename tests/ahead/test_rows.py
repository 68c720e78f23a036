"""Stacks of which some layers are trained: the frozen ones below are computed once."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.ahead.rows import Rows
from flax_sg.ahead.walk import Walk
from flax_sg.flow.flat import Site
from tests.helpers import oracle

LAYERS = 5
STACK = jax.random.normal(jax.random.key(0), (LAYERS, 4, 4)) / 2
PARAMS: Any = {'stack': STACK, 'head': jnp.linspace(-1.0, 1.0, 4)}
X = jax.random.normal(jax.random.key(1), (3, 4))
KEY = jax.random.key(4)
ABOVE = sg.at('stack', np.s_[2:])


def turns(fun: Any, *args: Any) -> list[int]:
    """For each loop with a product in it how many turns it has, in order."""

    def of(jaxpr: Any) -> list[int]:
        found = []
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == 'scan':
                if 'dot_general[' in str(eqn.params['jaxpr']):
                    found.append(eqn.params['length'])
            else:
                inner = eqn.params.get('jaxpr')
                found += of(getattr(inner, 'jaxpr', inner)) if inner is not None else []
        return found

    return of(jax.make_jaxpr(fun)(*args).jaxpr)


def assert_same(ours: Any, right: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(right)
    for a, b in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
        np.testing.assert_array_equal(a == 0, b == 0)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def assert_split(
    fun: Any, params: Any, wrt: Any, once: list[int], then: list[int]
) -> None:
    """Some turns are made once, and the others by a step; the gradients are those."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'Nothing is computed once')
        ahead = sg.precompute(fun, params, X, wrt=wrt)
    kept = ahead.early(params, X)
    ours = sg.value_and_grad(ahead.late, wrt=wrt)(params, kept)
    assert_same(ours, sg.value_and_grad(fun, wrt=wrt)(params, X))
    assert turns(ahead.early, params, X) == once
    assert turns(ahead.late, params, kept) == then
    moved = jax.tree.map(lambda x: x + 1, params)
    moved = sg.combine(sg.partition(moved, wrt)[0], sg.partition(params, wrt)[1])
    for a, b in zip(ahead.early(moved, X), kept, strict=True):
        np.testing.assert_array_equal(a, b)


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


# Functions of a stack, and whether the rows that are found are those that differ.
MOVES: dict[str, tuple[Any, bool]] = {
    'as it is': (lambda w: lax.optimization_barrier((w, 2 * w)), True),
    'elementwise': (lambda w: jnp.where(w > 0, w, -w) * 2 + 1, True),
    'a cast': (lambda w: w.astype(jnp.bfloat16), True),
    'rows taken apart': (lambda w: w.reshape(10, 2, 4), True),
    'rows in a row': (lambda w: w[:4].reshape(2, 2, 4, 4), True),
    'rows across': (lambda w: w[:3, :2, :2].reshape(4, 3), False),
    'one number': (lambda w: w[:1, 0, 0].reshape(()), True),
    'a vector': (lambda w: w[3, 1, 1].reshape(1), True),
    'no row': (lambda w: w[:0].reshape(0, 16), True),
    'some': (lambda w: (w[1:4], w[::2], w[0], w[4:]), True),
    'at an index': (lambda w: lax.dynamic_slice(w, (4, 0, 0), (2, 4, 4)), True),
    'at an index of its own': (
        lambda w: lax.dynamic_slice(w, (w.argmax() % 3, 0, 0), (2, 4, 4)),
        False,
    ),
    'written': (lambda w: lax.dynamic_update_slice(w, w[:1] * 2, (3, 0, 0)), True),
    'written in part': (
        lambda w: lax.dynamic_update_slice(w, w[:1, :2], (3, 0, 0)),
        True,
    ),
    'written at its own index': (
        lambda w: lax.dynamic_update_slice(w, w[:1], (w.argmax() % 3, 0, 0)),
        False,
    ),
    'squeezed': (lambda w: (w[:, :1].squeeze(1), w[2:3].squeeze(0)), True),
    'wider': (
        lambda w: (w[..., None], w[None], jnp.broadcast_to(w[0], (3, 4, 4))),
        True,
    ),
    'turned': (lambda w: (w.swapaxes(1, 2), w.swapaxes(0, 1)), True),
    'turned around': (lambda w: (w[::-1], w[:, ::-1]), True),
    'put together': (
        lambda w: (jnp.concatenate([w, w[::-1]]), jnp.concatenate([w, w[::-1]], 1)),
        True,
    ),
    'stacked': (lambda w: (jnp.stack([w[0], w[4]]), jnp.stack([w, w], 1)), True),
    'taken apart': (lambda w: (*jnp.split(w, [2]), *jnp.split(w, 2, 1)), True),
    'one by one': (lambda w: (*jnp.unstack(w), *jnp.unstack(w, axis=1)), True),
    'padded': (lambda w: lax.pad(w, 0.0, ((1, -1, 1), (0, 0, 0), (0, 0, 0))), True),
    'padded with its own': (
        lambda w: lax.pad(w, w[4, 0, 0], ((0, 1, 0), (0, 0, 0), (0, 0, 0))),
        False,
    ),
    'chosen by a mask': (
        lambda w: jnp.where(jnp.arange(5)[:, None, None] < 3, w, jnp.ones((5, 4, 4))),
        True,
    ),
    'chosen by a large mask': (
        lambda w: jnp.where((jnp.arange(1 << 21) < 3)[:5, None, None], w, 1.0),
        False,
    ),
    'chosen by noise': (
        lambda w: jnp.where(jax.random.bernoulli(KEY, 0.5, (5, 1, 1)), w, 1.0),
        False,
    ),
    'at an index that was sorted': (
        lambda w: lax.dynamic_slice(
            w, (jnp.sort(jnp.arange(4, 2, -1))[0], 0, 0), (1, 4, 4)
        ),
        False,
    ),
    'chosen by a bool': (lambda w: jnp.where(w[0, 0, 0] > 0, w, 1.0), True),
    'chosen by its own': (lambda w: jnp.where(w[4, 0, 0] > 0, w, -w), False),
    'by indices': (lambda w: w[np.array([4, 0, 1])], True),
    'by its own indices': (lambda w: w[w[:, 0, 0].argsort()], False),
    'by indices of columns': (lambda w: w[:, np.array([2, 0])], False),
    'rows written': (lambda w: w.at[np.array([1, 4])].set(w[:2] * 2), False),
    'rows beyond the ends written': (
        lambda w: w.at[np.array([-9, 9])].set(w[4], mode='clip'),
        True,
    ),
    'rows of none written': (
        lambda w: w[:0].at[np.array([0])].set(w[4], mode='drop'),
        True,
    ),
    'a scalar': (
        lambda w: (
            lax.slice(w[1, 0, 0], (), ()),
            lax.pad(w[2, 0, 0], w[1, 0, 0], ()),
            lax.dynamic_slice(w[2, 0, 0], (), ()),
            lax.dynamic_update_slice(w[1, 0, 0], w[2, 0, 0], ()),
        ),
        True,
    ),
    'rows added': (lambda w: w.at[3:5].add(w[:2]), True),
    'at its own': (lambda w: w.at[w[:2, 0, 0].astype(int)].set(w[0]), False),
    'columns written': (lambda w: w.at[:, 1].set(w[:, 0]), False),
    'a product': (lambda w: jnp.einsum('bij,bjk->bik', w, w), False),
}


@pytest.mark.parametrize('name', MOVES)
def test_which_rows_an_operation_changes(name: str):
    """Rows that are said to be known are the same, whatever stands in the others."""
    fun, is_exact = MOVES[name]
    changes = np.array([False, False, True, False, True])
    walk = Walk({})
    program = jax.make_jaxpr(lambda w: jax.tree.leaves(fun(w)))(STACK)
    stack, twin = (walk.new(program.in_avals[0]) for _ in range(2))
    walk.rows[stack], walk.changing = Rows(changes, twin), {stack}
    found = [*map(walk.changes, walk.walk(program, [stack], Site()))]
    differ = [np.zeros_like(mask) for mask in found]
    for factor in (-3.0, 0.0, 0.7, jnp.nan):
        other = jnp.where(changes[:, None, None], STACK * factor + 0.5, STACK)
        pairs = zip(*(jax.tree.leaves(fun(w)) for w in (STACK, other)), strict=True)
        for mask, (a, b) in zip(differ, pairs, strict=True):
            is_other = np.asarray(a != b)
            mask |= is_other.any(tuple(range(1, is_other.ndim)))
    for mask, other in zip(found, differ, strict=True):
        assert not (other & ~mask).any()
        assert not is_exact or (other == mask).all()


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return jnp.tanh(nn.Dense(4, name='dense')(x)) + x, None


class Tower(nn.Module):
    """A stack of layers by ``nn.scan``, and a head."""

    options: Any
    remat: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        layers = nn.scan(
            nn.remat(Layer) if self.remat else Layer,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=LAYERS,
            **self.options,
        )(name='layers')
        return nn.Dense(2, name='head')(layers(x, None)[0])


@pytest.mark.parametrize('remat', (False, True))
def test_frozen_layers_of_a_scan(remat: bool):
    """``frozen_layers=`` reads the whole stack, by an index."""
    net = Tower({'frozen_layers': slice(3)}, remat)
    params = oracle.init(net, jax.random.key(2), X)['params']

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(net.apply({'params': params}, x) ** 2)

    assert_split(loss, params, sg.live(loss, params, X), [3], [2])


def test_a_stack_with_a_mask():
    """A block around a plain scan, and a filter without a stop."""
    net = Tower({})
    params = oracle.init(net, jax.random.key(2), X)['params']

    def plain(params: Any, x: Any) -> Any:
        return jnp.mean(net.apply({'params': params}, x) ** 2)

    def loss(params: Any, x: Any) -> Any:
        with nn.stop_gradient(sg.at('layers/**', np.s_[:4])):
            return plain(params, x)

    assert_split(loss, params, sg.live(loss, params, X), [4], [1])
    above = [sg.at('layers/**', np.s_[4:]), 'head/**']
    assert_split(plain, params, above, [4], [1])


def test_layers_that_are_put_together():
    """``sg.combine``, concatenation and an update of rows inside of the loss."""
    parts = sg.partition({'stack': STACK}, ABOVE)

    def combined(params: Any, x: Any) -> Any:
        stack = sg.combine(params['trained'], params['frozen'])['stack']
        return jnp.sum(lax.scan(layer, x, stack)[0])

    params = dict(zip(('trained', 'frozen'), parts, strict=True))
    assert_split(combined, params, 'trained/**', [2], [3])

    def joined(params: Any, x: Any) -> Any:
        stack = jnp.concatenate([params['below'] * 2, params['above']])
        return jnp.sum(lax.scan(layer, x, stack.reshape(5, 4, 4))[0])

    params = {'below': STACK[:2], 'above': STACK[2:]}
    assert_split(joined, params, 'above', [2], [3])

    def stacked(params: Any, x: Any) -> Any:
        return jnp.sum(lax.scan(layer, x, jnp.stack([*params]))[0])

    assert_split(stacked, [*STACK], ['3', '4'], [3], [2])


def test_layers_by_hand():
    """A slice of frozen rows is known, whatever it goes through."""

    def loss(params: Any, x: Any) -> Any:
        stack = params['stack'].astype(jnp.bfloat16).astype(jnp.float32)
        padded = jnp.pad(stack, ((1, 0), (0, 0), (0, 0)))
        below = padded[1:].reshape(5, 16)[np.array([1, 0])].reshape(2, 4, 4)
        for w in below:
            x = jnp.tanh(x @ w)
        return jnp.sum((x @ stack[3]) @ stack[-1])

    def products(fun: Any, *args: Any) -> int:
        return str(jax.make_jaxpr(fun)(*args)).count('dot_general[')

    ahead = sg.precompute(loss, PARAMS, X, wrt=ABOVE)
    kept = ahead.early(PARAMS, X)
    assert [k.shape for k in kept] == [(3, 4)]
    assert products(ahead.early, PARAMS, X) == 2
    assert products(ahead.late, PARAMS, kept) == 2
    ours = sg.value_and_grad(ahead.late, wrt=ABOVE)(PARAMS, kept)
    assert_same(ours, sg.value_and_grad(loss, wrt=ABOVE)(PARAMS, X))


def test_frozen_rows_have_no_gradient():
    """What goes through the kept values would be missing from it."""

    def loss(params: Any, x: Any) -> Any:
        h, _ = lax.scan(layer, x, params['stack'])
        return jnp.sum(h) + jnp.sum(params['stack'] ** 2)

    ahead = sg.precompute(loss, PARAMS, X, wrt=ABOVE)
    kept = ahead.early(PARAMS, X)
    grads = jax.grad(ahead.late)(PARAMS, kept)['stack']
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

    def total(params: Any) -> Any:
        return sum(map(jnp.sum, ahead.late(params, kept)))

    grads = jax.grad(total)(params)
    assert not grads['stack'][:2].any() and not grads['twice'][:2].any()
    assert not grads['pairs'][::2].any() and grads['pairs'][1::2].all()
    assert grads['stack'][2:].all() and grads['twice'][2:4].all()
    assert not grads['written'][:2].any() and grads['written'][2:4].all()


def test_stacks_in_loops_over_batches():
    """The loss of several small batches: the frozen layers of each are known."""

    def loss(params: Any, x: Any) -> Any:
        def one(total: Any, x: Any) -> Any:
            h, _ = lax.scan(layer, x[None], params['stack'])
            return total + jnp.sum(h @ params['head']), None

        return lax.scan(one, 0.0, x)[0]

    assert_split(loss, PARAMS, [ABOVE, 'head'], [3], [3])


def test_layers_by_an_index():
    """A loop that reads the layers in an order of its own."""

    def loss(params: Any, x: Any) -> Any:
        def turn(h: Any, t: Any) -> Any:
            w = lax.dynamic_slice_in_dim(params['stack'], t + 1, 1)
            return jnp.tanh(h @ w[0]), None

        return jnp.sum(lax.scan(turn, x, jnp.array([0, -1, 1, -1]))[0])

    assert_split(loss, PARAMS, ABOVE, [2], [2])


def test_loops_that_stay_whole():
    """Frozen layers behind a trained one; cheap layers; a stack as output."""

    def loss(params: Any, x: Any) -> Any:
        def turn(h: Any, t: Any) -> Any:
            w = lax.dynamic_index_in_dim(params['stack'], t, keepdims=False)
            return jnp.tanh(h @ w) + x, None

        h, _ = lax.scan(turn, x * params['head'][None], jnp.array([0, 1, 1]))
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
        def turn(h: Any, t: Any) -> Any:
            w = lax.dynamic_index_in_dim(params['stack'], t, keepdims=False)
            return jnp.tanh(h @ w), None

        a, _ = lax.scan(turn, x, (x[:, 0] > 0).astype(int))
        b, _ = lax.scan(lambda h, _: (h @ params['stack'].sum(0), None), x, None, 2)
        return jnp.sum(a @ b.T)

    assert_split(loss, PARAMS, ABOVE, [], [3, 2])

"""``examples=True``: each example by itself, found in the program and compared."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.ahead.examples import Batch
from flax_sg.ahead.walk import Walk
from flax_sg.programs.steps import Site, numbers_in
from tests.ahead.splits import assert_rows, assert_same, products
from tests.helpers import oracle

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (4, 6, 6))
W = jax.random.normal(jax.random.key(1), (6, 6)) / 2
ROWS = np.array([2, 0, 3, 1])


def convolved(x: Any, shape: tuple[int, ...], **how: Any) -> Any:
    """With a kernel of ones."""
    how['dimension_numbers'] = ('NHWC', 'HWIO', 'NHWC')
    return lax.conv_general_dilated(x, jnp.ones(shape), (1, 1), 'SAME', **how)


def time_scan(x: Any) -> Any:
    """A cell over time, from zeros, with its states and the last one."""

    def turn(h: Any, row: Any) -> Any:
        return jnp.tanh(h @ W + row), (h, row.sum(-1))

    return lax.scan(turn, jnp.zeros((4, 6)), jnp.swapaxes(x, 0, 1))


FIRST = W.argmax() % 3


def of_row(row: Any, key: Any = None) -> Any:
    """A key of a seed in the data, or of another key and a number in them."""
    number = (row[0, 0] * 9).astype(int)
    return jax.random.key(number) if key is None else jax.random.fold_in(key, number)


def swapped(_: Any, x: Any) -> Any:
    return jnp.swapaxes(x, 0, 1)


def counted(x: Any) -> Any:
    """A while loop with a counter."""
    turn = lambda c: (c[0] + 1, jnp.sin(c[1] @ W))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 3, turn, (0, x))[1]


def test_what_nobody_reads_mixes_no_examples():
    """A metric of each layer, in a stack of which some are frozen."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            x = jnp.tanh(nn.Dense(6)(x))
            return x, x.mean()

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers: Any = {'length': 3, 'frozen_layers': slice(2)}
            scan = nn.scan(Block, **oracle.STACKED, **layers)
            return nn.Dense(2, name='head')(scan(name='layers')(x, None)[0])

    params = oracle.init(Net(), KEY, X)['params']

    def loss(params, x):
        return jnp.mean(Net().apply({'params': params}, x) ** 2)

    live = sg.live(loss, params, X)
    ahead = sg.precompute(loss, params, X, wrt=live, examples=True)
    rows = [x[ROWS] for x in ahead.early(params, X)]
    ours, right = (sg.value_and_grad(f, wrt=live) for f in (ahead.late, loss))
    assert_same(ours(params, rows), right(params, X[ROWS]))
    assert [x.shape for x in rows] == [X.shape]


# Programs that keep examples apart.
APART: dict[str, Any] = {
    'a loop over time': time_scan,
    'a while loop': counted,
    'a branch': lambda x: lax.cond(W[0, 0] > 0, lambda x: x @ W, jnp.zeros_like, x),
    'a map over examples': lambda x: lax.map(lambda row: row @ row, x),
    'elementwise': lambda x: jnp.where(x > 0, jnp.exp(x), W) + jnp.clip(x, 0, 1) * 2,
    'a product': lambda x: jnp.einsum('btd,de->ebt', x, W),
    'a product in a batch': lambda x: jnp.einsum('btd,bsd->tbs', x, x),
    'a convolution': lambda x: convolved(x[..., None], (2, 2, 1, 3)),
    'rolled': lambda x: jnp.roll(x, 1, axis=1),
    'merged axes': lambda x: jax.nn.relu(x.reshape(24, 6) @ W),
    'merged and taken apart': lambda x: (x.reshape(24, 6) @ W).reshape(4, 6, 2, 3),
    'merged from inside': lambda x: jnp.swapaxes(x, 0, 1).reshape(24, 6) @ W,
    'an axis between': lambda x: jnp.moveaxis(x, 0, 1).reshape(2, 3, 4, 6).sum(-1),
    'windows': lambda x: (
        nn.max_pool(x, (2,)) + nn.pool(x, 0.0, lax.add, (2,), (1,), 'VALID')
    ),
    'products of windows': lambda x: lax.reduce_window(
        x, 1.0, lax.mul, (1, 2, 2), (1, 1, 1), 'VALID'
    ),
    'sorts': lambda x: (jnp.sort(x, 1), jnp.argsort(x, 2), lax.top_k(x, 2)[1]),
    'sums along others': lambda x: (jnp.cumsum(x, 1), x.mean((1, 2)), x.argmax(2)),
    'a reduction of pairs': lambda x: lax.reduce(
        (x, 2 * x), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)
    ),
    'parts of others': lambda x: (x[:, 1], x[:, ::-1], x[:, 1:3, ::2], x[..., None]),
    'parts by a number': lambda x: lax.dynamic_slice_in_dim(x, W.argmax() % 3, 2, 1),
    'parts written': lambda x: lax.dynamic_update_slice_in_dim(x, x[:, :2], FIRST, 1),
    'parts put together': lambda x: (
        *(jnp.concatenate([x, jnp.zeros((4, 1, 6))], 1), jnp.stack([x, x], 1)),
        *(jnp.pad(x, ((0, 0), (1, 1), (0, 0))), jnp.split(x, 2, 1), jnp.tile(x, 2)),
    ),
    'a table': lambda x: W[jnp.clip(x[..., 0] * 3, 0, 5).astype(int)],
    'parts of each': lambda x: jnp.take_along_axis(x, jnp.argsort(x, 1), 1),
    'columns': lambda x: (x[:, np.array([0, 2])], x.at[:, np.array([1, 3])].add(1.0)),
    'each written': lambda x: jax.vmap(lambda r: r.at[r.argmax() % 6].set(0.0))(x),
    'kinds': lambda x: jax.nn.one_hot(x[..., 0].astype(int), 3) + jnp.ones((4, 1, 3)),
    'softmax': lambda x: jax.nn.softmax(x) + jax.nn.gelu(x) @ W,
    'matrices': lambda x: (
        jnp.linalg.cholesky(x @ x.mT + jnp.eye(6)[None]),
        lax.linalg.triangular_solve(x, x, left_side=True),
        jnp.linalg.eigh(x + x.mT)[0],
    ),
    'frequencies': lambda x: jnp.abs(jnp.fft.fft(x)),
    'noise of own keys': jax.vmap(
        lambda r: jax.random.normal(jax.random.split(of_row(r, KEY))[1], (3,))
    ),
    'keys of seeds': jax.vmap(lambda row: jax.random.uniform(of_row(row))),
    'a checkpoint': jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ W) @ W)),
    'a table of zeros': lambda x: x.reshape(4, 36) + jnp.zeros((4, 36)) @ jnp.eye(36),
    'nothing': lambda x: jnp.zeros((4, 0)) + x[:, 0, :0],
    'a barrier': lambda x: lax.optimization_barrier((x, 2 * x)),
    'one for several': lambda x: lax.broadcast_in_dim(x[:, :1], (4, 5, 6), (0, 1, 2)),
    'a row of each': lambda x: x[jnp.arange(4), jnp.argmax(x[..., 0], 1)],
    'a row of each, by numpy': lambda x: x[np.arange(4), x[:, 0].argmax(1) % 6],
    'the other way': lambda x: x.swapaxes(0, 1)[x[:, 0].argmax(1) % 6, jnp.arange(4)],
    'an element of each': lambda x: x[jnp.arange(4), 2, x[:, 0].argmax(1)],
    'integers': lambda x: lax.bitcast_convert_type(x, jnp.int32) >> 3,
}
# Programs that mix them, or that make something of their positions.
MIXED: dict[str, Any] = {
    'a mean': lambda x: x - x.mean(0, keepdims=True),
    'a softmax': lambda x: jax.nn.softmax(x, 0),
    'a sort': lambda x: jnp.sort(x, 0),
    'a running sum': lambda x: jnp.cumsum(x, 0),
    'all pairs': lambda x: jnp.einsum('btd,csd->bc', x, x),
    'a weighted sum': lambda x: jnp.einsum('btd,b->td', x, jnp.ones(4)),
    'positions': lambda x: x + jnp.arange(4.0)[:, None, None],
    'noise by position': lambda x: x + jax.random.normal(KEY, x.shape),
    'a constant by position': lambda x: x * X,
    'turned around': lambda x: x[::-1],
    'a part of the batch': lambda x: x[:2],
    'one example': lambda x: x[W.argmax() % 4],
    'each second one': lambda x: x[::2].repeat(2, 0),
    'rolled': lambda x: jnp.roll(x, 1, 0),
    'padded': lambda x: jnp.pad(x, ((1, 0), (0, 0), (0, 0))),
    'twice': lambda x: jnp.concatenate([x, x]),
    'shuffled': lambda x: x[ROWS],
    'rows of others': lambda x: x[ROWS, x[:, 0].argmax(1) % 6],
    'rows of the next': lambda x: x[jnp.arange(4) ^ 1, x[:, 0].argmax(1) % 6],
    'pairs of rows': lambda x: jnp.concatenate(
        [jnp.arange(4)[:, None], x[:, 0, :1].astype(int)], 1
    ),
    'examples as channels': lambda x: convolved(x[None], (1, 1, 6, 6)).sum(1),
    'windows over examples': lambda x: lax.reduce_window(
        x, 0.0, lax.add, (2, 1, 1), (1, 1, 1), 'SAME'
    ),
    'frequencies': lambda x: jnp.abs(jnp.fft.fft(x, axis=0)),
    'a loop over examples': lambda x: lax.scan(lambda c, r: (c + r, c), W, x)[1],
    'a loop that moves them': lambda x: lax.fori_loop(
        0, 2, swapped, X[:4, :4] + x[:, :4, :4].mean()
    ),
    'a swap in a loop': lambda x: lax.fori_loop(0, 2, swapped, x[:, :4]),
    'axes that cross': lambda x: x[:, :4, 0] + x[:, :4, 0].T,
    'groups of examples': lambda x: convolved(
        x[..., None], (2, 2, 1, 2), batch_group_count=2
    ),
    'a branch by all': lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    'a loop until all': lambda x: lax.while_loop(
        lambda y: y.sum() < 100, lambda y: y * 2, x * x + 1
    ),
    'a mean at each time': lambda x: lax.scan(
        lambda c, row: (c, row - row.mean(0, keepdims=True)), 0, x.swapaxes(0, 1)
    )[1],
    'halves': lambda x: x.reshape(2, 2, 36).sum(0),
    'callbacks': lambda x: jax.pure_callback(np.sin, x, x, vmap_method='sequential'),
}


def places(fun: Any) -> list[Any]:
    """Where the examples are in each output; None if they are mixed there."""
    program = jax.make_jaxpr(lambda x: jax.tree.leaves(fun(x)))(X)
    batch = Batch({0: ('x', jax.typeof(X))})
    walk = Walk((), batch)
    outs = numbers_in(walk.walk(program, [walk.new(jax.typeof(X))], Site()))
    kept = [n for n in outs if n not in walk.changing and batch.can_be_kept(n)]
    return [batch.places[n] if n in kept else None for n in outs]


@pytest.mark.parametrize('name', APART)
def test_examples_are_followed(name: str) -> None:
    """The axis that is found is that of the examples: rows move with their examples."""
    fun = jax.jit(APART[name])
    found = places(fun)

    def rows(x: Any) -> Any:
        leaves = jax.tree.leaves(fun(x))
        return [at.in_front(leaf, 4) for at, leaf in zip(found, leaves, strict=True)]

    whole, other = rows(X), rows(X.at[1].set(9.0))
    for ours, moved, changed in zip(whole, rows(X[ROWS]), other, strict=True):
        np.testing.assert_allclose(ours[ROWS], moved, rtol=2e-4, atol=1e-5)
        both = (np.delete(rows, 1, 0) for rows in (ours, changed))
        np.testing.assert_allclose(*both, rtol=2e-4, atol=1e-5)
    for at, ours, leaf in zip(found, whole, jax.tree.leaves(fun(X)), strict=True):
        np.testing.assert_array_equal(at.back(ours, leaf.shape), leaf)


@pytest.mark.parametrize('name', MIXED)
def test_what_mixes_examples(name: str) -> None:
    """It is found, and never taken for a value of single examples."""
    assert None in places(MIXED[name])


def test_a_frozen_product_over_the_batch() -> None:
    """The operation that mixes examples reads the frozen weights itself."""
    weights = {'torso': jnp.ones((len(X), 4)), 'head': jnp.ones((4, 2))}

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(x.reshape(len(x), -1).T @ params['torso'] @ params['head'])

    match = 'torso is computed at each step: dot_general at .* mixes the examples'
    with pytest.raises(sg.errors.ArgumentTypeError, match=match):
        sg.precompute(loss, weights, X, wrt='head', examples=True)


class Net(nn.Module):
    """A convolution, a normalization, a head; and a normalization of the batch."""

    kind: str = ''

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(3, (3, 3), name='first')(x[..., None])
        x = nn.BatchNorm(use_running_average=self.kind != 'train', name='norm')(x)
        x = nn.Conv(3, (3, 3), name='second')(nn.relu(x)).mean((1, 2))
        if self.kind == 'head':
            x = nn.BatchNorm(use_running_average=False, name='last')(x)
        return nn.Dense(2, name='head')(x)


def split(kind: str) -> tuple[Any, Any]:
    """A loss that normalizes its labels by the batch, and its arguments."""
    net = Net(kind)
    variables = oracle.init(net, KEY, X)

    def loss(params: Any, stats: Any, x: Any, y: Any) -> Any:
        variables = {'params': params, 'batch_stats': stats}
        out = net.apply(variables, x, mutable=['batch_stats'])[0]
        return jnp.mean((out[:, 0] - (y - y.mean()) / y.std()) ** 2)

    return loss, (variables['params'], variables['batch_stats'])


OF_HEAD: Any = {'argnums': (0, 1), 'wrt': '0/head/**'}
LABELS = jax.random.normal(KEY, (4,))


@pytest.mark.parametrize('kind', ('', 'head'))
def test_features_of_single_examples(kind: str) -> None:
    """Kept once for a data set, shuffled and indexed; a batch mean is taken anew."""
    loss, params = split(kind)
    ahead = sg.precompute(loss, *params, X, LABELS, examples=True, **OF_HEAD)
    assert [k.shape for k in ahead.kept] == [(4,), (4, 3)]
    kept = [ahead.early(*params, X * n, LABELS + n) for n in (1.0, 2.0)]
    kept = jax.tree.map(lambda *rows: jnp.concatenate(rows), *kept)
    rows = np.array([5, 0, 7, 2])
    x, y = jnp.concatenate([X, X * 2.0]), jnp.concatenate([LABELS + 1.0, LABELS + 2.0])
    how: Any = {'unused': 'ignore', **OF_HEAD}
    ours, right = (sg.value_and_grad(f, **how) for f in (ahead.late, loss))
    found = ours(*params, [leaf[rows] for leaf in kept])
    assert_same(found, right(*params, x[rows], y[rows]))


def test_a_batch_mean_beside_a_carry() -> None:
    """The tower in the loop is computed once; the mean is taken anew."""

    def loss(params: Any, x: Any) -> Any:
        def turn(h: Any, row: Any) -> Any:
            h = jnp.tanh(h @ params['cell'] + row @ params['torso'])
            return h, h.mean(0)

        h, means = lax.scan(turn, x[:, 0], x.swapaxes(0, 1))
        return jnp.sum((h @ params['head']) ** 2) + jnp.sum(means**2)

    params = {'cell': W, 'torso': W.T, 'head': W}
    ahead = assert_rows(loss, params, X, ['head'])
    assert 'cell is computed' not in str(ahead)


def test_turns_of_a_mapped_loop() -> None:
    """They differ by example, though all begin alike: their mean is taken anew."""

    def halvings(row: Any) -> Any:
        turn = lambda c: (c[0] + 1.0, c[1] / 2)  # noqa: E731
        return lax.while_loop(lambda c: c[1] > 0.5, turn, (0.0, row.sum()))[0]

    def loss(params: Any, x: Any) -> Any:
        count = jax.vmap(halvings)(x)
        scaled = jnp.tanh(x @ params['body']) * (count / count.mean())[:, None]
        return jnp.mean((scaled @ params['head']) ** 2)

    x = jnp.abs(X[:, 0]) * jnp.array([[0.1], [1.0], [5.0], [90.0]])
    assert_rows(loss, {'body': W, 'head': W}, x, ['head'])


@pytest.mark.parametrize('flag', ('jax_remat3', 'jax_custom_vjp3', 'jax_custom_jvp3'))
def test_calls_of_newer_jax(flag: str) -> None:
    """Their bodies are walked."""
    if not hasattr(jax.config, flag):
        pytest.skip('a flag of another jax')
    before = getattr(jax.config, flag)
    jax.config.update(flag, True)
    try:

        @jax.custom_vjp
        def soft(x: Any) -> Any:
            return jnp.tanh(x)

        soft.defvjp(lambda x: (soft(x), x), lambda x, g: (g * jnp.cos(x),))

        def loss(params: Any, x: Any) -> Any:
            tower = jax.checkpoint(lambda x: jax.nn.relu(soft(x @ params['body'])))
            return jnp.sum((tower(x) @ params['head']) ** 2)

        assert_rows(loss, {'body': W, 'head': W}, X[0, :4], ['head'])
    finally:
        jax.config.update(flag, before)


def test_a_batch_mean_in_the_frozen_part() -> None:
    """The error names the module behind it, and the line."""
    loss, params = split('train')
    said = r'^second is computed at each step: reduce_sum at test_examples.py:\d+ '
    with pytest.raises(sg.errors.ArgumentTypeError, match=said):
        sg.precompute(loss, *params, X, LABELS, examples=True, **OF_HEAD)


def test_examples_behind_other_axes() -> None:
    """What has time in front, or merged with examples, is kept by example."""

    def loss(params: Any, x: Any, key: Any) -> Any:
        rows = x.reshape(24, 6) @ params['body']
        _, (states, _) = time_scan(jnp.tanh(rows).reshape(4, 6, 6))
        out = (jnp.tanh(rows) + states.reshape(24, 6)) @ params['head']
        return jnp.sum(out) * jax.random.uniform(key)

    params = {'body': W, 'head': W}
    ahead = sg.precompute(loss, params, X, KEY, wrt='head', each=2, examples=True)
    assert {k.shape for k in ahead.kept} == {(4, 6, 6)}
    moved = [leaf[ROWS] for leaf in ahead.early(params, X)]
    assert_same(ahead.late(params, moved, KEY), loss(params, X[ROWS], KEY))


def test_what_is_the_same_for_all_examples() -> None:
    """A count of turns is repeated for each: it can be indexed by them."""

    def loss(params: Any, x: Any) -> Any:
        turn = lambda c: (c[0] + 1, c[1] @ W)  # noqa: E731
        n, y = lax.while_loop(lambda c: c[0] < 3, turn, (0, x))
        return jnp.sum(y @ params['head']) * n

    ahead = assert_rows(loss, {'head': W}, X, ['head'])
    assert {k.shape for k in ahead.kept} == {(4,), (4, 6, 6)}


@pytest.mark.skipif(
    jax.__version_info__ < (0, 8),
    reason='jax 0.7.2 cannot differentiate these losses: their axes are split',
)
def test_tokens_that_are_merged_on_a_mesh_of_explicit_axes() -> None:
    """JAX merges an axis that is split over devices only with those behind it."""
    mesh = jax.make_mesh((2,), ('data',), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec('data')
    params = {'body': jnp.eye(4) / 2, 'head': jnp.ones((4, 3))}

    def merged(params: Any, x: Any) -> Any:
        y = jnp.tanh(x.reshape(40, 4) @ params['body'])
        return jnp.mean((y @ params['head']) ** 2)

    def moved(params: Any, x: Any) -> Any:
        y = jnp.tanh(jnp.swapaxes(x, 0, 1) @ params['body'])
        return jnp.mean((y @ params['head']) ** 2)

    def apart(params: Any, x: Any) -> Any:
        y = jnp.tanh(x.reshape(8, 20) @ jnp.tile(params['body'], (5, 1)))
        return jnp.mean((y.reshape(8, 2, 2) @ params['head'][:2]) ** 2)

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.sin(jnp.arange(160.0)).reshape(8, 5, 4), spec)
        for fun in merged, moved, apart:
            ahead = sg.precompute(fun, params, x, wrt='head', examples=True)
            right = sg.value_and_grad(fun, wrt='head')(params, x)
            for early in ahead.early, jax.jit(ahead.early):
                kept = early(params, x)
                assert all(len(k) == 8 for k in kept)
                ours = sg.value_and_grad(ahead.late, wrt='head')(params, kept)
                assert_same(ours, right)


def test_a_metric_of_a_frozen_tower() -> None:
    """The mean over a batch is taken at each step, and the tower runs once."""

    def fun(params: Any, x: Any) -> Any:
        h = jnp.tanh(jnp.tanh(x @ params['a']) @ params['b'])
        return jnp.mean(x @ params['head']), {'mean': h.mean(0), 'norm': (h**2).sum()}

    params = {name: jnp.eye(4) / 2 for name in ('a', 'b', 'head')}
    x = jnp.sin(jnp.arange(32.0)).reshape(8, 4)
    ahead = sg.precompute(fun, params, x, wrt='head', examples=True)
    kept = ahead.early(params, x)
    assert products(ahead.late, params, kept) == 1
    assert_same(ahead.late(params, kept), fun(params, x))

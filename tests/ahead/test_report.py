"""What ``print`` says of a split: what is kept, and what stands in the way."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.ahead.costs import flops_of
from tests.helpers import oracle

KEY = jax.random.key(0)
X = jnp.ones((4, 8))


class Net(nn.Module):
    """Two layers, a normalization and a head; dropout or an adapter before them."""

    kind: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.kind == 'adapter':
            x = nn.Dense(8, name='adapter')(x)
        x = nn.Dense(8, name='first')(x)
        if self.kind == 'dropout':
            x = nn.Dropout(0.5, deterministic=False)(x)
        x = nn.relu(nn.Dense(8, name='tower')(x))
        return nn.Dense(2, name='head')(nn.BatchNorm(False, name='norm')(x))


def split(kind: str, *wrt: str) -> Any:
    net = Net(kind)
    variables = oracle.init(net, {'params': KEY, 'dropout': KEY}, X)

    def loss(variables: Any, x: Any, key: Any) -> Any:
        rngs = {'dropout': key}
        y, new = net.apply(variables, x, rngs=rngs, mutable=['batch_stats'])
        return jnp.mean(y**2), new

    return sg.precompute(loss, variables, X, KEY, wrt=[*wrt], each=2)


def lines(ahead: Any) -> list[str]:
    """The report, without the numbers of lines."""
    text = str(ahead).splitlines()
    return [line.partition(' at test_report.py:')[0] for line in text]


def test_a_head():
    """What is kept; running statistics that are read once and written."""
    ahead = split('head', 'head/**')
    *statistics, features = [row for row in lines(ahead) if row.startswith('float32')]
    assert features == 'float32[4,8]     128   add'
    assert statistics == ['float32[8]        32   add'] * 2
    assert repr(ahead) == ('<precomputed: keeps float32[8], float32[8], float32[4,8]>')
    *_, share, mean, var, advice, mixed = lines(ahead)
    assert share.endswith(
        '% of the flops are done once; 192 bytes are kept, for 128 bytes of data.'
    )
    assert float(share.partition('%')[0]) > 80
    assert [mean.split()[0], var.split()[0]] == ['norm/mean', 'norm/var']
    assert advice.startswith('To go on from step to step, it needs an argument of')
    assert mixed == (
        'If the data are a batch, what is kept belongs to all of it: reduce_sum'
    )


def test_a_key_that_enters():
    """The line of dropout, and the module behind it alone."""
    assert [line for line in lines(split('dropout', 'head/**')) if 'each' in line] == [
        'tower is computed at each step: argument 2 (key), which is in each=, enters',
        "To turn dropout off there, write nn.Frozen(module, state='eval'). To draw "
        'once for a batch, leave argument 2 (key) out of each=.',
    ]
    assert str(split('dropout', 'head/**')).count(' (Net.__call__), in dropout.\n') == 1


def of_batch(fun: Any, *args: Any, **how: Any) -> str:
    params = {'body': X.T @ X, 'head': X.T @ X}
    return str(sg.precompute(fun, params, *args, wrt='head', **how))


def test_what_enters_without_dropout():
    """Noise, a mask that draws other values, a step: dropout is not named."""

    def noise(params: Any, x: Any, key: Any) -> Any:
        x = x + jax.random.normal(key, x.shape)
        return jnp.sum(jnp.tanh(x @ params['body']) @ params['head'])

    def token(params: Any, x: Any, key: Any) -> Any:
        x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, params['head'][0])
        return jnp.sum(jnp.tanh(x @ params['body']) @ params['head'])

    def ones(params: Any, x: Any, key: Any) -> Any:
        x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 1.0)
        return jnp.sum(jnp.tanh(x @ params['body']) @ params['head'])

    def scaled(params: Any, x: Any, step: Any) -> Any:
        return jnp.sum(jnp.tanh(x * step @ params['body']) @ params['head'])

    with pytest.warns(UserWarning, match='Nothing is computed once'):
        for fun, last in ((noise, KEY), (token, KEY), (ones, KEY), (scaled, 1.0)):
            text = of_batch(fun, X, last, each=2)
            assert 'body is computed at each step: ' in text
            assert 'in dropout' not in text
            assert 'turn dropout off' not in text


def test_dropout_of_nnx():
    """Its count is written at each step. A key is no frozen module."""
    rngs = nnx.Rngs(0)
    model = nnx.Dict(
        drop=nnx.Dropout(0.5, rngs=rngs),
        tower=nnx.Linear(8, 8, rngs=rngs),
        head=nnx.Linear(8, 2, rngs=rngs),
    )

    def loss(model: Any, x: Any) -> Any:
        return jnp.sum(model.head(model.tower(model.drop(jnp.tanh(x)))))

    text = str(sg.precompute(loss, model, X, wrt='head/**')).splitlines()
    assert [line for line in text if 'each step' in line or 'To turn' in line] == [
        line for line in text if line.startswith(('tower is computed', 'To turn'))
    ]
    assert text[-1] == 'To turn dropout off there, call eval() of the frozen module.'
    assert 'drop/rngs/count, which the function writes' in '\n'.join(text)
    model.drop.eval()
    still = sg.precompute(loss, model, X, wrt='head/**')
    assert 'at each step' not in str(still)
    assert [k.shape for k in still.kept] == [(4, 8)]


def test_rows_of_a_batch():
    """A report says if what is kept is no row for each example."""

    def fun(before: Any, after: Any = lambda x: x) -> Any:
        def loss(params: Any, x: Any, *others: Any) -> Any:
            x = jnp.tanh(before(x, *others) @ params['body'])
            return jnp.sum(after(x) @ params['head'])

        return loss

    rows = of_batch(fun(lambda x: x), X)
    assert 'belongs to' not in rows
    assert 'belongs to' not in of_batch(fun(lambda x, s: x * s), X, jnp.ones(()))
    mean = of_batch(fun(lambda x: x - x.mean(0, keepdims=True)), X)
    assert 'all of it: reduce_sum at test_report.py:' in mean
    assert ' may mix its examples. For rows of' in mean.splitlines()[-1]
    by_place = of_batch(fun(lambda x: x + jax.random.normal(KEY, x.shape)), X)
    assert ' may mix its examples. For rows of' in by_place.splitlines()[-1]
    unclear = (
        'If the data are a batch, what is kept belongs to all of it. For rows of '
        'single examples, write examples=True.'
    )
    for text in (
        of_batch(fun(lambda x, w: x * w[None]), X, jnp.ones(8)),
        of_batch(fun(lambda x: x), X[:1]),
        of_batch(lambda p, x: jnp.sum(p['head'] @ jnp.tanh(p['body'] @ x.T)), X),
    ):
        assert text.splitlines()[-1] == unclear
    assert 'belongs to' not in of_batch(fun(lambda x: x), X, examples=True)


def test_a_scalar_of_a_batch_is_not_written():
    """The loss has its shape, and is no new value of it."""
    text = of_batch(lambda p, s: jnp.sum(p['body'] * jnp.sin(s) @ p['head']), X[0, 0])
    assert 'is written' not in text


def test_a_frozen_encoder_in_each() -> None:
    """It runs at each step since it is there; a key beside it is no encoder."""

    def loss(params: Any, encoder: Any, x: Any, key: Any) -> Any:
        features = jnp.tanh(x @ encoder['w'].astype(jnp.float32))
        noise = jax.random.normal(key, features.shape)
        return jnp.sum((features + noise) @ params['head'])

    args = {'head': X.T @ X}, {'w': X.T @ X}, X, KEY
    with pytest.warns(UserWarning, match='Nothing is computed once'):
        ahead = sg.precompute(loss, *args, wrt='head', each=(1, 3))
    assert [line for line in str(ahead).splitlines() if 'at each step' in line] == [
        'argument 1 (encoder) is computed at each step: it is in each=. If it does not '
        'change, leave it out of each=.'
    ]
    assert 'each step' not in str(sg.precompute(loss, *args, wrt='head', each=3))


def test_without_wrt() -> None:
    """All parameters count as trained: the warning says so."""
    params = {'body': X.T @ X, 'head': X.T @ X}

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ params['body']) @ params['head'])

    with pytest.warns(
        UserWarning, match='Without wrt=, all parameters count as trained'
    ):
        sg.precompute(loss, params, X)
    with pytest.warns(UserWarning) as caught:
        sg.precompute(loss, params, X, wrt='*')
    assert 'Without wrt=' not in str(caught[0].message)


def test_what_reads_no_example() -> None:
    """It is no row: late makes it, and a line of each module says what to do."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        text = jnp.tanh(X[:3] @ params['text']['a']) @ params['text']['b']
        return jnp.sum((x @ params['image'] @ params['head'] @ text.T) * y[:, None])

    params = {'image': X.T @ X, 'text': {'a': X.T @ X, 'b': X.T @ X}, 'head': X.T @ X}
    ahead = sg.precompute(loss, params, X, X[:, 0], wrt='head', examples=True)
    said = [line for line in str(ahead).splitlines() if 'text' in line]
    assert len(said) == 1 and said[0].startswith(
        'text is computed at each step: it reads no example, and what is kept are rows '
    )
    assert 'Compute it before, and give its value in its place.' in str(ahead)
    order = np.array([2, 0, 3, 1])
    kept = [leaf[order] for leaf in ahead.early(params, X, X[:, 0])]
    right = loss(params, X[order], X[order, 0])
    np.testing.assert_allclose(ahead.late(params, kept), right, rtol=1e-5)


def test_an_adapter_in_front():
    """It is trained, so all behind it is computed at each step: a warning says so."""
    with pytest.warns(
        UserWarning, match='first is computed at each step: it reads adapter, which is'
    ):
        ahead = split('adapter', 'adapter/**', 'head/**')
    assert [line for line in lines(ahead) if 'each step' in line] == [
        'first is computed at each step: it reads adapter, which is trained,',
        'tower is computed at each step: it reads adapter, which is trained,',
    ]
    assert 'an input' in str(ahead)


def test_modules_as_far_as_they_differ():
    """Layers with a trained part each; the rest of a long list is counted."""
    params = {f'layer_{n}': {'a': X.T @ X, 'w': X.T @ X} for n in range(12)}

    def loss(params: Any, x: Any) -> Any:
        for layer in params.values():
            x = x @ layer['w'] + x @ layer['a']
        return x.sum()

    ahead = sg.precompute(
        lambda p, x: loss(p['net'], x), {'net': params}, X, wrt='**/a'
    )
    text = [line for line in lines(ahead) if 'each step' in line]
    assert text[0] == (
        'net/layer_1 is computed at each step: it reads net/layer_0, which is trained,'
    )
    assert len(text) == 8
    assert str(ahead).splitlines()[-1] == 'So are 3 others.'


def test_running_averages_in_another_argument():
    """The function returns new ones, and what is kept is made of the old ones."""
    net = Net('plain')
    variables = oracle.init(net, {'params': KEY, 'dropout': KEY}, X)

    def loss(params: Any, stats: Any, x: Any) -> Any:
        variables = {'params': params, 'batch_stats': stats}
        y, new = net.apply(variables, x, mutable=['batch_stats'])
        return jnp.mean(y**2), new

    params, stats = variables['params'], variables['batch_stats']
    ahead = sg.precompute(loss, params, stats, X, wrt='head/**')
    written = [line for line in lines(ahead) if 'is written' in line]
    assert [line.split()[0] for line in written] == ['norm/mean', 'norm/var']
    changing = sg.precompute(loss, params, stats, X, wrt='head/**', each=1)
    assert 'is written' not in str(changing)
    kept, moved = changing.early(params, X), stats
    for _ in range(2):
        ours, right = changing.late(params, kept, moved), loss(params, moved, X)
        moved = right[1]['batch_stats']
        for a, b in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_flops():
    """Products, convolutions, loops and branches, counted by hand."""
    image, kernel = jnp.ones((1, 5, 5, 3)), jnp.ones((3, 3, 3, 2))

    def conv(x: Any, k: Any) -> Any:
        dims = ('NHWC', 'HWIO', 'NHWC')
        return jax.lax.conv_general_dilated(x, k, (1, 1), 'VALID', None, None, dims)

    def loop(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c @ c, None), x, None, 3)[0]

    def branch(x: Any) -> Any:
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ x, lambda: x)

    def of(fun: Any, *args: Any) -> float:
        return flops_of(jax.make_jaxpr(fun)(*args).eqns)

    square = X.T @ X
    assert of(jnp.dot, X, square) == 2 * 4 * 8 * 8
    assert of(conv, image, kernel) == 2 * (3 * 3 * 2) * (3 * 3 * 3)
    assert of(loop, square) == 3 * 2 * 8**3
    assert 2 * 8**3 < of(branch, square) < 2 * 8**3 + 10
    assert of(jax.nn.relu, X) == 32

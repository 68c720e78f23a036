"""What ``print`` says of a split: what is kept, and what stands in the way."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.ahead.costs import flops_of
from flax_sg.rendering import text as rendering
from tests.helpers import oracle


@pytest.fixture(autouse=True)
def sentences_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compared as they are written."""
    monkeypatch.setattr(rendering, 'WIDTH', 1000)


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
    assert mixed.startswith('If the data are a batch, what is kept belongs to all of')


def test_a_key_that_enters():
    """The line of dropout, and the module behind it alone."""
    assert [line for line in lines(split('dropout', 'head/**')) if 'each' in line] == [
        'tower is computed at each step: argument 2 (key), which is in each=, enters',
        "If argument 2 (key) is for dropout there, write nn.Frozen(module, state='eval'"
        '). To draw once for a batch, leave it out of each=.',
    ]
    assert str(split('dropout', 'head/**')).count(' (Net.__call__).\n') == 1


def of_batch(fun: Any, *args: Any, **how: Any) -> str:
    params = {'body': X.T @ X, 'head': X.T @ X}
    return str(sg.precompute(fun, params, *args, wrt='head', **how))


def test_what_enters_without_dropout():
    """Noise, a mask that draws other values, a step: no module is said to drop."""

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
            is_asked = 'If argument 2 (key) is for dropout there' in text
            assert is_asked == ('(key), which is in each=, enters at' in text)


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
    assert [line for line in text if 'each step' in line] == [
        line for line in text if line.startswith('tower is computed')
    ]
    advice = 'For dropout and running averages there, call eval() of the module.'
    assert advice in text
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
    unclear = (
        'If the data are a batch, what is kept belongs to all of it. To keep single '
        'examples, write examples=True.'
    )
    for text in (
        of_batch(fun(lambda x: x - x.mean(0, keepdims=True)), X),
        of_batch(fun(lambda x: x + jax.random.normal(KEY, x.shape)), X),
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
    """It is no example: late makes it, and a line says where, and what to do."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        text = jnp.tanh(X[:3] @ params['text']['a']) @ params['text']['b']
        return jnp.sum((x @ params['image'] @ params['head'] @ text.T) * y[:, None])

    params = {'image': X.T @ X, 'text': {'a': X.T @ X, 'b': X.T @ X}, 'head': X.T @ X}
    ahead = sg.precompute(loss, params, X, X[:, 0], wrt='head', examples=True)
    said = [line for line in str(ahead).splitlines() if 'reads no example' in line]
    at = f'test_report.py:{loss.__code__.co_firstlineno + 1} ({loss.__qualname__})'
    assert said == [
        f'dot_general at {at} reads no example, and what is kept are examples: it is '
        'computed at each step. Compute it before, and give its value in its place.'
    ]
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


class Noisy(nn.Module):
    """A frozen body behind noise, and a head with dropout, drawn with one key."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = jnp.tanh(nn.Frozen(nn.Dense(8, name='body'))(x))
        return nn.Dense(3, name='head')(nn.Dropout(0.3, deterministic=False)(h))


def test_a_key_that_enters_in_several_places() -> None:
    """Each module has the line where the key has entered on its own way."""
    net = Noisy()
    params = oracle.init(net, {'params': KEY, 'dropout': KEY}, X)['params']

    def of(dropout: int, noise: int) -> Any:
        def loss(params: Any, x: Any, key: Any) -> Any:
            keys = jax.random.split(key, 3)

            def apply(x: Any, key: Any) -> Any:
                return net.apply({'params': params}, x, rngs={'dropout': key})

            clean = apply(x, keys[dropout])
            noisy = x + 0.1 * jax.random.normal(keys[noise], x.shape)
            return jnp.mean((clean - apply(noisy, keys[2])) ** 2)

        return loss

    for numbers in (0, 1), (1, 0):
        ahead = sg.precompute(of(*numbers), params, X, KEY, wrt='head/**', each=2)
        found = [line for line in str(ahead).splitlines() if 'at each step' in line]
        assert len(found) == 1 and found[0].startswith('body is computed at each step')
        assert '.loss).' in found[0] and 'dropout' not in found[0]

    def behind(params: Any, x: Any, key: Any) -> Any:  # Now dropout is on its way.
        w = params['body']['kernel']
        first = nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={'dropout': key})
        return jnp.sum(jnp.tanh(first @ w) @ params['head']['kernel']) + of(0, 1)(
            params, x, key
        )

    text = str(sg.precompute(behind, params, X, KEY, wrt='head/**', each=2))
    found = [line for line in text.splitlines() if 'at each step' in line]
    assert ['.behind).' in line for line in found] == [True, False]
    assert str(ahead).count('is for dropout there') == 1


def test_a_step_and_a_trained_value_that_enter_in_several_places() -> None:
    """As a key: each frozen layer has its own line."""

    def loss(params: Any, x: Any, step: Any) -> Any:
        once = jnp.tanh(x @ params['a'] * step) @ params['head']
        moved = jnp.tanh((x + step) @ params['b'])
        scaled = jnp.sin(x @ params['c']) * params['head'][:1]
        return jnp.sum(once + moved @ params['head'] + jnp.tanh(scaled @ params['d']))

    params = {name: X.T @ X for name in ('a', 'b', 'c', 'd', 'head')}
    ahead = sg.precompute(loss, params, X, jnp.ones(()), wrt='head', each=2)
    first = loss.__code__.co_firstlineno
    at = [f'at test_report.py:{first + n} ({loss.__qualname__}).' for n in (2, 3)]
    found = [line for line in str(ahead).splitlines() if 'at each step' in line]
    assert [line.split()[0] for line in found] == ['b', 'd']
    assert all(line.endswith(end) for line, end in zip(found, at, strict=True))


def test_a_backward_pass_by_an_input() -> None:
    """Forces, the residual of an equation: a frozen body before the trained head."""

    def energy(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(jnp.tanh(x @ params['body']) @ params['head']))

    def forces(params: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(jax.grad(energy, 1), (None, 0))(params, x) ** 2)

    def adapted(params: Any, x: Any) -> Any:  # It is read in the forward pass, too.
        return forces(params, x @ params['head'])

    params = {'body': X.T @ X / 9, 'head': X.T @ X / 9}
    for fun in forces, jax.jit(forces):
        ahead = sg.precompute(fun, params, X, wrt='head')
        found = [line for line in str(ahead).splitlines() if 'at each step' in line]
        assert [line.partition(', which')[0] for line in found] == [
            'body is computed at each step: its backward pass by an input reads head'
        ]
    with pytest.warns(UserWarning, match='Nothing is computed once'):
        text = str(sg.precompute(adapted, params, X, wrt='head'))
    assert next(line for line in text.splitlines() if 'body is' in line).startswith(
        'body is computed at each step: it reads head, which'
    )
    # The same derivative in forward mode is of the body alone.
    directions = jnp.eye(8)

    def forward(params: Any, x: Any) -> Any:
        def of_one(x: Any) -> Any:
            along = lambda d: jax.jvp(lambda x: energy(params, x), (x,), (d,))[1]  # noqa: E731
            return jax.vmap(along)(directions)

        return jnp.mean(jax.vmap(of_one)(x) ** 2)

    ahead = sg.precompute(forward, params, X, wrt='head')
    assert 'body is computed' not in str(ahead)
    np.testing.assert_allclose(
        ahead.late(params, ahead.early(params, X)), forces(params, X), rtol=1e-5
    )


def test_outputs_that_are_named_as_data() -> None:
    """Only if all of an argument comes back, a step writes it."""

    def loss(params: Any, batch: Any) -> Any:
        code = jnp.tanh(batch['image'] @ params['encoder'])
        out = code @ params['decoder']
        aux = {'image': out, 'encoder': code.T @ code, 'outer': {'image': out}}
        return jnp.mean((out - batch['image']) ** 2), aux

    params = {'encoder': X.T @ X, 'decoder': X.T @ X}
    batch = {'image': X, 'label': jnp.arange(4)}
    text = str(sg.precompute(loss, params, batch, wrt='decoder'))
    assert 'is written' not in text and 'each=' not in text

    def averaged(params: Any, state: Any, x: Any) -> Any:
        y = jnp.tanh((x - state['mean']) @ params['encoder']) @ params['decoder']
        state = {'mean': 0.9 * state['mean'] + 0.1 * x, 'count': state['count'] + 1}
        return jnp.mean(y), {'state': state}

    state = {'mean': X, 'count': jnp.zeros((), int)}
    text = str(sg.precompute(averaged, params, state, X, wrt='decoder'))
    assert [line.split()[0] for line in text.splitlines() if 'is written' in line] == [
        'count',
        'mean',
    ]


@pytest.mark.parametrize('where', ('early', 'late', 'both', 'in a loop'))
def test_turns_of_a_while_loop_are_not_known(where: str) -> None:
    """What is said of the flops is a bound, and no warning is built on it."""

    def many(x: Any, w: Any) -> Any:
        return jax.lax.while_loop(
            lambda s: s[0] < 50, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x)
        )[1]

    def loss(params: Any, x: Any, key: Any) -> Any:
        x = jnp.tanh(x @ params['embed'])
        if where in ('early', 'both'):
            x = many(x, params['body'])
        if where == 'in a loop':
            x = jax.lax.map(lambda row: many(row[None], params['body'])[0], x)
        noise = jax.random.normal(key, x.shape)
        if where in ('late', 'both'):
            noise = many(noise, params['body'])
        return jnp.sum(jnp.tanh((x + noise) @ params['head']))

    params = {
        'embed': jnp.ones((8, 8)) / 8,
        'body': jnp.ones((8, 8)) / 8,
        'head': jnp.ones((8, 9000)),
    }
    with warnings.catch_warnings():
        if where == 'late':
            warnings.simplefilter('ignore')
        text = str(sg.precompute(loss, params, X, KEY, wrt='head', each=2))
    line = next(line for line in text.splitlines() if 'flops' in line)
    bounds = {'late': 'at most ', 'both': ''}
    assert f'% of the flops {bounds.get(where, "at least ")}are done' in line
    assert line.endswith(' A while loop counts one turn.')


def test_hardly_anything_is_computed_once() -> None:
    """Below two per cent of the flops, a warning says so, as where nothing is."""

    def loss(params: Any, x: Any) -> Any:
        x = jnp.tanh(x @ params['first']) @ params['adapter']
        for _ in range(60):
            x = jnp.tanh(x @ params['body'])
        return jnp.mean(x)

    params = {name: X.T @ X / 32 for name in ('first', 'adapter', 'body')}
    with pytest.warns(
        UserWarning, match='^Hardly anything is computed once: 1.6% of the flops are'
    ):
        ahead = sg.precompute(loss, params, X, wrt='adapter')
    assert 'body is computed at each step: it reads adapter' in str(ahead)
    # A loss in which more is frozen than trained says nothing.
    sg.precompute(loss, params, X, wrt='body')


def test_all_count_as_trained() -> None:
    """A line says so in the report, too, also where noise is computed once."""

    def loss(params: Any, x: Any) -> Any:
        noise = jnp.tanh(jax.random.normal(KEY, (8, 8)))
        return jnp.sum(noise @ x.T @ x @ params['head'])

    line = 'Without wrt=, all parameters count as trained: wrt=sg.live('
    assert line in str(sg.precompute(loss, {'head': X.T}, X))
    assert line not in str(sg.precompute(loss, {'head': X.T}, X, wrt='head'))


def medusa(params: Any, ids: Any) -> Any:
    """Heads on the features of a model, with a KL to its own predictions."""
    h = params['embed'][ids]
    h = jnp.tanh(h @ params['body'])
    said = jax.nn.softmax(h @ params['lm_head']['kernel'] + params['lm_head']['bias'])
    heads = jnp.tanh(h @ params['heads'][0]) @ params['heads'][1]
    return -jnp.mean(jnp.sum(said * jax.nn.log_softmax(heads), -1))


def of_tied_weights(fun: Any, params: Any, ids: Any) -> Any:
    head = {'kernel': params['embed'].T, 'bias': jnp.zeros((1, 1, 50))}
    return fun({**params, 'lm_head': head}, ids)


def test_a_value_that_is_made_of_a_smaller_one() -> None:
    """Probabilities of 200 words beside 8 features: a line names the way out."""
    params = {
        'embed': jax.random.normal(KEY, (50, 8)),
        'body': X.T @ X / 9,
        'lm_head': {'kernel': jnp.ones((8, 200)), 'bias': jnp.zeros((1, 1, 200))},
        'heads': [X.T @ X / 9, jnp.ones((8, 200)) / 8],
    }
    ids = jnp.arange(24).reshape(4, 6)
    ahead = sg.precompute(medusa, params, ids, wrt='heads/**')
    assert sorted(k.shape[-1] for k in ahead.kept) == [8, 200]
    said = [line for line in str(ahead).splitlines() if 'would be kept' in line]
    assert said == [
        "768 bytes would be kept if late read 'lm_head/bias', 'lm_head/kernel': name "
        'this in wrt= of sg.precompute, and not in that of sg.grad.'
    ]
    with pytest.warns(UserWarning, match='Hardly anything'):  # In so small a model.
        smaller = sg.precompute(medusa, params, ids, wrt=['heads/**', 'lm_head/kernel'])
    assert [k.shape for k in smaller.kept] == [(4, 6, 8)]
    assert 'would be kept' not in str(smaller)
    # A tied head has no such way out: late would run the whole model.
    tied = functools.partial(of_tied_weights, medusa)
    small = {**params, 'heads': [params['body'], params['embed'].T]}
    assert 'would be kept' not in str(sg.precompute(tied, small, ids, wrt='heads/**'))
    # Two teachers: each of them multiplies the bytes.
    two = {**params, 'other': jax.tree.map(lambda x: x + 0.1, params['lm_head'])}

    def both(params: Any, ids: Any) -> Any:
        other = {**params, 'lm_head': params['other']}
        return medusa(params, ids) + medusa(other, ids)

    text = str(sg.precompute(both, two, ids, wrt='heads/**'))
    assert "'lm_head/bias', 'lm_head/kernel', 'other/bias', 'other/kernel': na" in text
    right = sg.grad(medusa, wrt='heads/**')(params, ids)
    for one in ahead, smaller:
        ours = sg.grad(one.late, wrt='heads/**')(params, one.early(params, ids))
        for a, b in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_80_columns_and_lines_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of optax is made where it was called."""
    monkeypatch.setattr(rendering, 'WIDTH', 80)

    def loss_of_a_classifier(p: Any, x: Any):
        logits = jnp.tanh(x @ p['body']) @ p['head']
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(4))
        return losses.mean() + optax.huber_loss(x.mean() * logits, x @ p['body']).mean()

    ahead = sg.precompute(
        loss_of_a_classifier,
        *({'body': X.T @ X, 'head': X.T @ X}, X),
        wrt='head',
    )
    assert max(map(len, str(ahead).splitlines())) <= 80
    table = str(ahead).partition('\n\n')[0]
    assert '_classification.py' not in table and '_regression.py' not in table
    assert 'test_report.py' in table

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
from tests.ahead.splits import assert_same
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


def lines(ahead: Any, *words: str) -> list[str]:
    """Lines of the report with one of some words, without the numbers of lines."""
    text = [
        line.partition(' at test_report.py:')[0] for line in str(ahead).splitlines()
    ]
    return [line for line in text if not words or any(word in line for word in words)]


def steps(ahead: Any) -> list[str]:
    """The lines that say what is computed at each step."""
    return [line for line in str(ahead).splitlines() if 'at each step' in line]


def written(ahead: Any) -> list[str]:
    """The variables of which the report says that the function writes them."""
    return [line.split()[0] for line in lines(ahead, 'is written')]


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
    ahead = split('dropout', 'head/**')
    assert lines(ahead, 'each') == [
        'tower is computed at each step: argument 2 (key), which is in each=, enters',
        "If argument 2 (key) is for dropout there, write nn.Frozen(module, state='eval'"
        '). To draw once for a batch, leave it out of each=.',
    ]
    assert str(ahead).count(' (Net.__call__).\n') == 1


SQUARE = X.T @ X


def of_batch(fun: Any, *args: Any, **how: Any) -> str:
    params = {'body': SQUARE, 'head': SQUARE}
    return str(sg.precompute(fun, params, *args, wrt='head', **how))


def tower(params: Any, x: Any) -> Any:
    """The loss of a frozen layer and a head."""
    return jnp.sum(jnp.tanh(x @ params['body']) @ params['head'])


def test_what_enters_without_dropout():
    """Noise, a mask that draws other values, a step: no module is said to drop."""

    def noise(params: Any, x: Any, key: Any) -> Any:
        return tower(params, x + jax.random.normal(key, x.shape))

    def token(params: Any, x: Any, key: Any) -> Any:
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        return tower(params, jnp.where(mask, x, params['head'][0]))

    def ones(params: Any, x: Any, key: Any) -> Any:
        return tower(params, jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 1.0))

    def scaled(params: Any, x: Any, step: Any) -> Any:
        return tower(params, x * step)

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

    ahead = sg.precompute(loss, model, X, wrt='head/**')
    assert [line.split()[0] for line in steps(ahead)] == ['tower']
    advice = 'For dropout and running averages there, call eval() of the module.'
    assert advice in lines(ahead)
    assert 'drop/rngs/count, which the function writes' in str(ahead)
    model.drop.eval()
    still = sg.precompute(loss, model, X, wrt='head/**')
    assert not steps(still)
    assert [k.shape for k in still.kept] == [(4, 8)]


def test_rows_of_a_batch():
    """A report says if what is kept is no row for each example."""

    def of(before: Any, *others: Any, **how: Any) -> str:
        return of_batch(lambda p, x, *y: tower(p, before(x, *y)), *others, **how)

    same = lambda x: x  # noqa: E731
    for text in (
        of(same, X),
        of(same, X, examples=True),
        of(lambda x, s: x * s, X, jnp.ones(())),
    ):
        assert 'belongs to' not in text
    for text in (
        of(lambda x: x - x.mean(0, keepdims=True), X),
        of(lambda x: x + jax.random.normal(KEY, x.shape), X),
        of(lambda x, w: x * w[None], X, jnp.ones(8)),
        of(same, X[:1]),
        of_batch(lambda p, x: jnp.sum(p['head'] @ jnp.tanh(p['body'] @ x.T)), X),
    ):
        assert text.splitlines()[-1] == (
            'If the data are a batch, what is kept belongs to all of it. To keep '
            'single examples, write examples=True.'
        )


def test_a_scalar_of_a_batch_is_not_written():
    """The loss has its shape, and is no new value of it."""
    text = of_batch(lambda p, s: jnp.sum(p['body'] * jnp.sin(s) @ p['head']), X[0, 0])
    assert 'is written' not in text


def test_without_wrt() -> None:
    """All parameters count as trained: the warning and the report say so."""
    params = {'body': SQUARE, 'head': SQUARE}
    said = 'Without wrt=, all parameters count as trained'
    with pytest.warns(UserWarning, match=said):
        sg.precompute(tower, params, X)
    with pytest.warns(UserWarning) as caught:
        sg.precompute(tower, params, X, wrt='*')
    assert 'Without wrt=' not in str(caught[0].message)

    def loss(params: Any, x: Any) -> Any:  # Noise is computed once.
        noise = jnp.tanh(jax.random.normal(KEY, (8, 8)))
        return jnp.sum(noise @ x.T @ x @ params['head'])

    params = {'head': X.T}
    assert f'{said}: wrt=sg.live(' in str(sg.precompute(loss, params, X))
    assert said not in str(sg.precompute(loss, params, X, wrt='head'))


def test_what_reads_no_example() -> None:
    """It is no example: late makes it, and a line says where, and what to do."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        text = jnp.tanh(X[:3] @ params['text']['a']) @ params['text']['b']
        return jnp.sum((x @ params['image'] @ params['head'] @ text.T) * y[:, None])

    params = {'image': SQUARE, 'text': {'a': SQUARE, 'b': SQUARE}, 'head': SQUARE}
    ahead = sg.precompute(loss, params, X, X[:, 0], wrt='head', examples=True)
    at = f'test_report.py:{loss.__code__.co_firstlineno + 1} ({loss.__qualname__})'
    assert steps(ahead) == [
        f'dot_general at {at} reads no example, and what is kept are examples: it is '
        'computed at each step. Compute it before, and give its value in its place.'
    ]
    order = np.array([2, 0, 3, 1])
    kept = [leaf[order] for leaf in ahead.early(params, X, X[:, 0])]
    assert_same(ahead.late(params, kept), loss(params, X[order], X[order, 0]))


def test_an_adapter_in_front():
    """It is trained, so all behind it is computed at each step: a warning says so."""
    said = 'first is computed at each step: it reads adapter, which is'
    with pytest.warns(UserWarning, match=said):
        ahead = split('adapter', 'adapter/**', 'head/**')
    assert lines(ahead, 'each step') == [
        'first is computed at each step: it reads adapter, which is trained,',
        'tower is computed at each step: it reads adapter, which is trained,',
    ]
    assert 'an input' in str(ahead)


def test_modules_as_far_as_they_differ():
    """Layers with a trained part each; the rest of a long list is counted."""
    params = {'net': {f'layer_{n}': {'a': SQUARE, 'w': SQUARE} for n in range(12)}}

    def loss(params: Any, x: Any) -> Any:
        for layer in params['net'].values():
            x = x @ layer['w'] + x @ layer['a']
        return x.sum()

    ahead = sg.precompute(loss, params, X, wrt='**/a')
    first, *_, last = lines(ahead, 'each step', 'others')
    assert first == (
        'net/layer_1 is computed at each step: it reads net/layer_0, which is trained,'
    )
    assert last == str(ahead).splitlines()[-1] == 'So are 3 others.'
    assert len(steps(ahead)) == 8


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
    assert written(ahead) == ['norm/mean', 'norm/var']
    changing = sg.precompute(loss, params, stats, X, wrt='head/**', each=1)
    assert not written(changing)
    kept, moved = changing.early(params, X), stats
    for _ in range(2):
        right = loss(params, moved, X)
        assert_same(changing.late(params, kept, moved), right)
        moved = right[1]['batch_stats']


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

    assert of(jnp.dot, X, SQUARE) == 2 * 4 * 8 * 8
    assert of(conv, image, kernel) == 2 * (3 * 3 * 2) * (3 * 3 * 3)
    assert of(loop, SQUARE) == 3 * 2 * 8**3
    assert 2 * 8**3 < of(branch, SQUARE) < 2 * 8**3 + 10
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
        [found] = steps(ahead)
        assert found.startswith('body is computed at each step')
        assert '.loss).' in found and 'dropout' not in found

    def behind(params: Any, x: Any, key: Any) -> Any:  # Now dropout is on its way.
        first = nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={'dropout': key})
        kernels = {name: layer['kernel'] for name, layer in params.items()}
        return tower(kernels, first) + of(0, 1)(params, x, key)

    report = sg.precompute(behind, params, X, KEY, wrt='head/**', each=2)
    assert ['.behind).' in line for line in steps(report)] == [True, False]
    assert str(ahead).count('is for dropout there') == 1


def test_a_step_and_a_trained_value_that_enter_in_several_places() -> None:
    """As a key: each frozen layer has its own line."""

    def loss(params: Any, x: Any, step: Any) -> Any:
        once = jnp.tanh(x @ params['a'] * step) @ params['head']
        moved = jnp.tanh((x + step) @ params['b'])
        scaled = jnp.sin(x @ params['c']) * params['head'][:1]
        return jnp.sum(once + moved @ params['head'] + jnp.tanh(scaled @ params['d']))

    params = {name: SQUARE for name in ('a', 'b', 'c', 'd', 'head')}
    ahead = sg.precompute(loss, params, X, jnp.ones(()), wrt='head', each=2)
    first = loss.__code__.co_firstlineno
    for line, name, n in zip(steps(ahead), 'bd', (2, 3), strict=True):
        assert line.split()[0] == name
        assert line.endswith(f'at test_report.py:{first + n} ({loss.__qualname__}).')


def test_a_backward_pass_by_an_input() -> None:
    """Forces, the residual of an equation: a frozen body before the trained head."""

    def energy(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(jnp.tanh(x @ params['body']) @ params['head']))

    def forces(params: Any, x: Any) -> Any:
        return jnp.mean(jax.vmap(jax.grad(energy, 1), (None, 0))(params, x) ** 2)

    def adapted(params: Any, x: Any) -> Any:  # It is read in the forward pass, too.
        return forces(params, x @ params['head'])

    params = {'body': SQUARE / 9, 'head': SQUARE / 9}
    for fun in forces, jax.jit(forces):
        [found] = steps(sg.precompute(fun, params, X, wrt='head'))
        said = 'body is computed at each step: its backward pass by an input reads head'
        assert found.partition(', which')[0] == said
    with pytest.warns(UserWarning, match='Nothing is computed once'):
        text = str(sg.precompute(adapted, params, X, wrt='head'))
    assert '\nbody is computed at each step: it reads head, which' in text

    # The same derivative in forward mode is of the body alone.
    def forward(params: Any, x: Any) -> Any:
        def of_one(x: Any) -> Any:
            along = lambda d: jax.jvp(lambda x: energy(params, x), (x,), (d,))[1]  # noqa: E731
            return jax.vmap(along)(jnp.eye(8))

        return jnp.mean(jax.vmap(of_one)(x) ** 2)

    ahead = sg.precompute(forward, params, X, wrt='head')
    assert not steps(ahead)
    assert_same(ahead.late(params, ahead.early(params, X)), forces(params, X))


def test_outputs_that_are_named_as_data() -> None:
    """Only if all of an argument comes back, a step writes it."""

    def loss(params: Any, batch: Any) -> Any:
        code = jnp.tanh(batch['image'] @ params['encoder'])
        out = code @ params['decoder']
        aux = {'image': out, 'encoder': code.T @ code, 'outer': {'image': out}}
        return jnp.mean((out - batch['image']) ** 2), aux

    params = {'encoder': SQUARE, 'decoder': SQUARE}
    batch = {'image': X, 'label': jnp.arange(4)}
    text = str(sg.precompute(loss, params, batch, wrt='decoder'))
    assert 'is written' not in text and 'each=' not in text

    def averaged(params: Any, state: Any, x: Any) -> Any:
        y = jnp.tanh((x - state['mean']) @ params['encoder']) @ params['decoder']
        state = {'mean': 0.9 * state['mean'] + 0.1 * x, 'count': state['count'] + 1}
        return jnp.mean(y), {'state': state}

    state = {'mean': X, 'count': jnp.zeros((), int)}
    ahead = sg.precompute(averaged, params, state, X, wrt='decoder')
    assert written(ahead) == ['count', 'mean']


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

    params = {'embed': SQUARE / 32, 'body': SQUARE / 32, 'head': jnp.ones((8, 9000))}
    with warnings.catch_warnings(action='ignore' if where == 'late' else 'error'):
        ahead = sg.precompute(loss, params, X, KEY, wrt='head', each=2)
    [line] = lines(ahead, 'flops')
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

    params = {name: SQUARE / 32 for name in ('first', 'adapter', 'body')}
    said = '^Hardly anything is computed once: 1.6% of the flops are'
    with pytest.warns(UserWarning, match=said):
        ahead = sg.precompute(loss, params, X, wrt='adapter')
    assert 'body is computed at each step: it reads adapter' in str(ahead)
    # A loss in which more is frozen than trained says nothing.
    sg.precompute(loss, params, X, wrt='body')


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
        'body': SQUARE / 9,
        'lm_head': {'kernel': jnp.ones((8, 200)), 'bias': jnp.zeros((1, 1, 200))},
        'heads': [SQUARE / 9, jnp.ones((8, 200)) / 8],
    }
    ids = jnp.arange(24).reshape(4, 6)
    ahead = sg.precompute(medusa, params, ids, wrt='heads/**')
    assert sorted(k.shape[-1] for k in ahead.kept) == [8, 200]
    assert lines(ahead, 'would be kept') == [
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
        assert_same(ours, right, 1e-4)


def test_80_columns_and_lines_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of optax is made where it was called."""
    monkeypatch.setattr(rendering, 'WIDTH', 80)

    def loss_of_a_classifier(p: Any, x: Any):
        logits = jnp.tanh(x @ p['body']) @ p['head']
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(4))
        return losses.mean() + optax.huber_loss(x.mean() * logits, x @ p['body']).mean()

    text = of_batch(loss_of_a_classifier, X)
    assert max(map(len, text.splitlines())) <= 80
    table = text.partition('\n\n')[0]
    assert '_classification.py' not in table and '_regression.py' not in table
    assert 'test_report.py' in table

"""The way from a parameter to an output, and what stops it."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing
from flax_sg.flow import pullback
from tests.helpers import oracle

X = jnp.ones((2, 3))


class Leaks(nn.Module):
    """Features of a block that another loss reads."""

    stops: bool = False

    def setup(self):
        self.lower, self.upper, self.probe = (nn.Dense(3) for _ in range(3))

    def __call__(self, x):
        with nn.train_only(['lower/**', 'upper/**']):
            hidden = jnp.tanh(self.lower(x))
            features = jnp.tanh(self.upper(hidden))
        if self.stops:
            features = lax.stop_gradient(features)
        probed = self.probe(features)
        return {'probe': jnp.mean(probed**2), 'block': jnp.mean(features**2)}


def report_of(model: Any) -> tuple[Any, dict[str, str]]:
    params = jax.eval_shape(model.init, jax.random.key(0), X)['params']
    report = sg.gradient_flow(lambda p, x: model.apply({'params': p}, x), params, X)
    lines, first = inspect.getsourcelines(type(model).__call__)
    return report, {f':{first + n} ': text.strip() for n, text in enumerate(lines)}


def texts(found: Any, lines: dict[str, str]) -> list[str]:
    return [next(t for n, t in lines.items() if n in line) for line in found]


def test_the_lines_between_a_parameter_and_an_output():
    report, lines = report_of(Leaks())
    why = report.why('probe', 'lower/kernel')
    assert texts(why.lines, lines) == [
        'hidden = jnp.tanh(self.lower(x))',
        'features = jnp.tanh(self.upper(hidden))',
        'probed = self.probe(features)',
        "return {'probe': jnp.mean(probed**2), 'block': jnp.mean(features**2)}",
    ]
    assert (why.status, why.by) == ('flows', '')
    assert report.why('probe', 'upper/bias').lines == why.lines[1:]
    with pytest.raises(sg.errors.UnknownNameError, match="no output 'prob'"):
        report.why('prob', 'lower/kernel')
    first, second, *_ = str(why).splitlines()
    assert first == "A gradient flows to 'lower/kernel' from 'probe':"
    assert second == f'  {why.lines[0]}'
    copy = pickle.loads(pickle.dumps(report))
    assert copy == report
    assert copy.why('probe', 'lower/kernel').lines == ()


def test_a_way_on_which_a_gradient_stops():
    report, lines = report_of(Leaks(stops=True))
    why = report.why('probe', 'upper/kernel')
    [line] = [n for n, text in lines.items() if 'lax.stop' in text]
    assert why.by == f'stop_gradient at test_way.py{line}(Leaks.__call__)'
    assert texts(why.lines, lines)[:3] == [
        'features = jnp.tanh(self.upper(hidden))',
        'features = lax.stop_gradient(features)',
        'probed = self.probe(features)',
    ]
    assert str(why).endswith(f'\nIt is stopped by {why.by}.')
    unused = report.why('block', 'probe/kernel')
    assert (unused.lines, unused.by) == ((), '')
    assert str(unused) == "'probe/kernel' is not used by 'block'."


def entropy(logits: Any) -> Any:
    """As in optax: the maximum is stopped, beside the gradient of the logits."""
    most = lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    return jnp.mean(jnp.log(jnp.sum(jnp.exp(logits - most), -1)))


def optax_entropy(logits: Any) -> Any:
    labels = jnp.zeros(len(logits), jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def in_block(dense: Any, x: Any) -> Any:
    with nn.stop_gradient('body/**'):
        return dense(x)


# What is named, and a spelling of it.
CUTS: dict[str, Any] = {
    'nn.Frozen(Dense)': lambda dense, x: nn.Frozen(dense)(x),
    "nn.Frozen(Dense, Glob('ker*'))": lambda dense, x: nn.Frozen(dense, 'ker*')(x),
    'nn.mirror(Dense)': lambda dense, x: nn.mirror(dense)(x),
    "stop_gradient(Glob('body/**'))": in_block,
    'round': lambda dense, x: jnp.round(dense(x)),
}


class Classifier(nn.Module):
    """A frozen layer, and a loss that stops a maximum."""

    cut: str

    @nn.compact
    def __call__(self, x):
        hidden = CUTS[self.cut](nn.Dense(3, name='body'), x)
        return nn.Dense(2, name='head')(hidden)


@pytest.mark.parametrize('loss', [entropy, optax_entropy])
@pytest.mark.parametrize('cut', CUTS)
def test_the_stop_that_is_named_is_the_one_that_cuts(cut, loss):
    model = Classifier(cut)
    params = jax.eval_shape(model.init, jax.random.key(0), X)['params']
    report = sg.gradient_flow(lambda p: loss(model.apply({'params': p}, X)), params)
    by = report.why('output', 'body/kernel').by
    assert by.startswith(f'{cut} at test_way.py:'), by
    assert report.why('output', 'head/kernel').by == ''
    with pytest.raises(AssertionError) as caught:
        testing.assert_flows(report, 'body/**')
    assert str(caught.value).endswith(f'stopped by {by}.')


def test_a_way_through_bodies_and_loops():
    def turn(carry, x):
        first, second = carry
        return (second * 2.0, first + x), second

    def loss(p):
        doubled = jax.jit(lambda x: x * 2.0)(p['w'])
        (last, _), _ = lax.scan(turn, (jnp.zeros(3), doubled), jnp.ones((4, 3)))
        return {'last': lax.cond(last[0] > 0, lax.sin, lax.cos, last)}

    report = sg.gradient_flow(loss, {'w': jnp.ones(3), 'v': jnp.ones(3)})
    start = loss.__code__.co_firstlineno
    lines = report.why('last', 'w').lines
    numbers = [int(line.split(':')[1].split()[0]) - start for line in lines]
    assert numbers == [1, turn.__code__.co_firstlineno + 2 - start, 3]
    assert report.why('last', 'v').lines == ()


def test_nothing_is_explained_before_somebody_asks(monkeypatch):
    """A walk that asks each equation for its derivative takes as long as the proof."""
    asked: list[Any] = []
    ask = pullback.Reach.sources
    monkeypatch.setattr(
        pullback.Reach, 'sources', lambda self, eqn: asked.append(eqn) or ask(self, eqn)
    )
    report, _ = report_of(Leaks(stops=True))
    str(report), report.rows(), testing.assert_flows(report, 'probe/**')
    assert not asked
    report.why('probe', 'upper/kernel')
    walked = len(asked)
    assert walked > 0
    report.why('probe', 'lower/kernel')
    assert len(asked) == walked


class Tied(nn.Module):
    """An embedding that is read twice, once through a stop of some kind."""

    kind: str

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(6, 3, name='embed')
        if self.kind == 'input':
            with nn.stop_gradient('embed/**'):
                x = embed(ids)
        elif self.kind == 'mirror':
            x = nn.mirror(embed)(ids)
        else:
            x = embed(ids)
        x = nn.Dense(3, name='body')(x)
        if self.kind == 'output':
            x = jnp.where(jnp.any(embed.embedding > 0), x, 2.0 * x)  # It has none.
            stopped = embed.attend(lax.stop_gradient(x))
            return stopped * 1e-3 + nn.Frozen(embed).attend(x)
        return {'logits': embed.attend(x), 'body': x}


@pytest.mark.parametrize('kind', ['input', 'mirror', 'output', 'both'])
def test_the_uses_of_a_tied_embedding(kind, standard_promotion):
    ids, model = jnp.arange(4), Tied(kind)
    params = oracle.init(model, jax.random.key(0), ids)['params']
    report = sg.gradient_flow(lambda p: model.apply({'params': p}, ids), params)
    why = report.why('output' if kind == 'output' else 'logits', 'embed/embedding')
    assert why.status == 'flows'
    two = [kind == 'both', True]  # One of them is stopped, or none.
    trains = [True, True, False] if kind == 'output' else two
    assert [use.trains for use in why.uses] == trains
    lines, first = inspect.getsourcelines(Tied.__call__)
    here = {f':{first + n} ': text.strip() for n, text in enumerate(lines)}
    read = {'input': 'x = embed(ids)', 'mirror': 'x = nn.mirror(embed)(ids)'}
    found = texts([use.line for use in why.uses], here)
    assert found[0] == read.get(kind, 'x = embed(ids)')
    said = f'It is trained by {sum(trains)} of {len(trains)} uses:'
    assert (said in str(why)) == (kind != 'both')
    if kind != 'both':
        verdict = 'trains it' if trains[0] else 'is stop'
        assert f'  {why.uses[0].line} {verdict}' in str(why)
        # An output that reads it once has one use, and its own verdict.
        if kind != 'output':
            alone = report.why('body', 'embed/embedding')
            assert [use.trains for use in alone.uses] == [False]
            assert 'uses:' not in str(alone)
    assert pickle.loads(pickle.dumps(why)) == why

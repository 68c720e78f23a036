"""The way from a parameter to an output, and where a value leaves its block."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing

pytestmark = pytest.mark.every_case

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


def texts(uses: Any, lines: dict[str, str]) -> list[str]:
    return [next(t for n, t in lines.items() if n in use.source) for use in uses]


def test_the_lines_between_a_parameter_and_an_output():
    report, lines = report_of(Leaks())
    way = report.uses_of('lower/kernel', 'probe')
    assert texts(way, lines) == [
        'hidden = jnp.tanh(self.lower(x))',
        'features = jnp.tanh(self.upper(hidden))',
        'probed = self.probe(features)',
        "return {'probe': jnp.mean(probed**2), 'block': jnp.mean(features**2)}",
    ]
    # The first line outside of the block is the place for a stop.
    assert [use.leaves for use in way] == [False, False, True, False]
    assert not any(use.stopped for use in way)
    assert report.uses_of('upper/bias', 'probe') == way[1:]
    assert [use.leaves for use in report.uses_of('probe/bias', 'probe')] == [False] * 2
    with pytest.raises(sg.errors.UnknownNameError, match="no output 'prob'"):
        report.uses_of('lower/kernel', 'prob')


def test_a_way_on_which_a_gradient_stops():
    report, lines = report_of(Leaks(stops=True))
    way = report.uses_of('upper/kernel', 'probe')
    [line] = [n for n, text in lines.items() if 'lax.stop' in text]
    cause = f'stop_gradient at test_way.py{line}(Leaks.__call__)'
    assert texts(way, lines)[:3] == [
        'features = jnp.tanh(self.upper(hidden))',
        'features = lax.stop_gradient(features)',
        'probed = self.probe(features)',
    ]
    assert [use.by for use in way] == [cause, cause, '', '']
    assert report.uses_of('probe/kernel', 'block') == ()  # It is not used.


def test_an_assertion_says_where_a_value_leaves_its_block():
    report, lines = report_of(Leaks())
    with pytest.raises(AssertionError) as caught:
        testing.assert_trains_only(report, 'probe/**', output='probe')
    last = str(caught.value).splitlines()[-1]
    [line] = [n for n, text in lines.items() if text.startswith('probed =')]
    assert last.startswith(f'Its value leaves its block at test_way.py{line.rstrip()}')
    assert last.endswith('write jax.lax.stop_gradient there.')


def test_a_way_through_bodies_and_loops():
    def turn(carry, x):
        first, second = carry
        return (second * 2.0, first + x), second

    def loss(p):
        doubled = jax.jit(lambda x: x * 2.0)(p['w'])
        (last, _), _ = lax.scan(turn, (jnp.zeros(3), doubled), jnp.ones((4, 3)))
        return {'last': lax.cond(last[0] > 0, jnp.sin, jnp.cos, last)}

    report = sg.gradient_flow(loss, {'w': jnp.ones(3), 'v': jnp.ones(3)})
    way = report.uses_of('w', 'last')
    start = loss.__code__.co_firstlineno
    numbers = [int(use.source.split(':')[1].split()[0]) - start for use in way]
    assert numbers == [1, turn.__code__.co_firstlineno + 2 - start, 3]
    assert report.uses_of('v', 'last') == ()


def test_a_value_that_goes_around_in_a_loop():
    def turn(carry, _):
        first, second, third = carry
        return (jnp.zeros(3), first * 1.0, second), third

    def loss(p):
        return lax.scan(turn, (p, jnp.ones(3), jnp.ones(3)), None, length=4)[1]

    assert len(sg.gradient_flow(loss, jnp.ones(3)).uses_of('', 'output')) > 0


def test_a_report_can_be_pickled():
    report, _ = report_of(Leaks())
    copy = pickle.loads(pickle.dumps(report))
    assert copy == report
    assert copy.uses_of('lower/kernel', 'probe') == ()


def test_a_smaller_report_knows_the_ways():
    report, _ = report_of(Leaks())
    wrong = report.unexpected({'probe': 'probe/**'})
    assert wrong.uses_of('lower/kernel', 'probe') == report.uses_of(
        'lower/kernel', 'probe'
    )


def test_one_function_that_is_called_twice():
    once = jax.jit(jnp.sin)
    twice = jax.jit(lambda x: once(once(x)))

    def loss(p):
        same_line = twice(twice(p['w']))
        return {'sum': jnp.sum(same_line)}

    report = sg.gradient_flow(loss, {'w': jnp.ones(3)})
    lines = [use.source.split()[0] for use in report.uses_of('w', 'sum')]
    inside, after = twice.__wrapped__.__code__, loss.__code__.co_firstlineno + 2
    assert lines == [f'test_way.py:{n}' for n in (inside.co_firstlineno, after)]

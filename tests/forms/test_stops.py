"""``stop_gradient`` and ``train_only`` as people write them, rightly and wrongly."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

from flax_sg import errors, filters
from flax_sg import linen as nn
from flax_sg.forms.block_decorator import BlockDecorator
from tests.helpers import oracle

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Model(fnn.Module):
    def setup(self):
        self.enc, self.dec = fnn.Dense(3), fnn.Dense(3)

    def __call__(self, x):
        return self.dec(jnp.tanh(self.enc(x)))


MODEL = Model()
VARIABLES = oracle.init(MODEL, jax.random.key(0), X)
PARAMS = VARIABLES['params']
BOTH = pytest.mark.parametrize('make', [nn.stop_gradient, nn.train_only])


def frozen(model: Any = MODEL, *blocks: Any) -> set[str]:
    def loss(params):
        fn = model.apply
        for block in blocks:
            fn = functools.partial(in_block, block, fn)
        return jnp.sum(fn({'params': params}, X))

    grads = jax.grad(loss)(PARAMS)
    return {name for name in grads if oracle.is_zero(grads[name])}


def in_block(block: Any, fn: Any, *args: Any) -> Any:
    with block:
        return fn(*args)


@pytest.mark.parametrize(
    ('where', 'stopped', 'trained'),
    [
        ('enc/**', {'enc'}, {'dec'}),
        (True, {'enc', 'dec'}, set()),
        (False, set(), {'enc', 'dec'}),
        (~filters.as_filter('dec/**'), {'enc'}, {'dec'}),
    ],
)
def test_polarity(where, stopped, trained):
    # `where` names what stop_gradient stops, and what train_only trains (hazard 21).
    assert frozen(MODEL, nn.stop_gradient(where)) == stopped
    assert frozen(MODEL, nn.train_only(where)) == trained


@BOTH
def test_options(make):
    rewrite = make('a', collections=['cache', 'params'], unused='ignore')
    assert isinstance(rewrite, BlockDecorator)
    assert make(where='enc/**') == make('enc/**')
    assert frozen(make(Model, where='enc/**')()) == frozen(MODEL, make('enc/**'))
    assert (rewrite.collections, rewrite.unused) == (('cache', 'params'), 'ignore')
    make(Model, 'no', collections='cache', unused='ignore')().apply(VARIABLES, X)
    with pytest.raises(errors.UnusedFilterError):
        make(Model, 'enc/kernel', collections='cache')().apply(VARIABLES, X)
    with pytest.raises(TypeError, match='colections'):
        make('enc/**', colections='params')
    with pytest.raises(TypeError, match='positional argument'):
        make(Model, 'enc/**', 'dec/**')
    with pytest.raises(TypeError, match='where'):
        make()
    with pytest.raises(AttributeError, match='encode'):
        make(Model, 'enc/**', methods=['encode'])


# Errors say which call they come from, whatever line the traceback ends at.


def of_block(where: Any) -> Any:
    with nn.stop_gradient(where):  # opened: block
        return MODEL.apply(VARIABLES, X)


class Opens(Model):
    where: Any = None

    def __call__(self, x):
        with nn.stop_gradient(self.where):  # opened: method, init
            return super().__call__(x)


ORIGINS: dict[str, Callable[[Any], Any]] = {
    'block': of_block,
    'method': lambda where: Opens(where).apply(VARIABLES, X),
    'init': lambda where: Opens(where).init(jax.random.key(0), X),
    'fn': lambda w: nn.stop_gradient(MODEL.apply, w)(VARIABLES, X),  # opened: fn
    'module': lambda w: nn.Frozen(MODEL, w).apply(VARIABLES, X),  # opened: module
}
LINES = {
    name: number
    for number, line in enumerate(Path(__file__).read_text().splitlines(), start=1)
    for name in line.partition('# opened: ')[2].split(', ')
}


@pytest.mark.parametrize('name', ORIGINS)
def test_an_error_says_which_call_it_comes_from(name):
    with pytest.raises(errors.UnusedFilterError) as caught:
        ORIGINS[name]('typo/**')
    place = f'test_stops.py:{LINES[name]}'
    is_module = name == 'module'
    call = 'nn.Frozen(Model, ' if is_module else 'stop_gradient('
    origin = f"From {call}Glob('typo/**')), opened at {place}."
    assert [note for note in caught.value.__notes__ if 'From' in note] == [origin]

"""``stop_gradient`` and ``train_only`` as people write them, rightly and wrongly."""

import functools
import inspect
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

import flax_sg
import oracle
from flax_sg import errors, filters
from flax_sg import linen as nn
from flax_sg.forms import rewrites, stops

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Model(fnn.Module):
    def setup(self):
        self.enc, self.dec = fnn.Dense(3), fnn.Dense(3)

    def __call__(self, x):
        return self.dec(jnp.tanh(self.enc(x)))


MODEL = Model()
PARAMS = MODEL.init(jax.random.key(0), X)['params']
BOTH = pytest.mark.parametrize('make', [nn.stop_gradient, nn.train_only])


def frozen(fn: Any) -> set[str]:
    """The layers without a gradient."""
    grads = jax.grad(lambda p: jnp.sum(fn(p)))(PARAMS)
    return {name for name in grads if oracle.is_zero(grads[name])}


def apply(model: Any = MODEL) -> Any:
    return lambda params: model.apply({'params': params}, X)


def in_block(block: Any) -> Any:
    def fn(params):
        with block:
            return apply()(params)

    return fn


def test_the_names_are_in_linen():
    assert nn.stop_gradient is stops.stop_gradient
    assert nn.train_only is stops.train_only


def test_polarity():
    # `where` names what stop_gradient stops, and what train_only trains (hazard 21).
    assert frozen(in_block(nn.stop_gradient('enc/**'))) == {'enc'}
    assert frozen(in_block(nn.train_only('enc/**'))) == {'dec'}
    assert frozen(in_block(nn.stop_gradient(True))) == {'enc', 'dec'}
    assert frozen(in_block(nn.train_only(True))) == set()
    assert frozen(in_block(nn.stop_gradient(False))) == set()
    assert frozen(in_block(nn.train_only(False))) == {'enc', 'dec'}


def test_train_only_of_several():
    assert frozen(in_block(nn.train_only(['enc/**', 'dec/**']))) == set()
    with nn.train_only('enc/**'), nn.train_only('dec/**'):
        assert frozen(apply()) == {'enc', 'dec'}  # Neither trains what the other stops.


@BOTH
def test_where_by_name(make):
    assert make(where='enc/**') == make('enc/**')
    lifted = make(Model, where='enc/**')
    assert frozen(apply(lifted())) == frozen(apply(make(Model, 'enc/**')()))


@BOTH
def test_spellings_that_say_the_same(make):
    expected = frozen(in_block(make('enc/**')))
    for lifted in (
        make(Model, 'enc/**'),
        make('enc/**')(Model),
        make('enc/**').lift(Model),
        make(Model, 'enc/**', methods=['__call__']),
        make(functools.partial(Model), 'enc/**'),
    ):
        assert frozen(apply(lifted())) == expected

    class Decorated(Model):
        @make('enc/**')
        def __call__(self, x):
            return super().__call__(x)

    assert frozen(apply(Decorated())) == expected
    assert frozen(apply(make('enc/**')(type('Model', (Model,), {}))())) == expected


@BOTH
def test_options_reach_the_rewrite(make):
    rewrite = make('a', collections=['cache', 'params'], unused='ignore')
    assert isinstance(rewrite, rewrites.BlockDecorator)
    assert rewrite.collections == ('cache', 'params')
    assert rewrite.unused == 'ignore'


@BOTH
def test_options_reach_what_is_lifted(make):
    variables = {'params': PARAMS}
    for lifted in (
        make(Model, 'nothing', unused='ignore'),
        make(Model, 'nothing', collections='cache', unused='ignore'),
    ):
        lifted().apply(variables, X)
    with pytest.raises(errors.UnusedFilterError):
        make(Model, 'enc/kernel', collections='cache')().apply(variables, X)


def _raises(make: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(errors.FlaxSGError) as caught:
        make(*args, **kwargs)
    return f'{type(caught.value).__name__}: {caught.value}'


@BOTH
def test_no_filter_at_all(make):
    name = make.__name__
    assert _raises(make).startswith(f'FilterTypeError: {name}() takes a filter')
    for wrong in ((None,), (Model, None)):
        assert _raises(make, *wrong).startswith('FilterTypeError: None is no filter')
    assert _raises(make, where=None).startswith('FilterTypeError: None is no filter')


@BOTH
def test_what_is_meant_by_a_module_or_an_array(make):
    text = _raises(make, Model)
    assert 'nn.stop_gradient(Model, where)' in text
    text = _raises(make, fnn.Dense)
    assert 'nn.stop_gradient(nn.Dense, where)' in text
    assert 'nn.Dense' in _raises(make, functools.partial(fnn.Dense, 3))
    assert 'with nn.stop_gradient(where):' in _raises(make, MODEL)
    assert 'with nn.stop_gradient(where):' in _raises(
        make, MODEL.bind({'params': PARAMS})
    )
    assert 'jax.lax.stop_gradient' in _raises(make, X)
    assert 'FilterTypeError' in _raises(make, PARAMS['enc'])
    assert 'FilterTypeError' in _raises(make, 3.5)
    # The filter and the target the wrong way round.
    assert 'nn.stop_gradient(Model, where)' in _raises(make, 'enc/**', Model)


def test_an_array_that_is_traced():
    seen: list[str] = []

    @jax.jit
    def fn(x):
        seen.append(_raises(nn.stop_gradient, x))
        return x

    fn(X)
    assert 'jax.lax.stop_gradient' in seen[0]


@BOTH
def test_several_filters_in_a_row(make):
    text = _raises(make, 'enc/**', 'dec/**')
    assert "['enc/**', 'dec/**']" in text
    with pytest.raises(TypeError, match='positional'):
        make(Model, 'enc/**', 'dec/**')


@BOTH
def test_methods_without_a_class(make):
    text = _raises(make, 'enc/**', methods=['encode'])
    assert text.startswith("UnknownNameError: methods=['encode'] was given")
    text = _raises(make, lambda mdl: None, 'enc/**', methods=['encode'])
    assert text.startswith("UnknownNameError: methods=['encode'] was given")


@BOTH
def test_an_option_that_does_not_exist(make):
    with pytest.raises(TypeError, match='colections'):
        make('enc/**', colections='params')


@BOTH
def test_nothing_is_computed_before_a_bad_argument_raises(make):
    calls: list[Any] = []

    class Counts(Model):
        def __call__(self, x):
            calls.append(x)
            return super().__call__(x)

    for bad in (None, 3, X, 'enc/', 'enc**', [None], {'enc': 1}, MODEL, Model):
        with pytest.raises(errors.FlaxSGError), make(bad):
            apply(Counts())(PARAMS)
        with pytest.raises(errors.FlaxSGError):
            make(Counts, bad)
    assert calls == []


@BOTH
def test_help(make):
    assert "where: 'Any' = LEFT_OUT, *" in str(inspect.signature(make))
    doc = inspect.getdoc(make)
    assert doc is not None
    for section in ('Args:', 'Returns:', '>>> '):
        assert section in doc


def test_where_of_every_kind():
    import re

    for where in (
        'enc/**',
        'enc/*',
        re.compile('enc/.*'),
        lambda path: path.startswith('enc/'),
        filters.as_filter('enc/**'),
        ['enc/kernel', 'enc/bias'],
        ('enc/**',),
        {'enc/**'},
        {'enc': True, 'dec': False},
        ~filters.as_filter('dec/**'),
        filters.as_filter('**') & 'enc/*',
    ):
        assert frozen(in_block(nn.stop_gradient(where))) == {'enc'}
    assert frozen(in_block(nn.stop_gradient(flax_sg.filters.as_filter(True)))) == {
        'enc',
        'dec',
    }

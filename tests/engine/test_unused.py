"""A filter that selected nothing raises, and one that selected something never does."""

import re
from typing import Any

import flax.core
import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.filters import as_filter
from tests.helpers import extents, oracle
from tests.helpers.described.modules import Do

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Encoder(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        return fnn.Dense(3, name='dense')(x)


class Model(fnn.Module):
    """Two encoders, statistics, and a parameter of its own."""

    def setup(self):
        self.gln_0, self.gln_1 = Encoder(), Encoder()
        self.norm = fnn.BatchNorm(use_running_average=True)
        self.scale = self.param('scale', fnn.initializers.ones, (1, 3))

    def __call__(self, x):
        return self.norm(self.gln_1(self.gln_0(x))) * self.scale


MODEL = Model()
VARIABLES = oracle.init(MODEL, jax.random.key(0), X)


def trace(fn: Any, *args: Any) -> None:
    """Runs a function without computing: under each filter JAX compiles all anew."""
    jax.eval_shape(lambda *args: fn(*args), *args)


def read(model: Any = MODEL, variables: Any = VARIABLES) -> None:
    trace(model.apply, variables, X)


# Every extent there is, each with the paths of MODEL.


def of_model(extent):
    def run(where, **options):
        rewrite = nn.stop_gradient(where, **options)
        trace(lambda variables, x: extent(rewrite, MODEL, variables, x), VARIABLES, X)

    return run


def around(run):
    """A block around something that is run without arguments."""

    def extent(where, **options):
        with nn.stop_gradient(where, **options):
            run()

    return extent


def _bound(rewrite, model, variables, x):
    module = model.bind(variables)
    with rewrite:
        module(x)


def _mirror(where, **options):
    class Mirrors(Model):
        def __call__(self, x):
            # What is not read exists all the same.
            return nn.mirror(self, where, **options).gln_1(x)

    read(Mirrors())


EXTENTS = {
    **{name: of_model(extent) for name, extent in extents.EXTENTS.items()},
    'around init': around(lambda: trace(MODEL.init, jax.random.key(0), X)),
    'around jit': around(lambda: jax.jit(lambda v: MODEL.apply(v, X)).lower(VARIABLES)),
    'around bound': of_model(_bound),
    'mirror': _mirror,
}


UNMATCHED: dict[str, Any] = {
    'an and of two that share nothing': as_filter('gln_0/**') & 'gln_1/**',
    'typo': 'gnl_*/**',
    'predicate': lambda path: path.startswith('params'),
    'second of a sequence': ['gln_0/**', 'gnl_1/**'],
    'of a nested sequence': ['gln_0/**', ['gln_1/**', ['nothing']]],
    'of an or': as_filter('gln_0/**') | 'nothing',
    'of a not': ~as_filter('nothing'),
    'not of what is left out': as_filter('gln_*/**') & ~as_filter('gln_2/**'),
}

MATCHED: dict[str, Any] = {
    'glob': 'gln_*/**',
    'sequence': ['gln_0/**', re.compile('scale'), lambda path: path.endswith('bias')],
    'everything': True,
    'nothing': False,
    'not': ~as_filter('gln_0/**'),
    'a tree': {'gln_0': True, 'gln_1': False, 'norm': False, 'scale': True},
    'a tree of False': {'gln_0': False, 'gln_1': False, 'norm': False, 'scale': False},
}


@pytest.mark.parametrize('case', UNMATCHED)
def test_a_pattern_that_matches_nothing_raises(case):
    with pytest.raises(errors.UnusedFilterError):
        EXTENTS['inside'](UNMATCHED[case])


@pytest.mark.parametrize('case', MATCHED)
def test_a_filter_that_may_be_as_it_is_raises_nothing(case):
    EXTENTS['inside'](MATCHED[case])


@pytest.mark.parametrize('extent', EXTENTS)
def test_every_extent_judges(extent):
    EXTENTS[extent]('gln_0/**')
    with pytest.raises(errors.UnusedFilterError) as caught:
        EXTENTS[extent](['gln_0/**', 'gnl_1/**'])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("Glob('gnl_1/**') matches none of")
    assert lines[1].startswith("Nearest: 'gln_1/")
    EXTENTS[extent](['gln_0/**', 'gnl_1/**'], unused='ignore')


def test_train_only_judges_what_it_was_given():
    with pytest.raises(errors.UnusedFilterError) as caught, nn.train_only('gnl_0/**'):
        read()
    assert "Glob('gnl_0/**') matches none of" in str(caught.value)
    with nn.train_only('gln_0/**'):
        read()


def test_paths_are_relative_to_the_module_that_opened_the_block():
    def mounted(where):
        def opens(module, x):
            model = Model(name='m')
            with nn.stop_gradient(where):
                return model(x)

        return Do(lambda _, x: Do(opens, name='enc')(fnn.Dense(3, name='other')(x)))

    variables = oracle.init(mounted(False), jax.random.key(0), X)
    read(mounted('m/gln_0/**'), variables)
    both = as_filter('m/gln_0/**') & 'm/gln_1/**'
    for where in ('enc/m/gln_0/**', 'gln_0/**', '/enc/m/gln_0/**', 'other/**', both):
        with pytest.raises(
            errors.UnusedFilterError, match=r"variables under 'enc'\.\n"
        ):
            read(mounted(where), variables)


def test_what_lies_outside_the_module_counts_when_it_is_read():
    def outer(where):
        def inner(module, x, tied):
            dense = fnn.Dense(3, name='dense')
            with nn.stop_gradient(where):
                return tied(dense(x))

        return Do(lambda _, x: Do(inner, name='enc')(x, fnn.Dense(3, name='tied')))

    variables = oracle.init(outer(False), jax.random.key(0), X)
    read(outer('/tied/**'), variables)
    read(outer(['/tied/kernel', 'dense/**']), variables)
    for where in ('tied/**', 'enc/dense/**'):
        with pytest.raises(errors.UnusedFilterError):
            read(outer(where), variables)


def test_the_exception_of_the_body_is_never_masked():
    raised = ValueError('of the body')
    caught = pytest.raises(ValueError, match='of the body')
    with caught as info, nn.stop_gradient('nothing'):
        read()
        raise raised
    assert info.value is raised
    assert info.value.__context__ is None


def test_collections():
    for extent in ('block', 'scopes'):
        run = EXTENTS[extent]
        run('norm/*', collections='batch_stats')
        run('norm/mean', collections=['params', 'batch_stats'])
        run('norm/var', collections=True)
        run('norm/mean', collections=flax.core.DenyList('params'))
        with pytest.raises(errors.UnusedFilterError, match="'batch_stats', 'params'"):
            run('norm/mean', collections='batch_stat')
        with pytest.raises(errors.UnusedFilterError):
            run('norm/*', collections=['params', 'batch_stat'])
        with pytest.raises(errors.UnusedFilterError):
            run('norm/mean')  # It is in another collection.
        with pytest.raises(errors.UnusedFilterError):
            run('gln_0/**', collections='batch_stats')
        run('norm/mean', collections='batch_stat', unused='ignore')
        run(True, collections=['params', 'batch_stats'])


def test_a_module_without_parameters_lacks_no_collection():
    with nn.stop_gradient(True):
        fnn.LayerNorm(use_bias=False, use_scale=False).apply({}, X)


def test_a_tree_that_does_not_fit():
    rest = {'gln_1': False, 'norm': False, 'scale': False}
    for extent in ('block', 'scopes'):
        run = EXTENTS[extent]
        run({'gln_0': True, **rest})
        run({'gln_0': {'dense': {'kernel': True, 'bias': False}}, **rest})
        with pytest.raises(errors.UnusedFilterError, match="'gnl_1'"):
            run({'gln_0': True, 'gnl_1': True, **rest})
        for where in (
            {'gln_0': True},
            {'params': {'gln_0': True, **rest}},
            {'gln_0': {'dense': {'kernel': True}}, **rest},
            {'gln_0': {'dense': {'kernel': {'deep': True}, 'bias': True}}, **rest},
        ):
            with pytest.raises(errors.ArgumentValueError):
                run(where)


@pytest.mark.parametrize('where', [[], (), set()])
def test_an_empty_list_trains_nothing_and_warns(where):
    with pytest.warns(errors.NothingStoppedWarning, match='trains nothing'):
        nn.train_only(where)
    for fine in False, ~as_filter(True), as_filter([]):
        nn.train_only(fine)
    nn.train_only(where, unused='ignore')

"""Filters and a rule that no list in the library names, in every extent.

What the library has to know of them they say themselves: ``own_needs`` of a filter,
``acts_on`` and ``asks_path`` of a rule. Rules alone: ``test_rewrites``.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import flax_sg as sg
from flax_sg.filters.expressions import Atom, Filter
from flax_sg.filters.indices import Index, Part
from flax_sg.forms.block_decorator import BlockDecorator
from flax_sg.rules import rules
from tests.helpers import oracle
from tests.helpers.extents import EXTENTS
from tests.helpers.turns import in_turn

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


class OfFourRows(Atom):
    """Arrays of four rows: it asks what an array is."""

    def matches(self, path):
        return path.array is not None and path.array.shape[-2:-1] == (4,)


class FirstRow(Filter):
    """The first row of every variable: it means a part of the array."""

    own_needs = frozenset({'part'})

    def answer(self, path, ask):
        return Part(Index(0))


@dataclasses.dataclass(frozen=True)
class Halved(rules.Rule):
    """Readers see half of the value."""

    name = 'halved'
    asks_path = False

    def __call__(self, path, leaf):
        return leaf * 0.5


class Layer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        kernel = self.param('kernel', linen.initializers.normal(), (1, 4))
        return linen.Dense(4, name='dense')(x) * kernel, None


class Model(linen.Module):
    @linen.compact
    def __call__(self, x):
        layers = linen.scan(linen.remat(Layer), length=4, **oracle.STACKED)
        x, _ = layers(name='layers')(x, None)
        return linen.Dense(4, name='last')(x)


PARAMS = oracle.init(Model(), jax.random.key(0), X)['params']


def first_row_stopped(leaf):
    return jnp.concatenate([jax.lax.stop_gradient(leaf[:1]), leaf[1:]])


def has_four_rows(leaf):
    return leaf.shape[-2:-1] == (4,)


def where_it_has(fn):
    return lambda params: jax.tree.map(
        lambda leaf: fn(leaf) if has_four_rows(leaf) else leaf, params
    )


FILTERS = {
    'array': (
        OfFourRows(),
        where_it_has(jax.lax.stop_gradient),
        where_it_has(lambda leaf: leaf * 0.5),
    ),
    'part': (
        FirstRow(),
        lambda params: jax.tree.map(first_row_stopped, params),
        lambda params: jax.tree.map(lambda leaf: leaf.at[0].multiply(0.5), params),
    ),
}


def gradients(run):
    """The gradients of a function of the parameters, eager and jitted."""
    grad = jax.grad(lambda p: jnp.sum(run(p) ** 2))
    return grad(PARAMS), jax.jit(grad)(PARAMS)


@functools.cache
def by_hand(name, ruled):
    _, stop, halve = FILTERS[name]
    rewritten = stop if ruled == 'stop' else halve
    return gradients(lambda p: Model().apply({'params': rewritten(p)}, X))


RULED = [(name, ruled) for name in FILTERS for ruled in ('stop', 'halved')]


@pytest.mark.parametrize(('extent', 'row'), in_turn(EXTENTS, RULED))
def test_in_every_extent(extent, row):
    name, ruled = row
    rule = rules.StopGradient() if ruled == 'stop' else Halved()
    rewrite = BlockDecorator(FILTERS[name][0], rule)
    found = gradients(lambda p: EXTENTS[extent](rewrite, Model(), {'params': p}, X))
    oracle.assert_same(found, by_hand(name, ruled))


def test_on_a_tree():
    stop = functools.partial(sg.stop_gradient, where=FirstRow())
    found = gradients(lambda p: Model().apply({'params': stop(p)}, X))
    oracle.assert_same(found, by_hand('part', 'stop'))


def test_a_tree_keeps_what_fp8_layers_overwrite():
    tree = {'params': {'w': 1.0}, '_overwrite_with_gradient': {'scale': 2.0}}
    stopped = jax.grad(lambda t: sum(jax.tree.leaves(sg.stop_gradient(t, True))))
    assert stopped(tree) == {
        'params': {'w': 0.0},
        '_overwrite_with_gradient': {'scale': 1.0},
    }

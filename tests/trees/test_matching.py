"""Trees that belong to others: what is taken, and what is named as wrong."""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.core import freeze
from flax.core.meta import Partitioned
from jax import export

import flax_sg as sg
from flax_sg import errors
from flax_sg.trees.leaves import leaves_of
from flax_sg.trees.matching import gradient_of_each
from tests.helpers import oracle

PARAMS: Any = {
    'm': {'w': jnp.ones(2), 'b': jnp.zeros(1)},
    'n': None,
    'h': [jnp.ones(3)],
}
W, B, H = jnp.full(2, 5.0), jnp.full(1, 6.0), jnp.full(3, 7.0)
ABSENT = sg.ABSENT
FULL: Any = {'m': {'w': W, 'b': B}, 'n': None, 'h': [H]}
# What belongs to the parameters, and what it has at 'h/0', 'm/b' and 'm/w'.
GRADIENTS: dict[str, tuple[Any, list[Any]]] = {
    'full': (FULL, [H, B, W]),
    'with ABSENT': ({**FULL, 'm': {'w': ABSENT, 'b': B}}, [H, B, ABSENT]),
    'with None': ({**FULL, 'm': {'w': W, 'b': None}}, [H, ABSENT, W]),
    'with MaskedNode': ({**FULL, 'h': [optax.MaskedNode()]}, [ABSENT, B, W]),
    'without a module': ({'h': [H]}, [H, ABSENT, ABSENT]),
    'with ABSENT for a module': ({'m': ABSENT, 'h': [H]}, [H, ABSENT, ABSENT]),
    'frozen': (freeze({'m': {'w': W}}), [ABSENT, ABSENT, W]),
    'a tuple for a list': ({'m': {'w': W, 'b': B}, 'h': (H,)}, [H, B, W]),
    'nothing': ({}, [ABSENT] * 3),
}


@pytest.mark.parametrize('name', GRADIENTS)
def test_full_and_pruned_trees(name):
    tree, expected = GRADIENTS[name]
    needed = [value is not ABSENT for value in expected]
    found = gradient_of_each(leaves_of(PARAMS), tree, needed)
    assert all(a is b for a, b in zip(found, expected, strict=True))


def test_only_what_is_needed_is_checked():
    tree = {**FULL, 'm': {'w': {}, 'b': B}}
    gradient_of_each(leaves_of(PARAMS), tree, needed=[True, True, False])
    with pytest.raises(errors.StructureError, match="has a dict at 'm/w'"):
        gradient_of_each(leaves_of(PARAMS), tree, needed=[False, False, True])


def test_boxes_on_one_side():
    boxed, bare = {'w': Partitioned(W, ('x',)), 'b': B}, {'w': W, 'b': B}
    tx = sg.freeze(optax.sgd(0.1), 'b')
    said = "'w' is in a box in one. Unbox"
    with pytest.raises(errors.StructureError, match=said):
        tx.update(bare, tx.init(boxed), boxed)


# Masks.


class Pair(NamedTuple):
    left: Any
    right: Any


class Node(flax.struct.PyTreeNode):
    w: Any
    v: Any

    def __call__(self, x: Any) -> Any:
        return x


MASKED: list[tuple[Any, str]] = [
    ([1.0, 2.0], '1'),
    ((1.0, 2.0, 3.0), '2'),
    ([{'w': 1.0}, {'w': 2.0}], '1/w'),
    (Pair(1.0, 2.0), 'right'),
    (Pair(1.0, [2.0, {'w': 3.0}]), 'right/1/w'),
    ({'layers': [{'w': 1.0}, {'w': 2.0}]}, 'layers/1/w'),
    (Node(1.0, 2.0), 'v'),
    ({'m': Node(1.0, (2.0, 3.0))}, 'm/v/1'),
    ({'w': 1.0, 'n': None, 'v': 2.0}, 'v'),
    ({'w': Partitioned(1.0, ()), 'v': sg.NonDifferentiable(2)}, 'w'),
]


def test_what_mask_returns_is_a_filter_for_all():
    # A sequence of bools is a tree, not "any of these".
    for tree, path in MASKED:
        mask, frozen = sg.mask(tree, trained=path), sg.mask(tree, frozen=path)
        assert sum(jax.tree.leaves(mask)) == 1
        oracle.assert_same(sg.partition(tree, mask), sg.partition(tree, path))
        assert sg.mask(tree, trained=mask) == mask
        assert sg.filters.as_filter(mask) == sg.filters.as_filter(mask)
        leaves = zip(leaves_of(tree).values, jax.tree.leaves(frozen), strict=True)
        expected = [leaf if stays else 0.0 for leaf, stays in leaves]
        for where in frozen, path:
            tx = sg.freeze(optax.sgd(1.0), where, unused='ignore')
            updates, _ = tx.update(tree, tx.init(tree), tree)
            new = jax.tree.leaves(optax.apply_updates(tree, updates))
            assert [*map(float, new)] == [*map(float, jax.tree.leaves(expected))]


# ABSENT.


def test_trees_that_hold_absent_are_exported():
    pytest.importorskip('flatbuffers', reason='jax.export serializes with it')
    step = jax.jit(lambda p: sg.grad(lambda p: jnp.sum(p['w'] * p['b']), wrt='w')(p))
    p = {'w': jnp.ones(2), 'b': jnp.full(2, 3.0)}
    twin = export.deserialize(export.export(step)(p).serialize())
    oracle.assert_same(twin.call(p), step(p))
    back = export.export(jax.jit(lambda grads: grads['w']))(step(p))
    oracle.assert_same(export.deserialize(back.serialize()).call(step(p)), p['b'])


# Arguments in another order, and in other places.


@pytest.mark.parametrize('values', [None, {}, [], (), {'m': {}}, {'m': sg.ABSENT}])
def test_values_that_are_none(values):
    with pytest.raises(errors.UnusedFilterError, match='holds no value'):
        sg.substitute(PARAMS, values)
    if values is not None:
        same = sg.substitute(PARAMS, values, unused='ignore')
        oracle.assert_same(same, PARAMS)


def test_a_function_of_a_marked_value_keeps_the_mark():
    tree = {'n': sg.NonDifferentiable(1001), 'w': 1.0}
    for fn, n in ((lambda path, x: x, 1001), (lambda path, x: x * 2, 2002)):
        new = sg.substitute(tree, fn)
        assert isinstance(new['n'], sg.NonDifferentiable)
        assert int(new['n']) == n

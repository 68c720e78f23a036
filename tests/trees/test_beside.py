"""Trees that belong to others: what is taken, and what is named as wrong."""

import types
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import omegaconf
import optax
import pytest
from flax.core import freeze
from flax.core.meta import Partitioned
from jax import export

import flax_sg as sg
import oracle
from flax_sg import errors
from flax_sg.filters import BoolTree, Glob, Or
from flax_sg.trees.beside import beside
from flax_sg.trees.leaves import leaves_of

pytestmark = pytest.mark.every_case

PARAMS: Any = {
    'm': {'w': jnp.ones(2), 'b': jnp.zeros(1)},
    'n': None,
    'h': [jnp.ones(3)],
}
W, B, H = jnp.full(2, 5.0), jnp.full(1, 6.0), jnp.full(3, 7.0)
NONE: Any = None
# What belongs to the parameters, and what it has at 'h/0', 'm/b' and 'm/w'.
BESIDE: dict[str, tuple[Any, list[Any]]] = {
    'full': ({'m': {'w': W, 'b': B}, 'n': None, 'h': [H]}, [H, B, W]),
    'with ABSENT': (
        {'m': {'w': sg.ABSENT, 'b': B}, 'n': None, 'h': [H]},
        [H, B, sg.ABSENT],
    ),
    'with None': ({'m': {'w': W, 'b': None}, 'n': None, 'h': [H]}, [H, sg.ABSENT, W]),
    'with MaskedNode': (
        {'m': {'w': W, 'b': B}, 'n': None, 'h': [optax.MaskedNode()]},
        [sg.ABSENT, B, W],
    ),
    'without a module': ({'h': [H]}, [H, sg.ABSENT, sg.ABSENT]),
    'with ABSENT for a module': ({'m': sg.ABSENT, 'h': [H]}, [H, sg.ABSENT, sg.ABSENT]),
    'frozen': (freeze({'m': {'w': W}}), [sg.ABSENT, sg.ABSENT, W]),
    'a tuple for a list': ({'m': {'w': W, 'b': B}, 'h': (H,)}, [H, B, W]),
    'nothing': ({}, [sg.ABSENT] * 3),
}


@pytest.mark.parametrize('name', BESIDE)
def test_full_and_pruned_trees(name):
    tree, expected = BESIDE[name]
    found = beside(leaves_of(PARAMS), tree, 'the gradient')
    assert all(a is b for a, b in zip(found.values, expected, strict=True))
    # It gets its own form back, and nothing where it had nothing.
    other = found.restore([f'{n}' for n in range(3)])
    whole = lambda node: node is None or isinstance(node, optax.MaskedNode)  # noqa: E731
    assert jax.tree.structure(other) == jax.tree.structure(tree)
    kept = [leaf for leaf in jax.tree.leaves(other, is_leaf=whole) if whole(leaf)]
    assert kept == [
        leaf for leaf in jax.tree.leaves(tree, is_leaf=whole) if whole(leaf)
    ]


WRONG = {
    'a leaf more': ({'m': {'v': W}}, "'m/v': in the gradient, not in the parameters"),
    'text': ({'m': {'w': 'W'}}, r"has 'W' \(str\) at 'm/w'"),
    'a tree for a leaf': (
        {'m': {'w': {}, 'b': B}, 'n': None, 'h': [H]},
        "has a dict at 'm/w'",
    ),
    'a box': (
        {'m': {'w': Partitioned(W, ('x',)), 'b': B}, 'n': None, 'h': [H]},
        r"has a Partitioned at 'm/w'",
    ),
}


@pytest.mark.parametrize('name', WRONG)
def test_what_does_not_belong_is_named(name):
    tree, said = WRONG[name]
    with pytest.raises(errors.StructureError, match=said):
        beside(leaves_of(PARAMS), tree, 'the gradient')


def test_only_what_is_needed_is_checked():
    tree = {'m': {'w': 'W', 'b': B}, 'n': None, 'h': [H]}
    beside(leaves_of(PARAMS), tree, 'the gradient', needed=[True, True, False])
    with pytest.raises(errors.StructureError, match="has 'W'"):
        beside(leaves_of(PARAMS), tree, 'the gradient', needed=[False, False, True])


def test_boxes_on_one_side():
    boxed = {'w': Partitioned(W, ('x',)), 'b': B}
    said = "'w': a Partitioned in the parameters, an array"
    with pytest.raises(errors.StructureError, match=said):
        sg.apply_updates(boxed, {'w': W, 'b': B})
    tx = sg.freeze(optax.sgd(0.1), 'b')
    with pytest.raises(errors.StructureError, match=said):
        tx.update({'w': W, 'b': B}, tx.init(boxed), boxed)


def test_updates_have_the_shape_of_the_parameter():
    for update in jnp.ones((4, 2)), jnp.ones(3), jnp.ones((1, 2)):
        with pytest.raises(errors.StructureError, match="update at 'm/w' has another"):
            sg.apply_updates(PARAMS, {'m': {'w': update}})
    new = sg.apply_updates(PARAMS, {'m': {'w': jnp.ones(1)}})
    assert new['m']['w'].tolist() == [2.0, 2.0]


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
    (Pair(1.0, [2.0, {'w': 3.0}]), 'right/1/w'),
    ({'layers': [{'w': 1.0}, {'w': 2.0}]}, 'layers/1/w'),
    (Node(1.0, 2.0), 'v'),
    ({'m': Node(1.0, (2.0, 3.0))}, 'm/v/1'),
    ({'w': 1.0, 'n': None, 'v': 2.0}, 'v'),
    ({'w': Partitioned(1.0, ()), 'v': sg.NonDifferentiable(2)}, 'w'),
]


def test_what_mask_returns_is_a_filter_for_all():
    for tree, path in MASKED:
        mask = sg.mask(tree, trained=path)
        assert sum(jax.tree.leaves(mask)) == 1
        oracle.assert_same(sg.partition(tree, mask), sg.partition(tree, path))
        assert sg.mask(tree, trained=mask) == mask
        assert sg.filters.as_filter(mask) == sg.filters.as_filter(mask)


def test_masks_that_do_not_fit():
    for mask in ([True], [True, False, True], {'0': True}):
        with pytest.raises((errors.FilterValueError, errors.UnusedFilterError)):
            sg.partition([1.0, 2.0], mask)
    with pytest.raises(errors.FilterValueError, match="no answer for the variable 'n'"):
        sg.partition({'w': 1.0, 'n': 2.0}, {'w': True, 'n': None})
    for mixed in (['0', True], ('0', False), {True, '0'}, [np.True_, '1']):
        with pytest.raises(errors.FilterTypeError, match='bools beside other filters'):
            sg.partition([1.0, 2.0], mixed)


def test_masks_in_any_mapping():
    proxy = types.MappingProxyType
    config = {'m': {'w': True, 'b': False}, 'l': [True, False]}
    assert BoolTree(omegaconf.OmegaConf.create(config)) == BoolTree(config)
    assert sg.filters.as_filter(omegaconf.OmegaConf.create(['a', 'b/*'])) == Or(
        (Glob('a'), Glob('b/*'))
    )
    nested = proxy({'m': proxy({'w': True, 'b': False}), 'l': (True, False)})
    tree = {'m': {'w': 1.0, 'b': 2.0}, 'l': [3.0, 4.0]}
    plain = {'m': {'w': True, 'b': False}, 'l': [True, False]}
    for mask in nested, {'m': proxy({'w': True, 'b': False}), 'l': [True, False]}:
        assert sg.filters.as_filter(mask) == sg.filters.as_filter(plain)
        assert jax.tree.leaves(sg.partition(tree, mask)[0]) == [3.0, 1.0]


# ABSENT.


def test_trees_that_hold_absent_are_exported():
    pytest.importorskip('flatbuffers', reason='jax.export serializes with it')
    step = jax.jit(lambda p: sg.grad(lambda p: jnp.sum(p['w'] * p['b']), wrt='w')(p))
    p = {'w': jnp.ones(2), 'b': jnp.full(2, 3.0)}
    twin = export.deserialize(export.export(step)(p).serialize())
    oracle.assert_same(twin.call(p), step(p))
    back = export.export(jax.jit(lambda grads: grads['w']))(step(p))
    oracle.assert_same(export.deserialize(back.serialize()).call(step(p)), p['b'])


def test_what_jax_says_of_trees_that_differ_says_what_to_write():
    p = {'w': jnp.ones(2), 'b': jnp.ones(2)}
    one = sg.partition(p, 'w')[0]
    for differs in (
        lambda: jax.tree.map(jnp.add, one, p),
        lambda: jax.lax.cond(True, lambda: one, lambda: p),
        lambda: jax.lax.scan(lambda c, _: (p, None), one, length=2),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            differs()
        assert "absent='zeros'" in str(caught.value)
        assert 'sg.combine' in str(caught.value)


# Arguments in another order, and in other places.


def test_arguments_in_the_wrong_order():
    name: Any = 'm/w'
    adam: Any = optax.adam(0.1)
    for call, fix in (
        (lambda: sg.partition(name, PARAMS), 'sg.partition(tree, where)'),
        (lambda: sg.partition_n(name, PARAMS), 'sg.partition_n(tree, classify)'),
        (lambda: sg.stop_gradient(name, PARAMS), 'sg.stop_gradient(tree, where)'),
        (lambda: sg.mask(name, trained=PARAMS), 'sg.mask(tree, trained=where)'),
        (lambda: sg.labels(name, PARAMS), 'sg.labels(tree, {label: where})'),
        (lambda: sg.substitute(name, PARAMS), 'sg.substitute(tree, values'),
        (lambda: sg.freeze(name, adam), "sg.freeze(optax.adam(1e-3), 'backbone/**')"),
        (lambda: sg.adopt(PARAMS, adam, ()), 'sg.adopt(tx, params, state)'),
        (lambda: sg.grad(PARAMS), "sg.grad(loss, wrt='head/**')(params)"),
        (lambda: sg.vjp(PARAMS, loss), "sg.grad(loss, wrt='head/**')(params)"),
        (lambda: sg.mask(PARAMS, name), "sg.mask(params, trained='head/**')"),
        (lambda: sg.rewrite(PARAMS, name), "nn.scale_gradient('encoder/**', 0.5)"),
        (lambda: sg.paths(PARAMS, name), "sg.paths(tree, where='encoder/**')"),
    ):
        with pytest.raises((errors.ArgumentTypeError, errors.ArgumentValueError)) as e:
            call()
        assert fix in str(e.value)


def loss(p: Any) -> Any:
    return jnp.sum(p['m']['w'])


@pytest.mark.parametrize('values', [None, {}, [], (), {'m': {}}, {'m': sg.ABSENT}])
def test_values_that_are_none(values):
    with pytest.raises(errors.UnusedFilterError, match='without a value'):
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


def test_errors_of_substitute_are_not_those_of_blocks():
    for values in ({'m': {'w': jnp.ones(3)}}, lambda path, x: jnp.ones(7)):
        with pytest.raises(errors.StructureError, match=r'^The value for '):
            sg.substitute(PARAMS, values)

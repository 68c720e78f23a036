"""Trees in parts: each leaf in one, and all of them put together again."""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze
from flax.core.meta import Partitioned

import flax_sg as sg
from flax_sg import errors
from flax_sg.filters import paths
from flax_sg.trees import leaves
from tests.helpers import oracle


class Pair(NamedTuple):
    left: Any
    right: Any


class Node(flax.struct.PyTreeNode):
    w: Any
    name: str = flax.struct.field(pytree_node=False, default='n')


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    a: Any
    b: Any


@jax.tree_util.register_pytree_node_class
class Keyless:
    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> Any:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Any:
        return cls(*children)


@dataclasses.dataclass
class Unregistered:
    text: str


THING = Unregistered('thing')
KEY = jax.random.key(0)
TREES: dict[str, tuple[Any, list[str]]] = {
    'dict': ({'b': 1.0, 'a': {'c': 2}}, ['a/c', 'b']),
    'frozen dict': (freeze({'b': 1.0, 'a': {'c': 2}}), ['a/c', 'b']),
    'list and tuple': ([1.0, (2.0, 3.0)], ['0', '1/0', '1/1']),
    'named tuple': (Pair(1.0, Pair(2.0, None)), ['left', 'right/left']),
    'flax.struct': ({'m': Node(1.0)}, ['m/w']),
    'dataclass': (Data(1.0, [2.0]), ['a', 'b/0']),
    'without keys': (Keyless(1.0, {'x': 2.0}), ['0', '1/x']),
    'keys that are no str': ({1: 1.0, 10: 2.0}, ['1', '10']),
    'a box': (
        {'dense': {'kernel': Partitioned(1.0, (None,)), 'bias': 2.0}},
        ['dense/bias', 'dense/kernel'],
    ),
    'a box of a dict': (Partitioned({'x': 1.0, 'y': 2.0}, ()), ['', '']),
    'other leaves': ({'s': 'text', 'o': THING, 'k': KEY, 'n': None}, ['k', 'o', 's']),
    'a mark': ({'n': sg.NonDifferentiable(3), 'w': 1.0}, ['n', 'w']),
    'one leaf': (1.0, ['']),
    'nothing': ({}, []),
    'collections': ({'params': {'w': 1.0}, 'batch_stats': {'m': 2.0}}, ['m', 'w']),
}


def ids(tree: Any) -> list[int]:
    return [id(leaf) for leaf in jax.tree.leaves(tree, is_leaf=leaves.is_whole)]


@pytest.mark.parametrize('name', TREES)
def test_partition_and_combine_are_inverse(name):
    tree, paths = TREES[name]
    found = leaves.leaves_of(tree)
    assert found.paths == paths
    assert ids(found.restore(found.values)) == ids(tree)
    asked: list[str] = []

    def where(path):
        if path not in paths:  # That of the variable, for a leaf within it.
            return False
        asked.append(path)
        return len(asked) % 2 == 0

    a, b = sg.partition(tree, where, unused='ignore')
    assert asked == paths
    # Each leaf is in one part, the very same object.
    absent = [id(sg.ABSENT)] * len(paths)
    assert sorted(ids(a) + ids(b)) == sorted(ids(tree) + absent)
    for whole in (sg.combine(a, b), sg.combine(b, a)):
        assert jax.tree.structure(whole) == jax.tree.structure(tree)
        assert ids(whole) == ids(tree) and type(whole) is type(tree)
    everything, nothing = sg.partition(tree, True)
    assert ids(everything) == ids(tree) == ids(sg.partition(tree, False)[1])
    assert jax.tree.leaves(nothing) == []


@pytest.mark.parametrize('name', TREES)
def test_paths_are_those_of_the_names(name):
    tree, _ = TREES[name]
    for whole in tree, {'a': tree, 'b': [tree]}, freeze({'a': {'b': tree}}), (tree, 1):
        known = [
            '/'.join((*names, *inner))
            for names, inner, node in paths.names_in(whole, leaves.is_whole)
            for _ in jax.tree.leaves(node, is_leaf=leaves.is_whole)
        ]
        found = leaves.leaves_of(whole)
        if not leaves.collections_of(whole):
            assert found.paths == known
        assert len(found.paths) == len(found.key_paths) == len(found.values)


def test_keys_that_are_none_of_jax():
    assert leaves.path_of(['left', jax.tree_util.GetAttrKey('w'), 3]) == 'left/w/3'


def test_paths_in_a_dict_of_collections():
    variables = {'params': {'w': 1.0}, 'batch_stats': {'w': 2.0}}
    stats, rest = sg.partition(variables, lambda path: path.collection == 'batch_stats')
    assert jax.tree.leaves(stats) == [2.0]
    assert jax.tree.leaves(rest) == [1.0]
    assert jax.tree.leaves(sg.partition(variables, 'w')[0]) == [2.0, 1.0]
    # Other values may stand beside the collections.
    for more in {'step': 3}, {'step': 3, 'rate': 0.1}, {'moments': ({'v': 1.0},)}:
        assert jax.tree.leaves(sg.partition(variables | more, 'w')[0]) == [2.0, 1.0]
        tree = {'params': {'w': 1.0}, **more}
        assert jax.tree.leaves(sg.partition(tree, 'w')[0]) == [1.0]
    # Without parameters, params is a name as any other.
    tree = {'params': 1.0, 'step': {'w': 3}}
    assert jax.tree.leaves(sg.partition(tree, 'params')[0]) == [1.0]


def test_an_attribute_params_of_an_nnx_dict_is_no_collection():
    """A wrong path would freeze nothing of it, or what has the same name elsewhere."""
    inner = nnx.Dict(w=nnx.Param(jnp.ones(2)))
    model = nnx.Dict(params=inner, head=nnx.Param(jnp.ones(2)))
    assert [str(path) for path in leaves.leaves_of(model).paths] == ['head', 'params/w']
    grads = sg.grad(lambda m: jnp.sum(m.params.w[...] * m.head[...]), wrt='params/w')
    assert [leaf.shape for leaf in jax.tree.leaves(grads(model))] == [(2,)]


def test_partition_n():
    # The three groups of google/flax#1857.
    params = {'gln_0': {'w': 1}, 'gln_1': {'w': 2}, 'code': {'w': 3}, 'expl': {'w': 4}}

    def classify(path):
        for number, group in enumerate(['gln', 'code', 'expl']):
            if path.startswith(group):
                return number
        return None

    parts = sg.partition_n(params, classify)
    found = {number: jax.tree.leaves(part) for number, part in parts.items()}
    assert found == {0: [1, 2], 1: [3], 2: [4]}
    assert sg.combine(*parts.values()) == params
    named = sg.partition_n(params, {'e': 'expl/*', 'g': 'gln_*/*', 'c': 'code/w'})
    assert list(named) == ['e', 'g', 'c']
    assert [named[k] for k in 'gce'] == [parts[k] for k in range(3)]
    with pytest.raises(errors.StructureError):
        sg.partition_n(params, {'g': 'gln_*/*'})
    # Parts may lack leaves.
    assert sg.combine(parts[0], parts[1])['expl'] == {'w': sg.ABSENT}


def test_the_sentinel():
    assert repr(sg.ABSENT) == 'ABSENT'
    assert jax.tree.leaves([sg.ABSENT]) == []
    assert jax.tree.map(lambda x: x, [sg.ABSENT])[0] is sg.ABSENT
    assert all(twin is sg.ABSENT for twin in oracle.copies(sg.ABSENT))
    for use in (
        *(lambda x: jnp.ones(2) * x, lambda x: x[0], lambda x: x.kernel),
        *(lambda x: x < 1, lambda x: x(), np.asarray, list, float, bool, len),
    ):
        with pytest.raises(errors.AbsentLeafError):
            use(sg.ABSENT)


# Other leaves.


def test_other_leaves_in_a_tree():
    box = Partitioned(jnp.ones(2), ('a',))
    tree = {'params': {'a': [jnp.ones(2), box], 'b': jnp.zeros(3)}, 'n': {'c': 3}}
    others = jax.tree.map(lambda leaf: leaf + 1, tree)
    oracle.assert_same(sg.substitute(tree, others), others)
    part = {'params': {'a': [jnp.full(2, 7.0), sg.ABSENT]}}
    expected = {**tree, 'params': {**tree['params'], 'a': [jnp.full(2, 7.0), box]}}
    oracle.assert_same(sg.substitute(tree, part), expected)
    oracle.assert_same(sg.substitute(tree, {'z': 1}, unused='ignore'), tree)
    expected = {**others, 'params': {**others['params'], 'b': tree['params']['b']}}
    where = ['a/*', 'c']
    for values in others, lambda path, leaf: leaf + 1:
        oracle.assert_same(sg.substitute(tree, values, where=where), expected)
        new = sg.substitute(tree, values, where=[*where, 'z'], unused='ignore')
        oracle.assert_same(new, expected)


@pytest.mark.parametrize(
    'values', [{'w': np.full(3, 7.0)}, lambda path, leaf: np.full(3, 7.0)]
)
def test_other_leaves_in_part(values):
    tree = {'w': np.arange(3.0), 'v': 1.0}
    new = sg.substitute(tree, values, where=sg.at('w', np.s_[1:]))
    assert (new['w'].tolist(), new['v']) == ([0.0, 7.0, 7.0], 1.0)
    with pytest.raises(errors.PartError, match="does not fit 'w', an array of"):
        sg.substitute(tree, values, where=sg.at('w', 3))


def test_parts_without_a_star():
    tree = {'a': 1.0, 'b': {'c': 2.0}}
    for parts in sg.partition(tree, 'a'), list(sg.partition(tree, 'b/c')):
        with pytest.raises(errors.ArgumentTypeError, match=r'sg.combine\(\*parts\)'):
            sg.combine(parts)
    # One tree is one part, whatever it is made of.
    for one in ({'a': 1.0, 'b': sg.ABSENT}, (1.0, {'w': 2.0}), (tree, tree), (), 1.0):
        assert sg.combine(one) == one


PARTS: dict[str, Any] = {
    'rows': np.s_[:2],
    'rows by number': np.array([0, 3]),
    'columns': np.s_[:, 1],
    'elements': np.arange(12).reshape(4, 3) % 5 == 0,
}


@pytest.mark.parametrize('name', PARTS)
@pytest.mark.parametrize('dtype', ['float64', 'int64', 'uint64', 'complex128', 'int8'])
def test_a_part_and_the_rest_are_the_array_to_the_bit(dtype, name):
    # Of what NumPy has in 64 bits JAX has 32.
    array = (np.arange(12.0).reshape(4, 3) * 2**20 + 1 / 3).astype(dtype)
    where = sg.at('w', PARTS[name])
    part, rest = sg.partition({'w': array}, where)
    joined = sg.combine(part, rest)['w']
    oracle.assert_same(joined, array)
    assert isinstance(joined, np.ndarray)
    assert not np.shares_memory(joined, array)
    oracle.assert_same(sg.combine(rest, part)['w'], array)
    if dtype == 'float64':  # The rest stays what it was beside a part from a device.
        mixed = sg.combine(jax.tree.map(jnp.float32, part), rest)['w']
        expected = array.copy()
        expected[PARTS[name]] = array.astype(np.float32)[PARTS[name]]
        np.testing.assert_array_equal(mixed, expected)
        jitted = jax.jit(sg.combine)(part, rest)['w']
        oracle.assert_same(jitted, jnp.asarray(array))


@pytest.mark.usefixtures('standard_promotion')
@pytest.mark.parametrize('name', PARTS)
def test_a_part_of_another_dtype_leaves_the_rest_as_it_is(name):
    array, where = jnp.arange(12.0).reshape(4, 3) / 3, sg.at('w', PARTS[name])
    part, rest = sg.partition({'w': array}, where)
    joined = sg.combine(jax.tree.map(jnp.bfloat16, part), rest)['w']
    index, rounded = PARTS[name], array.astype(jnp.bfloat16).astype(jnp.float32)
    oracle.assert_same(joined, array.at[index].set(rounded[index]))
    wide = sg.combine(part, jax.tree.map(jnp.bfloat16, rest))['w']
    oracle.assert_same(wide, rounded.at[index].set(array[index]))


@pytest.mark.parametrize('name', PARTS)
def test_shapes_are_split_as_arrays_are(name):
    where = sg.at('w', PARTS[name])
    tree = {'w': jnp.ones((4, 3), jnp.bfloat16), 'b': jnp.ones(2)}
    shapes = jax.eval_shape(lambda: tree)
    parts = sg.partition(shapes, where)
    expected = jax.eval_shape(lambda tree: sg.partition(tree, where), tree)
    assert jax.tree.structure(parts) == jax.tree.structure(expected)
    assert jax.tree.leaves(parts) == jax.tree.leaves(expected)
    assert sg.combine(*parts) == shapes

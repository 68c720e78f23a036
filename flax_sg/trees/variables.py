"""Walks through the nested dicts in which Flax keeps variables; plain dict code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from flax.core.frozen_dict import FrozenDict

from flax_sg.filters.paths import SUBTREES, names_within, shape_and_dtype
from flax_sg.internals.types import Leaf, PyTree
from flax_sg.trees.leaves import is_whole

T = TypeVar('T')

# What ``find`` returns if there is no such variable.
MISSING: Any = object()

# A variable's collection, and its names from the root of the tree.
Key: TypeAlias = tuple[str, tuple[str, ...]]


class LeafKey(tuple[str, tuple[str, ...]]):
    """The key of a leaf of a variable, equal to the plain key; it knows the leaf.

    Attributes:
        inner: how many of its last names lie within the variable's value.
        array: the shape and dtype of the leaf; None if it is no array.
        facts: all that a filter may ask about.
    """

    inner: int
    array: tuple[Any, Any] | None
    facts: Facts

    @classmethod
    def of(cls, key: Key, inner: tuple[str, ...], leaf: Leaf) -> LeafKey:
        """Returns the key of a leaf, given that of its variable."""
        self = cls((key[0], (*key[1], *inner)) if inner else key)
        self.inner, self.array = len(inner), shape_and_dtype(leaf)
        self.facts = self[0], self[1], self.inner, self.array
        return self


# A collection and names, how many of these lie within a value, shape and dtype.
Facts: TypeAlias = tuple[str, tuple[str, ...], int, tuple[Any, Any] | None]


def facts_of(key: Key) -> Facts:
    """Returns what is known of a leaf, or of a variable as a whole."""
    return key.facts if isinstance(key, LeafKey) else (key[0], key[1], 0, None)


def map_variables(fn: Callable[[Key, Any], Any], key: Key, value: PyTree) -> PyTree:
    """Maps over the variables in nested mappings; keeps the types of the mappings.

    Args:
        fn: called with the key and the value of each variable.
        key: the key of ``value``.
        value: a variable, or a tree of them. Leaves inside anything but a mapping (a
            tuple, a box) belong to one variable.
    """
    if not isinstance(value, SUBTREES):
        return fn(key, value)
    collection, path = key
    mapped = {
        name: map_variables(fn, (collection, (*path, str(name))), child)
        for name, child in value.items()
    }
    if isinstance(value, FrozenDict):
        return FrozenDict(mapped)
    out = copy.copy(value)
    out.update(mapped)
    return out


def iter_variables(key: Key, value: PyTree) -> Iterator[tuple[Key, Any]]:
    """Yields the variables in a tree of nested mappings with their keys."""
    if isinstance(value, SUBTREES):
        collection, path = key
        for name, child in value.items():
            yield from iter_variables((collection, (*path, str(name))), child)
    else:
        yield key, value


def find(
    collections: Mapping[str, Any], collection: str, names: Sequence[str]
) -> PyTree:
    """Returns the variable or subtree at these names, or ``MISSING``."""
    node = collections.get(collection, MISSING)
    for name in names:
        if not isinstance(node, SUBTREES):
            return MISSING
        if name not in node:  # ``nnx.bridge.to_linen`` has numbers for lists.
            node = {str(key): child for key, child in node.items()}
        node = node.get(name, MISSING)
    return node


def leaf_keys(key: Key, value: PyTree) -> list[LeafKey]:
    """Returns the key of each leaf of a variable.

    A leaf's key is the variable's key and the leaf's names inside the value. A filter
    is asked for each leaf. Leaves in one box have one key.
    """
    if isinstance(value, jax.Array):  # Nearly always.
        return [LeafKey.of(key, (), value)]
    return [
        LeafKey.of(key, inner, leaf)
        for inner, node in names_within(value, is_whole)
        for leaf in jax.tree.leaves(node)
    ]


def iter_leaf_keys(key: Key, value: PyTree) -> Iterator[LeafKey]:
    """Yields the key of each leaf in a tree of variables."""
    for variable, of_variable in iter_variables(key, value):
        yield from leaf_keys(variable, of_variable)


def map_leaves(fn: Callable[[T, Any], Any], keys: Sequence[T], value: PyTree) -> PyTree:
    """Maps over the leaves of one variable; keeps the order of dicts.

    Args:
        fn: called with each leaf's key and the leaf.
        keys: those of the leaves, as ``leaf_keys`` gives them, or one thing for each.
        value: the value of the variable.
    """
    if isinstance(value, jax.Array):  # Nearly always.
        return fn(keys[0], value)
    # JAX sorts the keys of dicts.
    leaves, treedef = jax.tree_util.tree_flatten(value)
    return _in_order_of(value, treedef.unflatten(map(fn, keys, leaves)))


def _in_order_of(value: PyTree, mapped: PyTree) -> PyTree:
    if type(value) is dict:
        return {name: _in_order_of(item, mapped[name]) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_in_order_of, value, mapped))
    return mapped

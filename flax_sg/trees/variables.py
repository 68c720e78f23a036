"""Walks through the nested dicts in which Flax keeps variables; plain dict code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from flax.core.frozen_dict import FrozenDict

from flax_sg.filters.paths import SUBTREES, Inner, names_within
from flax_sg.trees.leaves import is_whole

# What ``find`` returns if there is no such variable.
AS_IT_IS: Any = object()

# A variable's collection, and its names from the root of the tree.
Key: TypeAlias = tuple[str, tuple[str, ...]]


def inner_names(key: Key) -> int:
    """Counts the last names of a key that lie inside a variable's value.

    Keys compare by text, and 'w/u' may be a leaf of 'w', or the parameter 'u'.
    """
    count = 0
    while count < len(key[1]) and type(key[1][-count - 1]) is Inner:
        count += 1
    return count


def map_variables(fn: Callable[[Key, Any], Any], key: Key, value: Any) -> Any:
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


def iter_variables(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    """Yields the variables in a tree of nested mappings with their keys."""
    if isinstance(value, SUBTREES):
        collection, path = key
        for name, child in value.items():
            yield from iter_variables((collection, (*path, str(name))), child)
    else:
        yield key, value


def find(collections: Mapping[str, Any], collection: str, names: Sequence[str]) -> Any:
    """Returns the variable or subtree at these names, or ``AS_IT_IS``."""
    node = collections.get(collection, AS_IT_IS)
    for name in names:
        if not isinstance(node, SUBTREES) or name not in node:
            return AS_IT_IS
        node = node[name]
    return node


def leaf_keys(key: Key, value: Any) -> list[Key]:
    """Returns the key of each leaf of a variable.

    A leaf's key is the variable's key and the leaf's names inside the value. A filter
    is asked for each leaf. Leaves in one box have one key.
    """
    if isinstance(value, jax.Array):  # Nearly always.
        return [key]
    collection, path = key
    return [
        (collection, (*path, *inner))
        for inner, node in names_within(value, is_whole)
        for _ in jax.tree.leaves(node)
    ]


def iter_leaf_keys(key: Key, value: Any) -> Iterator[Key]:
    """Yields the key of each leaf in a tree of variables."""
    for variable, of_variable in iter_variables(key, value):
        yield from leaf_keys(variable, of_variable)


def map_leaves(fn: Callable[[Key, Any], Any], key: Key, value: Any) -> Any:
    """Maps over the leaves of one variable; keeps the order of dicts.

    Args:
        fn: called with each leaf's key, see ``leaf_keys``, and the leaf.
        key: the key of the variable.
        value: its value.
    """
    if isinstance(value, jax.Array):  # Nearly always.
        return fn(key, value)
    if type(value) is dict:
        return {
            name: map_leaves(fn, _within(key, name), item)
            for name, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(
            map_leaves(fn, _within(key, index), item)
            for index, item in enumerate(value)
        )
    leaves, treedef = jax.tree_util.tree_flatten(value)
    return treedef.unflatten(map(fn, leaf_keys(key, value), leaves))


def _within(key: Key, name: Any) -> Key:
    return key[0], (*key[1], Inner(name))

"""Variables in nested dicts, as Flax keeps them: plain dict code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from flax.core.frozen_dict import FrozenDict

from flax_sg.rules.rules import AS_IT_IS

# A variable's collection, and its names from the root of the tree.
Key: TypeAlias = tuple[str, tuple[str, ...]]

# What Flax nests variables in. Not any Mapping: those that JAX takes for leaves are.
_SUBTREES = (dict, FrozenDict)


def map_variables(fn: Callable[[Key, Any], Any], key: Key, value: Any) -> Any:
    """Maps over the variables in a tree of nested mappings, keeping their types.

    Args:
        fn: called with the key and the value of each variable.
        key: where ``value`` stands.
        value: a variable, or a tree of them. Leaves inside anything but a mapping (a
            tuple, a box) belong to one variable.
    """
    if not isinstance(value, _SUBTREES):
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
    if isinstance(value, _SUBTREES):
        collection, path = key
        for name, child in value.items():
            yield from iter_variables((collection, (*path, str(name))), child)
    else:
        yield key, value


def find(collections: Mapping[str, Any], collection: str, names: Sequence[str]) -> Any:
    """The variable of these names, or the subtree; ``AS_IT_IS`` if there is none."""
    node = collections.get(collection, AS_IT_IS)
    for name in names:
        if not isinstance(node, _SUBTREES) or name not in node:
            return AS_IT_IS
        node = node[name]
    return node


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """``jax.tree.map`` that leaves the order of dicts as it is."""
    if isinstance(value, jax.Array):  # Nearly always.
        return fn(value)
    if type(value) is dict:
        return {name: map_leaves(fn, item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(fn, item) for item in value)
    return jax.tree_util.tree_map(fn, value)


def leaves_of(value: Any) -> list[Any]:
    """The leaves of one variable."""
    if isinstance(value, jax.Array):
        return [value]
    return jax.tree_util.tree_leaves(value)

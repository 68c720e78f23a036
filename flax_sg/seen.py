"""What readers have seen of one variable, and the way back for what they write."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass
class Seen:
    """The leaves of one variable that one block has rewritten, and what for.

    By identity, and one of these for each variable: two variables may well hold the
    same array, and one array may stand for several rewritten ones.
    """

    views: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    stored: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    last: tuple[list[Any], list[Any]] = dataclasses.field(
        default_factory=lambda: ([], [])
    )

    def note(self, value: Any, viewed: Any) -> None:
        """Notes a whole variable that a reader sees instead of another one."""
        leaves = jax.tree_util.tree_leaves
        for leaf, seen in zip(leaves(value), leaves(viewed), strict=True):
            self.stored[id(seen)] = (seen, leaf)

    def stored_value(self, value: Any) -> Any:
        """What to store when a reader writes ``value``."""
        # A rule may show one object for several leaves: first compare by position.
        stored, seen = self.last
        leaves, treedef = jax.tree_util.tree_flatten(value)
        if len(leaves) == len(seen) and all(map(operator.is_, leaves, seen)):
            return treedef.unflatten(stored)
        return map_leaves(self.stored_leaf, value)

    def stored_leaf(self, leaf: Any) -> Any:
        """The stored leaf that a reader saw as ``leaf``; ``leaf`` if none."""
        return self.stored.get(id(leaf), (None, leaf))[1]


def map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """``jax.tree.map`` that leaves the order of dicts as it is."""
    if type(value) is dict:
        return {name: map_leaves(fn, item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map_leaves(fn, item) for item in value)
    return jax.tree_util.tree_map(fn, value)

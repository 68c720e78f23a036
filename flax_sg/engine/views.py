"""Gives readers rewritten values, and turns what they write into stored values.

Flax's own dicts of variables are never changed. A reader gets the value with the rules
of the open blocks applied. A writer's value goes where Flax would have stored it. So
closing a block has nothing to undo.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax

from flax_sg.engine import placing
from flax_sg.engine.blocks import Block, Root, thread
from flax_sg.engine.selection import selects, wants
from flax_sg.rules.rules import AS_IT_IS
from flax_sg.trees.variables import (
    Key,
    leaf_keys,
    leaves_of,
    map_leaves,
    map_variables,
)


class Seen:
    """Maps the leaves of one variable that one block rewrote to the stored leaves.

    Leaves are compared by identity. Each variable has its own ``Seen``: two variables
    may hold the same array, and one array may replace several stored ones.
    """

    def __init__(self) -> None:
        self.views: dict[tuple[Key, int], tuple[Any, Any]] = {}
        self._stored: dict[int, tuple[Any, Any]] = {}
        # The stored variable at the last read, and what the reader saw instead.
        self._last: tuple[Any, Any] = (None, None)

    def note(self, leaf: Any, viewed: Any) -> None:
        """Notes that a reader sees ``viewed`` instead of ``leaf``."""
        self._stored[id(viewed)] = (viewed, leaf)

    def note_variable(self, value: Any, viewed: Any) -> None:
        """Notes that a reader sees ``viewed`` instead of the whole variable."""
        self._last = value, viewed

    def stored_value(self, value: Any) -> Any:
        """Returns what to store when a reader writes ``value``."""
        # Compare by position first: readers may see one object for several leaves.
        stored, seen = map(leaves_of, self._last)
        leaves, treedef = jax.tree_util.tree_flatten(value)
        if len(leaves) == len(seen) and all(map(operator.is_, leaves, seen)):
            return treedef.unflatten(stored)
        return map_leaves(self._stored_leaf, ('', ()), value)

    def _stored_leaf(self, _: Key, leaf: Any) -> Any:
        return self._stored.get(id(leaf), (None, leaf))[1]


def view(root: Root, blocks: Sequence[Block], key: Key, value: Any) -> Any:
    """Returns what a reader sees instead of a variable or a subtree of variables.

    Args:
        root: the tree that is read.
        blocks: the open blocks, outermost first. Their rules apply in this order: the
            outermost rule gets the stored value. A cotangent reaches it last.
        key: the collection and the path of ``value``.
        value: the stored value. A mapping is a subtree, and its keys are names. Leaves
            inside anything else (a tuple, a box) belong to one variable.

    Returns:
        The same structure with the same types. ``value`` itself if no block looks at
        the collection.
    """
    wanted = [block for block in blocks if wants(block, key[0])]
    if not wanted:
        return value
    return map_variables(functools.partial(_view_variable, root, wanted), key, value)


def _view_variable(root: Root, blocks: Sequence[Block], key: Key, value: Any) -> Any:
    keys = leaf_keys(key, value)
    for block in blocks:
        # The values that a lifted body starts with were rewritten outside, selected by
        # their names outside: ``nn.map_variables`` renames variables in the body.
        if root.begins_with(block, key, value):
            continue
        if any([selects(block, root, leaf_key) for leaf_key in keys]):
            value = _rewritten(root, block, key, value)
    return value


def _rewritten(root: Root, block: Block, key: Key, value: Any) -> Any:
    of_block = root.seen.get(block)
    if of_block is None:
        of_block = root.seen[block] = {}
    seen = of_block.get(key)
    if seen is None:
        seen = of_block[key] = Seen()
    viewed = AS_IT_IS
    if block.rewrite.rule.brings:
        viewed = placing.instead(block, root, key, value, view)
    if viewed is AS_IT_IS:
        leaf = functools.partial(_view_leaf, root, block, key, seen)
        viewed = map_leaves(leaf, key, value)
    else:
        for old, new in zip(leaves_of(value), leaves_of(viewed), strict=True):
            seen.note(old, new)
        thread.rewritten += 1
    seen.note_variable(value, viewed)
    return viewed


def _view_leaf(
    root: Root, block: Block, variable: Key, seen: Seen, key: Key, leaf: Any
) -> Any:
    found = seen.views.get((key, id(leaf)))
    if found is None:
        if root.begins_with(block, variable, leaf) or not selects(block, root, key):
            return leaf
        found = (leaf, placing.rewritten(block, root, key, leaf, view))
        seen.views[key, id(leaf)] = found
        seen.note(leaf, found[1])
    if found[1] is not leaf:
        thread.rewritten += 1
    return found[1]


def stored(root: Root, blocks: Sequence[Block], key: Key, value: Any) -> Any:
    """Returns what to store when a reader writes ``value``: the inverse of ``view``.

    Read-modify-write (``sow`` appending to a tuple) writes back leaves that the reader
    saw of the same variable. Such leaves are replaced by the stored ones.
    """

    def back(key: Key, value: Any) -> Any:
        for block in reversed(blocks):
            seen = root.seen.get(block, {}).get(key)
            if seen is not None:
                value = seen.stored_value(value)
        return value

    if not root.seen:
        return value
    return map_variables(back, key, value)

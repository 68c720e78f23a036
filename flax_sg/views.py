"""Rewritten views of variables: what readers in a block are given.

The dicts that Flax keeps variables in are never changed. A reader gets the value with
the rules of the open blocks applied, a writer's value goes where it would have gone,
and closing a block leaves nothing to undo.

Plain dict code: what the open blocks are, and which variables they select, comes in
as an argument.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
from flax.core.frozen_dict import FrozenDict

from flax_sg.seen import Seen, map_leaves

# A variable's collection and its names from the root of the tree.
Key = tuple[str, tuple[str, ...]]

# Nothing stands for a variable: its leaves are looked at one by one.
AS_IT_IS: Any = object()


class Block(Protocol):
    """What a view has to know of an open block."""

    def rewrite(self, root: Root, key: Key, leaf: Any) -> Any:
        """Returns what a reader sees instead of ``leaf``."""
        ...

    def selects(self, root: Root, key: Key) -> Any:
        """Whether the block's filter takes the variable."""
        ...

    def wants(self, collection: str) -> bool:
        """Whether the block looks at variables of this collection at all."""
        ...

    def instead(self, root: Root, key: Key, value: Any) -> Any:
        """Returns what stands for a whole variable; ``AS_IT_IS`` if nothing does."""
        ...

    def note_rewritten(self) -> None:
        """Counts a leaf that a reader saw rewritten."""
        ...


class Root:
    """What the open blocks know of one tree of variables.

    A tree belongs to an ``apply``, a bound module, or the body of a lifted transform.

    Attributes:
        tree: identity of the ``apply`` that the tree comes from; the body of a lifted
            transform has that of the scope it was lifted from.
        covered: the blocks that were open when the body of a lifted transform began:
            what it starts with was rewritten outside.
        handed: what the body starts with, as it was handed in.
        selected: the variables in ``handed`` that were rewritten outside.
        initializing: whether the variables are being made.
        seen: the leaves that were rewritten for readers of this tree.
        level: the trace in which the tree began.
        parts: the collections that it consists of, and where they stand; several in the
            body of a transform of several modules.
        joint: what readers see of leaves that a block rewrites together.
        kept: values kept by ``setup``, seen under a block; see ``kept.py``.
        setups: what is known of runs of ``setup``; see ``kept.py``.
        scratch: whether the tree serves a second run of a ``setup``.
        start_is_known: whether such a tree holds what the first run began with.
    """

    def __init__(
        self,
        tree: object,
        covered: tuple[Block, ...] = (),
        handed: Mapping[Key, Any] | None = None,
        selected: frozenset[Key] = frozenset(),
    ) -> None:
        self.tree = tree
        self.covered = covered
        self.handed = handed or {}
        self.selected = selected
        self.initializing = False
        self.seen: dict[Block, dict[Key, Seen]] = {}
        self.level: Any = None
        self.parts: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        self.joint: dict[Block, Any] = {}
        self.kept: dict[Block, dict[int, Any]] = {}
        self.setups: dict[int, Any] = {}
        self.scratch = False
        self.start_is_known = False

    def as_scratch(self, start_is_known: bool) -> Root:
        """The same tree for code that runs a second time."""
        scratch = Root(self.tree, self.covered, self.handed, self.selected)
        scratch.seen = self.seen
        scratch.level, scratch.parts, scratch.joint = self.level, self.parts, self.joint
        scratch.initializing = self.initializing
        scratch.scratch = True
        scratch.start_is_known = start_is_known
        return scratch

    def within(self, covered: tuple[Block, ...]) -> Root:
        """The same tree in the body of a lifted transform."""
        inner = Root(self.tree, covered)
        inner.initializing = self.initializing
        inner.scratch = self.scratch
        inner.start_is_known = self.start_is_known
        return inner

    def begin(
        self,
        path: tuple[str, ...],
        variables: dict[str, Any],
        handed: Mapping[Key, Any],
        selected: frozenset[Key],
    ) -> None:
        """Notes what a part of the tree in such a body begins with."""
        self.parts.append((path, variables))
        self.handed = {**self.handed, **handed}
        self.selected |= selected

    # A root travels in the flags of scopes, which ``nn.jit`` hashes to tell modules
    # apart. What a root holds is told apart by JAX's own cache keys.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Root)

    def __hash__(self) -> int:
        return hash(Root)

    def forget(self, block: Block) -> None:
        """Drops what was kept for a block that is closed."""
        self.seen.pop(block, None)
        self.joint.pop(block, None)
        self.kept.pop(block, None)

    def covers(self, block: Block, key: Key, leaf: Any) -> bool:
        """Whether ``leaf`` came into this tree with the block's rule applied."""
        if not any(block is other for other in self.covered):
            return False
        handed = self.handed.get(key, _NOTHING)
        return any(leaf is other for other in jax.tree_util.tree_leaves(handed))

    def begins_with(self, block: Block, key: Key, value: Any) -> bool:
        """Whether a variable is as it came into this tree, in view of the block."""
        if not any(block is other for other in self.covered):
            return False
        handed = self.handed.get(key, _NOTHING)
        if value is handed:
            return True
        begun = {id(leaf) for leaf in jax.tree_util.tree_leaves(handed)}
        leaves = jax.tree_util.tree_leaves(value)
        return all(id(leaf) in begun for leaf in leaves)


_NOTHING = object()


def view(root: Root, blocks: Sequence[Block], key: Key, value: Any) -> Any:
    """Returns what a reader sees instead of a variable or a subtree of variables.

    Args:
        root: the tree that is read.
        blocks: the open blocks, outermost first; their rules apply in this order,
            the outermost one last, nearest to the stored value first.
        key: where ``value`` stands.
        value: the stored value. A mapping is a subtree, its keys are names. Leaves
            inside anything else (a tuple, a box) share the variable's path.

    Returns:
        The same structure with the same types. ``value`` itself if no block wants the
        collection.
    """
    wanted = [block for block in blocks if block.wants(key[0])]
    if not wanted:
        return value
    return map_variables(lambda k, v: _view_variable(root, wanted, k, v), key, value)


def _view_variable(root: Root, blocks: Sequence[Block], key: Key, value: Any) -> Any:
    for block in blocks:
        if root.begins_with(block, key, value):
            # Selected or not, by the name that it has outside: ``nn.map_variables``
            # gives names in here, of which the filter shall not be asked.
            continue
        if block.selects(root, key):
            seen = root.seen.setdefault(block, {}).setdefault(key, Seen())
            viewed = block.instead(root, key, value)
            if viewed is AS_IT_IS:
                view_leaf = functools.partial(_view_leaf, root, block, key, seen)
                viewed = map_leaves(view_leaf, value)
            else:
                seen.note(value, viewed)
                block.note_rewritten()
            leaves = jax.tree_util.tree_leaves
            seen.last = (leaves(value), leaves(viewed))
            value = viewed
    return value


def _view_leaf(root: Root, block: Block, key: Key, seen: Seen, leaf: Any) -> Any:
    found = seen.views.get(id(leaf))
    if found is None:
        if root.covers(block, key, leaf):
            return leaf
        found = (leaf, block.rewrite(root, key, leaf))
        seen.views[id(leaf)] = found
        seen.stored[id(found[1])] = (found[1], leaf)
    if found[1] is not leaf:
        block.note_rewritten()
    return found[1]


def stored(root: Root, blocks: Sequence[Block], key: Key, value: Any) -> Any:
    """Returns what to store when a reader writes ``value``: the way back of ``view``.

    Read-modify-write (``sow`` appending to a tuple) writes back what was read. Leaves
    that are what a reader saw of the same variable become the stored ones again.
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


def map_variables(fn: Callable[[Key, Any], Any], key: Key, value: Any) -> Any:
    """Maps over the variables in a tree of nested mappings, keeping their types."""
    if isinstance(value, _SUBTREES):
        collection, path = key
        mapped = {
            name: map_variables(fn, (collection, (*path, str(name))), child)
            for name, child in value.items()
        }
        return mapped if type(value) is dict else _like(value, mapped)
    return fn(key, value)


# What Flax nests variables in. Not any Mapping: those that JAX takes for leaves are.
_SUBTREES = (dict, FrozenDict)


def _like(value: Any, mapped: dict[Any, Any]) -> Any:
    if isinstance(value, FrozenDict):
        return FrozenDict(mapped)
    out = copy.copy(value)
    out.update(mapped)
    return out


def find(collections: Mapping[str, Any], collection: str, names: Sequence[str]) -> Any:
    """The variable of these names, or the subtree; ``AS_IT_IS`` if there is none."""
    node = collections.get(collection, {})
    for name in names:
        if not isinstance(node, _SUBTREES) or name not in node:
            return AS_IT_IS
        node = node[name]
    return node


def iter_variables(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    """Yields the variables in a tree of nested mappings with their keys."""
    if isinstance(value, _SUBTREES):
        collection, path = key
        for name, child in value.items():
            yield from iter_variables((collection, (*path, str(name))), child)
    else:
        yield key, value

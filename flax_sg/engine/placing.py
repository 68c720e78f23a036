"""Where a rewritten value is made: in which trace, and together with which others.

A stopped value is the same wherever it is made. A cotangent that goes through a
function is not: what JAX adds up before is what is used between the function's place
and the loss. So the identity that carries such a rule stands where the extent begins,
or where the ``apply`` inside it does, not where the leaf comes from: in the body of a
scan it maps the cotangent of one step, of a leaf that lies outside too. A value that is
brought along belongs to the trace in which the block was opened, or to that of the leaf
where the leaf is younger.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from flax_sg import errors, filters
from flax_sg.engine import selection
from flax_sg.engine.blocks import Block, Root, thread
from flax_sg.engine.selection import path_of
from flax_sg.internals import tracing
from flax_sg.rules import readers
from flax_sg.rules.rules import AS_IT_IS
from flax_sg.trees.leaves import is_differentiable
from flax_sg.trees.variables import Key, find, iter_variables, leaf_keys, leaves_of

# What some blocks show of a variable, ``views.view``.
View: TypeAlias = Callable[[Root, Sequence[Block], Key, Any], Any]


def _owner(block: Block, root: Root) -> tuple[str, ...]:
    return block.owner_path if root.tree is block.tree else ()


class Made:
    """The leaves that a block has rewritten, by identity.

    What is read in a block and given to another ``apply`` there is not rewritten again.
    Only what is traced can be mapped, and a trace is over when nobody holds its values.
    """

    def __init__(self) -> None:
        self._leaves: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )
        # For each tree the root whose leaves a joint rule has taken.
        self.together: weakref.WeakValueDictionary[object, Root] = (
            weakref.WeakValueDictionary()
        )

    def note(self, leaf: Any) -> None:
        """Notes a leaf as rewritten."""
        if isinstance(leaf, tracing.Tracer):
            self._leaves[id(leaf)] = leaf

    def __contains__(self, leaf: Any) -> bool:
        return self._leaves.get(id(leaf)) is leaf


def made_by(block: Block) -> Made:
    """The leaves that a block has rewritten."""
    if block.made is None:
        block.made = Made()
    return block.made


def note_handed(block: Block, root: Root, handed: Mapping[Key, Any]) -> None:
    """Notes what the body of a transform in a block begins with."""
    if block.rewrite.rule.in_extent:
        for key in handed.keys() & root.selected:
            for leaf in leaves_of(handed[key]):
                made_by(block).note(leaf)


def rewritten(block: Block, root: Root, key: Key, leaf: Any, view: View) -> Any:
    """What a reader sees in a block instead of one leaf of a selected variable."""
    rule = block.rewrite.rule
    if root.initializing and not rule.at_init:
        return leaf
    if not rule.in_extent:
        trace = tracing.in_trace_of(leaf)
        if rule.brings:
            trace = tracing.in_innermost_trace((block.level,), leaf)
        with trace, _seeing_outside(block):
            return _applied(block, root, key, leaf)
    path = path_of(block, root, key)
    made = made_by(block)
    if leaf in made or not readers.has_cotangent(block.rewrite, path, leaf):
        return leaf
    if rule.jointly:
        selection.note_all(block, root)
        new = _of_all(block, root, key, leaf, view)
    else:
        with _seeing_outside(block), _begin(block, root, [leaf]):
            new = _applied(block, root, key, leaf)
    if new is not leaf:
        made.note(new)
    return new


def _seeing_outside(block: Block) -> Any:
    """A function of the user sees what is outside of the block."""
    if block.rewrite.rule.runs_code:
        return thread.only(block.outer)
    return contextlib.nullcontext()


def _applied(block: Block, root: Root, key: Key, leaf: Any) -> Any:
    """The rule, applied to a leaf or to the part of it that is meant."""
    path, said = selection.answer(block, root, key)
    new = block.rewrite.rule(path, leaf)
    return filters.merged(said, new, leaf, path)


def _begin(block: Block, root: Root, leaves: Sequence[Any]) -> Any:
    """The trace in which the extent begins, and the tree in it."""
    used = (*leaves, *block.rewrite.rule.brought)
    levels = (block.level, root.level)
    return tracing.in_innermost_trace(levels, *used, examples=False)


def instead(block: Block, root: Root, key: Key, value: Any, view: View) -> Any:
    """What a reader sees in a block instead of a whole variable."""
    rule = block.rewrite.rule
    if root.initializing and not rule.at_init:
        return AS_IT_IS

    def find_beside(collection: str) -> Any:
        for above, variables in root.parts:
            if key[1][: len(above)] == above:
                found = find(variables, collection, key[1][len(above) :])
                if found is not AS_IT_IS:
                    return view(root, block.outer, (collection, key[1]), found)
        return AS_IT_IS

    new = rule.instead(path_of(block, root, key), value, find_beside)
    if new is AS_IT_IS:
        return new
    keys = leaf_keys(key, value)
    asked = [selection.answer(block, root, leaf_key) for leaf_key in keys]
    if all(said is True for _, said in asked):
        return new
    olds, treedef = jax.tree.flatten(value)
    leaves = zip(asked, leaves_of(new), olds, strict=True)
    return treedef.unflatten(
        filters.merged(said, meant, old, path) if said else old
        for (path, said), meant, old in leaves
    )


_Leaf = tuple[Key, int]


def _of_all(block: Block, root: Root, key: Key, leaf: Any, view: View) -> Any:
    """What a reader sees of one leaf of those that are rewritten together.

    These are the ones that the tree holds when the first of them is read. What is
    created or written later is no parameter that is differentiated from outside.
    """
    joint = root.joint.get(block)
    if joint is None:
        joint = root.joint[block] = _Joint(block, root, view)
    return joint.seen(block, root, key, leaf)


class _Joint:
    """The leaves that a block rewrites together in one tree."""

    def __init__(self, block: Block, root: Root, view: View) -> None:
        self.parts = len(root.parts)
        self.is_split = False
        self._seen: dict[_Leaf, tuple[Any, Any]] = {}
        if any(block is other for other in root.covered):
            return  # They were rewritten outside.
        # A block in a body may meet its tree on both sides of the transform.
        self.is_split = made_by(block).together.setdefault(root.tree, root) is not root
        if self.is_split:
            return
        of_key: dict[Key, list[Any]] = {}
        for key, value in _variables(root):
            if not selection.wants(block, key[0]):
                continue
            keys = leaf_keys(key, value)
            took = [selection.selects(block, root, leaf_key) for leaf_key in keys]
            if not any(took):
                continue
            shown = leaves_of(view(root, block.outer, key, value))
            for leaf_key, take, leaf in zip(keys, took, shown, strict=True):
                if take and is_differentiable(leaf):
                    of_key.setdefault(leaf_key, []).append(leaf)
        selected = [(path_of(block, root, key), of_key[key]) for key in of_key]
        stored: dict[Key, list[Any]] = {}
        for key, value in _variables(root):
            for leaf_key, leaf in zip(
                leaf_keys(key, value), leaves_of(value), strict=True
            ):
                stored.setdefault(leaf_key, []).append(leaf)
        reader = readers.Reader(stored, _owner(block, root))
        with _begin(block, root, [leaf for _, leaves in selected for leaf in leaves]):
            together = block.rewrite.rule.together(selected, reader)
            seen = [
                (
                    key,
                    old,
                    filters.merged(selection.selects(block, root, key), new, old, path),
                )
                for key, (path, leaves), others in zip(
                    of_key, selected, together, strict=True
                )
                for old, new in zip(leaves, others, strict=True)
            ]
        for key, old, new in seen:
            self._seen[key, id(old)] = old, new
            made_by(block).note(new)

    def seen(self, block: Block, root: Root, key: Key, leaf: Any) -> Any:
        if (key, id(leaf)) in self._seen:
            return self._seen[key, id(leaf)][1]
        if self.is_split or len(root.parts) > self.parts:
            path = path_of(block, root, key)
            raise _split_selection(block.rewrite, path)
        return leaf


def _variables(root: Root) -> list[tuple[Key, Any]]:
    return [
        found
        for path, collections in root.parts
        for collection, tree in collections.items()
        for found in iter_variables((collection, path), tree)
    ]


def _split_selection(rewrite: object, path: str) -> errors.BlockError:
    """Parameters that a rule takes together are not known at one place."""
    return errors.BlockError(
        f'{rewrite!r} takes its parameters together, and {str(path)!r} lies in a '
        'module that came into the transform around the block by another way.\n'
        'Open the block around the transform, or leave that module out.'
    )

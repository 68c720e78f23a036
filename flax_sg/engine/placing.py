"""Makes rewritten values, each in the right trace and with the right other leaves.

A stopped value is the same in every trace. A rule on cotangents depends on the trace of
the identity function that carries the rule: JAX first sums the cotangents of all uses
between this identity and the loss. So the identity is made in the trace where the
extent begins, or where the ``apply`` inside it begins, and not where the leaf comes
from. In the body of a scan the rule then maps the cotangent of one step, even for a
leaf from outside the scan.

A value that a rule brings along is made in the trace in which the block was opened, or
in the leaf's trace if the leaf is younger.
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
from flax_sg.rules import cotangents
from flax_sg.rules.rules import AS_IT_IS
from flax_sg.trees.leaves import is_differentiable
from flax_sg.trees.variables import Key, find, iter_variables, leaf_keys, leaves_of

# The type of ``views.view``, an argument here because ``views`` imports this module.
View: TypeAlias = Callable[[Root, Sequence[Block], Key, Any], Any]


def _owner(block: Block, root: Root) -> tuple[str, ...]:
    return block.owner_path if root.tree is block.tree else ()


class Made:
    """Holds the leaves that a block has rewritten, by identity.

    A leaf that was read in a block and passed to another ``apply`` there is not
    rewritten again. Only tracers have cotangents to map. A trace is over when nobody
    holds its tracers, so the references are weak.
    """

    def __init__(self) -> None:
        self._leaves: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )
        # For each tree, the root whose leaves a joint rule has rewritten.
        self.together: weakref.WeakValueDictionary[object, Root] = (
            weakref.WeakValueDictionary()
        )

    def note(self, leaf: Any) -> None:
        """Notes that a leaf is rewritten, if it is a tracer."""
        if isinstance(leaf, tracing.Tracer):
            self._leaves[id(leaf)] = leaf

    def __contains__(self, leaf: Any) -> bool:
        return self._leaves.get(id(leaf)) is leaf


def made_by(block: Block) -> Made:
    """Returns the leaves that a block has rewritten."""
    if block.made is None:
        block.made = Made()
    return block.made


def note_handed(block: Block, root: Root, handed: Mapping[Key, Any]) -> None:
    """Notes the rewritten leaves that a lifted body in a block starts with."""
    if block.rewrite.rule.in_extent:
        for key in handed.keys() & root.selected:
            for leaf in leaves_of(handed[key]):
                made_by(block).note(leaf)


def rewritten(block: Block, root: Root, key: Key, leaf: Any, view: View) -> Any:
    """Returns what a reader in a block sees instead of a selected variable's leaf."""
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
    if leaf in made or not cotangents.has_cotangent(block.rewrite, path, leaf):
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
    """Leaves only the outer blocks open if the rule runs a function of the user."""
    if block.rewrite.rule.runs_code:
        return thread.only(block.outer)
    return contextlib.nullcontext()


def _applied(block: Block, root: Root, key: Key, leaf: Any) -> Any:
    """Applies the rule to a leaf, or to the selected part of the leaf."""
    path, said = selection.answer(block, root, key)
    new = block.rewrite.rule(path, leaf)
    return filters.merged(said, new, leaf, path)


def _begin(block: Block, root: Root, leaves: Sequence[Any]) -> Any:
    """Enters the trace in which the extent and the tree in it have both begun."""
    used = (*leaves, *block.rewrite.rule.brought)
    levels = (block.level, root.level)
    return tracing.in_innermost_trace(levels, *used, examples=False)


def instead(block: Block, root: Root, key: Key, value: Any, view: View) -> Any:
    """Returns what a reader in a block sees instead of a whole variable.

    Returns:
        The value; ``AS_IT_IS`` to apply the rule to each leaf alone.
    """
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
    """Returns what a reader sees instead of one of the leaves rewritten together.

    These are the leaves that the tree holds when the first of them is read. A variable
    that is created or written later is not differentiated from outside.
    """
    joint = root.joint.get(block)
    if joint is None:
        joint = root.joint[block] = _Joint(block, root, view)
    return joint.seen(block, root, key, leaf)


class _Joint:
    """Holds the leaves that a block rewrites together in one tree."""

    def __init__(self, block: Block, root: Root, view: View) -> None:
        self.parts = len(root.parts)
        self.is_split = False
        self._seen: dict[_Leaf, tuple[Any, Any]] = {}
        if any(block is other for other in root.covered):
            return  # The leaves were rewritten outside the body.
        # A block opened in a body may read its tree on both sides of the transform.
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
        tree = stored, _owner(block, root)
        with _begin(block, root, [leaf for _, leaves in selected for leaf in leaves]):
            together = block.rewrite.rule.together(selected, tree)
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
    """Returns the error for joint parameters that are not known at one place."""
    return errors.BlockError(
        f'{rewrite!r} takes its parameters together, and {str(path)!r} lies in a '
        'module that came into the transform around the block by another way.\n'
        'Open the block around the transform, or leave that module out.'
    )

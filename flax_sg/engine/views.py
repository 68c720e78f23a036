"""Gives readers rewritten values, and turns what they write into stored values.

Flax's own dicts of variables are never changed. A reader gets the value with the rules
of the open blocks applied. A writer's value goes where Flax would have stored it. So
closing a block has nothing to undo.

Each rewritten value is made in the right trace. A stopped value is the same in every
trace. A rule on cotangents depends on the trace of the identity function that carries
the rule: JAX first sums the cotangents of all uses between this identity and the loss.
So the identity is made in the trace where the block begins, or where the ``apply``
inside it begins, and not where the leaf comes from. In the body of a scan the rule then
maps the cotangent of one step, even for a leaf from outside the scan. A value that a
rule brings along is made in the trace in which the block was opened, or in the leaf's
trace if the leaf is younger.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax

from flax_sg import errors, filters
from flax_sg.engine.blocks import Block, Decided, thread
from flax_sg.engine.roots import Root
from flax_sg.engine.selection import (
    decide,
    leave_out,
    note_all,
    path_of,
    selects,
    wants,
)
from flax_sg.internals import tracing
from flax_sg.internals.jaxprs import BLOCK
from flax_sg.internals.types import Leaf, PyTree
from flax_sg.rules.cotangents import has_to_act
from flax_sg.rules.rules import LEAF_BY_LEAF, Rewrite
from flax_sg.trees.leaves import is_differentiable
from flax_sg.trees.variables import (
    MISSING,
    Key,
    LeafKey,
    find,
    iter_variables,
    leaf_keys,
    map_leaves,
    map_variables,
)


class Seen:
    """Maps the leaves of one variable that one block rewrote to the stored leaves.

    Leaves are compared by identity. Each variable has its own ``Seen``: two variables
    may hold the same array, and one array may replace several stored ones.

    Attributes:
        views: by key and identity, each leaf that was read and what readers see.
        last: the stored variable at the last read, and what the reader saw instead.
    """

    def __init__(self) -> None:
        self.views: dict[tuple[Key, int], tuple[Any, Any]] = {}
        self.last: tuple[Any, Any] = (None, None)
        self._stored: dict[int, tuple[Any, Any]] = {}

    def note(self, leaf: Leaf, viewed: PyTree) -> None:
        """Notes that a reader sees ``viewed`` instead of ``leaf``."""
        self._stored[id(viewed)] = (viewed, leaf)

    def stored_value(self, value: PyTree) -> PyTree:
        """Returns what to store when a reader writes ``value``."""
        # By position, if nothing was changed: one object may stand for several leaves.
        stored, seen = map(jax.tree.leaves, self.last)
        leaves, treedef = jax.tree_util.tree_flatten(value)
        if len(leaves) == len(seen) and all(map(operator.is_, leaves, seen)):
            return treedef.unflatten(stored)
        pairs, keys = self._stored, leaf_keys(('', ()), value)
        return map_leaves(lambda _, x: pairs.get(id(x), (x, x))[1], keys, value)


# The key of a leaf, its path, and the decision of a block's filter about it.
_Asked: TypeAlias = tuple[LeafKey, Decided]
# By key and identity, a leaf and what readers see instead.
_Joint: TypeAlias = dict[tuple[Key, int], tuple[Any, Any]]


class _Views:
    """Holds what readers of one tree see in one block.

    Attributes:
        seen: the leaves of each variable.
        joint: the leaves that a joint rule has rewritten together; None until one of
            them is read.
    """

    def __init__(self) -> None:
        self.seen: defaultdict[Key, Seen] = defaultdict(Seen)
        self.joint: _Joint | None = None

    @classmethod
    def of(cls, root: Root, block: Block) -> _Views:
        """Returns the views of a tree in a block."""
        return root.views.get(block) or root.views.setdefault(block, cls())


def view(root: Root, blocks: Sequence[Block], key: Key, value: PyTree) -> PyTree:
    """Returns what a reader sees instead of a variable or a subtree of variables.

    Args:
        root: the tree that is read.
        blocks: the open blocks, outermost first. A value goes through their rules in
            this order: the outermost rule gets the stored value. A cotangent comes back
            in the opposite order: the innermost rule gets it first.
        key: the collection and the path of ``value``.
        value: the stored value. A mapping is a subtree, and its keys are names. Leaves
            inside anything else (a tuple, a box) belong to one variable.

    Returns:
        The same structure with the same types. ``value`` itself if no block looks at
        the collection.
    """
    wanted = [block for block in blocks if wants(block, root, key[0])]
    if len(wanted) < len(blocks):
        for block in blocks:
            leave_out(block, root, key, value)
    if not wanted:
        return value
    return map_variables(functools.partial(_view_variable, root, wanted), key, value)


def stored(root: Root, blocks: Sequence[Block], key: Key, value: PyTree) -> PyTree:
    """Returns what to store when a reader writes ``value``: the inverse of ``view``.

    Read-modify-write (``sow`` appending to a tuple) writes back leaves that the reader
    saw of the same variable. Such leaves are replaced by the stored ones.
    """

    def unviewed(key: Key, value: PyTree) -> PyTree:
        for block in reversed(blocks):
            if block in root.views and key in root.views[block].seen:
                value = root.views[block].seen[key].stored_value(value)
        return value

    return map_variables(unviewed, key, value) if root.views else value


def _view_variable(
    root: Root, blocks: Sequence[Block], key: Key, value: PyTree
) -> PyTree:
    # Filters see an array as it is stored, whatever the outer blocks make of it.
    keys = leaf_keys(key, value)
    for block in blocks:
        # The values that a lifted body starts with were rewritten outside, selected by
        # their names outside: ``nn.map_variables`` renames variables in the body. A
        # jitted helper in the body depends on the decision about such a value, too.
        is_handed = _is_handed(root, block, key, value)
        if is_handed and tracing.kept_trace() == root.kept_trace:
            continue
        asked_about = root.handed.leaf_keys(block, key, value) if is_handed else keys
        decided = [decide(block, root, leaf_key) for leaf_key in asked_about]
        if not is_handed and any([answer is not False for _, answer in decided]):
            asked = [*zip(keys, decided, strict=True)]
            value = _rewritten(root, block, key, asked, value)
    return value


def _is_handed(root: Root, block: Block, key: Key, value: PyTree) -> bool:
    """Whether a block has rewritten a variable or leaf before a body was handed it."""
    return block in root.handed.covered and root.handed.has(key, value)


def _rewritten(
    root: Root, block: Block, key: Key, asked: Sequence[_Asked], value: PyTree
) -> Any:
    seen = _Views.of(root, block).seen[key]
    viewed = LEAF_BY_LEAF
    if block.rewrite.rule.brings and _applies(block, root):
        viewed = _instead(block, root, key, asked, value)
    if viewed is LEAF_BY_LEAF:
        leaf = functools.partial(_view_leaf, root, block, key, seen)
        viewed = map_leaves(leaf, asked, value)
    else:
        pair = jax.tree.leaves(value), jax.tree.leaves(viewed)
        for old, new in zip(*pair, strict=True):
            seen.note(old, new)
        thread.rewritten += 1
    seen.last = value, viewed
    return viewed


def _applies(block: Block, root: Root) -> bool:
    return block.rewrite.rule.at_init or not root.initializing


def acts(block: Block, root: Root) -> bool:
    """Whether a block does anything to what it selects in a tree."""
    return block.rewrite.rule.acts_on != 'nothing' and _applies(block, root)


def only_refuses(block: Block) -> bool:
    """Whether a block refuses writes, and shows what is stored."""
    return block.rewrite.rule.acts_on == 'writes'


def _view_leaf(
    root: Root, block: Block, variable: Key, seen: Seen, asked: _Asked, leaf: Leaf
) -> Any:
    key, decided = asked
    pair = seen.views.get((key, id(leaf)))
    if pair is None:
        if _is_handed(root, block, variable, leaf) or decided[1] is False:
            return leaf
        is_new = _applies(block, root)
        new = _new_leaf(block, root, key, decided, leaf) if is_new else leaf
        pair = seen.views[key, id(leaf)] = leaf, new
        seen.note(leaf, new)
    _, viewed = pair
    if viewed is not leaf:
        thread.rewritten += 1
    return viewed


# What a rule makes, and in which trace.


def _instead(
    block: Block, root: Root, key: Key, asked: Sequence[_Asked], value: PyTree
) -> PyTree:
    """Returns what a reader in a block sees instead of a whole variable.

    Returns:
        The value; ``LEAF_BY_LEAF`` to apply the rule to each leaf alone.
    """

    def find_in(collection: str) -> PyTree:
        for above, variables in root.parts:
            if key[1][: len(above)] == above:
                variable = find(variables, collection, key[1][len(above) :])
                if variable is not MISSING:
                    return view(root, block.outer, (collection, key[1]), variable)
        return MISSING

    new = block.rewrite.rule.instead(path_of(block, key), value, find_in)
    if new is LEAF_BY_LEAF:
        return new
    olds, treedef = jax.tree.flatten(value)
    leaves = zip(asked, jax.tree.leaves(new), olds, strict=True)
    return treedef.unflatten(
        filters.merged(decision, other, old, path)
        for (_, (path, decision)), other, old in leaves
    )


def _new_leaf(block: Block, root: Root, key: Key, decided: Decided, leaf: Leaf) -> Leaf:
    """Returns what a reader in a block sees instead of a selected variable's leaf."""
    rule = block.rewrite.rule
    if rule.acts_on != 'cotangents':
        trace = tracing.in_trace_of(leaf)
        part = decided[1]
        # A mask may be traced in a function that reads the leaf from outside.
        if rule.brings or (isinstance(part, filters.Part) and part.is_mask):
            trace = tracing.in_innermost_trace((block.level,), leaf)
        with trace, _seeing_outside(block):
            return _applied(block, decided, leaf)
    if not has_to_act(block.rewrite, decided[0], leaf):
        return leaf
    if rule.jointly:
        note_all(block, root)
        return _joint_leaf(block, root, key, leaf)
    with _seeing_outside(block), _begin(block, root, [leaf]):
        return _applied(block, decided, leaf)


def _seeing_outside(block: Block) -> Any:
    """Leaves only the outer blocks open if the rule runs a function of the user."""
    if block.rewrite.rule.runs_code:
        return thread.only(block.outer)
    return contextlib.nullcontext()


def _applied(block: Block, decided: Decided, leaf: Leaf) -> Leaf:
    """Applies the rule to a leaf, or to the selected part of the leaf."""
    path, decision = decided
    named = contextlib.nullcontext()
    if isinstance(leaf, tracing.Tracer):
        # A report of gradient flow names the block by the scope of its equation.
        named = jax.named_scope(f'{BLOCK}{block.rewrite!r} at {block.place}')
    selected = leaf
    if block.rewrite.rule.acts_on == 'cotangents':
        selected = filters.within(decision, leaf, path)
    with named:
        new = block.rewrite.rule(path, selected)
    return filters.merged(decision, new, leaf, path)


def _begin(block: Block, root: Root, leaves: Sequence[Any]) -> Any:
    """Enters the trace in which the block and the tree in it have both begun."""
    used = (*leaves, *block.rewrite.rule.operands)
    levels = (block.level, root.level)
    return tracing.in_innermost_trace(levels, *used, examples=False)


def _joint_leaf(block: Block, root: Root, key: Key, leaf: Leaf) -> Leaf:
    """Returns what a reader sees instead of a leaf, if all are rewritten together.

    These are the leaves that the tree holds when the first of them is read. A variable
    that is created or written later is not differentiated from outside.
    """
    if block in root.handed.covered:
        # The body has made it: what it was handed was rewritten together, outside.
        return leaf
    if any(above for above, _ in root.parts):
        if not isinstance(leaf, tracing.Tracer):  # Nothing differentiates a constant.
            return leaf
        raise _in_a_body(block.rewrite, path_of(block, key))
    views = _Views.of(root, block)
    if views.joint is None:
        views.joint = _rewritten_together(block, root)
    return views.joint.get((key, id(leaf)), (leaf, leaf))[1]


def _rewritten_together(block: Block, root: Root) -> _Joint:
    """Returns the selected leaves of a tree, and what readers see instead."""
    chosen: dict[Key, list[Any]] = {}
    for key, value in _variables(root):
        if not wants(block, root, key[0]):
            continue
        keys = leaf_keys(key, value)
        decisions = [selects(block, root, leaf_key) for leaf_key in keys]
        if any(map(filters.is_meant, decisions)):
            shown = jax.tree.leaves(view(root, block.outer, key, value))
            for leaf_key, decision, leaf in zip(keys, decisions, shown, strict=True):
                if decision is not False and is_differentiable(leaf):
                    chosen.setdefault(leaf_key, []).append(leaf)
    decided = [(decide(block, root, key), chosen[key]) for key in chosen]
    with _begin(block, root, [leaf for leaves in chosen.values() for leaf in leaves]):
        together = block.rewrite.rule.together(
            [
                (path, [filters.within(decision, old, path) for old in olds])
                for (path, decision), olds in decided
            ]
        )
        return {
            (key, id(old)): (old, filters.merged(decision, new, old, path))
            for key, ((path, decision), olds), news in zip(
                chosen, decided, together, strict=True
            )
            for old, new in zip(olds, news, strict=True)
        }


def _variables(root: Root) -> Iterator[tuple[Key, Any]]:
    for path, collections in root.parts:
        for collection, tree in collections.items():
            yield from iter_variables((collection, path), tree)


def _in_a_body(rewrite: Rewrite, path: str) -> errors.BlockError:
    """Returns the error for a rule that takes leaves together, of a part of a tree."""
    return errors.BlockError(
        f'{rewrite!r} was opened in the body of a transform (nn.scan, nn.remat, ...), '
        f'and {str(path)!r} is read there.\n'
        'The rule needs all selected parameters at once, and the body has only those '
        'that the transform gives it.\n'
        f'Open the block around the transform: with nn.{rewrite.rule.name}(...): '
        'model.apply(variables, x).'
    )

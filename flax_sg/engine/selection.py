"""Asks the filter of a block which variables it selects, and notes its decisions."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from flax.core.scope import in_filter

from flax_sg.engine.blocks import Block, Decided, thread
from flax_sg.engine.numbers import VALUES, Question
from flax_sg.engine.roots import Root
from flax_sg.filters.paths import Path
from flax_sg.internals import tracing
from flax_sg.internals.types import Decision, PyTree
from flax_sg.rules.rules import OVERWRITE_WITH_GRADIENT
from flax_sg.trees.variables import Facts, Key, facts_of, iter_leaf_keys


def wants(block: Block, root: Root, collection: str) -> bool:
    """Whether a block looks at variables of this collection and tree at all."""
    if not block.covers(root):
        if block.tree is not None and block.kept_trace != tracing.kept_trace():
            # A block of this kind would cover the tree if its owner were in it. So the
            # trace depends on where the owner is.
            _note(block, root, (), read=True)
        return False
    named = block.rewrite.collections
    if named == 'params':  # The common case, answered fast.
        return collection == 'params'
    return collection != OVERWRITE_WITH_GRADIENT and in_filter(named, collection)


def leave_out(block: Block, root: Root, key: Key, value: PyTree) -> None:
    """Notes variables of a tree that a block does not cover."""
    if not block.covers(root):
        block.uncovered.update(map(facts_of, iter_leaf_keys(key, value)))


def path_of(block: Block, key: Key) -> Path:
    """Returns a variable's path, as the filter and the rule of a block see it."""
    facts = facts_of(key)
    decided = block.decisions.get(facts)
    return block.asker.path_of(facts) if decided is None else decided[0]


def selects(
    block: Block, root: Root, key: Key, read: bool = True, noted: bool = False
) -> Decision:
    """Returns whether a block selects a variable: a bool, or a ``Part``."""
    return decide(block, root, key, read, noted)[1]


def decide(
    block: Block, root: Root, key: Key, read: bool = True, noted: bool = False
) -> Decided:
    """Returns a variable's path, and the decision of a block's filter about it.

    The filter is asked once for each variable. If JAX may cache the running trace, and
    the block was opened outside of this trace, the trace depends on the decision.

    Args:
        block: an open block, or a reopened one.
        root: the tree of the variable.
        key: the variable.
        read: whether the variable is being read.
        noted: whether the running trace may depend on the decision without a read.
    """
    facts = facts_of(key)
    decided = block.decisions.get(facts)
    if decided is None:
        decided = block.decisions[facts] = _asked(block, block.asker.path_of(facts))
    if read:
        asker = block.asker
        # A block of ``train_only`` is right, too, if all that is read in it is trained.
        selects = decided[1] is not False or asker.is_complement
        if selects and (asker.is_list or not block.effective):
            _note_effect(block, decided[0])
    in_program = block.kept_trace != tracing.kept_trace()
    if in_program and (read or noted):
        _note(block, root, [facts], read)
    elif not in_program and (read or root.kept_trace == block.kept_trace):
        block.untraced.add(facts)
    return decided


def _note_effect(block: Block, path: Path) -> None:
    """Notes that a filter selects what is read, and which atoms of a list do."""
    block.effective.add(block.rewrite.where.shape)
    if block.asker.is_list and not block.effective.issuperset(block.asker.listed):
        block.effective |= block.asker.listed_for(path)


def _asked(block: Block, path: Path) -> Decided:
    block.collections.add(path.collection)
    if not block.asker.has_functions:
        return path, block.asker.ask(path, block.matched)
    # A function may read variables. With blocks open it would see rewritten values, and
    # their numbers would depend on its reads.
    with thread.only(()):
        return path, block.asker.ask(path, block.matched)


def _note(block: Block, root: Root, decided: Sequence[Facts], read: bool) -> None:
    """Notes that the running trace, which JAX may keep, depends on some decisions."""
    rule = block.rewrite.rule
    is_older = not _is_made_inside(block, root)
    selects_one = any(block.decisions[facts][1] is not False for facts in decided)
    questions: list[Question] = []
    if is_older and block.tree is not None:
        questions.append(weakref.ref(root.tree))
    if block.asker.has_functions:
        questions += decided
    if read and selects_one and rule.token() is not None:
        questions.append(VALUES)
    # The trace closes over a value that this block alone has made, outside of it.
    is_own = is_older and selects_one and rule.acts_on == 'cotangents'
    if decided or questions:
        block.lease.note(questions, is_own)
        block.lease.number.history.effective |= block.effective


def _is_made_inside(block: Block, root: Root) -> bool:
    """Whether a tree was made in a trace that began after the block was opened.

    A late rule may run in a trace that is not inside of the block's (late_rules.py).
    """
    for trace in tracing.kept_traces():
        if trace in (root.kept_trace, block.kept_trace):
            return trace == root.kept_trace != block.kept_trace
    return False


def note_all(block: Block, root: Root) -> None:
    """Notes all decisions of a block: a value that depends on them is read.

    Args:
        block: an open block.
        root: the tree of the value. The value may be computed from several variables,
            and is kept for other readers of the tree.
    """
    if tracing.kept_trace() not in (block.kept_trace, root.kept_trace):
        _note(block, root, tuple(block.decisions), read=True)

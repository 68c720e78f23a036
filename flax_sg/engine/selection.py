"""Asks the filter of a block which variables it selects, and notes the answers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from flax.core.scope import in_filter

from flax_sg.engine.blocks import Answer, Block, thread
from flax_sg.engine.numbers import VALUES, Question
from flax_sg.engine.roots import Root
from flax_sg.filters.paths import Path
from flax_sg.internals import tracing
from flax_sg.rules.rules import OVERWRITE_WITH_GRADIENT
from flax_sg.trees.variables import Facts, Key, facts_of


def wants(block: Block, root: Root, collection: str) -> bool:
    """Whether a block looks at variables of this collection and tree at all."""
    if not block.covers(root):
        if block.tree is not None and block.kept_trace != tracing.kept_trace():
            # The owner of another block may be in this tree.
            _note(block, root, (), read=True)
        return False
    named = block.rewrite.collections
    if named == 'params':  # The common case, answered fast.
        return collection == 'params'
    return collection != OVERWRITE_WITH_GRADIENT and in_filter(named, collection)


def path_of(block: Block, key: Key) -> Path:
    """Returns a variable's path, as the filter and the rule of a block see it."""
    facts = facts_of(key)
    found = block.decisions.get(facts)
    return block.asker.path_of(facts) if found is None else found[0]


def selects(
    block: Block, root: Root, key: Key, read: bool = True, noted: bool = False
) -> Any:
    """Returns whether a block selects a variable: a bool, or a ``Part``."""
    return answer(block, root, key, read, noted)[1]


def answer(
    block: Block, root: Root, key: Key, read: bool = True, noted: bool = False
) -> Answer:
    """Returns a variable's path, and what the filter of a block says of it.

    The filter is asked once for each variable. If JAX may cache the running trace, and
    the block was opened outside of this trace, the trace depends on the answer.

    Args:
        block: an open block, or a reopened one.
        root: the tree of the variable.
        key: the variable.
        read: whether the variable is being read.
        noted: whether the running trace may depend on the answer without a read.
    """
    facts = facts_of(key)
    found = block.decisions.get(facts)
    if found is None:
        found = block.decisions[facts] = _decide(block, block.asker.path_of(facts))
    said = found[1]
    if read:
        # ``train_only`` stops the rest, and a block may read only what it names.
        block.took = block.took or bool(said) or block.asker.is_complement
    in_program = block.kept_trace != tracing.kept_trace()
    if in_program and (read or noted):
        _note(block, root, [facts], read)
    elif not in_program and (read or root.kept_trace == block.kept_trace):
        block.beside.add(facts)
    return found


def _decide(block: Block, path: Path) -> Answer:
    block.collections.add(path.collection)
    if not block.asker.has_functions:
        return path, block.asker.ask(path)
    # Blocks are set aside: a selection must not depend on rewritten values.
    with thread.only(()):
        return path, block.asker.ask(path)


def _note(block: Block, root: Root, answered: Sequence[Facts], read: bool) -> None:
    """Notes that the running trace, which JAX may keep, depends on some answers."""
    is_older, is_own = not _is_made_inside(block, root), False
    questions: list[Question] = []
    if is_older and block.tree is not None:
        questions.append(weakref.ref(root.tree))
    for question in answered:
        _, said = block.decisions[question]
        if block.asker.has_functions:
            questions.append(question)
        if read and said and block.rewrite.rule.token() is not None:
            questions.append(VALUES)
        # Each block makes a value of its own, outside of the trace.
        is_own |= is_older and bool(said) and block.rewrite.rule.acts_on == 'cotangents'
    if answered or questions:
        block.lease.note(questions, is_own)
        block.lease.number.history.had_effect |= block.took


def _is_made_inside(block: Block, root: Root) -> bool:
    """Whether a tree was made in a trace that began after the block was opened.

    The trace of a late rule does not know the one of the block.
    """
    for trace in tracing.kept_traces():
        if trace in (root.kept_trace, block.kept_trace):
            return trace == root.kept_trace != block.kept_trace
    return False


def note_all(block: Block, root: Root) -> None:
    """Notes all answers of a block, because a value that depends on them is read.

    Args:
        block: an open block.
        root: the tree of the value that is read. The tree keeps values computed from
            several variables, in this trace or in one around it.
    """
    if tracing.kept_trace() not in (block.kept_trace, root.kept_trace):
        _note(block, root, tuple(block.decisions), read=True)

"""Asks the filter of a block which variables it selects, and notes the answers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from flax.core.scope import in_filter

from flax_sg.engine.blocks import Block, Root, is_of_tree, thread
from flax_sg.engine.numbers import VALUES, Question, Variable
from flax_sg.filters.expressions import unknown_class
from flax_sg.filters.paths import Classes, Path
from flax_sg.internals import modules, tracing
from flax_sg.rules.rules import OVERWRITE_WITH_GRADIENT
from flax_sg.trees.variables import Key, inner_names


def wants(block: Block, collection: str) -> bool:
    """Whether a block looks at variables of this collection at all."""
    named = block.rewrite.collections
    if named == 'params':  # The common case, answered fast.
        return collection == 'params'
    return collection != OVERWRITE_WITH_GRADIENT and in_filter(named, collection)


def path_of(block: Block, root: Root, key: Key) -> Path:
    """Returns a variable's path, as the filter and the rule of a block see it."""
    question = _question(block, root, key)
    found = block.decisions.get(question)
    return _path(block, question) if found is None else found[0]


def answer(block: Block, root: Root, key: Key) -> tuple[Path, Any]:
    """Returns a variable's path, and the answer that the block's filter gave for it."""
    return block.decisions[_question(block, root, key)]


def _question(block: Block, root: Root, key: Key) -> Variable:
    classes = classes_of(root, key) if block.asker.asks_classes else None
    return root.tree is block.tree, key, classes, inner_names(key)


def _path(block: Block, question: Variable) -> Path:
    inside, key, classes, _ = question
    return Path.of(*key, block.owner_path if inside else (), classes)


def classes_of(root: Root, key: Key) -> Classes:
    """Returns the classes of the modules around a variable.

    The modules that run now decide: in each call a module may give the same name to a
    submodule of another class.
    """
    names, scope = Path.of(*key).variable.parts, thread.reader
    if scope is None or names[:-1][: len(scope)] != scope:
        scope = names[:-1]
    in_tree = functools.partial(is_of_tree, root=root)
    return Classes(*modules.classes_around(scope, names[len(scope)], in_tree))


def selects(
    block: Block,
    root: Root,
    key: Key,
    read: bool = True,
    noted: bool = False,
) -> Any:
    """Returns whether a block selects a variable.

    The filter is asked once for each variable. If JAX may cache the running trace, and
    the block was opened outside of this trace, the answer goes into the table of
    answers.

    Args:
        block: an open block, or a reopened one.
        root: the tree of the variable.
        key: the variable.
        read: whether the variable is being read.
        noted: whether the running trace may depend on the answer without a read.

    Returns:
        A bool, or a ``Part``. None if the answer depends on a class that is not known,
        and ``read`` and ``noted`` are both False.

    Raises:
        FilterTypeError: if that class is not known, and ``read`` or ``noted`` is True.
    """
    question = _question(block, root, key)
    found = block.decisions.get(question)
    if found is None:
        found = block.decisions[question] = _decide(block, _path(block, question))
    path, said = found
    if said is None and (read or noted):
        raise unknown_class(block.rewrite.where, path)
    if read:
        block.reads.add(key)
        block.took = block.took or bool(said)
    in_program = block.kept_trace != tracing.kept_trace()
    if in_program and (read or noted):
        _note(block, root, [question], read)
    elif not in_program and (read or root.kept_trace == block.kept_trace):
        block.beside.add(key)
    return said


def _decide(block: Block, path: Path) -> tuple[Path, Any]:
    block.collections.add(path.collection)
    if not block.asker.has_functions:
        return path, block.asker.ask(path)
    # Blocks are set aside: a selection must not depend on rewritten values.
    with thread.only(()):
        return path, block.asker.ask(path)


def _note(block: Block, root: Root, answered: Iterable[Variable], read: bool) -> None:
    """Notes that the running trace, which JAX may keep, depends on some answers."""
    is_older, is_own = not _is_made_inside(block, root), False
    questions: list[Question] = []
    for question in answered:
        _, said = block.decisions[question]
        if is_older and block.tree is not None:
            tree = block.tree if question[0] else root.tree
            questions.append(weakref.ref(tree))
        if block.asker.has_functions:
            questions.append(question)
        if read and said and block.rewrite.rule.token() is not None:
            questions.append(VALUES)
        # Each block makes a value of its own, outside of the trace.
        is_own |= is_older and bool(said) and block.rewrite.rule.acts_on == 'cotangents'
    block.lease.note(questions, is_own)


def _is_made_inside(block: Block, root: Root) -> bool:
    """Whether a tree was made in a trace that began after the block was opened."""
    outwards = tracing.kept_traces()  # The second search begins where the first ends.
    return root.kept_trace in outwards and block.kept_trace in outwards


def note_all(block: Block, root: Root) -> None:
    """Notes all answers of a block, because a value that depends on them is read.

    Args:
        block: an open block.
        root: the tree of the value that is read. The tree keeps values computed from
            several variables, in this trace or in one around it.
    """
    if tracing.kept_trace() not in (block.kept_trace, root.kept_trace):
        _note(block, root, tuple(block.decisions), read=True)

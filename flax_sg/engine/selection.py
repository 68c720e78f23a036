"""Asks the filter of a block which variables it selects, and notes the answers."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from flax.core.scope import in_filter

from flax_sg.engine.blocks import Block, Decided, Root, Tree, is_of_tree, thread
from flax_sg.engine.cache_keys import Older
from flax_sg.engine.programs import running
from flax_sg.filters.expressions import unknown_class
from flax_sg.filters.paths import Classes, Path
from flax_sg.internals import modules, tracing
from flax_sg.rules.rules import OVERWRITE_WITH_GRADIENT
from flax_sg.trees.variables import Key, inner_names, iter_leaf_keys


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


def _question(block: Block, root: Root, key: Key) -> Decided:
    classes = classes_of(root, key) if block.asker.asks_classes else None
    return root.tree is block.tree, key, classes, inner_names(key)


def _path(block: Block, question: Decided) -> Path:
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
        _note(block, root, key, path, said)
        if read and said:
            block.number.token = block.rewrite.rule.token()
    elif not in_program and (read or not root.noted[0]):
        block.beside.add(key)
    return said


def _decide(block: Block, path: Path) -> tuple[Path, Any]:
    block.collections.add(path.collection)
    if not block.asker.has_functions:
        return path, block.asker.ask(path)
    # Blocks are set aside: a selection must not depend on rewritten values.
    with thread.only(()):
        return path, block.asker.ask(path)


def _note(block: Block, root: Root, key: Key, path: Path, said: Any) -> None:
    question = path
    if not _is_made_inside(block, root):
        question = _older(block, root.tree, key, path)
    # A rule of ``jax.custom_vjp`` asks after its block has closed. Its answers belong
    # to the trace in which the block was open, too.
    for number in (block.number, block.home):
        if number is None:
            continue
        number.note(block.asker, question, late=number is block.home)
    if not root.initializing:
        note_tree(block, root)
    listed = path.classes is None and key in root.noted[1]
    kind = len(block.outer), bool(said)
    running.note_read((key, path.classes), kind, _is_foreign(block, root), listed)


def _older(block: Block, tree: Tree | None, key: Key, path: Path) -> Older:
    has_owner = block.owner_path and tree is not None
    ref = weakref.ref(tree) if has_owner else None
    return Older(ref, key, path.classes, inner_names(key))


def note_tree(block: Block, root: Root) -> None:
    """Notes the variables of a tree, for the programs that are being traced."""
    now = thread.blocks[-1].stamp.serial
    if root.noted[0] == now:
        return
    keys = tuple(
        key
        for above, collections in root.parts
        for collection, tree in collections.items()
        for key in iter_leaf_keys((collection, above), tree)
    )
    root.noted = now, frozenset(keys)
    running.note_tree(keys, _is_foreign(block, root))


def _is_foreign(block: Block, root: Root) -> bool:
    return block.tree is not None and block.tree is not root.tree


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
    if tracing.kept_trace() in (block.kept_trace, root.kept_trace):
        return
    for (inside, key, *_), (path, said) in list(block.decisions.items()):
        tree = block.tree if inside else None
        block.number.note(block.asker, _older(block, tree, key, path))
        if said:
            block.number.token = block.rewrite.rule.token()

"""Recognizes values that were read in a block, and are read again under another root.

A module may run a module as a function, on what it has read::

    nn.Dense(4, parent=None).apply(self.dense.variables, x)

The variables are then read twice in the blocks around, as ``dense/kernel`` and as
``kernel``. The first answer of a block's filter holds. JAX's functions give other
objects to what they trace, so there the values cannot be recognized. If their names and
shapes are those of variables that the module has read, and the second answer would
change a gradient, the read raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from flax_sg import errors
from flax_sg.engine import selection
from flax_sg.engine.blocks import Block, Root, Tree, root_of
from flax_sg.internals import modules, tracing
from flax_sg.trees.variables import Key, iter_variables, leaf_keys

_KINDS = (jax.Array, tracing.Tracer, np.ndarray)
_MANY = 4096


class _Tree(NamedTuple):
    """A tree of variables that was given to the user's code.

    Attributes:
        tree, kept_trace: the ``apply`` that it belongs to, and the trace of the read.
        leaves: for each leaf its shape and dtype, and whether it is selected.
    """

    tree: Tree
    kept_trace: Any
    leaves: dict[Key, tuple[tuple[Any, Any], bool]]


def note(blocks: Sequence[Block], root: Root, value: Any, whole: bool = False) -> None:
    """Notes what the readers of a variable see.

    Args:
        blocks: the open blocks.
        root: the tree of the variable.
        value: what is seen.
        whole: whether the reader got a whole tree of variables.
    """
    for leaf in jax.tree.leaves(value):
        if isinstance(leaf, _KINDS):
            for block in blocks:
                block.given[id(leaf)] = weakref.ref(leaf), root.tree, whole
                if not len(block.given) % _MANY:
                    known = block.given.items()
                    block.given = {i: g for i, g in known if g[0]() is not None}


def note_tree(
    blocks: Sequence[Block], root: Root, path: tuple[str, ...], variables: Any
) -> None:
    """Notes a tree of variables that the user's code gets."""
    note(blocks, root, variables, whole=True)
    kept = tracing.kept_trace()
    for block in blocks:
        leaves = {
            key: (_kind(leaf), bool(selection.answer(block, root, key)[1]))
            for collection, tree in variables.items()
            if selection.wants(block, collection)
            for key, leaf in _leaves((collection, path), tree)
        }
        if len(block.given_trees) < _MANY:
            block.given_trees[root.tree, path] = _Tree(root.tree, kept, leaves)


def is_given(block: Block, root: Root, value: Any) -> bool:
    """Whether a block has given a variable's value to a reader of another tree."""
    leaves = jax.tree.leaves(value) if block.given else ()
    return bool(leaves) and all(_is_given(block, root, leaf) for leaf in leaves)


def _is_given(block: Block, root: Root, leaf: Any) -> bool:
    if id(leaf) not in block.given:
        return False
    ref, tree, whole = block.given[id(leaf)]
    # The caller may give one array to two calls of ``apply``.
    if ref() is not leaf or tree is root.tree or tree.has_ended:
        return False
    # JAX may find a program again that has read an array, and was given none.
    if not isinstance(leaf, tracing.Tracer) and block.kept_trace != root.kept_trace:
        return False
    return whole or any(
        root_of(scope).tree is tree for scope in modules.running_scopes()
    )


def check(block: Block, root: Root, key: Key) -> None:
    """Raises if a selected variable may be one that was read before.

    Args:
        block: an open block that selects the variable.
        root: the tree of the variable.
        key: the variable.
    """
    repeats = not block.rewrite.rule.idempotent
    for given in block.given_trees.values():
        if given.tree is root.tree or given.tree.has_ended:
            continue
        if given.kept_trace == root.kept_trace:
            continue
        before = _same(given, root, key)
        if before is not None and (repeats or not given.leaves[before][1]):
            _refuse(block, key, before)


def _same(given: _Tree, root: Root, key: Key) -> Key | None:
    """Returns the variable of a given tree that a variable may be."""
    above, variables = root.parts[0]
    depth = len(above)
    kinds = {
        name[depth:]: _kind(leaf)
        for (_, name), leaf in _leaves((key[0], above), variables.get(key[0], {}))
    }
    name = key[1][depth:]
    for collection, path in given.leaves:
        top = path[: len(path) - len(name)]
        if (collection, path) == (key[0], top + name) and all(
            given.leaves.get((collection, top + names), (None,))[0] == kind
            for names, kind in kinds.items()
        ):
            return collection, path
    return None


def _leaves(key: Key, tree: Any) -> Iterator[tuple[Key, Any]]:
    for variable, value in iter_variables(key, tree):
        yield from zip(leaf_keys(variable, value), jax.tree.leaves(value), strict=True)


def _kind(leaf: Any) -> tuple[Any, Any]:
    return getattr(leaf, 'shape', None), getattr(leaf, 'dtype', None)


def _refuse(block: Block, key: Key, before: Key) -> NoReturn:
    name, known = '/'.join(key[1]), '/'.join(before[1])
    raise errors.BlockError(
        f'{name!r} is read in a function that JAX traces, and may be {known!r}, which '
        'was read before.\n'
        f'{block.rewrite!r} would treat it as another variable, by its new name.\n'
        'Call the module itself, or call its apply without jax.jit, jax.checkpoint and '
        'the like.'
    )

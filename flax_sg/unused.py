"""A filter that selected nothing raises: the judgement at the end of an extent."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable
from typing import Any

from flax.core.scope import Scope

from flax_sg import _private, blocks, errors, filters, views

if '_passed' in globals():  # It was loaded before.
    raise errors.ReloadError(__name__)

# What was met under a context in extents that passed. Inside a compiled function no
# Python runs and nothing is met: an extent that meets no more than one that passed is
# one of those.
_passed: collections.OrderedDict[int, set[tuple[str, str, str]]] = (
    collections.OrderedDict()
)
_PASSED_SIZE = 1024


def check(block: blocks.Block, context: int, quiet: bool) -> None:
    """Raises if a part of the block's filter took no variable.

    Judged on all variables that exist under the extent, read or not.

    Args:
        block: a block that is about to close.
        context: the number of the blocks open up to this one.
        quiet: whether to say nothing, since the body has raised. What has passed is
            noted all the same: a program may have been compiled meanwhile.
    """
    if quiet or block.rewrite_value.unused == 'ignore':
        with contextlib.suppress(Exception):
            _check(block, context)
    else:
        _check(block, context)


def _check(block: blocks.Block, context: int) -> None:
    _meet_the_rest(block)
    passed = _passed.get(context)
    if passed is not None and passed.issuperset(block.decisions):
        return
    nothing_met = not block.decisions and not block.collections
    if block.owner is None and block.where.atoms and nothing_met:
        raise errors.NothingReadError(block.rewrite_value)
    _check_collections(block)
    _check_atoms(block)
    _passed.setdefault(context, set()).update(block.decisions)
    _passed.move_to_end(context)
    if len(_passed) > _PASSED_SIZE:
        _passed.popitem(last=False)


def _meet_the_rest(block: blocks.Block) -> None:
    """Lets the filter see the variables under the extent that nobody has read."""
    if block.owner is None:
        for known in list(blocks.thread.roots.values()):
            _meet(block, *known)
        return
    root = blocks.root_of(block.owner)
    _meet(block, root, block.owner.path, _private.stored(block.owner))
    block.collections.update(_private.stored(block.owner.root))


def _check_collections(block: blocks.Block) -> None:
    named = block.rewrite_value.collections
    if isinstance(named, str):
        named = (named,)
    for name in named if isinstance(named, Iterable) else ():
        # A module without parameters is nothing out of the ordinary.
        if name not in block.collections and name != 'params':
            raise errors.UnknownCollectionError(name, sorted(block.collections))


_TREES = (filters.BoolTree, filters.Names)


def _check_atoms(block: blocks.Block) -> None:
    met = [path for path, _ in block.decisions.values()]
    owner = None if block.owner is None else block.owner.path
    for atom in block.unmatched():
        if not (isinstance(atom, _TREES) or atom.may_be_empty):
            raise errors.UnusedFilterError(atom, met, owner)
    for atom in block.where.atoms:
        if isinstance(atom, _TREES) and (missing := atom.missing(met)):
            raise atom.misfit(missing, met)
    both = isinstance(block.where, filters.And) and not block.where.may_be_empty
    if both and not any(took for _, took in block.decisions.values()):
        raise errors.UnusedFilterError(block.where, met, owner)


def _asks_for_all(block: blocks.Block) -> bool:
    """Whether more is judged than that each part of the filter took something."""
    of_trees = any(isinstance(atom, _TREES) for atom in block.where.atoms)
    return of_trees or isinstance(block.where, filters.And)


def settle(scope: Scope) -> None:
    """Forgets a tree whose scope has become invalid."""
    if scope.parent is not None or blocks.ROOT_FLAG in scope.flags:
        return
    known = blocks.thread.roots.pop(id(_private.variables_of(scope)), None)
    if known is None:
        return
    for block in blocks.thread.blocks:
        _meet(block, *known)


def _meet(
    block: blocks.Block,
    root: views.Root,
    path: tuple[str, ...],
    variables: dict[str, Any],
) -> None:
    """Lets the filter see variables that nobody read, if it may have missed them."""
    block.collections.update(variables)
    if not block.unmatched() and not _asks_for_all(block):
        return
    for collection, tree in variables.items():
        if block.wants(collection):
            for key, _ in views.iter_variables((collection, path), tree):
                block.selects(root, key)

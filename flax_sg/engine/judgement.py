"""Checks, when an extent ends, that its filter matched something there.

Each pattern has to match a variable that exists under the extent, read or not.
Otherwise the pattern is a typo. Initialization creates variables one by one, so its
blocks are judged when the tree is complete. A ``with`` block warns if it rewrote
nothing that was read: perhaps what it names was computed a line before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from flax.core.scope import Scope

from flax_sg import errors, filters
from flax_sg.engine.blocks import ROOT_FLAG, Block, Root, root_of, thread
from flax_sg.engine.selection import selects, wants
from flax_sg.filters.expressions import find_unused
from flax_sg.filters.paths import Path
from flax_sg.internals import core_scopes, places
from flax_sg.trees.variables import iter_leaf_keys

_TREES = {filters.BoolTree, filters.Names}


def judge(block: Block, reads: bool) -> None:
    """Raises if a part of a block's filter matches no existing variable.

    A block that met no variable has run a program that JAX compiled before. A filter
    that was judged right at that time is right again.

    Args:
        block: a block that is about to close.
        reads: whether to warn if nothing that was read is rewritten.
    """
    if block.rewrite.unused == 'ignore':
        return
    _meet_the_rest(block)
    number, asker = block.number, block.asker
    met = block.decisions or block.collections
    is_new = met or number.is_blank or not number.was_right(asker)
    waits = is_new and _waits_for_existence(block)
    if is_new:
        number.use(asker, is_right=True)
    if reads and not waits:
        _check_reads(block)


def _waits_for_existence(block: Block) -> bool:
    """Raises if a pattern matches nothing; True if only ``settle`` can tell."""
    error = _unused(block, _compiled(block))
    if error is None:
        met = (path for path, _ in block.decisions.values())
        block.number.existing.update((path.key, path) for path in met)
        return False
    root = None if block.owner is None else root_of(block.owner)
    if root is None or not root.initializing:
        raise error
    # During initialization variables are still missing: ``settle`` judges later.
    root.pending.append((block, sys.exception()))
    return True


def _meet_the_rest(block: Block) -> None:
    """Asks the filter about the variables under the extent that nobody has read."""
    if block.owner is None:
        for known in list(thread.roots.values()):
            _meet(block, *known)
        return
    root = root_of(block.owner)
    _meet(block, root, block.owner.path, core_scopes.stored(block.owner))
    block.collections.update(core_scopes.stored(block.owner.root))


def _unused(block: Block, compiled: Sequence[Path] = ()) -> errors.FlaxSGError | None:
    """Returns the error for a name in a block that nothing under its extent has."""
    where, ask = block.rewrite.where, block.asker
    everything = [*(path for path, _ in block.decisions.values()), *compiled]
    owner = None if block.tree is None else block.owner_path
    matched = ask.matched_by(everything)
    both = isinstance(where, filters.And)
    any_taken = both and any(ask.ask(path) is not False for path in everything)
    error = find_unused(where, matched, everything, owner, any_taken)
    if block.collections:
        error = _unknown_collection(block) or error
    elif error and block.owner is None and not block.decisions and where.atoms:
        error = _nothing_read(block)
    if error:  # A traceback may show another line.
        error.add_note(f'From {block.rewrite!r}, opened at {block.place}.')
    return error


def _compiled(block: Block) -> Sequence[Path]:
    """Returns the variables of compiled programs that may have run in the block.

    A compiled program runs no Python, so the block meets none of its variables. A block
    that has read other variables ran something else, and is judged by those.
    """
    if block.number.is_blank:
        return ()  # Nothing was compiled.
    known = {key: path for key, (path, _) in block.number.answers.items()}
    if block.owner is None and block.number.was_right(block.asker):
        known |= block.number.existing  # An owner has met all variables of its own.
    for path, _ in block.number.older_as_seen_by(block.asker):
        if path is not None:
            known[path.key] = path
    met = (
        d[0].key for (_, key, *_), d in block.decisions.items() if key in block.reads
    )
    return list(known.values()) if known.keys() >= set(met) else ()


def _check_reads(block: Block) -> None:
    where, number = block.rewrite.where, block.number
    if block.rewrite.rule.refuses_writes or not where.atoms or where.may_be_empty:
        return
    if block.took or number.takes_any or thread.doubts is not None:
        return
    # ``train_only`` stops the rest, and a block may read only what it names.
    if isinstance(where, filters.Not) and (block.reads or not number.is_blank):
        return
    places.warn_without_effect(
        f'The block of {block.rewrite!r}, opened at {block.place}, had no effect: it '
        'selects nothing that was read in it.\n'
        'Open the block around the code that reads these variables, or pass '
        "unused='ignore'.",
        block.place,
    )


def settle(scope: Scope) -> None:
    """Forgets a tree whose scope has become invalid, and judges the waiting blocks."""
    if scope.parent is not None or ROOT_FLAG in scope.flags:
        return
    known = thread.roots.pop(id(core_scopes.variables_of(scope)), None)
    if known is None:
        return
    for block in thread.blocks:
        _meet(block, *known)
    root, path, variables = known
    pending, root.pending[:] = list(root.pending), []
    for block, handled in pending:
        # If the body raised, its own exception is shown instead.
        if sys.exception() is handled:
            _meet(block, root, path, variables)
            if error := _unused(block):
                raise error


def _meet(
    block: Block, root: Root, path: tuple[str, ...], variables: dict[str, Any]
) -> None:
    """Asks the filter about variables that nobody read, if it may have missed them."""
    block.collections.update(variables)
    # What ``init`` makes need not be read, and nothing is differentiated by it.
    block.took = block.took or root.initializing
    where = block.rewrite.where
    paths = [path for path, _ in block.decisions.values()]
    is_met = len(block.asker.matched_by(paths)) == len(where.atoms)
    # Judging these takes more than a match for each of their parts.
    judges_all = isinstance(where, filters.And) or where.kinds & _TREES
    if is_met and not judges_all:
        return
    for collection, tree in variables.items():
        if wants(block, collection):
            for key in iter_leaf_keys((collection, path), tree):
                # The filter was asked at the read; by now the classes are unknown.
                if block.asker.asks_classes and key in block.reads:
                    continue
                owner = block.owner_path if block.tree is root.tree else ()
                if key[1][: len(owner)] == owner:
                    selects(block, root, key, read=False)


def _unknown_collection(block: Block) -> errors.UnusedFilterError | None:
    """Returns the error for a named collection that does not exist, if any."""
    named = block.rewrite.collections
    names = (named,) if isinstance(named, str) else named
    for name in names if isinstance(names, Iterable) else ():
        # Many modules have no parameters, so a missing 'params' is no mistake.
        if name not in block.collections and name != 'params':
            known = ', '.join(map(repr, sorted(block.collections)))
            return errors.UnusedFilterError(
                f'no collection {name!r} exists under this extent; there are {known}.\n'
                "Name one of these, or pass unused='ignore' if it may be absent.",
            )
    return None


def _nothing_read(block: Block) -> errors.UnusedFilterError:
    """Returns the error for a block at top level in which no variable was read."""
    return errors.UnusedFilterError(
        f'{block.rewrite!r} did nothing: no variable of a Flax module was read in its '
        'block.\n'
        'Open the block around jax.grad or model.apply: it cannot reach results of '
        'jax.vjp and programs that were compiled before it.\n'
        'For a tree of parameters write sg.stop_gradient(tree, where). If nothing may '
        "be read here, pass unused='ignore'."
    )

"""Checks, when a block ends, that its filter matched something there.

Each pattern has to match a variable that exists in the block, read or not.
Otherwise the pattern is a typo. Initialization creates variables one by one, so its
blocks are judged when the tree is complete. A ``with`` block warns if it rewrote
nothing that was read: perhaps what it names was computed a line before.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from flax.core.scope import Scope

from flax_sg import errors, filters
from flax_sg.engine import cache_keys
from flax_sg.engine.blocks import ROOT_FLAG, Block, Root, root_of, thread
from flax_sg.engine.programs import Stamp, running, variables_of, with_callees
from flax_sg.engine.selection import note_tree, selects, wants
from flax_sg.filters.expressions import find_unused
from flax_sg.filters.paths import Path
from flax_sg.internals import core_scopes
from flax_sg.internals.places import warn_once
from flax_sg.trees.variables import iter_leaf_keys


class Verdict(NamedTuple):
    """What is to be said of a block.

    Attributes:
        error: a part of its filter means nothing that exists; None if it is right.
        is_certain: whether to raise. If not, a program that ran may have what is meant.
    """

    error: errors.FlaxSGError | None = None
    is_certain: bool = True


def judge(block: Block, reads: bool) -> None:
    """Raises if a part of a block's filter matches no existing variable.

    Args:
        block: a block that is about to close.
        reads: whether to warn if nothing that was read is rewritten.
    """
    if block.rewrite.unused == 'ignore':
        return
    _meet_the_rest(block)
    error, is_certain = verdict(block)
    root = None if block.owner is None else root_of(block.owner)
    if error and root is not None and root.initializing:
        # During initialization variables are still missing: ``settle`` judges later.
        root.pending.append((block, sys.exception()))
    elif error and is_certain:
        raise error
    elif error:
        warn_once(str(error), block.place)
    else:
        block.number.existing |= {key for _, key, *_ in block.decisions}
        for stamp in (*block.used, *block.found.values()):
            stamp.beside |= block.beside
        if reads and _has_no_effect(block):
            warn_once(_no_effect(block), block.place)


def verdict(block: Block) -> Verdict:
    """Judges a block by the variables that it met, and by what its programs had read.

    A program that JAX finds in a cache runs no Python, so its block meets none of its
    variables. If a block has met variables and takes none of them, what it has found is
    a poor excuse: JAX also finds small programs that other models have traced.
    """
    stamps = block.found.values()
    own = with_callees(stamps, all_of_them=False)
    if own and not block.decisions:
        if _is_right(block, own):
            return Verdict()
        error = _unused(block, list(_ran(block, own)))
        return Verdict(error, not _is_right(block, with_callees(stamps)))
    met = list({path.key: path for path, _ in block.decisions.values()}.values())
    error = _unused(block, met)
    if error is None or not own:
        return Verdict(error)
    if block.tree is not None:
        return Verdict(None if _is_right(block, own, met) else error)
    keys = {key for _, key, *_ in block.decisions}
    if any(keys <= stamp.beside for stamp in stamps):
        return Verdict()  # As in an earlier block, when the program was traced.
    if not _is_right(block, with_callees(stamps), met):
        return Verdict(error)
    return Verdict(_beside(error), not keys <= block.number.existing)


def _is_right(block: Block, stamps: Sequence[Stamp], met: Sequence[Path] = ()) -> bool:
    """Whether each part of a filter matches what was met, or what programs had read."""
    table, sure = block.number.right, block.asker.sure
    key = sure, tuple(stamp.serial for stamp in stamps)
    if sure is not None and not met and key in table:
        return True
    where = block.rewrite.where
    if not _judges_all(where):
        matched = block.asker.matched_by(itertools.chain(met, _ran(block, stamps)))
        is_right = len(matched) == len(where.atoms)
    else:
        is_right = _unused(block, [*met, *_ran(block, stamps)]) is None
    if sure is not None and not met and is_right:
        cache_keys.put_last(table, key, None)
    return is_right


def _ran(block: Block, stamps: Sequence[Stamp]) -> Iterator[Path]:
    """Yields the variables of cached programs that ran in a block."""
    paths = variables_of(stamps, foreign=block.tree is not None)
    return (path for path in paths if wants(block, path.collection))


def _meet_the_rest(block: Block) -> None:
    """Asks the filter about the variables in the block that nobody has read."""
    if block.owner is None:
        for known in list(thread.roots.values()):
            _meet(block, *known)
        return
    root = root_of(block.owner)
    _meet(block, root, block.owner.path, core_scopes.stored(block.owner))
    block.collections.update(core_scopes.stored(block.owner.root))


def _unused(block: Block, paths: Sequence[Path]) -> errors.FlaxSGError | None:
    """Returns the error for a name in a block that none of some variables has."""
    where, ask = block.rewrite.where, block.asker
    owner = None if block.tree is None else block.owner_path
    matched = ask.matched_by(paths)
    both = isinstance(where, filters.And)
    any_taken = both and any(ask.ask(path) is not False for path in paths)
    error = find_unused(where, matched, paths, owner, any_taken)
    if block.collections:
        error = _unknown_collection(block) or error
    elif error and block.tree is None and not paths and where.atoms:
        error = _nothing_read(block)
    if error:  # A traceback may show another line.
        error.add_note(f'From {block.rewrite!r}, opened at {block.place}.')
    return error


def _has_no_effect(block: Block) -> bool:
    """Whether nothing that was read in a block is rewritten."""
    where = block.rewrite.where
    if not where.atoms or where.may_be_empty or block.rewrite.rule.acts_on == 'writes':
        return False
    if block.took or thread.doubts is not None:
        return False
    beside = [s for s in block.found.values() if block.reads <= s.beside]
    kinds = {
        is_selected
        for stamp in with_callees(beside, all_of_them=False)
        for (depth, is_selected), (_, is_foreign) in stamp.hints.items()
        if depth == len(block.outer) and (is_foreign or block.tree is None)
    }
    # ``train_only`` stops the rest, and a block may read only what it names.
    has_read = block.reads or kinds
    return True not in kinds and not (isinstance(where, filters.Not) and has_read)


def _no_effect(block: Block) -> str:
    return (
        f'The block of {block.rewrite!r}, opened at {block.place}, had no effect: it '
        'selects nothing that was read in it.\n'
        'Open the block around the code that reads these variables, or pass '
        "unused='ignore'."
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
    root.tree.has_ended = True
    if thread.blocks:
        note_tree(thread.blocks[-1], root)
        running.renew()
    pending, root.pending[:] = list(root.pending), []
    for block, handled in pending:
        # If the body raised, its own exception is shown instead.
        if sys.exception() is handled:
            _meet(block, root, path, variables)
            error, is_certain = verdict(block)
            if error and is_certain:
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
    if is_met and not _judges_all(where):
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


def _judges_all(where: filters.Filter) -> bool:
    """Whether judging a filter takes more than a match for each of its parts."""
    return isinstance(where, filters.And) or 'names' in where.needs


def _unknown_collection(block: Block) -> errors.UnusedFilterError | None:
    """Returns the error for a named collection that does not exist, if any."""
    named = block.rewrite.collections
    names = (named,) if isinstance(named, str) else named
    for name in names if isinstance(names, Iterable) else ():
        # Many modules have no parameters, so a missing 'params' is no mistake.
        if name not in block.collections and name != 'params':
            known = ', '.join(map(repr, sorted(block.collections)))
            fix = "Name one of these, or pass unused='ignore' if it may be absent."
            if block.rewrite.rule.brings and names is named:
                fix = "Name one of these: collections on top, {'params': tree}."
            return errors.UnusedFilterError(
                f'no collection {name!r} exists in this block; there are {known}.\n'
                f'{fix}'
            )
    return None


def _beside(error: errors.FlaxSGError) -> errors.FlaxSGError:
    """Returns the error for a block whose programs may have what it does not read."""
    [text] = error.args
    return type(error)(
        f'{text}\nA program that was compiled before also ran in the block. If it has '
        'what is meant, open a block for each of the two models.'
    )


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

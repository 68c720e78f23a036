"""What is judged at the end of an extent: that its filter means something there.

Each pattern has to match a variable that exists under the extent, read or not: or it
is a typo. At initialization variables come one by one, so that is judged when the tree
is complete. A ``with`` block in which nothing was rewritten that was read warns: what
it names was computed a line before, perhaps.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from flax.core.scope import Scope

from flax_sg import errors, filters
from flax_sg.engine import places
from flax_sg.engine.blocks import ROOT_FLAG, Block, Root, root_of, thread
from flax_sg.engine.selection import selects, wants
from flax_sg.engine.variables import iter_leaf_keys
from flax_sg.filters.asking import find_unused, kinds_of, may_be_empty
from flax_sg.filters.paths import Path
from flax_sg.internals import core_scopes

_TREES = {filters.BoolTree, filters.Names}


def judge(block: Block, reads: bool) -> None:
    """Raises if a part of a block's filter matches no variable that exists.

    Where the block has met no variable, a program has run that JAX compiled before. A
    filter that was judged right then is right again.

    Args:
        block: a block that is about to close.
        reads: whether to warn if nothing that was read is rewritten.
    """
    if block.rewrite.unused == 'ignore':
        return
    _meet_the_rest(block)
    where, number = block.rewrite.where, block.number
    met = block.decisions or block.collections
    if met or number.is_blank or not number.was_right(where):
        _check_existence(block)
    number.use(where, is_right=True)
    if reads:
        _check_reads(block)


def _check_existence(block: Block) -> None:
    try:
        if block.collections:
            _check_collections(block)
        _check_atoms(block, _compiled(block))
    except (errors.UnusedFilterError, errors.FilterValueError) as error:
        nothing_met = not block.decisions and not block.collections
        if nothing_met and block.owner is None and block.rewrite.where.atoms:
            raise _nothing_read(block.rewrite) from None
        root = None if block.owner is None else root_of(block.owner)
        if root is None or not root.initializing or root.scratch:
            raise
        # At initialization it is judged when the tree is complete.
        root.pending.append(_Pending(block, error.__context__))
    else:
        met = (path for path, _ in block.decisions.values())
        block.number.existing.update((path.key, path) for path in met)


def _meet_the_rest(block: Block) -> None:
    """Lets the filter see the variables under the extent that nobody has read."""
    if block.owner is None:
        for known in list(thread.roots.values()):
            _meet(block, *known)
        return
    root = root_of(block.owner)
    _meet(block, root, block.owner.path, core_scopes.stored(block.owner))
    block.collections.update(core_scopes.stored(block.owner.root))


def _check_collections(block: Block) -> None:
    named = block.rewrite.collections
    if isinstance(named, str):
        named = (named,)
    for name in named if isinstance(named, Iterable) else ():
        # A module without parameters is nothing out of the ordinary.
        if name not in block.collections and name != 'params':
            raise _unknown_collection(name, sorted(block.collections))


def _check_atoms(block: Block, compiled: Sequence[Path] = ()) -> None:
    where, ask = block.rewrite.where, block.asker
    everything = [*(path for path, _ in block.decisions.values()), *compiled]
    owner = None if block.tree is None else block.owner_path
    matched = ask.matched_by(everything)
    both = isinstance(where, filters.And)
    any_taken = both and any(ask.ask(path) is not False for path in everything)
    if error := find_unused(where, matched, everything, owner, any_taken):
        error.add_note(f'Raised for {block.rewrite!r}, opened at {block.place}.')
        raise error


def _judges_all(where: filters.Filter) -> bool:
    """Whether more is judged than that each part of a filter took something."""
    return isinstance(where, filters.And) or bool(kinds_of(where) & _TREES)


def _compiled(block: Block) -> Sequence[Path]:
    """The variables in programs that JAX has compiled, and may have run in the block.

    In these no Python runs, and nothing is met. A block that has met others has run
    something else, and is judged by that.
    """
    if block.number.is_blank:
        return ()  # Nothing was compiled.
    known = {path.key: path for path in block.number.paths}
    if block.owner is None and block.number.was_right(block.rewrite.where):
        known |= block.number.existing  # An owner has met all variables of its own.
    for tree, key, classes, _ in list(block.number.in_older_trees):
        path = block.asker.path_in(tree, key, classes)
        if path is not None:
            known[path.key] = path
    met = (
        d[0].key for (_, key, *_), d in block.decisions.items() if key in block.reads
    )
    return list(known.values()) if known.keys() >= set(met) else ()


def _check_reads(block: Block) -> None:
    where, number = block.rewrite.where, block.number
    if block.rewrite.rule.refuses_writes or not where.atoms or may_be_empty(where):
        return
    if block.took or number.takes_any or thread.doubts is not None:
        return
    if _is_pending(block):
        return
    if all(isinstance(a, filters.BoolTree) and a.takes_nothing for a in where.atoms):
        return
    # What ``train_only`` names may be all that is read.
    if isinstance(where, filters.Not) and (block.reads or not number.is_blank):
        return
    places.warn_without_effect(
        f'The block of {block.rewrite!r}, opened at {block.place}, had no effect: it '
        'selects nothing that was read in it.\n'
        'Open the block around the code that reads these variables, or pass '
        "unused='ignore'.",
        block.place,
    )


def _is_pending(block: Block) -> bool:
    if block.owner is None:
        return False
    return any(waiting.block is block for waiting in root_of(block.owner).pending)


@dataclasses.dataclass
class _Pending:
    """What is judged when a tree is complete.

    Attributes:
        block: a block that is closed, and has not found all that it names.
        handled: the exception that was being handled then.
    """

    block: Block
    handled: BaseException | None


def settle(scope: Scope) -> None:
    """Forgets a tree whose scope has become invalid, and judges what has waited."""
    if scope.parent is not None or ROOT_FLAG in scope.flags:
        return
    known = thread.roots.pop(id(core_scopes.variables_of(scope)), None)
    if known is None:
        return
    for block in thread.blocks:
        _meet(block, *known)
    root, path, variables = known
    pending, root.pending[:] = list(root.pending), []
    for waiting in pending:
        # An exception in the body goes first.
        if sys.exception() is waiting.handled:
            _meet(waiting.block, root, path, variables)
            _check_collections(waiting.block)
            _check_atoms(waiting.block)


def _meet(
    block: Block, root: Root, path: tuple[str, ...], variables: dict[str, Any]
) -> None:
    """Lets the filter see variables that nobody read, if it may have missed them."""
    block.collections.update(variables)
    where = block.rewrite.where
    paths = [path for path, _ in block.decisions.values()]
    is_met = len(block.asker.matched_by(paths)) == len(where.atoms)
    if is_met and not _judges_all(where):
        return
    for collection, tree in variables.items():
        if wants(block, collection):
            for key in iter_leaf_keys((collection, path), tree):
                # By then nobody knows the classes around what was read.
                if block.asker.asks_classes and key in block.reads:
                    continue
                if block.tree is not root.tree or _is_below(key[1], block.owner_path):
                    selects(block, root, key, read=False)


def _is_below(names: tuple[str, ...], path: tuple[str, ...]) -> bool:
    return names[: len(path)] == path


def _unknown_collection(name: str, known: Sequence[str]) -> errors.UnusedFilterError:
    """A collection was named that does not exist under the extent."""
    return errors.UnusedFilterError(
        f'no collection {name!r} exists under this extent; there are '
        f'{", ".join(map(repr, known)) or "none"}.\n'
        "Name one of these, or pass unused='ignore' if it may be absent.",
    )


def _nothing_read(rewrite: object) -> errors.UnusedFilterError:
    """No variable was read in a block at top level."""
    return errors.UnusedFilterError(
        f'{rewrite!r} held for a block in which no variable of a Flax module was '
        'read, so it did nothing.\n'
        'Open the block around the code that calls the model (jax.grad or '
        'model.apply): results of jax.vjp and compiled programs made before it are '
        "out of its reach. If nothing may be read here, pass unused='ignore'.",
    )

"""Checks, when a block ends, that its filter matched something there.

Each pattern has to match a variable that exists in the block, read or not.
Otherwise the pattern is a typo. Initialization creates variables one by one, so its
blocks are judged when the tree is complete. A ``with`` block warns if it rewrote
nothing that was read: perhaps what it names was computed a line before.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence, Set
from typing import Any

from flax_sg import errors, filters
from flax_sg.engine.blocks import Block, root_of, thread
from flax_sg.engine.roots import IdlePart, Root
from flax_sg.engine.selection import leave_out, selects, wants
from flax_sg.filters.paths import Path
from flax_sg.filters.unused import find_unused
from flax_sg.internals import core_scopes
from flax_sg.internals.places import warn_once
from flax_sg.internals.types import is_meant
from flax_sg.trees.variables import iter_leaf_keys


def judge(block: Block, reads: bool) -> None:
    """Raises if a part of a block's filter matches no existing variable.

    Args:
        block: a block that is about to close.
        reads: whether to warn if nothing that was read is rewritten.
    """
    if block.rewrite.unused == 'ignore':
        return
    root = None if block.owner is None else root_of(block.owner)
    if root is not None and _is_for_an_inner_program(block, root):
        raise _only_inside(block)
    _meet_the_rest(block)
    error = verdict(block)
    if error and root is not None:
        _meet_state(block, root)
        error = verdict(block)
    if not error:
        _leave_right(block, root, reads)
    elif root is not None and root.initializing:
        # During initialization variables are still missing: ``settle`` judges later.
        root.pending.append((block, sys.exception()))
    elif is_certain(block):
        block.lease.discard()
        raise error
    else:
        warn_once(_perhaps(error), block.place)


def _leave_right(block: Block, root: Root | None, reads: bool) -> None:
    """Leaves the verdict with the number, and warns of what has selected nothing."""
    history = block.lease.number.history
    if not block.lease.is_blank:
        history.untraced |= block.untraced
    block.effective |= history.effective
    waiting: list[IdlePart] | None = None
    if root is not None and block.asker.is_list and block.effective:
        # Blocks of one list may each read a part of it: ``settle`` tells.
        shape = block.rewrite.where.shape
        effective, waiting = root.lists.setdefault(shape, (set(), []))
        effective |= block.effective
    for where in _idle(block) if reads else ():
        part = IdlePart(where, _no_effect(block, where), block.place)
        if waiting is None:
            warn_once(part.text, part.place)
        else:
            waiting.append(part)


def _is_for_an_inner_program(block: Block, root: Root) -> bool:
    """Whether a block is for an inner ``apply`` alone, in a function of ``jax.jit``.

    JAX keeps the program, in which the block does nothing. A call at top level would
    get it, where the block covers this ``apply``.
    """
    return (
        not block.effective
        and block.kept_trace != root.kept_trace
        and _is_meant_inside(block, set())
    )


def _is_meant_inside(block: Block, matched: set[filters.Filter]) -> bool:
    """Whether the filter means a variable of an inner ``apply``, as at top level.

    Args:
        block: the block.
        matched: gets the atoms that mean one of them.
    """
    meant = False
    for collection, names, inner, array in block.uncovered:
        path = Path.of(collection, names, (), inner, array)
        # A function may raise for variables that its block does not cover.
        with contextlib.suppress(Exception):
            meant |= is_meant(block.asker.ask(path, matched))
    return meant


def leave_unjudged(block: Block) -> None:
    """Lets the next block trace anew what a block has traced whose body raised.

    If all that its filter names was met by then, it was right.
    """
    is_judged = block.rewrite.unused != 'ignore' and block.tree is None
    if is_judged and block.lease.is_new and verdict(block):
        block.lease.discard()


def verdict(block: Block) -> errors.FlaxSGError | None:
    """Returns the error for a part of the filter that means nothing that was met.

    If JAX finds a program, no Python runs, and the block does not meet its variables.
    It meets nothing at all then, or what an earlier block has met outside of programs.
    So the same programs have run, and the verdict on the earlier block holds.
    """
    untraced = block.lease.number.history.untraced
    if not is_certain(block) and block.decisions.keys() <= untraced:
        return None
    decisions, matched = block.decisions, block.matched
    if (state_block := _holding_state(block)) is not None:
        decisions = decisions | state_block.decisions
        matched = matched | state_block.matched
    return _unused(block, [path for path, _ in decisions.values()], matched)


def _holding_state(block: Block) -> Block | None:
    """The block by which the wrapper of a block holds state, with the same filter.

    A name may be that of a layer without parameters, whose state alone is named.
    """
    if block.tree is not None and block.outer:
        around = block.outer[-1].rewrite
        holds = around.rule.acts_on == 'nothing'
        if holds and around.where is block.rewrite.where:
            return block.outer[-1]
    return None


def _meet_state(block: Block, root: Root) -> None:
    """Asks about state, which a filter need not know unless it names nothing else."""
    if (state_block := _holding_state(block)) is not None:
        for path, variables in root.parts:
            _meet(state_block, root, path, variables)


def is_certain(block: Block) -> bool:
    """Whether no compiled program can have what a block does not meet."""
    lease = block.lease
    # A block of another thread, with the same number, may have compiled one since.
    is_new = lease.is_new and not (lease.is_blank and lease.number.history.has_traces)
    return block.tree is not None or is_new


def _meet_the_rest(block: Block) -> None:
    """Asks the filter about the variables in the block that nobody has read."""
    if block.owner is None:
        for root in block.roots:
            # The body of a transform may give other names to the same variables.
            if block not in root.handed.covered:
                meet(block, root)
        return
    root = root_of(block.owner)
    _meet(block, root, block.owner.path, core_scopes.stored(block.owner))
    block.collections.update(core_scopes.stored(block.owner.root))


def _unused(
    block: Block, paths: Sequence[Path], matched: Set[filters.Filter]
) -> errors.FlaxSGError | None:
    """Returns the error for a name in a block that none of some variables has.

    Args:
        block: the block.
        paths: the variables.
        matched: the atoms of the filter that mean one of them.
    """
    where, asker = block.rewrite.where, block.asker
    owner = None if block.tree is None else block.owner_path
    # The names in ``a & b`` may all be there, and no variable match both.
    any_selected = isinstance(where, filters.And) and any(
        is_meant(asker.ask(path)) for path in paths
    )
    error = find_unused(where, matched, paths, owner, any_selected)
    if block.collections:
        error = _unknown_collection(block) or error
    elif error and block.tree is None and not paths and where.atoms:
        error = _nothing_read(block)
    if error and block.uncovered:
        either = set(matched)
        _is_meant_inside(block, either)
        if len(either) == len(where.atoms):
            error = _only_inside(block)
    if error:  # The traceback may end at another line, where a tree was complete.
        error.add_note(f'From {block.rewrite!r}, opened at {block.place}.')
    return error


def _idle(block: Block) -> list[filters.Filter]:
    """The filter of a block, or the parts of a list, that select nothing that was read.

    What need not select anything is left out.
    """
    where = block.rewrite.where
    if where == filters.Constant(True):
        is_idle = block.uncovered or _ran_no_module(block)
        return [where] if is_idle and not block.effective else []
    if thread.doubts is not None or block.rewrite.rule.acts_on == 'writes':
        return []
    if not block.effective:
        return [] if _may_be_idle(where) else [where]
    return [
        part
        for part in (where.parts if isinstance(where, filters.Or) else ())
        if not (_may_be_idle(part) or isinstance(part, filters.Not))
        and block.effective.isdisjoint(atom.shape for atom in part.atoms)
    ]


def _may_be_idle(where: filters.Filter) -> bool:
    """Whether a filter may select nothing that was read."""
    return not where.atoms or where.may_be_empty


def _ran_no_module(block: Block) -> bool:
    """Whether surely no module of linen ran in a block at top level."""
    is_empty = block.tree is None and not block.collections and is_certain(block)
    return is_empty and block.rewrite.rule.acts_on != 'writes'


def _no_effect(block: Block, idle: filters.Filter) -> str:
    is_inside = _is_meant_inside(block, set())
    if is_inside or not block.rewrite.where.atoms:
        error = _only_inside(block) if is_inside else _nothing_read(block)
        return f'{error}\nThe block was opened at {block.place}.'
    to_stop = 'To stop a value write jax.lax.stop_gradient(h). '
    stops = block.rewrite.rule.name == 'stop_gradient'
    part = '' if idle is block.rewrite.where else f'{idle!r} in '
    return (
        f'{part or "The block of "}{block.rewrite!r}, opened at {block.place}, had no '
        'effect: it selects nothing that was read in it. Was it read before the '
        'block?\n'
        f'{to_stop if stops else ""}'
        'Open the block around the code that reads these variables, or pass '
        "unused='ignore'."
    )


def meet(block: Block, root: Root, outside: bool = False) -> None:
    """Asks the filter of a block about the variables of a tree that nobody read."""
    for path, variables in root.parts if block.rewrite.unused != 'ignore' else ():
        _meet(block, root, path, variables, outside)


def settle(root: Root, handled: BaseException | None) -> None:
    """Lets open blocks meet a complete tree, and judges blocks that waited for it.

    Args:
        root: the tree, at the end of an ``init`` or an apply.
        handled: the exception that was being handled when it began. If another one is
            by now, its body has raised: then no error of a filter hides that one.
    """
    if sys.exception() is handled:
        for block in thread.blocks:
            meet(block, root)
    pending, root.pending[:] = list(root.pending), []
    for block, handled_then in pending:
        if sys.exception() is handled_then:
            meet(block, root)
            error = verdict(block)
            if error:  # ``init`` may have made a named variable outside of the owner.
                meet(block, root, outside=True)
                _meet_state(block, root)
            if error and verdict(block):
                block.lease.discard()
                raise error
    lists = [*root.lists.values()]
    root.lists.clear()
    for effective, waiting in lists if sys.exception() is handled else ():
        for part in waiting:
            if effective.isdisjoint(atom.shape for atom in part.where.atoms):
                warn_once(part.text, part.place)


def _meet(
    block: Block,
    root: Root,
    path: tuple[str, ...],
    variables: dict[str, Any],
    outside: bool = False,
) -> None:
    """Asks the filter about variables that nobody read, if it may have missed them.

    Args:
        block: the block.
        root: the tree of the variables.
        path: where they are in the tree.
        variables: the variables.
        outside: whether those outside of the block's owner count.
    """
    if not block.covers(root):
        for collection, tree in variables.items():
            leave_out(block, root, (collection, path), tree)
        return
    block.collections.update(variables)
    # Nothing is differentiated by what ``init`` makes, and in a tree without variables
    # there is nothing to read: neither deserves a warning.
    is_empty = block.tree is None and not variables
    if root.initializing or is_empty:
        block.effective.add(block.rewrite.where.shape)
        block.effective |= block.asker.listed
    if _has_met_all(block):
        return
    owner = block.owner_path if block.tree is root.tree else ()
    for collection, tree in variables.items():
        if wants(block, root, collection):
            for key in iter_leaf_keys((collection, path), tree):
                if outside or key[1][: len(owner)] == owner:
                    selects(block, root, key, read=False)


def _has_met_all(block: Block) -> bool:
    """Whether a filter has met all that it names, so that more changes no verdict."""
    where = block.rewrite.where
    if isinstance(where, filters.And) or 'names' in where.needs:
        return False
    return len(block.matched) == len(where.atoms)


def _unknown_collection(block: Block) -> errors.UnusedFilterError | None:
    """Returns the error for a named collection that does not exist, if any."""
    named = block.rewrite.collections
    names = (named,) if isinstance(named, str) else named
    for name in names if isinstance(names, Iterable) else ():
        # Many modules have no parameters, so a missing 'params' is no mistake.
        if name not in block.collections and name != 'params':
            met = ', '.join(map(repr, sorted(block.collections)))
            return errors.UnusedFilterError(
                f'no collection {name!r} exists in this block; there are {met}.\n'
                "Name one of these, or pass unused='ignore' if it may be absent."
            )
    return None


def _perhaps(error: errors.FlaxSGError) -> str:
    """Returns the warning for a name that only a compiled program can have."""
    return (
        f'{error}\nThe same filter matched before, so a compiled program may '
        'have these variables. If a second model runs in this block, open a block of '
        'its own for it.'
    )


def _only_inside(block: Block) -> errors.UnusedFilterError:
    """Returns the error for a name that only an inner ``apply`` has."""
    return errors.UnusedFilterError(
        f'{block.rewrite!r} names variables of an apply inside of another one.\n'
        'A block covers one tree: such an apply sees what the module around it gives '
        'it, computed or read.\n'
        'Stop what is given: apply(sg.stop_gradient(tree, where), x). Or open a block '
        'around that apply at top level.'
    )


def _nothing_read(block: Block) -> errors.UnusedFilterError:
    """Returns the error for a block at top level in which no variable was read."""
    return errors.UnusedFilterError(
        f'{block.rewrite!r} did nothing: no variable of a Flax module was read in its '
        'block.\n'
        'Open the block around jax.grad or model.apply: it cannot reach results of '
        'jax.vjp and programs that were compiled before it.\n'
        'For a tree of parameters write sg.stop_gradient(tree, where), for a model of '
        'NNX nnx.stop_gradient(model, where). If nothing may be read here, pass '
        "unused='ignore'."
    )

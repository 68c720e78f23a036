"""Opens and closes blocks, and raises if they close in the wrong order."""

from __future__ import annotations

import types
import weakref

from flax.core.scope import Scope

from flax_sg import errors
from flax_sg.engine import blocks, hooks, judgement, numbers, setup_values
from flax_sg.engine.blocks import Block, thread
from flax_sg.internals import patching, tracing
from flax_sg.internals.places import Place
from flax_sg.rules import rules

# Blocks are opened here alone, so whoever can open one has the hooks.
patching.install(hooks.HOOKS)
setup_values.look_at_what_is_older()

# The checks at the end of a block. EXISTENCE raises if a pattern matches no variable.
# READS also warns if no variable that was read is rewritten. NOTHING skips the checks.
READS, EXISTENCE, NOTHING = 'reads', 'existence', 'nothing'


def open_block(rewrite: rules.Rewrite, owner: Scope | None) -> Block:
    """Opens a block in this thread.

    Args:
        rewrite: the rule to apply in the block, and its filter.
        owner: the scope that paths are relative to; None for the root of each tree.

    Returns:
        The open block, for ``close_block``.
    """
    outer = blocks.active()
    if owner is not None:
        setup_values.keep_in_setup()
    path = () if owner is None else owner.path
    tree = None if owner is None else blocks.root_of(owner).tree
    asker = numbers.Asker(rewrite, path, None if tree is None else weakref.ref(tree))
    block = Block(
        rewrite=rewrite,
        outer=outer,
        owner=owner,
        owner_path=path,
        tree=tree,
        asker=asker,
        lease=numbers.Lease(thread.number, asker, numbers.NONE),
        depth=len(thread.applies),
        level=tracing.current_trace(),
        kept_trace=tracing.kept_trace(),
        place=Place.here(),
    )
    try:
        block.lease.find(lambda: thread.only(()))
        thread.set_blocks((*outer, block))
    except BaseException:
        blocks.remove(block)
        raise
    return block


def close_block(block: Block, judged: str = NOTHING) -> None:
    """Closes a block of this thread.

    Args:
        block: an open block. It is closed even if an error is raised.
        judged: the checks to run: ``READS`` or ``EXISTENCE`` if the body ran to its
            end, ``NOTHING`` if it raised.

    Raises:
        BlockError: if the body ran to its end, but an inner block is still open or
            another asyncio task opened ``block``.
    """
    before = thread.blocks
    try:
        in_order = before[-1] is block and block.place.is_in_this_task()
        if judged != NOTHING and in_order:
            judgement.judge(block, reads=judged == READS)
        else:
            judgement.leave_unjudged(block)
    finally:
        try:
            blocks.remove(block)
        except BaseException:  # Ctrl-C may have interrupted the first call.
            blocks.remove(block)
            raise
    if judged != NOTHING and not in_order:
        inner = before[-1]
        reason = f'the one opened at {inner.place} ({inner.rewrite!r}) is still open'
        if inner is block:
            reason = 'it was opened in another asyncio task'
        raise _wrong_order(block.rewrite, block.place, reason)


def close_last(
    rewrite: rules.Rewrite, exc_type: type[BaseException] | None = None
) -> None:
    """Closes the innermost block of this thread that was opened with ``rewrite``.

    Args:
        rewrite: the rewrite.
        exc_type: the type of the exception that ends the block, if any.

    Raises:
        BlockError: if ``rewrite`` is not open in this thread, and no exception other
            than GeneratorExit ends the block.
    """
    opened_here = [b for b in thread.blocks if b.rewrite is rewrite]
    if len(opened_here) > 1:  # One may be that of a suspended generator.
        opened_here = [
            b for b in opened_here if b.place.frame == Place.here().frame
        ] or opened_here
    if opened_here:
        return close_block(opened_here[-1], READS if exc_type is None else NOTHING)
    aside = [b for b in thread.aside if b.rewrite is rewrite and b.is_open]
    if aside:
        return blocks.remove(aside[-1])
    # Another exception of the body is more important than the order of blocks.
    if exc_type in (None, GeneratorExit):
        reason = f'it is not open in this thread, {Place.here().thread.name}'
        raise _wrong_order(rewrite, None, reason)


class Guarded:
    """A context manager that closes its block even if Ctrl-C interrupts the exit."""

    def _close(self, exc_type: type[BaseException] | None) -> None:
        raise NotImplementedError

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: types.TracebackType | None,
    ) -> None:
        before = thread.blocks
        try:
            self._close(exc_type)
        except BaseException:
            if thread.blocks is before:
                self._close(BaseException)
            raise


class InBlock(Guarded):
    """Opens a block around a call.

    Args:
        rewrite: the rule to apply in the block, and its filter.
        owner: the scope that paths are relative to; None for the root of each tree.
        judged: the checks to run when the call has returned.
    """

    def __init__(
        self, rewrite: rules.Rewrite, owner: Scope | None, judged: str = EXISTENCE
    ) -> None:
        self._rewrite, self._owner, self._judged = rewrite, owner, judged

    def __enter__(self) -> Block:
        self._block = open_block(self._rewrite, self._owner)
        return self._block

    def _close(self, exc_type: type[BaseException] | None) -> None:
        close_block(self._block, self._judged if exc_type is None else NOTHING)


def _wrong_order(rewrite: object, place: object, reason: str) -> errors.BlockError:
    """Returns the error for a block closed in the wrong order, thread or task."""
    opened = '' if place is None else f', opened at {place},'
    return errors.BlockError(
        f'the block of {rewrite!r}{opened} cannot be closed: {reason}.\n'
        'Blocks close in the thread and task that opened them, the last one '
        'first: use a with statement around the code that it is for.'
    )

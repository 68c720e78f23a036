"""Opening and closing a block, in the right order or with an error."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from flax.core.scope import Scope

from flax_sg import _private, blocks, errors, hooks, rules, unused


def open_block(rewrite: rules.Rewrite, owner: Scope | None) -> blocks.Block:
    """Opens a block in this thread.

    Args:
        rewrite: what holds in the block; has to stay equal to itself while it is open.
        owner: the scope that paths are relative to; None for the root of each tree.
    """
    blocks.active()
    if blocks.thread.replay is not None:
        blocks.thread.replay.opens(rewrite, owner)
    block = blocks.Block(rewrite, owner)
    try:
        _private.acquire_hooks(block, hooks.HOOKS)
        blocks.add(block)
    except BaseException:
        blocks.remove(block)
        raise
    return block


def close_block(block: blocks.Block, judge: bool) -> None:
    """Closes a block of this thread.

    Args:
        block: an open block. If it cannot be closed here and now that is an error, and
            it is closed all the same.
        judge: whether the body has come to its end, so that a filter that took
            nothing and a wrong order are worth an error.
    """
    before = blocks.thread.blocks
    try:
        holder = block.is_here()
        if holder is None and before[-1] is block:
            unused.check(block, blocks.thread.number_of(before), quiet=not judge)
        blocks.remove(block)
    except BaseException:
        blocks.remove(block)
        raise
    if not judge:
        return
    if holder is not None:
        reason = f'it was opened in another {holder}'
        raise errors.BlockOrderError(block.rewrite_value, reason)
    if before[-1] is not block:
        inner = before[-1].rewrite_value
        raise errors.BlockOrderError(block.rewrite_value, f'{inner!r} is still open')


@contextlib.contextmanager
def opened(
    rewrite: rules.Rewrite, owner: Scope | None, judge: bool = True
) -> Generator[blocks.Block]:
    """A block around a call.

    Args:
        rewrite: what holds in the block.
        owner: the scope that paths are relative to.
        judge: whether a filter that took nothing is worth an error.
    """
    block = open_block(rewrite, owner)
    try:
        yield block
        close_block(block, judge)
    except BaseException:
        if block in blocks.thread.blocks:
            close_block(block, judge=False)
        raise

"""Runs differentiation and batching rules in blocks that have already closed.

``jax.custom_vjp`` and the like call their rules when JAX differentiates or batches a
program. For a program inside ``jax.jit`` the blocks around the call have closed by
then. But the reads of a rule belong to the place of the call.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from flax_sg.engine import blocks, numbers
from flax_sg.internals import patching

_Blocks: TypeAlias = tuple[blocks.Block, ...]


def hook_for(kind: str) -> Callable[..., Any]:
    """Makes the hook for ``__call__`` of a class in ``patching.RULES``."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        open_blocks = blocks.active()
        # Functions of JAX (relu, softmax, ...) and of flax_sg read no variables.
        if open_blocks and not _of_jax(self):
            self, applies = _copy(self), tuple(blocks.thread.applies)
            for name in patching.RULES[kind]:
                rule = getattr(self, name)
                if rule is not None:
                    setattr(self, name, _resuming(rule, open_blocks, applies))
        return patching.originals[kind](self, *args, **kwargs)

    return hook


def _copy(function: Any) -> Any:
    # Not ``copy.copy``: these classes cannot be made without their arguments.
    out = object.__new__(type(function))
    vars(out).update(vars(function))
    return out


def _of_jax(function: Any) -> bool:
    # Excludes JAX's wrappers of user functions (``custom_gradient``), by closure.
    fn = function.fun
    module = getattr(fn, '__module__', None) or ''
    closed = getattr(fn, '__closure__', None) is None
    # Ours run user functions later; if they held blocks, they would hold tracers.
    return module.startswith('flax_sg.') or (module.startswith('jax.') and closed)


def _resuming(
    rule: Callable[..., Any], open_blocks: _Blocks, applies: tuple[object, ...]
) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _resumed(open_blocks, applies):
            return rule(*args, **kwargs)

    return functools.update_wrapper(wrapper, rule)


@contextlib.contextmanager
def _resumed(open_blocks: _Blocks, applies: tuple[object, ...]) -> Generator[None]:
    """Reopens blocks, as they were, for code that belongs in them.

    Other blocks may hold their numbers by now, so the reopened blocks get numbers that
    no other block finds. Two threads may differentiate one function: one of them waits.
    """
    with _lock:
        yield from _reopened(open_blocks, applies)


_lock = threading.RLock()


def _reopened(open_blocks: _Blocks, applies: tuple[object, ...]) -> Generator[None]:
    thread, user = blocks.thread, object()
    before = thread.applies
    closed = {block: block.lease for block in open_blocks if not block.is_open}

    def leave() -> None:
        thread.applies = before
        thread.set_blocks(thread.blocks)  # JAX's keys depend on the number of applies.
        for block, lease in closed.items():
            block.lease, block.is_open = lease, False
        for block in open_blocks:
            if not any(block is other for other in thread.blocks):
                thread.forget(block)
        patching.release_hooks(user)

    try:
        patching.acquire_hooks(user)
        thread.applies = [*applies]
        for block in closed:
            block.lease, block.is_open = numbers.unknown(block.asker), True
        with thread.only(open_blocks):
            for block in open_blocks:
                blocks.reopen(block)
            yield
    finally:
        try:
            leave()
        except BaseException:
            leave()
            raise

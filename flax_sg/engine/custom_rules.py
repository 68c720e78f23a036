"""Rules of differentiation and batching that run after a block has closed.

``jax.custom_vjp`` and its kin keep their rules and call them when a program is
differentiated or batched, which for a program inside ``jax.jit`` is after the blocks
around the call have closed. What a rule reads belongs to the place of the call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from flax_sg.engine import blocks, cache_keys, selection
from flax_sg.internals import hooking, tracing
from flax_sg.trees.variables import iter_leaf_keys

_Blocks: TypeAlias = tuple[blocks.Block, ...]


def hook_for(*names: str) -> Callable[[Any], Any]:
    """The hook for ``__call__`` of a class whose instances keep rules in ``names``."""

    def make_hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            open_blocks = blocks.active()
            # Functions of JAX itself (relu, softmax, ...) and ours read no variables.
            if open_blocks and not _of_jax(self):
                self = _copy(self)
                around = _around_trace(open_blocks)
                _note_all(around)
                for name in names:
                    rule = getattr(self, name)
                    if rule is not None:
                        setattr(self, name, _resuming(rule, open_blocks, around))
            return original(self, *args, **kwargs)

        return hook

    return make_hook


def _around_trace(open_blocks: _Blocks) -> _Blocks:
    """The blocks that were opened outside of the trace; others are a part of it."""
    now = tracing.kept_trace()
    return tuple(block for block in open_blocks if block.kept_trace != now)


def _note_all(around: _Blocks) -> None:
    """Asks now what the rules may ask when others may have found the trace."""
    for block in around:
        block.number.expect_late_questions(block.asker)
        block.number.brought = block.rewrite.rule.values()
        if block.asker.asks_classes:  # A class is known where a variable is read.
            continue
        for root, path, variables in list(blocks.thread.roots.values()):
            for collection, tree in variables.items():
                if selection.wants(block, collection):
                    for key in iter_leaf_keys((collection, path), tree):
                        selection.selects(block, root, key, read=False, noted=True)


def _copy(function: Any) -> Any:
    # Not ``copy.copy``: these classes cannot be made without their arguments.
    out = object.__new__(type(function))
    vars(out).update(vars(function))
    return out


def _of_jax(function: Any) -> bool:
    # Not the wrappers that JAX makes of functions of the user (``custom_gradient``).
    fn = function.fun
    module = getattr(fn, '__module__', None) or ''
    closed = getattr(fn, '__closure__', None) is None
    # Ours run what users gave later; if they held blocks, they would hold tracers.
    return module.startswith('flax_sg.') or (module.startswith('jax.') and closed)


def _resuming(
    rule: Callable[..., Any], open_blocks: _Blocks, around: _Blocks
) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _resumed(open_blocks, around):
            return rule(*args, **kwargs)

    return functools.update_wrapper(wrapper, rule)


def _set_aside() -> Any:
    return blocks.thread.only(())


@contextlib.contextmanager
def _resumed(open_blocks: _Blocks, around_trace: _Blocks) -> Generator[None]:
    """Opens blocks again, as they were, for code that belongs into them.

    Their numbers may belong to others by now: what the rule traces must be found by
    blocks with the same answers alone. So they take numbers anew.
    """
    thread, user = blocks.thread, object()
    closed = {block: block.number for block in open_blocks if not block.is_open}

    def leave() -> None:
        for block, number in closed.items():
            block.number.give_back(block.asker)
            block.number, block.home = number, None
            block.is_open = False
        for block in open_blocks:
            if not any(block is other for other in thread.blocks):
                thread.forget(block)
        hooking.release_hooks(user)

    try:
        hooking.acquire_hooks(user)
        around = cache_keys.NONE
        for block in open_blocks:
            if block in closed:
                block.home = block.number if block in around_trace else None
                block.is_open = True
                block.number = cache_keys.lease(around, block.asker, _set_aside)
            around = block.number
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

"""Rules of differentiation and batching that run after a block has closed.

``jax.custom_vjp`` and its kin keep their rules and call them when a program is
differentiated or batched, which for a program inside ``jax.jit`` is after the blocks
around the call have closed. What a rule reads belongs to the place of the call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

from flax_sg import _private, blocks


def custom_rules(*names: str) -> Callable[[Any], Any]:
    """The hook for ``__call__`` of a class whose instances keep rules in ``names``."""

    def make_hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            open_blocks = blocks.active()
            # Functions of JAX itself (relu, softmax, ...) and ours read no variables.
            if open_blocks and not _of_jax(self):
                self = _copy(self)
                for name in names:
                    rule = getattr(self, name)
                    if rule is not None:
                        setattr(self, name, _resuming(rule, open_blocks))
            return original(self, *args, **kwargs)

        return hook

    return make_hook


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
    rule: Callable[..., Any], open_blocks: tuple[blocks.Block, ...]
) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _resumed(open_blocks):
            return rule(*args, **kwargs)

    return functools.update_wrapper(wrapper, rule)


@contextlib.contextmanager
def _resumed(open_blocks: tuple[blocks.Block, ...]) -> Generator[None]:
    """Opens blocks again, as they were, for code that belongs into them."""
    thread, user = blocks.thread, object()

    def leave() -> None:
        for block in open_blocks:
            if not any(block is other for other in thread.blocks):
                thread.forget(block)
        _private.release_hooks(user)

    try:
        _private.acquire_hooks(user)
        with thread.only(open_blocks):
            for block in open_blocks:
                block.reopen()
            yield
    finally:
        try:
            leave()
        except BaseException:
            leave()
            raise

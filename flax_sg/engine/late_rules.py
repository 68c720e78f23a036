"""Runs differentiation and batching rules in blocks that have already closed.

``jax.custom_vjp`` and the like call their rules when JAX differentiates or batches a
program. For a program inside ``jax.jit`` the blocks of the call have closed by then.
But the reads of a rule belong to the place of the call.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax

from flax_sg.engine import blocks, numbers
from flax_sg.engine.roots import Blocks
from flax_sg.internals import patching, tracing


def hook_for(name: str) -> Callable[..., Any]:
    """Makes the hook for ``__call__`` of a class, by its name in ``patching.RULES``."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (open_blocks := blocks.active()):
            return patching.originals[name](self, *args, **kwargs)
        # What is no rule is None, and in a tuple an option.
        rules = {rule: getattr(self, rule, None) for rule in patching.RULES[name]}
        # Functions of JAX (relu, softmax, ...) and of flax_sg read no variables.
        if not _of_jax(
            self, filter(callable, jax.tree.leaves(rules, is_leaf=callable))
        ):
            self, applies = _copy(self), tuple(blocks.thread.applies)

            def resuming(rule: object) -> Any:
                is_rule = callable(rule)
                return _resuming(rule, open_blocks, applies) if is_rule else rule

            for attribute, rule in rules.items():
                setattr(self, attribute, jax.tree.map(resuming, rule, is_leaf=callable))
            for block in open_blocks:
                # A rule may read a variable that the function itself does not read.
                if block.kept_trace != tracing.kept_trace():
                    block.lease.note(())
        return patching.originals[name](self, *args, **kwargs)

    return hook


def _copy(function: Callable[..., Any]) -> Callable[..., Any]:
    # Not ``copy.copy``: these classes cannot be made without their arguments.
    out = object.__new__(type(function))
    vars(out).update(vars(function))
    return out


def _of_jax(function: Any, rules: Iterable[Any]) -> bool:
    """Whether a function with rules is one of JAX or of flax_sg."""
    fn = function.fun
    # A function of flax_sg is kept with what is traced: with blocks, tracers would be.
    if _is_in(fn, 'flax_sg.'):
        return True
    # A function of JAX with a closure may wrap one of the user (``custom_gradient``).
    is_plain = getattr(fn, '__closure__', None) is None
    own_rules = all(_is_in(rule, 'jax.') for rule in rules)
    return _is_in(fn, 'jax.') and is_plain and own_rules


def _is_in(fn: Callable[..., Any], package: str) -> bool:
    return (getattr(fn, '__module__', None) or '').startswith(package)


def _resuming(
    rule: Callable[..., Any], open_blocks: Blocks, applies: tuple[object, ...]
) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _resumed(open_blocks, applies):
            return rule(*args, **kwargs)

    return functools.update_wrapper(wrapper, rule)


@contextlib.contextmanager
def _resumed(open_blocks: Blocks, applies: tuple[object, ...]) -> Generator[None]:
    """Reopens blocks, as they were, for code that belongs in them.

    Other blocks may have leased their numbers by now, so the reopened blocks get
    numbers that no other block finds. If two threads differentiate one function, one of
    them waits.
    """
    with _lock:
        yield from _reopened(open_blocks, applies)


_lock = threading.RLock()


def _reopened(open_blocks: Blocks, applies: tuple[object, ...]) -> Generator[None]:
    thread = blocks.thread
    before = thread.applies
    closed = {block: block.lease for block in open_blocks if not block.is_open}
    met = {block: set(block.decisions) for block in closed}

    def leave() -> None:
        thread.applies = before
        thread.set_blocks(thread.blocks)  # JAX's keys depend on the number of applies.
        for block, lease in closed.items():
            block.lease, block.is_open = lease, False
            # JAX keeps the rule with what was traced under this number.
            if block.asker.has_functions and (new := {*block.decisions} - met[block]):
                lease.note(new)
                lease.give_back()
            block.forget_roots()

    try:
        thread.applies = [*applies]
        for block in closed:
            block.lease, block.is_open = numbers.unknown(block.asker), True
        with thread.only(open_blocks):
            yield
    finally:
        try:
            leave()
        except BaseException:
            leave()
            raise

"""What a block must not leave behind, and what stays until it is forgotten."""

from collections.abc import Iterator
from typing import Any

from flax_sg.engine import blocks, hooks, numbers, opening
from flax_sg.internals import patching, tracing


def hooked() -> list[Any]:
    """What stands where hooks may stand."""
    return [vars(owner).get(name) for owner, name in patching.HOOKED.values()]


HOOKS = [hooks.HOOKS[key] for key in patching.HOOKED]


def held_numbers(number: numbers.TraceNumber) -> Iterator[numbers.TraceNumber]:
    """The numbers inside of one that a block has."""
    waiting = [first for kind in number.inside.values() for first in kind]
    for inner in waiting:
        waiting += inner.answers.values()
        if inner._holders:
            yield inner
        if not inner.answers:
            yield from held_numbers(inner)


def assert_nothing_is_left() -> None:
    """No block is open, nothing is kept for one, and Flax is as it was."""
    thread = blocks.thread
    assert (thread.blocks, thread.doubts, thread.aside) == ((), None, ())
    assert thread.applies == []
    assert not list(held_numbers(numbers.NONE))
    assert tracing.user_context.value == 0
    assert hooked() == HOOKS


def forget_contexts() -> None:
    """Forgets what was traced and judged before, as in a new process."""
    numbers.NONE.inside.clear()


def checked_after_a_test() -> Iterator[None]:
    """A fixture. One failure is one, and not one in every test that follows."""
    yield
    try:
        assert_nothing_is_left()
    finally:
        for block in blocks.thread.blocks[::-1]:
            opening.close_block(block)
        blocks.thread.set_blocks(())

"""Who is running: the asyncio task, and the generators and coroutines on the stack."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any


class Place:
    """Where something was opened: the task, and the generators that may be left.

    Attributes:
        suspendable: whether the code that opened it may be suspended.
    """

    def __init__(self) -> None:
        self._task = current_task()
        self._frames = suspendable_frames(inside_task=self._task is not None)
        self.suspendable = self._task is not None or bool(self._frames)

    def is_here(self) -> str | None:
        """Why the running code cannot be told to lie in it; None if it can."""
        if self._task is not None and self._task is not current_task():
            return 'asyncio task'
        if self._frames and not self._frames <= frames_on_stack():
            return 'generator'
        return None

    def is_run_by_caller(self) -> bool:
        """Whether the generators that opened it are being run right now."""
        return bool(self._frames) and self._frames <= frames_on_stack()


def current_task() -> asyncio.Task[Any] | None:
    """The task that is running, if any."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def suspendable_frames(inside_task: bool) -> frozenset[int]:
    """Identities of the frames on the stack that may be left while a block is open.

    A generator that yields inside a block leaves it open for code that is not in it.
    A context manager written as a generator does the same on purpose: what counts
    then is who entered it.
    """
    # A coroutine that is suspended suspends its task, which is looked at anyway.
    kinds = _SUSPENDABLE & ~inspect.CO_COROUTINE if inside_task else _SUSPENDABLE
    found: list[int] = []
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_back
        if frame.f_code.co_flags & kinds:
            entered_by = '' if caller is None else caller.f_globals.get('__name__')
            if entered_by != 'contextlib':
                found.append(id(frame))
        frame = caller
    return frozenset(found)


def frames_on_stack() -> set[int]:
    """Identities of the frames that are running now."""
    found: set[int] = set()
    frame = inspect.currentframe()
    while frame is not None:
        found.add(id(frame))
        frame = frame.f_back
    return found

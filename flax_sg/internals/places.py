"""Where a block was opened: the line, the thread and the asyncio task."""

from __future__ import annotations

import asyncio
import dataclasses
import dis
import os
import threading
import warnings
from typing import Any

from flax_sg import errors
from flax_sg.internals import frames


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a block was opened.

    Attributes:
        file, line: the innermost line outside of this library and Flax.
        frame: identity of the frame that has called, of a generator perhaps.
        thread: the thread.
        task: the asyncio task that was running, if any.
    """

    file: str
    line: int
    frame: int
    thread: threading.Thread
    task: Any

    @classmethod
    def here(cls) -> Place:
        """Where the running code is."""
        frame = frames.frame_of_user(2)
        return cls(
            frame.f_code.co_filename,
            frame.f_lineno,
            id(frame),
            threading.current_thread(),
            _task(),
        )

    def is_in_this_task(self) -> bool:
        """Whether no *other* asyncio task than the one that runs has opened it."""
        return self.task is None or self.task is _task()

    def __str__(self) -> str:
        return f'{os.path.basename(self.file)}:{self.line}'


def call_of_user() -> tuple[int, int]:
    """Which frame of the user's program has called, and where in its code."""
    frame = frames.frame_of_user(2)
    return id(frame), frame.f_lasti


def is_dropped_at(call: tuple[int, int]) -> bool:
    """Whether a ``__del__`` runs because a statement drops what a call returns."""
    frame, last = frames.frame(2), call[1]
    if id(frame) != call[0] or not last < frame.f_lasti <= last + _LONGEST_CALL:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == 'POP_TOP'


_LONGEST_CALL = 16  # Bytes of code, caches of the interpreter among them.


def _task() -> Any:
    # ``asyncio.current_task`` raises where no loop is running, which takes long.
    loop = asyncio._get_running_loop()
    return None if loop is None else asyncio.current_task(loop)


def warn_without_effect(text: str, place: Place) -> None:
    """Warns of a block without an effect, once for each line where one is opened."""
    warnings.warn_explicit(
        text,
        errors.NothingStoppedWarning,
        place.file,
        place.line,
        registry=_warned,
    )


_warned: dict[Any, Any] = {}  # Where Python notes what it has said already.

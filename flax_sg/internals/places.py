"""Records where a block was opened: the line, the thread and the asyncio task."""

from __future__ import annotations

import asyncio
import threading
import warnings
from typing import Any, NamedTuple

from flax_sg import errors
from flax_sg.internals import frames


class Place(NamedTuple):
    """The place where a block was opened.

    Attributes:
        file, line: the innermost line of the user's program.
        frame: the ``id`` of that line's frame, which may be a generator's.
        thread: the thread that opened the block.
        task: the asyncio task that was running, or None.
    """

    file: str
    line: int
    frame: int
    thread: threading.Thread
    task: Any

    @classmethod
    def here(cls) -> Place:
        """Returns the place in the user's program that is running now."""
        frame = frames.frame_of_user(2)
        file, line = frame.f_code.co_filename, frame.f_lineno
        return cls(file, line, id(frame), threading.current_thread(), _task())

    def is_in_this_task(self) -> bool:
        """Whether the running asyncio task, or no task at all, opened the block."""
        return self.task is None or self.task is _task()

    def check_task(self, block: object) -> None:
        """Raises BlockError if another asyncio task opened a block here."""
        if not self.is_in_this_task():
            raise errors.BlockError(
                f'the block of {block!r}, opened at {self}, belongs to another asyncio '
                'task, which was suspended inside it.\n'
                'Leave the block before await.'
            )

    def __str__(self) -> str:
        return f'{frames.file_name(self.file)}:{self.line}'


def _task() -> Any:
    # Without a running loop, ``asyncio.current_task`` raises, which is slow.
    loop = asyncio._get_running_loop()
    return None if loop is None else asyncio.current_task(loop)


def warn_once(
    text: str, place: Place, category: type[Warning] = errors.NothingStoppedWarning
) -> None:
    """Warns of a block, once per line that opens such a block."""
    warnings.warn_explicit(text, category, place.file, place.line, registry=_warned)


_warned: dict[Any, Any] = {}  # Python records the issued warnings here.

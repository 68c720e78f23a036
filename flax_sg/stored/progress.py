"""How far a computation is: a bar, or lines in the log of a job."""

from __future__ import annotations

import contextlib
import time

from rich import console, progress
from rich.errors import LiveError

# Between two lines of a log, in seconds.
_PAUSE = 60


class Bar(progress.Progress):
    """A bar of rows. Where there is no terminal, it is a line in a minute.

    Args:
        rows: how many there are.
        done: how many were done before.
    """

    def __init__(self, rows: int, done: int) -> None:
        # Not among what the program prints.
        err = console.Console(stderr=True)
        columns = *self.get_default_columns(), progress.MofNCompleteColumn()
        is_shown = err.is_terminal and done < rows
        super().__init__(*columns, console=err, disable=not is_shown)
        self._task = self.add_task('rows', total=rows, completed=done)
        self._said = time.monotonic()

    def start(self) -> None:
        """Shows it, unless the program shows another bar."""
        with contextlib.suppress(LiveError):
            super().start()

    def add(self, rows: int) -> None:
        """Some rows are done."""
        self.advance(self._task, rows)
        if self.disable and time.monotonic() > self._said + _PAUSE:
            self._said = time.monotonic()
            task = self.tasks[0]
            self.console.print(f'{task.completed:.0f} of {task.total:.0f} rows')

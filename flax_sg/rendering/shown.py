"""What is printed, shown in notebooks and drawn."""

from __future__ import annotations

import abc
import html
import os
from typing import ClassVar

from flax_sg.rendering import pictures
from flax_sg.rendering.matrix import Matrix


class InNotebooks:
    """What is a table when it is printed, and at the end of a notebook's cell."""

    def _repr_html_(self) -> str:
        return f'<pre style="line-height: 1.2">{html.escape(str(self))}</pre>'


class Shown(InNotebooks, abc.ABC):
    """A report that is shown as a matrix: ``print`` it, or draw it.

    Attributes:
        title: the title of a picture.
    """

    title: ClassVar[str]

    @abc.abstractmethod
    def matrix(self, depth: int | None = None) -> Matrix:
        """The report as rows of words."""

    def table(self, depth: int | None = None) -> str:
        """The report as text; ``str`` gives the same.

        Args:
            depth: the number of names of a module's path to group by. Default all.
        """
        return self.matrix(depth).table()

    def plot(
        self,
        path: str | os.PathLike[str],
        depth: int | None = None,
        title: str = '',
        dark: bool = False,
    ) -> None:
        """Draws the table as a picture into a file; needs the extra ``plot``.

        Args:
            path: the file; its name says of which kind (png, svg, pdf, ...).
            depth: the number of names of a module's path to group by. Default all.
            title: stands above it; by default what the report tells.
            dark: whether it is drawn for pages in dark mode.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
            ValueError: if matplotlib does not know the kind of file.
        """
        pictures.plot(self.matrix(depth), path, title or self.title, dark)

    def __str__(self) -> str:
        return self.table()

"""Tables as text, for terminals and messages."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from flax_sg.rendering.matrix import Matrix, Word


class MatrixText:
    """What rich prints for a matrix.

    Where the columns do not fit beside each other, each has a paragraph of its own.

    Args:
        matrix: the matrix.
    """

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Any]:
        """Yields the matrix, or a list for each column, then the legend."""
        matrix = self.matrix
        rows = [
            (
                '  ' * row.is_part + row.name,
                *(_styled(matrix.words[cell]) for cell in row.cells),
                row.note,
            )
            for row in matrix.rows
        ]
        head = ['', *matrix.columns, matrix.notes]
        grid = table(head, rows, right=[len(head) - 1])
        unlimited = options.update(width=10_000)
        if Measurement.get(console, unlimited, grid).maximum <= options.max_width:
            yield grid
        else:
            yield from self._paragraphs()
        legend = Table.grid(padding=(0, 2))
        for word in matrix.used_words():
            legend.add_row(_styled(word), word.meaning)
        yield legend
        yield from map(Text, matrix.remarks)

    def _paragraphs(self) -> Iterator[Any]:
        for number, column in enumerate(self.matrix.columns):
            yield Text(column, 'bold')
            grid = Table.grid(padding=(0, 2))
            grid.add_column()
            grid.add_column(overflow='fold')
            for key, word in self.matrix.words.items():
                if names := self.matrix.leaves(number, key):
                    grid.add_row(_styled(word), Text(', '.join(names)))
            yield grid
            yield Text()


def _styled(word: Word) -> Text:
    return Text(word.text, word.style)


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    right: Sequence[int] = (),
    shrinks: int | None = None,
) -> Table:
    """A table with a line below its head, for rich to print.

    Args:
        head: the heading of each column.
        rows: the cells of each row; a str is not read as markup.
        right: the columns with numbers, aligned on the right.
        shrinks: the column whose cells end in an ellipsis if there is little room.
    """
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(head):
        out.add_column(
            Text(name),
            justify='right' if number in right else 'left',
            no_wrap=number != shrinks,
            overflow='ellipsis',
        )
    for row in rows:
        out.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return out


def plain(printed: Any, width: int | None = None) -> str:
    """What rich prints, as text without colours.

    Args:
        printed: something that rich can print.
        width: in characters; that of the terminal by default.
    """
    file = io.StringIO()
    # Without a colour system there are no styles either: the kernel of a notebook asks
    # all programs for them (FORCE_COLOR).
    console = Console(file=file, width=width, color_system=None, force_jupyter=False)
    console.print(printed)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return '\n'.join(lines).strip('\n')

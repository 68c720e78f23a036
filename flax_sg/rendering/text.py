"""Tables as text, for terminals and messages."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
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
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ('', *matrix.columns):
            grid.add_column(Text(name), no_wrap=True)
        grid.add_column(matrix.notes, justify='right', no_wrap=True)
        for row in matrix.rows:
            words = (_styled(matrix.words[cell]) for cell in row.cells)
            grid.add_row(Text('  ' * row.is_part + row.name), *words, row.note)
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
    rows: Sequence[Sequence[str]],
    right: Sequence[int] = (),
    shrinks: int = 0,
    width: int | None = None,
) -> str:
    """Lines of text in columns, below a heading.

    >>> print(table(['module', 'class', 'size'], [['head', 'Dense', '8']], right=[2]))
    module   class   size
    ─────────────────────
    head     Dense      8

    Args:
        head: the heading of each column.
        rows: the cells of each row.
        right: the columns with numbers, aligned on the right.
        shrinks: the column whose cells are cut where there is too little room, to the
            width of its heading.
        width: in characters; that of the terminal by default.
    """
    gap = '   '
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    room = shutil.get_terminal_size().columns if width is None else width
    excess = max(0, sum(widths) + len(gap) * (len(head) - 1) - room)
    widths[shrinks] = max(len(head[shrinks]), widths[shrinks] - excess)

    def cell(number: int, text: str) -> str:
        size = widths[number]
        text = text if len(text) <= size else f'{text[: size - 1]}…'
        return text.rjust(size) if number in right else text.ljust(size)

    lines = [gap.join(cell(*pair) for pair in enumerate(row)) for row in (head, *rows)]
    lines.insert(1, '─' * max(map(len, lines)))
    return '\n'.join(line.rstrip() for line in lines)


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

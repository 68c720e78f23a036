"""A table with one word of a short list in each cell, shown as text or HTML."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# Background and text colour.
Colors = tuple[str, str]
_CELL = 'padding:2px 10px;text-align:left'
# A transparent grey: text is legible on it in light mode and in dark mode.
_GREY = 'background:rgba(128,128,128,0.25)'
# Overrides page styles: coloured or striped tables would be white in dark mode.
_TABLE = '<table style="border-collapse:collapse;color:inherit">'
_ROW = '<tr style="background:transparent">'


@dataclasses.dataclass(frozen=True)
class Word:
    """A word that cells may have, and how it is shown.

    Attributes:
        text: the word.
        meaning: the explanation in the legend.
        style: the style in a terminal, as rich spells it.
        light: background and text colour in light mode; None for the page's own.
        dark: the same in dark mode.
    """

    text: str
    meaning: str
    style: str
    light: Colors | None
    dark: Colors | None

    def styled(self) -> Text:
        """Returns the word as rich prints it."""
        return Text(self.text, self.style)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a matrix.

    Attributes:
        name: the label of the row.
        cells: the key of a word for each column.
        note: the text in the last column.
        is_part: whether the row is a part of the last full row above it.
    """

    name: str
    cells: tuple[str, ...]
    note: str
    is_part: bool = False


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A table with a word in each cell.

    Attributes:
        columns: the names of the columns.
        rows: the rows.
        words: the words that cells may have, by key.
        notes: the heading of the last column.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    words: Mapping[str, Word]
    notes: str

    def used_words(self) -> list[Word]:
        """Returns the words that some cell has, for the legend."""
        used = {cell for row in self.rows for cell in row.cells}
        return [word for key, word in self.words.items() if key in used]

    def leaves(self, column: int, key: str) -> list[str]:
        """Lists the rows with a word in one column, as ``'head (bias, kernel)'``.

        If all parts of a row have the word, only the row is named. Otherwise the parts
        with the word follow in brackets.
        """
        families: list[tuple[Row, list[Row]]] = []
        for row in self.rows:
            if row.is_part:
                families[-1][1].append(row)
            else:
                families.append((row, []))
        found: list[str] = []
        for row, parts in families:
            having = [part for part in parts or [row] if part.cells[column] == key]
            if having and len(having) < len(parts):
                names = ', '.join(part.name for part in having)
                found.append(f'{row.name} ({names})')
            elif having:
                found.append(row.name)
        return found

    def diagonal(self) -> Matrix:
        """Sorts columns by the first row in which they have the first word."""
        first = next(iter(self.words))

        def is_elsewhere(column: int) -> list[bool]:
            return [row.cells[column] != first for row in self.rows]

        order = sorted(range(len(self.columns)), key=is_elsewhere)
        rows = (
            dataclasses.replace(row, cells=tuple(row.cells[n] for n in order))
            for row in self.rows
        )
        columns = tuple(self.columns[n] for n in order)
        return dataclasses.replace(self, columns=columns, rows=tuple(rows))

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Any]:
        """Yields the matrix (a list for each column if too wide) and its legend."""
        grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ('', *self.columns):
            grid.add_column(Text(name), no_wrap=True)
        grid.add_column(self.notes, justify='right', no_wrap=True)
        for row in self.rows:
            words = (self.words[cell].styled() for cell in row.cells)
            grid.add_row(Text('  ' * row.is_part + row.name), *words, row.note)
        unlimited = options.update(width=10_000)
        if Measurement.get(console, unlimited, grid).maximum <= options.max_width:
            yield grid
        else:
            yield from self._lists()
        legend = Table.grid(padding=(0, 2))
        for word in self.used_words():
            legend.add_row(word.styled(), word.meaning)
        yield legend

    def _lists(self) -> Iterator[Any]:
        for number, column in enumerate(self.columns):
            yield Text(column, 'bold')
            grid = Table.grid(padding=(0, 2))
            grid.add_column()
            grid.add_column(overflow='fold')
            for key, word in self.words.items():
                if names := self.leaves(number, key):
                    grid.add_row(word.styled(), Text(', '.join(names)))
            yield grid
            yield Text()

    def html(self) -> str:
        """Returns the matrix as HTML tables, legible in light and dark mode."""
        head = ['', *self.columns, self.notes]
        lines = [''.join(_cell(name, tag='th') for name in head)]
        for row in self.rows:
            cells = [
                _cell(row.name, 'padding-left:2em' if row.is_part else ''),
                *(_word(self.words[cell]) for cell in row.cells),
                _cell(row.note),
            ]
            lines.append(''.join(cells))
        legend = [_word(word) + _cell(word.meaning) for word in self.used_words()]
        return '\n'.join([_table(lines), '<p>Legend</p>', _table(legend)])


def _table(rows: list[str]) -> str:
    lines = [f'{_ROW}{row}</tr>' for row in rows]
    return '\n'.join([_TABLE, *lines, '</table>'])


def _word(word: Word) -> str:
    if word.light is None:
        return _cell(word.text, 'opacity:0.7')
    ground, ink = word.light
    is_grey = ground[1:3] == ground[3:5] == ground[5:7]
    # A light grey background would look white in dark mode.
    style = _GREY if is_grey else f'background:{ground};color:{ink}'
    return _cell(word.text, style)


def _cell(text: str, style: str = '', tag: str = 'td') -> str:
    return f'<{tag} style="{_CELL};{style}">{html.escape(text)}</{tag}>'

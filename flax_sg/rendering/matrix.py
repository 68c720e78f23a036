"""A table with one word of a short list in each cell, shown as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from flax_sg.rendering import text


@dataclasses.dataclass(frozen=True)
class Word:
    """A word that cells may have, and its explanation in the legend."""

    text: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a matrix.

    Attributes:
        name: the label of the row.
        cells: the key of a word for each column.
        note: the text in the last column.
    """

    name: str
    cells: tuple[str, ...]
    note: str = ''


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A table with a word in each cell.

    Attributes:
        columns: the names of the columns.
        rows: the rows.
        words: the words that cells may have, by key, from what is trained to what is
            not.
        notes: the heading of the last column; '' if there is none.
        totals: lines of text that stand below.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    words: Mapping[str, Word]
    notes: str = ''
    totals: tuple[str, ...] = ()

    def used_words(self) -> list[Word]:
        """Returns the words that some cell has, for the legend."""
        used = {cell for row in self.rows for cell in row.cells}
        return [word for key, word in self.words.items() if key in used]

    def table(self) -> str:
        """Returns the matrix and its legend as text."""
        rows: list[list[str]] = []
        for row in self.rows:
            cells = [self.words[cell].text for cell in row.cells]
            note = [row.note] * bool(self.notes)
            rows.append([row.name, *cells, *note])
        words = self.used_words()
        width = max((len(word.text) for word in words), default=0)
        legend = [
            text.wrapped(f'{word.text:{width}}  {word.meaning}', width + 2)
            for word in words
        ]
        head = ['', *self.columns, *[self.notes] * bool(self.notes)]
        lines = [text.table(head, rows, in_blocks=True), '', *legend]
        if self.totals:
            lines += ['', *map(text.wrapped, map(text.printable, self.totals))]
        return text.encodable('\n'.join(lines).rstrip())

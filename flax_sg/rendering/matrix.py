"""A table with a word from a short list in each cell: the data that is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# Background and ink.
Colors = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Word:
    """One word that cells may have, and how it is shown.

    Attributes:
        text: the word.
        meaning: what the legend says about it.
        style: its style in a terminal, in the words of rich.
        light: its background and ink on white paper; None for those of the paper.
        dark: the same on black paper.
    """

    text: str
    meaning: str
    style: str
    light: Colors | None
    dark: Colors | None


@dataclasses.dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        name: what it is about.
        cells: the key of a word for each column.
        note: the text in the last column.
        is_part: whether it is about a part of the last row that is not a part.
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
        remarks: sentences that stand below the table.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    words: Mapping[str, Word]
    notes: str
    remarks: tuple[str, ...] = ()

    def used_words(self) -> list[Word]:
        """The words of the legend: those that some cell has."""
        used = {cell for row in self.rows for cell in row.cells}
        return [word for key, word in self.words.items() if key in used]

    def leaves(self, column: int, key: str) -> list[str]:
        """The rows with a word in one column, as ``'head (bias, kernel)'``.

        A row with parts stands for them if all parts have the word. Otherwise its parts
        are named in brackets, those that have the word.
        """
        found: list[str] = []
        for row, parts in self._with_parts():
            having = [part.name for part in parts if part.cells[column] == key]
            if having and len(having) < len(parts):
                found.append(f'{row.name} ({", ".join(having)})')
            elif having or (not parts and row.cells[column] == key):
                found.append(row.name)
        return found

    def _with_parts(self) -> list[tuple[Row, list[Row]]]:
        out: list[tuple[Row, list[Row]]] = []
        for row in self.rows:
            if row.is_part:
                out[-1][1].append(row)
            else:
                out.append((row, []))
        return out

    def diagonal(self) -> Matrix:
        """The same matrix, its columns sorted by the first rows with the first word."""
        first = next(iter(self.words))

        def rows_of(column: int) -> list[int]:
            marked = [
                n for n, row in enumerate(self.rows) if row.cells[column] == first
            ]
            return marked or [len(self.rows)]

        order = sorted(range(len(self.columns)), key=rows_of)
        rows = (
            dataclasses.replace(row, cells=tuple(row.cells[n] for n in order))
            for row in self.rows
        )
        columns = tuple(self.columns[n] for n in order)
        return dataclasses.replace(self, columns=columns, rows=tuple(rows))

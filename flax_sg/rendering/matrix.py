"""A table with one word of a short list in each cell, shown as text or HTML."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping

from flax_sg.rendering import text

# Background and text colour.
Colors = tuple[str, str]
# In light mode and in dark mode. Colour-blind people tell these apart: most are from
# the palette of Okabe and Ito.
BLUE = ('#0072b2', '#ffffff'), ('#7cc4f4', '#000000')
LIGHT_BLUE = ('#56b4e9', '#000000'), ('#0072b2', '#ffffff')
ORANGE = ('#e69f00', '#000000'), ('#e69f00', '#000000')
RED = ('#d55e00', '#ffffff'), ('#d55e00', '#000000')
GREY = ('#e8e8e8', '#333333'), ('#30363d', '#e6edf3')
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
        light: background and text colour in light mode; None for the page's own.
        dark: the same in dark mode.
    """

    text: str
    meaning: str
    light: Colors | None
    dark: Colors | None


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
        totals: lines of text that stand below.
        are_texts: whether the last column holds words, not numbers.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    words: Mapping[str, Word]
    notes: str
    totals: tuple[str, ...] = ()
    are_texts: bool = False

    def used_words(self) -> list[Word]:
        """Returns the words that some cell has, for the legend."""
        used = {cell for row in self.rows for cell in row.cells}
        return [word for key, word in self.words.items() if key in used]

    def table(self) -> str:
        """Returns the matrix and its legend as text."""
        rows: list[list[str]] = []
        for row in self.rows:
            cells = [self.words[cell].text for cell in row.cells]
            rows.append(['  ' * row.is_part + row.name, *cells, row.note])
        words = self.used_words()
        width = max((len(word.text) for word in words), default=0)
        legend = [f'{word.text:{width}}  {word.meaning}' for word in words]
        head = ['', *self.columns, self.notes]
        right = () if self.are_texts else (self.notes,)
        lines = [text.wrapped(head, rows, right), '', *legend]
        if self.totals:
            lines += ['', *self.totals]
        return '\n'.join(lines).rstrip()

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
        totals = '<br>'.join(map(html.escape, self.totals))
        below = [f'<p>{totals}</p>'] * bool(totals)
        return '\n'.join([_table(lines), '<p>Legend</p>', _table(legend), *below])


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


def _cell(shown: str, style: str = '', tag: str = 'td') -> str:
    return f'<{tag} style="{_CELL};{style}">{html.escape(shown)}</{tag}>'

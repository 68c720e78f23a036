"""A matrix in a notebook."""

from __future__ import annotations

import html

from flax_sg.rendering.matrix import Matrix, Word

_CELL = 'padding:2px 10px;text-align:left'


def table(matrix: Matrix) -> str:
    """The matrix as an HTML table that needs no style sheet; names are escaped.

    Cells without a colour of their own have none in a dark notebook either.
    """
    head = ['', *matrix.columns, matrix.notes]
    lines = [
        '<table style="border-collapse:collapse">',
        f'<tr>{"".join(_cell(name, tag="th") for name in head)}</tr>',
    ]
    for row in matrix.rows:
        cells = [
            _cell(row.name, 'padding-left:2em' if row.is_part else ''),
            *(_word(matrix.words[cell]) for cell in row.cells),
            _cell(row.note),
        ]
        lines.append(f'<tr>{"".join(cells)}</tr>')
    legend = (
        f'<tr>{_word(word)}{_cell(word.meaning)}</tr>' for word in matrix.used_words()
    )
    remarks = (f'<p>{html.escape(remark)}</p>' for remark in matrix.remarks)
    return '\n'.join([*lines, '</table>', '<table>', *legend, '</table>', *remarks])


def _word(word: Word) -> str:
    if word.light is None:
        return _cell(word.text, 'opacity:0.7')
    background, ink = word.light
    return _cell(word.text, f'background:{background};color:{ink}')


def _cell(text: str, style: str = '', tag: str = 'td') -> str:
    return f'<{tag} style="{_CELL};{style}">{html.escape(text)}</{tag}>'

"""The matrix of a gradient flow in a notebook."""

from __future__ import annotations

import html
from typing import Any

from flax_sg.rendering import colors, tables

_CELL = 'padding:2px 10px;text-align:left'


def table(flow: Any) -> str:
    """The matrix as an HTML table that needs no style sheet; names are escaped."""
    head = ['', *tables.output_names(flow), 'uses stopped']
    lines = [
        '<table style="border-collapse:collapse">',
        f'<tr>{"".join(_cell(name, tag="th") for name in head)}</tr>',
    ]
    for row in tables.rows(flow):
        indent = 'padding-left:2em' if row.parameter else ''
        cells = [
            _cell(row.name, indent),
            *(_cell(tables.WORDS[status], _style(status)) for status in row.status),
            _cell(f'{row.stopped} of {row.uses}'),
        ]
        lines.append(f'<tr>{"".join(cells)}</tr>')
    notes = [f'<p>{html.escape(note)}</p>' for note in tables.hidden(flow, None)]
    return '\n'.join([*lines, '</table>', *notes])


def _style(status: str) -> str:
    background, ink = colors.CELLS[status]
    return f'background:{background};color:{ink}'


def _cell(text: str, style: str = '', tag: str = 'td') -> str:
    return f'<{tag} style="{_CELL};{style}">{html.escape(text)}</{tag}>'

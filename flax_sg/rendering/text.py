"""Formats tables as text, for terminals and messages."""

from __future__ import annotations

import io
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console


def table(
    columns: Mapping[str, Sequence[str]],
    optional: str,
    right: Sequence[str] = (),
    width: int | None = None,
) -> str:
    """Formats columns of text below their headings. No word is cut.

    >>> columns = {'module': ['head'], 'class': ['Dense'], 'size': ['8']}
    >>> print(table(columns, optional='class', right=['size']))
    module   class   size
    ─────────────────────
    head     Dense      8

    Args:
        columns: the cells of each column, by heading.
        optional: the column that is left out if the table is too wide.
        right: the columns that are aligned on the right.
        width: in characters; by default the terminal's.
    """
    gap = '   '
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    room = shutil.get_terminal_size().columns if width is None else width
    fits = sum(widths.values()) + len(gap) * (len(columns) - 1) <= room
    aligned: list[list[str]] = []
    for name, cells in columns.items():
        if fits or name != optional:
            align = str.rjust if name in right else str.ljust
            aligned.append([align(text, widths[name]) for text in (name, *cells)])
    lines = [gap.join(row) for row in zip(*aligned, strict=True)]
    lines.insert(1, '─' * max(map(len, lines)))
    return '\n'.join(line.rstrip() for line in lines)


def plain(printed: Any, width: int | None = None) -> str:
    """Returns what rich prints, as text without colours.

    Args:
        printed: an object that rich can print.
        width: in characters; by default the terminal's.
    """
    file = io.StringIO()
    # No colour system means no styles, even where a notebook kernel sets FORCE_COLOR.
    console = Console(file=file, width=width, color_system=None, force_jupyter=False)
    console.print(printed)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return '\n'.join(lines).strip('\n')

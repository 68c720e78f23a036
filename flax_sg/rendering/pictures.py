"""The matrix of a gradient flow as a picture: modules down, outputs across."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from flax_sg import extras
from flax_sg.rendering import colors, tables

if TYPE_CHECKING:
    from flax_sg.flow import GradientFlow

# In inches: the height of a row, the width of a letter, and the space around.
_ROW, _LETTER, _EDGE = 0.3, 0.085, 0.15
_INK = '#333333'


def save(
    flow: GradientFlow,
    path: str | os.PathLike[str],
    depth: int | None,
    title: str,
) -> None:
    """Does what ``GradientFlow.plot`` says."""
    # Without pyplot there is no display to be found, and no global state.
    figure_type = load('matplotlib.figure').Figure
    rows, outputs = tables.rows(flow, depth), tables.output_names(flow)
    names = ['    ' * row.parameter + row.name for row in rows]
    left = _width(names) + 2 * _EDGE
    words = [tables.WORDS[status] for row in rows for status in row.status]
    cell = _width([*outputs, *words]) + 2 * _EDGE
    legend = [
        f'{tables.WORDS[status]}: {meaning}'
        for status, meaning in tables.LEGEND.items()
        if any(status in row.status for row in rows)
    ]
    top = 3 * _ROW
    width = max(left + cell * len(outputs), _width([title, *legend])) + 2 * _EDGE
    height = top + (len(rows) + 1 + 0.6 * len(legend)) * _ROW
    figure = figure_type(figsize=(width, height))
    # One unit is one inch, and zero is at the top.
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()

    def write(x: float, y: float, text: str, **style: Any) -> None:
        style = {'color': _INK, 'fontsize': 10, 'va': 'center'} | style
        axes.text(x, y, text, parse_math=False, **style)

    write(_EDGE, _ROW, title, weight='bold', fontsize=11)
    for x, output in enumerate(outputs):
        write(left + (x + 0.5) * cell, top - _ROW / 2, output, ha='center')
    for y, (row, name) in enumerate(zip(rows, names, strict=True)):
        write(_EDGE, top + (y + 0.5) * _ROW, name)
        for x, status in enumerate(row.status):
            background, ink = colors.CELLS[status]
            corner = left + x * cell, top + y * _ROW
            # White lines between cells, of one colour too.
            axes.add_patch(
                load('matplotlib.patches').Rectangle(
                    corner, cell, _ROW, facecolor=background, edgecolor='white'
                )
            )
            word = tables.WORDS[status]
            place = corner[0] + cell / 2, corner[1] + _ROW / 2
            write(*place, word, color=ink, ha='center', fontsize=9)
    for y, line in enumerate(legend):
        write(_EDGE, top + (len(rows) + 0.8 + 0.6 * y) * _ROW, line, fontsize=8)
    figure.savefig(path, dpi=150)


def load(module: str) -> Any:
    """A module of matplotlib, which comes with the extra ``plot``."""
    return extras.optional(module, 'The picture', 'plot')


def _width(texts: Iterable[str]) -> float:
    """The room that the longest of some texts takes."""
    return _LETTER * max(map(len, texts))

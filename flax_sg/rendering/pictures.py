"""The matrix of a gradient flow as a picture: modules down, outputs across."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from flax_sg.internals import optional
from flax_sg.rendering import colors, tables

# In inches: the height of a row, and the width of a letter.
_ROW, _LETTER = 0.3, 0.09
_INK, _PALE = '#333333', '#767676'


def save(
    flow: Any,
    path: str | os.PathLike[str],
    depth: int | None,
    title: str,
) -> None:
    """Does what ``GradientFlow.plot`` says."""
    # Without pyplot there is no display to be found, and no global state.
    figure_type = load('matplotlib.figure').Figure
    rows, outputs = tables.rows(flow, depth), tables.output_names(flow)
    legend = [
        f'{tables.WORDS[status]}: {meaning}'
        for status, meaning in tables.LEGEND.items()
        if any(status in row.status for row in rows)
    ]
    legend += tables.hidden(flow, depth)
    cell = max(0.8, _width(outputs) + 0.2)
    width = _width([row.name for row in rows]) + cell * len(outputs) + 0.3
    height = _ROW * (len(rows) + 3) + 0.17 * len(legend)
    figure = figure_type(
        figsize=(max(width, _width([title]), 0.8 * _width(legend)), height),
        layout='constrained',
    )
    draw(figure.subplots(), flow, depth)
    figure.suptitle(title, x=0.02, ha='left', weight='bold', color=_INK, fontsize=11)
    figure.supxlabel('\n'.join(legend), x=0.02, ha='left', color=_INK, fontsize=8)
    figure.savefig(path, dpi=150)


def draw(axes: Any, flow: Any, depth: int | None = None) -> None:
    """Does what ``GradientFlow.draw`` says."""
    rectangle = load('matplotlib.patches').Rectangle
    rows, outputs = tables.rows(flow, depth), tables.output_names(flow)
    for y, row in enumerate(rows):
        for x, status in enumerate(row.status):
            background, ink = colors.CELLS[status]
            # White lines between cells, of one colour too.
            style = {'facecolor': background, 'edgecolor': 'white', 'linewidth': 1.5}
            axes.add_patch(rectangle((x, y), 1, 1, **style))
            style = {'color': ink, 'ha': 'center', 'va': 'center', 'fontsize': 9}
            axes.text(x + 0.5, y + 0.5, tables.WORDS[status], **style)
    axes.set(xlim=(0, len(outputs)), ylim=(max(1, len(rows)), 0))
    axes.set_xticks([x + 0.5 for x in range(len(outputs))], outputs, parse_math=False)
    names = [row.name for row in rows]
    axes.set_yticks([y + 0.5 for y in range(len(rows))], names, parse_math=False)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(_PALE if row.parameter else _INK)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def load(module: str) -> Any:
    """A module of matplotlib, which comes with the extra ``plot``."""
    return optional.optional(module, 'The picture', 'plot')


def _width(texts: Iterable[str]) -> float:
    """The room that the longest of some texts takes."""
    return _LETTER * max(map(len, texts), default=0)

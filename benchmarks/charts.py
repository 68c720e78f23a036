"""Draws bar charts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# The colours of bars.
OURS, OTHERS, MASKS = '#0072b2', '#8c8c8c', '#d55e00'
STYLE = {
    'axes.spines.right': False,
    'axes.spines.top': False,
    'axes.spines.bottom': False,
    'font.size': 11,
    'svg.hashsalt': 'flax_sg',
}


def draw(
    path: Path,
    title: str,
    bars: Sequence[tuple[str, str, tuple[float, float, float]]],
    line: float | None = None,
    form: str = '.2f',
) -> None:
    """Draws a bar chart.

    Args:
        path: the file.
        title: stands above it.
        bars: the label, the colour and the quartiles of each.
        line: where to draw a dotted line.
        form: how numbers are written.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 1.1 + 0.3 * len(bars)), layout='constrained')
        axes: Any = figure.subplots()
        for y, (name, color, (low, size, high)) in enumerate(bars):
            reach = [[size - low], [high - size]] if low < high else None
            axes.barh(y, size, xerr=reach, color=color, ecolor='#333333')
            axes.text(high, y, f' {size:{form}}', va='center')
            axes.text(0, y, f'{name} ', va='center', ha='right')
        if line is not None:
            axes.axvline(line, color='#333333', lw=0.8, ls=':')
        largest = max((high for _, _, (_, _, high) in bars), default=1.0)
        axes.set(xticks=[], yticks=[], xlim=(0, 1.15 * largest))
        axes.invert_yaxis()
        figure.suptitle(title, x=0.01, ha='left', fontsize=11)
        figure.savefig(path, metadata={'Date': None})

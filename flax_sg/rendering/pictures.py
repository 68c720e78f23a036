"""Draws a matrix as a picture."""

from __future__ import annotations

import itertools
import os
import textwrap
from typing import Any

from flax_sg.internals import optional
from flax_sg.rendering import text
from flax_sg.rendering.matrix import Matrix

# Paper and ink, in light mode and in dark mode. Cells are of one blue, the stronger the
# more is trained, so that colour-blind people and grey printers tell them apart.
LIGHT, DARK = ('#ffffff', '#333333'), ('#0d1117', '#e6edf3')
BLUE = '#0072b2'
# In larger pictures the cells have no words.
MOST_WORDS = 2000
# The longest side of a picture, in dots.
MOST_DOTS = 6000


def plot(
    matrix: Matrix, path: str | os.PathLike[str], title: str, dark: bool = False
) -> None:
    """Draws a matrix into a picture file, which is as large as its names need.

    Args:
        matrix: the matrix.
        path: the file; its suffix chooses the format (png, svg, pdf, ...).
        title: the heading above the matrix.
        dark: whether the picture is for pages in dark mode.
    """
    # Figure instead of pyplot: pyplot opens a display and has global state.
    figure_type = load('matplotlib.figure').Figure
    to_rgba = load('matplotlib.colors').to_rgba
    paper, ink = DARK if dark else LIGHT
    rows, heads = matrix.rows, [*map(text.printable, matrix.columns)]
    height, width = max(1, len(rows)), max(1, len(heads))
    longest = max(map(text.width, heads), default=0)
    # Heads that are longer than a cell stand upright.
    cell, turned = (0.85, 90) if longest > 14 else (max(0.85, 0.1 * longest), 0)
    figure = figure_type((cell * width, 0.3 * height), facecolor=paper)
    axes = figure.add_axes((0, 0, 1, 1), facecolor=paper)
    keys = [*matrix.words]
    strength = {key: 1 - n / (len(keys) - 1) for n, key in enumerate(keys)}
    shades = [[to_rgba(BLUE, strength[key]) for key in row.cells] for row in rows]
    if rows and heads:
        # All cells are one mesh: thousands of rectangles take minutes.
        axes.pcolormesh(shades, edgecolors=paper, linewidth=1.5)
    is_small = len(rows) * len(heads) <= MOST_WORDS
    for y, row in enumerate(rows if is_small else ()):
        for x, key in enumerate(row.cells):
            color = '#ffffff' if strength[key] > 0.5 else ink
            style = {'color': color, 'ha': 'center', 'va': 'center', 'fontsize': 11}
            axes.text(x + 0.5, y + 0.5, matrix.words[key].text, **style)
    axes.set(xlim=(0, width), ylim=(height, 0))
    style: dict[str, Any] = {'parse_math': False, 'color': ink, 'fontsize': 11}
    axes.set_xticks(
        [n + 0.5 for n in range(len(heads))], heads, rotation=turned, **style
    )
    sides = [text.printable(row.name) for row in rows]
    axes.set_yticks([n + 0.5 for n in range(len(sides))], sides, **style)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    legend = [f'{word.text}: {word.meaning}' for word in matrix.used_words()]
    legend = '\n'.join(itertools.chain(*(textwrap.wrap(x, 56) for x in legend)))
    axes.set_title(title, loc='left', weight='bold', color=ink, fontsize=12, pad=12)
    axes.text(0, height + 0.4, legend, va='top', color=ink, fontsize=10)
    # Names that are longer than the cells make the picture larger.
    box = figure.get_tightbbox()
    dots = min(150, MOST_DOTS / max(box.width, box.height))
    figure.savefig(path, dpi=dots, bbox_inches='tight', pad_inches=0.15)


def load(module: str) -> Any:
    """Imports a module of matplotlib, which the extra ``plot`` installs."""
    return optional.optional(module, 'The picture', 'matplotlib')

"""Draws a matrix as a picture."""

from __future__ import annotations

import math
import os
import textwrap
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from flax_sg.internals import optional
from flax_sg.rendering.matrix import Matrix

# In inches: the height of a row, the width of a letter of 11 points, and the height of
# a legend line.
_ROW, _LETTER, _LINE = 0.3, 0.093, 0.2
# What matplotlib brings, and fonts with the letters and signs that it lacks.
FONTS = (
    'DejaVu Sans',
    *('Noto Sans CJK JP', 'Noto Emoji', 'Noto Sans CJK SC', 'WenQuanYi Zen Hei'),
    *('IPAGothic', 'Hiragino Sans', 'PingFang SC', 'Microsoft YaHei', 'Yu Gothic'),
    *('Malgun Gothic', 'Apple SD Gothic Neo', 'Segoe UI Emoji', 'Symbola'),
)
_LACKS = (
    'No font that matplotlib knows has all letters of the names, and some are drawn as '
    'boxes. Install Noto Sans CJK or Noto Emoji, and delete matplotlib.get_cachedir().'
)
# In larger pictures the cells have colours alone.
MOST_WORDS = 2000
# Dots of a picture, which takes about a second for ten million of them.
MOST_DOTS = 40_000_000
# Background, text, and text of minor importance.
LIGHT = ('#ffffff', '#333333', '#666666')
DARK = ('#0d1117', '#e6edf3', '#9da7b3')


def save(
    matrix: Matrix,
    path: str | os.PathLike[str],
    title: str,
    names: tuple[str, str],
    dark: bool = False,
) -> None:
    """Draws a matrix into a picture file, as narrow as its names allow.

    Args:
        matrix: the matrix.
        path: the file; its suffix chooses the format (png, svg, pdf, ...).
        title: the heading above the matrix.
        names: the headings of the rows and of the columns.
        dark: whether the picture is for pages in dark mode.
    """
    # Figure instead of pyplot: pyplot opens a display and has global state.
    figure_type = load('matplotlib.figure').Figure
    paper, ink, _ = DARK if dark else LIGHT
    cell = max(0.8, _width(matrix.columns) + 0.1)
    beside = _width([names[0], *(row.name for row in matrix.rows)]) + 0.15
    width = max(beside + cell * len(matrix.columns), 1.1 * _width([title]), 3.2)
    legend = [f'{word.text}: {word.meaning}' for word in matrix.used_words()]
    # A long sentence would widen the picture.
    letters = int(width / (0.8 * _LETTER))
    lines = [
        line
        for sentence in legend
        for line in textwrap.wrap(sentence, letters, subsequent_indent='   ')
    ]
    height = _ROW * (len(matrix.rows) + 3) + _LINE * len(lines)
    known = {font.name for font in load('matplotlib.font_manager').fontManager.ttflist}
    fonts = {'font.family': [font for font in FONTS if font in known]}
    dots = min(150, math.sqrt(MOST_DOTS / (width * height)))
    with load('matplotlib').rc_context(fonts):
        figure = figure_type((width, height), layout='constrained', facecolor=paper)
        draw(figure.subplots(), matrix, names, dark)
        figure.suptitle(title, x=0.02, ha='left', weight='bold', color=ink, fontsize=12)
        figure.supxlabel('\n'.join(lines), x=0.02, ha='left', color=ink, fontsize=10)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            figure.savefig(path, dpi=dots)
    for text in {
        _LACKS if 'Glyph' in str(one.message) else one.message for one in caught
    }:
        warnings.warn(text, stacklevel=3)


def draw(axes: Any, matrix: Matrix, names: tuple[str, str], dark: bool = False) -> None:
    """Draws a matrix into matplotlib axes; a cell is one unit wide and high.

    Args:
        axes: empty axes.
        matrix: the matrix.
        names: the headings of the rows and of the columns.
        dark: whether the picture is for pages in dark mode.
    """
    to_rgb = load('matplotlib.colors').to_rgb
    paper, ink, pale = DARK if dark else LIGHT
    rows, columns = matrix.rows, matrix.columns
    colors = {
        key: (word.dark if dark else word.light) or (paper, pale)
        for key, word in matrix.words.items()
    }
    # All cells are one mesh: thousands of rectangles take minutes. Edges in the
    # background's colour separate cells of one colour.
    shades = [[to_rgb(colors[key][0]) for key in row.cells] for row in rows]
    if rows and columns:
        axes.pcolormesh(np.array(shades), edgecolors=paper, linewidth=1.5)
    is_small = len(rows) * len(columns) <= MOST_WORDS
    for y, row in enumerate(rows if is_small else ()):
        for x, key in enumerate(row.cells):
            style = {'color': colors[key][1], 'ha': 'center', 'va': 'center'}
            axes.text(x + 0.5, y + 0.5, matrix.words[key].text, fontsize=11, **style)
    axes.set(xlim=(0, len(columns)), ylim=(max(1, len(rows)), 0), facecolor=paper)
    x, y = ([n + 0.5 for n in range(len(line))] for line in (columns, rows))
    axes.set_xticks(x, columns, parse_math=False, color=ink)
    labels = axes.set_yticks(y, [row.name for row in rows], parse_math=False)
    for tick, row in zip(labels, rows, strict=True):
        tick.label1.set_color(pale if row.is_part else ink)
    # The rows' heading stands above their names, horizontally.
    axes.set_ylabel(names[0], color=pale, fontsize=10, rotation=0, ha='right')
    axes.yaxis.set_label_coords(-0.01, 1.02)
    axes.set_xlabel(names[1], color=pale, fontsize=10)
    axes.xaxis.set_label_position('top')
    axes.tick_params(length=0, labelsize=11, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def load(module: str) -> Any:
    """Imports a module of matplotlib, which the extra ``plot`` installs."""
    return optional.optional(module, 'The picture', 'matplotlib')


def _width(texts: Iterable[str]) -> float:
    """The width of the longest text, in inches."""
    return _LETTER * max(map(len, texts), default=0)

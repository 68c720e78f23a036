"""Draws the memory of a training step on each chip as a bar chart, by way to freeze."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.accelerators.rows import Row
from benchmarks.picture import MASKS, OTHERS, OURS, STYLE

# The case, and the label and the colour of each bar, by way to freeze.
TOPOLOGY, CASE = 'v5e:16x16', '8 billion, backbone frozen'
TITLE = 'Memory of a training step on each of 256 TPU v5e, in GB'
BARS = {
    'stops by hand': ('jax.lax.stop_gradient by hand', OTHERS),
    'flax_sg block': ('flax_sg: nn.stop_gradient', OURS),
    'flax_sg live': ('flax_sg: sg.live', OURS),
    'optax mask, no clip': ('optax mask', MASKS),
    'optax mask, gradient in another jit': ('optax mask, two jits', MASKS),
    'optax mask': ('optax mask, clip', MASKS),
}
# Of a v5e, as its compiler says.
_TOO_MUCH = re.compile(r'needs (?P<used>[\d.]+)G of (?P<there>[\d.]+)G')


def save(path: Path, rows: Sequence[Row]) -> None:
    """Draws the chart of one case at scale.

    Args:
        path: the file.
        rows: the rows of the study.
    """
    ways = {r.way: r for r in rows if (r.topology, r.case) == (TOPOLOGY, CASE)}
    bars = [(*BARS[way], ways[way]) for way in BARS if way in ways]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 1.1 + 0.3 * len(bars)), layout='constrained')
        axes: Any = figure.subplots()
        for y, (name, color, row) in enumerate(bars):
            found = _TOO_MUCH.match(row.note)
            size = float(found['used']) * 2**30 / 1e9 if found else row.peak / 1e9
            text = f'{size:.1f}' + ' does not fit' * bool(found)
            axes.barh(y, size, color=color)
            axes.text(size + 0.2, y, text, va='center')
            axes.text(-0.2, y, name, va='center', ha='right')
        axes.set(xticks=[], yticks=[])
        axes.invert_yaxis()
        figure.suptitle(
            f'{TITLE}\n{CASE.partition(",")[0]} parameters, frozen backbone',
            x=0.01,
            ha='left',
            fontsize=11,
        )
        figure.savefig(path, metadata={'Date': None})

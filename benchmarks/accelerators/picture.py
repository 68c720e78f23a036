"""Draws the memory or the time of a training step as a bar chart, by way to freeze."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.accelerators.rows import Row
from benchmarks.picture import MASKS, OTHERS, OURS, STYLE

# The devices that are not there, the case, and the label and the colour of each bar, by
# way to freeze.
TOPOLOGY, CASE = 'v5e:16x16', '8 billion, backbone frozen'
TITLE = 'Training step of 8 billion parameters, frozen backbone\n'
MEMORY = 'GB on each of 256 TPU v5e; dotted: the memory of a chip'
TIME = 'ms on one {}'
BARS = {
    'stops by hand': ('jax.lax.stop_gradient by hand', OTHERS),
    'flax_sg block': ('flax_sg: nn.stop_gradient', OURS),
    'flax_sg live': ('flax_sg: sg.live', OURS),
    'optax mask, no clip': ('optax mask', MASKS),
    'optax mask, gradient in another jit': ('optax mask, two jits', MASKS),
    'optax mask, gradient constrained': ('optax mask, clip, constraint', MASKS),
    'optax mask': ('optax mask, clip', MASKS),
}
CHIP = 15.75 * 2**30 / 1e9
_TOO_MUCH = re.compile(r'needs (?P<used>[\d.]+)G')


def save(path: Path, rows: Sequence[Row]) -> None:
    """Draws the chart of one case at scale: the time, where a step ran.

    Args:
        path: the file.
        rows: the rows of the study.
    """
    timed = [row for row in rows if row.step]
    topology = timed[0].topology if timed else TOPOLOGY
    ways = {r.way: r for r in rows if (r.topology, r.case) == (topology, CASE)}
    bars = [(*BARS[way], ways[way]) for way in BARS if way in ways]
    what = TIME.format(topology) if timed else MEMORY
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 1.1 + 0.3 * len(bars)), layout='constrained')
        axes: Any = figure.subplots()
        for y, (name, color, row) in enumerate(bars):
            size = _size(row)
            axes.barh(y, size, color=color)
            axes.text(size, y, f' {size:.1f}', va='center')
            axes.text(0, y, f'{name} ', va='center', ha='right')
        if not timed:
            axes.axvline(CHIP, color='#333333', lw=0.8, ls=':')
        axes.set(xticks=[], yticks=[])
        axes.invert_yaxis()
        figure.suptitle(TITLE + what, x=0.01, ha='left', fontsize=11)
        figure.savefig(path, metadata={'Date': None})


def _size(row: Row) -> float:
    if row.step:
        return 1000 * row.step
    found = _TOO_MUCH.match(row.note)
    return float(found['used']) * 2**30 / 1e9 if found else row.peak / 1e9

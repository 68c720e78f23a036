"""Draws the memory or the time of a training step as a bar chart, by way to freeze."""

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.accelerators.rows import Row
from benchmarks.charts import MASKS, OTHERS, OURS, draw

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
    sizes = {way: _size(ways[way]) for way in BARS if way in ways}
    bars = [(*BARS[way], (size, size, size)) for way, size in sizes.items()]
    if timed:
        draw(path, TITLE + TIME.format(topology), bars, form='.1f')
    else:
        draw(path, TITLE + MEMORY, bars, CHIP, '.1f')


def _size(row: Row) -> float:
    if row.step:
        return 1000 * row.step
    found = _TOO_MUCH.match(row.note)
    return float(found['used']) * 2**30 / 1e9 if found else row.peak / 1e9

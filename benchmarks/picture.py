"""Draws the time of a training step as a bar chart, by way to freeze.

``python -m benchmarks.picture`` redraws charts and pages from the stored results.
"""

from pathlib import Path

from benchmarks import report
from benchmarks.charts import MASKS, OTHERS, OURS, draw
from benchmarks.checkout import RESULTS
from benchmarks.measure import Figures
from benchmarks.rivals import BY_HAND

WORKLOAD = 'transformer, frozen backbone'
# The label and the colour of each bar, by way to freeze.
BARS = {
    BY_HAND: ('jax.lax.stop_gradient by hand', OTHERS),
    'flax_sg block': ('flax_sg: nn.stop_gradient', OURS),
    'nn.map_variables': ('nn.map_variables', OTHERS),
    'hk.custom_getter': ('Haiku custom getter', OTHERS),
    'partition by hand': ('partition by hand', OTHERS),
    'flax_sg live': ('flax_sg: sg.live', OURS),
    'equinox partition': ('equinox partition', OTHERS),
    'nnx DiffState': ('NNX DiffState', OTHERS),
    'optax mask, one jit': ('optax mask, one jit', MASKS),
    'optax mask': ('optax mask, two jits', MASKS),
    'optax mask, one jit, clip': ('optax mask, one jit, clip', MASKS),
}


def save(path: Path, results: report.Results) -> None:
    """Draws the chart of one workload.

    Args:
        path: the file.
        results: the measurements.
    """
    # With --only, WORKLOAD may be missing: draw the first workload instead.
    workload = (
        WORKLOAD if WORKLOAD in results.workloads else next(iter(results.workloads))
    )
    ways = results.workloads[workload]
    shown = [(way, found) for way, found in ways.items() if isinstance(found, Figures)]
    bars = sorted(
        ((*BARS[way], found.step) for way, found in shown if way in BARS),
        key=lambda bar: bar[2].median,
    )
    title = (
        f'Time of a training step: {workload}\n'
        f'relative to stops by hand, quartiles; {results.device}'
    )
    draw(path, title, [(n, c, (s.low, s.median, s.high)) for n, c, s in bars], 1.0)


def write(file: Path, results: report.Results) -> None:
    """Writes the page and its chart.

    Args:
        file: the path of the page without its suffix.
        results: the measurements.
    """
    chart = file.with_suffix('.svg')
    save(chart, results)
    file.with_suffix('.md').write_text(results.markdown(chart.name))


if __name__ == '__main__':
    for stored in RESULTS.glob('*.json'):
        write(stored.with_suffix(''), report.read(stored))

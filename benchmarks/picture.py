"""Results as a picture: times of steps, and of traces by the number of modules."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from benchmarks.measure import Figures
from benchmarks.report import Results
from benchmarks.rivals import BY_HAND, RIVALS

INK = '#333333'
STYLE = {
    'axes.edgecolor': INK,
    'axes.spines.right': False,
    'axes.spines.top': False,
    'axes.titlelocation': 'left',
    'font.size': 9,
    'legend.frameon': False,
    'text.color': INK,
}
COLORS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#999999')


def save(path: Path, results: Results) -> None:
    """Draws the results as PNG.

    Args:
        path: the file.
        results: what was measured.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(15, 7), layout='constrained')
        figure.suptitle(
            f'Ways to freeze, relative to stops by hand, on {results.device}',
            x=0.01,
            horizontalalignment='left',
        )
        steps, traces = figure.subplots(1, 2, width_ratios=[3, 2])
        _steps(steps, results)
        _traces(traces, results)
        figure.savefig(path, dpi=130)


def _steps(axes: Any, results: Results) -> None:
    ways = [way for way in RIVALS if way != BY_HAND]
    times = np.array(
        [[_step(found[way]) for way in ways] for found in results.workloads.values()]
    )
    # A half is as far from one as the double.
    axes.imshow(
        np.log2(times),
        cmap='PuOr_r',
        norm=TwoSlopeNorm(0.0, -2.0, 2.0),
        aspect='auto',
        alpha=0.75,
    )
    for (row, column), time in np.ndenumerate(times):
        text = '' if np.isnan(time) else f'{time:.2f}'
        axes.text(column, row, text, ha='center', va='center')
    axes.set_title('Time of a training step; empty: cannot be expressed')
    axes.set_xticks(range(len(ways)), ways, rotation=40, ha='right')
    axes.set_yticks(range(len(results.workloads)), list(results.workloads))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _step(found: Figures | str) -> float:
    return float('nan') if isinstance(found, str) else found.step.median


def _traces(axes: Any, results: Results) -> None:
    ways = dict.fromkeys(way for found in results.modules.values() for way in found)
    ways = [way for way in ways if way != BY_HAND]
    for index, way in enumerate(ways):
        numbers = [n for n, found in results.modules.items() if way in found]
        ratios = [results.modules[n][way] for n in numbers]
        medians = [ratio.median for ratio in ratios]
        color = COLORS[index % len(COLORS)]
        style = '--' if index >= len(COLORS) else '-'
        axes.plot(numbers, medians, style, color=color, marker='o', label=way)
        low, high = [r.low for r in ratios], [r.high for r in ratios]
        axes.fill_between(numbers, low, high, color=color, alpha=0.12, linewidth=0)
    axes.axhline(1.0, color=INK, linewidth=0.8)
    axes.set(
        title='Time to trace and lower many small modules (quartiles shaded)',
        xlabel='modules',
        xscale='log',
    )
    axes.set_xticks(list(results.modules), [f'{n:,}' for n in results.modules])
    axes.minorticks_off()
    axes.legend()

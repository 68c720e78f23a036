"""The picture: who trains what, learning curves, digits with their explanations."""

from pathlib import Path
from typing import Any

import numpy as np

from flax_sg.demo import data, train
from flax_sg.demo import model as models
from flax_sg.flow import GradientFlow

COLORS = {'gln': '#0072b2', 'code': '#d55e00', 'explanation': '#009e73'}
INK = '#333333'
PAPER = {'cmap': 'gray_r', 'vmin': 0, 'vmax': 1}
BESIDE = {'rotation': 0, 'horizontalalignment': 'right', 'verticalalignment': 'center'}
STYLE = {
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.edgecolor': INK,
    'axes.titlelocation': 'left',
    'axes.titlesize': 11,
    'legend.frameon': False,
    'lines.linewidth': 1.8,
    'text.color': INK,
}


def save(
    path: Path,
    runs: dict[str | None, train.Run],
    flow: GradientFlow,
    held_out: data.Digits,
    reading: models.Reading,
) -> None:
    """Draws the picture and saves it as PNG.

    Args:
        path: the file.
        runs: the trained models, by frozen part; None for the one with none frozen.
        flow: which loss trains which module.
        held_out: digits.
        reading: what the model makes of them.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
    """
    # Without pyplot there is no display to be found, and no global state.
    figure_type = data.optional('matplotlib.figure').Figure
    with data.optional('matplotlib').rc_context(STYLE):
        figure = figure_type(figsize=(14, 6.4), layout='constrained')
        top, bottom = figure.subfigures(2, 1, height_ratios=[2, 1])
        matrix, losses, accuracy = top.subplots(1, 3)
        flow.draw(matrix, depth=1)
        matrix.set_title('Which loss trains what', pad=10)
        _losses(losses, runs[None])
        _accuracy(accuracy, runs)
        _digits(bottom, held_out, reading)
        figure.savefig(path, dpi=150, backend='agg')


def _losses(axes: Any, run: train.Run) -> None:
    for part, curve in zip(models.PARTS, run.losses.T, strict=True):
        # The last two losses are nearly the same number, with different gradients.
        style = (0, (4, 2)) if part == 'explanation' else '-'
        label = f'{part} loss'
        axes.plot(run.steps, curve, color=COLORS[part], linestyle=style, label=label)
    axes.set(title='Three losses, one gradient call', xlabel='step', yscale='log')
    axes.legend()


def _accuracy(axes: Any, runs: dict[str | None, train.Run]) -> None:
    for frozen, run in runs.items():
        color = COLORS[frozen] if frozen else INK
        axes.plot(run.steps, run.accuracy, color=color)
        # Each curve carries its name, since a legend would lie on one of them.
        axes.annotate(
            f'{frozen} frozen' if frozen else 'every part learns',
            (run.steps[-1], run.accuracy[-1]),
            xytext=(0, 4 if frozen else -4),
            textcoords='offset points',
            horizontalalignment='right',
            verticalalignment='bottom' if frozen else 'top',
            color=color,
        )
    axes.set(title='Held-out accuracy', xlabel='step', ylim=(0, 1.02))


def _digits(figure: Any, digits: data.Digits, reading: models.Reading) -> None:
    read = np.argmax(np.asarray(reading.logits), axis=-1)
    explained = np.asarray(reading.explained)
    # The first held-out digit of each kind.
    shown = [int(np.argmax(digits.labels == label)) for label in range(10)]
    observed_row, explained_row = figure.subplots(2, len(shown))
    observed_row[0].set_ylabel('observed', **BESIDE)
    explained_row[0].set_ylabel('explained,\nread as', **BESIDE)
    for above, below, index in zip(observed_row, explained_row, shown, strict=True):
        above.imshow(digits.images[index].reshape(8, 8), **PAPER)
        below.imshow(explained[index].reshape(8, 8), **PAPER)
        right = read[index] == digits.labels[index]
        below.set_xlabel(f'{read[index]}', color=INK if right else 'red')
        for axes in (above, below):
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)

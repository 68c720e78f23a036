"""``python -m flax_sg demo``: the program of google/flax issue #1857, on real digits.

One ``infer`` with an inference pass that trains nothing, an expensive sampler that runs
once, and three losses of which each trains only its own part of the model. The demo
trains it on scikit-learn's handwritten digits, measures which loss trains which part,
and compares it with the same program written by hand, with four copies of the weights.

The files, from the bottom: ``data.py`` (the digits), ``model.py`` (the model, with the
blocks), ``by_hand.py`` (the same without flax_sg), ``train.py``, ``checks.py`` (what is
measured), ``report.py`` (what is printed), ``picture.py``, and ``distributed.py``, the
same training in several processes.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flax_sg.demo import checks, data, distributed, picture, report, train
from flax_sg.demo import model as models

STEPS = 1000
PICTURE = 'flax_sg_demo.png'


def main(argv: Sequence[str]) -> int:
    """Trains the model, measures, prints, draws.

    Args:
        argv: ``[--out DIR] [--steps N] [--processes N]``.

    Returns:
        The exit status: 0 if everything held that the demo claims, 1 otherwise. With
        ``--steps`` accuracy is reported and not asked for.

    Raises:
        ModuleNotFoundError: if scikit-learn or matplotlib is not installed.
    """
    options = _parse(argv)
    if options.processes:
        return distributed.main(options.processes, options.steps or STEPS)
    # What may be missing is asked for before anything takes time.
    digits, held_out = data.load()
    data.optional('matplotlib')
    options.out.mkdir(parents=True, exist_ok=True)

    start = time.perf_counter()
    console = Console(highlight=False)
    console.print('[bold]Three losses, each of which trains its own part of a model[/]')
    console.print(
        f'{len(digits)} handwritten digits to learn from, {len(held_out)} held out\n'
    )
    trainer = train.Trainer(
        models.DigitModel(), digits, held_out, options.steps or STEPS
    )
    runs = _train(console, trainer)
    params = runs[None].params
    with console.status('Measuring gradients'):
        batch = digits.take(np.arange(train.BATCH_SIZE))
        measured = checks.measure(trainer.model, params, batch)
        reading = trainer.read(params, held_out.images)
        path = options.out / PICTURE
        picture.save(path, runs, measured.flow, held_out, reading)

    console.print()
    report.show_flow(console, measured.flow)
    report.show_table(console, measured)
    claims = report.claims(measured, runs, whole=options.steps is None)
    report.show_claims(console, claims)
    seconds = time.perf_counter() - start
    # In one piece, so that it can be copied, and as it is: a path may hold brackets.
    console.print(f'\nLearning curves and digits: {path}', soft_wrap=True, markup=False)
    console.print(f'{seconds:.0f} s')
    return int(any(claim.holds is False for claim in claims))


def _train(console: Console, trainer: train.Trainer) -> dict[str | None, train.Run]:
    columns = (
        TextColumn('{task.description}'),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn('{task.fields[accuracy]}'),
    )
    # Where the output is no terminal, the bars are printed once, when all is done.
    with Progress(*columns, console=console) as progress:
        tasks = {
            frozen: progress.add_task(
                f'{frozen} frozen' if frozen else 'every part learns',
                total=trainer.steps,
                accuracy='',
            )
            for frozen in (None, *models.PARTS)
        }
        runs: dict[str | None, train.Run] = {}
        for frozen, task in tasks.items():
            runs[frozen] = trainer.run(frozen, lambda task=task: progress.advance(task))
            accuracy = f'accuracy {runs[frozen].accuracy[-1]:.3f}'
            progress.update(task, accuracy=accuracy)
    return runs


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        'python -m flax_sg demo',
        description='Trains a model in which each of three losses trains its own part.',
    )
    parser.add_argument(
        '--out', metavar='DIR', type=Path, default=Path(), help='for the picture'
    )
    parser.add_argument(
        '--steps', metavar='N', type=_number, help=f'of training, {STEPS} by default'
    )
    parser.add_argument(
        '--processes',
        metavar='N',
        type=_number,
        help='train in N processes and in one, compare, draw nothing',
    )
    return parser.parse_args(argv)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'expected a number from 1, got {text!r}')
    return int(text)

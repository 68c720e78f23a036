"""Measures ``sg.precompute``: what a step costs when the frozen part is computed once.

Run as ``python -m benchmarks.ahead``. Three programs compute value and gradient: of
``late``, without the frozen weights; of the rest by hand, on features that were stored
by hand; and of the whole loss. Where nothing can be stored, the whole loss stands for
the program by hand. Prints a table, and writes ``results/``.
"""

import dataclasses
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

import flax_sg as sg
from benchmarks import stored
from benchmarks.checkout import RESULTS
from benchmarks.compiled import peak, shapes
from benchmarks.report import device_name, file_of, versions
from benchmarks.timing import Ratio, interleaved, ratios
from flax_sg.internals import jaxprs

HEAD = (
    'loss',
    'MFLOP: whole, late',
    'MB peak: whole, late',
    'kB stored: by hand, kept',
    'time to by hand',
    'time to whole',
)


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        rounds: how often ``late`` and another program run, at most.
        seconds: after this time no round begins, except the first two.
        run: how long one of them runs between two looks at the clock.
    """

    rounds: int = 61
    seconds: float = 20.0
    run: float = 0.02


QUICK = Effort(1, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a step costs, by program: ``'late'``, ``'hand'`` and ``'whole'``.

    Attributes:
        flops: as XLA counts them: one turn of a loop.
        peak_bytes: arguments, results and temporary memory.
        stored_bytes: what is kept for a batch, and the features by hand.
        to_hand: the time of ``late`` relative to the program by hand.
        to_whole: the same, to the whole loss.
    """

    flops: Mapping[str, float]
    peak_bytes: Mapping[str, int]
    stored_bytes: Mapping[str, int]
    to_hand: Ratio
    to_whole: Ratio


def measured(case: stored.Case, effort: Effort) -> Figures:
    """Returns what a step costs."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '.* is computed once')
        ahead = case.precomputed()
    own, others = case.parts
    kept = jax.jit(ahead.early)(case.params, *case.data)
    features = jax.jit(case.early)(case.params, *case.data)
    late = sg.value_and_grad(ahead.late, wrt=case.live)
    whole = sg.value_and_grad(case.loss, wrt=case.live)
    args = case.params, *case.data, *case.each
    without = dict.fromkeys(others, sg.ABSENT) if case.late else others
    calls: dict[str, tuple[Callable[..., Any], Any]] = {
        'late': (late, ({**own, **without}, kept, *case.each)),
        'hand': (whole, args),
        'whole': (whole, args),
    }
    if case.late:
        hand = own, {}, features, *case.each
        calls['hand'] = case.step(case.late), hand
    steps = {name: jax.jit(fun) for name, (fun, _) in calls.items()}
    programs = {n: steps[n].lower(*shapes(a)).compile() for n, (_, a) in calls.items()}

    def ratio(to: str) -> Ratio:
        runs = {n: _repeated(steps[n], calls[n][1], effort.run) for n in (to, 'late')}
        # The time of all cores, since other programs may be running.
        is_cpu = jax.devices()[0].platform == 'cpu'
        clock = time.process_time if is_cpu else time.perf_counter
        times = interleaved(
            {name: run for name, (run, _) in runs.items()},
            effort.rounds,
            effort.seconds,
            clock=clock,
        )
        each = {n: [t / runs[n][1] for t in seconds] for n, seconds in times.items()}
        return ratios(each, to)['late']

    to_hand = ratio('hand')
    return Figures(
        {n: jaxprs.counts(p).get('flops', 0.0) for n, p in programs.items()},
        {n: peak(p.memory_analysis()) for n, p in programs.items()},
        {'late': _bytes(kept), 'hand': _bytes(features)},
        to_hand,
        ratio('whole') if case.late else to_hand,
    )


def _repeated(
    step: Callable[..., Any], args: Any, seconds: float
) -> tuple[Callable[[], Any], int]:
    """Runs a step some times, and how often."""
    best = float('inf')
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(step(*args))
        best = min(best, time.perf_counter() - start)
    times = max(1, round(seconds / best))

    def run() -> Any:
        return [step(*args) for _ in range(times)][-1]

    return run, times


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def check(found: Mapping[str, Figures]) -> None:
    """Fails if ``late`` is not the program by hand on stored features."""
    for name, figures in found.items():
        for cost in (figures.flops, figures.peak_bytes, figures.stored_bytes):
            assert cost['late'] <= 1.02 * cost['hand'], (name, cost)


def table(found: Mapping[str, Figures]) -> str:
    """The figures in Markdown."""
    lines = [list(HEAD), ['---'] * len(HEAD)]
    for name, it in found.items():
        flops, memory, stored_bytes = it.flops, it.peak_bytes, it.stored_bytes
        lines += [
            [
                name,
                f'{flops["whole"] / 1e6:,.4g}, {flops["late"] / 1e6:,.4g}',
                f'{memory["whole"] / 1e6:.3g}, {memory["late"] / 1e6:.3g}',
                f'{stored_bytes["hand"] / 1e3:.4g}, {stored_bytes["late"] / 1e3:.4g}',
                _shown(it.to_hand),
                _shown(it.to_whole),
            ]
        ]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _shown(ratio: Ratio) -> str:
    low, median, high = (
        f'{x:.2f}' if x > 0.1 else f'{x:.2g}'
        for x in (ratio.low, ratio.median, ratio.high)
    )
    return f'{median} ({low} to {high})'


def run(
    sizes: stored.Sizes, effort: Effort, folder: Path, only: str = ''
) -> dict[str, Figures]:
    """Measures losses, prints the table and writes the results.

    Args:
        sizes: how large the models are.
        effort: how long to measure.
        folder: where the results go.
        only: a regular expression that their names match.
    """
    found: dict[str, Figures] = {}
    for make in stored.CASES:
        case = make(sizes)
        if not re.search(only, case.name):
            continue
        print(case.name, file=sys.stderr, flush=True)
        found[case.name] = measured(case, effort)
    device = device_name()
    results = {
        'device': device,
        'versions': versions(),
        'sizes': dataclasses.asdict(sizes),
        'losses': {name: dataclasses.asdict(it) for name, it in found.items()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f'{file_of(device)}_ahead.json'
    file.write_text(json.dumps(results, indent=1) + '\n')
    print(table(found))
    return found


if __name__ == '__main__':
    run(stored.Sizes(), Effort(), RESULTS)

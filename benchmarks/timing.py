"""Times of programs that take turns, as ratios."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Times relative to those of another program, measured in turn.

    Attributes:
        median: the median of the ratios of pairs.
        low: their first quartile.
        high: their third quartile.
        seconds: the median of the times.
    """

    median: float
    low: float
    high: float
    seconds: float


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    seconds: float = float('inf'),
    warm: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, list[float]]:
    """Times of programs that take turns, so that a busy moment is shared.

    Args:
        runs: the programs, by name; the arrays that they return are waited for.
        rounds: how often.
        seconds: after which no further round begins, from the second on.
        warm: whether each runs once before.
        clock: tells the time.
        before: what is done before each run, in no time.
    """
    for run in runs.values() if warm else ():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for number in range(rounds):
        if number >= 2 and time.perf_counter() - begin > seconds:
            break
        # Nobody is always first, after whatever the last one left behind.
        first = number % len(runs)
        for name, run in [*runs.items()][first:] + [*runs.items()][:first]:
            before()
            start = clock()
            jax.block_until_ready(run())
            times[name].append(clock() - start)
    return times


def ratios(times: Mapping[str, list[float]], to: str) -> dict[str, Ratio]:
    """Times as ratios to those of one program, pair by pair."""
    out = {}
    for name, seconds in times.items():
        if not seconds:
            continue
        low, median, high = np.quantile(
            np.array(seconds) / np.array(times[to]), [0.25, 0.5, 0.75]
        )
        out[name] = Ratio(
            float(median), float(low), float(high), float(np.median(seconds))
        )
    return out

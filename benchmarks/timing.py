"""Measures programs in turn, and compares their times as ratios."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The time of a program relative to another one, measured in turn.

    Attributes:
        median: the median of the ratios of pairs.
        low: their first quartile.
        high: their third quartile.
        seconds: the median time of the program.
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
    """Times programs in turn, so that a busy machine slows down all of them.

    Args:
        runs: the programs, by name; the clock stops when their results are ready.
        rounds: how often each program runs.
        seconds: no round begins after this time, except the first two.
        warm: whether each program runs once before.
        clock: returns the time in seconds.
        before: called before each run, outside of the measured time.
    """
    for run in runs.values() if warm else ():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.perf_counter()
    for number in range(rounds):
        if number >= 2 and time.perf_counter() - begin > seconds:
            break
        # Rotate the order: the program that ran before may slow down the next one.
        first = number % len(runs)
        for name, run in [*runs.items()][first:] + [*runs.items()][:first]:
            before()
            start = clock()
            jax.block_until_ready(run())
            times[name].append(clock() - start)
    return times


def ratios(times: Mapping[str, list[float]], to: str) -> dict[str, Ratio]:
    """Returns times as ratios to one program, pair by pair."""
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

"""Measures training steps: compiled programs, times, and number of traces."""

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compiled import Compiler, Cost, Step, hands
from benchmarks.rivals import BY_HAND, RIVALS, Rival
from benchmarks.timing import Ratio, interleaved, ratios
from benchmarks.trainers import Data, UnableError
from benchmarks.workloads import Workload


@dataclasses.dataclass(frozen=True)
class Figures(Cost):
    """What a training step costs, and how long it takes.

    Attributes:
        lowering: time to trace and lower the gradient, filters included; None if the
            gradient is another rival's, or not measured.
        step: time of a training step.
    """

    lowering: Ratio | None
    step: Ratio


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        lowerings: rounds of tracing and lowering.
        steps: the maximum number of rounds of training steps.
        seconds: no round of training steps begins after this time, except the first
            two.
        warm: whether to run each training step once before measuring.
    """

    lowerings: int = 4
    steps: int = 25
    seconds: float = 6.0
    warm: bool = True


QUICK = Effort(0, 1, 0.0, False)


def measured(work: Workload, effort: Effort) -> dict[str, Figures | str]:
    """Returns each rival's figures, or why it cannot express the workload."""
    count = [0]

    def traced() -> None:
        count[0] += 1

    work = dataclasses.replace(work, traced=traced)
    data = Data(*work.arrays())
    out: dict[str, Figures | str] = {}
    steps: dict[str, Step] = {}
    # Threads compile programs while Python traces the next ones.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiler = Compiler(pool)
        for name, rival in RIVALS.items():
            count[0] = 0
            try:
                trainer = rival.make(work, data)
            except UnableError as reason:
                out[name] = str(reason)
            else:
                steps[name] = Step(trainer, data.inputs, count, compiler)
    lowering = ratios(
        interleaved(
            {
                name: lambda rival=RIVALS[name]: _lower(rival, work, data)
                for name in steps
                if RIVALS[name].gradient_of is None
            },
            effort.lowerings,
            warm=False,
        ),
        BY_HAND,
    )
    times = ratios(
        interleaved(
            {name: _timed(step, data) for name, step in steps.items()},
            effort.steps,
            effort.seconds,
            effort.warm,
        ),
        BY_HAND,
    )
    by_hand = hands(steps)
    for name, step in steps.items():
        cost = step.cost(by_hand)
        both = {'lowering': lowering.get(name), 'step': times[name]}
        out[name] = Figures(**dataclasses.asdict(cost), **both)
    return {name: out[name] for name in RIVALS}


def _lower(rival: Rival, work: Workload, data: Data) -> None:
    trainer = rival.make(work, data)
    jax.jit(trainer.gradient).lower(trainer.params, trainer.state, *data.inputs)


def _timed(step: Step, data: Data) -> Callable[[], Any]:
    # Steps donate their buffers, so copy the parameters.
    params = jax.tree.map(jnp.copy, step.trainer.params)
    optimizer = jax.tree.map(
        lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), step.optimizer
    )
    return step.runner(params, optimizer, data.inputs)

"""Measures training steps: compiled programs, times, and number of traces."""

import concurrent.futures
import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rivals import BY_HAND, RIVALS, Rival
from benchmarks.timing import Ratio, interleaved, ratios
from benchmarks.trainers import Data, Trainer, UnableError
from benchmarks.workloads import Workload
from flax_sg.testing import optimized_hlo

# Matrix products, under their HLO names on CPUs and GPUs.
_DOT = re.compile(
    r' (?:dot|convolution)\(|custom_call_target="__(?:cublas|cudnn\$conv|onednn\$mat)'
)


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a training step costs.

    Attributes:
        flops: flops of the compiled programs; XLA counts one turn of a loop.
        accessed_bytes: bytes that the programs read and write, counted like the flops.
        temporary_bytes: temporary memory of the program that needs most.
        peak_bytes: arguments, results and temporary memory of the program that needs
            most, as its buffers were assigned.
        dots: matrix products and convolutions in the optimized programs.
        gradient_bytes: bytes of gradients that leave their program.
        optimizer_bytes: bytes of the optimizer state.
        program: the hand-written gradient program that this one equals, ``'stops'``
            or ``'partition'``, else ``'other'``. With one jit, the step is compared.
        traces: how often Python ran the loss in a loop of three steps.
        lowering: time to trace and lower the gradient, filters included; None if the
            gradient is another rival's, or not measured.
        step: time of a training step.
    """

    flops: float
    accessed_bytes: float
    temporary_bytes: int
    peak_bytes: int
    dots: int
    gradient_bytes: int
    optimizer_bytes: int
    program: str
    traces: int
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
    steps: dict[str, _Step] = {}
    # Threads compile programs while Python traces the next ones.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiler = _Compiler(pool)
        for name, rival in RIVALS.items():
            count[0] = 0
            try:
                trainer = rival.make(work, data)
            except UnableError as reason:
                out[name] = str(reason)
            else:
                steps[name] = _Step(trainer, data, count, compiler)
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
            {name: step.runner(data) for name, step in steps.items()},
            effort.steps,
            effort.seconds,
            effort.warm,
        ),
        BY_HAND,
    )
    for name, step in steps.items():
        one_jit = ', one jit' if step.trainer.one_jit else ''
        hands = {
            steps[f'{kind} by hand{one_jit}'].programs[0].text: kind
            for kind in ('partition', 'stops')
            if f'{kind} by hand{one_jit}' in steps
        }
        out[name] = step.figures(hands, lowering.get(name), times[name])
    return {name: out[name] for name in RIVALS}


def _lower(rival: Rival, work: Workload, data: Data) -> None:
    trainer = rival.make(work, data)
    jax.jit(trainer.gradient).lower(trainer.params, trainer.state, *data.inputs)


@dataclasses.dataclass(frozen=True)
class _Program:
    """A compiled program, and its optimized HLO."""

    run: Any
    text: str


class _Compiler:
    """Compiles programs in threads; equal ones of equal trees are compiled once."""

    def __init__(self, pool: concurrent.futures.Executor) -> None:
        self._pool = pool
        self._known: dict[Any, concurrent.futures.Future[_Program]] = {}

    def __call__(self, lowered: Any) -> concurrent.futures.Future[_Program]:
        """Returns a future of the compiled program."""
        key = lowered.as_text(), lowered.in_tree, lowered.out_tree
        if key not in self._known:
            self._known[key] = self._pool.submit(self._compile, lowered)
        return self._known[key]

    @staticmethod
    def _compile(lowered: Any) -> _Program:
        compiled = lowered.compile()
        return _Program(compiled, optimized_hlo(compiled))


class _Step:
    """A training step, as one or two programs.

    Attributes:
        trainer: the trainer whose step is compiled.
        traces: how often the loss was traced in a loop of three steps.
        gradients: the shapes of the gradients that leave their program.
        optimizer: the shapes of the optimizer state.
    """

    def __init__(
        self, trainer: Trainer, data: Data, count: list[int], compiler: _Compiler
    ) -> None:
        args = trainer.params, trainer.state, *data.inputs
        optimizer = jax.eval_shape(trainer.init, trainer.params)
        self.gradients: Any = None
        if trainer.one_jit:

            def both(opt_state: Any, params: Any, state: Any, *inputs: Any) -> Any:
                value, grads = trainer.gradient(params, state, *inputs)
                return value, *trainer.update(grads, opt_state, params)

            step = jax.jit(both, donate_argnums=(0, 1))
            for _ in range(3):
                traced = step.trace(optimizer, *args)
                (_, state), params, optimizer = _shapes(traced.out_info)
                args = params, state, *data.inputs
            lowered = [step.lower(optimizer, *args)]
        else:
            gradient = jax.jit(trainer.gradient)
            update = jax.jit(trainer.update, donate_argnums=(1, 2))
            for _ in range(3):
                (_, state), self.gradients = _shapes(gradient.trace(*args).out_info)
                traced = update.trace(self.gradients, optimizer, args[0])
                params, optimizer = _shapes(traced.out_info)
                args = params, state, *data.inputs
            lowered = [
                gradient.lower(*args),
                update.lower(self.gradients, optimizer, args[0]),
            ]
        self.trainer = trainer
        self.optimizer = optimizer
        self.traces = count[0]
        self._compiled = [compiler(program) for program in lowered]

    @property
    def programs(self) -> list[_Program]:
        """The compiled programs."""
        return [program.result() for program in self._compiled]

    def runner(self, data: Data) -> Callable[[], Any]:
        """Returns a function that runs one training step."""
        # Steps donate their buffers, so copy the parameters.
        params = jax.tree.map(jnp.copy, self.trainer.params)
        optimizer = jax.tree.map(
            lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), self.optimizer
        )
        held = [params, optimizer, self.trainer.state]
        programs = [program.run for program in self.programs]

        def run() -> Any:
            params, optimizer, state = held
            if self.trainer.one_jit:
                done = programs[0](optimizer, params, state, *data.inputs)
                (_, state), params, optimizer = done
            else:
                (_, state), grads = programs[0](params, state, *data.inputs)
                params, optimizer = programs[1](grads, optimizer, params)
            held[:] = params, optimizer, state
            return held

        return run

    def figures(
        self, hands: Mapping[str, str], lowering: Ratio | None, step: Ratio
    ) -> Figures:
        """Returns all figures; waits for the compiled programs."""
        costs = [program.run.cost_analysis() or {} for program in self.programs]
        memory = [program.run.memory_analysis() for program in self.programs]
        texts = [program.text for program in self.programs]
        return Figures(
            flops=sum(cost.get('flops', 0.0) for cost in costs),
            accessed_bytes=sum(cost.get('bytes accessed', 0.0) for cost in costs),
            temporary_bytes=max(size.temp_size_in_bytes for size in memory),
            peak_bytes=max(map(_allocated, memory)),
            dots=sum(len(_DOT.findall(text)) for text in texts),
            gradient_bytes=_bytes(self.gradients),
            optimizer_bytes=_bytes(self.optimizer),
            program=hands.get(texts[0], 'other'),
            traces=self.traces,
            lowering=lowering,
            step=step,
        )


def _allocated(memory: Any) -> int:
    """Returns the bytes of all buffers; results may alias donated arguments."""
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

"""Compiles training steps, and reads from the programs what they cost."""

import concurrent.futures
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from benchmarks.trainers import Trainer
from flax_sg.internals import jaxprs
from flax_sg.testing import optimized_hlo

# Matrix products, under their HLO names on CPUs, GPUs and TPUs.
_DOT = re.compile(
    r' (?:dot|convolution)\(|custom_call_target="__(?:cublas|cudnn\$conv|onednn\$mat)'
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What the programs of a training step cost.

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


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, and its optimized HLO."""

    run: Any
    text: str


class Compiler:
    """Compiles programs; equal ones of equal trees are compiled once.

    Attributes:
        pool: threads that begin at once. Without, a program is compiled when somebody
            asks for it, and traces are not slowed down.
    """

    def __init__(self, pool: concurrent.futures.Executor | None = None) -> None:
        self.pool = pool
        self._known: dict[Any, Callable[[], Program]] = {}

    def __call__(self, lowered: Any) -> Callable[[], Program]:
        """Returns a function that waits for the compiled program."""
        key = lowered.as_text(), lowered.in_tree, lowered.out_tree
        if key not in self._known:
            compile = functools.cache(functools.partial(self._compile, lowered))
            self._known[key] = (
                self.pool.submit(compile).result if self.pool else compile
            )
        return self._known[key]

    @staticmethod
    def _compile(lowered: Any) -> Program:
        compiled = lowered.compile()
        return Program(compiled, optimized_hlo(compiled))


def shapes(tree: Any) -> Any:
    """Returns the shapes of arrays, on no device in particular."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


class Step:
    """A training step, as one or two programs.

    Attributes:
        trainer: the trainer whose step is compiled.
        traces: how often the loss was traced in a loop of three steps.
        gradients: the shapes of the gradients that leave their program.
        optimizer: the shapes of the optimizer state.
    """

    def __init__(
        self,
        trainer: Trainer,
        inputs: Any,
        count: list[int],
        compiler: Compiler,
        place: Callable[[Any], Any] = shapes,
    ) -> None:
        """Traces and lowers the step, and has it compiled.

        Args:
            trainer: makes the programs.
            inputs: the inputs of the loss.
            count: counts the traces of the loss.
            compiler: compiles the programs.
            place: makes shapes of a tree of arrays, on the devices to compile for.
        """
        params, state = place(trainer.params), place(trainer.state)
        inputs = place(inputs)
        optimizer = place(jax.eval_shape(trainer.init, trainer.params))
        self.gradients: Any = None
        # What a step returns is where it was before: without this, XLA may keep the
        # gradients of sharded parameters whole.
        kept = _shardings(params), _shardings(optimizer)
        if trainer.one_jit:
            step = jax.jit(
                _both(trainer), donate_argnums=(0, 1), out_shardings=(None, *kept)
            )
            for _ in range(3):
                traced = step.trace(optimizer, params, state, *inputs)
                (_, state), params, optimizer = place(traced.out_info)
            lowered = [step.lower(optimizer, params, state, *inputs)]
        else:
            _, grads = jax.eval_shape(trainer.gradient, params, state, *inputs)
            self.gradients = place(grads)
            out = None, _shardings(self.gradients)
            gradient = jax.jit(trainer.gradient, out_shardings=out)
            update = jax.jit(trainer.update, donate_argnums=(1, 2), out_shardings=kept)
            for _ in range(3):
                traced = gradient.trace(params, state, *inputs)
                (_, state), self.gradients = place(traced.out_info)
                traced = update.trace(self.gradients, optimizer, params)
                params, optimizer = place(traced.out_info)
            lowered = [
                gradient.lower(params, state, *inputs),
                update.lower(self.gradients, optimizer, params),
            ]
        self.trainer = trainer
        self.optimizer = optimizer
        self.traces = count[0]
        self._compiled = [compiler(program) for program in lowered]

    @property
    def programs(self) -> list[Program]:
        """The compiled programs."""
        return [compiled() for compiled in self._compiled]

    def runner(
        self, params: Any, optimizer: Any, inputs: Sequence[jax.Array]
    ) -> Callable[[], Any]:
        """Returns a function that runs one training step, and goes on from the last.

        Args:
            params: the first parameters; they are donated.
            optimizer: the first state of the optimizer; it is donated.
            inputs: the inputs of the loss.
        """
        held = [params, optimizer, self.trainer.state]
        programs = [program.run for program in self.programs]

        def run() -> Any:
            params, optimizer, state = held
            if self.trainer.one_jit:
                done = programs[0](optimizer, params, state, *inputs)
                (_, state), params, optimizer = done
            else:
                (_, state), grads = programs[0](params, state, *inputs)
                params, optimizer = programs[1](grads, optimizer, params)
            held[:] = params, optimizer, state
            return held

        return run

    def cost(self, hands: Mapping[str, str]) -> Cost:
        """Returns what the step costs; waits for the compiled programs.

        Args:
            hands: the kinds of hand-written programs, by their texts.
        """
        costs = [jaxprs.counts(program.run) for program in self.programs]
        memory = [program.run.memory_analysis() for program in self.programs]
        texts = [program.text for program in self.programs]
        return Cost(
            flops=sum(cost.get('flops', 0.0) for cost in costs),
            accessed_bytes=sum(cost.get('bytes accessed', 0.0) for cost in costs),
            temporary_bytes=max(size.temp_size_in_bytes for size in memory),
            peak_bytes=max(map(peak, memory)),
            dots=sum(len(_DOT.findall(text)) for text in texts),
            gradient_bytes=_bytes(self.gradients),
            optimizer_bytes=_bytes(self.optimizer),
            program=hands.get(texts[0], 'other'),
            traces=self.traces,
        )


@functools.lru_cache(maxsize=32)
def _both(trainer: Trainer) -> Callable[..., Any]:
    """The step of a trainer; for other devices it is not traced again."""

    def both(opt_state: Any, params: Any, state: Any, *inputs: Any) -> Any:
        value, grads = trainer.gradient(params, state, *inputs)
        return value, *trainer.update(grads, opt_state, params)

    return both


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: getattr(leaf, 'sharding', None), tree)


def hands(steps: Mapping[str, Step]) -> dict[str, str]:
    """Returns the kinds of the programs that were written by hand, by their texts."""
    return {
        step.programs[0].text: kind
        for kind in ('partition', 'stops')
        for name, step in steps.items()
        if name.startswith(f'{kind} by hand')
    }


def peak(memory: Any) -> int:
    """Returns the bytes of all buffers; results may alias donated arguments."""
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

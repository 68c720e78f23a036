"""Measures the time to trace and lower a gradient, and to open a block.

    python -m benchmarks.tracing [--only REGEX]

Prints a table: each way to freeze relative to stops by hand, and the bound for
flax_sg, and how many functions of Python ran. Caches are cleared before each run, no
garbage is collected meanwhile, and only CPU time counts.
"""

import argparse
import contextlib
import dataclasses
import gc
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp

from benchmarks import models, modules, spellings, timing, trainers, workloads
from benchmarks.rivals import BY_HAND
from benchmarks.selections import Selection
from flax_sg import linen as nn
from flax_sg.engine import hooks
from flax_sg.internals import patching

WIDTH = 64
CALLS = 2000
HEADS = ('program', 'way', 'ratio', 'quartiles', 'at most', 'calls of Python')


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, written in several ways.

    Attributes:
        ways: losses of parameters and an input, by name.
        shapes: the shapes of their arguments.
        bound: the largest acceptable ratio for flax_sg.
        rounds: how often each way is traced and lowered.
    """

    ways: Mapping[str, Callable[..., jax.Array]]
    shapes: tuple[Any, ...]
    bound: float
    rounds: int

    def lower(self, loss: Callable[..., jax.Array]) -> Callable[[], None]:
        """Returns what traces the gradient of a loss and lowers it."""

        def run() -> None:
            # A new function each time, because JAX caches the traces of functions.
            jax.jit(jax.grad(lambda *args: loss(*args))).lower(*self.shapes)

        return run

    def ratios(self) -> dict[str, timing.Ratio]:
        """Returns times to trace and lower, relative to stops by hand."""

        def forget() -> None:
            jax.clear_caches()
            gc.collect()

        runs = {way: self.lower(loss) for way, loss in self.ways.items()}
        times = timing.interleaved(
            runs, self.rounds, clock=time.process_time, before=forget
        )
        return timing.ratios(times, BY_HAND)


def around(model: Any, where: Any) -> spellings.Apply:
    """Opens a block around ``model.apply``."""

    def apply(*args: Any) -> Any:
        with nn.stop_gradient(where):
            return model.apply(*args)

    return apply


def loss_of(apply: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Returns a loss: the sum of the model's output."""
    return lambda params, x: jnp.sum(apply({'params': params}, x))


def transformer(model: Any, pattern: str, glob: str, prefix: str) -> Program:
    """A transformer with frozen layers."""
    selection = Selection.of(pattern)
    x = jnp.ones((2, 8, WIDTH))
    ways = {
        BY_HAND: spellings.by_hand(model, selection),
        'flax_sg block, glob': around(model, glob),
        'flax_sg block, function': around(model, lambda path: path.startswith(prefix)),
        'flax_sg Frozen': nn.Frozen(model, glob).apply,
        'nn.map_variables': trainers.map_variables(model, selection),
    }
    params = jax.eval_shape(model.init, jax.random.key(0), x)['params']
    losses = {way: loss_of(apply) for way, apply in ways.items()}
    return Program(losses, (params, x), 1.05, 21)


def many(number: int, bound: float, rounds: int, *ways: str) -> Program:
    """Small modules, one after another."""
    losses = {}
    for way in (BY_HAND, *ways):
        make, spelling = modules.WAYS[way]
        model = modules.Many(number, make)
        losses[way] = loss_of(spelling(model, modules.KERNELS))
    return Program(losses, modules.shapes(number), bound, rounds)


def three_losses() -> Program:
    """Three losses of one model, each of which trains its own part."""
    [work] = [
        w
        for w in workloads.workloads(
            dataclasses.replace(workloads.Sizes(), width=WIDTH)
        )
        if w.name == 'three losses'
    ]
    params, state, inputs = work.arrays()
    losses = {
        BY_HAND: work.loss(spellings.by_hand),
        'flax_sg block': work.loss(spellings.block_around),
        'nn.map_variables': work.loss(trainers.map_variables),
    }
    ways = {
        way: lambda params, *inputs, loss=loss: loss(params, state, *inputs)[0]
        for way, loss in losses.items()
    }
    return Program(ways, (params, *inputs), 1.10, 21)


class SetUp(nn.Module):
    """Layers that keep their parameters, and what they compute of these, in setup."""

    number: int

    def setup(self) -> None:
        """Makes the layers."""
        self.layers = [Kept() for _ in range(self.number)]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns what the last layer returns."""
        for layer in self.layers:
            x = layer(x)
        return x


class Kept(nn.Module):
    """Keeps two parameters, and a value computed of one."""

    def setup(self) -> None:
        """Makes and keeps them."""
        self.scale = self.param('scale', nn.initializers.ones, (1, 4))
        self.bias = self.param('bias', nn.initializers.zeros, (1, 4))
        self.squared = self.scale**2

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns as many features as the input has."""
        return jnp.tanh(x * self.squared + self.bias)


@contextlib.contextmanager
def without_hooks() -> Iterator[None]:
    """Puts Flax's own functions in the places of the hooks."""
    for key, (owner, name) in patching.HOOKED.items():
        setattr(owner, name, patching.originals[key])
    try:
        yield
    finally:
        for key, (owner, name) in patching.HOOKED.items():
            setattr(owner, name, hooks.HOOKS[key])


def no_block(model: Any, x: jax.Array, rounds: int) -> Program:
    """A model of plain Flax, with and without the hooks of flax_sg."""

    def unhooked(*args: Any) -> Any:
        with without_hooks():
            return model.apply(*args)

    params = jax.eval_shape(model.init, jax.random.key(0), x)['params']
    losses = {BY_HAND: loss_of(unhooked), 'flax_sg imported': loss_of(model.apply)}
    return Program(losses, (params, x), 1.01, rounds)


EACH = ('flax_sg block in each', 'flax_sg lifted class in each')
PROGRAMS: dict[str, Callable[[], Program]] = {
    'transformer of 12 layers': lambda: transformer(
        models.Transformer(width=WIDTH), 'layer_.*', 'layer_*/**', 'layer_'
    ),
    'the same, scanned with remat': lambda: transformer(
        models.ScannedTransformer(width=WIDTH, remat=True),
        'layers/.*',
        'layers/**',
        'layers',
    ),
    '1,000 modules': lambda: many(1000, 1.08, 7, 'flax_sg block', 'nn.map_variables'),
    '1,000 modules, each with a block': lambda: many(1000, 1.10, 7, *EACH),
    '100 modules, each with a block': lambda: many(
        100, 1.10, 15, *EACH, 'nn.map_variables in each'
    ),
    'three losses': three_losses,
    'no block, 1,000 modules': lambda: no_block(
        modules.Many(1000), jnp.ones(modules.shapes(1)[1].shape), 15
    ),
    'no block, 40 layers with setup': lambda: no_block(SetUp(40), jnp.ones((2, 4)), 41),
}


def calls(fn: Callable[[], Any]) -> int:
    """Returns how many functions of Python the second of two calls runs."""
    count = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == 'call'

    for _ in range(2):
        count = 0
        jax.clear_caches()
        sys.setprofile(note)
        try:
            fn()
        finally:
            sys.setprofile(None)
    return count


def microseconds(fn: Callable[[], Any]) -> float:
    """Returns the time of one call, in the fastest of twenty rounds."""
    best = float('inf')
    for _ in range(20):
        begin = time.process_time()
        for _ in range(CALLS // 20):
            fn()
        best = min(best, time.process_time() - begin)
    return best / (CALLS // 20) * 1e6


def predicates() -> list[tuple[str, float, float]]:
    """Times functions of the path around a compiled step: microseconds, and bound."""
    rows, number, name = [], 400, 'gln'
    for count in (number, 22):
        params = {f'gln_{n}': jnp.ones(()) for n in range(count)}
        model = modules.Parameters(tuple(params))
        step = jax.jit(lambda params, model=model: model.apply({'params': params}))

        def block(where: Any, step: Any = step, params: Any = params) -> Any:
            def run() -> None:
                with nn.stop_gradient(where):
                    step(params)

            return run

        glob = microseconds(block('gln_*'))
        alone = microseconds(block(lambda path: path.startswith('gln')))
        reads = microseconds(block(lambda path: path.startswith(name)))
        what = f'around a step of {count} variables, more than with a glob'
        rows.append((f'a function of the path {what}', alone - glob, 30))
        # It is asked about the variables of both models, which share its code.
        rows.append(
            (f'a function that reads a name {what}', reads - glob, 0.6 * number)
        )
    return rows


def open_and_close() -> list[tuple[str, float, float]]:
    """Times blocks around a compiled step and a layer: microseconds, and bound."""
    model = modules.Many(1)
    shapes, x = modules.shapes(1)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes)
    x = jnp.ones(x.shape)
    step = jax.jit(lambda params, x: model.apply({'params': params}, x))

    def block(where: Any) -> Callable[[], None]:
        def run() -> None:
            with nn.stop_gradient(where):
                step(params, x)

        return run

    gc.collect()  # The classes of other programs would slow down the hooks.
    jax.clear_caches()
    plain = microseconds(lambda: step(params, x))
    glob = block('small_*/dense/kernel')
    function = block(lambda path: path.endswith('/kernel'))
    with nn.stop_gradient('small_*/dense/kernel'):
        inside = microseconds(lambda: step(params, x))
    dense = nn.Dense(4)
    variables = dense.init(jax.random.key(0), x)

    def eager_block() -> None:
        with nn.stop_gradient('kernel'):
            dense.apply(variables, x)

    eager = microseconds(lambda: dense.apply(variables, x))
    # The hooks alone: what a Dense computes takes a hundred times as long.

    def read(scope: Any) -> Any:
        return [scope.get_variable('params', name) for name in ('kernel', 'bias')]

    hooked = microseconds(lambda: flax.core.apply(read)(variables))
    with without_hooks():
        unhooked = microseconds(lambda: flax.core.apply(read)(variables))
    return [
        *predicates(),
        (
            f'reads of two parameters in no block, of an eager Dense of {eager:.0f}',
            hooked - unhooked,
            0.01 * eager,
        ),
        ('a compiled step, called in an open block', inside - plain, 20),
        ('a block opened and closed, glob', microseconds(glob) - plain, 30),
        ('a block opened and closed, function', microseconds(function) - plain, 60),
        (
            f'a block around an eager Dense, which takes {eager:.0f}',
            microseconds(eager_block) - eager,
            0.15 * eager,
        ),
    ]


def main() -> None:
    """Measures the chosen programs, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--only', default='', help='a part of the name of a program')
    only = parser.parse_args().only
    gc.disable()
    print(f'| {" | ".join(HEADS)} |\n|---|---|---|---|---|---|')
    for name, make in PROGRAMS.items():
        if not re.search(only, name):
            continue
        program = make()
        count = {way: calls(program.lower(loss)) for way, loss in program.ways.items()}
        for way, ratio in program.ratios().items():
            bound = f'{program.bound:.2f}' if way.startswith('flax_sg') else ''
            quartiles = f'{ratio.low:.2f} to {ratio.high:.2f}'
            of_calls = f'{count[way] / count[BY_HAND]:.3f}'
            row = name, way, f'{ratio.median:.2f}', quartiles, bound, of_calls
            print(f'| {" | ".join(row)} |', flush=True)
    if re.search(only, 'a block'):
        print('\n| microseconds | measured | at most |\n|---|---|---|')
        for what, measured, bound in open_and_close():
            print(f'| {what} | {measured:.0f} | {bound:.0f} |')


if __name__ == '__main__':
    main()

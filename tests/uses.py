"""Programs that use a module before, in and after blocks.

A program is a tuple of uses and blocks. The module or function under test runs it. The
expected result of each use comes from plain Flax: the same uses without blocks, on a
copy of the weights that is stopped by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jax.extend import core as jax_core

import oracle
from flax_sg import linen as nn


class StopError(Exception):
    """Raised to leave a block early."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A block in a program.

    Attributes:
        takes: which variables it stops, by their own name.
        body: uses and blocks inside of it.
        raises: whether its body ends with an exception, caught outside.
    """

    takes: Callable[[str], bool]
    body: tuple[Any, ...]
    raises: bool = False


USE = 'use'
X = jnp.array([1.0, 2.0, -1.0])
STREAMS = ('params', 'noise', 'dropout')
RNGS = {name: jax.random.key(i) for i, name in enumerate(STREAMS)}
Program = tuple[Any, ...]


def everything(name: str) -> bool:
    return True


def weights(name: str) -> bool:
    """Not 'A': an adapter under the path of its base is told apart by its name."""
    return name in ('w', 'kernel', 'embedding', 'scale')


def others(name: str) -> bool:
    return not weights(name)


PROGRAMS: dict[str, Program] = {
    'around': (USE, Block(everything, (USE,)), USE),
    'some': (USE, Block(weights, (USE,)), USE),
    'first in it': (Block(weights, (USE, USE)), USE),
    'nested': (USE, Block(weights, (USE, Block(others, (USE,)), USE)), USE),
    'nested, first in it': (Block(others, (Block(weights, (USE,)), USE)), USE),
    'twice': (Block(everything, (USE,)), USE, Block(weights, (USE,)), USE),
    'raises': (USE, Block(everything, (USE,), raises=True), USE),
    'all': (
        USE,
        Block(weights, (USE, Block(others, (USE,), raises=True))),
        USE,
        Block(everything, (USE,)),
        USE,
    ),
}


def plain(program: Program) -> Program:
    """The same uses without any block."""
    return (USE,) * len(stops_of(program))


def stops_of(program: Program, outer: Program = ()) -> list[tuple[Any, ...]]:
    """For each use, what the blocks around it take."""
    stops = []
    for item in program:
        if isinstance(item, Block):
            stops += stops_of(item.body, (*outer, item.takes))
        else:
            stops.append(outer)
    return stops


def run(program: Program, use: Callable[[], Any]) -> tuple[Any, ...]:
    """Runs a program; returns what its uses gave."""
    results: list[Any] = []
    _run(program, use, results)
    return tuple(results)


def _run(program: Program, use: Callable[[], Any], results: list[Any]) -> None:
    for item in program:
        if not isinstance(item, Block):
            results.append(use())
            continue
        try:
            with nn.stop_gradient(_by_name(item.takes), unused='ignore'):
                _run(item.body, use, results)
                if item.raises:
                    raise StopError
        except StopError:
            pass


def _by_name(takes: Callable[[str], bool]) -> Callable[[Any], bool]:
    return lambda path: takes(path.name)


class Route(linen.Module):
    """A module that runs a program. A subclass defines ``use`` or ``parts``."""

    program: Program = (USE,)

    def parts(self) -> Callable[[Any], Any]:
        """Makes what the program uses, and returns the use."""
        return self.use

    @linen.compact
    def __call__(self, x: Any) -> Any:
        use = self.parts()
        return run(self.program, lambda: use(x))


def param(module: linen.Module, name: str) -> jax.Array:
    """A parameter of three numbers."""
    return module.param(name, linen.initializers.normal(), (3,))


class Kid(linen.Module):
    """Keeps its parameters, raw and derived."""

    def setup(self):
        self.w = param(self, 'w')
        self.b = param(self, 'b')
        self.w2 = self.w * self.w + self.b

    def __call__(self, x):
        return x * self.w + self.b

    def other(self, x):
        return x * self.w2

    @property
    def doubled(self):
        return self.w + self.get_variable('params', 'b')


class CompactKid(linen.Module):
    """The same parameters, read at each call."""

    @linen.compact
    def __call__(self, x):
        return x * param(self, 'w') + param(self, 'b')


def integers(tree: Any) -> Any:
    """Replaces floats by small whole numbers, so that no sum is rounded."""
    leaves, treedef = jax.tree.flatten(tree)

    def values(i: int, leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        numbers = 1 + (jnp.arange(leaf.size) * 3 + i * 2) % 4
        return jnp.asarray(numbers.reshape(leaf.shape), leaf.dtype)

    return treedef.unflatten([values(i, leaf) for i, leaf in enumerate(leaves)])


# A program as a function: (params, x) -> (results of the uses, writes).
Fn = Callable[[Any, Any], tuple[Any, Any]]


def expected(program: Program, fn: Fn) -> Fn:
    """What ``program`` should compute, from ``fn`` of the program without blocks."""

    def expected_fn(params: Any, x: Any) -> tuple[Any, Any]:
        by_stops: dict[Any, Any] = {}
        for stops in stops_of(program):

            def selects(path: str, stops: Sequence[Any] = stops) -> bool:
                return any(takes(path.rpartition('/')[2]) for takes in stops)

            if stops not in by_stops:
                by_stops[stops] = fn(oracle.stopped(params, selects), x)[0]
        results = [by_stops[stops][i] for i, stops in enumerate(stops_of(program))]
        return tuple(results), fn(params, x)[1]

    return expected_fn


def both(fn: Fn) -> Fn:
    """The values of ``fn`` while it is differentiated, and the gradient of each."""
    return lambda params, x: (
        jax.vjp(fn, params, x)[0],
        oracle.grads(fn, params, x),
    )


def eager(fn: Fn) -> Fn:
    """``fn`` as it is."""
    return fn


def staged(fn: Fn) -> Fn:
    """``fn`` as it is traced by ``jax.jit``, run one operation after the other."""

    def staged_fn(params: Any, x: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(params, x)
        flat = jax_core.jaxpr_as_fun(jaxpr)(*jax.tree.leaves((params, x)))
        return jax.tree.unflatten(jax.tree.structure(shape), flat)

    return staged_fn


# A module for each program.
Make = Callable[[Program], linen.Module]


def variables_of(make: Make, program: Program) -> Any:
    """Variables of whole numbers for the module that runs a program."""
    return integers(make(plain(program)).init(RNGS, X))


def fn_of(make: Make, variables: Any, mutable: Any) -> Callable[[Program], Fn]:
    """What ``apply`` of a program's module computes."""
    state = {col: tree for col, tree in variables.items() if col != 'params'}

    def of_program(program: Program) -> Fn:
        module = make(program)

        def fn(params: Any, x: Any) -> tuple[Any, Any]:
            variables = {'params': params, **state}
            if not mutable:
                return module.apply(variables, x, rngs=RNGS), {}
            out, written = module.apply(variables, x, rngs=RNGS, mutable=mutable)
            written = dict(written)
            params = written.pop('params', {})
            # What a block lets its body write depends on what it stops in there.
            return out, {'params': params, **jax.lax.stop_gradient(written)}

        return fn

    return of_program


def check(
    make: Make, program: Program, mutable: Any = False, stage: Any = staged
) -> None:
    """Compares what a program computes with what it should, values and gradients."""
    variables = variables_of(make, program)
    of_program = fn_of(make, variables, mutable)
    actual = stage(both(of_program(program)))
    wanted = stage(both(expected(program, of_program(plain(program)))))
    params = variables['params']
    oracle.assert_same(actual(params, X), wanted(params, X))


def initialization_is_that_without_blocks(make: Any) -> None:
    """Under ``jit``, where parameters are tracers when they are created."""

    def init(program: Program) -> Any:
        def fn(key: Any, x: Any) -> Any:
            return make(program).init_with_output({**RNGS, 'params': key}, x)

        return fn

    program, args = PROGRAMS['nested, first in it'], (RNGS['params'], X)
    actual = staged(init(program))(*args)
    oracle.assert_same(actual, staged(init(plain(program)))(*args))

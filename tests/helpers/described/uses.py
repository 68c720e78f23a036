"""Programs that use a module before, in and after blocks.

The module or function under test runs a program. The expected result of each use comes
from plain Flax: the program without blocks, on the values that are seen at that use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from tests.helpers import oracle, stepwise
from tests.helpers.described import language
from tests.helpers.described.by_hand import ByHand, Values
from tests.helpers.described.language import (
    EVERYTHING,
    Block,
    Leave,
    Program,
    Use,
    Where,
    without_blocks,
)
from tests.helpers.described.real import Real

X = jnp.array([1.0, 2.0, -1.0])
STREAMS = ('params', 'noise', 'dropout')
RNGS = {name: jax.random.key(i) for i, name in enumerate(STREAMS)}

USE = Use()
# Not 'A': an adapter under the path of its base is told apart by its name.
WEIGHTS = Where('name', ('w', 'kernel', 'embedding', 'scale'))
OTHERS = Where('name', WEIGHTS.names, negated=True)

PROGRAMS: dict[str, Program] = {
    'around': (USE, Block(EVERYTHING, (USE,)), USE),
    'some': (USE, Block(WEIGHTS, (USE,)), USE),
    'first in it': (Block(WEIGHTS, (USE, USE)), USE),
    'nested': (USE, Block(WEIGHTS, (USE, Block(OTHERS, (USE,)), USE)), USE),
    'nested, first in it': (Block(OTHERS, (Block(WEIGHTS, (USE,)), USE)), USE),
    'all': (
        USE,
        Block(WEIGHTS, (USE, Block(OTHERS, (USE, Leave())))),
        USE,
        Block(EVERYTHING, (USE,)),
        USE,
    ),
}


class _Uses(language.Interpreter):
    """Collects what the uses give; ``results_at`` is called at each of them."""

    def __init__(self, results_at: Callable[[Any], Any]) -> None:
        self.results_at, self.results = results_at, list[Any]()

    def use(self, item: Use, place: Any) -> None:
        self.results.append(self.results_at(place))


class _Real(_Uses, Real):
    pass


class _ByHand(_Uses, ByHand):
    pass


def run(program: Program, use: Callable[[], Any]) -> tuple[Any, ...]:
    """Runs a program; returns what its uses gave."""
    uses = _Real(lambda _: use())
    uses.run(program)
    return tuple(uses.results)


def by_hand(
    program: Program, each: Callable[[Any], Any], params: Any
) -> tuple[Any, ...]:
    """What ``each`` gives for the parameters that are seen, for each use."""
    uses = _ByHand(functools.cache(lambda values: each(values.params)))
    uses.run(program, Values(params))
    return tuple(uses.results)


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
        seen = by_hand(program, lambda params: fn(params, x)[0], params)
        return tuple(out[i] for i, out in enumerate(seen)), fn(params, x)[1]

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
    return functools.partial(stepwise.evaluate, fn)


# A module for each program.
Make = Callable[[Program], linen.Module]


def variables_of(make: Make, program: Program) -> Any:
    """Variables of whole numbers for the module that runs a program."""
    return integers(make(without_blocks(program)).init(RNGS, X))


def fn_of(
    module: linen.Module, mutable: Any = False, variables: Any = None, **options: Any
) -> Fn:
    """What ``apply`` of a program's module computes.

    Args:
        module: the module.
        mutable: which collections are mutable.
        variables: what it is applied to, beside the parameters.
        **options: for ``apply``.
    """
    options = {'rngs': RNGS, **options}

    def fn(params: Any, x: Any) -> tuple[Any, Any]:
        given = {**(variables or {}), 'params': params}
        if not mutable:
            return module.apply(given, x, **options), {}
        out, written = module.apply(given, x, mutable=mutable, **options)
        written = dict(written)
        params = written.pop('params', {})
        # What a block lets its body write depends on what it stops in there.
        return out, {'params': params, **jax.lax.stop_gradient(written)}

    return fn


def check(
    make: Make,
    program: Program,
    mutable: Any = False,
    stage: Any = staged,
    variables: Any = None,
    **options: Any,
) -> None:
    """Compares what a program computes with what it should, values and gradients."""
    variables = variables or variables_of(make, program)

    def fn(program: Program) -> Fn:
        return fn_of(make(program), mutable, variables, **options)

    actual = stage(both(fn(program)))
    wanted = stage(both(expected(program, fn(without_blocks(program)))))
    params = variables['params']
    oracle.assert_same(actual(params, X), wanted(params, X))


def initialization_is_that_without_blocks(make: Make) -> None:
    """Under ``jit``, where parameters are tracers when they are created."""

    def init(program: Program) -> Any:
        def fn(key: Any, x: Any) -> Any:
            return make(program).init_with_output({**RNGS, 'params': key}, x)

        return staged(fn)(RNGS['params'], X)

    program = PROGRAMS['nested, first in it']
    oracle.assert_same(init(program), init(without_blocks(program)))

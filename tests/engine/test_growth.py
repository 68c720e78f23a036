"""Long loops keep no memory of a step, and do not retrace.

Two counts find leaks: all objects of the library's own types, and all objects that its
modules' globals reach. Both are taken with warm caches, and again after some hundred
steps (10,000 with `--hypothesis-profile=long`).
"""

import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import pytest

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.engine import numbers
from tests.helpers import oracle
from tests.helpers.profile import LONG

WARM, STEPS = (1_000, 10_000) if LONG else (60, 200)
SLACK = 50 if LONG else 10  # Objects: a leak of one in 20 steps would be more.

TRACES: list[None] = []
W = jnp.asarray([0.5, 2.0])
VARIABLES = {'params': {'a': {'w': W}, 'b': {'w': W + 1.0}}}


def read(variables: Any, names: tuple[str, ...] = ('a', 'b')) -> list[Any]:
    """Reads some variables as a model does, and computes nothing."""

    def fn(scope: Any) -> list[Any]:
        return [scope.push(name).get_variable('params', 'w') for name in names]

    return flax.core.apply(fn)(variables)


@jax.jit
def step(variables: Any) -> Any:
    """The gradient of a model: compiled by the first call under each set of answers."""
    TRACES.append(None)

    def loss(variables: Any) -> Any:
        a, b = read(variables)
        return jnp.sum(a * b)

    return jax.grad(loss)(variables)['params']


def by_hand(frozen: str) -> Any:
    """What ``step`` has to give where one module is stopped."""
    a, b = (VARIABLES['params'][name]['w'] for name in 'ab')
    found = {'a': {'w': b}, 'b': {'w': a}}
    return {**found, frozen: {'w': jnp.zeros_like(W)}}


@pytest.fixture(autouse=True)
def _known_to_nobody() -> Iterator[None]:
    """Each test compiles the step anew; the garbage collector looks at its objects."""
    step.clear_cache()
    TRACES.clear()
    gc.collect()
    gc.freeze()
    yield
    step.clear_cache()


# What is passed through: what a module, a class or a function holds was there before.
_DEFINITIONS = (types.ModuleType, type, types.FunctionType, types.CodeType)
_OUR_OWN = 'flax_sg'


def _is_ours(obj: Any) -> bool:
    # Of some types it is no str.
    return str(type(obj).__module__).partition('.')[0] == _OUR_OWN


def _holds(obj: Any) -> bool:
    """Whether what the library keeps may be in it."""
    kinds = (dict, list, tuple, set, frozenset, weakref.ref, threading.local)
    return isinstance(obj, kinds) or _is_ours(obj)


def kept() -> dict[str, int]:
    """How many objects the library keeps, counted in two ways."""
    gc.collect()
    seen: dict[int, Any] = {}
    modules = [m for n, m in sys.modules.items() if n.partition('.')[0] == _OUR_OWN]
    left = [value for module in modules for value in vars(module).values()]
    while left:
        obj = left.pop()
        if id(obj) in seen or isinstance(obj, _DEFINITIONS):
            continue
        seen[id(obj)] = obj
        if _holds(obj):
            left += gc.get_referents(obj)
    ours = sum(map(_is_ours, gc.get_objects()))
    return {'reached from globals': len(seen), 'of our own types': ours}


def assert_nothing_is_kept(
    body: Callable[[int], Any], warm: int = WARM, steps: int = STEPS
) -> None:
    """Runs steps by their number; what is kept does not grow once caches are warm."""
    before: dict[str, int] = {}
    for i in range(steps):
        if i == warm:
            before = kept()
        body(i)
    for name, count in kept().items():
        assert count <= before[name] + SLACK, f'{name}: {before[name]} -> {count}'


class Config:
    """What a predicate reads; its life is watched by a weak reference."""

    def __init__(self, frozen: str = 'a') -> None:
        self.frozen = frozen


class Watched:
    """Notes the objects that predicates captured, and sees that they die."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[Any]] = {}

    def capture(self, i: int, config: Config) -> Config:
        """Called in each step; looks after those of 20 steps ago every 50 steps."""
        self._alive[i] = weakref.ref(config)
        if i % 50 == 20:
            gc.collect()
            alive = [n for n, ref in self._alive.items() if ref() is not None]
            assert min(alive) > i - 20, f'captured in step {min(alive)}, alive in {i}'
            self._alive = {n: self._alive[n] for n in alive}
        return config


def test_a_fresh_lambda_in_each_step():
    watched, expected = Watched(), by_hand('a')

    def body(i: int) -> None:
        config = watched.capture(i, Config())
        with nn.stop_gradient(lambda path: path.startswith(config.frozen)):
            found = step(VARIABLES)
        if i % 50 == 0:
            oracle.assert_same(found, expected)

    assert_nothing_is_kept(body)
    assert len(TRACES) == 1


def test_predicates_with_answers_that_come_once(monkeypatch):
    """Each of them is traced, which takes time: fewer steps. Nothing is compiled.

    A bounded number of them is known: then all are forgotten.
    """
    monkeypatch.setattr(numbers, 'MOST', 50)
    names = tuple(f'v{bit}' for bit in range(10))
    variables = {'params': {name: {'w': W} for name in names}}

    @jax.jit
    def program(variables: Any) -> None:
        TRACES.append(None)
        read(variables, names)

    def body(i: int) -> None:
        with nn.stop_gradient(
            lambda path: bool(i >> int(path.parts[0][1:]) & 1), unused='ignore'
        ):
            program.trace(variables)

    assert_nothing_is_kept(body, warm=150, steps=300)
    assert len(TRACES) == 300


def test_bound_modules_that_come_and_go():
    """A program that reads a module of the closure is kept as long as the module."""
    dense = nn.Dense(2)
    params = {'params': {'kernel': jnp.eye(2), 'bias': W}}
    watched = Watched()

    def body(i: int) -> None:
        module = watched.capture(i, dense.bind(params))
        reads = jax.jit(lambda x: x + module.get_variable('params', 'bias'))
        with nn.stop_gradient(lambda path: path == 'bias'):
            reads.trace(W)

    # Each module is another closure, which JAX has to trace: fewer steps.
    assert_nothing_is_kept(body, warm=150, steps=300)


# Experiments in one process: nothing of one that is over is kept.


def experiment(number: int, watched: list[weakref.ref[Any]]) -> None:
    """Classes, data, filters and programs of its own."""
    data = jnp.full((64, 64), float(number))
    name = f'layer_{number % 3}'

    class Body(nn.Module):
        def setup(self):
            self.scale = 2.0 * self.param('scale', nn.initializers.ones, (1, 2))

        def __call__(self, x):
            return x * self.scale + jnp.mean(data)

    lifted = nn.scale_gradient('scale', 1.0 + number)(Body)
    stopped = nn.stop_gradient(Body, 'scale')

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Frozen(nn.Dense(2), lambda path: path.name == 'bias')(x)
            x = nn.jit(Body)(name=name)(x) + lifted(name='lifted')(x)
            return stopped(name='stopped')(x)

    model = Net()
    params = jax.eval_shape(model.init, jax.random.key(0), W[None])['params']

    def where(path: sg.Path) -> bool:
        return path.startswith(name)

    def loss(params: Any) -> Any:
        return jnp.sum(model.apply({'params': params}, W[None]))

    step = jax.jit(jax.grad(loss))
    with nn.stop_gradient(where):
        jax.eval_shape(step, params)
        jax.eval_shape(step, params)
    things = [data, Body, Net, lifted, stopped, model, where, loss, step]
    watched += map(weakref.ref, things)


def test_an_experiment_that_is_over_is_freed():
    watched: list[weakref.ref[Any]] = []
    for number in range(12):
        experiment(number, watched)
    jax.clear_caches()
    for _ in range(3):  # A class that is freed frees the class below it.
        gc.collect()
    assert [ref() for ref in watched if ref() is not None] == []

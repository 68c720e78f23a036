"""What goes wrong around a block: exceptions anywhere, threads, depth, size, names.

What no test can provoke: an exception between the last line of a body and the first of
``__exit__``. A ``with`` statement whose ``__exit__`` is written in Python has that gap.
"""

import gc
import importlib
import sys
import threading
import unicodedata
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_sg
import flax_sg as sg
import oracle
from flax_sg import _private, blocks, errors
from flax_sg import linen as nn

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)
OWNERS = [owner for owner, _ in _private._HOOKED.values()]
FLAX = [dict(vars(owner)) for owner in OWNERS]


def assert_nothing_is_left() -> None:
    """No block is open, nothing is kept for one, and Flax is as it was."""
    thread = blocks.thread
    assert (thread.blocks, thread.roots, thread.replay) == ((), {}, None)
    assert (thread._aside, thread.number_of._of) == (0, {})
    assert _private.user_context.value == 0
    assert (blocks._open_blocks, _private._users) == (set(), set())
    assert [dict(vars(owner)) for owner in OWNERS] == FLAX


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    try:
        assert_nothing_is_left()
    finally:  # One failure, not one in every test that follows.
        for block in tuple(blocks._open_blocks):
            blocks.remove(block)
        blocks.thread.set_blocks(())
        for user in (*_private._users, None):
            _private.release_hooks(user)


# An exception at any point.


class Ctrl(BaseException):
    """What comes at any time, as KeyboardInterrupt does, and is no Exception."""


class Model(fnn.Module):
    """Keeps values in ``setup``, and opens blocks of several kinds."""

    def setup(self):
        self.a = fnn.Dense(2, use_bias=False)
        self.w = self.param('w', fnn.initializers.ones, (2, 2))
        self.kept = jnp.tanh(self.w)

    def __call__(self, x):
        with nn.stop_gradient(lambda path: path.startswith('w')):
            y = self.kept * x
        with nn.scale_gradient('a/*', 2.0):
            return self.a(y)


@jax.custom_vjp
def squared(params, x):
    return x**2 * params['params']['w']


squared.defvjp(
    lambda params, x: (squared(params, x), (params, x)),
    lambda kept, ct: jax.vjp(lambda p, x: Model().apply(p, x), *kept)[1](ct),
)


class Step(fnn.Module):
    @fnn.compact
    def __call__(self, x, _):
        return nn.Frozen(fnn.Dense(2))(x) + fnn.Dense(2)(x), None


class Lifts(fnn.Module):
    """Lifted transforms in a block, with and without a write."""

    @fnn.compact
    def __call__(self, x):
        steps = fnn.scan(
            Step, variable_axes={'params': 0}, split_rngs={'params': True}, length=2
        )
        with nn.stop_gradient('*/Dense_0/*'):
            x, _ = steps(name='steps')(x, None)
            # A new class, so that it is traced anew.
            norm = fnn.jit(type('Norm', (fnn.BatchNorm,), {}))
            return norm(use_running_average=False, name='norm')(x)


class Wraps(fnn.Module):
    """Wrappers that hold state and count draws of their own."""

    def setup(self):
        self.norm = fnn.BatchNorm(use_running_average=False)
        self.drop = fnn.Sequential(
            [fnn.Dense(2), fnn.Dropout(0.5, deterministic=False)]
        )

    def __call__(self, x):
        y = nn.Frozen(self.norm, state='hold')(self.drop(x))
        z = nn.mirror(self.norm, state='use_running_average')(nn.mirror(self.drop)(x))
        return self.norm(y) + z


def in_blocks(variables: Any) -> Any:
    with nn.stop_gradient('a/*'), nn.train_only(['w', 'a/*']):
        return Model().apply(variables, X)


def in_rules(variables: Any) -> Any:
    with nn.stop_gradient('w'):
        return jax.vjp(squared, variables, X)[1](X)


def in_lifts(variables: Any) -> Any:
    return Lifts().apply(variables, X, mutable=['batch_stats'])


def in_wrappers(variables: Any) -> Any:
    rngs = {'dropout': jax.random.key(1)}
    return Wraps().apply(variables, X, mutable=['batch_stats'], rngs=rngs)


def by_core(variables: Any) -> Any:
    tree = sg.stop_gradient(variables['params'], 'a/*')
    value = nn.substitute({'a': {'kernel': jnp.ones((2, 2))}})
    with value, nn.read_only(True), nn.clip_gradient('w', norm=1.0):
        return Model().apply({'params': tree}, X)


PROGRAMS: dict[str, tuple[Callable[[Any], Any], Any, int]] = {
    'blocks': (in_blocks, Model(), 17),
    'rules': (in_rules, Model(), 97),
    'lifts': (in_lifts, Lifts(), 211),
    'wrappers': (in_wrappers, Wraps(), 89),
    'values': (by_core, Model(), 31),
}
LIBRARY = str(Path(flax_sg.__file__).parent)


class Interrupts:
    """Raises where Ctrl-C may: as a function begins, and as one in C has returned.

    In functions of the library and of this file, at one point of all that there are.
    """

    def __init__(self, at: int | None) -> None:
        self.met, self._at = 0, at

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith(LIBRARY) or code.co_filename == __file__
        unprotected = code.co_name in ('__exit__', '_run_interrupted')
        if not ours or event not in ('call', 'c_return') or unprotected:
            return
        self.met += 1
        if self.met == self._at:
            raise Ctrl


def _run_interrupted(fn: Callable[[], Any], at: int | None) -> int:
    """The number of points; raises ``Ctrl`` at one of them."""
    interrupts = Interrupts(at)
    sys.setprofile(interrupts)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return interrupts.met


# Python drops what is raised in a generator that it throws away.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('name', PROGRAMS)
def test_an_exception_at_any_point(name):
    program, model, every = PROGRAMS[name]
    keys = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
    variables = jax.jit(model.init)(keys, X)

    def run() -> str:
        return str(jax.make_jaxpr(lambda v: program(v))(variables))  # Anew each time.

    expected = run()
    points = _run_interrupted(run, None)
    assert points > 10 * every, points
    raised = 0
    for at in range(1 + every // 2, points, every):
        try:
            _run_interrupted(run, at)
        except Ctrl:
            raised += 1
        assert_nothing_is_left()
        if at % 8 == 0:
            assert run() == expected
    assert run() == expected
    assert raised >= 10

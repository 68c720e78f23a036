"""Faults around a block: exceptions anywhere, depth, reloads, copies.

One fault cannot be tested: an exception between the last line of a body and the first
of ``__exit__``. A ``with`` statement whose ``__exit__`` is written in Python has that
gap.
"""

import contextlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.engine import blocks, judgement
from tests.helpers import left_over, oracle
from tests.helpers.described.modules import Do
from tests.helpers.left_over import assert_nothing_is_left
from tests.helpers.profile import LONG

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)


_clean = pytest.fixture(autouse=True)(left_over.checked_after_a_test)


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


PARAMS = {'a': {'kernel': jnp.ones((2, 2))}, 'w': jnp.ones((2, 2))}


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


def lifts(self, x):
    """Lifted transforms in a block, with and without a write."""
    steps = fnn.scan(Step, length=2, **oracle.STACKED)
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
        z = nn.mirror(self.norm, state='eval')(nn.mirror(self.drop)(x))
        return self.norm(y) + z


def in_blocks(variables: Any) -> Any:
    with nn.stop_gradient('a/*'), nn.train_only(['w', 'a/*']):
        return Model().apply(variables, X)


def in_rules(variables: Any) -> Any:
    with nn.stop_gradient('w'):
        return jax.vjp(squared, variables, X)[1](X)


def in_lifts(variables: Any) -> Any:
    return Do(lifts).apply(variables, X, mutable=['batch_stats'])


def in_wrappers(variables: Any) -> Any:
    rngs = {'dropout': jax.random.key(1)}
    return Wraps().apply(variables, X, mutable=['batch_stats'], rngs=rngs)


def by_core(variables: Any) -> Any:
    tree = sg.stop_gradient(variables['params'], 'a/*')
    value = nn.substitute({'a': {'kernel': jnp.ones((2, 2))}})
    with value, nn.read_only(True), nn.clip_gradient('w', norm=1.0):
        return Model().apply({'params': tree}, X)


PROGRAMS: dict[str, tuple[Callable[[Any], Any], Any, int]] = {
    'blocks': (in_blocks, Model(), 47),
    'rules': (in_rules, Model(), 197),
    'lifts': (in_lifts, Do(lifts), 480),
    'wrappers': (in_wrappers, Wraps(), 227),
    'values': (by_core, Model(), 79),
}
LIBRARY = str(Path(sg.__file__).parent)


class Interrupts:
    """Raises where Ctrl-C may: as a function begins, and as one in C has returned.

    In functions of the library and of this file, at one point of all that there are.
    """

    def __init__(self, at: int | None, within: frozenset[str]) -> None:
        self.met, self._at, self._within = 0, at, within

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith(LIBRARY) or code.co_filename == __file__
        # Before their first line, what they end goes on; for Flax's own ends, too.
        unprotected = code.co_name in ('__exit__', 'end', '_run_interrupted')
        # What measures which lines run stands before each line.
        is_probe = 'probe' in str(getattr(arg, '__module__', None))
        if not ours or event not in ('call', 'c_return') or unprotected or is_probe:
            return
        if self._within and code.co_name not in self._within:
            return
        self.met += 1
        if self.met == self._at:
            raise Ctrl


def _run_interrupted(
    fn: Callable[[], Any], at: int | None, within: frozenset[str] = frozenset()
) -> int:
    """The number of points, in some functions; raises ``Ctrl`` at one of them."""
    interrupts = Interrupts(at, within)
    sys.setprofile(interrupts)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return interrupts.met


# What opens and closes blocks, and what they call for that.
IN_AND_OUT = frozenset(
    [
        *('open_block', 'close_block', 'close_last', '_close', 'remove', 'begin'),
        *('set_blocks', 'only', '_resumed', 'leave', '_temporary', 'applies_changed'),
        *('forget_roots', 'settle', 'take', 'hold', 'give_back'),
    ]
)


# Python drops what is raised in a generator that it throws away.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
@pytest.mark.parametrize('within', [frozenset(), IN_AND_OUT], ids=['all', 'in and out'])
@pytest.mark.parametrize('name', PROGRAMS)
def test_an_exception_at_any_point(name, within):
    program, model, every = PROGRAMS[name]
    every = 1 + every // 45 if within else every
    every *= 1 if LONG else 4 if within else 2
    keys = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
    variables = jax.jit(model.init)(keys, X)

    def run() -> str:
        # Anew each time.
        text = str(jax.make_jaxpr(lambda v: program(v))(variables))
        return re.sub(' at 0x[0-9a-f]+', '', text)

    expected = run()
    points = _run_interrupted(run, None, within)
    assert points > 3 * every, points
    raised = 0
    for at in range(1 + every // 2, points, every):
        try:
            _run_interrupted(run, at, within)
        except Ctrl:
            raised += 1
        assert_nothing_is_left()
        if at % 8 == 0:
            assert run() == expected
    assert run() == expected
    assert raised >= 2


def interrupted_once(fn: Callable[..., Any], kind: type = object) -> Any:
    """A function that is interrupted before it begins for something of a kind."""
    left = [Ctrl]

    def interrupted(of: Any, *args: Any) -> Any:
        if left and isinstance(of, kind):
            raise left.pop()
        return fn(of, *args)

    return interrupted


def has_w(self):
    return self.get_variable('params', 'w')


@jax.custom_vjp
def read(params):
    return Do(has_w).apply(params)


read.defvjp(
    lambda params: (read(params), params),
    lambda params, ct: (jax.tree.map(jnp.zeros_like, params),),
)


def test_what_is_interrupted_as_it_ends_ends_all_the_same(monkeypatch):
    thread = blocks.thread
    # Blocks that were set aside for a while.
    with nn.stop_gradient(True, unused='ignore'):
        open_blocks = thread.blocks
        with pytest.raises(Ctrl), monkeypatch.context() as patch, thread.only(()):
            patch.setattr(thread, 'set_blocks', interrupted_once(thread.set_blocks))
        assert thread.blocks == open_blocks
    # An ``apply``.
    with pytest.raises(Ctrl), monkeypatch.context() as patch:
        patch.setattr(judgement, 'settle', interrupted_once(judgement.settle))
        nn.Frozen(fnn.Dense(2)).init(jax.random.key(0), X)
    assert_nothing_is_left()
    # A rule that runs when its block is closed.
    with nn.stop_gradient('w'):
        pull_back = jax.vjp(read, {'params': {'w': X}})[1]
    with pytest.raises(Ctrl), monkeypatch.context() as patch:
        forget = interrupted_once(blocks.Block.forget_roots)
        patch.setattr(blocks.Block, 'forget_roots', forget)
        pull_back(X)


def loss_of(params: Any) -> Any:
    return {'a': jnp.sum(params['a']['kernel']), 'w': jnp.sum(params['w'] ** 2)}


COPIED: dict[str, Callable[[], Any]] = {
    'values': lambda: nn.substitute({'w': 2.0 * PARAMS['w']}),
    'a rule for cotangents': lambda: nn.clip_gradient('a/*', global_norm=1.0),
    'an array as a cotangent': lambda: nn.replace_cotangent('w', PARAMS['w']),
    'a frozen module': lambda: nn.Frozen(Model(), 'a/kernel', state='hold'),
    'frozen modules': lambda: fnn.Sequential((nn.Frozen(Model()), Model())),
    'another wrapper': lambda: nn.scale_gradient('w', 0.5)(Model()),
    'a report': lambda: sg.gradient_flow(loss_of, PARAMS),
    'a tree in parts': lambda: sg.partition({'a': 1.0, 'b': (2.0, 3.0)}, 'b/0'),
}


@pytest.mark.parametrize('name', COPIED)
def test_copies_are_equal_and_hash_alike(name):
    value = COPIED[name]()
    hashed = None if isinstance(value, tuple) else hash(value)
    # Copying has nothing to do with what is open.
    with nn.stop_gradient(True, unused='ignore'):
        twins = [*oracle.copies(value), cloudpickle.loads(cloudpickle.dumps(value))]
    for twin in twins:
        assert type(twin) is type(value)
        assert repr(twin) == repr(value)
        if name not in ('values', 'an array as a cotangent'):  # By identity.
            assert twin == value
            assert hashed is None or hash(twin) == hashed


@pytest.mark.usefixtures('leaks')
@pytest.mark.parametrize('name', ['rules', 'lifts', 'values'])
def test_no_tracer_leaks(name):
    """JAX raises if one outlives its trace."""
    program, model, _ = PROGRAMS[name]
    variables = jax.eval_shape(model.init, jax.random.key(0), X)

    def interrupted(variables):
        with contextlib.suppress(Ctrl), nn.stop_gradient(True, unused='ignore'):
            program(variables)
            raise Ctrl
        return program(variables)

    jax.eval_shape(lambda v: jax.jit(interrupted)(v), variables)


@pytest.mark.usefixtures('leaks')
def test_what_runs_is_told_without_the_variables_of_frames():
    """To read those of a frame of JAX keeps its tracers, before Python 3.13.

    Then JAX raises here that they leak.
    """
    cell = nn.scan(nn.SimpleCell, **oracle.SHARED)(2)
    steps = jnp.ones((3, 2, 2))
    for _ in range(2):
        with nn.stop_gradient('i/kernel'):
            cell.tabulate(
                *(jax.random.key(0), X, steps),
                compute_flops=True,
                compute_vjp_flops=True,
            )

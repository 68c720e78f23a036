"""Errors and warnings of a block at its end, and where blocks may open and close.

A pattern has to match a variable that exists; that is judged when the tree is complete.
A ``with`` block has to stop something that is read in it, or it warns, and a warning
that no test expects is an error.
"""

import contextlib
import functools
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx as fnnx

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.described.modules import Do

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)
KEY = jax.random.key(0)
HERE = Path(__file__).name


class Two(fnn.Module):
    """Two modules; subclasses say which of them is called, and in which block."""

    def setup(self):
        self.a, self.b = fnn.Dense(2), fnn.Dense(2)

    def __call__(self, x):
        return self.b(self.a(x))

    def first(self, x):
        return self.a(x)


MODEL = Two()
VARIABLES = oracle.init(MODEL, KEY, X)
PARAMS = VARIABLES['params']


def by_hand(stopped: str | tuple[str, ...], fn: Callable[[Any], Any]) -> Any:
    """The gradient of a function of parameters on weights stopped by hand."""
    return jax.grad(
        lambda params: fn(oracle.stopped(params, lambda p: p.startswith(stopped)))
    )(PARAMS)


def loss(params: Any) -> Any:
    return jnp.sum(MODEL.apply({'params': params}, X))


@contextlib.contextmanager
def warned(mark: str) -> Iterator[None]:
    """One warning that names the line of this file that ends in a comment."""
    lines = Path(__file__).read_text().splitlines()
    [line] = [i for i, text in enumerate(lines, 1) if text.endswith(f'  # {mark}')]
    with pytest.warns(errors.NothingStoppedWarning, match=f'{HERE}:{line}') as caught:
        yield
    assert len(caught) == 1


# What exists when the tree is complete.


class Later(fnn.Module):
    """A block that names what is made after it."""

    where: Any
    reached: Any = lambda: None

    @fnn.compact
    def __call__(self, x):
        with nn.train_only(self.where):
            h = fnn.Dense(2, name='a')(x)
        h = fnn.Dense(2, name='b')(h)
        self.reached()
        return h


class Mounted(Later):
    """The same below another module."""

    @fnn.compact
    def __call__(self, x):
        return Later(self.where, self.reached, name='net')(x)


def run_init(model: Any) -> None:
    model.init(KEY, X)


def run_apply(model: Any) -> None:
    params = {'net': PARAMS} if isinstance(model, Mounted) else PARAMS
    model.apply({'params': params}, X)


def run_jitted(model: Any) -> None:
    jax.jit(lambda: run_apply(model))()


@pytest.mark.parametrize(
    ('make', 'run'),
    [
        (Later, run_init),
        (Mounted, lambda model: jax.jit(model.init)(KEY, X)),
        (Later, run_jitted),
        (Mounted, run_apply),
    ],
)
def test_a_name_is_judged_when_the_tree_is_complete(make, run):
    """At the end of the block, the nearest path may be one that is made later."""
    run(make('b/**'))  # A name that is missing would raise.
    run(make(['a/kernel', 'b/bias']))
    reached: list[None] = []
    model = make(['a/**', 'bb/**'], reached=lambda: reached.append(None))
    with pytest.raises(errors.UnusedFilterError) as caught:
        run(model)
    assert "'bb/**'" in str(caught.value)
    if run not in (run_apply, run_jitted):
        assert reached
        assert "'b/" in str(caught.value)


def test_init_within_a_handler_is_judged():
    """That an exception is being handled does not mean that init has failed."""
    try:
        raise ValueError('an earlier attempt')
    except ValueError:
        run_init(Later('b/**'))
        with pytest.raises(errors.UnusedFilterError):
            run_init(Later('typo/**'))
        with pytest.raises(errors.UnusedFilterError), nn.stop_gradient('typo/**'):
            loss(PARAMS)


# A block that stopped nothing that was read in it.


class Missed(Two):
    """What the block names was computed a line before."""

    def __call__(self, x):
        h = self.a(x)
        with nn.stop_gradient('a/**'):  # missed
            return self.b(h)


def test_a_block_behind_the_read_warns():
    with warned('missed'):
        found = jax.grad(lambda p: jnp.sum(Missed().apply({'params': p}, X)))(PARAMS)
    oracle.assert_same(found, by_hand('nothing', loss))


def test_a_block_at_top_level_that_stopped_nothing_warns():
    with warned('top level'), nn.stop_gradient('b/**'):  # top level
        MODEL.apply(VARIABLES, X, method='first')
    bound = MODEL.bind(VARIABLES)
    h = bound.a(X)
    with warned('bound'), nn.stop_gradient('a/**'):  # bound
        bound.b(h)


def test_each_of_two_blocks_is_judged_by_itself():
    with warned('inner'), nn.stop_gradient('a/**'):
        with nn.stop_gradient('b/**'):  # inner
            MODEL.apply(VARIABLES, X, method='first')
        MODEL.apply(VARIABLES, X)
    # Both stop it, so neither of them warns: a warning is an error in all tests.
    with nn.stop_gradient('a/**'), nn.stop_gradient('a/kernel'):
        MODEL.apply(VARIABLES, X)


def test_a_compiled_step_that_reads_none_of_it_warns_at_each_call():
    step = jax.jit(lambda v: MODEL.apply(v, X, method='first'))
    for _ in range(3):
        with warned('compiled'), nn.stop_gradient('b/**'):  # compiled
            step(VARIABLES)


def live_nothing() -> Any:
    """A derived filter of no variable."""
    return sg.live(lambda params: jnp.sum(X), PARAMS)


SILENT: dict[str, Callable[[], Any]] = {
    'ignored': lambda: nn.stop_gradient('b/**', unused='ignore'),
    'ignored train_only': lambda: nn.train_only('c/**', unused='ignore'),
    'False': lambda: nn.stop_gradient(False),
    'True': lambda: nn.stop_gradient(True),
    'train_only of all': lambda: nn.train_only(True),
    'live': lambda: nn.stop_gradient(live_nothing() & True),
    'not live': lambda: nn.train_only(live_nothing()),
    'read_only': lambda: nn.read_only('b/**'),
    'train_only of what is read': lambda: nn.train_only('a/**'),
    'train_only of the rest': lambda: nn.train_only('b/**'),
}


@pytest.mark.filterwarnings('ignore:sg.live. the function trains none')
@pytest.mark.parametrize('name', SILENT)
def test_a_block_that_may_stop_nothing_is_silent(name):
    # Where no test expects a warning, it is an error.
    apply = functools.partial(MODEL.apply, x=X, method='first')
    step = jax.jit(apply)
    for call in (apply, step, step):
        with SILENT[name]():
            call(VARIABLES)

    class Blocks(Two):
        def __call__(self, x):
            with SILENT[name]():
                return self.a(x)

    Blocks().apply(VARIABLES, X)


# A block of all variables around code in which no module of linen runs.

NNX_MODEL = fnnx.Linear(2, 2, rngs=fnnx.Rngs(0))


AROUND_NOTHING: dict[str, Callable[[], Any]] = {
    'an NNX model': lambda: NNX_MODEL(X),
    'its gradient': lambda: fnnx.grad(lambda model: jnp.sum(model(X)))(NNX_MODEL),
    'its compiled step': lambda: fnnx.jit(lambda model: model(X))(NNX_MODEL),
    'nothing': lambda: None,
    'a program from before': lambda: COMPILED(VARIABLES, X),
}
COMPILED = jax.jit(MODEL.apply).lower(VARIABLES, X).compile()


@pytest.mark.parametrize('name', AROUND_NOTHING)
def test_a_block_of_everything_around_no_module_of_linen_warns(name):
    # If a block of the same kind was around a program, this one may have been, too. So
    # the kind is new.
    block = nn.stop_gradient(True, collections=['params', name])
    for _ in range(2):
        with warned('around nothing'), block:  # around nothing
            AROUND_NOTHING[name]()
    decorated = nn.train_only(~sg.where(True), collections=['params', f'{name}, too'])(
        lambda: AROUND_NOTHING[name]()
    )
    with warned('decorated'):
        decorated()  # decorated


def test_a_block_of_everything_around_a_program_that_jax_keeps_is_silent():
    # Where no test expects a warning, it is an error.
    step, init = jax.jit(jax.grad(loss)), jax.jit(MODEL.init)
    bare = fnn.LayerNorm(use_bias=False, use_scale=False)
    for _ in range(3):
        with nn.stop_gradient(True):
            assert oracle.is_zero(step(PARAMS))
        with nn.stop_gradient(True, levels=1):
            init(KEY, X)
        with nn.scale_gradient(True, 0.625):
            bare.apply({}, X)
    bound = MODEL.bind(VARIABLES)
    with nn.scale_gradient(True, 0.375):
        bound(X)
    for rewrite in (
        nn.stop_gradient(False),
        nn.stop_gradient(True, unused='ignore'),
        nn.read_only(True),
    ):
        with rewrite:
            NNX_MODEL(X)


# Faults of what is remembered for the whole process.


# What a compiled program has met holds, however the block under its number ended.


def compiled() -> tuple[Any, list[None]]:
    """A step that is compiled once for each number, and a list of its traces."""
    traces: list[None] = []

    @jax.jit
    def step(params: Any) -> Any:
        traces.append(None)
        return loss(params)

    return step, traces


def test_a_generator_closed_in_a_block_leaves_the_block_right():
    step, _ = compiled()

    def targets() -> Iterator[Any]:
        with nn.stop_gradient('a/**'):
            while True:
                yield step(PARAMS)

    for _ in range(3):
        stream = targets()
        next(stream)
        with nn.stop_gradient('b/**'):
            grads = jax.grad(step)(PARAMS)
            stream.close()
        oracle.assert_same(grads, by_hand(('a', 'b'), loss))


@pytest.mark.parametrize('error', [GeneratorExit, StopIteration, KeyboardInterrupt])
def test_a_block_that_met_its_names_and_raised_keeps_its_programs(error):
    step, traces = compiled()
    for _ in range(3):
        with contextlib.suppress(error), nn.stop_gradient('a/**'):
            step(PARAMS)
            raise error
    assert len(traces) == 1
    for _ in range(2):
        with contextlib.suppress(error), nn.stop_gradient('c/**'):
            step(PARAMS)
            raise error
    assert len(traces) == 3  # Nobody has judged this name.
    with pytest.raises(errors.UnusedFilterError), nn.stop_gradient('c/**'):
        step(PARAMS)


COLLECTED = """
    import gc, sys, threading, time
    import jax, jax.numpy as jnp
    from flax_sg import linen as nn

    model, x = nn.Dense(2), jnp.ones((1, 2))
    variables = model.init(jax.random.key(0), x)

    def holds(where, cycle):
        block = nn.stop_gradient(where, unused='ignore')
        with block:
            yield
        cycle.append(cycle)

    def make_garbage():
        cycle = []
        generator = holds(lambda path: path.startswith('k'), cycle)
        next(generator)
        # Only the garbage collector closes it, at any moment, in any thread.
        cycle.append(generator)

    end = time.monotonic() + 1
    done = []

    def opens(i):
        left = 20  # A block that another thread has to close may stay open here.
        while time.monotonic() < end:
            for where in ('kernel', lambda path: path == 'bias', True):
                with nn.stop_gradient(where, unused='ignore'):
                    model.apply(variables, x)
            if i == 0 and left:
                left -= 1
                make_garbage()
        done.append(i)

    sys.unraisablehook = lambda unraisable: None  # It is closed out of order.
    gc.freeze()
    gc.set_threshold(1)
    threads = [threading.Thread(target=opens, args=(i,), daemon=True) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    gc.set_threshold(700)
    gc.collect()
    assert sorted(done) == [0, 1, 2], done
    print('ended')
"""


def test_a_generator_collected_at_any_moment_locks_nothing():
    found = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(COLLECTED)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.stdout.splitlines()[-1:] == ['ended'], found.stderr[-2000:]


@pytest.mark.parametrize('unused', ['raise', 'ignore'])
@pytest.mark.parametrize('elsewhere', [False, True])
def test_the_exception_of_a_body_is_not_one_of_a_filter(unused, elsewhere):
    """The filter of a table knows what is read, and not what else there is."""

    def layers(module, x, fails=False, has_second=True):
        x = nn.Dense(2, name='a')(x)
        if elsewhere:  # A block around this model does not cover it.
            nn.Dense(2, parent=None).init_with_output(KEY, x)
        if fails:
            raise RuntimeError('of the body')
        return nn.Dense(2, name='b')(x) if has_second else x

    known = {'a/kernel': False, 'a/bias': False}
    variables = oracle.init(Do(layers), KEY, X)

    def run(*how: Any) -> Any:
        with nn.stop_gradient(lambda path: known[path], unused=unused):
            return Do(layers).apply(variables, X, *how)

    with pytest.raises(RuntimeError, match='of the body') as info:
        run(True)
    assert info.value.__context__ is None
    if unused == 'ignore':
        assert run(False, False).shape == X.shape


def test_a_program_that_another_thread_traced_meanwhile_under_the_same_number():
    variables = oracle.init(fnn.Dense(2), KEY, X)
    step = jax.jit(jax.grad(lambda v: jnp.sum(fnn.Dense(2).apply(v, X))))
    is_open, is_traced = threading.Event(), threading.Event()
    block = functools.partial(nn.stop_gradient, 'kern*')

    def late() -> Any:
        with block():
            is_open.set()
            assert is_traced.wait(60)
            return step(variables)

    with ThreadPoolExecutor(1) as pool:
        grads = pool.submit(late)
        assert is_open.wait(60)
        with block():
            step(variables)
        is_traced.set()
        assert oracle.is_zero(grads.result()['params']['kernel'])


LISTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    'globs': (['a/**', 'b/**'], ('b',)),
    'one of them in part': (['a/kernel', 'b/kernel'], ('b/kernel',)),
    'a function': ([lambda path: path.startswith('a'), 'b/bias'], ('b/bias',)),
    'with an index': ([sg.at('a/**', ...), 'b/*'], ('b',)),
}


@pytest.mark.parametrize('jitted', [False, True])
@pytest.mark.parametrize('name', LISTS)
def test_each_part_of_a_list_is_judged_as_if_it_stood_alone(name, jitted):
    where, stopped = LISTS[name]

    class Behind(Two):
        def __call__(self, x):
            h = self.a(x)
            with nn.stop_gradient(where):
                return self.b(h)

    def of_behind(params: Any) -> Any:
        return jnp.sum(Behind().apply({'params': params}, X))

    gradient = jax.grad(of_behind)
    gradient = jax.jit(gradient) if jitted else gradient
    wanted = by_hand(stopped, loss)
    with pytest.warns(errors.NothingStoppedWarning, match='had no effect') as caught:
        oracle.assert_same(gradient(PARAMS), wanted)
    idle, is_part, _ = str(caught[0].message).partition(' in stop_gradient(')
    assert is_part
    assert 'b/' not in idle


FINE: dict[str, Any] = {
    'both are read': ['a/**', 'b/**'],
    'one of them is a complement': [~sg.where('b/**'), 'b/kernel'],
    'one of them may be empty': [
        'a/**',
        sg.live(lambda p: jnp.sum(p['a']['bias']), PARAMS),
    ],
    'all': sg.where('a/**') | True,
    'a condition': ['a/**', sg.where('b/**') & False],
}


@pytest.mark.parametrize('jitted', [False, True])
@pytest.mark.parametrize('name', FINE)
def test_nothing_is_said_of_a_list_that_is_right(name, jitted):
    class Within(Two):
        def __call__(self, x):
            with nn.stop_gradient(FINE[name]):
                return self.b(self.a(x))

    run = jax.jit(Within().apply) if jitted else Within().apply
    for _ in range(2):
        run(VARIABLES, X)
    Within().init(KEY, X)


def test_a_program_that_is_found_repeats_what_was_read_in_it():
    """Two models of one filter: the second block runs what the first has traced."""
    apply = jax.jit(MODEL.apply)
    for _ in range(3):
        with nn.stop_gradient(['a/**', 'b/**']):
            apply(VARIABLES, X)


class Shared(fnn.Module):
    """Two blocks of one list, each of which reads one of its parts."""

    where: Any

    def setup(self):
        self.a, self.b = fnn.Dense(2), fnn.Dense(2)

    def encode(self, x):
        with nn.stop_gradient(self.where):
            return self.a(x)

    def __call__(self, x):
        x = self.encode(x)
        with nn.stop_gradient(self.where):
            return self.b(x)


@pytest.mark.parametrize('jitted', [False, True])
@pytest.mark.parametrize('lift', [fnn.jit, fnn.remat, lambda cls: cls])
def test_blocks_of_one_list_are_judged_together(lift, jitted):
    model = lift(Shared)(('a/**', 'b/**'))

    def of_shared(params: Any) -> Any:
        return jnp.sum(model.apply({'params': params}, X))

    gradient = jax.grad(of_shared)
    grads = (jax.jit(gradient) if jitted else gradient)(PARAMS)
    assert oracle.is_zero(grads['a']['kernel']) and oracle.is_zero(grads['b']['bias'])


def test_a_part_of_a_shared_list_that_nothing_reads_is_told():
    class Third(Shared):
        def setup(self):
            super().setup()
            self.c = fnn.Dense(2)

        def __call__(self, x):
            return super().__call__(self.c(x))

    model = Third(('a/**', 'b/**', 'c/**'))
    variables = oracle.init(model, KEY, X)
    with pytest.warns(errors.NothingStoppedWarning, match='had no effect') as caught:
        model.apply(variables, X)
    assert {str(each.message).partition(' in ')[0] for each in caught} == {
        "Glob('c/**')"
    }

"""What an open block covers: nesting, owners, other trees, and whose code it is."""

import asyncio
import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

import oracle
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.engine import blocks, opening

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Model(fnn.Module):
    """Three layers of one kernel each, from ``setup``."""

    def setup(self):
        self.a, self.b, self.c = (fnn.Dense(3, use_bias=False) for _ in range(3))

    def __call__(self, x):
        return self.c(jnp.tanh(self.b(jnp.tanh(self.a(x)))))


MODEL = Model()
PARAMS = MODEL.init(jax.random.key(0), X)['params']


def apply(params: Any) -> Any:
    return MODEL.apply({'params': params}, X)


def frozen(fn: Any = apply, params: Any = PARAMS) -> str:
    """The names of the layers that a function of the parameters gives no gradient."""
    grads = oracle.grads(fn, params)[0][0]
    names = ''.join(name for name in grads if oracle.is_zero(grads[name]))
    # The others are what they are by hand, to the last bit.
    copy = oracle.grads(
        lambda p: apply(oracle.stopped(p, lambda path: path[0] in names)), params
    )
    oracle.assert_same(grads, copy[0][0])
    return names


def assert_no_block_is_left() -> None:
    """Neither a block of this thread nor what one may have kept."""
    assert frozen() == ''
    assert blocks.thread.blocks == ()


@pytest.fixture(autouse=True)
def _clean():
    yield
    left = blocks.thread.blocks
    for block in reversed(left):  # One failure, not one in every test that follows.
        opening.close_block(block)
    assert left == ()
    assert_no_block_is_left()


def test_the_union_of_nested_blocks_stops():
    """One value may be opened again while it is open, and afterwards."""
    where = nn.stop_gradient('a/**')
    for _ in range(2):
        with where:
            with nn.stop_gradient('b/**'):
                with where, nn.stop_gradient('c/**'):
                    assert frozen() == 'abc'
                assert frozen() == 'ab'
            assert frozen() == 'a'
        assert frozen() == ''


def test_modules_open_blocks_in_each_other():
    # Each of them sees its own parameters by its own names.
    class Inner(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            with nn.stop_gradient('kernel'):
                kernel = self.param('kernel', fnn.initializers.ones, (3, 3))
                bias = self.param('bias', fnn.initializers.ones, (1, 3))
                return x @ kernel + bias

    class Outer(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            with nn.stop_gradient('one/bias'):
                x = Inner(name='two')(Inner(name='one')(x))
            return x * self.param('kernel', fnn.initializers.ones, (1, 3))

    params = Outer().init(jax.random.key(0), X)['params']
    stopped = {'one/kernel', 'one/bias', 'two/kernel'}

    def by_hand(params):
        p = oracle.stopped(params, lambda path: path in stopped)
        x = X
        for name in ('one', 'two'):
            x = x @ p[name]['kernel'] + p[name]['bias']
        return x * p['kernel']

    oracle.assert_same_grads(lambda p: Outer().apply({'params': p}, X), by_hand, params)


# Whose paths a block speaks of.


@pytest.mark.parametrize('lift', [fnn.remat, fnn.jit])
def test_a_module_beside_the_one_that_opened_the_block_in_a_lifted_body(lift):
    class Opener(fnn.Module):
        other: Any

        @fnn.compact
        def __call__(self, x):
            own = fnn.Dense(3, use_bias=False, name='own')
            with nn.stop_gradient(['/other/*', 'own/kernel']):
                return own(self.other(x))

    class Outer(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            other = fnn.Dense(3, name='other')
            x = fnn.Dense(3, use_bias=False, name='own')(x)
            return lift(Opener)(other, name='opener')(x)

    params = Outer().init(jax.random.key(0), X)['params']

    def by_hand(params):
        kept = {'own': params['own']}
        params = {**jax.lax.stop_gradient(params), **kept}
        x = X @ params['own']['kernel']
        x = fnn.Dense(3).apply({'params': params['other']}, x)
        return x @ params['opener']['own']['kernel']

    oracle.assert_same_grads(lambda p: Outer().apply({'params': p}, X), by_hand, params)


# Ways out of a block.


class Stop(BaseException):
    """No Exception, as KeyboardInterrupt is none."""


@pytest.mark.parametrize(('error', 'depth'), [(ValueError, 3), (Stop, 1)])
def test_an_exception_leaves_everything_as_it_was(error, depth):
    bound = MODEL.bind({'params': PARAMS})
    raised = error('on purpose')

    def deeper(n):
        if n == 0:
            assert frozen() == 'a'
            bound(X)
            raise raised
        with nn.stop_gradient('a/**'):
            deeper(n - 1)

    with pytest.raises(error) as caught:
        deeper(depth)
    assert caught.value is raised
    assert_no_block_is_left()
    assert frozen(lambda p: MODEL.clone().apply({'params': p}, X)) == ''
    oracle.assert_same(bound(X), apply(PARAMS))


# Generators: a block may be held open by code that is not running.


def _directly():
    with nn.stop_gradient('a/**'):
        yield frozen()
        yield frozen()


def test_a_block_is_open_while_its_generator_is_suspended():
    generator = _directly()
    assert next(generator) == 'a'
    assert frozen() == 'a'
    with nn.stop_gradient('b/**'):
        assert frozen() == 'ab'
    assert next(generator) == 'a'
    assert list(generator) == []
    assert_no_block_is_left()
    closed, dropped = _directly(), _directly()
    next(closed)
    closed.close()
    assert_no_block_is_left()
    next(dropped)
    del dropped
    assert_no_block_is_left()
    while_aside = _directly()
    next(while_aside)
    with blocks.thread.only(()):  # As where a filter is asked.
        while_aside.close()
    assert frozen() == ''


def in_another_thread(fn: Any) -> Any:
    """What a function returns there, or the error that it raises."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(fn)
        return future.exception() or future.result()


def _in_two_blocks():
    with nn.stop_gradient('b/**'), nn.stop_gradient('a/**'):
        yield frozen()
        yield frozen()


def test_generators_in_two_blocks_closed_in_another_order():
    first, second = _directly(), _in_two_blocks()
    assert (next(first), next(second)) == ('a', 'ab')
    assert next(first) == 'ab'
    with pytest.raises(errors.BlockError, match='still open'):
        next(first)
    # The first is closed all the same, and the others are still open.
    assert frozen() == 'ab'
    second.close()


def test_a_block_closed_twice_or_never_opened():
    where = nn.stop_gradient('a/**')
    with pytest.raises(errors.BlockError):
        where.__exit__(None, None, None)
    with where:
        apply(PARAMS)
    with pytest.raises(errors.BlockError):
        where.__exit__(None, None, None)


def test_a_block_closed_by_another_thread_or_read_there():
    where = nn.stop_gradient('a/**')
    with where:
        assert in_another_thread(frozen) == ''
        error = in_another_thread(lambda: where.__exit__(None, None, None))
        assert isinstance(error, errors.BlockError)
        assert frozen() == 'a'


def test_a_block_around_an_event_loop():
    async def main():
        await asyncio.sleep(0)
        return frozen(), await asyncio.create_task(child())

    async def child():
        return frozen()

    with nn.stop_gradient('a/**'):
        assert asyncio.run(main()) == ('a', 'a')


async def holds(done):
    with nn.stop_gradient('a/**'):
        assert frozen() == 'a'
        await done.wait()
        return frozen()


def beside_a_block(other: Any) -> None:
    """Runs a task while another one waits in a block."""

    async def runs(done):
        other()
        done.set()

    async def main():
        done = asyncio.Event()
        return await asyncio.gather(holds(done), runs(done))

    assert asyncio.run(main()) == ['a', None]


def test_a_read_by_another_task_while_a_block_is_open():
    def reads():
        init = functools.partial(MODEL.init, jax.random.key(0), X)
        for read in (lambda: apply(PARAMS), frozen, init):
            with pytest.raises(errors.BlockError):
                read()

    beside_a_block(reads)


def test_a_block_opened_by_another_task_while_one_is_open():
    def opens():
        with pytest.raises(errors.BlockError), nn.stop_gradient('b/**'):
            frozen()

    beside_a_block(opens)


def test_a_block_closed_by_another_task():
    where = nn.stop_gradient('a/**')

    async def opens():
        where.__enter__()

    async def main():
        await asyncio.create_task(opens())
        with pytest.raises(errors.BlockError):
            where.__exit__(None, None, None)
        return frozen()

    assert asyncio.run(main()) == ''


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
def test_a_predicate_that_raises(error):
    def where(path):
        if path.startswith('b'):
            raise error('on purpose')
        return True

    with pytest.raises(error, match='on purpose'), nn.stop_gradient(where):
        apply(PARAMS)


def test_a_predicate_that_raises_for_what_is_only_looked_at_in_the_end():
    class Half(Model):
        def __call__(self, x):
            with nn.stop_gradient(where):
                return self.a(x)

    def where(path):
        if path.startswith('b'):
            raise ValueError('on purpose')
        return False

    with pytest.raises(ValueError, match='on purpose'):
        Half().apply({'params': PARAMS}, X)


def test_a_predicate_that_reads_variables_itself():
    bound = MODEL.bind({'params': PARAMS})

    def where(path):
        return jnp.sum(bound.variables['params'][path.parts[0]]['kernel']) > 1e9

    def names(path):
        return path.parts[0] in bound.variables['params'] and path.startswith('a')

    with pytest.raises(errors.FilterTypeError), nn.stop_gradient(where):
        apply(PARAMS)
    assert_no_block_is_left()
    with nn.stop_gradient(names):
        assert frozen() == 'a'
    with nn.stop_gradient(['c/**', names]):
        assert frozen() == 'ac'


def test_a_function_for_values_reads_what_is_outside_of_its_block():
    def read(params):
        bound = MODEL.bind({'params': params})

        def plus_b(path, value):
            return value + bound.variables['params']['b']['kernel']

        with nn.stop_gradient('b/**'), nn.substitute(plus_b, where='[ab]/**'):
            return [bound.variables['params'][name]['kernel'] for name in 'ab']

    def by_hand(params):
        a, b = params['a']['kernel'], jax.lax.stop_gradient(params['b']['kernel'])
        return [a + b, b + b]

    oracle.assert_same_grads(read, by_hand, PARAMS)


def test_the_stack_of_frames_is_not_kept_alive():
    # A block looks at frames when it opens; holding one would hold all its locals.
    class Big:
        pass

    def opens():
        big = Big()
        with nn.stop_gradient('a/**'):
            apply(PARAMS)
        return weakref.ref(big)

    ref = opens()
    gc.collect()
    assert ref() is None


def test_a_variable_that_there_is_not_in_a_block():
    bound = MODEL.bind({'params': PARAMS})
    with nn.stop_gradient('a/**'):
        assert bound.a.get_variable('params', 'bias', 3) == 3
        assert frozen() == 'a'

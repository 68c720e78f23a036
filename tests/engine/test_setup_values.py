"""Values that ``setup`` keeps on a module are rewritten in a block, and only there.

A kept value is a plain attribute, so Flax does not read a scope. The engine runs
``setup`` once more to find the value. Each test is a way in which the second run may
differ from the first. A value that cannot be found again raises an error.
"""

import contextlib
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.engine import blocks
from tests.helpers import oracle
from tests.helpers.described import uses
from tests.helpers.described.language import (
    EVERYTHING,
    Block,
    Program,
    Where,
    without_blocks,
)
from tests.helpers.described.modules import Affine, Do, Kid, param
from tests.helpers.described.uses import PROGRAMS, RNGS, USE, Route, X, check


def noise(module: linen.Module) -> jax.Array:
    mask = jax.random.bernoulli(module.make_rng('noise'), shape=(3,))
    return mask.astype(jnp.float32) + 1.0


class NoisyKid(nn.Module):
    """Draws at each call, and keeps a record of what it gave."""

    @nn.compact
    def __call__(self, x):
        y = x * param(self, 'w') * noise(self)
        self.sow('intermediates', 'y', y)
        return y


class Raw(Route):
    def setup(self):
        self.w = param(self, 'w')
        self.b = param(self, 'b')

    def use(self, x):
        return x * self.w + self.b


# What ``setup`` of a Raw may keep besides, and how a method uses it.


def keeps(make: Callable[[Any], Any], use: Callable[[Any, Any], Any]) -> type[Route]:
    class Keeps(Raw):
        def setup(self):
            super().setup()
            self.kept = make(self)

        def use(self, x):
            return use(self.kept, x)

    return Keeps


def call(kept: Any, x: Any) -> Any:
    return kept(x)


def multiply(kept: Any, x: Any) -> Any:
    return x * kept


class Pair(NamedTuple):
    a: Any
    b: Any


class Helper:
    def __init__(self, w: Any):
        self.w = w

    def __call__(self, x: Any) -> Any:
        return x * self.w


def times(w: Any) -> Callable[[Any], Any]:
    return lambda x: x * w


def cyclic(module: Any) -> Helper:
    helper = Helper(module.w)
    helper.me = helper
    return helper


def in_order(kept: Any, x: Any) -> Any:
    for w in kept.values():
        x = x * 2.0 + w * w
    return x


VALUES: dict[str, type[Route]] = {
    'raw': Raw,
    'derived': keeps(lambda m: m.w * m.w + m.b, multiply),
    'order of a dict': keeps(lambda m: {'z': m.w, 'a': m.b}, in_order),
    'named tuple': keeps(
        lambda m: Pair(m.w * m.w, m.b), lambda kept, x: x * kept.a * kept.b
    ),
    'lambda': keeps(lambda m: times(m.w * m.w), call),
    'helper': keeps(lambda m: Helper(m.w), call),
    'cyclic helper': keeps(cyclic, call),
    'closure over self': keeps(lambda m: lambda x: x * m.w, call),
}


class SeveralThings(Route):
    """Modules, variables and arrays in one list; modules stay the ones they are."""

    def setup(self):
        self.w = param(self, 'w')
        v = self.variable('params', 'v', lambda: jnp.ones(3))
        self.things = [nn.Dense(3), self.w * 2.0, {'kid': NoisyKid(), 'v': v}, None]

    def use(self, x):
        dense, w, others, _ = self.things
        return others['kid'](dense(x)) * w * others['v'].value


def function_of_modules(module: Any) -> Any:
    """The function holds modules, one of which draws random numbers."""
    kid, w2 = NoisyKid(name='kid'), module.w * module.w
    module.w2 = w2
    return lambda x: kid(x) * module.w * module.w2


class FromField(nn.Module):
    """Fields in an order that is not that of their names."""

    kids: Any

    def setup(self):
        h = param(self, 'w')
        for kid in self.kids.values():
            h = h * 2.0 + kid(h)
        self.h = h

    def __call__(self, x):
        return x * self.h


class FromFieldsOfOthers(Route):
    def parts(self):
        return FromField({'z': Kid(name='z'), 'a': Affine(name='a')}, name='user')


class NonInitField(Route):
    w2: Any = dataclasses.field(init=False)
    w3: Any = dataclasses.field(init=False, default=None)

    def setup(self):
        self.w = param(self, 'w')
        self.w2 = self.w * self.w
        self.w3 = self.w2 * self.w

    def use(self, x):
        return x * self.w2 * self.w3


ROUTES: dict[str, Callable[[Program], nn.Module]] = {
    **VALUES,
    'several things': SeveralThings,
    'fields of others': FromFieldsOfOthers,
    'non-init field': NonInitField,
}

# What a second run of ``setup`` does not do as the first one did. A block may not be
# able to see it, but then it says so.
DOUBTFUL = keeps(lambda m: jax.jit(times(m.w)), call)

routes = pytest.mark.parametrize('make', ROUTES.values(), ids=list(ROUTES))
# How a value is held matters where it is found and put back, the same at all times.
FEW = ['derived', 'closure over self']
FEW += [name for name in ROUTES if name not in (*FEW, *VALUES)]
situations = pytest.mark.parametrize('make', [ROUTES[name] for name in FEW], ids=FEW)


class Outer(Route):
    """Makes and sets up a module at its first use, in whatever block that is in."""

    make: Any = None

    def parts(self):
        made = []

        def use(x):
            if not made:
                made.append(self.make((USE,)).clone(parent=self, name='made'))
            return made[0](x)[0]

        return use


def outer(make: Any) -> Callable[[Program], nn.Module]:
    return lambda program: Outer(program, make)


@routes
def test_before_in_and_after(make):
    check(make, PROGRAMS['some'])


def test_in_blocks_one_after_the_other_and_left_by_exceptions():
    check(SeveralThings, PROGRAMS['all'])


@situations
def test_set_up_in_a_block(make):
    """The module is set up in a block; after it, the kept values are the plain ones."""
    check(outer(make), PROGRAMS['nested, first in it'], ['params'])


def test_a_block_that_takes_nothing_of_it_changes_nothing():
    """Whatever it keeps: no error, and no trace of having been looked at."""

    class Beside(Route):
        def parts(self):
            made = DOUBTFUL((USE,)).clone(parent=self, name='made')
            self.param('beside', linen.initializers.ones, (3,))
            return lambda x: made(x)[0] * self.get_variable('params', 'beside')

    block = Block(Where('name', ('beside',)), (USE,))
    check(Beside, (USE, block, USE), ['intermediates', 'state'])


# Blocks in ``setup`` itself, and the same modules with stops by hand.

stop = jax.lax.stop_gradient


class InSetup(nn.Module):
    """Opens blocks in ``setup``, or stops by hand what is used in them."""

    by_hand: bool = False

    def block(self, where):
        return contextlib.nullcontext() if self.by_hand else nn.stop_gradient(where)

    def stop(self, w):
        return stop(w) if self.by_hand else w


class BlockInSetup(InSetup):
    def setup(self):
        self.w = param(self, 'w')
        self.b = param(self, 'b')
        self.h = self.w * self.b
        with self.block(['w', 'made']):
            self.z = self.stop(self.w) * self.b
            self.kid = Kid()
            self.made = self.stop(param(self, 'made'))
            with self.block('b'):
                self.x = self.stop(self.w) * self.stop(self.b)
        self.after = self.w * self.z * self.made
        self.w = self.w * 3.0

    def __call__(self, x):
        y = x * self.after * self.h * self.made
        return [(self.kid(x) * self.z, x * self.x, y, x * self.w)]


class SetUpInABlock(InSetup):
    """In its ``setup`` a block is open where a module below it is set up."""

    def setup(self):
        self.w = param(self, 'w')
        self.kid = Kid()
        with self.block('kid/**'):
            inside = self.stop(self.kid.w2)
        self.kept = inside * self.stop(self.w)
        self.kept += self.kid.w2

    def __call__(self, x):
        with self.block('w'):
            return [x * self.kept]


@pytest.mark.parametrize('cls', [BlockInSetup, SetUpInABlock])
def test_a_block_in_setup_of_a_module_used_in_blocks(cls):
    """Outside of all other blocks, what the block in setup stopped is stopped."""
    by_hand, with_blocks = outer(lambda _: cls(True)), outer(lambda _: cls())
    program = PROGRAMS['nested']
    params = uses.variables_of(with_blocks, program)['params']
    wanted = uses.expected(program, uses.fn_of(by_hand(without_blocks(program))))
    actual = uses.staged(uses.both(uses.fn_of(with_blocks(program))))(params, X)
    oracle.assert_same(actual, uses.staged(uses.both(wanted))(params, X))


# One array may be several variables, and what a stop has made of another one.


def test_a_value_of_the_parent_that_is_the_same_array_as_the_stopped_parameter():
    class Both(nn.Module):
        def setup(self):
            self.w = param(self, 'w')
            self.tied = self.parent.get_variable('params', 'v')

        def __call__(self):
            return self.w, self.tied

    def parent(self):
        kid = Both(name='kid')
        kid()  # Its setup runs before the block.
        with nn.stop_gradient('kid/w'):
            return kid()

    def fn(w):
        return Do(parent).apply({'params': {'kid': {'w': w}, 'v': w}})

    stopped, tied = jax.jvp(fn, (X,), (X,))[1]
    oracle.assert_same([stopped, tied], [jnp.zeros(3), X])


def test_a_variable_that_gets_the_array_of_a_parameter_later():
    """After a block has looked at what another module keeps."""

    class Keeps(nn.Module):
        given: Any

        def setup(self):
            self.w = param(self, 'w')
            self.kept = self.given

        def __call__(self):
            return self.w, self.kept

    def parent(self):
        first = Keeps(X, name='first')
        first()
        with nn.stop_gradient('first/w'):
            first()
        state = self.variable('state', 's', lambda: X)
        state.value = self.variables['params']['second']['w']
        second = Keeps(state.value, name='second')
        second()
        with nn.stop_gradient('second/w'):
            return second()

    def fn(w):
        params = {'first': {'w': 2 * w}, 'second': {'w': w}}
        return Do(parent).apply({'params': params}, mutable=['state'])[0]

    stopped, kept = jax.jvp(jax.jit(fn), (X,), (X,))[1]
    oracle.assert_same([stopped, kept], [jnp.zeros(3), X])


def test_a_value_that_setup_stops_stays_stopped_when_it_is_substituted():
    class Stops(nn.Module):
        def setup(self):
            self.h = stop(param(self, 'w'))

        def __call__(self, x):
            return x * self.h

    bound = Stops().bind({'params': {'w': X}})
    assert bound.h.shape == (3,)

    def fn(w):
        with nn.substitute({'w': w}):
            return jnp.sum(bound(X))

    wanted = jnp.sum(2 * X * X), jnp.zeros(3)
    oracle.assert_same(jax.value_and_grad(fn)(2 * X), wanted)


def test_a_parameter_that_setup_reads_from_another_collection():
    class Plain(linen.Module):
        def setup(self):
            self.w = param(self, 'w')

        def __call__(self):
            return self.w

    def parent(self):
        kid = Plain(name='kid')
        with nn.substitute('ema'):
            inside = kid()
        return inside, kid()

    def fn(w):
        return Do(parent).apply(
            {'params': {'kid': {'w': w}}, 'ema': {'kid': {'w': 3 * w}}}
        )

    wanted = (3 * X, X), (3 * jnp.ones(3), jnp.ones(3))
    oracle.assert_same(jax.jvp(fn, (X,), (jnp.ones(3),)), wanted)


def test_a_second_run_is_not_in_the_intermediates():
    """Setup calls modules of its parent, which are called once."""
    program = (Block(EVERYTHING, (USE,)),)
    capture = {'capture_intermediates': True}
    check(FromFieldsOfOthers, program, ['intermediates'], **capture)


@situations
def test_initialization_is_that_without_blocks(make):
    uses.initialization_is_that_without_blocks(outer(make))


def writes_in_setup(module: Any) -> Any:
    h = module.w * 2.0
    module.sow('intermediates', 'h', h)
    module.put_variable('state', 'h', h)
    return h


def test_rule_17_a_second_run_of_setup_writes_into_copies():
    """On the scope itself it would sow twice; on an immutable one it would raise."""
    make = outer(keeps(writes_in_setup, multiply))
    check(make, PROGRAMS['nested, first in it'], ['state', 'intermediates'])


@pytest.mark.parametrize('name', ['around', 'first in it'])
def test_rule_18_modules_in_a_kept_function_stay_the_ones_they_are(name):
    """Those of a second run would draw other numbers, and lose what they sow."""
    check(keeps(function_of_modules, call), PROGRAMS[name], ['intermediates'])


class Keeps(linen.Module):
    def setup(self):
        self.w2 = 2.0 * self.param('w', linen.initializers.ones, ())
        self.raw = [self.get_variable('params', 'w')]

    def __call__(self, x):
        return x * self.w2 + self.raw[0]


def test_what_a_module_holds_that_is_not_bound_is_what_it_is():
    class Holds(linen.Module):
        def __post_init__(self):
            object.__setattr__(self, 'table', jnp.ones(3))
            super().__post_init__()

    module = Holds()
    with nn.stop_gradient(True, unused='ignore'):
        assert module.table is vars(module)['table']


def test_what_is_made_of_numbers_is_other_numbers_for_other_values():
    """What setup makes of arrays of numpy is no array of JAX."""
    variables = {'params': {'w': np.full((), 2.0, np.float32)}}

    def fn(factor):
        values = nn.substitute(lambda path, value: value * factor)
        with values:
            made_inside = Keeps().apply(variables, 1.0)
        keeps = Keeps().bind(variables)
        before = keeps(1.0)
        with values:
            inside = keeps(1.0)
        return [made_inside, before, inside, keeps(1.0)]

    numbers, slopes = jax.jvp(fn, (3.0,), (1.0,))
    assert (numbers, slopes) == ([18.0, 6.0, 18.0, 6.0], [6.0, 0.0, 6.0, 0.0])


@pytest.mark.usefixtures('leaks')
@pytest.mark.parametrize('name', ['lambda', 'derived'])
def test_no_tracer_outlives_its_trace(name):
    make, program = ROUTES[name], PROGRAMS['nested']
    variables = uses.variables_of(make, program)
    fn = uses.fn_of(make(program), ['params'], variables)
    jax.jit(jax.grad(lambda params: jnp.sum(fn(params, X)[0][1])))(variables['params'])


# What cannot be computed again. The error says what to write.


def test_a_kept_value_of_two_variables_depends_on_what_is_said_of_both():
    class Sum(linen.Module):
        def setup(self):
            a, b = (self.param(name, linen.initializers.ones, ()) for name in 'ab')
            self.kept = a + 10.0 * b

    def outputs(params):
        module = Sum().bind({'params': params})
        run = jax.jit(lambda: module.kept * 1.0)
        out = [module.kept]
        for frozen in ({'b'}, set[str](), {'a'}, {'b'}):
            where = lambda path, frozen=frozen: path.name in frozen  # noqa: E731
            with nn.stop_gradient(where, unused='ignore'):
                assert module.kept is not None  # Found before JAX traces ``run``.
                out.append(run())
        return jnp.stack(out[1:])

    found = jax.jacobian(outputs)({'a': jnp.float32(2.0), 'b': jnp.float32(3.0)})
    assert {name: rows.tolist() for name, rows in found.items()} == {
        'a': [1.0, 1.0, 0.0, 1.0],
        'b': [0.0, 10.0, 10.0, 0.0],
    }


def test_nothing_is_kept_when_the_block_has_closed():
    """Bound modules live on; what blocks made of their values does not."""
    kid = Kid()
    module = kid.bind(kid.init(RNGS, X))

    def loss(w):
        held.append(weakref.ref(w))
        return jnp.sum(module.w2 * w)

    held: list[Any] = []
    with nn.stop_gradient(True):
        jax.grad(loss)(X)
    gc.collect()
    assert [ref() for ref in held] == [None]


def test_a_module_that_was_bound_in_a_trace_that_is_over():
    bound: list[Any] = []

    @jax.jit
    def binds():
        bound.append(Keeps().bind({'params': {'w': w}}))
        return w

    def loss(w):
        with nn.substitute({'w': w}):
            return jnp.sum(bound[0](jnp.ones(3)) ** 3)

    w = jnp.array(2.0)
    binds()
    gc.collect()
    assert bound[0](1.0) == 6.0
    assert jax.value_and_grad(loss)(1.0) == (81.0, 243.0)
    with nn.stop_gradient(True):
        assert bound[0](1.0) == 6.0


def test_a_long_block_keeps_no_parameters_of_a_setup_that_ran_again():
    def read_in_a_block(module: Any, x: Any) -> Any:
        y = module(x)  # ``setup`` runs here.
        with nn.stop_gradient('w'):
            return jnp.sum(module.w2 * y)

    held: list[Any] = []
    kid = Kid()
    variables = oracle.init(kid, RNGS, X)
    with nn.scale_gradient('b', 2.0):
        for _ in range(3):
            copied = jax.tree.map(lambda leaf: leaf + 0, variables)
            held.extend(map(weakref.ref, jax.tree.leaves(copied)))
            jax.grad(lambda v: kid.apply(v, X, method=read_in_a_block))(copied)
            del copied
        gc.collect()
        assert [ref() for ref in held if ref() is not None] == []
        assert list(blocks.thread.blocks[0].roots) == []


def test_an_error_of_ours_in_a_second_run_is_the_one_that_is_raised():
    def model(self, x):
        keeps = Keeps(name='keeps')
        y = keeps(x)
        with nn.substitute({'keeps': {'w': jnp.zeros(3)}}):
            return y + keeps(x)

    with pytest.raises(errors.StructureError, match=r"'keeps/w' .* does not fit"):
        Do(model).apply({'params': {'keeps': {'w': jnp.ones(())}}}, jnp.ones(3))


def test_right_or_an_error():
    trials = [functools.partial(check, DOUBTFUL, PROGRAMS['around'], False)]
    for where in (DOUBTFUL, outer(DOUBTFUL)):
        trials.append(
            functools.partial(uses.initialization_is_that_without_blocks, where)
        )
        for name in ('around', 'first in it'):
            trials.append(functools.partial(check, where, PROGRAMS[name], True))
    for trial in trials:
        with contextlib.suppress(errors.BlockError):
            trial()

"""`state='eval'`: dropout is off, by path, whatever a layer is told."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from flax_sg import filters
from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.turns import in_turn

RNGS = {'params': jax.random.key(1), 'dropout': jax.random.key(2)}
X = jnp.linspace(-1.0, 1.0, 12).reshape(1, 3, 4)
STAGES = 3


def bare(cls: Any) -> Any:
    return cls


class Attends(linen.Module):
    """A stage that is told by arguments, and one layer of it by a field."""

    @linen.compact
    def __call__(self, x, deterministic):
        x = linen.MultiHeadDotProductAttention(2, dropout_rate=0.5, name='attention')(
            x, deterministic=deterministic
        )
        x = linen.Dropout(0.5)(jnp.tanh(linen.Dense(4)(x)), deterministic)
        x = linen.Dropout(0.5, deterministic=deterministic)(x)
        noise = 0.0
        if not deterministic:  # As in a model that one may not edit.
            noise = jax.random.normal(self.make_rng('dropout'), x.shape)
        return linen.Dense(4)(x) + noise


class Stages(linen.Module):
    lift: Any = bare
    off: tuple[bool, ...] = (False,) * STAGES

    @linen.compact
    def __call__(self, x):
        cls = self.lift(Attends)
        for number, off in enumerate(self.off):
            x = cls(name=f'stage_{number}')(x, off)
        return linen.Dropout(0.5, deterministic=False)(x)


def static(lift: Any) -> Any:
    return lambda cls: lift(cls, static_argnums=(2,))


@functools.cache
def parameters() -> Any:
    return Stages().init(RNGS, X)['params']


LIFTS = {'bare': bare, 'jit': static(linen.jit), 'remat': static(linen.remat)}
STAGE_1 = (False, True, False)
WHERE: dict[str, tuple[Any, tuple[bool, ...]]] = {
    'a glob': ('stage_1/**', STAGE_1),
    'a list': (['stage_0/**', 'stage_1/**'], (True, True, False)),
    'the rest': (~filters.as_filter('stage_[02]/**') & 'stage_*/**', STAGE_1),
    'a function': (lambda path: path.startswith('stage_1'), STAGE_1),
    'a tree': ({'stage_0': False, 'stage_1': True, 'stage_2': False}, STAGE_1),
    'some of each': ('**/kernel', (False,) * STAGES),
    'all but some': (~filters.as_filter('**/bias'), (False,) * STAGES),
    'one layer': ('stage_1/Dense_0/**', (False,) * STAGES),
}


@functools.cache
def told(lift: str, off: tuple[bool, ...]) -> Any:
    """By hand: each stage is told."""

    class Hand(linen.Module):
        @linen.compact
        def __call__(self, x):
            return Stages(LIFTS[lift], off)(x)

    given = {'params': {'Stages_0': parameters()}}
    return jax.jit(functools.partial(Hand().apply, rngs=RNGS))(given, X)


@pytest.mark.parametrize(
    ('name', 'lift', 'wrap'), in_turn(WHERE, LIFTS, (nn.Frozen, nn.mirror))
)
def test_dropout_is_off_where_the_filter_says(name, lift, wrap):
    where, off = WHERE[name]

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            stages = Stages(LIFTS[lift])
            return wrap(stages, where, state='eval')(x)

    given = {'params': {'Stages_0': parameters()}}
    made = jax.eval_shape(Model().init, RNGS, X)
    assert jax.tree.structure(made) == jax.tree.structure(given)

    found = jax.jit(functools.partial(Model().apply, rngs=RNGS))(given, X)
    oracle.assert_same(found, told(lift, off))


def test_everything_is_off_and_no_random_numbers_are_needed():
    variables = Stages().init(RNGS, X)
    frozen = nn.Frozen(Stages(), state='eval')

    class Last(linen.Module):
        """By hand: with the last dropout off, too."""

        @linen.compact
        def __call__(self, x):
            for number in range(STAGES):
                x = Attends(name=f'stage_{number}')(x, True)
            return x

    oracle.assert_same(frozen.apply(variables, X), Last().apply(variables, X))
    with_rngs = frozen.apply(variables, X, rngs=RNGS)
    oracle.assert_same(with_rngs, Last().apply(variables, X))
    oracle.assert_same(frozen.init(RNGS, X), variables)


@pytest.mark.parametrize('state', ['update', 'hold'])
def test_other_choices_leave_dropout_on(state):
    variables = oracle.init(Stages(), RNGS, X)
    found = nn.Frozen(Stages(), state=state).apply(variables, X, rngs=RNGS)
    oracle.assert_same(found, Stages().apply(variables, X, rngs=RNGS))


scan = functools.partial(
    linen.scan,
    variable_axes={'params': 0},
    split_rngs={'params': True, 'dropout': True},
    length=2,
)


@pytest.mark.parametrize('where', [True, 'attends/**'])
def test_around_a_scan(where):
    class Body(linen.Module):
        off: bool

        @linen.compact
        def __call__(self, x, _):
            return Attends(name='attends')(x, self.off), None

    for lift in (lambda body: body, linen.remat):
        hand, told = (scan(lift(Body))(off) for off in (True, False))
        variables = oracle.init(hand, RNGS, X, None)
        frozen = nn.Frozen(told, where, state='eval')
        found = frozen.apply(variables, X, None, rngs=RNGS)
        oracle.assert_same(found, hand.apply(variables, X, None))


class Drops(linen.Module):
    off: bool = False

    @linen.compact
    def __call__(self, x):
        return linen.Dropout(0.5, deterministic=self.off)(linen.Dense(4)(x))


JITTED = linen.jit(Drops)


class Tower(linen.Module):
    off: tuple[bool, ...] = (False,) * STAGES

    @linen.compact
    def __call__(self, x):
        for number, off in enumerate(self.off):
            x = JITTED(off, name=f'stage_{number}')(x)
        return x


class Anything(dict[str, bool]):
    """A table with an answer for layers that have no variables."""

    def __missing__(self, path: str) -> bool:
        return path.startswith('stage_1')


def of_table(table: Any) -> Any:
    return lambda path: table[path]


def test_a_trace_of_jit_belongs_to_one_choice():
    """In any order, with one jitted class, and filters of one code."""
    variables = oracle.init(Tower(), RNGS, X)
    paths = oracle.by_path(variables['params'])
    known = {path: path.startswith('stage_1') for path in paths}

    def run(model: Any) -> Any:
        return jax.jit(functools.partial(model.apply, rngs=RNGS))(variables, X)

    def evaluating(where: Any) -> Any:
        return run(nn.Frozen(Tower(), where, state='eval'))

    for _ in range(2):
        # The first table raises for a layer without variables: its dropout stays on.
        oracle.assert_same(evaluating(of_table(known)), run(Tower()))
        found = evaluating(of_table(Anything(known)))
        oracle.assert_same(found, run(Tower(off=STAGE_1)))
    for number in (0, 2, 1):
        off = tuple(n == number for n in range(STAGES))
        oracle.assert_same(evaluating(f'stage_{number}/**'), run(Tower(off=off)))


def test_a_layer_that_is_a_model():
    drop = nn.Frozen(linen.Dropout(0.5, deterministic=False), state='eval')
    oracle.assert_same(drop.apply({}, X, rngs=RNGS), X)
    bound = linen.Dropout(0.5, deterministic=False).bind({}, rngs=RNGS)
    oracle.assert_same(nn.mirror(bound, state='eval')(X), X)
    assert bound.deterministic is False
    assert bool((bound(X) != X).any())

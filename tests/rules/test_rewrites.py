"""A rewrite is a value, and the same value serves every extent with any rule."""

import dataclasses
import functools
from typing import Any

import cloudpickle
import flax.core
import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

import flax_sg
from flax_sg import filters
from flax_sg import linen as nn
from flax_sg.filters.expressions import Atom, Filter
from flax_sg.filters.indices import Index, Part
from flax_sg.forms.block_decorator import BlockDecorator
from flax_sg.rules import rules, substitutes
from tests.helpers import oracle
from tests.helpers.extents import EXTENTS
from tests.helpers.turns import in_turn

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Model(fnn.Module):
    def setup(self):
        self.enc = fnn.Dense(3)
        self.scale = self.param('scale', fnn.initializers.ones, (1, 3))
        self.twice = 2.0 * self.scale
        self.last = self.variable('batch_stats', 'last', jnp.zeros, (2, 3))

    def __call__(self, x):
        y = self.perturb('y', self.enc(x) * self.twice + self.last.value)
        self.last.value = x + y
        self.sow('intermediates', 'hidden', y)
        self.sow('intermediates', 'key', jax.random.key_data(self.make_rng('dropout')))
        return y * self.twice + self.scale


MODEL = Model()
RNGS = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
VARIABLES = oracle.init(MODEL, RNGS, X)
# Other values of the same names: a tree, and a collection of the model.
OTHERS = jax.tree.map(lambda leaf: 1.5 * leaf - 0.5, VARIABLES['params'])
VARIABLES = {**VARIABLES, 'ema': OTHERS}
WHERE = ['enc/kernel', 'scale']


# Rules: each is a small class, and beside it what it does, by hand.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scale_cotangent(x, factor):
    return x


scale_cotangent.defvjp(
    lambda x, factor: (x, None), lambda factor, _, ct: (ct * factor,)
)


@dataclasses.dataclass(frozen=True)
class Scale(rules.Rule):
    factor: float

    @property
    def name(self):
        return f'scale[{self.factor}]'

    def __call__(self, path, leaf):
        return scale_cotangent(leaf, self.factor)


@dataclasses.dataclass(frozen=True)
class ByPath(rules.Rule):
    name = 'by_path'

    def __call__(self, path, leaf):
        return leaf + float(len(path)) + 0.5 * len(path.absolute)


def other(path: str, x: Any) -> Any:
    return OTHERS['enc']['kernel'] if path == 'enc/kernel' else OTHERS[path]


@dataclasses.dataclass(frozen=True)
class Halved(rules.Rule):
    name = 'halved'
    asks_path = False

    def __call__(self, path, leaf):
        return leaf * 0.5


TREE = substitutes.FromTree(substitutes.entries_of(OTHERS, 'params'))
RULES: dict[str, tuple[rules.Rule, Any]] = {
    'tree': (TREE, other),
    'collection': (substitutes.FromCollection('ema'), other),
    'function': (
        substitutes.FromFunction(lambda path, x: jnp.sin(x) * len(path)),
        lambda path, x: jnp.sin(x) * len(path),
    ),
    'read only': (rules.ReadOnly(), lambda path, x: x),
    'stop': (rules.StopGradient(), lambda path, x: jax.lax.stop_gradient(x)),
    'scale': (Scale(-3.0), lambda path, x: scale_cotangent(x, -3.0)),
    'by path': (ByPath(), lambda path, x: x + float(len(path)) + 0.5 * len(path)),
}
KEEPS_VALUES = ('stop', 'scale', 'read only')


# Filters that no list of the library names, as it does not name the rules above: what
# it has to know of them they say themselves.


class OfThreeRows(Atom):
    """Arrays of three rows: it asks what an array is."""

    def matches(self, path):
        return path.array is not None and path.array.shape[0] == 3


class FirstRow(Filter):
    """The first row of every variable: it means a part of the array."""

    own_needs = frozenset({'part'})

    def answer(self, path, ask):
        return Part(Index(0))


def some(by: Any) -> Any:
    return lambda path, x: by(path, x) if path in WHERE else x


# Rewrites, and what each makes of every parameter.
REWRITES: dict[str, tuple[BlockDecorator, Any]] = {
    **{
        name: (BlockDecorator(filters.as_filter(WHERE), rule), some(by))
        for name, (rule, by) in RULES.items()
    },
    'of arrays': (
        BlockDecorator(OfThreeRows(), rules.StopGradient()),
        lambda path, x: jax.lax.stop_gradient(x) if x.shape[0] == 3 else x,
    ),
    'of a part': (
        BlockDecorator(FirstRow(), Halved()),
        lambda path, x: x.at[0].multiply(0.5),
    ),
}


def by_hand(by: Any, params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: by('/'.join(key.key for key in keys), x), params
    )


MUTABLE = ['batch_stats', 'intermediates', 'perturbations']


def plain(params: Any, x: Any) -> Any:
    variables, rngs = {**VARIABLES, 'params': params}, {'dropout': RNGS['dropout']}
    return MODEL.apply(variables, x, rngs=rngs, mutable=MUTABLE)


@functools.cache
def values() -> Any:
    return plain(VARIABLES['params'], X)


def run(extent, rewrite, params, x):
    variables = {**VARIABLES, 'params': params}
    options = {'rngs': {'dropout': RNGS['dropout']}, 'mutable': [*MUTABLE, 'params']}
    return EXTENTS[extent](rewrite, MODEL, variables, x, **options)


def test_every_rule_for_values_has_a_row():
    here = rules.Rule, rules.Keyed, substitutes.Substitute
    found = (cls for base in here for cls in base.__subclasses__())
    ours = {
        cls
        for cls in found
        if cls.__module__.startswith('flax_sg.rules.')
        and cls.acts_on != 'cotangents'
        and cls not in here
    }
    assert ours - {type(rule) for rule, _ in RULES.values()} == set()
    # Others are a ``Keyed``, which says why. The levels of a stop are None or 1.
    with_fields = {cls for cls in ours if getattr(cls, '__dataclass_fields__', None)}
    assert with_fields == {rules.StopGradient}


@pytest.mark.parametrize(('extent', 'name'), in_turn(EXTENTS, REWRITES, times=4))
def test_every_rewrite_at_every_extent(extent, name):
    rewrite, by = REWRITES[name]

    def actual(params, x):
        return run(extent, rewrite, params, x)

    def expected(params, x):
        y, written = plain(by_hand(by, params), x)
        return y, {**written, 'params': params}  # Those that are stored.

    params = VARIABLES['params']
    oracle.assert_same_function(actual, expected, params, X)
    if name in KEEPS_VALUES:
        y, written = values()
        oracle.assert_same(actual(params, X), (y, {**written, 'params': params}))


def _init_block(rewrite):
    with rewrite:
        return MODEL.init_with_output(RNGS, X)


def _init_core(rewrite):
    def fn(scope, x):
        return Model(parent=scope)(x)

    return flax.core.init(flax_sg.core.lift(fn, rewrite))(RNGS, X)


@pytest.mark.parametrize('name', REWRITES)
def test_init_is_identical(name):
    rewrite, _ = REWRITES[name]
    y, variables = MODEL.init_with_output(RNGS, X)
    for init in (
        _init_block,
        _init_core,
        lambda rewrite: rewrite(Model)().init_with_output(RNGS, X),
    ):
        y2, variables2 = init(rewrite)
        params, params2 = variables.pop('params', None), variables2.pop('params')
        if params is not None:
            stored = params
        oracle.assert_same(params2, stored)
        if name in KEEPS_VALUES:
            oracle.assert_same(y2, y)
            oracle.assert_same(
                {k: v for k, v in variables2.items() if k != 'intermediates'},
                {k: v for k, v in variables.items() if k != 'intermediates'},
            )


def test_rules_nest_the_inner_one_nearest_to_the_reader():
    # What is stored passes the outermost block first.
    zeros = nn.substitute(lambda path, leaf: jnp.zeros_like(leaf), where='scale')
    more = BlockDecorator(filters.as_filter('scale'), ByPath())
    for outer, inner, scale in ((zeros, more, 7.5), (more, zeros, 0.0)):
        with outer, inner:
            seen = MODEL.bind(VARIABLES).variables['params']['scale']
            derived = MODEL.bind(VARIABLES).twice
        oracle.assert_same(
            (seen, derived), (jnp.full((1, 3), scale), jnp.full((1, 3), 2 * scale))
        )


# Values.


def _named(path):
    return path.name == 'kernel'


VALUES: dict[str, BlockDecorator] = {
    "stop_gradient(Glob('enc/**'))": nn.stop_gradient('enc/**'),
    "stop_gradient(~Glob('enc/**'))": nn.train_only('enc/**'),
    "stop_gradient(Glob('a'), collections=('params', 'cache'))": nn.stop_gradient(
        'a', collections=['params', 'cache']
    ),
    'stop_gradient(Predicate(_named at test_rewrites.py:'
    f'{_named.__code__.co_firstlineno}))': nn.stop_gradient(_named),
    "scale[2.0](Glob('enc/**'))": BlockDecorator(
        filters.as_filter('enc/**'), Scale(2.0)
    ),
}


@pytest.mark.parametrize('text', VALUES)
def test_a_rewrite_is_a_value_that_prints_as_what_was_written(text):
    rewrite = VALUES[text]
    assert repr(rewrite) == text
    by_value = cloudpickle.loads(cloudpickle.dumps(rewrite))
    for twin in (*oracle.copies(rewrite), by_value, dataclasses.replace(rewrite)):
        assert (twin, hash(twin), repr(twin)) == (rewrite, hash(rewrite), text)
    assert [key for key, other in VALUES.items() if other == rewrite] == [text]
    with pytest.raises(dataclasses.FrozenInstanceError):
        rewrite.where = filters.as_filter('b')


# Collections.


class Collections(fnn.Module):
    @fnn.compact
    def __call__(self):
        names = ('params', 'memory', 'cache', '_overwrite_with_gradient')
        return sum(self.variable(name, 'w', jnp.ones, 2).value for name in names)


@pytest.mark.parametrize(
    ('collections', 'stopped'),
    [
        ('params', 'params'),
        (['memory', 'params'], 'params memory'),
        ({'cache', 'memory'}, 'memory cache'),
        (True, 'params memory cache'),
        (False, ''),
        (flax.core.DenyList('params'), 'memory cache'),
        (flax.core.DenyList(['params', 'cache']), 'memory'),
    ],
)
def test_collections_are_chosen_by_name(collections, stopped):
    def loss(variables):
        with nn.stop_gradient(True, collections=collections):
            return jnp.sum(Collections().apply(variables))

    grads = jax.jit(jax.grad(loss))(Collections().init(jax.random.key(0)))
    for name, tree in grads.items():
        assert tree['w'].tolist() == [float(name not in stopped.split())] * 2


def test_a_tree_keeps_what_fp8_layers_overwrite():
    tree = {'params': {'w': 1.0}, '_overwrite_with_gradient': {'scale': 2.0}}
    stopped = jax.grad(lambda t: sum(jax.tree.leaves(flax_sg.stop_gradient(t, True))))
    assert stopped(tree) == {
        'params': {'w': 0.0},
        '_overwrite_with_gradient': {'scale': 1.0},
    }

"""A rewrite is a value, and the same value serves every extent with any rule."""

import copy
import dataclasses
import functools
import pickle
import re
from typing import Any

import cloudpickle
import flax.core
import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

import flax_sg
import oracle
from flax_sg import errors, filters
from flax_sg import linen as nn
from flax_sg.forms import rewrites
from flax_sg.rules import rules, substitutes

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Model(fnn.Module):
    """Parameters, a state, random numbers, a sown value, kept and derived values."""

    def setup(self):
        self.enc = fnn.Dense(3)
        self.scale = self.param('scale', fnn.initializers.ones, (1, 3))
        self.twice = 2.0 * self.scale
        self.last = self.variable('batch_stats', 'last', jnp.zeros, (2, 3))

    def __call__(self, x):
        y = self.enc(x) * self.twice + self.last.value
        self.last.value = x + y
        self.sow('intermediates', 'hidden', y)
        self.sow('intermediates', 'key', jax.random.key_data(self.make_rng('dropout')))
        return y * self.twice + self.scale


MODEL = Model()
RNGS = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
VARIABLES = MODEL.init(RNGS, X)
# Other values of the same names: a tree, and a collection of the model.
OTHERS = jax.tree.map(lambda leaf: 1.5 * leaf - 0.5, VARIABLES['params'])
VARIABLES = {**VARIABLES, 'ema': OTHERS}
WHERE = ['enc/kernel', 'scale']


def selects(path: str) -> bool:
    return path in WHERE


# Rules: each is a small class, and beside it what it does, by hand.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scale_cotangent(x, factor):
    return x


scale_cotangent.defvjp(
    lambda x, factor: (x, None), lambda factor, _, ct: (ct * factor,)
)


@dataclasses.dataclass(frozen=True)
class Scale(rules.Rule):
    """Multiplies the gradient by a factor."""

    factor: float

    @property
    def name(self):
        return f'scale[{self.factor}]'

    def __call__(self, path, leaf):
        return scale_cotangent(leaf, self.factor)


@dataclasses.dataclass(frozen=True)
class Zeros(rules.Rule):
    """Reads see zeros."""

    name = 'zeros'

    def __call__(self, path, leaf):
        return jnp.zeros_like(leaf)


@dataclasses.dataclass(frozen=True)
class ByPath(rules.Rule):
    """Adds something that depends on the path."""

    name = 'by_path'

    def __call__(self, path, leaf):
        return leaf + float(len(path)) + 0.5 * len(path.absolute)


@dataclasses.dataclass(frozen=True)
class Nothing(rules.Rule):
    """Rewrites nothing."""

    name = 'nothing'

    def __call__(self, path, leaf):
        return leaf


def other(path: str, x: Any) -> Any:
    return OTHERS['enc']['kernel'] if path == 'enc/kernel' else OTHERS[path]


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
    'zeros': (Zeros(), lambda path, x: jnp.zeros_like(x)),
    'by path': (ByPath(), lambda path, x: x + float(len(path)) + 0.5 * len(path)),
    'nothing': (Nothing(), lambda path, x: x),
}
KEEPS_VALUES = ('stop', 'scale', 'nothing', 'read only')


def by_hand(by: Any, params: Any) -> Any:
    def leaf(keys, x):
        path = '/'.join(key.key for key in keys)
        return by(path, x) if selects(path) else x

    return jax.tree_util.tree_map_with_path(leaf, params)


MUTABLE = ['batch_stats', 'intermediates']


def plain(params: Any, x: Any, mutable: Any = MUTABLE) -> Any:
    variables = {**VARIABLES, 'params': params}
    return MODEL.apply(variables, x, rngs={'dropout': RNGS['dropout']}, mutable=mutable)


def assert_same_program(actual: Any, expected: Any, *args: Any) -> None:
    """Equal values and gradients."""
    oracle.assert_same(actual(*args), expected(*args))
    oracle.assert_same(oracle.grads(actual, *args), oracle.grads(expected, *args))


@functools.cache
def values() -> Any:
    return plain(VARIABLES['params'], X)


def _block(rewrite, params, x, mutable):
    with rewrite:
        return plain(params, x, mutable)


def _block_in_a_method(rewrite, params, x, mutable):
    class Blocked(Model):
        def __call__(self, x):
            with rewrite:
                return super().__call__(x)

    return _apply(Blocked(), params, x, mutable)


def _apply(model, params, x, mutable):
    variables = {**VARIABLES, 'params': params}
    rngs = {'dropout': RNGS['dropout']}
    return model.apply(variables, x, rngs=rngs, mutable=mutable)


def _class(rewrite, params, x, mutable):
    return _apply(rewrite(Model)(), params, x, mutable)


def _method(rewrite, params, x, mutable):
    class Decorated(Model):
        @rewrite
        def __call__(self, x):
            return super().__call__(x)

    return _apply(Decorated(), params, x, mutable)


def _function(rewrite, params, x, mutable):
    fn = rewrite(lambda mdl, x: mdl(x))
    variables = {**VARIABLES, 'params': params}
    rngs = {'dropout': RNGS['dropout']}
    return fnn.apply(lambda mdl, x: fn(mdl, x), Model(), mutable=mutable)(
        variables, x, rngs=rngs
    )


def _core(rewrite, params, x, mutable):
    def fn(scope, x):
        return Model(parent=scope)(x)

    lifted = flax_sg.core.lift(fn, rewrite)
    variables = {**VARIABLES, 'params': params}
    rngs = {'dropout': RNGS['dropout']}
    return flax.core.apply(lifted, mutable=mutable)(variables, x, rngs=rngs)


EXTENTS = {
    fn.__name__.strip('_'): fn
    for fn in (_block, _block_in_a_method, _class, _method, _function, _core)
}


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('extent', EXTENTS)
def test_every_rule_at_every_extent(extent, rule):
    value, by = RULES[rule]
    rewrite = rewrites.BlockDecorator(filters.as_filter(WHERE), value)

    def actual(params, x):
        return EXTENTS[extent](rewrite, params, x, MUTABLE)

    def expected(params, x):
        return plain(by_hand(by, params), x)

    params = VARIABLES['params']
    assert_same_program(actual, expected, params, X)
    if rule in KEEPS_VALUES:
        oracle.assert_same(actual(params, X), values())


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('extent', ['block', 'class', 'core'])
def test_what_is_given_back_is_what_is_stored(extent, rule):
    value, by = RULES[rule]
    rewrite = rewrites.BlockDecorator(filters.as_filter(WHERE), value)

    def actual(params, x):
        y, updates = EXTENTS[extent](rewrite, params, x, True)
        return y, updates['params']

    def expected(params, x):
        return plain(by_hand(by, params), x)[0], params

    assert_same_program(actual, expected, VARIABLES['params'], X)


def _init_block(rewrite):
    with rewrite:
        return MODEL.init_with_output(RNGS, X)


def _init_method(rewrite):
    class Model(globals()['Model']):
        @rewrite
        def __call__(self, x):
            return super().__call__(x)

    return Model().init_with_output(RNGS, X)


def _init_core(rewrite):
    def fn(scope, x):
        return Model(parent=scope)(x)

    return flax.core.init(flax_sg.core.lift(fn, rewrite))(RNGS, X)


@pytest.mark.parametrize('rule', RULES)
def test_init_is_identical(rule):
    rewrite = rewrites.BlockDecorator(filters.as_filter(WHERE), RULES[rule][0])
    y, variables = MODEL.init_with_output(RNGS, X)
    for init in (
        _init_block,
        _init_method,
        _init_core,
        lambda rewrite: rewrite(Model)().init_with_output(RNGS, X),
    ):
        y2, variables2 = init(rewrite)
        params, params2 = variables.pop('params', None), variables2.pop('params')
        if params is not None:
            stored = params
        oracle.assert_same(params2, stored)
        if rule in KEEPS_VALUES:
            oracle.assert_same(y2, y)
            oracle.assert_same(
                {k: v for k, v in variables2.items() if k != 'intermediates'},
                {k: v for k, v in variables.items() if k != 'intermediates'},
            )


def test_rules_nest_the_inner_one_nearest_to_the_reader():
    # What is stored passes the outermost block first.
    zeros = rewrites.BlockDecorator(filters.as_filter('scale'), Zeros())
    more = rewrites.BlockDecorator(filters.as_filter('scale'), ByPath())
    for outer, inner, scale in ((zeros, more, 7.5), (more, zeros, 0.0)):
        with outer, inner:
            seen = MODEL.bind(VARIABLES).variables['params']['scale']
            derived = MODEL.bind(VARIABLES).twice
        oracle.assert_same(
            (seen, derived), (jnp.full((1, 3), scale), jnp.full((1, 3), 2 * scale))
        )


def test_a_rule_sees_each_leaf_once_in_a_block():
    seen: list[str] = []

    @dataclasses.dataclass(frozen=True)
    class Counts(rules.Rule):
        name = 'counts'

        def __call__(self, path, leaf):
            seen.append(str(path))
            return leaf * 1.0

    def fn(variables):
        bound = MODEL.bind(variables, rngs=RNGS, mutable=MUTABLE)
        with rewrites.BlockDecorator(filters.as_filter(True), Counts()):
            for _ in range(3):
                bound(X)
                _ = bound.enc.variables

    jax.eval_shape(fn, VARIABLES)
    assert sorted(set(seen)) == sorted(seen)


def test_a_rule_is_given_the_leaves_in_a_variable():
    class Boxed(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            init = fnn.with_partitioning(fnn.initializers.ones, (None, 'data'))
            pair = self.param('pair', lambda key: (jnp.ones((3, 3)), jnp.zeros((1, 3))))
            return x @ self.param('kernel', init, (3, 3)) @ pair[0] + pair[1]

    variables = Boxed().init(jax.random.key(0), X)
    seen: list[tuple[str, Any]] = []

    @dataclasses.dataclass(frozen=True)
    class Looks(rules.Rule):
        name = 'looks'

        def __call__(self, path, leaf):
            seen.append((str(path), leaf.shape))
            return leaf

    with rewrites.BlockDecorator(filters.as_filter('**'), Looks()):
        Boxed().apply(variables, X)
    paths = [('kernel', (3, 3)), ('pair/0', (3, 3)), ('pair/1', (1, 3))]
    assert sorted(seen) == paths


# Values.


SMALL = fnn.Sequential([fnn.Dense(3), fnn.Dense(2)])
SMALL_PARAMS = SMALL.init(jax.random.key(0), X)['params']


def small(params: Any) -> Any:
    return SMALL.apply({'params': params}, X)


def test_train_only_is_the_complement():
    for where in ('layers_1/**', True, False, lambda path: path.name == 'bias'):
        chosen = filters.as_filter(where)

        def positive(params, where=where):
            with nn.train_only(where):
                return small(params)

        def hand(params, chosen=chosen):
            def selects(path):
                return not chosen(flax_sg.Path.of('params', tuple(path.split('/'))))

            return small(oracle.stopped(params, selects))

        assert_same_program(jax.jit(positive), jax.jit(hand), SMALL_PARAMS)
        assert nn.train_only(where) == nn.stop_gradient(~chosen)


def _named(path):
    return path.name == 'kernel'


VALUES: dict[str, tuple[rewrites.BlockDecorator, str]] = {
    'glob': (nn.stop_gradient('enc/**'), "stop_gradient(Glob('enc/**'))"),
    'regex': (
        nn.stop_gradient(re.compile('enc/.*')),
        "stop_gradient(Regex(re.compile('enc/.*')))",
    ),
    'constant': (nn.stop_gradient(True), 'stop_gradient(Constant(True))'),
    'expression': (
        nn.stop_gradient(filters.as_filter('enc/**') & ~filters.as_filter('**/bias')),
        "stop_gradient(Glob('enc/**') & ~Glob('**/bias'))",
    ),
    'complement': (nn.train_only('enc/**'), "stop_gradient(~Glob('enc/**'))"),
    'collections': (
        nn.stop_gradient('a', collections=['params', 'cache']),
        "stop_gradient(Glob('a'), collections=('params', 'cache'))",
    ),
    'tree': (
        nn.stop_gradient({'a': True, 'b': {'c': False}}),
        "stop_gradient(BoolTree({'a': True, 'b': {'c': False}}))",
    ),
    'function': (
        nn.stop_gradient(_named),
        f'stop_gradient(Predicate(_named at test_rewrites.py:'
        f'{_named.__code__.co_firstlineno}))',
    ),
    'rule': (
        rewrites.BlockDecorator(filters.as_filter('a'), Scale(2.0)),
        "scale[2.0](Glob('a'))",
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize('case', VALUES)
def test_a_rewrite_prints_as_what_was_written(case):
    rewrite, text = VALUES[case]
    assert repr(rewrite) == text


@pytest.mark.parametrize('case', VALUES)
def test_a_rewrite_is_a_value(case):
    rewrite, _ = VALUES[case]
    for twin in (
        copy.copy(rewrite),
        copy.deepcopy(rewrite),
        pickle.loads(pickle.dumps(rewrite)),
        cloudpickle.loads(cloudpickle.dumps(rewrite)),
        dataclasses.replace(rewrite),
    ):
        assert twin == rewrite
        assert hash(twin) == hash(rewrite)
        assert repr(twin) == repr(rewrite)
    assert [k for k, (other, _) in VALUES.items() if other == rewrite] == [case]
    with pytest.raises(dataclasses.FrozenInstanceError):
        rewrite.where = filters.as_filter('b')


def test_a_lambda_in_a_rewrite_survives_cloudpickle():
    name = 'kernel'
    rewrite = nn.stop_gradient(lambda path: path.name == name)
    twin = cloudpickle.loads(cloudpickle.dumps(rewrite))

    def loss(rewrite, params):
        with rewrite:
            return small(params)

    assert_same_program(
        jax.jit(functools.partial(loss, twin)),
        lambda params: small(oracle.stopped(params, lambda p: p.endswith('kernel'))),
        SMALL_PARAMS,
    )


def test_equality_looks_at_filter_rule_and_collections():
    one = nn.stop_gradient('a')
    assert one == nn.stop_gradient('a')
    assert one == nn.stop_gradient(filters.as_filter('a'))
    # What happens when nothing matches is no part of what the program computes.
    assert one == nn.stop_gradient('a', unused='ignore')
    assert one != nn.stop_gradient('b')
    assert one != nn.stop_gradient('a', collections=True)
    assert one != rewrites.BlockDecorator(filters.as_filter('a'), Zeros())
    assert one != filters.as_filter('a')
    assert nn.stop_gradient('a', collections=['x', 'y']) == nn.stop_gradient(
        'a', collections=('x', 'y')
    )


def test_a_rule_is_taken_as_it_is_when_the_block_opens():
    class One(fnn.Module):
        @fnn.compact
        def __call__(self):
            return jnp.sum(self.param('w', fnn.initializers.ones, (2,)))

    factors = [2.0]
    rewrite = nn.map_cotangent('w', lambda path, ct: factors[0] * ct)

    def loss(params):
        with rewrite:
            return One().apply({'params': params})

    for factor in (2.0, 3.0):
        factors[0] = factor
        assert jax.grad(loss)({'w': jnp.ones(2)})['w'].tolist() == [factor, factor]


def test_entering_gives_the_value():
    rewrite = nn.stop_gradient('enc/**')
    with rewrite as entered:
        jax.eval_shape(plain, VARIABLES['params'], X)
    assert entered is rewrite


# Collections.


def test_collections_are_chosen_by_name():
    class Memory(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            w = self.param('w', fnn.initializers.ones, (3, 3))
            a = self.variable('memory', 'w', lambda: jnp.ones((2, 3)))
            b = self.variable('cache', 'w', lambda: jnp.ones((2, 3)))
            return x @ w + a.value * b.value

    variables = Memory().init(jax.random.key(0), X)
    every = {'params', 'memory', 'cache'}
    cases: list[tuple[Any, set[str]]] = [
        ('params', {'params'}),
        ('memory', {'memory'}),
        (['memory', 'params'], {'memory', 'params'}),
        (('cache',), {'cache'}),
        ({'cache', 'memory'}, {'memory', 'cache'}),
        (True, every),
        (False, set()),
        (flax.core.DenyList('params'), {'memory', 'cache'}),
        (flax.core.DenyList(['params', 'cache']), {'memory'}),
    ]
    for collections, names in cases:

        def fn(variables, collections=collections):
            with nn.stop_gradient(True, collections=collections):
                return Memory().apply(variables, X)

        def hand(variables, names=names):
            return Memory().apply(
                {
                    col: oracle.stopped(tree) if col in names else tree
                    for col, tree in variables.items()
                },
                X,
            )

        assert_same_program(jax.jit(fn), jax.jit(hand), variables)


@pytest.mark.parametrize('collections', [None, 3, ['params', 3], jnp.ones(2), object()])
def test_what_is_no_collection_filter(collections):
    with pytest.raises(errors.FilterTypeError, match='collections='):
        nn.stop_gradient('a', collections=collections)


@pytest.mark.parametrize(
    'collections',
    [
        '_overwrite_with_gradient',
        ['params', '_overwrite_with_gradient'],
        ('_overwrite_with_gradient',),
        {'_overwrite_with_gradient'},
    ],
)
def test_the_collection_that_no_rule_may_touch(collections):
    for make in (nn.stop_gradient, nn.train_only):
        with pytest.raises(errors.ArgumentValueError):
            make(True, collections=collections)
    with pytest.raises(errors.ArgumentValueError):
        flax_sg.core.stop_gradient(lambda scope: None, True, collections=collections)
    with pytest.raises(errors.ArgumentValueError):
        rewrites.BlockDecorator(filters.as_filter(True), Zeros(), collections)


@pytest.mark.parametrize('collections', [True, flax.core.DenyList('params')])
def test_every_collection_but_the_one_that_no_rule_may_touch(collections):
    class Fp8(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            scale = self.variable(
                '_overwrite_with_gradient', 's', lambda: jnp.ones((1, 3))
            )
            memory = self.variable('memory', 'm', lambda: jnp.ones((1, 3)))
            return x * scale.value * memory.value

    variables = Fp8().init(jax.random.key(0), X)

    def fn(variables):
        with nn.stop_gradient(True, collections=collections):
            return Fp8().apply(variables, X)

    grads = oracle.grads(jax.jit(fn), variables)[0][0]
    assert not oracle.is_zero(grads['_overwrite_with_gradient'])
    assert oracle.is_zero(grads['memory'])

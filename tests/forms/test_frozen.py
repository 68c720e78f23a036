"""`nn.Frozen`: the module without a place of its own, with weights that are stopped.

What it should compute comes from the same program without it, on copies of the weights
that are stopped by hand.
"""

import collections
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import flax
import jax
import jax.numpy as jnp
import pytest
from flax import linen

from flax_sg import Path, errors, filters
from flax_sg import linen as nn
from tests.helpers import oracle, stepwise
from tests.helpers.oracle import assert_same, is_zero, stopped
from tests.helpers.profile import LONG

KEY = jax.random.key(7)
RNGS = {'params': KEY, 'dropout': jax.random.key(3)}
X = jnp.array([[0.5, -1.0, 2.0, 1.0], [1.5, 0.25, -0.75, -2.0]])

COLLECTIONS = ('params', 'batch_stats', 'counts', 'losses', 'intermediates')
STACKED: dict[str, Any] = {
    'variable_axes': dict.fromkeys(COLLECTIONS, 0),
    'split_rngs': dict.fromkeys(RNGS, True),
    'metadata_params': {'partition_name': None},
}

Wrap = Callable[[Any], Any]


def bare(module: Any) -> Any:
    """In the place of ``nn.Frozen``."""
    return module


# Modules to be frozen: all take an array of shape (2, 4) and return one.


class Keeps(linen.Module):
    def setup(self):
        self.w = self.param('w', linen.initializers.normal(), (1, 4))
        self.w2 = jnp.tanh(self.w)
        self.layers = [linen.Dense(4), linen.Dense(4)]
        self.named = {'a': linen.Dense(4)}
        self.norm = linen.LayerNorm()

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x) * self.w2
        return self.named['a'](self.norm(x)) + self.w


class Noisy(linen.Module):
    """Draws dropout masks, twice from one module and in a child."""

    @linen.compact
    def __call__(self, x):
        drop = linen.Dropout(0.5, deterministic=False)
        x = drop(linen.Dense(4)(drop(x)))
        return linen.Sequential([linen.Dense(4), drop])(x)


class Sows(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4)(x)
        x = linen.BatchNorm(use_running_average=False)(x)
        self.sow('intermediates', 'seen', x)
        self.sow('losses', 'size', jnp.sum(x**2))
        count = self.variable('counts', 'n', lambda: jnp.zeros(()))
        count.value = count.value + 1.0
        return x * (1.0 + count.value)


MODULES: dict[str, Callable[[], Any]] = {
    'dense': lambda: linen.Dense(4),
    'keeps': Keeps,
    'noisy': Noisy,
    'sows': Sows,
}


# Places for a wrapped module. The layers beside it are called 'other'.


class Compact(linen.Module):
    wrap: Wrap
    make: Any

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4, name='other')(x)
        inner = self.wrap(self.make())
        return linen.Dense(4, name='other_2')(inner(x))


class Setup(linen.Module):
    wrap: Wrap
    make: Any

    def setup(self):
        self.inner = [self.wrap(self.make()), {'c': self.wrap(self.make())}]
        self.last = self.wrap(linen.Dense(4))
        self.other = linen.Dense(4)

    def __call__(self, x):
        return self.last(self.inner[1]['c'](self.other(self.inner[0](x))))


class Field(linen.Module):
    inner: Any
    train: bool = True

    @linen.compact
    def __call__(self, x):
        args = () if self.train else (False,)
        return linen.Dense(4, name='other')(self.inner(x, *args))


class Shared(linen.Module):
    """A module that the parent of its users owns, used twice."""

    wrap: Wrap
    make: Any

    @linen.compact
    def __call__(self, x):
        inner = self.make()
        other = linen.Dense(4, name='other')
        x = linen.Sequential([self.wrap(inner), other])(x)
        return Field(self.wrap(inner))(x)


class Body(linen.Module):
    wrap: Wrap
    make: Any
    pair: bool = False

    @linen.compact
    def __call__(self, x, *unused):
        y = jnp.tanh(linen.Dense(4, name='other')(self.wrap(self.make())(x)))
        return (y, None) if self.pair else y


class Lifted(linen.Module):
    """A place in the body of a transform of a class."""

    lift: Any
    wrap: Wrap
    make: Any

    @linen.compact
    def __call__(self, x):
        if self.lift is linen.scan:
            scanned = linen.scan(Body, length=2, **STACKED)
            return scanned(self.wrap, self.make, True)(x, None)[0]
        if self.lift is linen.vmap:
            mapped = linen.vmap(Body, **STACKED)
            return mapped(self.wrap, self.make)(jnp.stack([x, -x]))[0]
        return self.lift(Body)(self.wrap, self.make)(x)


class Lent(linen.Module):
    """A wrapper that is passed to transforms of functions."""

    wrap: Wrap
    make: Any

    @linen.compact
    def __call__(self, x):
        inner = self.wrap(self.make())
        x = inner(x)
        x = linen.remat(lambda module, x: module(x))(inner, x)
        return linen.jit(lambda module, x: module(x))(inner, x)


PLACES: dict[str, Callable[[Wrap, Any], Any]] = {
    'top': lambda wrap, make: wrap(make()),
    'compact': Compact,
    'setup': Setup,
    'field': lambda wrap, make: Field(wrap(make())),
    'sequential': lambda wrap, make: linen.Sequential(
        [Field(linen.Dense(4)), wrap(make()), jnp.tanh]
    ),
    'shared': Shared,
    'lent': Lent,
    **{
        lift.__name__: functools.partial(Lifted, lift)
        for lift in (linen.jit, linen.remat, linen.vmap, linen.scan)
    },
}


def is_frozen(path: str) -> bool:
    """Whether a parameter belongs to a wrapped module, in every place above."""
    return not re.search(r'(^|/)(other|layers_0/inner)', path)


def assert_same_program(model: Any, plain: Any, selects: Any = is_frozen) -> None:
    """``model`` is ``plain`` with the selected parameters stopped by hand."""
    variables = stepwise.evaluate(plain.init, RNGS, X)
    assert_same(stepwise.evaluate(model.init, RNGS, X), variables)

    def run(model: Any, selects: Any) -> Any:
        def fn(params: Any, x: Any) -> Any:
            out, written = model.apply(
                {**variables, 'params': stopped(params, selects)},
                x,
                rngs={'dropout': KEY},
                mutable=linen.DenyList('params'),
                capture_intermediates=True,
            )
            # Gradients through what is written are in other tests.
            return {'out': jnp.ravel(out)}, jax.lax.stop_gradient(written)

        return stepwise.outputs_and_grads(fn, variables['params'], X)

    assert_same(run(model, lambda path: False), run(plain, selects))


# Some of the pairs: each module at three places, each place with a module. A pair
# that fails would do so for what either of them does. The long profile runs all.
PAIRS = [
    (name, place)
    for row, name in enumerate(MODULES)
    for column, place in enumerate(PLACES)
    if LONG or (row + column) % 4 == 0
]


@pytest.mark.parametrize(('name', 'place'), PAIRS)
def test_frozen_is_the_bare_module_with_stopped_weights(name: str, place: str) -> None:
    make = MODULES[name]
    plain = PLACES[place](bare, make)
    assert_same_program(PLACES[place](nn.Frozen, make), plain)


class Where:
    """A filter that notes which paths it sees.

    Of a class of its own: a block asks what blocks of one code were asked.
    """

    def __init__(self) -> None:
        self.seen: set[Any] = set()

    def __call__(self, path: Any) -> bool:
        self.seen.add((path, path.absolute))
        return True


def test_paths_are_those_of_the_bare_module_seen_from_itself() -> None:
    for place, put in PLACES.items():
        where = Where()
        freeze = functools.partial(nn.Frozen, where=where)
        shapes = jax.eval_shape(put(freeze, lambda: linen.Dense(4)).init, RNGS, X)
        paths = oracle.by_path(shapes['params'])
        assert {path for path, _ in where.seen} == {'kernel', 'bias'}, place
        frozen = {path for path in paths if is_frozen(path)}
        assert {absolute for _, absolute in where.seen} == frozen
        # The table freezes something and not everything.
        assert frozen and (place in ('top', 'lent') or frozen != {*paths})
    # Of an RNN, the cell lies outside.
    where = Where()
    freeze = functools.partial(nn.Frozen, where=where)
    jax.eval_shape(Cells(freeze).init, KEY, X)
    assert '/cell/hf/kernel' in {path for path, _ in where.seen}


# Reads of every kind are under the rule.


class Halves(NamedTuple):
    """Two modules."""

    one: Any
    other: Any


class Offers(linen.Module):
    """Gives its parameters away in every way that a module has."""

    def setup(self):
        self.w = self.param('w', linen.initializers.normal(), (1, 4))
        self.w2 = jnp.tanh(self.w)
        self.tree = {'w': [self.w]}
        self.box = self.variable('params', 'v', lambda: jnp.ones((1, 4)))
        self.layers = [linen.Dense(4), linen.Dense(4)]
        self.named = {'a': linen.Dense(4)}
        self.halves = Halves(linen.Dense(4, name='one'), linen.Dense(4, name='other'))
        self.fn = lambda x: self.layers[0](x) * self.w
        self.partial = functools.partial(self.method, 2.0)
        self.of_fn = functools.partial(self.fn)
        self.jitted = jax.jit(self.fn)
        self.with_rule = jax.custom_jvp(self.fn)
        self.others = self.layers[1].__call__
        self.held = {'box': [self.box]}
        self.act = jnp.tanh
        self.methods = [self.method, {'layer': self.layers[1].__call__}]

    def method(self, factor, x=None):
        return factor * self.w * (X if x is None else x)

    def first(self):
        return self.halves.one

    def both(self):
        return {'both': [self.halves.one, self.halves.other]}

    def later(self):
        return lambda x: self.halves.one(x)

    def chosen(self, name):
        return getattr(self, name)

    def pair(self, x):
        return self.chosen('helper'), self.layers[1](x)

    def of_layer(self):
        return functools.partial(linen.Dense.__call__, self.layers[0])

    @property
    def alias(self):
        return self.method

    def counts(self):
        return collections.defaultdict(int, one=1)

    def uses(self, x):
        return self.fn(x) + self.box.value + self.partial() + self.others(x)

    @property
    def doubled(self):
        return 2 * self.layers[0].variables['params']['kernel']

    @linen.nowrap
    def helper(self, x):
        return x * self.w2

    @linen.compact
    def __call__(self, x):
        return self.layers[1](self.named['a'](self.fn(x))) + self.box.value


READS: dict[str, Callable[[Any], Any]] = {
    'get_variable': lambda m: m.get_variable('params', 'w'),
    'call': lambda m: m(X),
    'method': lambda m: m.method(2.0),
    'in a method': lambda m: m.uses(X),
    'method by keyword': lambda m: m.method(factor=2.0, x=X),
    'method, taken before': lambda m: functools.partial(m.method, 3.0)(),
    'nowrap': lambda m: m.helper(X),
    'property': lambda m: m.doubled,
    'kept': lambda m: m.w2,
    'kept in a tree': lambda m: m.tree['w'][0],
    'variables': lambda m: m.variables['params']['layers_0'],
    'a list of modules': lambda m: m.layers[1](X),
    'a dict of modules': lambda m: m.named['a'](X),
    'a named tuple of modules': lambda m: m.halves.other(X),
    'a module that a method returns': lambda m: m.first()(X),
    'modules in what it returns': lambda m: m.both()['both'][1](X),
    'a part of a part': lambda m: m.layers[0].variables['params']['bias'],
    'getattr': lambda m: getattr(m, 'w', None),
    'a partial': lambda m: m.partial(),
    'a method of a part': lambda m: m.others(X),
    'a list of methods': lambda m: m.methods[0](2.0),
    'a dict of methods': lambda m: m.methods[1]['layer'](X),
    'a method that a method returns': lambda m: m.chosen('uses')(X),
    'a method in a tuple': lambda m: m.pair(X)[0](m.pair(X)[1]),
    'a partial of a part': lambda m: m.of_layer()(X),
    'a property that is a method': lambda m: m.alias(3.0),
}


class Reads(linen.Module):
    """All reads, of a module or of a view of it."""

    view: Any

    def setup(self):
        self.inner = Offers()

    def __call__(self, values=None):
        view = self.view(self.inner, values)
        return view(X), [read(view) for read in READS.values()]


@pytest.mark.parametrize(
    ('other', 'where'),
    [(False, ['layers_*/**', 'named_a/kernel', 'o*/**', 'v']), (True, True)],
)
def test_reads_are_under_the_rule(other: bool, where: Any) -> None:
    """Of the module, and of other values in the place of its own."""

    def view(module: Any, values: Any) -> Any:
        if other:
            return nn.mirror(module, where, variables=values and {'params': values})
        return nn.Frozen(module, where)

    plain = Reads(lambda module, values: module)
    params = plain.init(KEY)['params']
    assert_same(Reads(view).init(KEY)['params'], params)
    taken = filters.as_filter(where)
    names = oracle.by_path(params['inner'])
    chosen = [p for p in names if taken(Path.of('params', tuple(p.split('/'))))]
    assert chosen
    values = jax.tree.map(lambda leaf: 2 * leaf, params['inner'])

    def actual(params: Any, values: Any) -> Any:
        return Reads(view).apply({'params': params}, values)

    def expected(params: Any, values: Any) -> Any:
        seen = stopped(values if other else params['inner'], chosen.__contains__)
        return plain.apply({'params': {'inner': seen}})

    grads = [functools.partial(oracle.grads, fn) for fn in (actual, expected)]
    assert_same(*(stepwise.evaluate(fn, params, values) for fn in grads))


@pytest.mark.parametrize('wrap', [nn.Frozen, nn.mirror, nn.scale_gradient(True, 0.5)])
@pytest.mark.parametrize('name', ['box', 'fn', 'of_fn', 'jitted', 'with_rule', 'held'])
def test_what_reads_later_raises(name: str, wrap: Any) -> None:
    """A function that holds modules, or a Variable: the block has closed by then."""
    variables = oracle.init(Offers(), KEY, X)
    with pytest.raises(errors.BlockError, match=f'[.]{name} is or holds a '):
        getattr(wrap(Offers()).bind(variables), name)
    bound = wrap(Offers()).bind(variables)
    with pytest.raises(errors.BlockError, match='later'):
        bound.later()
    # A function of no module passes.
    assert bound.act is jnp.tanh
    assert bound.counts() == {'one': 1}


def test_what_is_not_there() -> None:
    frozen = nn.Frozen(Offers())
    assert not hasattr(frozen, 'nothing')
    bound = frozen.bind(Offers().init(KEY, X))
    with pytest.raises(AttributeError, match='nothing'):
        _ = bound.nothing
    assert bound.layers[0].kernel_init is bound.module.layers[0].kernel_init
    with pytest.raises(flax.errors.CallCompactUnboundModuleError):
        nn.Frozen(linen.Dense(2))(X)


def test_reads_of_a_bound_wrapper_and_of_one_that_is_not() -> None:
    embed, ids = nn.Frozen(nn.Embed(4, 3)), jnp.array([0, 2])
    assert (embed.features, embed.num_embeddings) == (3, 4)
    params = oracle.init(embed, KEY, ids)['params']
    x = jnp.ones((2, 3))
    uses: dict[str, Callable[[Any, Any], Any]] = {
        'attend': lambda m, v: m.bind(v).attend(x),
        'embedding': lambda m, v: m.bind(v).embedding,
        'by name': lambda m, v: m.apply(v, x, method='attend'),
        'by function': lambda m, v: m.apply(v, x, method=nn.Embed.attend),
        'in a function': lambda m, v: m.apply(v, x, method=lambda m, x: m.attend(x)),
        'unbound': lambda m, v: m.bind(v).unbind()[0].apply(v, ids),
    }
    for name, use in uses.items():
        value = use(embed, {'params': params})
        assert_same(value, use(nn.Embed(4, 3), {'params': params}))
        (gradient,) = oracle.grads(lambda p, use=use: use(embed, {'params': p}), params)
        assert is_zero(gradient), name
    # The body of a method that creates parameters reads them from the module too.
    dense = nn.Frozen(linen.Dense(3))
    variables = oracle.init(dense, KEY, x)
    call = functools.partial(dense.apply, method=linen.Dense.__call__)
    assert_same(call(variables, x), linen.Dense(3).apply(variables, x))
    assert is_zero(oracle.grads(lambda v: call(v, x), variables))


# Models with a wrapper at special places: by its wrapper, and what is frozen in each.


def model(body: Callable[[Any, Wrap, Any], Any]) -> Callable[[Wrap], Any]:
    """A model of a compact method, which makes a layer ``other`` and wraps the rest."""

    class Model(linen.Module):
        wrap: Wrap

        @linen.compact
        def __call__(self, x):
            return linen.Dense(4, name='other')(body(self, self.wrap, x))

    return Model


class Cells(linen.Module):
    wrap: Wrap

    def setup(self):
        self.cell = linen.OptimizedLSTMCell(4)
        self.rnn = self.wrap(linen.RNN(self.cell))
        self.both = self.wrap(
            linen.Bidirectional(linen.RNN(self.cell), linen.RNN(linen.GRUCell(4)))
        )
        self.other = linen.Dense(4)

    def __call__(self, x):
        return self.other(self.both(self.rnn(x[:, None]))[:, 0])


class Adapter(linen.Module):
    wrap: Any

    def setup(self):
        self.child = self.wrap(linen.Dense(4))
        linen.share_scope(self, self.child)

    @linen.compact
    def __call__(self, x):
        a = self.param('other_a', linen.initializers.normal(), (4, 2))
        b = self.param('other_b', linen.initializers.normal(), (2, 4))
        return self.child(x) + x @ a @ b


MODELS: dict[str, Callable[[Wrap], Any]] = {
    'shares its scope': model(lambda _, wrap, x: Adapter(wrap=wrap)(x)),
    'a frozen cell': model(
        lambda _, wrap, x: linen.RNN(wrap(linen.GRUCell(4)))(x[:, None])[:, 0]
    ),
    'cells from elsewhere': Cells,
}


@pytest.mark.parametrize('name', MODELS)
def test_a_wrapper_at_a_special_place(name: str) -> None:
    assert_same_program(MODELS[name](nn.Frozen), MODELS[name](bare))


@pytest.mark.parametrize('view', ['Frozen', 'mirror', 'other values'])
def test_a_layer_and_a_view_of_it_in_a_scan(view: str) -> None:
    class Layer(linen.Module):
        view: str

        @linen.compact
        def __call__(self, x, _):
            layer, other = linen.Dense(4), linen.Dense(4)
            y, z = layer(x), other(x)
            if self.view == 'other values':
                seen = nn.mirror(layer, variables=other.variables)(y)
            elif self.view != 'hand':
                seen = getattr(nn, self.view)(layer)(y)
            elif self.is_initializing():
                seen = y
            else:
                source = other if view == 'other values' else layer
                copy = jax.lax.stop_gradient(source.variables)
                seen = linen.Dense(4).apply(copy, y)
            return jnp.tanh(z + seen), None

    def stack(view: str) -> Any:
        return linen.scan(Layer, length=3, **STACKED)(view)

    params = stack('hand').init(RNGS, X, None)['params']
    assert_same(stack(view).init(RNGS, X, None)['params'], params)

    def run(view: str) -> Any:
        def fn(p: Any, x: Any) -> Any:
            return {'out': jnp.ravel(stack(view).apply({'params': p}, x, None)[0])}, ()

        return stepwise.outputs_and_grads(fn, params, X)

    assert_same(run(view), run('hand'))


# Placement.


def test_the_name_of_a_module_from_outside_is_that_of_its_class() -> None:
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = nn.Frozen(linen.Dense(4, parent=None))(x)
            x = nn.Frozen(linen.Dense(4, parent=None), name='named')(x)
            inner = linen.Dense(4, name='inner')
            view = nn.Frozen(inner)
            assert (view.name, view.parent) == (inner.name, self) == ('inner', self)
            return view(linen.Dense(4)(x))

    names = list(Model().init(KEY, X)['params'])
    assert names == ['Dense_0', 'named', 'Dense_1', 'inner']


def test_a_finished_model() -> None:
    class Model(linen.Module):
        def setup(self):
            self.encoder = linen.Sequential([linen.Dense(4), jnp.tanh])
            self.head = linen.Dense(4)

        def encode(self, x):
            return self.encoder(x)

        def __call__(self, x):
            return self.head(self.encode(x))

    is_kernel = lambda path: path.endswith('kernel')  # noqa: E731
    for frozen, selects in (
        (nn.Frozen(Model(), 'encoder/**'), lambda path: path.startswith('encoder')),
        (nn.stop_gradient('**/kernel')(Model()), is_kernel),
        (nn.stop_gradient(Model(), '**/kernel'), is_kernel),
        (nn.train_only('**/bias')(Model()), is_kernel),
        (nn.Frozen(Model(), 'hed/**', unused='ignore'), lambda path: False),
        (nn.mirror(nn.mirror(Model(), '**/kernel'), '**/bias'), lambda path: True),
        (nn.mirror(nn.Frozen(Model(), '**/bias'), '**/kernel'), lambda path: True),
        (nn.Frozen(nn.mirror(Model(), '**/bias'), '**/kernel'), lambda path: True),
    ):
        assert_same_program(frozen, Model(), selects)
    rewrite = nn.stop_gradient('kernel', unused='ignore')
    assert rewrite(Model()) == nn.Frozen(Model(), 'kernel', unused='ignore')
    frozen = nn.Frozen(Model(), 'head/**')
    # Only a part of it is there at that time.
    variables = frozen.init(KEY, X, method='encode')
    assert_same(variables, Model().init(KEY, X, method='encode'))
    with pytest.raises(errors.UnusedFilterError):
        frozen.apply(variables, X, method='encode')


# State.


@pytest.mark.parametrize('lift', [bare, linen.jit])
def test_what_is_sown_under_held_state_is_kept(lift: Any) -> None:
    """In whatever collection, and also where a cached trace runs no Python."""

    class Sower(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = Sows()(x)
            add, zero = (lambda a, b: a + b), lambda: jnp.zeros(())
            self.sow('losses', 'sum', jnp.sum(x**2), add, zero)
            return x

    cls = lift(Sower)

    class Model(linen.Module):
        wrap: Wrap

        def setup(self):
            self.inner = cls()
            self.view = self.wrap(self.inner)

        def __call__(self, x):
            return [self.inner(x), self.view(x), self.view(-x), self.inner(x)]

    variables = oracle.init(Model(bare), KEY, X)  # With what was sown at init: 4 calls.
    count = variables['counts']['inner']['Sows_0']['n']
    mutable = linen.DenyList('params')
    _, written = Model(bare).apply(variables, X, mutable=mutable)
    expected = written['losses']['inner']
    for wrap in (functools.partial(nn.Frozen, state='hold'), nn.mirror):
        for _ in range(2):
            _, written = Model(wrap).apply(variables, X, mutable=mutable)
            losses = written['losses']['inner']
            assert len(losses['Sows_0']['size']) == 4 + 4
            assert_same(losses['Sows_0'], expected['Sows_0'])
            assert losses['sum'] > expected['sum'] / 2
            assert written['counts']['inner']['Sows_0']['n'] == count + 2


# As a value.


def test_it_is_a_value_like_every_module() -> None:
    frozen = nn.Frozen(linen.Dense(4), 'kernel')
    assert not isinstance(frozen, linen.Dense)
    assert isinstance(frozen.module, linen.Dense)
    assert frozen == nn.Frozen(linen.Dense(4), 'kernel')
    assert hash(frozen) == hash(nn.Frozen(linen.Dense(4), 'kernel'))
    assert frozen != nn.Frozen(linen.Dense(4), 'bias')
    assert frozen != nn.Frozen(linen.Dense(3), 'kernel')
    assert "where = Glob('kernel')" in repr(frozen)
    other = frozen.clone(where='bias')
    assert other == nn.Frozen(linen.Dense(4), 'bias')
    assert dataclasses.replace(frozen, where='bias', parent=None) == other
    assert frozen.copy(state='hold').state == 'hold'
    assert frozen.clone() == frozen.copy() == frozen
    prefix = 'ker'
    by_lambda = nn.Frozen(linen.Dense(4), lambda path: path.startswith(prefix))
    copied = cloudpickle.loads(cloudpickle.dumps(by_lambda))
    for same in (frozen.clone(), copied):
        assert_same_program(same, linen.Dense(4), lambda path: path == 'kernel')


# Caches.


def test_equal_filters_in_the_field_do_not_retrace() -> None:
    traces = []

    class Counted(linen.Module):
        inner: Any

        @linen.jit
        @linen.compact
        def __call__(self, x):
            traces.append(1)
            return self.inner(x)

    def step(where: Any) -> Any:
        model = Counted(nn.Frozen(linen.Dense(4), where))
        return jax.grad(lambda p: jnp.sum(model.apply({'params': p}, X)))

    params = oracle.init(Counted(linen.Dense(4)), KEY, X)['params']
    traces.clear()
    for _ in range(3):
        found = step('kernel')(params)['inner']
        assert is_zero(found['kernel']) and not is_zero(found['bias'])
    assert len(traces) == 1
    for where in ('bias', lambda path: path == 'bias'):
        found = step(where)(params)['inner']
        assert is_zero(found['bias']) and not is_zero(found['kernel'])
    # Functions in fields of modules are compared by identity.
    assert len(traces) == 3


def test_held_state_comes_back_after_an_exception() -> None:
    class Fails(linen.Module):
        def setup(self):
            self.n = self.variable('counts', 'n', lambda: jnp.zeros(()))

        def __call__(self):
            if not self.is_initializing():
                self.n.value = self.n.value + 1.0
                raise ZeroDivisionError

    class Catches(linen.Module):
        def setup(self):
            self.inner = nn.Frozen(Fails(), state='hold')

        def __call__(self):
            with contextlib.suppress(ZeroDivisionError):
                self.inner()

    variables = oracle.init(Catches(), KEY)
    _, written = Catches().apply(variables, mutable=['counts'])
    assert_same(written, variables)

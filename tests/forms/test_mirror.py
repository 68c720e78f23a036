"""`nn.mirror`: the same parameters, or other values, seen through a stop."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.oracle import assert_same, is_zero, stopped

RNGS = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
X = jnp.array([[0.5, -1.0, 2.0, 1.0], [1.5, 0.25, -0.75, -2.0]])


class Dense2(linen.Module):
    def setup(self):
        self.layers = [linen.Dense(4), linen.Dense(4)]
        self.scale = self.param('scale', linen.initializers.normal(), (1, 4))
        self.scale2 = jnp.tanh(self.scale)

    def encode(self, x):
        return self.layers[0](x)

    @property
    def kernel(self):
        return self.layers[1].variables['params']['kernel']

    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.encode(x))) * self.scale2


class Compact2(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4)(jnp.tanh(linen.Dense(4)(x)))


class Noisy(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False, momentum=0.5)(linen.Dense(4)(x))
        x = linen.Dropout(0.5, deterministic=False)(x)
        count = self.variable('counts', 'n', lambda: jnp.zeros(()))
        if not self.is_initializing():
            count.value = count.value + 1.0
        return x + jax.random.normal(self.make_rng('dropout'), x.shape)


# A module that calls another one as a word says: 'm' is a call of the module, 'v' of
# its mirror, 'w' of a mirror of that, 'o' of a mirror with other values.


def call(module: Any, x: Any) -> Any:
    return module(x)


class Uses(linen.Module):
    cls: Any
    word: str
    how: str = 'setup'
    options: Any = ()

    def setup(self):
        if self.how != 'compact':
            self.inner = self.cls()
        if self.how == 'setup':
            self.view = nn.mirror(self.inner, **dict(self.options))

    def __call__(self, x, other=None):
        run = self.in_compact if self.how == 'compact' else self.in_method
        return run(x, other)

    @linen.compact
    def in_compact(self, x, other):
        return self.calls(self.cls(name='inner'), None, x, other)

    def in_method(self, x, other):
        view = self.view if self.how == 'setup' else None
        return self.calls(self.inner, view, x, other)

    @linen.nowrap
    def calls(self, module, view, x, other):
        options = dict(self.options)
        made = {
            'm': lambda: module,
            'v': lambda: nn.mirror(module, **options) if view is None else view,
            'w': lambda: nn.mirror(nn.mirror(module, **options)),
            'o': lambda: nn.mirror(module, variables=other, **options),
        }
        run = linen.jit(call) if self.how == 'lent' else call
        return [run(made[kind](), x) for kind in self.word]


WAYS = ('setup', 'method', 'compact')


def by_hand(cls: Any, word: str) -> Any:
    """The uses as separate applications, of the weights and of stopped copies."""

    def fn(params: Any, x: Any) -> Any:
        weights = {'m': params, 'v': stopped(params)}
        return [cls().apply({'params': weights[kind]['inner']}, x) for kind in word]

    return fn


@pytest.mark.parametrize(
    ('cls', 'how', 'word'),
    [(Dense2, how, word) for how in WAYS for word in ('vm', 'mvv')]
    + [(Compact2, 'method', 'vm'), (Compact2, 'compact', 'mvv')],
)
def test_a_mirror_is_the_module_with_stopped_weights(cls, how, word) -> None:
    model = Uses(cls, word, how)
    params = model.init(RNGS, X)['params']
    assert_same(params, Uses(cls, 'm', how).init(RNGS, X)['params'])
    actual = oracle.grads(lambda p, x: model.apply({'params': p}, x), params, X)
    assert_same(actual, oracle.grads(by_hand(cls, word), params, X))


def test_a_mirror_of_a_bound_module() -> None:
    params = oracle.init(Dense2(), RNGS, X)['params']

    def actual(params: Any) -> Any:
        bound = Dense2().bind({'params': params})
        view, part = nn.mirror(bound), nn.mirror(bound.layers[0])
        return view(X), bound(X), view.encode(X), part(X), view.scale2

    def expected(params: Any) -> Any:
        live, still = (Dense2().bind({'params': p}) for p in (params, stopped(params)))
        return still(X), live(X), still.encode(X), still.layers[0](X), still.scale2

    oracle.assert_same_function(actual, expected, params)


# Random numbers and state.

MUTABLE = ['batch_stats', 'counts']


def run(word: str, how: str, lift: Any = None, **options: Any) -> Any:
    cls = Noisy if lift is None else lift(Noisy)
    model = Uses(cls, word, how, tuple(options.items()))
    variables = model.init(RNGS, X)
    assert_same(variables, Uses(cls, 'm', how).init(RNGS, X))
    rngs = {'dropout': jax.random.key(3)}
    return model.apply(variables, X, rngs=rngs, mutable=MUTABLE)


# What a word gives: which call of the module each call is like. The view is first or
# not, and either of them is called more often.
DRAWS = {
    'vm': [0, 0],
    'mmvvmv': [0, 1, 0, 1, 2, 2],
    'vvmm': [0, 1, 0, 1],
    'wwm': [0, 1, 0],
}


@pytest.mark.parametrize(
    ('how', 'lift', 'words'),
    [
        ('method', None, DRAWS),
        ('setup', linen.jit, ['mmvvmv']),
        ('lent', None, ['vvmm']),
    ],
)
def test_a_mirror_looks_and_leaves_no_trace(how, lift, words) -> None:
    """What the module gives does not depend on who looks.

    The n-th call of the view draws what the n-th call of the module does. The batch is
    the same in each call, so outputs tell the random numbers apart.
    """
    calls, _ = run('mmm', how, lift)
    states = {}
    for word in words:
        count = word.count('m')
        if count not in states:
            states[count] = run('m' * count, how, lift)[1]
        out, written = run(word, how, lift)
        for value, number in zip(out, DRAWS[word], strict=True):
            assert_same(value, calls[number])
        assert_same(written, states[count])
    if len(states) > 1:
        first, second, *_ = states.values()
        assert not is_zero(jax.tree.map(jnp.subtract, first, second))


def test_choices_of_state() -> None:
    how = 'method'
    calls, three = run('mmm', how)
    one = run('m', how)[1]
    by_state = run('vmv', how, state='update')
    assert_same(by_state, ([calls[0], calls[0], calls[1]], three))
    out, written = run('mv', how, state='eval')
    assert_same(written, one)
    assert not (out[0] == out[1]).all()


# Other values.


def test_other_values_in_jit_are_new_each_time() -> None:
    class Model(linen.Module):
        @linen.jit
        @linen.compact
        def __call__(self, x, other):
            inner = linen.jit(linen.Dense)(4, name='inner')
            return inner(x), nn.mirror(inner, variables=other)(x)

    class Holds(linen.Module):
        view: Any

        @linen.jit
        def __call__(self, x):
            return self.view(x)

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x, other):
            inner = linen.Dense(4, name='inner')
            view = nn.mirror(inner, variables=other)
            return inner(x), Holds(view)(x)

    for model in (Model(), Outer()):
        params = oracle.init(linen.Dense(4), RNGS, X)
        variables = {'params': {'inner': params['params']}}
        for factor in (1.0, 2.0, 3.0):
            other = jax.tree.map(lambda v, f=factor: v * f, params)
            for call in (model.apply, jax.jit(model.apply)):
                _, seen = call(variables, X, other)
                assert jnp.allclose(seen, linen.Dense(4).apply(other, X))


def test_a_collection_of_other_values_that_is_written_reads_as_they_are() -> None:
    """In each call anew: what a call writes is dropped, as with ``state='hold'``."""

    class Counts(linen.Module):
        @linen.compact
        def __call__(self, x):
            count = self.variable('counts', 'n', lambda: jnp.zeros(()))
            seen = count.value
            count.value = seen + 1.0
            return x + self.param('w', linen.initializers.ones, ()) * seen

    variables = {'params': {'inner': {'w': 2.0}}, 'counts': {'inner': {'n': 5.0}}}
    other = {'params': {'w': jnp.array(3.0)}, 'counts': {'n': jnp.array(7.0)}}
    variables = jax.tree.map(jnp.array, variables)
    for options in ({}, {'where': False}, {'where': False, 'state': 'eval'}):
        model = Uses(Counts, 'oom', options=tuple(options.items()))
        seen, written = model.apply(variables, 0.0, other, mutable='counts')
        assert [float(y) for y in seen] == [21.0, 21.0, 10.0]
        assert float(written['counts']['inner']['n']) == 6.0


class Towers(linen.Module):
    """A tower beside a mirror of it, which reads other values."""

    def setup(self):
        self.tower = Compact2()

    def __call__(self, x, other):
        return self.tower(x), nn.mirror(self.tower, variables=other)(x)


def test_where_other_values_are_absent_the_module_has_its_own():
    variables = oracle.init(Towers(), RNGS, X, None)
    own = variables['params']['tower']
    average = jax.tree.map(lambda w: 0.5 * w, sg.partition(own, 'Dense_0/bias')[0])

    def ours(own, average):
        params = {'params': {'tower': own}}
        return Towers().apply(params, X, {'params': average})

    def by_hand(own, average):
        fixed = jax.lax.stop_gradient(own)
        bias = jax.lax.stop_gradient(average['Dense_0']['bias'])
        other = {**fixed, 'Dense_0': {**fixed['Dense_0'], 'bias': bias}}
        return tuple(Compact2().apply({'params': p}, X) for p in (own, other))

    assert_same(ours(own, average), by_hand(own, average))
    oracle.assert_same_grads(ours, by_hand, own, average)


def test_other_values_have_the_collections_on_top_or_are_parameters():
    variables = oracle.init(Towers(), RNGS, X, None)
    own = jax.tree.map(jnp.zeros_like, variables['params']['tower'])
    on_top, alone = (Towers().apply(variables, X, v) for v in ({'params': own}, own))
    assert_same(on_top, alone)
    assert not np.array_equal(*alone)
    with nn.substitute(variables), nn.substitute(variables['params']):
        assert_same(Towers().apply(variables, X, own), alone)
    other = jax.tree.map(lambda x: x + 1.0, variables)
    seen: list[Any] = []
    for values in other, other['params']:
        with nn.substitute(values):
            seen.append(Towers().apply(variables, X, None))
    assert_same(*seen)
    for other, said in (
        # The tree of the whole model.
        (variables, "has tower/Dense_1/kernel: give the values in 'tower' alone"),
        (variables['params'], "give the values in 'tower' alone"),
        ({'params': {**own, 'Dens': own['Dense_0']}}, "A tree of values.*'Dens/bias'"),
        ({'params': {'Dense_0': own['Dense_0']}}, 'sg.ABSENT in its place for nn.m'),
    ):
        with pytest.raises(errors.FlaxSGError, match=said):
            Towers().apply(variables, X, other)


def test_blocks_around_a_mirror() -> None:
    """They rewrite what the module stores, and other values stand in place of it."""

    class Model(linen.Module):
        where: Any

        def setup(self):
            self.inner = Dense2()

        def __call__(self, x, other):
            with nn.stop_gradient(self.where):
                return nn.mirror(self.inner, False, variables=other)(x), self.inner(x)

    params = oracle.init(Model('**'), RNGS, X, None)['params']
    other = jax.tree.map(lambda leaf: leaf + 1, params['inner'])
    for where in ('inner/scale', 'inner/layers_0/**'):

        def actual(params: Any, other: Any, where: Any = where) -> Any:
            return Model(where).apply({'params': params}, X, {'params': other})

        def expected(params: Any, other: Any, where: Any = where) -> Any:
            start = where.removeprefix('inner/').removesuffix('/**')
            trees = other, stopped(params['inner'], oracle.below(start))
            return tuple(Dense2().apply({'params': tree}, X) for tree in trees)

        oracle.assert_same_function(actual, expected, params, other)


@pytest.mark.parametrize('boxed', [(True, False), (False, True), (True, True)])
def test_other_values_in_boxes_or_without(boxed):
    init = linen.with_partitioning(linen.initializers.ones, ('in', 'out'))

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, other=None):
            dense = linen.Dense(2, name='dense', kernel_init=init)
            return dense(x), nn.mirror(dense, variables=other)(x)

    net, x = Net(), jnp.ones((1, 2))
    variables = net.init(jax.random.key(0), x)
    average = jax.tree.map(lambda w: 3 * w, variables['params']['dense'])
    bare = linen.meta.unbox
    params = variables if boxed[0] else bare(variables)
    other = {'params': average if boxed[1] else bare(average)}
    one, mirrored = net.apply(params, x, other)
    oracle.assert_same(mirrored, 3 * one)
    grads = jax.grad(lambda o: jnp.sum(net.apply(params, x, o)[1]))(other)
    assert not any(g.any() for g in jax.tree.leaves(grads))


def test_parameters_that_come_later_begin_with_numbers_of_their_own() -> None:
    class Grows(linen.Module):
        @linen.compact
        def __call__(self, x, more=False):
            init = linen.initializers.normal()
            x = x * self.param('a', init, (1, 4))
            return x + self.param('b', init, (1, 4)) if more else x

    class Model(linen.Module):
        wrap: Any

        @linen.compact
        def __call__(self, x):
            module = Grows()
            return self.wrap(module)(x) + module(x, more=True)

    plain = Model(lambda module: module).init(RNGS, X)
    model = Model(nn.mirror)
    assert_same(model.init(RNGS, X), plain)

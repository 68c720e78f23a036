"""Filters with a condition, which may be traced: as ``jnp.where`` by hand."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.filters import as_filter
from flax_sg.forms import block_decorator
from tests.helpers import extents, oracle, traced
from tests.helpers.traced import PARAMS, X, loss
from tests.helpers.turns import in_turn

# What the glob below means.
NAMED = oracle.below('two', 'cells')
GLOB = '{two,cells}/**'


def where(params: Any, mask: Callable[[str], Any]) -> Any:
    """The parameters, each stopped where its mask is True."""

    def stop(keys: Any, w: Any) -> Any:
        flag = mask(oracle.names_of(keys))
        return w if flag is False else jnp.where(flag, jax.lax.stop_gradient(w), w)

    return jax.tree_util.tree_map_with_path(stop, params)


def by_hand(params: Any, flag: Any, *net: Any) -> Any:
    return loss(where(params, lambda path: NAMED(path) and flag), *net)


def flags_of_modules(params: Any, flag: Any) -> Any:
    flags = {'one': False, 'two': flag, 'cells': {'dense': flag}, 'head': np.False_}
    return traced.in_block(params, flags)


def frozen(params: Any, flag: Any) -> Any:
    model = nn.Frozen(traced.Net(), as_filter(GLOB) & flag)
    return jnp.sum(model.apply({'params': params}, X) ** 2)


def in_block(params: Any, flag: Any) -> Any:
    return traced.in_block(params, as_filter(GLOB) & flag)


WAYS = {
    'block': in_block,
    'tree': lambda params, flag: traced.of_tree(params, flag & as_filter(GLOB)),
    'flags of modules': flags_of_modules,
    'around a jit': lambda p, flag: traced.around_jit(p, as_filter(GLOB) & flag),
    'Frozen': frozen,
}


def run(how: str, fn: Any) -> Any:
    of_params = lambda p: p['head']['bias'].sum() < 1.0  # noqa: E731
    return traced.TRACED[how](fn, np.True_, np.False_, of_params)


@functools.cache
def traced_by_hand(how: str) -> Any:
    return run(how, by_hand)


@pytest.mark.parametrize(('how', 'name'), in_turn(traced.TRACED, WAYS, times=2))
def test_a_traced_condition(how, name):
    oracle.assert_same(run(how, WAYS[name]), traced_by_hand(how))


def assert_same_steps(ours: Any, hand: Any, params: Any = PARAMS) -> None:
    """By one program each, whether the condition holds or not."""
    step, by_hand = (jax.jit(jax.value_and_grad(fn)) for fn in (ours, hand))
    for flag in True, False, True:
        oracle.assert_same(step(params, flag), by_hand(params, flag))
    assert step._cache_size() == 1


@pytest.mark.parametrize('extent', extents.OF_STOPS)
def test_every_extent(extent):
    net = traced.Net(linen.remat)

    def ours(params, flag):
        rewrite = nn.stop_gradient(as_filter(GLOB) & flag)
        y = extents.OF_STOPS[extent](rewrite, net, {'params': params}, X)
        return jnp.sum(y**2)

    assert_same_steps(ours, lambda params, flag: by_hand(params, flag, net))


# How a condition is written: the filter, and what it means if the condition holds, and
# if it does not.
TWO, ALL, NONE = oracle.below('two'), lambda _: True, lambda _: False
begins_with_two = lambda path: path.startswith('two')  # noqa: E731
WRITTEN: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    'alone': (lambda flag: flag, ALL, NONE),
    'and': (lambda flag: as_filter('two/**') & flag, TWO, NONE),
    'and, reflected': (lambda flag: flag & as_filter('two/**'), TWO, NONE),
    'or': (lambda flag: as_filter('two/**') | flag, ALL, TWO),
    'or, reflected': (lambda flag: flag | as_filter('two/**'), ALL, TWO),
    'not': (lambda flag: ~(as_filter('two/**') & flag), lambda p: not TWO(p), ALL),
    'not, alone': (lambda flag: ~as_filter(flag), NONE, ALL),
    'a function': (lambda flag: as_filter(begins_with_two) & flag, TWO, NONE),
    'of two': (
        lambda flag: as_filter('two/**') & flag | as_filter('one/**') & ~flag,
        *(TWO, oracle.below('one')),
    ),
}
GIVEN: dict[str, Callable[[bool], Any]] = {
    'bool': bool,
    'numpy': np.bool_,
    'array of numpy': np.array,
    'array': jnp.array,
}


@pytest.mark.parametrize('written', WRITTEN)
def test_as_it_is_written(written):
    make, if_true, if_false = WRITTEN[written]

    def ours(params, flag):
        with nn.stop_gradient(make(flag)):
            return loss(params)

    def hand(params, flag):
        mask = lambda path: jnp.where(flag, if_true(path), if_false(path))  # noqa: E731
        return loss(where(params, mask))

    assert_same_steps(ours, hand)


GIVEN_ALONE = ['alone'] * len(GIVEN)


@pytest.mark.parametrize(
    ('written', 'given'),
    dict.fromkeys([*in_turn(WRITTEN, GIVEN, times=2), *in_turn(GIVEN_ALONE, GIVEN)]),
)
def test_a_condition_that_is_known_is_a_constant(written, given):
    make, if_true, if_false = WRITTEN[written]
    for flag in True, False:
        if given == 'bool' and written == 'of two':
            given = 'numpy'  # ``~True`` is -2.
        filter_ = as_filter(make(GIVEN[given](flag)))
        takes = if_true if flag else if_false
        paths = [sg.Path(path) for path in oracle.by_path(PARAMS)]
        assert [filter_(path) for path in paths] == [takes(path) for path in paths]
        # No condition of a filter is a mistake because it does not hold.
        with nn.stop_gradient(filter_):
            loss(PARAMS)


def test_names_are_checked_as_without_the_condition():
    def run(flag):
        with nn.stop_gradient(as_filter('twoo/**') & flag):
            return loss(PARAMS)

    for call in run, jax.jit(run):
        for flag in np.array(True), np.array(False):
            with pytest.raises(errors.UnusedFilterError, match=r"mean 'two/\*\*'"):
                call(flag)
    with pytest.raises(errors.UnusedFilterError, match='in all of them'):
        sg.partition(PARAMS, as_filter('two/**') & 'one/**' & True)


def test_a_complement_of_all_may_mean_nothing_as_without_the_condition():
    def stopped(flag):
        return sg.stop_gradient(PARAMS, ~as_filter('**') & flag)

    for call in stopped, jax.jit(stopped):
        for flag in True, False:
            oracle.assert_same(call(flag), PARAMS)


# Gradient calls, masks, parts.


@pytest.mark.parametrize('written', WRITTEN)
def test_the_gradient_call(written):
    make, if_true, if_false = WRITTEN[written]

    def ours(params, flag):
        return sg.grad(loss, wrt=make(flag), absent='zeros')(params)

    def hand(params, flag):
        def takes(path):
            return jnp.where(flag, if_true(path), if_false(path))

        return jax.grad(lambda p: loss(where(p, lambda path: ~takes(path))))(params)

    step, by_hand = jax.jit(ours), jax.jit(hand)
    for flag in True, False:
        oracle.assert_same(step(PARAMS, flag), by_hand(PARAMS, flag))


def test_rows_with_a_condition():
    kernel = sg.at('one/kernel', np.s_[1:])

    def ours(params, flag):
        with nn.stop_gradient(kernel & flag | as_filter('head/*') & ~flag):
            return loss(params)

    def hand(params, flag):
        rows = flag & (jnp.arange(3) > 0)[:, None]
        masks = {'one/kernel': rows, 'head/bias': ~flag, 'head/kernel': ~flag}
        return loss(where(params, lambda path: masks.get(path, False)))

    assert_same_steps(ours, hand)


def test_a_mask_has_the_condition_at_each_leaf():
    rows = sg.at('one/kernel', 0)

    @jax.jit
    def masks(flag):
        where = as_filter(GLOB) & flag | rows & flag
        return sg.mask(PARAMS, trained=where), sg.mask(PARAMS, frozen=where)

    for flag in True, False:
        trained, frozen = masks(flag)
        by_path = oracle.by_path(trained)
        kernel = by_path.pop('one/kernel')
        assert kernel.tolist() == [[flag] * 3, [False] * 3, [False] * 3]
        found = {path: bool(x) for path, x in by_path.items()}
        assert found == {path: flag and NAMED(path) for path in found}
        assert trained['two']['bias'].shape == ()
        oracle.assert_same(frozen, trained)
    # A mask is a filter again.
    mask = lambda flag: sg.mask(PARAMS, frozen=as_filter(GLOB) & flag)  # noqa: E731
    again = lambda p, flag: loss(sg.stop_gradient(p, mask(flag)))  # noqa: E731
    ours, hand = (jax.jit(jax.grad(fn))(PARAMS, True) for fn in (again, by_hand))
    oracle.assert_same(ours, hand)


def test_whole_leaves_alone():
    def use(call: Any) -> str:
        with pytest.raises(errors.PartError) as caught:
            jax.jit(lambda flag: call(as_filter(GLOB) & flag))(True)
        return str(caught.value)

    labels = lambda f: sg.labels(PARAMS, {'a': f, 'b': ~f})  # noqa: E731
    for call in labels, lambda f: sg.partition(PARAMS, f):
        assert 'the condition is traced' in use(call)


def test_other_values_while_a_condition_holds():
    others = {'one': jax.tree.map(lambda w: 2 * w, PARAMS['one'])}

    @jax.jit
    def ours(params, flag):
        with nn.substitute(others, where=as_filter('one/*') & flag):
            return loss(params)

    for flag, own in (True, others), (False, {}):
        oracle.assert_same(ours(PARAMS, flag), jax.jit(loss)({**PARAMS, **own}))


# Caches.


def test_a_jitted_closure_finds_no_condition_of_another_trace():
    def ours(params, flag):
        closure = jax.jit(lambda: loss(params))
        with nn.stop_gradient(as_filter('two/*') & flag):
            first = closure()
        with nn.stop_gradient(as_filter('two/*') & ~flag):
            return first - 2 * closure()

    def hand(params, flag):
        first = where(params, lambda path: flag & TWO(path))
        second = where(params, lambda path: ~flag & TWO(path))
        return loss(first) - 2 * loss(second)

    assert_same_steps(ours, hand)


def test_no_tracer_is_kept():
    with jax.checking_leaks():
        # JAX itself keeps what a jitted function reads of a trace around it.
        for name in 'block', 'Frozen':
            jax.jit(jax.grad(WAYS[name]))(PARAMS, True)


@pytest.mark.parametrize(
    'of', [lambda x: as_filter('kernel') & x, lambda x: {'kernel': x, 'bias': False}]
)
def test_a_class_with_a_condition_is_made_anew(of: Any):
    """The table of equal classes would keep the tracer."""
    made: list[Any] = []

    def loss(params: Any, flag: Any) -> Any:
        made.append(nn.stop_gradient(linen.Dense, of(flag)))
        return jnp.sum(made[-1](2).apply({'params': params}, jnp.ones((1, 3))))

    params = oracle.init(linen.Dense(2), jax.random.key(0), jnp.ones((1, 3)))['params']
    for flag in True, False:
        grads = jax.jit(jax.grad(loss))(params, flag)
        assert oracle.is_zero(grads['kernel']) is flag
    # While the class lives, the table would have it, and with it the tracer.
    assert [cls.__name__ for cls in made] == ['Dense'] * len(made)
    for _, rewrite, *_ in block_decorator._stopped_classes:
        assert not {'mask', 'condition'} & rewrite.where.needs


# In modules.


class Owner(linen.Module):
    """Freezes a part of itself while a condition holds that it is called with."""

    how: str

    @linen.compact
    def __call__(self, x, flag):
        head = linen.Dense(3, name='head')
        if self.how == 'block':
            with nn.stop_gradient(as_filter('head/*') & flag):
                x = head(x)
        elif self.how == 'frozen':
            x = nn.Frozen(head, flag)(x)
        elif self.how == 'mirror':
            head(x)
            both = as_filter('kernel') & flag | as_filter('bias') & flag
            x = nn.mirror(head, both)(x)
        elif self.how == 'class':
            x = nn.stop_gradient(linen.Dense, flag)(3, name='lifted')(x)
        else:
            frozen = nn.Frozen(traced.Cell(name='cell'), flag)
            x, _ = frozen(x, None)
        return linen.tanh(x)


class Steps(linen.Module):
    how: str

    @linen.compact
    def __call__(self, x, flag):
        def body(owner, x, _):
            return owner(x, flag), None

        owner = Owner(self.how, name='owner')
        x, _ = linen.scan(body, length=2, **oracle.SHARED)(owner, x, None)
        return x


@pytest.mark.parametrize('model', [Owner, Steps])
@pytest.mark.parametrize('how', ['block', 'frozen', 'mirror', 'class', 'a child'])
def test_in_a_module(how, model):
    params = oracle.init(model(how), jax.random.key(0), X, True)['params']

    def ours(params, flag):
        return jnp.sum(model(how).apply({'params': params}, X, flag) ** 2)

    def hand(params, flag):
        return ours(where(params, lambda _: flag), False)

    assert_same_steps(ours, hand, params)


def test_in_the_body_of_a_scan_of_layers():
    class Layer(linen.Module):
        frozen: Any

        @linen.compact
        def __call__(self, x, flag):
            return nn.Frozen(linen.Dense(3, name='dense'), flag)(x), None

    def ours(params, flags):
        layers = linen.scan(Layer, length=3, in_axes=0, **oracle.STACKED)(None)
        return jnp.sum(layers.apply({'params': params}, X, flags)[0] ** 2)

    flags = jnp.array([True, False, True])
    layers = linen.scan(Layer, length=3, in_axes=0, **oracle.STACKED)(None)
    params = oracle.init(layers, jax.random.key(0), X, flags)['params']

    def hand(params, flags):
        def stop(w):
            mask = flags.reshape(3, *[1] * (w.ndim - 1))
            return jnp.where(mask, jax.lax.stop_gradient(w), w)

        return ours(jax.tree.map(stop, params), jnp.zeros(3, bool))

    expected = jax.jit(jax.value_and_grad(hand))(params, flags)
    oracle.assert_same(jax.jit(jax.value_and_grad(ours))(params, flags), expected)

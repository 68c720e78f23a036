"""``substitute``: the same program as with the other values in the variables."""

from __future__ import annotations

import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.forms.block_decorator import BlockDecorator
from flax_sg.testing import optimized_hlo
from tests.helpers import oracle, stepwise
from tests.helpers.described.modules import Do
from tests.helpers.oracle import assert_same, assert_same_function

X = jnp.array([[1.0, -2.0, 0.5], [0.25, 0.75, -1.0]])
KEY = jax.random.key(0)


class Layer(linen.Module):
    def setup(self):
        self.w = self.param('w', linen.initializers.normal(), (1, 3))
        self.b = self.param('b', linen.initializers.normal(), (1, 3))
        self.w2 = jnp.tanh(self.w)
        self.dense = linen.Dense(3)

    def __call__(self, x):
        b = self.variables['params']['b'] + self.get_variable('params', 'b')
        return self.dense(x * self.w2 + self.w) + b


PARAMS = oracle.init(Layer(), KEY, X)['params']
OTHERS = jax.tree.map(jnp.cos, PARAMS)
plain = Layer()


def run(params: Any, x: Any = X) -> Any:
    return plain.apply({'params': params}, x)


def warped(path: Any, value: Any) -> Any:
    return jnp.sin(value) + len(path.name)


def mapped(params: Any) -> Any:
    """What ``warped`` makes of all parameters, by hand."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: jnp.sin(leaf) + len(keys[-1].key), params
    )


def some(tree: Any) -> Any:
    return {'w': tree['w'], 'dense': {'bias': tree['dense']['bias']}}


def merged(tree: Any, part: Any) -> Any:
    return {**tree, **part, 'dense': {**tree['dense'], **part.get('dense', {})}}


# Transforms: what runs in the extent is lifted, or the extent is.


class Stack(linen.Module):
    inside: Any = None

    @linen.compact
    def __call__(self, x):
        def step(layer, x, _):
            if self.inside is None:
                return layer(x), None
            with nn.substitute(self.inside):
                return layer(x), None

        scanned = linen.scan(
            step,
            variable_axes={'params': 0, 'ema': 0},
            split_rngs={'params': True},
            length=3,
        )
        return scanned(Layer(name='layer'), x, None)[0]


STACKED = jax.vmap(lambda key: Layer().init(key, X))(jax.random.split(KEY, 3))['params']
STACKED_OTHERS = jax.tree.map(jnp.sin, STACKED)


def run_stack(params: Any, others: Any = None, stack: Any = None) -> Any:
    variables = {'params': {'layer': params}}
    if others is not None:
        variables['ema'] = {'layer': others}
    return (stack or Stack()).apply(variables, X)


def test_the_program_is_the_one_written_by_hand() -> None:
    # Around a scan the values take the place of the stack, and are no copy of it.
    def with_tree(params: Any, others: Any) -> Any:
        with nn.substitute({'layer': others}):
            return jnp.sum(run_stack(params))

    def with_collection(params: Any, others: Any) -> Any:
        with nn.substitute('ema'):
            return jnp.sum(run_stack(params, others))

    def by_hand(params: Any, others: Any) -> Any:
        del params
        return jnp.sum(run_stack(others))

    def with_function(params: Any, others: Any) -> Any:
        with nn.substitute(warped):
            return jnp.sum(run_stack(params)) + 0.0 * jnp.sum(others['w'])

    def function_by_hand(params: Any, others: Any) -> Any:
        return jnp.sum(run_stack(mapped(params))) + 0.0 * jnp.sum(others['w'])

    def hlo(fn: Any) -> str:
        return optimized_hlo(jax.grad(fn, (0, 1)), STACKED, STACKED_OTHERS)

    expected = hlo(by_hand)
    assert hlo(with_tree) == hlo(with_collection) == expected
    assert hlo(with_function) == hlo(function_by_hand) != expected


def test_a_block_in_the_body_of_a_scan_sees_the_slice() -> None:
    def fn(params: Any, others: Any) -> Any:
        return run_stack(params, others, Stack('ema')), run_stack(
            params, stack=Stack(warped)
        )

    def by_hand(params: Any, others: Any) -> Any:
        return run_stack(others), run_stack(mapped(params))

    def grads(f: Any) -> Any:
        step = functools.partial(oracle.grads, f)
        return stepwise.evaluate(step, STACKED, STACKED_OTHERS)

    assert_same(grads(fn), grads(by_hand))


# Caches.


class Exact(linen.Module):
    """Small whole numbers, so that no program that XLA makes of it rounds."""

    def setup(self):
        self.w = self.param('w', linen.initializers.ones, (1, 3))
        self.b = self.param('b', linen.initializers.ones, (1, 3))
        self.w2 = self.w * self.w

    def __call__(self, x):
        return x * self.w2 + self.b * self.w


ONES = {'w': jnp.array([[1.0, 2.0, 3.0]]), 'b': jnp.array([[3.0, 2.0, 1.0]])}


def exact(params: Any, x: Any = X) -> Any:
    return Exact().apply({'params': params}, x)


def scaled(factor: float, params: Any = ONES) -> Any:
    return jax.tree.map(lambda leaf: leaf * factor, params)


def test_new_values_around_a_jitted_function_are_not_stale() -> None:
    step = jax.jit(chex.assert_max_traces(lambda params: exact(params), n=3))
    first, second = scaled(2.0), scaled(3.0)
    expected = {id(tree): exact(tree) for tree in (ONES, first, second)}
    order = [None, first, second, first, None, second, first, first]
    for values in order:
        if values is None:
            assert_same(step(ONES), expected[id(ONES)])
            continue
        # Fresh dicts of the same arrays are the same values.
        with nn.substitute(jax.tree.map(lambda leaf: leaf, values)):
            assert_same(step(ONES), expected[id(values)])


def test_values_that_are_arguments_retrace_nothing() -> None:
    helper = jax.jit(chex.assert_max_traces(lambda x: jnp.square(x), n=1))
    bodies: list[str] = []

    class Jitted(linen.Module):
        @linen.compact
        def __call__(self, x):
            bodies.append('traced')
            return helper(Exact(name='exact')(x))

    lifted = linen.jit(Jitted)

    def outer(self, x, values):
        inner = lifted(name='inner')
        with nn.substitute({'inner': {'exact': values}}):
            return helper(inner(x))

    def fn(values: Any) -> Any:
        return Do(outer).apply({'params': {'inner': {'exact': ONES}}}, X, values)

    for factor in (1.0, 2.0, 3.0):
        assert_same(fn(scaled(factor)), exact(scaled(factor)) ** 4)
    assert len(bodies) == 1


def test_a_rewrite_is_a_value() -> None:
    one = nn.substitute(OTHERS)
    assert one == nn.substitute(dict(OTHERS))
    assert hash(one) == hash(nn.substitute(OTHERS))
    assert one != nn.substitute(scaled(2.0, OTHERS))
    assert one != nn.substitute(some(OTHERS))
    assert nn.substitute('ema') == nn.substitute('ema') != nn.substitute('ema2')
    assert nn.substitute(warped) == nn.substitute(warped) != one
    assert nn.substitute('ema') != BlockDecorator(one.where, one.rule)
    assert nn.substitute('ema') != nn.stop_gradient(True)
    names = nn.substitute({'names': {'a', 'b'}})  # It cannot be hashed.
    assert names == names != nn.substitute({'names': {'a', 'b'}})
    for rewrite in (one, nn.substitute('ema'), nn.substitute(warped, where='w')):
        twin = pickle.loads(pickle.dumps(rewrite))
        assert repr(twin) == repr(rewrite)
    assert repr(one) == 'substitute(<b, dense/bias, dense/kernel, and 1 more>)'
    assert repr(nn.substitute('ema', where='w')) == "substitute(Glob('w'))"


# Nothing but the values.


def state(self, x):
    x = linen.BatchNorm(use_running_average=False, name='norm')(x)
    x = linen.Dropout(0.5, deterministic=False)(x)
    x = linen.Dense(3, name='dense')(x)
    self.sow('intermediates', 'x', x)
    return x


def test_a_state_is_computed_from_what_is_read() -> None:
    model = Do(state)
    rngs = {'params': KEY, 'dropout': jax.random.key(5)}
    variables = oracle.init(model, rngs, X)
    others = jax.tree.map(lambda leaf: leaf + 0.5, variables)

    def apply(variables: Any, mutable: Any) -> Any:
        return model.apply(variables, X, rngs=rngs, mutable=mutable)

    collections = ['params', 'batch_stats']
    given = {name: others[name] for name in collections}
    expected = apply({**variables, **given}, ['batch_stats'])
    for values in (given, model.bind(others)):
        with nn.substitute(values, collections=collections):
            y, written = apply(variables, ['batch_stats'])
        assert_same((y, written), expected)
    with nn.substitute({'norm': {'mean': jnp.ones(3)}}, collections='batch_stats'):
        _, written = apply(variables, ['batch_stats'])
    stats = variables['batch_stats']['norm']
    stats = {'norm': {**stats, 'mean': jnp.ones(3)}}
    assert_same(written, apply({**variables, 'batch_stats': stats}, ['batch_stats'])[1])


def test_boxes_and_several_leaves() -> None:
    def boxed(self, x):
        init = linen.with_partitioning(linen.initializers.ones, (None, 'data'))
        pair = self.param('pair', lambda key: (jnp.ones((3, 3)), jnp.zeros((1, 3))))
        return x @ self.param('kernel', init, (3, 3)) @ pair[0] + pair[1]

    params = oracle.init(Do(boxed), KEY, X)['params']
    others = jax.tree.map(lambda leaf: leaf + jnp.arange(3.0)[None], params)

    def fn(params: Any, others: Any) -> Any:
        with nn.substitute(others):
            return Do(boxed).apply({'params': params}, X, mutable='params')

    def by_hand(params: Any, others: Any) -> Any:
        return Do(boxed).apply({'params': others}, X), {'params': params}

    assert_same_function(fn, by_hand, params, others)
    bare = {**others, 'kernel': others['kernel'].value}
    assert_same(fn(params, bare), fn(params, others))
    with pytest.raises(errors.StructureError, match='Expected: a Partitioned of'):
        fn(params, {**others, 'kernel': jnp.ones((2, 2))})


def test_parts_of_trees() -> None:
    def fn(params: Any, others: Any) -> Any:
        part, _ = sg.partition(others, '**/bias')
        with nn.substitute(part):
            first = run(params)
        with nn.substitute(others, where=['w', 'dense/*']):
            second = run(params)
        with nn.substitute(others, where=sg.at('w', np.s_[:, 1:])):
            return first, second, run(params)

    def by_hand(params: Any, others: Any) -> Any:
        bias = {'dense': {'bias': others['dense']['bias']}}
        first = run(merged(params, bias))
        w = params['w'].at[:, 1:].set(others['w'][:, 1:])
        return first, run({**others, 'b': params['b']}), run({**params, 'w': w})

    assert_same_function(fn, by_hand, PARAMS, OTHERS)


def _stopped_kernels(params: Any) -> Any:
    return oracle.stopped(params, lambda path: path == 'dense/kernel')


def _half_through(params: Any) -> Any:
    half = params['dense']['kernel'] * 0.5
    return {'dense': {'kernel': half + jax.lax.stop_gradient(half)}}


# What is opened in a block that reads each parameter in another dtype: what is stored
# tells a filter which it means, and what is read is what a rule gets.
INSIDE: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    'a glob': (
        lambda _: nn.stop_gradient('dense/kernel'),
        lambda params, _: _stopped_kernels(params),
    ),
    'what is stored': (
        lambda _: nn.stop_gradient(
            sg.arrays(lambda a: a.dtype == jnp.float32 and a.shape == (3, 3))
        ),
        lambda params, _: _stopped_kernels(params),
    ),
    'values': (
        lambda others: nn.substitute({'dense': {'kernel': others}}),
        lambda params, others: merged(params, {'dense': {'kernel': others}}),
    ),
    'cotangents': (
        lambda _: nn.scale_gradient('dense/kernel', 0.5),
        lambda params, _: merged(params, _half_through(params)),
    ),
}


@pytest.mark.parametrize('name', INSIDE)
@pytest.mark.parametrize('jitted', [False, True])
@pytest.mark.usefixtures('standard_promotion')
def test_inside_of_a_rule_that_changes_the_dtype(name, jitted) -> None:
    block, stored = INSIDE[name]

    def halves(tree: Any) -> Any:
        return jax.tree.map(lambda w: w.astype(jnp.bfloat16), tree)

    def fn(params: Any, others: Any) -> Any:
        with nn.substitute(lambda path, w: w.astype(jnp.bfloat16)), block(others):
            return run(params)

    def by_hand(params: Any, others: Any) -> Any:
        return run(halves(stored(params, others)))

    args = PARAMS, OTHERS['dense']['kernel'].astype(jnp.bfloat16)
    around = jax.jit if jitted else lambda f: f
    assert_same_function(around(fn), around(by_hand), *args)


@pytest.mark.usefixtures('leaks')
def test_values_of_an_inner_trace_for_variables_of_an_outer_one() -> None:
    def fn(params: Any, others: Any, factor: Any) -> Any:
        bound = Exact().bind({'params': params})

        def mapped(factor: Any) -> Any:
            with nn.substitute(lambda path, value: value * factor):
                outside = bound(X), bound.w2
            with nn.substitute({'w': others['w'] * factor}):
                return outside, bound(X), bound.w2

        return jax.vmap(mapped)(factor)

    def by_hand(params: Any, others: Any, factor: Any) -> Any:
        def mapped(factor: Any) -> Any:
            times = jax.tree.map(lambda leaf: leaf * factor, params)
            w = others['w'] * factor
            second = exact({**params, 'w': w}), w * w
            return (exact(times), times['w'] ** 2), *second

        return jax.vmap(mapped)(factor)

    factor = jnp.array([1.0, 2.0])
    assert_same_function(jax.jit(fn), jax.jit(by_hand), ONES, scaled(2.0), factor)


def test_values_do_not_live_longer_than_the_block() -> None:
    values = scaled(7.0)
    alive = weakref.ref(values['w'])
    rewrite = nn.substitute(values)
    with rewrite:
        exact(ONES)
    del values, rewrite
    gc.collect()
    assert alive() is None

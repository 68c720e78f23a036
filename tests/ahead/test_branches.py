"""Branches of which a part does not change, beside the whole ones."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flax_sg as sg
from tests.helpers.splits import (
    MOVED,
    PARAMS,
    TRAINED,
    XS,
    assert_same,
    assert_split,
    products,
)

X = XS[0]


@pytest.mark.parametrize('which', range(3))
def test_a_frozen_layer_in_each_branch(which: int):
    """What each branch keeps has a place of its own; the third one keeps nothing."""

    def fun(params: Any, x: Any, index: Any) -> Any:
        def first(params: Any, x: Any) -> Any:
            y = jnp.tanh(x @ params['torso'])
            return jnp.tanh(y @ params['cell']), y

        def second(params: Any, x: Any) -> Any:
            y = 2 * x @ params['torso']
            return jnp.sin(y) @ params['head'] + y, y[::-1]

        def third(params: Any, x: Any) -> Any:
            return x * params['head'].sum(), x

        out, same = lax.switch(index, [first, second, third], params, x)
        return jnp.sum(out**2) + jnp.sum(same @ params['head'])

    assert_split(fun, X, jnp.int32(which), once=2)


def test_values_of_other_types():
    """Branches keep arrays of other shapes and dtypes; zeros fill empty places."""

    def fun(params: Any, x: Any) -> Any:
        def first(params: Any, x: Any) -> Any:
            a, b = x @ params['torso'], x[:2] @ params['torso']
            return a @ params['cell'] + (b @ params['head']).sum() + a[0, 0]

        def second(params: Any, x: Any) -> Any:
            a, b, n = (k * x @ params['torso'] for k in (1, 2, 3))
            order = jnp.argsort((n @ n.T)[:, 0])
            return (
                a @ params['cell']
                + jnp.sin(b) * params['head'][:1]
                + ((x @ params['head'])[order])
            )

        return jnp.sum(lax.cond(x.sum() > 0, first, second, params, x) ** 2)

    for x in X, -X:
        assert_split(fun, x, once=6)


def test_an_index_that_changes():
    """It is not known which branch runs: none is computed ahead."""

    def fun(params: Any, x: Any) -> Any:
        which = params['cell'].sum() > 0
        branches = lambda: x @ params['torso'], lambda: jnp.sin(x) @ params['torso']
        return jnp.sum(lax.cond(which, *branches) @ params['head'])

    with pytest.warns(UserWarning, match='Nothing is computed once'):
        ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED)
    for params in PARAMS, MOVED, jax.tree.map(jnp.negative, PARAMS):
        kept = ahead.early(params, X)
        ours = sg.value_and_grad(ahead.late, wrt=TRAINED, unused='ignore')(params, kept)
        right = sg.value_and_grad(fun, wrt=TRAINED, unused='ignore')(params, X)
        assert_same(ours, right)


@pytest.mark.parametrize('is_in_each', (False, True))
def test_keys(is_in_each: bool):
    """Zeros cannot stand for keys: a branch without one leaves the branches whole."""

    def fun(params: Any, x: Any, key: Any) -> Any:
        def draw(params: Any, x: Any) -> Any:
            keys = jax.random.split(key)
            scale = jax.random.normal(
                jax.random.fold_in(keys[0], params['head'].sum().astype(int)), x.shape
            )
            return (x @ params['torso']) * scale @ params['head']

        def other(params: Any, x: Any) -> Any:
            return draw(params, -x) if is_in_each else x @ params['cell']

        return jnp.sum(lax.cond(x.sum() > 0, draw, other, params, x) ** 2)

    key = jax.random.key(3)
    assert_split(fun, X, key, once=2 * is_in_each) if is_in_each else None
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        ahead = sg.precompute(fun, PARAMS, X, key, wrt=TRAINED)
    for params in PARAMS, MOVED:
        how: Any = {'wrt': TRAINED, 'unused': 'ignore'}
        ours = sg.value_and_grad(ahead.late, **how)(params, ahead.early(PARAMS, X, key))
        assert_same(ours, sg.value_and_grad(fun, **how)(params, X, key))


def test_without_jit_it_is_exact():
    """Each operation runs by itself, in the branch that the index names."""

    def fun(params: Any, x: Any) -> Any:
        branches = (
            lambda x: jnp.tanh(x @ params['torso']) @ params['cell'],
            lambda x: jnp.sin(x @ params['torso']) @ params['cell'] + x,
        )
        return jnp.sum(lax.cond(x.sum() > 0, *branches, x) @ params['head'])

    for x in X, -X:
        ahead = sg.precompute(fun, PARAMS, x, wrt=TRAINED)
        with jax.disable_jit():
            kept = ahead.early(PARAMS, x)
            ours = sg.value_and_grad(ahead.late, wrt=TRAINED)(PARAMS, kept)
            right = sg.value_and_grad(fun, wrt=TRAINED)(PARAMS, x)
        jax.tree.map(np.testing.assert_array_equal, ours, right)


def test_branches_in_loops_in_branches():
    """And a checkpoint around them: each is split, from the outside in."""

    def fun(params: Any, xs: Any) -> Any:
        def turn(h: Any, x: Any) -> Any:
            branches = (
                lambda h, x: jnp.tanh(h @ params['cell'] + x @ params['torso']),
                lambda h, x: h + jnp.sin(x @ params['torso']) * params['head'][:1],
            )
            h = lax.cond(x.sum() > 0, *branches, h, x)
            return h, h.sum()

        @jax.checkpoint
        def loop(xs: Any) -> Any:
            h, sums = lax.scan(turn, jnp.ones((3, 4)), xs)
            return h @ params['head'] + sums.sum()

        out = lax.cond(xs.sum() > 0, loop, lambda xs: xs[0] @ params['head'], xs)
        return jnp.sum(out**2)

    for xs in XS, -XS:
        ahead = assert_split(fun, xs, once=2)
        assert (6, 3, 4) in [k.shape for k in ahead.kept]


def test_a_branch_with_an_effect_runs_at_each_step():
    """It is not split, and prints once for each call of late."""
    seen: list[float] = []

    def fun(params: Any, x: Any) -> Any:
        def tell(x: Any) -> Any:
            y = x @ params['torso']
            jax.debug.callback(lambda y: seen.append(float(y)), y.sum())
            return y @ params['head']

        return jnp.sum(lax.cond(x.sum() > 0, tell, lambda x: x @ params['head'], x))

    x = abs(X)
    ahead = sg.precompute(fun, PARAMS, x, wrt=TRAINED)
    kept = ahead.early(PARAMS, x)
    assert products(ahead.early, PARAMS, x) == 0
    jax.effects_barrier()
    assert not seen
    for count in 1, 2:
        np.testing.assert_allclose(ahead.late(PARAMS, kept), fun(PARAMS, x), rtol=1e-5)
        jax.effects_barrier()
        assert len(seen) == 2 * count


@pytest.mark.parametrize('is_mixed', (False, True))
def test_examples(is_mixed: bool):
    """What mixes examples in a branch is made anew, of rows that are kept."""

    def fun(params: Any, x: Any) -> Any:
        def first(x: Any) -> Any:
            y = x @ params['torso']
            y = y - y.mean(0, keepdims=True) if is_mixed else jnp.tanh(y)
            return y @ params['head']

        def second(x: Any) -> Any:
            return jnp.sin(x @ params['torso']) @ params['cell']

        return jnp.sum(lax.cond(jnp.arange(3).sum() > 1, first, second, x) ** 2)

    ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED, examples=True)
    assert products(ahead.late, PARAMS, ahead.early(PARAMS, X)) == 2
    # Examples of two batches are put together, and in another order.
    kept = [ahead.early(PARAMS, x) for x in (X, 2 * X)]
    rows = np.array([5, 0, 4])
    batch = jax.tree.map(lambda *k: jnp.concatenate(k)[rows], *kept)
    x = jnp.concatenate([X, 2 * X])[rows]
    how: Any = {'wrt': TRAINED, 'unused': 'ignore'}
    ours = sg.value_and_grad(ahead.late, **how)(PARAMS, batch)
    assert_same(ours, sg.value_and_grad(fun, **how)(PARAMS, x))


def test_flops_are_those_of_the_longest_branch():
    """As in the whole program."""

    def fun(params: Any, x: Any) -> Any:
        def first(x: Any) -> Any:
            return x @ params['torso'] @ params['torso'] @ params['head']

        def second(x: Any) -> Any:
            return x @ params['torso']

        return jnp.sum(lax.cond(x.sum() > 0, first, second, x))

    ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED)
    assert 'cond at test_branches.py' in str(ahead)
    assert '66' in str(ahead).splitlines()[-2]

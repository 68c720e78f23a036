"""``while`` loops of which a part does not change, beside the whole ones."""

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
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
)

X = XS[0]


def until(x: Any, size: float) -> Any:
    """A condition: as long as the norm is smaller."""
    return jnp.sum(x**2) < size


def test_what_is_carried_and_does_not_change():
    """It is known where the frozen part ends, and the rest goes along with it again."""

    def fun(params: Any, x: Any) -> Any:
        def turn(carry: Any) -> Any:
            n, a, b = carry
            a = jnp.sin(a @ params['torso']) + a + 0.1
            return n + 1, a, jnp.tanh(lax.stop_gradient(b @ params['cell'] + a))

        start = 0, x / 9, jnp.zeros((3, 4))
        n, a, b = lax.while_loop(lambda carry: until(carry[1], 40.0), turn, start)
        last = jnp.sin(a @ params['torso']) * n.astype(float)
        return jnp.sum(last @ params['head']) + jnp.sum(b @ params['head'])

    assert_split(fun, X, once=2, again=1)


def test_a_mapped_loop_stays_whole():
    """Each row of the map has a number of turns of its own."""

    def fun(params: Any, x: Any) -> Any:
        def turn(carry: Any) -> Any:
            a, b = carry
            b = jnp.tanh(lax.stop_gradient(b @ params['cell'] + a))
            return jnp.sort(a) * 1.5 + 0.1, b

        def row(a: Any) -> Any:
            start = a, jnp.zeros(4)
            return lax.while_loop(lambda carry: until(carry[0], 40.0), turn, start)[1]

        b = jax.vmap(row)(lax.stop_gradient(x @ params['torso']))
        return jnp.sum(b @ params['head'])

    assert_split(fun, X, once=1)


def test_a_condition_that_changes():
    """Then it is not known how many turns the frozen part goes."""

    def fun(params: Any, x: Any) -> Any:
        def turn(carry: Any) -> Any:
            a, b = carry
            return jnp.tanh(a @ params['torso'] + x), b + 1.0

        start = x, lax.stop_gradient(params['cell']).sum()
        a, _ = lax.while_loop(lambda carry: carry[1] < 3.0, turn, start)
        return jnp.sum(a @ params['head'])

    with pytest.warns(UserWarning, match='Nothing is computed once'):
        ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED)
    for params in PARAMS, MOVED, jax.tree.map(jnp.negative, PARAMS):
        kept = ahead.early(PARAMS, X)
        frozen = {**params, 'torso': PARAMS['torso']}
        ours = sg.value_and_grad(ahead.late, wrt='head')(frozen, kept)
        assert_same(ours, sg.value_and_grad(fun, wrt='head')(frozen, X))


def test_a_while_in_a_scan_in_a_branch():
    """Each is split, from the outside in; a key goes along."""

    def fun(params: Any, xs: Any, key: Any) -> Any:
        def layer(h: Any, x: Any) -> Any:
            def turn(carry: Any) -> Any:
                key, a, b = carry
                key, new = jax.random.split(key)
                a = jnp.sin(a @ params['torso']) + a + jax.random.uniform(new, a.shape)
                return key, a, lax.stop_gradient(jnp.tanh(b @ params['cell'] + a))

            start = key, x, h
            _, a, b = lax.while_loop(lambda carry: until(carry[1], 99.0), turn, start)
            return b, (a @ params['torso']) @ params['head']

        def branch(xs: Any) -> Any:
            h, outs = lax.scan(layer, jnp.zeros((3, 4)), xs)
            return h @ params['head'] + outs.sum(0)

        out = lax.cond(xs.sum() > 0, branch, lambda xs: xs[0] @ params['head'], xs)
        return jnp.sum(out**2)

    for xs in abs(XS), -abs(XS):
        assert_split(fun, xs, jax.random.key(2), once=2, again=1)


@pytest.mark.parametrize('is_mixed', (False, True))
def test_examples(is_mixed: bool):
    """A condition that asks all examples mixes them: the loop stays whole."""

    def fun(params: Any, x: Any) -> Any:
        def turn(carry: Any) -> Any:
            n, a, b = carry
            a = jnp.tanh(a @ params['torso'])
            return n + 1.0, a, lax.stop_gradient(jnp.tanh(b @ params['cell'] + a))

        def goes_on(carry: Any) -> Any:
            return carry[0] < (carry[1].sum() if is_mixed else 3.0)

        _, a, b = lax.while_loop(goes_on, turn, (0.0, x, x))
        return jnp.sum((((a @ params['torso']) + b) @ params['head']) ** 2)

    said = pytest.warns(UserWarning, match='Nothing is') if is_mixed else nullcontext()
    with said:
        ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED, examples=True)
    kept, order = ahead.early(PARAMS, X), jnp.array([2, 0, 1])
    how: Any = {'wrt': TRAINED, 'unused': 'ignore'}
    ours = sg.value_and_grad(ahead.late, **how)(PARAMS, [x[order] for x in kept])
    assert_same(ours, sg.value_and_grad(fun, **how)(PARAMS, X[order]))

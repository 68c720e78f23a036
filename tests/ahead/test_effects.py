"""What an effect returns is another value each time, and effects run at each step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import flax_sg as sg
from tests.ahead.splits import (
    MOVED,
    PARAMS,
    TRAINED,
    XS,
    assert_same,
    assert_split,
    products,
)

X = XS[0]
HAS_REFS = pytest.mark.skipif(not hasattr(jax, 'new_ref'), reason='no mutable arrays')


def features(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params['torso'])


@HAS_REFS
def test_a_ref_that_a_trained_value_is_written_to() -> None:
    """A write has no output: what is read of the ref afterwards changes."""

    def fun(params: Any, x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros((4, 4)))
        ref[...] = params['head'] * 2.0
        return jnp.mean((features(params, x) @ ref[...]) ** 2)

    assert_split(fun, X, once=1, through=jax.jit)


@HAS_REFS
def test_a_ref_that_data_are_written_to() -> None:
    """It runs at each step, in a loop, too; what does not read it is computed once."""

    def fun(params: Any, x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros((4, 4)))

        def turn(h: Any, n: Any) -> Any:
            ref[...] = ref[...] + h * n
            return h @ params['torso'], n

        lax.scan(turn, x.T @ x, jnp.arange(3.0))
        y = features(params, x)
        total = jnp.mean((y @ lax.stop_gradient(ref[...])) ** 2)
        return total + jnp.mean(features(params, x) @ params['head'])

    ahead = assert_split(fun, X, reads=True, through=jax.jit)
    assert products(ahead.early, PARAMS, X) == 2


@HAS_REFS
def test_a_ref_of_the_closure() -> None:
    """It is read at each step, not once."""
    scale = jax.new_ref(jnp.ones(()))

    def fun(params: Any, x: Any) -> Any:
        return jnp.mean(features(params, x) * scale[...] @ params['head'])

    ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED)
    kept = ahead.early(PARAMS, X)
    for factor in 1.0, 2.0, -3.0:
        scale[...] = jnp.asarray(factor)
        for params in PARAMS, MOVED:
            assert_same(ahead.late(params, kept), fun(params, X))


def test_a_value_of_a_callback() -> None:
    """It counts how often it is called: once for each step."""
    calls: list[int] = []

    def count() -> Any:
        calls.append(1)
        return np.float32(len(calls))

    def fun(params: Any, x: Any) -> Any:
        n = io_callback(count, jax.ShapeDtypeStruct((), jnp.float32))
        return jnp.mean(features(params, x) @ params['head']) * n

    ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED)
    kept = ahead.early(PARAMS, X)
    assert not calls
    one = jnp.mean(features(PARAMS, X) @ PARAMS['head'])
    for step in 1, 2, 3:
        assert_same(ahead.late(PARAMS, kept), step * one)


def test_random_numbers_of_a_state() -> None:
    """Noise in front of the tower: the report says what stands in the way."""
    random = pytest.importorskip('jax.experimental.random', reason='not in jax 0.7.2')
    rng, other = random.stateful_rng(0), random.stateful_rng(0)

    def of(rng: Any) -> Any:
        noisy = lambda params, x: features(params, x + rng.uniform())  # noqa: E731
        return lambda params, x: jnp.mean(noisy(params, x) @ params['head'])

    said = r'(?s)torso is computed .* get at .* may return\s+an'
    with pytest.warns(UserWarning, match=said):
        ahead = sg.precompute(of(rng), PARAMS, X, wrt=TRAINED)
    kept = ahead.early(PARAMS, X)
    for _ in range(3):
        assert_same(ahead.late(PARAMS, kept), of(other)(PARAMS, X))


def test_what_is_printed_of_features() -> None:
    """A callback on what is computed once runs at each step."""
    seen: list[float] = []

    def fun(params: Any, x: Any) -> Any:
        y = features(params, x)
        jax.debug.callback(lambda y: seen.append(float(y)), y.sum())
        return jnp.mean(y @ params['head'])

    ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED)
    kept = ahead.early(PARAMS, X)
    jax.effects_barrier()
    assert not seen
    for count in 1, 2, 3:
        ahead.late(PARAMS, kept)
        jax.effects_barrier()
        assert len(seen) == count
    np.testing.assert_allclose(seen, float(features(PARAMS, X).sum()), rtol=1e-5)


def test_a_pure_callback_is_pure() -> None:
    """It is computed once, and two equal ones are one; others run at each step."""
    calls: list[str] = []

    def double(x: Any) -> Any:
        calls.append('pure')
        return np.asarray(x) * 2

    def fun(params: Any, x: Any) -> Any:
        y = features(params, x)
        one, other = (jax.pure_callback(double, y, y) for _ in range(2))
        io_callback(lambda: calls.append('io'), None)
        jax.debug.callback(lambda: calls.append('debug'))
        return jnp.mean((one + lax.stop_gradient(other)) @ params['head'])

    ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED)
    kept = ahead.early(PARAMS, X)
    jax.effects_barrier()
    assert calls == ['pure']
    assert [k.shape for k in kept] == [(3, 4)]
    for _ in range(2):
        value = ahead.late(PARAMS, kept)
        jax.effects_barrier()
    assert sorted(calls) == ['debug', 'debug', 'io', 'io', 'pure']
    assert_same(value, fun(PARAMS, X))

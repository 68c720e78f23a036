"""What a reader sees instead of the stored value."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_sg
from flax_sg.rules import rules

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
PATH = flax_sg.Path.of('params', ('enc', 'kernel'))
STOP, ONE_LEVEL = rules.StopGradient(), rules.StopGradient(levels=1)


@pytest.mark.parametrize(
    'dtype', [jnp.float16, jnp.bfloat16, jnp.complex64, jnp.float8_e4m3fn]
)
def test_every_inexact_dtype_is_stopped(dtype):
    x = jnp.ones((2,), dtype)
    _, tangent = jax.jvp(lambda x: STOP(PATH, x), (x,), (x,))
    assert tangent.dtype == dtype
    assert not np.any(np.asarray(tangent, np.complex64))


INTEGERS = [jnp.arange(3), jnp.array([True, False]), jnp.uint8(3)]
KEYS = [jax.random.key(0), jax.random.PRNGKey(0)]


@pytest.mark.parametrize('rule', [STOP, ONE_LEVEL])
def test_what_carries_no_gradient_stays_as_it_is(rule):
    for leaf in (X, np.ones(3), 1.0, 3, None, 'text', object(), [1.0]):
        assert rule(PATH, leaf) is leaf  # It is no tracer.
    seen: list[bool] = []

    @jax.jit
    def traced(leaf):
        seen.append(rule(PATH, leaf) is leaf)

    for leaf in (*INTEGERS, *KEYS):
        traced(leaf)
    assert seen == [True] * 5


def test_one_level_is_stopped_for_what_differentiates_first():
    def product(rule):
        return jax.grad(lambda x: x * rule(PATH, x))

    assert product(STOP)(3.0) == product(rules.StopGradient(levels=1))(3.0) == 3.0
    assert jax.grad(product(STOP))(3.0) == 0.0
    assert jax.grad(product(rules.StopGradient(levels=1)))(3.0) == 1.0


LEVELS = {
    'jvp': lambda f: lambda w: jax.jvp(f, (w,), (jnp.ones_like(w),)),
    'linearize': lambda f: lambda w: jax.linearize(f, w)[1](jnp.ones_like(w)),
    'hessian': jax.hessian,
    'grad of a batch': lambda f: jax.grad(
        lambda w: jnp.sum(jax.vmap(f)(jnp.stack([w, w])))
    ),
    'batch of grads': lambda f: lambda w: jax.vmap(jax.grad(f))(jnp.stack([w, w])),
    'grad, jit, grad': lambda f: jax.grad(
        lambda w: jnp.sum(jax.jit(lambda v: jax.grad(f)(v * w))(w))
    ),
    'remat': lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize('transform', LEVELS.values(), ids=LEVELS)
def test_a_stop_is_the_one_of_jax_on_every_level(transform):
    # It is made below the derivatives in progress; JAX gets there in a longer way.
    def loss(stop: Any) -> Any:
        return lambda w: jnp.sum(jnp.sin(w) * stop(w * w))

    ours = transform(loss(lambda w: STOP(PATH, w)))
    by_hand = transform(loss(jax.lax.stop_gradient))
    w = jnp.arange(1.0, 4.0)
    assert str(jax.make_jaxpr(ours)(w)) == str(jax.make_jaxpr(by_hand)(w))
    jax.tree.map(np.testing.assert_array_equal, ours(w), by_hand(w))

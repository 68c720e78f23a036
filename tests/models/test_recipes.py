"""What the rules are for: models that train, and the gradients they train with."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import oracle
import stepwise
from flax_sg import errors
from flax_sg import linen as nn

X = jnp.array([[1.0, -2.0], [0.5, 0.75], [-1.0, 2.0]])


class Net(fnn.Module):
    """Features, and a head that reads them."""

    width: int = 4

    @fnn.compact
    def __call__(self, x):
        x = jnp.tanh(fnn.Dense(self.width, name='features')(x))
        return fnn.Dense(1, name='head')(x)


def plain(params: Any, x: Any) -> jax.Array:
    return Net().apply({'params': params}, x)


def shielded(params: Any, x: Any, **options: Any) -> jax.Array:
    with nn.stop_gradient('features/**', **options):
        return plain(params, x)


PARAMS = Net().init(jax.random.key(0), X)['params']
RATE = 0.1

# One level.


def adapted(apply: Any, params: Any) -> jax.Array:
    """The loss after one step of gradient descent on all that has a gradient."""
    inner = lambda p: jnp.mean((apply(p, X) - 1.0) ** 2)  # noqa: E731
    params = jax.tree.map(lambda p, g: p - RATE * g, params, jax.grad(inner)(params))
    return jnp.mean((plain(params, 2.0 * X) - 1.0) ** 2)


def adapted_by_hand(params: Any) -> jax.Array:
    """The same, where the inner derivative is taken of the head alone."""

    def inner(head: Any) -> jax.Array:
        return jnp.mean((plain({**params, 'head': head}, X) - 1.0) ** 2)

    grads = jax.grad(inner)(params['head'])
    head = jax.tree.map(lambda p, g: p - RATE * g, params['head'], grads)
    return jnp.mean((plain({**params, 'head': head}, 2.0 * X) - 1.0) ** 2)


def test_one_level_is_the_inner_one_of_two():
    one_level = functools.partial(shielded, levels=1)
    ours = stepwise.evaluate(jax.grad(functools.partial(adapted, one_level)), PARAMS)
    by_hand = stepwise.evaluate(jax.grad(adapted_by_hand), PARAMS)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), ours, by_hand
    )
    # With all levels stopped, what the features do to the step of the head is lost.
    all_levels = jax.grad(functools.partial(adapted, shielded))(PARAMS)
    assert not np.allclose(
        all_levels['features']['kernel'], by_hand['features']['kernel'], rtol=1e-2
    )


def test_one_level_stops_the_first_derivative_in_either_direction():
    def loss(p: Any) -> jax.Array:
        return jnp.sum(shielded(p, X, levels=1))

    grads = jax.grad(loss)(PARAMS)
    assert oracle.is_zero(grads['features']) and not oracle.is_zero(grads['head'])
    direction = jax.tree.map(jnp.zeros_like, PARAMS)
    direction['features'] = jax.tree.map(jnp.ones_like, PARAMS['features'])
    assert jax.jvp(loss, (PARAMS,), (direction,))[1] == 0.0
    # In compiled code, in a scan and under remat as well.
    for fn in (jax.jit(loss), jax.checkpoint(loss)):
        assert oracle.is_zero(jax.grad(fn)(PARAMS)['features'])
        mixed = jax.grad(lambda p: jnp.sum(jax.grad(fn)(p)['head']['kernel']))(PARAMS)  # noqa: B023
        assert not oracle.is_zero(mixed['features'])


@pytest.mark.parametrize('levels', [0, 2, True, '1'])
def test_other_levels_are_refused(levels):
    with pytest.raises(errors.ArgumentValueError, match='levels='):
        nn.stop_gradient('features/**', levels=levels)


@pytest.mark.usefixtures('standard_promotion')
def test_it_meta_learns():
    """Features that no task trains become such that one step on the head is enough."""
    slopes = jnp.array([-1.0, -0.5, 0.5, 1.0])
    x = jnp.linspace(-2.0, 2.0, 8)[:, None]

    def after_a_step(params: Any, slope: jax.Array) -> jax.Array:
        # All of these tasks are one feature, times a number.
        y = slope * jnp.tanh(3.0 * x)

        def loss(p: Any) -> jax.Array:
            return jnp.mean((shielded(p, x, levels=1) - y) ** 2)

        grads = jax.grad(loss)(params)
        # All parameters take the step; those of the features have no gradient.
        params = jax.tree.map(lambda p, g: p - 0.2 * g, params, grads)
        return jnp.mean((plain(params, x) - y) ** 2)

    def meta_loss(params: Any) -> jax.Array:
        return jnp.mean(jax.vmap(after_a_step, (None, 0))(params, slopes))

    tx = optax.adam(0.03)

    @jax.jit
    def trained(params: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            params, moments = state
            value, grads = jax.value_and_grad(meta_loss)(params)
            updates, moments = tx.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        return jax.lax.scan(step, (params, tx.init(params)), None, length=200)[1]

    values = trained(Net().init(jax.random.key(1), x)['params'])
    assert values[-1] < 0.05 * values[0]


# Gradient penalties: the inner derivative is one with respect to the input.


def slope(apply: Any, params: Any) -> jax.Array:
    return jnp.mean(jax.grad(lambda x: jnp.sum(apply(params, x)))(X) ** 2)


def test_a_gradient_penalty_takes_two_applies():
    def loss(params: Any) -> jax.Array:
        with nn.stop_gradient('features/**'):
            score = jnp.mean(plain(params, X))  # trains the head
        return score + slope(plain, params)  # trains all

    def by_hand(params: Any) -> jax.Array:
        fixed = jax.lax.stop_gradient(params['features'])
        return jnp.mean(plain({**params, 'features': fixed}, X)) + slope(plain, params)

    ours = stepwise.evaluate(jax.grad(loss), PARAMS)
    oracle.assert_same(ours, stepwise.evaluate(jax.grad(by_hand), PARAMS))
    assert not oracle.is_zero(ours['features'])


def test_one_level_would_stop_the_penalty():
    # No inner level differentiates a parameter here: the outer one is the innermost.
    one_level = functools.partial(shielded, levels=1)
    grads = jax.grad(functools.partial(slope, one_level))(PARAMS)
    assert oracle.is_zero(grads['features']) and not oracle.is_zero(grads['head'])


# Domain-adversarial training.


class Adversarial(fnn.Module):
    """One linear feature, that tells labels and, if it is let, domains."""

    strength: float

    @fnn.compact
    def __call__(self, x):
        features = fnn.Dense(1, use_bias=False, name='features')
        label = fnn.Dense(1, name='label')(features(x))
        with nn.reverse_gradient('features/**', self.strength):
            return label, fnn.Dense(1, name='domain')(features(x))


def cross_entropy(score: jax.Array, truth: jax.Array) -> jax.Array:
    return jnp.mean(jnp.logaddexp(0.0, score) - truth * score)


def test_features_learn_not_to_tell_domains():
    numbers = np.random.default_rng(0)
    label = jnp.asarray(numbers.integers(0, 2, (64, 1)), jnp.float32)
    domain = jnp.asarray(numbers.integers(0, 2, (64, 1)), jnp.float32)
    noise = jnp.asarray(numbers.normal(0.0, 0.3, (64, 2)), jnp.float32)
    x = 2.0 * jnp.concatenate([label, domain], axis=1) - 1.0 + noise

    def share_of_domain(strength: float) -> float:
        model = Adversarial(strength)

        @jax.jit
        def trained(params: Any) -> Any:
            def loss(params: Any) -> jax.Array:
                scores = model.apply({'params': params}, x)
                return cross_entropy(scores[0], label) + cross_entropy(
                    scores[1], domain
                )

            def step(params: Any, _: Any) -> Any:
                grads = jax.grad(loss)(params)
                return jax.tree.map(lambda p, g: p - 0.2 * g, params, grads), None

            return jax.lax.scan(step, params, None, length=300)[0]

        params = trained(model.init(jax.random.key(0), x)['params'])
        right = (model.apply({'params': params}, x)[0] > 0) == (label > 0)
        assert jnp.mean(right) > 0.9
        of_label, of_domain = jnp.abs(params['features']['kernel'][:, 0])
        return float(of_domain / of_label)

    # A negative strength reverses twice: both heads train the feature.
    assert share_of_domain(0.5) < 0.15
    assert share_of_domain(-0.5) > 0.3

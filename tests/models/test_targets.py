"""A small BYOL (Grill et al., 2020): the online part learns, the target follows.

The model is trained once with `nn.mirror` and once with the target applied by hand.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen

from flax_sg import linen as nn
from oracle import assert_same, is_zero

STEPS = 60


class Encoder(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Dense(16)(x))
        x = linen.BatchNorm(use_running_average=False, momentum=0.9)(x)
        return linen.Dense(8)(x)


def unit(x: Any) -> Any:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class BYOL(linen.Module):
    """Predicts the output of averaged earlier weights for another view."""

    def setup(self):
        self.encoder = Encoder()
        self.predictor = linen.Dense(8)

    def online(self, x):
        return self.predictor(self.encoder(x))

    def __call__(self, one, two, target=None):
        teacher = nn.mirror(self.encoder, variables=target)
        losses = [
            jnp.mean(jnp.sum((unit(self.online(a)) - unit(teacher(b))) ** 2, axis=-1))
            for a, b in ((one, two), (two, one))
        ]
        return sum(losses)


def views(key: Any) -> tuple[Any, Any]:
    """Two noisy views of points in four clusters."""
    which, noise_1, noise_2 = jax.random.split(key, 3)
    centers = 3 * jnp.eye(4, 6)[jax.random.randint(which, (32,), 0, 4)]
    shape = centers.shape
    return tuple(
        centers + 0.5 * jax.random.normal(noise, shape) for noise in (noise_1, noise_2)
    )


def train_byol(loss: Any, variables: Any) -> Any:
    tx = optax.sgd(0.2, momentum=0.5)

    @jax.jit
    def step(params: Any, stats: Any, target: Any, state: Any, key: Any) -> Any:
        def of_params(params: Any, target: Any) -> Any:
            return loss(params, stats, target, *views(key))

        (value, stats), grads = jax.value_and_grad(of_params, (0, 1), has_aux=True)(
            params, target
        )
        updates, state = tx.update(grads[0], state, params)
        params = optax.apply_updates(params, updates)
        target = optax.incremental_update(params['encoder'], target, 0.1)
        return params, stats, target, state, (value, grads[1])

    params, stats = variables['params'], variables['batch_stats']
    target, state = params['encoder'], tx.init(params)
    values = []
    for number in range(STEPS):
        before = target
        params, stats, target, state, (value, of_target) = step(
            params, stats, target, state, jax.random.key(number)
        )
        assert is_zero(of_target)
        # The target moves a tenth of the way. Nothing else changes the target.
        followed = optax.incremental_update(params['encoder'], before, 0.1)
        assert all(jax.tree.leaves(jax.tree.map(jnp.allclose, target, followed)))
        values.append(value)
    return params, stats, target, jnp.array(values)


def test_byol() -> None:
    model = BYOL()
    variables = model.init(jax.random.key(0), *views(jax.random.key(1)))

    def loss(params: Any, stats: Any, target: Any, one: Any, two: Any) -> Any:
        value, written = model.apply(
            {'params': params, 'batch_stats': stats},
            one,
            two,
            {'params': target},
            mutable='batch_stats',
        )
        return value, written['batch_stats']

    class Online(linen.Module):
        """The same without a teacher."""

        def setup(self):
            self.encoder = Encoder()
            self.predictor = linen.Dense(8)

        def __call__(self, x):
            return self.predictor(self.encoder(x))

    def by_hand(params: Any, stats: Any, target: Any, one: Any, two: Any) -> Any:
        still = {
            'params': jax.lax.stop_gradient(target),
            'batch_stats': stats['encoder'],
        }
        value = 0
        for a, b in ((one, two), (two, one)):
            y, written = Online().apply(
                {'params': params, 'batch_stats': stats}, a, mutable='batch_stats'
            )
            t, _ = Encoder().apply(
                {**still, 'batch_stats': stats['encoder']}, b, mutable='batch_stats'
            )
            stats = written['batch_stats']
            value = value + jnp.mean(jnp.sum((unit(y) - unit(t)) ** 2, axis=-1))
        return value, stats

    assert_same(
        variables, Online().init(jax.random.key(0), views(jax.random.key(1))[0])
    )
    params, stats, target, values = train_byol(loss, variables)
    other = train_byol(by_hand, variables)
    close = jax.tree.map(
        lambda a, b: jnp.allclose(a, b, 1e-3, 1e-4),
        (params, stats, target, values),
        other,
    )
    assert jax.tree.all(close)
    assert values[-10:].mean() < 0.5 * values[:3].mean()  # It learns.
    # The model does not collapse: the codes of different clusters differ.
    weights = {'params': params['encoder'], 'batch_stats': stats['encoder']}
    codes = unit(Encoder().apply(weights, 3 * jnp.eye(4, 6), mutable='batch_stats')[0])
    likeness = codes @ codes.T - 2 * jnp.eye(4)
    assert likeness.max() < 0.95

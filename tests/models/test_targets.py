"""Models with a target network that train: the online part learns, the target follows.

BYOL (Grill et al., 2020) and deep Q-learning (Mnih et al., 2015), small. Each is
trained once with `nn.mirror` and once with the target applied by hand.
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
    """Predicts what an average of earlier weights makes of another view."""

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
        # The target moves a tenth of the way, and nothing else moves it.
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
    # Without a collapse: the codes of different clusters differ.
    weights = {'params': params['encoder'], 'batch_stats': stats['encoder']}
    codes = unit(Encoder().apply(weights, 3 * jnp.eye(4, 6), mutable='batch_stats')[0])
    likeness = codes @ codes.T - 2 * jnp.eye(4)
    assert likeness.max() < 0.95


# A walk of five places; the reward is at the right end.

PLACES, DISCOUNT = 5, 0.8


class QNet(linen.Module):
    def setup(self):
        self.net = linen.Sequential([linen.Dense(16), jnp.tanh, linen.Dense(2)])

    def __call__(self, state, action, reward, after, target=None):
        values = jnp.take_along_axis(self.net(state), action[:, None], 1)[:, 0]
        following = nn.mirror(self.net, variables=target)(after).max(-1)
        return jnp.mean((values - reward - DISCOUNT * following) ** 2)


def walk() -> tuple[Any, ...]:
    place = jnp.repeat(jnp.arange(PLACES), 2)
    action = jnp.tile(jnp.arange(2), PLACES)
    after = jnp.clip(place + 2 * action - 1, 0, PLACES - 1)
    reward = (after == PLACES - 1).astype(jnp.float32)
    return jnp.eye(PLACES)[place], action, reward, jnp.eye(PLACES)[after]


def best_values() -> Any:
    """The values of the best policy, by value iteration."""
    _, _, reward, after = walk()
    values = jnp.zeros((PLACES, 2))
    for _ in range(100):
        values = (reward + DISCOUNT * (after @ values.max(-1))).reshape(PLACES, 2)
    return values


def test_deep_q_learning() -> None:
    model, batch = QNet(), walk()
    params = model.init(jax.random.key(0), *batch)['params']
    tx = optax.sgd(0.3, momentum=0.9)

    def loss(params: Any, target: Any) -> Any:
        return model.apply({'params': params}, *batch, {'params': target})

    def by_hand(params: Any, target: Any) -> Any:
        state, action, reward, after = batch
        net = linen.Sequential([linen.Dense(16), jnp.tanh, linen.Dense(2)])
        q = net.apply({'params': params['net']}, state)
        following = net.apply({'params': jax.lax.stop_gradient(target)}, after).max(-1)
        q = jnp.take_along_axis(q, action[:, None], 1)[:, 0]
        return jnp.mean((q - reward - DISCOUNT * following) ** 2)

    def trained(loss: Any, params: Any) -> Any:
        @jax.jit
        def step(params: Any, state: Any, target: Any) -> Any:
            grads, of_target = jax.grad(loss, (0, 1))(params, target)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, of_target

        state = tx.init(params)
        for _ in range(30):
            target = params['net']
            frozen = jax.tree.map(jnp.copy, target)
            for _ in range(30):
                params, state, of_target = step(params, state, target)
                assert is_zero(of_target)
            assert_same(target, frozen)
        return params

    found = trained(loss, params)
    close = jax.tree.map(
        lambda a, b: jnp.allclose(a, b, 1e-2, 1e-3), found, trained(by_hand, params)
    )
    assert jax.tree.all(close)
    net = linen.Sequential([linen.Dense(16), jnp.tanh, linen.Dense(2)])
    values = net.apply({'params': found['net']}, jnp.eye(PLACES))
    assert jnp.allclose(values, best_values(), atol=0.1), (values, best_values())

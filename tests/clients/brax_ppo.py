"""brax: PPO with the first layer of policy and value network frozen."""

import functools

import jax
import jax.numpy as jnp
import steps
from brax.training import types
from brax.training.agents.ppo import losses, networks

OBSERVED, ACTIONS, TIME, BATCH = 6, 2, 4, 3
ppo = networks.make_ppo_networks(
    OBSERVED,
    ACTIONS,
    policy_hidden_layer_sizes=(16, 16),
    value_hidden_layer_sizes=(16, 16),
)
keys = iter(jax.random.split(jax.random.key(0), 8))
params = losses.PPONetworkParams(
    policy=ppo.policy_network.init(next(keys)), value=ppo.value_network.init(next(keys))
)
draw = functools.partial(jax.random.normal, dtype=jnp.float32)
observed = draw(next(keys), (BATCH, TIME, OBSERVED))
raw_action = draw(next(keys), (BATCH, TIME, ACTIONS))
transitions = types.Transition(
    observation=observed,
    action=jnp.tanh(raw_action),
    reward=draw(next(keys), (BATCH, TIME)),
    discount=jnp.ones((BATCH, TIME)),
    next_observation=draw(next(keys), (BATCH, TIME, OBSERVED)),
    extras={
        'policy_extras': {
            'raw_action': raw_action,
            'log_prob': draw(next(keys), (BATCH, TIME)),
            'distribution_params': draw(next(keys), (BATCH, TIME, 2 * ACTIONS)),
        },
        'state_extras': {'truncation': jnp.zeros((BATCH, TIME))},
    },
)


def loss(params):
    total, _ = losses.compute_ppo_loss(
        params, None, transitions, jax.random.key(1), ppo_network=ppo
    )
    return total


steps.check(
    'brax, PPO',
    loss,
    params,
    in_model='hidden_0/**',
    in_tree='*/params/hidden_0/**',
    is_frozen=lambda path: '/hidden_0/' in path,
)

# %% [markdown]
# # Offline reinforcement learning: which loss trains which network
#
# An actor, a critic and a target network, one update under `jax.jit`, all in one file:
# that is how most agents in JAX are written. Two losses meet in it, and each must train
# one network. If a loss trains the other network too, nothing raises.
#
# This notebook writes TD3+BC (Fujimoto and Gu, 2021) on a small task with two common
# faults. `sg.gradient_flow` finds them. `testing.moves` finds a third one, which no
# gradient shows, and proves that it is mended.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from shared import BLUE, FULL, GREY, ORANGE

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing

STEPS, SEEDS = (2000, 5) if FULL else (20, 1)

# %% [markdown]
# ## The data
#
# A point in the plane is pushed towards the origin by a clumsy hand. The reward is less
# the farther away it ends.


# %%
def move(state, action, rng):
    """The next state, and the reward."""
    after = state + 0.3 * action + 0.02 * rng.normal(size=state.shape)
    return after.astype(np.float32), -np.sum(after**2, -1).astype(np.float32)


def transitions(count):
    rng = np.random.default_rng(0)
    state = rng.uniform(-1, 1, (count, 2)).astype(np.float32)
    clumsy = -state + rng.normal(size=state.shape)
    action = np.clip(clumsy, -1, 1).astype(np.float32)
    after, reward = move(state, action, rng)
    return {'state': state, 'action': action, 'after': after, 'reward': reward}


data = transitions(4096)
batch = {name: jnp.asarray(values[:256]) for name, values in data.items()}

# %% [markdown]
# ## The agent
#
# Two modules, three trees of parameters. Both losses are added up and differentiated in
# one call.


# %%
class Actor(nn.Module):
    @nn.compact
    def __call__(self, state):
        hidden = nn.relu(nn.Dense(32)(state))
        return nn.tanh(nn.Dense(2)(hidden))


class Critic(nn.Module):
    @nn.compact
    def __call__(self, state, action):
        hidden = nn.relu(nn.Dense(32)(jnp.concatenate([state, action], -1)))
        return nn.Dense(1)(hidden)[:, 0]


actor, critic = Actor(), Critic()
DISCOUNT, RATE, CLONING = 0.9, 0.005, 0.1


def agent(seed, dtype=jnp.float32):
    """The parameters of the three networks; the target begins as the critic."""
    one, two = jax.random.split(jax.random.key(seed))
    of_critic = critic.init(two, batch['state'], batch['action'])
    target = jax.tree.map(lambda x: x.astype(dtype), of_critic)
    return {'actor': actor.init(one, batch['state']), 'critic': of_critic}, target


def losses(nets, target, batch):
    after = actor.apply(nets['actor'], batch['after'])
    value = critic.apply(target, batch['after'], after)
    wanted = batch['reward'] + DISCOUNT * value
    found = critic.apply(nets['critic'], batch['state'], batch['action'])
    action = actor.apply(nets['actor'], batch['state'])
    score = critic.apply(nets['critic'], batch['state'], action)
    cloned = jnp.mean((action - batch['action']) ** 2)
    return {
        'critic loss': jnp.mean((found - wanted) ** 2),
        'actor loss': -jnp.mean(score) + CLONING * cloned,
    }


tx = optax.adam(1e-3)


def follow(target, source):
    """The target takes a small part of the critic, and keeps its type."""
    return ((1 - RATE) * target + RATE * source).astype(target.dtype)


def step_of(losses):
    @jax.jit
    def step(nets, target, state, batch):
        grads = jax.grad(lambda nets: sum(losses(nets, target, batch).values()))(nets)
        updates, state = tx.update(grads, state, nets)
        nets = optax.apply_updates(nets, updates)
        return nets, jax.tree.map(follow, target, nets['critic']), state

    return step


# %% [markdown]
# ## The report
#
# The loss of the actor should train the actor, and the loss of the critic the critic.

# %%
nets, target = agent(0)
flow = sg.gradient_flow(losses, nets, target, batch)
print(flow)

# %% [markdown]
# Neither holds. The loss of the actor makes the critic promise more, which is easier
# than to act better. The loss of the critic moves the actor, through the action in the
# value that is the goal. These are the lines between them:

# %%
print(flow.why('critic loss', 'actor/params/Dense_1/bias'))
print(flow.why('actor loss', 'critic/params/Dense_1/bias'))

# %% [markdown]
# ## The mend
#
# The goal is a constant. The critic judges the actor with frozen parameters: the
# gradient flows through the critic to the action.


# %%
def mended(nets, target, batch):
    after = actor.apply(nets['actor'], batch['after'])
    value = critic.apply(target, batch['after'], after)
    wanted = jax.lax.stop_gradient(batch['reward'] + DISCOUNT * value)
    found = critic.apply(nets['critic'], batch['state'], batch['action'])
    action = actor.apply(nets['actor'], batch['state'])
    score = nn.Frozen(critic).apply(nets['critic'], batch['state'], action)
    cloned = jnp.mean((action - batch['action']) ** 2)
    return {
        'critic loss': jnp.mean((found - wanted) ** 2),
        'actor loss': -jnp.mean(score) + CLONING * cloned,
    }


flow = sg.gradient_flow(mended, nets, target, batch)
testing.assert_trains_only(flow, 'critic/**', output='critic loss')
testing.assert_trains_only(flow, 'actor/**', output='actor loss')
print(flow)

# %% [markdown]
# ## What the step does
#
# The losses are right. The step may still be wrong: a target network takes memory, so
# somebody keeps it in bfloat16. `testing.moves` compares the networks before and after
# three steps.

# %%
nets, target = agent(0, jnp.bfloat16)
step = step_of(mended)


def stepped(nets, target):
    """All three networks before and after three steps."""
    before, state = {'nets': nets, 'target': target}, tx.init(nets)
    before = jax.tree.map(jnp.copy, before)  # The step may donate its arguments.
    for _ in range(3):
        nets, target, state = step(nets, target, state, batch)
    return before, {'nets': nets, 'target': target}


def shares(report):
    """The share of the values that move in each network."""
    moved = {}
    for row in report.rows():
        network, _ = row['parameter'].split('/params/')
        moved.setdefault(network, []).append(row['moved'])
    return {network: round(float(np.mean(x)), 2) for network, x in moved.items()}


lost = shares(testing.moves(*stepped(nets, target)))
lost

# %% [markdown]
# The target network hardly moves: 0.005 of the way to the critic is below the
# resolution of bfloat16 for most of its values. The critic would learn from a goal that
# stands still. In float32 all networks move:

# %%
before, after = stepped(*agent(0))
testing.assert_moves_only(before, after, True)
moved = shares(testing.moves(before, after))
moved

# %% [markdown]
# ## What the faults cost
#
# The loss of the critic, and the cost at work: the mean squared distance from the goal
# over twenty steps from random places. Five seeds each.


# %%
def result(nets):
    """The mean reward of an agent at work."""
    rng = np.random.default_rng(1)
    state, total = rng.uniform(-1, 1, (200, 2)).astype(np.float32), 0.0
    for _ in range(20):
        state, reward = move(state, np.asarray(act(nets['actor'], state)), rng)
        total += reward.mean() / 20
    return total


act = jax.jit(actor.apply)


def train(losses, dtype, seed):
    """The losses on the way, and the result."""
    step, watch = step_of(losses), jax.jit(losses)
    (nets, target), rng = agent(seed, dtype), np.random.default_rng(seed)
    state, seen = tx.init(nets), []
    for number in range(STEPS):
        rows = rng.integers(0, len(data['state']), 256)
        some = {name: values[rows] for name, values in data.items()}
        if number % 20 == 0:
            seen.append(float(watch(nets, target, some)['critic loss']))
        nets, target, state = step(nets, target, state, some)
    return seen, result(nets)


KINDS = {
    'two faults': (losses, jnp.float32, ORANGE),
    'lost target': (mended, jnp.bfloat16, GREY),
    'mended': (mended, jnp.float32, BLUE),
}
runs = {
    kind: [train(losses, dtype, seed) for seed in range(SEEDS)]
    for kind, (losses, dtype, _) in KINDS.items()
}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for number, (kind, (_, _, colour)) in enumerate(KINDS.items()):
    for seen, final in runs[kind]:
        left.plot(20 * np.arange(len(seen)), seen, color=colour, alpha=0.6)
        right.plot([-final], [number], 'o', color=colour)
left.set(title='loss of the critic', xlabel='step', yscale='log')
right.set(title='cost at work', xscale='log', yticks=range(3), yticklabels=[*KINDS])
plt.show()

# %% [markdown]
# The critic whose goal stands still has the lowest loss of all, and its agent is worse
# than the mended one: that loss curve shows no fault.
#
# ## In a test
#
# Three lines keep it so. They need no training run:

# %%
testing.assert_trains_only(flow, 'critic/**', output='critic loss')
testing.assert_trains_only(flow, 'actor/**', output='actor loss')
testing.assert_moves_only(before, after, True)

# %%
assert lost['target'] < 0.6 < min(lost['nets/actor'], lost['nets/critic'])
assert min(moved.values()) > 0.9
for kind, of_kind in runs.items():
    assert all(np.isfinite(final) for _, final in of_kind), kind
if FULL:
    faulty, stale, fair = (np.mean([final for _, final in runs[x]]) for x in KINDS)
    assert faulty < stale < fair

# %% [markdown]
# # Mirrors: BYOL and a target network
#
# A mirror is a second look at a module: the same parameters, and no gradient.
#
# ```python
# target = nn.mirror(self.online)(x)                    # the same weights, stopped
# target = nn.mirror(self.online, variables=teacher)(x)  # other weights in their place
# ```
#
# Networks that learn from themselves need it. In BYOL (Grill et al., 2020) one predicts
# what an average of its own past weights makes of another view of an image; in deep
# Q-learning (Mnih et al., 2015) values are learned from older values. Usually the
# second network is a copy: a second tree of parameters, a second `apply`, and care for
# everything that parameters are not, batch statistics and dropout masks above all.
#
# Here both are learned on handwritten digits, and what happens without the stop is
# shown.

# %%
import functools
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import flax_sg as sg
from flax_sg import linen as nn

FULL = os.environ.get('FLAX_SG_NOTEBOOKS', 'full') == 'full'
EPOCHS, Q_ROUNDS = (60, 60) if FULL else (4, 4)

plt.rcParams |= {
    'figure.dpi': 90,
    'figure.constrained_layout.use': True,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'legend.frameon': False,
}
BLUE, ORANGE, GREEN, GREY = '#0072b2', '#d55e00', '#009e73', '#767676'

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = jnp.asarray(digits.images[order] / 16, jnp.float32)
labels = jnp.asarray(digits.target[order], jnp.int32)
images, held_images = images[:1408], images[1408:]
labels, held_labels = labels[:1408], labels[1408:]

# %% [markdown]
# ## The model
#
# An encoder with BatchNorm and dropout makes 16 numbers of an image. A projector
# follows, and a predictor that guesses what the target network sees in another view.


# %%
def two_layers():
    """Used in training only: by the statistics of the batch."""
    norm = nn.BatchNorm(use_running_average=False)
    return nn.Sequential([nn.Dense(64), norm, nn.relu, nn.Dense(16)])


class Online(nn.Module):
    """Encoder and projector."""

    def setup(self):
        self.hidden, self.features = nn.Dense(128), nn.Dense(16)
        self.norm = nn.BatchNorm(momentum=0.9)
        self.dropout = nn.Dropout(0.1)
        self.projector = two_layers()

    def encode(self, image, train=False):
        hidden = self.norm(self.hidden(image), use_running_average=not train)
        hidden = self.dropout(nn.relu(hidden), deterministic=not train)
        return self.features(hidden)

    def __call__(self, image, train=False):
        return self.projector(self.encode(image, train))


class Byol(nn.Module):
    stop: bool = True
    rngs: str = 'fresh'

    def setup(self):
        self.online = Online()
        self.predictor = two_layers()

    def __call__(self, one, two, teacher=None):
        """The loss of guessing one view from the other, and how far targets spread."""
        target = self.online
        if self.stop:
            target = nn.mirror(self.online, variables=teacher, rngs=self.rngs)
        guess = normalized(self.predictor(self.online(one, train=True)))
        seen = normalized(target(two, train=True))
        return 1 - jnp.mean(jnp.sum(guess * seen, -1)), 4 * jnp.mean(jnp.std(seen, 0))

    def encode(self, image):
        return self.online.encode(image)


def normalized(x):
    return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)


model = Byol()
flat = images.reshape(-1, 64)
keys = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
variables = jax.jit(model.init)(keys, flat[:64], flat[:64])
teacher = {'params': variables['params']['online']}
print(sorted(variables['params']))

# %% [markdown]
# The mirror has no parameters of its own: the tree has an encoder and a predictor, and
# the teacher is a tree like the part that it stands for.
#
# ## What a mirror does not do
#
# Two choices are stated, because a second call in one step gets them wrong without a
# word:
#
# - `state='hold'`, the default: batch statistics are updated once, by the module
#   itself.
# - `rngs=`: with `'same'` the first call of the mirror draws the dropout masks of the
#   first call of the module; with `'fresh'` new ones, as BYOL wants it. Either way the
#   module draws what it would draw without a mirror.


# %%
class Looks(Byol):
    def __call__(self, x):
        return {
            'online': self.online(x, train=True),
            'same': nn.mirror(self.online)(x, train=True),
            'fresh': nn.mirror(self.online, rngs='fresh')(x, train=True),
        }


class Alone(Byol):
    def __call__(self, x):
        return {'online': self.online(x, train=True)}


def seen_by(looks):
    call = functools.partial(looks.apply, mutable='batch_stats')
    return jax.jit(call)(variables, flat[:64], rngs={'dropout': jax.random.key(2)})


looked, looked_state = seen_by(Looks())
alone, alone_state = seen_by(Alone())
for name, output in looked.items():
    same = bool(jnp.all(output == looked['online']))
    print(f'{name:14} sees what the module sees: {same}')

# %% [markdown]
# ## The same by hand
#
# Two trees, two applies, a stop, and the statistics of the second apply thrown away.
# Loss, gradients and statistics are equal to the last bit, dropout included.


# %%
def with_mirror(params, ema, one, two, key):
    loss, new = Byol(rngs='same').apply(
        {'params': params, 'batch_stats': variables['batch_stats']},
        one,
        two,
        {'params': ema},
        mutable='batch_stats',
        rngs={'dropout': key},
    )
    return loss[0], new


def by_hand(params, ema, one, two, key):
    def project(model, x):
        return model.online(x, train=True)

    def predict(model, x):
        return model.predictor(project(model, x))

    def apply(params, x, method):
        given = {'params': params, 'batch_stats': variables['batch_stats']}
        rngs = {'dropout': key}
        return model.apply(given, x, method=method, mutable='batch_stats', rngs=rngs)

    guess, new = apply(params, one, predict)
    copy = jax.lax.stop_gradient(params | {'online': ema})
    seen, _ = apply(copy, two, project)
    return 1 - jnp.mean(jnp.sum(normalized(guess) * normalized(seen), -1)), new


ema = jax.tree.map(lambda p: 0.9 * p, variables['params']['online'])
arguments = variables['params'], ema, flat[:64], flat[64:128], jax.random.key(3)
results = {
    spelled.__name__: jax.jit(
        jax.value_and_grad(spelled, argnums=(0, 1), has_aux=True)
    )(*arguments)
    for spelled in (with_mirror, by_hand)
}


def of_both(trees, *rest):
    return with_mirror(trees['student'], trees['teacher'], *rest)


both = {'student': variables['params'], 'teacher': ema}
flow = sg.gradient_flow(of_both, both, *arguments[2:], has_aux=True)
print(flow.table(depth=2))

# %% [markdown]
# ## Views
#
# A view is turned, scaled and shifted a little, with noise on top.


# %%
def view(key, image):
    turn, scale, shift, noise = jax.random.split(key, 4)
    angle = jax.random.uniform(turn, minval=-0.35, maxval=0.35)
    factor = jax.random.uniform(scale, (2, 1, 1), minval=0.85, maxval=1.2)
    moved = jax.random.uniform(shift, (2, 1, 1), minval=-1, maxval=1)
    y, x = (jnp.mgrid[:8, :8] - 3.5) * factor
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    where = jnp.stack([cos * y - sin * x, sin * y + cos * x]) + 3.5 + moved
    seen = jax.scipy.ndimage.map_coordinates(image, where, order=1)
    return seen + 0.1 * jax.random.normal(noise, seen.shape)


views = jax.jit(jax.vmap(view))
figure, rows = plt.subplots(2, 10, figsize=(10, 2.2))
for row, seed in zip(rows, (4, 5), strict=True):
    for axes, seen in zip(
        row, views(jax.random.split(jax.random.key(seed), 10), images[:10]), strict=True
    ):
        axes.imshow(seen, cmap='gray_r', vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
rows[0, 0].set_ylabel('one')
rows[1, 0].set_ylabel('two')
plt.show()

# %% [markdown]
# ## Three ways to learn from oneself
#
# - **BYOL**: the mirror reads a slow average of the weights.
# - **SimSiam** (Chen and He, 2021): the mirror reads the weights themselves, which is
#   an average at the rate 1.
# - **no stop**: the target is the module itself, and it is trained to be easy to guess.
#
# What was learned is measured by a linear probe: ridge regression on the encoder's 16
# numbers with 100 labels, accuracy on held-out digits, mean over ten different
# hundreds. No label is used before that.


# %%
def probe(features, held_features):
    """Held-out accuracy of linear classifiers that have seen 100 labels each."""

    def scaled(x):
        x = (x - features.mean(0)) / (features.std(0) + 1e-6)
        return jnp.concatenate([x, jnp.ones((len(x), 1))], 1)

    def accuracy(x, y):
        weights = jnp.linalg.solve(x.T @ x + jnp.eye(x.shape[1]), x.T @ y)
        read = jnp.argmax(scaled(held_features) @ weights, -1)
        return jnp.mean(read == held_labels)

    x, y = scaled(features)[:1000], jax.nn.one_hot(labels[:1000], 10)
    hundreds = x.reshape(10, 100, -1), y.reshape(10, 100, 10)
    return jnp.mean(jax.vmap(accuracy)(*hundreds))


def probed(variables):
    encode = functools.partial(model.apply, variables, method='encode')
    return probe(encode(flat), encode(held_images.reshape(-1, 64)))


@functools.partial(jax.jit, static_argnums=0)
def learn(model, rate, variables):
    tx, size = optax.adam(2e-3), 128

    def step(carry, key):
        variables, ema, state = carry
        chosen, first, second, masks = jax.random.split(key, 4)
        image = images[jax.random.choice(chosen, len(images), (size,), replace=False)]
        one, two = (
            views(jax.random.split(key, size), image).reshape(-1, 64)
            for key in (first, second)
        )
        # Each view is the other's target: both directions in one batch.
        one, two = jnp.concatenate([one, two]), jnp.concatenate([two, one])

        def loss(params):
            (loss, spread), new = model.apply(
                variables | {'params': params},
                one,
                two,
                {'params': ema},
                mutable='batch_stats',
                rngs={'dropout': masks},
            )
            return loss, (spread, new)

        (value, (spread, new)), grads = jax.value_and_grad(loss, has_aux=True)(
            variables['params']
        )
        updates, state = tx.update(grads, state)
        params = optax.apply_updates(variables['params'], updates)
        ema = optax.incremental_update(params['online'], ema, rate)
        return ({'params': params, **new}, ema, state), (value, spread)

    def epoch(carry, key):
        carry, seen = jax.lax.scan(step, carry, jax.random.split(key, 11))
        return carry, (*map(jnp.mean, seen), probed(carry[0]))

    params = variables['params']
    start = variables, params['online'], tx.init(params)
    keys = jax.random.split(jax.random.key(6), EPOCHS)
    return jax.lax.scan(epoch, start, keys)


runs = {
    'BYOL': learn(Byol(), 0.02, variables),
    'SimSiam': learn(Byol(), 1.0, variables),
    'no stop': learn(Byol(stop=False), 1.0, variables),
}
random_accuracy = float(jax.jit(probed)(variables))
pixel_accuracy = float(probe(flat, held_images.reshape(-1, 64)))
for name, (_, (loss, spread, accuracy)) in runs.items():
    numbers = f'loss {loss[-1]:.3f}, spread {spread[-1]:.3f}, probe {accuracy[-1]:.3f}'
    print(f'{name:10} {numbers}')
print(f'probe of random weights {random_accuracy:.3f}, of pixels {pixel_accuracy:.3f}')

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
titles = ['Loss', 'Spread of the targets', 'Linear probe, 100 labels']
styles = {'BYOL': (BLUE, '-'), 'SimSiam': (GREEN, '--'), 'no stop': (ORANGE, '-.')}
for number, (ax, title) in enumerate(zip(axes, titles, strict=True)):
    for name, (color, style) in styles.items():
        curve = runs[name][1][number]
        ax.plot(np.arange(1, EPOCHS + 1), curve, color=color, ls=style, label=name)
    ax.set(title=title, xlabel='epoch')
axes[0].legend()
axes[1].set_ylim(0, 1.02)
for level, name in ((random_accuracy, 'random weights'), (pixel_accuracy, 'pixels')):
    axes[2].axhline(level, color=GREY, lw=1, ls=':')
    beside = axes[2].get_yaxis_transform()
    axes[2].text(1.02, level, name, color=GREY, va='center', transform=beside)
axes[2].set_ylabel('held-out accuracy')
plt.show()

# %% [markdown]
# Without the stop the loss is the best of all, and everything is lost: every image has
# the same target, the spread is zero. That is why a wrong stop is dangerous: the curve
# that one looks at is the one that does not show it. The report shows it before any
# step:

# %%
shares = {}
for name, spelled in (('SimSiam', Byol()), ('no stop', Byol(stop=False))):

    def loss(params, model=spelled):
        given = variables | {'params': params}
        rngs = {'dropout': jax.random.key(7)}
        return model.apply(
            given, flat[:8], flat[8:16], rngs=rngs, mutable=['batch_stats']
        )[0][0]

    seen = sg.gradient_flow(loss, variables['params'])
    shares[name] = np.sum([seen.stopped_in(path) for path in seen.parameters], axis=0)
    print(
        f'{name}: {shares[name][0]} of {shares[name][1]} uses of parameters are stopped'
    )

# %% [markdown]
# ## A target network for Q-learning
#
# The same mirror in reinforcement learning. A state is the *picture* of a digit. The
# actions are one up and one down, the reward is 1 for reaching a 9, and a step costs a
# tenth of the value to come. So the value of "up" at digit `d` is 0.9 to the power of
# `8 - d`, which the network has to find from pictures alone.
#
# Here the older weights are a collection of the variables, `'target'`, beside
# `'params'`. `variables='target'` reads it by its name, and a plain `dict` holds
# everything.


# %%
class Agent(nn.Module):
    stop: bool = True

    def setup(self):
        self.q = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(2)])

    def __call__(self, picture, action, reward, next_picture):
        later = nn.mirror(self.q, variables='target') if self.stop else self.q
        return self.error(picture, action, reward, later(next_picture))

    def error(self, picture, action, reward, later):
        """The squared error of values against the reward and what is to come."""
        value = jnp.take_along_axis(self.q(picture), action[:, None], 1)[:, 0]
        to_come = 0.9 * jnp.max(later, axis=1)
        return jnp.mean((value - jnp.where(reward == 1, 1.0, to_come)) ** 2)


class AgentWithBlocks(Agent):
    """The same, written with blocks instead of a mirror."""

    def __call__(self, picture, action, reward, next_picture):
        with nn.substitute('target'), nn.stop_gradient(True):
            later = self.q(next_picture)
        return self.error(picture, action, reward, later)


by_digit = jnp.stack([flat[np.flatnonzero(labels == d)[:120]] for d in range(10)])


def transitions(key, size=128):
    digit, action, *pictures = jax.random.split(key, 4)
    digit = jax.random.randint(digit, (size,), 0, 9)
    action = jax.random.randint(action, (size,), 0, 2)
    after = jnp.clip(digit + 2 * action - 1, 0, 9)
    before, later = (
        by_digit[d, jax.random.randint(key, (size,), 0, by_digit.shape[1])]
        for d, key in zip((digit, after), pictures, strict=True)
    )
    return before, action, (after == 9).astype(jnp.float32), later


held_flat = held_images.reshape(-1, 64)[held_labels < 9]
held_digit = held_labels[held_labels < 9]
true_values = jnp.stack(
    [0.9 ** (9 - jnp.maximum(held_digit - 1, 0)), 0.9 ** (8 - held_digit)], axis=1
)


@functools.partial(jax.jit, static_argnums=0)
def q_learning(agent, params):
    tx = optax.adam(1e-3)

    def step(carry, key):
        variables, state = carry
        batch = transitions(key)

        def loss(params):
            return agent.apply(variables | {'params': params}, *batch)

        grads = jax.grad(loss)(variables['params'])
        updates, state = tx.update(grads, state)
        params = optax.apply_updates(variables['params'], updates)
        return (variables | {'params': params}, state), None

    def a_round(carry, key):
        (variables, state), _ = jax.lax.scan(step, carry, jax.random.split(key, 50))
        variables = variables | {'target': variables['params']}  # from time to time
        values = agent.apply(variables, held_flat, method=lambda agent, x: agent.q(x))
        return (variables, state), values

    start = {'params': params, 'target': params}, tx.init(params)
    keys = jax.random.split(jax.random.key(8), Q_ROUNDS)
    return jax.lax.scan(a_round, start, keys)[1]


batch = transitions(jax.random.key(9))
q_params = jax.jit(Agent().init)(jax.random.key(10), *batch)['params']
values = {
    'target network': q_learning(Agent(), q_params),
    'no stop': q_learning(Agent(stop=False), q_params),
}
q_errors = {
    name: jnp.sqrt(jnp.mean((value - true_values) ** 2, axis=(1, 2)))
    for name, value in values.items()
}
up = jnp.mean(values['target network'][-1].argmax(1) == 1)
print(f'"up" is chosen for {float(up):.3f} of the held-out pictures')

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
steps = 50 * np.arange(1, Q_ROUNDS + 1)
for (name, curve), color, style in zip(
    q_errors.items(), (BLUE, ORANGE), ('-', '-.'), strict=True
):
    left.plot(steps, curve, color=color, ls=style, label=name)
left.set(title='Error of the values, held-out pictures', xlabel='step', ylabel='RMS')
left.set_ylim(0)
left.legend()

found = values['target network'][-1][:, 1]
jitter = np.random.default_rng(0).uniform(-0.2, 0.2, len(held_digit))
right.scatter(held_digit + jitter, found, s=8, color=BLUE, alpha=0.5, label='pictures')
right.plot(np.arange(9), 0.9 ** (8 - np.arange(9.0)), color=ORANGE, label='the truth')
right.set(title='Value of "up"', xlabel='digit in the picture', xticks=range(9))
right.legend()
plt.show()

# %% [markdown]
# Without the stop both sides of the equation move, values meet what is to come
# somewhere in the middle, and the error hardly falls.
#
# ## What was claimed


# %%
def equal(one, other):
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


# A mirror: the same values, fresh masks if wanted, no second update of statistics.
assert equal(looked['same'], looked['online'])
assert not equal(looked['fresh'], looked['online'])
assert equal(looked['online'], alone['online'])
assert equal(looked_state, alone_state)

assert shares['SimSiam'].tolist() == [12, 30]
assert shares['no stop'].tolist() == [0, 30]

# It is the program by hand, to the last bit; nothing trains the teacher.
assert equal(results['with_mirror'], results['by_hand'])
of_params, of_ema = results['with_mirror'][1]
assert not any(np.any(leaf) for leaf in jax.tree.leaves(of_ema))
assert np.any(of_params['online']['hidden']['kernel'])

# A target that is a collection gets no gradient either.
stored = {'params': q_params, 'target': jax.tree.map(lambda p: 0.5 * p, q_params)}
of_stored, of_blocks = (
    jax.jit(jax.grad(agent.apply))(stored, *batch)
    for agent in (Agent(), AgentWithBlocks())
)
assert equal(of_stored, of_blocks)
assert not any(np.any(leaf) for leaf in jax.tree.leaves(of_stored['target']))
assert all(np.any(leaf) for leaf in jax.tree.leaves(of_stored['params']))

# Learning needs the stop. Without it the loss is best and the targets are all the same.
ends = {name: [float(c[-1]) for c in curves] for name, (_, curves) in runs.items()}
if FULL:
    assert ends['BYOL'][2] > random_accuracy + 0.05
    assert ends['no stop'][0] < min(ends['BYOL'][0], ends['SimSiam'][0])
    assert ends['no stop'][1] < 0.1 < 0.5 < ends['BYOL'][1]
    assert ends['no stop'][2] < random_accuracy
    assert q_errors['target network'][-1] < 0.1 < q_errors['no stop'][-1]
    assert up > 0.9
assert all(np.isfinite(end) for numbers in ends.values() for end in numbers)

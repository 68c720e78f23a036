# %% [markdown]
# # Mirrors: learn from an average of yourself
#
# A mirror reads the parameters of a module a second time, without a gradient:
#
# ```python
# target = nn.mirror(self.online)(x)                    # the same weights, stopped
# target = nn.mirror(self.online, variables=teacher)(x)  # other weights in their place
# ```
#
# BYOL (Grill et al., 2020) needs it: a network predicts what an average of its own past
# weights computes from another view of an image. The usual code has a second tree of
# parameters, a second `apply`, and extra care for batch statistics and dropout masks. A
# mirror is one line.
#
# This notebook trains BYOL on handwritten digits, checks the mirror against that code
# by hand, and shows what happens without the stop.

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from shared import BLUE, FULL, GREEN, GREY, ORANGE, digits, equal

import flax_sg as sg
from flax_sg import linen as nn

EPOCHS, SEEDS = (60, 5) if FULL else (2, 2)

images, labels = digits()
held_images, held_labels = images[1408:], labels[1408:]
images, labels = jnp.asarray(images[:1408]), labels[:1408]

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

    def setup(self):
        self.online = Online()
        self.predictor = two_layers()

    def __call__(self, one, two, teacher=None):
        """The loss of guessing one view from the other, and how far targets spread."""
        target = self.online
        if self.stop:
            target = nn.mirror(self.online, variables=teacher)
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
# The mirror has no parameters of its own. The tree has an encoder and a predictor, and
# the teacher has the same tree as the encoder.
#
# ## Batch statistics and dropout masks
#
# A second call in one step can change both by accident. A mirror changes neither:
#
# - With `state='hold'`, the default, only the module itself updates batch statistics.
# - The n-th call of a mirror draws the dropout masks of the n-th call of the module,
#   and does not change them.


# %%
class Looks(Byol):
    def __call__(self, x):
        return {
            'online': self.online(x, train=True),
            'mirror': nn.mirror(self.online)(x, train=True),
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
# Two trees, two applies, one stop, and the batch statistics of the second apply are
# dropped. Loss, gradients and statistics are equal to the last bit, dropout included.
# The report says that nothing trains the teacher.


# %%
def with_mirror(params, ema, one, two, key):
    loss, new = Byol().apply(
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
# - **SimSiam** (Chen and He, 2021): the mirror reads the weights themselves.
# - **no stop**: the target is the module itself, so the loss also trains the target to
#   be easy to predict.
#
# A linear probe measures what was learned: ridge regression on the encoder's 16 numbers
# with 100 labels, accuracy on held-out digits, mean over ten different sets of 100
# labels. No label is used before that. The same probe on the 64 raw pixels is the
# number to beat. Every way is trained with five seeds.


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
def learn(model, rate, starts, keys):
    """Trains each seed in turn."""
    return jax.lax.map(lambda seed: learn_one(model, rate, *seed), (starts, keys))


def learn_one(model, rate, variables, key):
    """Trains one seed, and probes it after each epoch."""
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
    _, curves = jax.lax.scan(epoch, start, jax.random.split(key, EPOCHS))
    return curves


@jax.vmap
def initial(key):
    params, dropout = jax.random.split(key)
    return model.init({'params': params, 'dropout': dropout}, flat[:64], flat[:64])


starts = jax.jit(initial)(jax.random.split(jax.random.key(6), SEEDS))
seeds = jax.random.split(jax.random.key(7), SEEDS)
runs = {
    'BYOL': learn(Byol(), 0.02, starts, seeds),
    'SimSiam': learn(Byol(), 1.0, starts, seeds),
    'no stop': learn(Byol(stop=False), 1.0, starts, seeds),
}
# The last epoch of each seed: loss, spread of the targets, accuracy of the probe.
ends = {
    name: np.stack([curve[:, -1] for curve in curves]) for name, curves in runs.items()
}
random_accuracy = float(jnp.mean(jax.jit(jax.vmap(probed))(starts)))
pixel_accuracy = float(probe(flat, held_images.reshape(-1, 64)))
print(f'{"":10} {"loss":>8} {"spread":>8} {"probe":>8}   seeds')
for name, (losses, spreads, found) in ends.items():
    means = f'{losses.mean():8.3f} {spreads.mean():8.3f} {found.mean():8.3f}'
    print(f'{name:10} {means}   {found.min():.3f} to {found.max():.3f}')
ahead = ends['BYOL'][2] - pixel_accuracy
print(f'probe of random weights {random_accuracy:.3f}, of pixels {pixel_accuracy:.3f}')
print(f'BYOL is ahead of pixels by {ahead.mean():.3f}, from {ahead.min():.3f} up')

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
titles = ['Loss', 'Spread of the targets', 'Linear probe, 100 labels']
styles = {'BYOL': (BLUE, '-'), 'SimSiam': (GREEN, '--'), 'no stop': (ORANGE, '-.')}
epochs = np.arange(1, EPOCHS + 1)
for number, (ax, title) in enumerate(zip(axes, titles, strict=True)):
    for name, (color, style) in styles.items():
        curves = runs[name][number]
        ax.plot(epochs, curves.mean(0), color=color, ls=style, label=name)
        low, high = curves.min(0), curves.max(0)
        ax.fill_between(epochs, low, high, color=color, alpha=0.15, lw=0)
    ax.set(title=title, xlabel='epoch')
axes[0].legend(title='mean and range of seeds')
axes[1].set_ylim(0, 1.02)
for level, name in ((random_accuracy, 'random weights'), (pixel_accuracy, 'pixels')):
    axes[2].axhline(level, color=GREY, lw=1, ls=':')
    beside = axes[2].get_yaxis_transform()
    axes[2].text(1.02, level, name, color=GREY, va='center', transform=beside)
axes[2].set_ylabel('held-out accuracy')
plt.show()

# %% [markdown]
# BYOL beats the raw pixels by 0.011 only, on average. Digits of 8 x 8 pixels are easy
# for a linear classifier, and this notebook is about the stop, not about the gain.
#
# Without the stop the loss is the best of all, and nothing was learned: every image has
# the same target, and the spread is zero. A loss curve cannot show this. The report
# shows it before the first step: the spread is that of the targets, and nothing may
# train the targets.

# %%
reports = {}
for name, spelled in (('SimSiam', Byol()), ('no stop', Byol(stop=False))):

    def loss_and_spread(params, model=spelled):
        given = variables | {'params': params}
        rngs = {'dropout': jax.random.key(7)}
        (loss, spread), _ = model.apply(
            given, flat[:8], flat[8:16], rngs=rngs, mutable=['batch_stats']
        )
        return {'loss': loss, 'spread': spread}

    reports[name] = sg.gradient_flow(loss_and_spread, variables['params'])
    table = reports[name].table(depth=1).split('\n\n')[0]
    print(f'{name}\n{table}\n')

# %% [markdown]
# ## What was claimed

# %%
# A mirror: the same values and masks, no second update of statistics.
assert equal(looked['mirror'], looked['online'])
assert equal(looked['online'], alone['online'])
assert equal(looked_state, alone_state)

assert reports['SimSiam'].by_module(1)['online'] == ('flows', 'stopped')
assert reports['no stop'].by_module(1)['online'] == ('flows', 'flows')

# It is the program by hand, to the last bit; nothing trains the teacher.
assert equal(results['with_mirror'], results['by_hand'])
of_params, of_ema = results['with_mirror'][1]
assert not any(np.any(leaf) for leaf in jax.tree.leaves(of_ema))
assert np.any(of_params['online']['hidden']['kernel'])
states = flow.by_module(depth=2)
assert {group for group in states if states[group] == ('flows',)} == {
    'student/online',
    'student/predictor',
}

# Learning needs the stop. Without it the loss is best and the targets are all the same.
assert all(np.isfinite(end).all() for end in ends.values())
if FULL:
    losses, spreads, found = ends['no stop']
    assert losses.max() < min(ends['BYOL'][0].min(), ends['SimSiam'][0].min())
    assert spreads.max() < 0.1 < 0.5 < ends['BYOL'][1].min()
    assert found.max() < random_accuracy
    assert ends['BYOL'][2].min() > random_accuracy + 0.05
    # It is ahead of raw pixels, and not by much.
    assert 0 < ahead.mean() < 0.03

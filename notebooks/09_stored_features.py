# %% [markdown]
# # Stored features: a frozen backbone runs once
#
# A frozen backbone has no gradient, and yet every step of every epoch computes its
# features again. `sg.precompute` takes a loss apart: `early` computes once what depends
# on nothing that is trained, and `late` is the rest.
#
# Here a convolutional network learns to read the digits 0 to 4. Frozen, it serves a new
# head, which learns the digits 5 to 9. Two trainings see the same batches in the same
# order: one computes the whole loss, the other reads stored features.

# %%
import functools
import tempfile
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib import ticker
from shared import BLUE, FULL, ORANGE, digits

import flax_sg as sg
from flax_sg import linen as nn

FIRST, EPOCHS, BATCH = (8, 30, 64) if FULL else (1, 2, 64)

# %% [markdown]
# ## The data
#
# One half of the classes trains the backbone. Of the other half, a fifth is held out.

# %%
images, labels = digits()
old = images[labels < 5], labels[labels < 5]
new = images[labels >= 5], labels[labels >= 5] - 5
held = len(new[0]) // 5
train, test = [x[held:] for x in new], [x[:held] for x in new]
{'0 to 4': len(old[0]), '5 to 9': len(train[0]), 'held out': held}


# %% [markdown]
# ## The model
#
# `state='eval'` makes the backbone normalize by its running averages. So the features
# of an image do not depend on the rest of its batch.


# %%
class Backbone(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x[..., None]
        for channels in (64, 128, 128):
            x = nn.Conv(channels, (3, 3))(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        x = nn.max_pool(x, (4, 4), (4, 4))
        return x.reshape(len(x), -1)


class Reader(nn.Module):
    frozen: bool = False

    @nn.compact
    def __call__(self, x):
        backbone = Backbone(name='backbone')
        if self.frozen:
            backbone = nn.Frozen(backbone, state='eval')
        x = nn.relu(nn.Dense(64, name='hidden')(backbone(x)))
        return nn.Dense(5, name='head')(x)


def entropy(logits, labels):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def batches(count, rng):
    """Rows of the examples of an epoch, in an order of its own."""
    order = rng.permutation(count)[: count // BATCH * BATCH]
    return jnp.asarray(order.reshape(-1, BATCH))


# %% [markdown]
# ## The backbone learns 0 to 4

# %%
plain = Reader()
variables = plain.init(jax.random.key(0), old[0][:BATCH])
tx = optax.adam(1e-3)


@jax.jit
def pretrain(variables, state, x, labels):
    def loss(params):
        given = {**variables, 'params': params}
        logits, new = plain.apply(given, x, mutable='batch_stats')
        return entropy(logits, labels), new

    grads, new = jax.grad(loss, has_aux=True)(variables['params'])
    updates, state = tx.update(grads, state, variables['params'])
    params = optax.apply_updates(variables['params'], updates)
    return {'params': params, **new}, state


state, rng = tx.init(variables['params']), np.random.default_rng(0)
for _ in range(FIRST):
    for rows in batches(len(old[0]), rng):
        variables, state = pretrain(variables, state, old[0][rows], old[1][rows])

# %% [markdown]
# ## The loss, whole and in two
#
# `sg.live` finds out that the loss trains the two layers of the head. `examples=True`
# asks for what is kept example by example, so that epochs can shuffle it. Nothing is
# computed yet: shapes are enough.

# %%
tuned = Reader(frozen=True)
params = tuned.init(jax.random.key(1), train[0][:BATCH])['params']
params['backbone'] = variables['params']['backbone']
stats = {'backbone': variables['batch_stats']['backbone']}


def loss(params, x, labels):
    return entropy(tuned.apply({'params': params, 'batch_stats': stats}, x), labels)


batch = [jax.ShapeDtypeStruct((BATCH, *x.shape[1:]), x.dtype) for x in train]
live = sg.live(loss, params, *batch)
ahead = sg.precompute(loss, params, *batch, wrt=live, examples=True)
live

# %% [markdown]
# ## The store
#
# `sg.store` runs `early` on all images, batch by batch, and keeps a row for each of
# them in files. If the program is stopped, the next run goes on. Rows are read by any
# indices; here all of them fit in memory.


# %%
early = jax.jit(ahead.early)


def stored(params, data):
    """The rows of all examples, from files of their own."""
    fun = functools.partial(early, params)
    return sg.store(fun, tuple(data), tempfile.mkdtemp(), batch_size=BATCH)


features = stored(params, train)
features, {leaf.dtype.name: leaf.shape for leaf in features[[7, 0, 3]]}

# %% [markdown]
# ## Two trainings
#
# One reads images and differentiates `loss`. The other reads what was stored of the
# images, and differentiates `late`. `late` needs no weights of the backbone:
# `sg.ABSENT` stands for all of them.


# %%
tx = sg.freeze(optax.adam(1e-3), ~live)


def step_of(fun):
    @jax.jit
    def step(params, state, data, rows):
        data = jax.tree.map(lambda leaf: leaf[rows], data)
        value, grads = sg.value_and_grad(fun, wrt=live)(params, data)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def fit(step, params, data):
    """The parameters; and for each epoch its mean loss, and when it ended."""
    state, rng, curve = tx.init(params), np.random.default_rng(1), []
    for _ in range(EPOCHS):
        values = []
        for rows in batches(len(train[0]), rng):
            params, state, value = step(params, state, data, rows)
            values.append(value)
        curve.append((float(np.mean(values)), time.perf_counter()))
    return params, np.array(curve)


def whole(params, data):
    return loss(params, *data)


# %% [markdown]
# The programs are compiled before the clock starts. The time of `early` and of its
# files counts.

# %%
light = {**params, 'backbone': sg.ABSENT}
trainings = {
    'whole loss': (step_of(whole), params, lambda: train),
    'precompute': (step_of(ahead.late), light, lambda: stored(params, train)[:]),
}
curves, ends = {}, {}
for name, (step, begin, data_of) in trainings.items():
    step(begin, tx.init(begin), data_of(), jnp.arange(BATCH))
    start = time.perf_counter()
    end, curve = fit(step, begin, data_of())
    ends[name] = {**end, 'backbone': params['backbone']}
    curves[name] = curve - [0.0, start]


@jax.jit
def hits(params, x, labels):
    given = {'params': params, 'batch_stats': stats}
    return jnp.mean(tuned.apply(given, x).argmax(-1) == labels)


{name: round(float(hits(end, *test)), 3) for name, end in ends.items()}

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
styles = {'whole loss': (ORANGE, '-', 4.0), 'precompute': (BLUE, '-', 1.5)}
for name, (colour, line, width) in styles.items():
    values, seconds = curves[name].T
    look = {'color': colour, 'ls': line, 'lw': width, 'label': name}
    left.plot(range(1, EPOCHS + 1), values, **look)
    right.plot(seconds, values, **look)
left.set(title='loss by epoch', xlabel='epoch', yscale='log')
right.set(title='loss by time', xlabel='seconds', xscale='log')
right.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
right.xaxis.set_major_formatter('{x:g}')
right.xaxis.set_minor_formatter('')
right.legend()
plt.show()

# %%
total = {name: curve[-1, 1] for name, curve in curves.items()}
ratio = total['precompute'] / total['whole loss']
print(
    f'{EPOCHS} epochs take {total["whole loss"]:.1f} s with the whole loss, and '
    f'{total["precompute"]:.1f} s with precompute: {ratio:.3f} of the time.'
)

# %% [markdown]
# The losses of all epochs agree within rounding, and so do the heads. What is left is
# the time of the head, of its optimizer, and of starting programs.
#
# ## What is kept
#
# The report lists the features of a batch and its labels. If something stood in the
# way, such as dropout in the backbone or a key for random crops, it would name the line
# where that enters.

# %%
print(ahead)

# %%
assert {len(leaf) for leaf in features[:]} == {len(train[0])}
whole_curve, late_curve = (curves[name][:, 0] for name in trainings)
np.testing.assert_allclose(whole_curve, late_curve, rtol=1e-2)
if FULL:
    assert all(hits(end, *test) > 0.9 for end in ends.values())
    assert ratio < 0.5

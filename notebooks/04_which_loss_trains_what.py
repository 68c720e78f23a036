# %% [markdown]
# # Which loss trains what
#
# A model with several losses has a table: losses across, parts of the model down, and
# in each cell *trains* or *does not train*. Nobody writes that table down. It follows
# from every `stop_gradient` in the code. A stop that is forgotten, inverted or one line
# too low changes a cell of the table. No shape changes, nothing raises, and the losses
# fall.
#
# This notebook has a model of handwritten digits with four losses, and three wrong
# edits of one line. We train all four models, look at their loss curves, and then
# compute the table with `sg.gradient_flow`.

# %%
from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from shared import BLUE, FULL, GREEN, ORANGE

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing
from flax_sg.demo import data

# Steps of training: fewer where the notebook is only checked.
STEPS = 600 if FULL else 60
COLORS = '#000000', BLUE, ORANGE, GREEN

# Scikit-learn's 8 x 8 digits: nothing is downloaded.
train, held_out = data.load()

# %% [markdown]
# ## A discrete code for digits, and a reader of it
#
# A VQ-VAE (van den Oord et al., 2017): an **encoder** makes eight short vectors of an
# image, each is replaced by the nearest of 32 in a **codebook**, a **decoder** draws
# the image again. Beside it a linear **reader** tells which digit it was. The reader is
# a *probe*: we want to know how much of the label is in the code, so it must not teach
# the encoder anything.
#
# | loss | trains | and why not more |
# |---|---|---|
# | reconstruction | encoder, decoder | the codebook follows the encoder only |
# | codebook | codebook | its vectors move to what the encoder says |
# | commitment | encoder | a pull back, four times weaker |
# | reading | reader | a probe that teaches is no probe |
#
# A block stops *parameters*, by path. The stop of an *activation*, the straight-through
# line, is JAX's own `stop_gradient`.


# %%
class Codes(nn.Module):
    parts: int = 8
    codes: int = 32
    width: int = 4

    def setup(self):
        code = self.parts * self.width
        self.encoder = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(code)])
        self.codebook = nn.Embed(
            self.codes, self.width, embedding_init=nn.initializers.normal(1.0)
        )
        self.decoder = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64)])
        self.reader = nn.Dense(10)

    def encode(self, x):
        return self.encoder(x).reshape(-1, self.parts, self.width)

    def nearest(self, x):
        apart = self.encode(x)[:, :, None] - self.codebook.embedding
        return jnp.argmin(jnp.sum(apart**2, axis=-1), axis=-1)

    def straight_through(self, vector, entry):
        # The value of the entry; the gradient goes to the vector, as if it were that.
        return vector + jax.lax.stop_gradient(entry - vector)

    def code(self, x):
        entry = self.codebook(self.nearest(x))
        return self.straight_through(self.encode(x), entry).reshape(len(x), -1)

    def distance(self, x):
        apart = self.encode(x) - self.codebook(self.nearest(x))
        return jnp.mean(jnp.sum(apart**2, axis=(1, 2)))

    def reconstruct(self, x):
        return self.decoder(self.code(x))

    def read(self, x):
        return self.reader(self.code(x))

    def codebook_loss(self, x):
        with nn.stop_gradient('encoder/**'):
            return self.distance(x)

    def commitment_loss(self, x):
        with nn.stop_gradient('codebook/**'):
            return 0.25 * self.distance(x)

    def reading_loss(self, x, labels):
        with nn.train_only('reader/**'):
            logits = self.read(x)
        return jnp.mean(nn.log_softmax(logits)[jnp.arange(len(x)), labels] * -1)

    def __call__(self, x, labels):
        return {
            'reconstruction': jnp.mean(jnp.sum((self.reconstruct(x) - x) ** 2, -1)),
            'codebook': self.codebook_loss(x),
            'commitment': self.commitment_loss(x),
            'reading': self.reading_loss(x, labels),
        }


def losses(model, params, x, labels):
    return model.apply({'params': params}, x, labels)


# %% [markdown]
# ## The table
#
# `sg.gradient_flow` takes the function and its arguments, or only their shapes. It
# traces the function once and computes the table from the traced program. Nothing is
# compiled and no data is needed. A parameter that it calls *stopped* has a gradient of
# exactly zero for every input and every weight: that is proven, not measured.

# %%
model = Codes()
x, labels = held_out.images, held_out.labels
params = jax.eval_shape(model.init, jax.random.key(0), x, labels)['params']
flow = sg.gradient_flow(partial(losses, model), params, x, labels)
print(flow.table(depth=1))

# %% [markdown]
# That is the table that we wanted. Without `depth=1` it has a line for each module, and
# `flow.plot(file)` makes a picture. The report also knows the way from a parameter to a
# loss. The codebook is used by all four losses, and trained by one:

# %%
for loss in flow.outputs:
    why = flow.why(loss, 'codebook/embedding')
    print(f'{loss}: {why.by or "trains"}')
print(flow.why('commitment', 'codebook/embedding'))

# %% [markdown]
# ## Three edits
#
# Each edit is one line of a diff. Read them as in a review.


# %%
class Leak(Codes):
    """Somebody moves the loss into a helper, and the block stays behind."""

    def reading_loss(self, x, labels):
        logits = self.read(x)
        return jnp.mean(nn.log_softmax(logits)[jnp.arange(len(x)), labels] * -1)


class Swapped(Codes):
    """Somebody reads `where` as that what is trained."""

    def codebook_loss(self, x):
        with nn.stop_gradient('codebook/**'):
            return self.distance(x)

    def commitment_loss(self, x):
        with nn.stop_gradient('encoder/**'):
            return 0.25 * self.distance(x)


class Misplaced(Codes):
    """Somebody closes a bracket one place too late."""

    def straight_through(self, vector, entry):
        return jax.lax.stop_gradient(vector + (entry - vector))


MODELS = {
    'as meant': Codes(),
    'forgotten stop': Leak(),
    'wrong polarity': Swapped(),
    'misplaced detach': Misplaced(),
}


# %% [markdown]
# All start from the same weights and see the same batches.


# %%
@partial(jax.jit, static_argnums=0)
def fit(model, params, images, labels):
    tx = optax.adam(3e-3)

    def total(params, batch):
        found = losses(model, params, images[batch], labels[batch])
        return sum(found.values()), found

    def step(state, batch):
        params, moments = state
        grads, found = jax.grad(total, has_aux=True)(params, batch)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), found

    batches = jax.random.randint(jax.random.key(1), (STEPS, 128), 0, len(images))
    (params, _), curves = jax.lax.scan(step, (params, tx.init(params)), batches)
    return params, curves


start = jax.jit(model.init)(jax.random.key(0), x, labels)['params']
runs = {
    name: fit(model, start, train.images, train.labels)
    for name, model in MODELS.items()
}

# %%
figure, panels = plt.subplots(1, 4, figsize=(12, 3.2), sharex=True)
for axes, loss in zip(panels, flow.outputs, strict=True):
    for (name, (_, curves)), color in zip(runs.items(), COLORS, strict=True):
        smooth = np.convolve(curves[loss], np.ones(20) / 20, 'valid')
        axes.plot(smooth, color=color, label=name, lw=1.6)
    axes.set(title=loss, xlabel='step', yscale='log')
panels[0].set_ylabel('loss (mean of 20 batches)')
figure.legend(
    *panels[0].get_legend_handles_labels(), loc='outside upper center', ncols=4
)
plt.show()

# %% [markdown]
# Which run is broken? Your project has no black curves, so look again without them:
#
# - **forgotten stop** (blue) looks best. Its probe reads better than it should, because
#   the encoder now learns from labels. Reconstruction is as good.
# - **wrong polarity** (orange) has the *same losses* at the same weights. Its codebook
#   and commitment losses are three times lower at the end.
# - **misplaced detach** (green) has the best two of four curves. The other two settle
#   early, as those of a model that is too small would.
#
# ## The tables
#
# Cells that are not as in the first table are listed below each.

# %%
tables = {
    name: sg.gradient_flow(partial(losses, model), params, x, labels)
    for name, model in MODELS.items()
}


def cells(flow):
    """For each part and loss what the table says."""
    return {
        (module, output): status
        for module, row in flow.by_module(depth=1).items()
        for output, status in zip(flow.outputs, row, strict=True)
    }


for name, table in tables.items():
    meant, found = cells(flow), cells(table)
    wrong = [
        f'{part} for {loss}'
        for part, loss in meant
        if meant[part, loss] != found[part, loss]
    ]
    print(f'{name}\n{table.table(depth=1).split(chr(10) * 2)[0]}')
    print(f'wrong: {", ".join(wrong) or "none"}\n')

# %% [markdown]
# One cell, four cells and one cell are wrong. Names, shapes and all values at the same
# weights are equal to those of the right model, so no test of values can find the
# fault. The first point of each curve:

# %%
first = {
    name: jax.tree.map(lambda c: c[0], curves) for name, (_, curves) in runs.items()
}
for name, found in first.items():
    print(f'{name:16}', *(f'{loss} {value:.6f}' for loss, value in found.items()))

# %% [markdown]
# ## What each of them costs
#
# The faults show later, in things that no loss measures: how many entries of the
# codebook are used, and how the decoder draws digits that it has never seen.

# %%
pictures = {'original': x}
for name, model in MODELS.items():
    apply = partial(model.apply, {'params': runs[name][0]}, x)
    pictures[name] = apply(method='reconstruct')
    used = len(np.unique(apply(method='nearest')))
    right = np.mean(np.argmax(apply(method='read'), axis=-1) == labels)
    error = np.mean(np.sum((pictures[name] - x) ** 2, axis=-1))
    print(f'{name:16} {used:2} of 32 codes, error {error:.2f}, read {right:.1%}')

kinds = [int(np.argmax(labels == kind)) for kind in range(10)]
figure, grid = plt.subplots(len(pictures), 10, figsize=(7, 3.7))
for row, (name, drawn) in zip(grid, pictures.items(), strict=True):
    for axes, index in zip(row, kinds, strict=True):
        axes.imshow(drawn[index].reshape(8, 8), cmap='gray_r', vmin=0, vmax=1)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    row[0].set_ylabel(name, rotation=0, ha='right', va='center')
plt.show()

# %% [markdown]
# With the wrong polarity the encoder is pulled to the codebook four times harder than
# was meant, and uses a third of its entries. With the misplaced detach no loss trains
# the encoder, and all digits look alike.
#
# With the forgotten stop nothing looks worse, but the probe now trains the encoder. To
# see it, train on *shuffled labels*. A probe must not change the model that it probes,
# so the right encoder comes out the same, to the last bit.

# %%
dealt = np.random.default_rng(0).permutation(train.labels)


def encoder_apart(name):
    """How far an encoder is from the one that was trained with the true labels."""
    other, _ = fit(MODELS[name], start, train.images, dealt)
    apart = jax.tree.map(jnp.subtract, runs[name][0]['encoder'], other['encoder'])
    return max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(apart))


apart = {name: encoder_apart(name) for name in ('as meant', 'forgotten stop')}
apart

# %% [markdown]
# The word *stopped* in the column *reading* said this before anything was trained.
#
# ## Why not measure gradients?
#
# A measured zero proves nothing, in either direction.
#
# **A zero without a stop.** Here the biases of the encoder are so low that every `relu`
# is off. For this batch the gradient of the first layer is zero, and a test of numbers
# calls it frozen. The report calls it trained, and is right: brighter images give it a
# gradient.

# %%
dead = jax.tree.map(lambda leaf: leaf, start)
dead['encoder']['layers_0']['bias'] -= 10.0


def reconstruction(params, x):
    return losses(Codes(), params, x, labels)['reconstruction']


@jax.jit
def of_first_layer(params, x):
    return jax.grad(reconstruction)(params, x)['encoder']['layers_0']['kernel']


def moved(params, x):
    return bool(of_first_layer(params, x).any())


dead_report = sg.gradient_flow(reconstruction, dead, x)
print('the gradient for these images: ', 'not zero' if moved(dead, x) else 'zero')
print('the gradient for brighter ones:', 'not zero' if moved(dead, 50 * x) else 'zero')
status = dead_report.status_of('output', 'encoder/layers_0/kernel')
print('the report:                    ', status)

# %% [markdown]
# **A stop that nobody wrote.** The derivative of `argmax`, `round`, `sign` and
# comparisons is zero in JAX, and no error says so. Somebody finds the codebook slow and
# rounds instead, or trains on the accuracy itself. Both run. The report shows that they
# train nothing.


# %%
class Rounded(Codes):
    """Whole numbers instead of a codebook."""

    def code(self, x):
        return jnp.round(self.encode(x)).reshape(len(x), -1)


def rounded(params, x, labels):
    apply = partial(Rounded().apply, {'params': params}, x)
    logits = apply(method='read')
    return {
        'reconstruction': jnp.mean((apply(method='reconstruct') - x) ** 2),
        'accuracy': jnp.mean(jnp.argmax(logits, axis=-1) == labels),
    }


rounded_report = sg.gradient_flow(rounded, params, x, labels)
print(rounded_report.table(depth=1))
print()
print(rounded_report.why('reconstruction', 'encoder/layers_2/kernel'))

# %% [markdown]
# ## Keep it
#
# Turn the right table into a test. `flax_sg.testing` takes a report, or a function with
# its arguments, and any filter. Here is the table at the top as a test:

# %%
MEANT = {
    'reconstruction': 'encoder/** decoder/**',
    'codebook': 'codebook/**',
    'commitment': 'encoder/**',
    'reading': 'reader/**',
}


def check_who_trains_whom(model):
    flow = sg.gradient_flow(partial(losses, model), params, x, labels)
    for loss, where in MEANT.items():
        testing.assert_trains_only(flow, where.split(), output=loss)


check_who_trains_whom(Codes())

# %% [markdown]
# A broken cell is named, with the line where the gradient flows or stops:

# %%
broken = {}
for name, model in MODELS.items():
    try:
        check_who_trains_whom(model)
    except AssertionError as error:
        broken[name] = str(error)
        print(f'{name}: {error}', end='\n\n')

# %% [markdown]
# ## From the table to the training step
#
# Suppose that the codes are learned, and from now on only the reader is trained.
# `sg.live` returns the filter of the parameters that a loss trains. Give it to the
# gradient call and to the optimizer: all other parameters have no backward pass, no
# gradient and no moments.


# %%
def reading(params, x, labels):
    return losses(Codes(), params, x, labels)['reading']


live = sg.live(reading, params, x, labels)
live

# %%
learned = runs['as meant'][0]
tx = sg.freeze(optax.adamw(1e-2, weight_decay=0.1), ~live)


@jax.jit
def step(params, state, x, labels):
    value, grads = sg.value_and_grad(reading, wrt=live)(params, x, labels)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


tuned, state, values = learned, tx.init(learned), []
for _ in range(50):
    tuned, state, value = step(tuned, state, train.images, train.labels)
    values.append(float(value))

changed = {
    part: any(map(jnp.any, jax.tree.leaves(jax.tree.map(jnp.not_equal, *trees))))
    for part, trees in ((part, (learned[part], tuned[part])) for part in learned)
}
print(f'reading loss {values[0]:.3f} -> {values[-1]:.3f}, on all digits to learn from')
moments = jax.tree.map(jnp.shape, state[0].mu)
print('moments of the codebook:', moments['codebook'])
print('moments of the reader:  ', moments['reader'])
print('what has changed:       ', [part for part in changed if changed[part]])

# %% [markdown]
# `sg.tabulate` says which modules a call trains: here the reader alone.

# %%
print(sg.tabulate(Codes(), x, labels, method='reading_loss'))

# %% [markdown]
# ## What was claimed
#
# Sizes differ between a full run and a short one. The tables do not.

# %%
as_meant = cells(flow)
different = {
    name: {key for key, status in cells(table).items() if status != as_meant[key]}
    for name, table in tables.items()
}
assert different == {
    'as meant': set(),
    'forgotten stop': {('encoder', 'reading')},
    'wrong polarity': {
        (part, loss)
        for part in ('codebook', 'encoder')
        for loss in ('codebook', 'commitment')
    },
    'misplaced detach': {('encoder', 'reconstruction')},
}
# At the same weights no loss knows.
for found in first.values():
    for loss, value in found.items():
        np.testing.assert_allclose(value, first['as meant'][loss], rtol=1e-6)
# A probe leaves no trace in what it probes, whatever it is told; a leak does.
assert apart['as meant'] == 0.0 < apart['forgotten stop']
# Dead units are trained, rounded ones are not.
assert not moved(dead, x) and moved(dead, 50 * x)
assert status == 'flows'
assert rounded_report.status_of('accuracy', 'reader/kernel') == 'stopped'
testing.assert_stopped(rounded_report, 'encoder/**')
# Tests find all of it, and nothing else.
assert broken.keys() == MODELS.keys() - {'as meant'}
# Only the reader was trained on: no decay, no momentum, no moments for the rest.
assert [part for part in changed if changed[part]] == ['reader']
of_moments = sg.partition(state[0].mu, 'reader/**')
assert [len(jax.tree.leaves(tree)) for tree in of_moments] == [2, 0]
assert values[-1] < values[0]

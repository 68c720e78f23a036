# %% [markdown]
# # Three losses, one pass, and each trains its own part
#
# [google/flax#1857](https://github.com/google/flax/issues/1857) asks for something that
# sounds easy. A model has three parts and three losses. Each loss depends on parts that
# it must *not* train. The author of the issue made four copies of the weights, with
# gradients stopped in different places.
#
# Here is a small model with that problem, on handwritten digits:
#
# ```
# image --code--> code --explanation--> drawing --gln--> label
# ```
#
# | loss | what it wants | what it trains |
# |---|---|---|
# | `gln` | the label, read in the drawing | `gln` |
# | `code` | the drawing of an image, from a noisy one | `code`, through `explanation` |
# | `explanation` | the drawing of an image | `explanation` |
#
# Labels shape neither codes nor drawings, and `explanation` never learns from noise.
#
# You will see three common ways to write this, and what each does wrong in silence. A
# report finds it before anything runs. The version with blocks is equal to the one with
# copies, to the last bit.

# %%
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from shared import BLUE, FULL, GREEN, GREY, ORANGE, digits, equal

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing

EPOCHS = 60 if FULL else 2


# %% [markdown]
# 1797 images of 8 x 8 pixels come with scikit-learn. A fifth is held out.

# %%
images, labels = digits()
images, labels = jnp.asarray(images.reshape(-1, 64)), jnp.asarray(labels)
images, held_images = images[:1408], images[1408:]
labels, held_labels = labels[:1408], labels[1408:]

# %% [markdown]
# ## The model, and the losses with nothing stopped
#
# The model is ordinary linen: `flax_sg.linen` is all of `flax.linen` and a few names
# more.


# %%
class Outcome(NamedTuple):
    code: jax.Array
    drawing: jax.Array
    logits: jax.Array


class Model(nn.Module):
    def setup(self):
        def two_layers(features):
            return nn.Sequential([nn.Dense(96), nn.tanh, nn.Dense(features)])

        self.code = two_layers(12)
        self.explanation = two_layers(64)
        self.gln = two_layers(10)

    def __call__(self, image):
        code = self.code(image)
        drawing = self.explanation(code)
        return Outcome(code, drawing, self.gln(drawing))

    def part(self, x, name):
        return getattr(self, name)(x)


def distance(drawing, image):
    return jnp.mean((drawing - image) ** 2)


def reading(logits, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()


model = Model()
params = jax.jit(model.init)(jax.random.key(0), images[:1])['params']


def apply(params, image):
    return model.apply({'params': params}, image)


def nothing_stopped(params, image, noisy, label):
    clean = apply(params, image)
    return {
        'gln': reading(clean.logits, label),
        'code': distance(apply(params, noisy).drawing, image),
        'explanation': distance(clean.drawing, image),
    }


# %% [markdown]
# `sg.gradient_flow` says which output trains which parameter. It reads the program that
# JAX traces. Nothing is compiled or run, and the answer is proven, not measured.
# Without stops every loss trains every part that it uses:

# %%
noise = 0.3 * jax.random.normal(jax.random.key(1), images.shape)
batch = images[:64], (images + noise)[:64], labels[:64]

flows = {'nothing stopped': sg.gradient_flow(nothing_stopped, params, *batch)}
print(flows['nothing stopped'].table(depth=1))

# %% [markdown]
# ## Three usual ways
#
# **1. Let the optimizer sort it out.** One optimizer for each part, by label
# (`optax.multi_transform`). But an optimizer sees the gradient of the *sum* of the
# losses. It can choose between parameters, but not between losses. Each part gets the
# gradient of the program above, with nothing stopped.
#
# **2. Stop the activations.** `stop_gradient(drawing)` before `gln` keeps the labels
# away from the other parts, and `stop_gradient(code)` keeps the drawing loss away from
# `code`. But `code` has to learn *through* `explanation`. A stop of any activation on
# that way would also stop the gradient of `code`. So the `code` loss trains
# `explanation` too, to draw from noise.


# %%
def activations_stopped(params, image, noisy, label):
    def part(name, x):
        return model.apply({'params': params}, x, name, method='part')

    code = jax.lax.stop_gradient(part('code', image))
    drawing = part('explanation', code)
    logits = part('gln', jax.lax.stop_gradient(drawing))
    return {
        'gln': reading(logits, label),
        'code': distance(part('explanation', part('code', noisy)), image),
        'explanation': distance(drawing, image),
    }


# %% [markdown]
# **3. Copy the weights**, with stops in all but one part, as the issue does. This is
# right, and everything below is compared with it. Its price: every call of the model
# has to pass a copy from the outside, and one wrong name freezes the wrong part.


# %%
def only(trained, params):
    """A copy of the weights with a stop in every part but one."""
    return {
        name: part if name == trained else jax.lax.stop_gradient(part)
        for name, part in params.items()
    }


def copied_by_hand(params, image, noisy, label):
    return {
        'gln': reading(apply(only('gln', params), image).logits, label),
        'code': distance(apply(only('code', params), noisy).drawing, image),
        'explanation': distance(
            apply(only('explanation', params), image).drawing, image
        ),
    }


def copied_with_a_typo(params, image, noisy, label):
    right = copied_by_hand(params, image, noisy, label)
    return right | {'gln': reading(apply(only('gnl', params), image).logits, label)}


# %% [markdown]
# ## With blocks
#
# A path says which parameters, a `with` block says where. The code inside the block
# does not change.


# %%
class Trained(Model):
    def losses(self, image, noisy, label):
        with nn.train_only('gln/**'):
            gln = reading(self(image).logits, label)
        with nn.train_only('code/**'):
            code = distance(self(noisy).drawing, image)
        with nn.train_only('explanation/**'):
            explanation = distance(self(image).drawing, image)
        return {'gln': gln, 'code': code, 'explanation': explanation}


def with_blocks(params, image, noisy, label):
    return Trained().apply({'params': params}, image, noisy, label, method='losses')


flows['with blocks'] = sg.gradient_flow(with_blocks, params, *batch)
print(flows['with blocks'])

# %% [markdown]
# ## All of them side by side
#
# Rows are parts of the model, columns are losses. Only the diagonal may say *trains*.

# %%
flows['activations stopped'] = sg.gradient_flow(activations_stopped, params, *batch)
flows['copies, by hand'] = sg.gradient_flow(copied_by_hand, params, *batch)
flows['copies, a typo'] = sg.gradient_flow(copied_with_a_typo, params, *batch)


names = ['nothing stopped', 'activations stopped', 'copies, a typo']
names += ['copies, by hand', 'with blocks']
for name in names:
    cells = flows[name].by_module(depth=1)
    wrong = [
        f'{part} for {loss}'
        for part, row in cells.items()
        for loss, status in zip(flows[name].outputs, row, strict=True)
        if (status == 'flows') != (part == loss)
    ]
    table = flows[name].table(depth=1).split('\n\n')[0]
    print(f'{name}\n{table}\nwrong: {", ".join(wrong) or "none"}\n')

# %% [markdown]
# The typo is the worst: `gln` is not trained at all, and no error says so. A block with
# that typo raises, and suggests the right name:

# %%
try:
    with nn.train_only('gnl/**'):
        apply(params, images[:1])
except sg.errors.UnusedFilterError as error:
    typo = error
print(typo)

# %% [markdown]
# ## To the last bit
#
# Blocks and copies have the same values, the same gradients, bit for bit, and the same
# compiled program. The table shows how wrong the other ways are: the length of the
# error, relative to the length of the right gradient.


# %%
def total(losses):
    return lambda params, *batch: sum(losses(params, *batch).values())


ways = [copied_by_hand, with_blocks, nothing_stopped]
ways += [activations_stopped, copied_with_a_typo]
programs = {
    losses.__name__: jax.jit(jax.grad(total(losses))).lower(params, *batch).compile()
    for losses in ways
}
grads = {name: program(params, *batch) for name, program in programs.items()}

# An optimizer for each part: with SGD at rate 1 an update is minus the gradient it saw.
each = optax.multi_transform(
    {part: optax.sgd(1.0) for part in params}, {part: part for part in params}
)
updates, _ = each.update(grads['nothing_stopped'], each.init(params))
grads['optimizer_masks'] = jax.tree.map(jnp.negative, updates)


def error_of(name, part):
    right, found = (
        jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(grads[n][part])])
        for n in ('copied_by_hand', name)
    )
    return float(jnp.linalg.norm(found - right) / jnp.linalg.norm(right))


errors = {name: {part: error_of(name, part) for part in params} for name in grads}
print(f'{"":20}', *(f'{part:>12}' for part in params))
for name, row in errors.items():
    print(f'{name:20}', *(f'{row[part]:>12.3g}' for part in params))

# %% [markdown]
# ## One pass
#
# `self(image)` stands twice in `losses`, each time with another part trained. A stop
# changes no value, so XLA computes the clean images once for both losses, and there is
# one backward pass, without the gradients that nobody wants. The work of a training
# step:

# %%
mflops = {
    name: program.cost_analysis()['flops'] / 1e6 for name, program in programs.items()
}
for name in ('nothing_stopped', 'copied_by_hand', 'with_blocks'):
    print(f'{name:16} {mflops[name]:6.2f} MFLOP')

# %% [markdown]
# ## Training
#
# One gradient of the sum of the losses, one Adam. Nothing in the loop knows of parts.


# %%
@functools.partial(jax.jit, static_argnums=0)
def train(losses, params, labels):
    size = 64
    steps = len(images) // size
    tx = optax.adam(optax.cosine_decay_schedule(3e-3, EPOCHS * steps))

    def step(carry, key):
        params, state = carry
        chosen, noise = jax.random.split(key)
        chosen = jax.random.choice(chosen, len(images), (size,), replace=False)
        image = images[chosen]
        noisy = image + 0.3 * jax.random.normal(noise, image.shape)

        def loss(params):
            each = losses(params, image, noisy, labels[chosen])
            return sum(each.values()), each

        grads, each = jax.grad(loss, has_aux=True)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), each

    def epoch(carry, key):
        carry, each = jax.lax.scan(step, carry, jax.random.split(key, steps))
        logits = apply(carry[0], held_images).logits
        accuracy = jnp.mean(jnp.argmax(logits, -1) == held_labels)
        return carry, (jax.tree.map(jnp.mean, each), accuracy)

    keys = jax.random.split(jax.random.key(2), EPOCHS)
    (params, _), curves = jax.lax.scan(epoch, (params, tx.init(params)), keys)
    return params, *curves


shuffled = jax.random.permutation(jax.random.key(3), labels)
runs = {
    (losses.__name__, kind): train(losses, params, given)
    for losses in (with_blocks, copied_by_hand, nothing_stopped)
    for kind, given in (('true', labels), ('shuffled', shuffled))
    if (losses, kind) != (copied_by_hand, 'shuffled')
}
trained, curves, accuracy = runs['with_blocks', 'true']

# %% [markdown]
# Labels may train `gln` only. A hard test: train once more with *shuffled labels*. With
# blocks, codes and drawings must not change in a single bit. With nothing stopped the
# model reads a little better, because codes and drawings learn from the labels, which
# was not wanted.

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.3))
epochs = np.arange(1, EPOCHS + 1)
for (name, curve), color, style in zip(
    curves.items(), (ORANGE, BLUE, GREEN), ('-', '-', '--'), strict=True
):
    left.plot(epochs, curve, color=color, ls=style, label=name)
left.set(title='Three losses, one gradient', xlabel='epoch', ylabel='loss')
left.set_yscale('log')
left.legend()

for name, color in (('nothing_stopped', GREY), ('with_blocks', BLUE)):
    label = name.replace('_', ' ')
    middle.plot(epochs, runs[name, 'true'][2], color=color, label=label)
middle.set(title='Held-out digits read right', xlabel='epoch', ylabel='share')
middle.set_ylim(0, 1)
middle.legend(loc='lower right')


def changed_by_labels(name):
    """How much held-out drawings change, root mean square, if labels are shuffled."""
    one, other = (
        apply(runs[name, kind][0], held_images).drawing for kind in ('true', 'shuffled')
    )
    return float(jnp.sqrt(distance(one, other)))


leaks = {name: changed_by_labels(name) for name in ('nothing_stopped', 'with_blocks')}
bars = right.bar(
    [name.replace('_', ' ') for name in leaks], leaks.values(), color=[GREY, BLUE]
)
right.bar_label(bars, fmt='%.3g')
right.set(title='Drawings with shuffled labels', ylabel='RMS change of a pixel')
right.margins(y=0.15)
plt.show()

# %% [markdown]
# What the trained model draws, and what it reads in its own drawing:

# %%
shown = [int(np.argmax(held_labels == label)) for label in range(10)]
outcome = apply(trained, held_images[np.array(shown)])
figure, rows = plt.subplots(2, 10, figsize=(10, 2.3))
for number, (above, below) in enumerate(rows.T):
    ink = {'cmap': 'gray_r', 'vmin': 0, 'vmax': 1}
    above.imshow(held_images[shown[number]].reshape(8, 8), **ink)
    below.imshow(outcome.drawing[number].reshape(8, 8), **ink)
    below.set_xlabel(f'read: {int(jnp.argmax(outcome.logits[number]))}')
    for axes in (above, below):
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
rows[0, 0].set_ylabel('image')
rows[1, 0].set_ylabel('drawing')
plt.show()

# %% [markdown]
# ## What was claimed
#
# Exact claims are checked exactly. Your tests can state the flow in the same words.

# %%
# Each loss trains its own part and nothing else.
for loss in params:
    testing.assert_trains_only(flows['with blocks'], f'{loss}/**', output=loss)


# Blocks are the copies by hand: gradients, and parameters after training, bit for bit.
assert equal(grads['with_blocks'], grads['copied_by_hand'])
testing.assert_same_program(total(with_blocks), total(copied_by_hand), params, *batch)
assert equal(trained, runs['copied_by_hand', 'true'][0])
assert mflops['with_blocks'] == mflops['copied_by_hand'] < mflops['nothing_stopped']

# The others are not: by more than rounding, and each in another part.
assert errors['nothing_stopped']['code'] > 0.1
assert errors['optimizer_masks'] == errors['nothing_stopped']
assert errors['activations_stopped']['explanation'] > 0.1
assert errors['activations_stopped']['code'] == 0
assert errors['copied_with_a_typo']['gln'] == 1
assert "'gnl/**'" in str(typo)

# Labels reach neither codes nor drawings, and without blocks they do.
for part in ('code', 'explanation'):
    assert equal(trained[part], runs['with_blocks', 'shuffled'][0][part])
assert leaks['with_blocks'] == 0 < leaks['nothing_stopped']

# And it learns.
assert all(curve[-1] < curve[0] for curve in curves.values())
if FULL:
    assert accuracy[-1] > 0.9

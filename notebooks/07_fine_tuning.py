# %% [markdown]
# # Fine-tuning: linear probe, LoRA, gradual unfreezing
#
# A vision transformer learns the digits 0 to 4. Then it has to learn 5 to 9 from 50
# labelled images, ten of each. There are four common ways to do that:
#
# | way | what is trained |
# |---|---|
# | linear probe | a new head |
# | LoRA | a new head, and two thin matrices beside some frozen ones |
# | gradual unfreezing | the head first, then the last block too, then everything |
# | full fine-tuning | everything |
#
# In flax_sg each way is one filter. The same filter goes to the gradient
# (`sg.grad(loss, wrt=trained)`) and to the optimizer (`sg.freeze(tx, ~trained)`). One
# training loop serves all four. We compare time, memory and accuracy, the latter over
# several seeds.

# %%
import functools
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from shared import BLUE, FULL, GREEN, GREY, ORANGE, digits, equal

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.filters import as_filter

DEPTH, WIDTH = (3, 32) if FULL else (2, 16)
EPOCHS, STEPS, SEEDS, TURNS = (12, 20, 4, 9) if FULL else (1, 5, 2, 1)

# %% [markdown]
# ## The model
#
# An ordinary vision transformer on 8 patches of 4 x 2 pixels. `dense` makes the query
# and value layers of the attention, so that LoRA can put its own layer there.


# %%
class Attention(nn.Module):
    dense: type = nn.Dense
    heads: int = 4

    @nn.compact
    def __call__(self, x):
        def heads(y):
            return y.reshape(*y.shape[:-1], self.heads, -1)

        width = x.shape[-1]
        query = heads(self.dense(width, name='query')(x))
        key = heads(nn.Dense(width, name='key')(x))
        value = heads(self.dense(width, name='value')(x))
        seen = nn.dot_product_attention(query, key, value)
        return nn.Dense(width, name='out')(seen.reshape(x.shape))


class Block(nn.Module):
    dense: type = nn.Dense

    @nn.compact
    def __call__(self, x):
        x += Attention(self.dense, name='attention')(nn.LayerNorm(name='norm_0')(x))
        hidden = nn.Dense(4 * x.shape[-1], name='up')(nn.LayerNorm(name='norm_1')(x))
        return x + nn.Dense(x.shape[-1], name='down')(nn.gelu(hidden))


class ViT(nn.Module):
    dense: type = nn.Dense

    @nn.compact
    def __call__(self, patches):
        x = nn.Dense(WIDTH, name='embed')(patches)
        x += self.param('position', nn.initializers.normal(0.1), x.shape[1:])
        for number in range(DEPTH):
            x = Block(self.dense, name=f'block_{number}')(x)
        return nn.Dense(5, name='head')(nn.LayerNorm(name='norm')(x).mean(axis=1))


# %% [markdown]
# LoRA (Hu et al., 2021) leaves the kernel alone and learns a product of two thin
# matrices beside it. `nn.share_scope` puts them under the name of the layer that they
# adapt: `query/kernel` keeps its path, and a checkpoint of the plain model fits.


# %%
class LoRADense(nn.Module):
    features: int
    rank: int = 4

    def setup(self):
        self.base = nn.Dense(self.features)
        nn.share_scope(self, self.base)

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal(0.1)
        down = self.param('lora_down', init, (x.shape[-1], self.rank))
        up = self.param('lora_up', nn.initializers.zeros, (self.rank, self.features))
        return self.base(x) + x @ down @ up


plain, lora = ViT(), ViT(LoRADense)

# %% [markdown]
# ## Two tasks
#
# Half of the digits 5 to 9 is held out. Each seed draws its own 50 of the other half.

# %%
images, labels = digits()
patches = images.reshape(-1, 2, 4, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 8, 8)
first_x, first_y = patches[labels < 5], labels[labels < 5]
second_x, second_y = patches[labels >= 5], labels[labels >= 5] - 5
held_x, held_y = second_x[448:], second_y[448:]
second_x, second_y = second_x[:448], second_y[:448]


def loss(model, params, x, y):
    logits = model.apply({'params': params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def pretrained(params):
    tx = optax.adamw(2e-3)

    def step(carry, key):
        params, state = carry
        chosen, noise = jax.random.split(key)
        chosen = jax.random.choice(chosen, len(first_y), (50,), replace=False)
        x = jnp.asarray(first_x)[chosen]
        x += 0.3 * jax.random.normal(noise, x.shape)
        grads = jax.grad(functools.partial(loss, plain))(
            params, x, jnp.asarray(first_y)[chosen]
        )
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.key(1), 18 * EPOCHS)
    return jax.lax.scan(step, (params, tx.init(params)), keys)[0][0]


untrained = jax.jit(plain.init)(jax.random.key(0), first_x[:1])['params']
learned = pretrained(untrained)


def right(model, params, x, y):
    logits = model.apply({'params': params}, x)
    return jnp.mean(jnp.argmax(logits, axis=-1) == y)


first_right = float(right(plain, learned, first_x, first_y))
print(f'digits 0 to 4, trained on: {first_right:.3f} right')

# %% [markdown]
# The LoRA model takes the checkpoint by path. `lora_up` begins at zero, so the model
# computes what the plain one does, until it is trained.

# %%
with_adapters = jax.jit(lora.init)(jax.random.key(2), first_x[:1])['params']
with_adapters = sg.substitute(with_adapters, learned)
print(sg.paths(lora, first_x[:1], where='**/lora_*').table(width=80))

# %% [markdown]
# ## Each way is a model, its filters and a learning rate
#
# There are three stages. Gradual unfreezing has another filter in each, the other ways
# keep theirs. `from scratch` shows what the pretraining is worth.

# %%
HEAD = as_filter('head/**')
LORA = as_filter(['head/**', '**/lora_*'])
LAST = as_filter(['head/**', 'norm/*', f'block_{DEPTH - 1}/**'])
ALL = as_filter(True)

# The learning rates were chosen by hand, by the mean of the seeds.
WAYS = {
    'from scratch': (plain, untrained, [ALL, ALL, ALL], 1e-3),
    'linear probe': (plain, learned, [HEAD, HEAD, HEAD], 1e-2),
    'LoRA': (lora, with_adapters, [LORA, LORA, LORA], 3e-3),
    'gradual unfreezing': (plain, learned, [HEAD, LAST, ALL], 3e-3),
    'full fine-tuning': (plain, learned, [ALL, ALL, ALL], 1e-3),
}


def optimizer(rate, trained):
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    return sg.freeze(clipped, ~trained)


def step_of(model, trained, tx):
    gradients = sg.grad(functools.partial(loss, model), wrt=trained)

    def step(params, state, x, y):
        updates, state = tx.update(gradients(params, x, y), state, params)
        return sg.apply_updates(params, updates), state

    return step


# %% [markdown]
# ## Time and memory of a step
#
# A step on 100 images. The compiler says how much memory it needs beside parameters and
# optimizer state; those numbers are exact. Times depend on the machine, so the steps
# run in turn, and what is shown is the median of the ratio to full fine-tuning.


# %%
def kilobytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) / 1e3


STEPS_TO_MEASURE = {
    'linear probe': ('linear probe', HEAD),
    'LoRA': ('LoRA', LORA),
    'head and last block': ('gradual unfreezing', LAST),
    'full fine-tuning': ('full fine-tuning', ALL),
}
programs, costs = {}, {}
for name, (way, trained) in STEPS_TO_MEASURE.items():
    model, params, _, rate = WAYS[way]
    tx = optimizer(rate, trained)
    arguments = params, tx.init(params), second_x[:100], second_y[:100]
    program = jax.jit(step_of(model, trained, tx)).lower(*arguments).compile()
    programs[name] = functools.partial(program, *arguments)
    picked, _ = sg.partition(params, trained)
    costs[name] = {
        'trained kB': kilobytes(picked),
        'optimizer kB': kilobytes(arguments[1]),
        'temporary MB': program.memory_analysis().temp_size_in_bytes / 1e6,
        'MFLOP': program.cost_analysis()['flops'] / 1e6,
    }


def seconds(run):
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


turns = [{name: seconds(run) for name, run in programs.items()} for _ in range(TURNS)]
for name, row in costs.items():
    ratios = [turn[name] / turn['full fine-tuning'] for turn in turns]
    row['time'] = float(np.median(ratios))

print(f'{"":20}', *(f'{column:>13}' for column in costs['LoRA']))
for name, row in costs.items():
    print(f'{name:20}', *(f'{value:13.2f}' for value in row.values()))

# %%
figure, axes = plt.subplots(1, 5, figsize=(11, 2.6), sharey=True)
for ax, column in zip(axes, costs['LoRA'], strict=True):
    values = [row[column] for row in costs.values()]
    bars = ax.barh(list(costs), values, color=[ORANGE, GREEN, BLUE, GREY])
    texts = [f'{value:,.0f}' if value >= 10 else f'{value:.2g}' for value in values]
    ax.bar_label(bars, texts, padding=3)
    ax.set(title=column, xticks=[], xmargin=0.4)
    ax.spines.bottom.set_visible(False)
axes[0].invert_yaxis()
axes[-1].set_title('time, a ratio')
plt.show()

# %% [markdown]
# - A **linear probe** has no backward pass through the blocks, so their activations are
#   not kept.
# - **LoRA** trains 4% of the parameters, so gradients and Adam's moments are small. It
#   saves little else: the backward pass runs down to the lowest adapter, and four
#   fifths of the temporary memory stay. Only the gradients of frozen kernels are saved.
# - **The last block** is between the two: the backward pass ends below it.
# - **Gradual unfreezing** has the cost of the probe for one third of its steps, of the
#   last block for another, and of full fine-tuning for the rest.
#
# ## Accuracy
#
# One program trains all seeds (`jax.lax.map`). Each seed has its own 50 images and its
# own head. `sg.thaw` goes from one filter to the next and keeps the moments of what was
# already trained.


# %%
@functools.partial(jax.vmap, in_axes=(0, None))
def start(key, params):
    chosen, head = jax.random.split(key)
    score = jax.random.uniform(chosen, second_y.shape)
    of_digit = [jnp.where(second_y == digit, score, 2) for digit in range(5)]
    chosen = jnp.concatenate([jnp.argsort(scores)[:10] for scores in of_digit])
    kernel = 0.1 * jax.random.normal(head, (WIDTH, 5))
    params = params | {'head': {'kernel': kernel, 'bias': jnp.zeros(5)}}
    return params, jnp.asarray(second_x)[chosen], jnp.asarray(second_y)[chosen]


@functools.partial(jax.jit, static_argnums=(0, 1))
def stage(model, trained, rate, params, state, x, y):
    step = step_of(model, trained, optimizer(rate, trained))

    def look(x, y, carry, _):
        carry = jax.lax.fori_loop(0, 5, lambda _, carry: step(*carry, x, y), carry)
        return carry, right(model, carry[0], held_x, held_y)

    def one(params, state, x, y):
        looks = functools.partial(look, x, y)
        return jax.lax.scan(looks, (params, state), length=STEPS // 5)

    return jax.lax.map(lambda seed: one(*seed), (params, state, x, y))


def fine_tuned(model, params, filters, rate):
    params, x, y = start(jax.random.split(jax.random.key(3), SEEDS), params)
    tx = optimizer(rate, filters[0])
    state, curves = jax.vmap(tx.init)(params), []
    for trained in filters:
        tx, state = sg.thaw(tx, state, params, trained, unused='ignore')
        arguments = params, state, x, y
        (params, state), curve = stage(model, trained, rate, *arguments)
        curves.append(curve)
    return params, np.concatenate(curves, axis=1)


results = {name: fine_tuned(*way) for name, way in WAYS.items()}
finals = {name: curves[:, -1] for name, (_, curves) in results.items()}
for name, final in finals.items():
    low, high = final.min(), final.max()
    print(f'{name:20} {final.mean():.3f} right, seeds from {low:.3f} to {high:.3f}')

# %%
figure, (left, right_) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=[3, 2])
looks = {
    'from scratch': (GREY, ':'),
    'linear probe': (ORANGE, '-.'),
    'LoRA': (GREEN, '--'),
    'gradual unfreezing': (BLUE, '-'),
    'full fine-tuning': ('black', '-'),
}
for number, (name, (color, style)) in enumerate(looks.items()):
    curves = results[name][1]
    steps = 5 * np.arange(1, curves.shape[1] + 1)
    left.plot(steps, curves.mean(0), color=color, ls=style, label=name)
    right_.scatter(finals[name], [number] * SEEDS, color=color, s=18)
    right_.scatter(finals[name].mean(), number, color=color, marker='|', s=300)
left.set(title='Mean of all seeds', xlabel='step', ylabel='held-out digits, right')
left.legend(loc='lower right')
right_.set(title='Each seed, and the mean', yticks=range(len(looks)), yticklabels=looks)
right_.set_xlabel('held-out digits, right')
right_.invert_yaxis()
plt.show()

# %% [markdown]
# - Full fine-tuning is the best here, and gradual unfreezing and LoRA are 2 to 4 points
#   below it. The ranges of the seeds overlap.
# - A linear probe is no better than training from scratch: features of the digits 0 to
#   4 are not enough to tell 5 to 9 apart.
# - A model this small fits anywhere. LoRA is for models whose optimizer state does not
#   fit. The table of costs shows what it saves, and what it does not.
#
# ## Fold the adapters into the kernels
#
# After training, `kernel + lora_down @ lora_up` is an ordinary kernel. The folded
# weights are a checkpoint of the plain model, which computes the same.


# %%
def folded(params):
    if 'lora_up' in params:
        kernel = params['kernel'] + params['lora_down'] @ params['lora_up']
        return {'kernel': kernel, 'bias': params['bias']}
    return {
        name: folded(part) if isinstance(part, dict) else part
        for name, part in params.items()
    }


tuned = jax.tree.map(lambda leaf: leaf[0], results['LoRA'][0])
logits = lora.apply({'params': tuned}, held_x)
of_folded = plain.apply({'params': folded(tuned)}, held_x)
apart = float(jnp.max(jnp.abs(logits - of_folded)))
print(f'largest difference of a logit: {apart:.1e}')

# %% [markdown]
# ## What was claimed

# %%
# The checkpoint fits, and new adapters change nothing.
kept, _ = sg.partition(with_adapters, ~as_filter('**/lora_*'))
assert equal(jax.tree.leaves(kept), jax.tree.leaves(learned))
assert equal(
    plain.apply({'params': learned}, held_x),
    lora.apply({'params': with_adapters}, held_x),
)

# Parameters that the filter leaves out have no gradient and do not move, to the last
# bit. The others move.
for name, (model, params, filters, _) in WAYS.items():
    params, x, y = start(jax.random.split(jax.random.key(3), SEEDS), params)
    trained, one = filters[-1], jax.tree.map(lambda leaf: leaf[0], params)
    grads = sg.grad(functools.partial(loss, model), wrt=trained)(one, x[0], y[0])
    moving, still = sg.partition(results[name][0], trained)
    before, still_before = sg.partition(params, trained)
    assert len(jax.tree.leaves(grads)) == len(jax.tree.leaves(before))
    assert equal(still, still_before)
    pairs = zip(*map(jax.tree.leaves, (moving, before)), strict=True)
    assert np.mean([not np.array_equal(*pair) for pair in pairs]) > 0.9, name

# Memory and work follow the depth that the backward pass reaches.
order = 'linear probe', 'head and last block', 'LoRA', 'full fine-tuning'
for column in ('MFLOP', 'temporary MB') if FULL else ('MFLOP',):
    values = [costs[name][column] for name in order]
    assert values == sorted(values), column
for row in costs.values():  # Two moments for each trained parameter, and two counts.
    assert 0 <= row['optimizer kB'] - 2 * row['trained kB'] < 0.1

# Folding is exact up to rounding.
assert apart < 1e-4

if FULL:
    assert first_right > 0.97
    share = {
        column: costs['LoRA'][column] / costs['full fine-tuning'][column]
        for column in costs['LoRA']
    }
    assert share['trained kB'] < 0.05 and 0.7 < share['temporary MB'] < 0.9
    assert costs['linear probe']['time'] < costs['LoRA']['time'] < 1
    mean = {name: final.mean() for name, final in finals.items()}
    best = mean['full fine-tuning']
    assert mean['linear probe'] < mean['from scratch'] + 0.02
    assert mean['from scratch'] + 0.03 < min(mean['LoRA'], mean['gradual unfreezing'])
    assert best - 0.06 < min(mean['LoRA'], mean['gradual unfreezing'])
    assert best > max(final for way, final in mean.items() if way != 'full fine-tuning')

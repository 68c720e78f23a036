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
# In flax_sg each way is a filter. The same filter goes to the gradient
# (`sg.grad(loss, wrt=trained)`) and to the optimizer (`sg.freeze(tx, ~trained)`). One
# training loop serves all four. We compare time, memory and accuracy, the latter over
# several seeds.

# %%
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from shared import BLUE, FULL, GREEN, GREY, ORANGE, digits, equal

import flax_sg as sg
from flax_sg import linen as nn

DEPTH, WIDTH = (3, 32) if FULL else (2, 16)
PRETRAINING, STEPS, SEEDS, TURNS = (200, 20, 3, 15) if FULL else (2, 2, 1, 1)

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

# %% [markdown]
# ## One training step for all
#
# The step takes a model and a filter. Parameters that the filter leaves out have no
# gradient and no moments, the optimizer does not see them, and nothing can move them.

# %%
HEAD = sg.where('head/**')
LORA = sg.where('head/**', '**/lora_*')
LAST = sg.where('head/**', 'norm/*', f'block_{DEPTH - 1}/**')
ALL = sg.where(True)


def loss(model, params, x, y):
    logits = model.apply({'params': params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def optimizer(rate, trained):
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    return sg.freeze(clipped, ~trained)


@functools.partial(jax.jit, static_argnums=(0, 1))
def step(model, trained, rate, params, state, x, y):
    grads = sg.grad(functools.partial(loss, model), wrt=trained)(params, x, y)
    updates, state = optimizer(rate, trained).update(grads, state, params)
    return optax.apply_updates(params, updates), state


# %% [markdown]
# New adapters begin with `lora_up` at zero, so they change nothing. `folded` goes back
# from adapters to a plain model: `kernel + lora_down @ lora_up` is an ordinary kernel.


# %%
def folded(params):
    if 'lora_up' in params:
        kernel = params['kernel'] + params['lora_down'] @ params['lora_up']
        return {'kernel': kernel, 'bias': params['bias']}
    return {
        name: folded(part) if isinstance(part, dict) else part
        for name, part in params.items()
    }


with_adapters = jax.jit(lora.init)(jax.random.key(0), first_x[:1])['params']
untrained = folded(with_adapters)
print(sg.paths(lora, first_x[:1], where=LORA))

# %% [markdown]
# ## Time and memory of a step
#
# A step on 50 images. The compiler says how much memory it needs beside parameters and
# optimizer state; those numbers are exact. Times depend on the machine, so the steps
# run in turn, and the table shows the median of the ratio to full fine-tuning.


# %%
def kilobytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) / 1e3


CASES = {
    'linear probe': (plain, HEAD, untrained),
    'LoRA': (lora, LORA, with_adapters),
    'head and last block': (plain, LAST, untrained),
    'full fine-tuning': (plain, ALL, untrained),
}
arguments, lowered = {}, []
for name, (model, trained, params) in CASES.items():
    state = optimizer(1e-3, trained).init(params)
    arguments[name] = np.float32(1e-3), params, state, first_x[:50], first_y[:50]
    lowered.append(step.lower(model, trained, *arguments[name]))
with ThreadPoolExecutor() as pool:  # Compiles on all cores.
    compiled = list(pool.map(lambda each: each.compile(), lowered))

programs, runs, costs = {}, {}, {}
cases = zip(CASES.items(), compiled, strict=True)
for (name, (_, trained, params)), program in cases:
    programs[trained] = program
    runs[name] = functools.partial(program, *arguments[name])
    picked, _ = sg.partition(params, trained)
    costs[name] = {
        'trained kB': kilobytes(picked),
        'optimizer kB': kilobytes(arguments[name][2]),
        'temporary MB': program.memory_analysis().temp_size_in_bytes / 1e6,
        'MFLOP': program.cost_analysis()['flops'] / 1e6,
    }


def seconds(run):
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


turns = [{name: seconds(run) for name, run in runs.items()} for _ in range(TURNS)]
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
# ## The first task
#
# Pretraining is the same step, with everything trained.


# %%
def pretrained(params):
    rng = np.random.default_rng(1)
    state = optimizer(2e-3, ALL).init(params)
    for _ in range(PRETRAINING):
        chosen = rng.choice(len(first_y), 50, replace=False)
        noise = rng.normal(0, 0.3, (50, 8, 8)).astype(np.float32)
        batch = first_x[chosen] + noise, first_y[chosen]
        params, state = programs[ALL](np.float32(2e-3), params, state, *batch)
    return params


@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params, x):
    return model.apply({'params': params}, x)


def right(model, params, x, y):
    return float(np.mean(np.argmax(logits_of(model, params, x), axis=-1) == y))


learned = pretrained(untrained)
first_right = right(plain, learned, first_x[: len(held_x)], first_y[: len(held_x)])
print(f'digits 0 to 4, trained on: {first_right:.3f} right')

# %% [markdown]
# ## The second task
#
# There are three stages. Gradual unfreezing has another filter in each; the other ways
# keep theirs. `sg.adopt` goes from one filter to the next, and keeps the moments of
# parameters that were trained before. The LoRA model takes the checkpoint by path
# (`sg.substitute`). `from scratch` shows what the pretraining is worth.

# %%
# The learning rates were chosen by hand.
WAYS = {
    'from scratch': (plain, untrained, [ALL, ALL, ALL], 3e-3),
    'linear probe': (plain, learned, [HEAD, HEAD, HEAD], 3e-2),
    'LoRA': (lora, sg.substitute(with_adapters, learned), [LORA, LORA, LORA], 1e-2),
    'gradual unfreezing': (plain, learned, [HEAD, LAST, ALL], 3e-3),
    'full fine-tuning': (plain, learned, [ALL, ALL, ALL], 1e-3),
}


def start(seed, params):
    """Ten images of each digit, and a new head."""
    rng = np.random.default_rng(seed)
    of_digit = [np.flatnonzero(second_y == digit) for digit in range(5)]
    chosen = np.concatenate([rng.choice(some, 10, replace=False) for some in of_digit])
    kernel = rng.normal(0, 0.1, (WIDTH, 5)).astype(np.float32)
    head = {'kernel': kernel, 'bias': np.zeros(5, np.float32)}
    return params | {'head': head}, second_x[chosen], second_y[chosen]


def fine_tuned(seed, model, params, filters, rate):
    """Parameters before and after, and accuracy after each half of a stage."""
    before, x, y = start(seed, params)
    state = optimizer(rate, filters[0]).init(before)
    params, curve = before, []
    for trained in filters:
        state = sg.adopt(optimizer(rate, trained), params, state)
        for number in range(STEPS):
            params, state = programs[trained](np.float32(rate), params, state, x, y)
            if number % (STEPS // 2) == STEPS // 2 - 1:
                curve.append(right(model, params, held_x, held_y))
    return before, params, curve


results = {
    name: [fine_tuned(seed, *way) for seed in range(SEEDS)]
    for name, way in WAYS.items()
}
curves = {name: np.array([run[2] for run in runs]) for name, runs in results.items()}
finals = {name: curve[:, -1] for name, curve in curves.items()}
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
    steps = STEPS // 2 * np.arange(1, curves[name].shape[1] + 1)
    left.plot(steps, curves[name].mean(0), color=color, ls=style, label=name)
    right_.scatter(finals[name], [number] * SEEDS, color=color, s=18)
    right_.scatter(finals[name].mean(), number, color=color, marker='|', s=300)
left.set(title='Mean of all seeds', xlabel='step', ylabel='held-out digits, right')
left.legend(loc='lower right')
right_.set(title='Each seed, and the mean', yticks=range(len(looks)), yticklabels=looks)
right_.set_xlabel('held-out digits, right')
right_.invert_yaxis()
plt.show()

# %% [markdown]
# - Gradual unfreezing and full fine-tuning are equally good here: the ranges of their
#   seeds overlap. A third of the unfreezing steps has no backward pass through the
#   blocks.
# - LoRA is about three points below them, and four above training from scratch.
# - A linear probe is worse than training from scratch: features of the digits 0 to 4
#   are not enough to tell 5 to 9 apart.
# - A model this small fits anywhere. LoRA is for models whose optimizer state does not
#   fit. The table of costs shows what it saves, and what it does not.
#
# ## Fold the adapters into the kernels
#
# The folded weights are a checkpoint of the plain model, which computes the same.

# %%
_, tuned, _ = results['LoRA'][0]
of_adapters = logits_of(lora, tuned, held_x)
of_folded = logits_of(plain, folded(tuned), held_x)
apart = float(jnp.max(jnp.abs(of_adapters - of_folded)))
print(f'largest difference of a logit: {apart:.1e}')

# %% [markdown]
# ## What was claimed

# %%
# The checkpoint fits, and new adapters change nothing.
_, with_checkpoint, *_ = WAYS['LoRA']
assert equal(folded(with_checkpoint), learned)
of_plain = logits_of(plain, learned, held_x)
assert np.allclose(of_plain, logits_of(lora, with_checkpoint, held_x), atol=1e-5)

# Parameters that the filter leaves out do not move, to the last bit. The others move.
for name, (_, _, filters, _) in WAYS.items():
    for before, after, _ in results[name]:
        moving, still = sg.partition(after, filters[-1])
        moving_before, still_before = sg.partition(before, filters[-1])
        assert equal(still, still_before)
        pairs = zip(*map(jax.tree.leaves, (moving, moving_before)), strict=True)
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
    assert abs(mean['gradual unfreezing'] - mean['full fine-tuning']) < 0.03
    assert mean['linear probe'] + 0.05 < mean['from scratch'] < mean['LoRA'] - 0.01
    assert mean['LoRA'] < min(mean['gradual unfreezing'], mean['full fine-tuning'])

# %% [markdown]
# # Freeze a backbone, and thaw it gradually
#
# A small vision transformer learns the digits 0 to 4. Then it has to learn 5 to 9 from
# 25 labelled images: enough to train a head, and few for a transformer. So we freeze
# the backbone, train the head, and thaw the backbone from the top (Howard and Ruder,
# 2018).
#
# Three things can go wrong, and none raises an error:
#
# 1. A mask in the optimizer freezes. But if anything reads all gradients, such as a
#    clip, the backward pass of the whole backbone is computed and kept in memory.
# 2. A stop in the model saves that. But AdamW still decays weights with a zero
# gradient.
# 3. Each change of the frozen part throws the optimizer's moments away.

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

DEPTH, WIDTH = (4, 32) if FULL else (1, 16)
EPOCHS, STEPS, SEEDS, TURNS = (30, 40, 4, 25) if FULL else (2, 10, 2, 5)


# %% [markdown]
# ## The data: two tasks
#
# 8 x 8 pixels are cut into 16 patches of 2 x 2.

# %%
images, labels = digits()
patches = images.reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 16, 4)
first_x, first_y = patches[labels < 5], labels[labels < 5]
second_x, second_y = patches[labels >= 5], labels[labels >= 5] - 5
# Of the second task half is to choose the 25 from, half is held out.
held_x, held_y = second_x[448:], second_y[448:]
second_x, second_y = second_x[:448], second_y[:448]
first_x, first_y, second_x, second_y = map(
    jnp.asarray, (first_x, first_y, second_x, second_y)
)

# %% [markdown]
# ## The model
#
# Ordinary linen. The classifier takes its backbone as a field, which can be a frozen
# one.


# %%
class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x += nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        hidden = nn.gelu(nn.Dense(2 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(hidden)


class Backbone(nn.Module):
    @nn.compact
    def __call__(self, patches):
        x = nn.Dense(WIDTH, name='embed')(patches)
        x += self.param('position', nn.initializers.normal(0.1), x.shape[1:])
        for number in range(DEPTH):
            x = Block(name=f'block_{number}')(x)
        return nn.LayerNorm(name='norm')(x).mean(axis=1)


class Classifier(nn.Module):
    backbone: nn.Module

    @nn.compact
    def __call__(self, patches):
        return nn.Dense(5, name='head')(self.backbone(patches))


plain = Classifier(Backbone())
frozen = Classifier(nn.Frozen(Backbone()))
first_params = jax.jit(plain.init)(jax.random.key(0), first_x[:1])['params']


def loss(model, params, x, y):
    logits = model.apply({'params': params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def accuracy(params, x, y):
    return jnp.mean(jnp.argmax(plain.apply({'params': params}, x), -1) == y)


# %% [markdown]
# `nn.Frozen` around the backbone freezes it. The parameters keep their names, so one
# checkpoint serves both models:

# %%
of_frozen = jax.eval_shape(frozen.init, jax.random.key(0), first_x[:1])['params']
same_tree = jax.tree.structure(of_frozen) == jax.tree.structure(first_params)
print('the same tree of parameters:', same_tree, sorted(first_params['backbone']))

# %% [markdown]
# ## The first task


# %%
@jax.jit
def pretrained(params):
    tx = optax.adamw(2e-3)

    def step(carry, inputs):
        chosen, key = inputs
        params, state = carry
        x, y = first_x[chosen], first_y[chosen]
        x += 0.3 * jax.random.normal(
            key, x.shape
        )  # What is learned should not be brittle.
        grads = jax.grad(functools.partial(loss, plain))(params, x, y)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def epoch(carry, key):
        key, noise = jax.random.split(key)
        batches = jax.random.permutation(key, len(first_x))[:900].reshape(18, 50)
        return jax.lax.scan(step, carry, (batches, jax.random.split(noise, 18)))

    keys = jax.random.split(jax.random.key(1), EPOCHS)
    return jax.lax.scan(epoch, (params, tx.init(params)), keys)[0][0]


learned = pretrained(first_params)
first_accuracy = float(accuracy(learned, first_x, first_y))
print(f'digits 0 to 4, trained on: {first_accuracy:.3f} right')

# %% [markdown]
# ## What a frozen backbone costs
#
# The same step of the second task in four spellings. Transformers are trained with a
# clip of the gradient's norm, and that matters here.
#
# - **optimizer only**: `optax.multi_transform` sets the backbone's updates to zero. The
#   clip needs the norm of *all* gradients, so all are computed. The gradients of the
#   backbone make the step of the head shorter.
# - **without a clip** XLA removes the backbone's gradients by itself, if everything is
#   in one `jax.jit`. Anything that reads them brings them back: a clip, a logged norm,
#   accumulated gradients, `jax.grad` and the update in two programs.
# - **stop by hand**: `stop_gradient` on the backbone's weights, an ordinary optimizer.
#   There is no backward pass through the backbone, but its zeros are returned, averaged
#   and stored.
# - **frozen**: the model says what is frozen, and `sg.live` finds it there. The
#   backbone
#   has no gradient, no moments and no share in the norm.

# %%
clip = optax.clip_by_global_norm(1.0)
adamw = optax.adamw(2e-3, weight_decay=0.05)
masked = optax.multi_transform(
    {'trained': adamw, 'frozen': optax.set_to_zero()},
    {'backbone': 'frozen', 'head': 'trained'},
)

params = learned | {'head': first_params['head']}
x, y = second_x[:50], second_y[:50]
live = sg.live(functools.partial(loss, frozen), params, x, y)
print(live)


def of_all(params, x, y):
    return jax.grad(functools.partial(loss, plain))(params, x, y)


def with_zeros(params, x, y):
    def stopped(params):
        backbone = jax.lax.stop_gradient(params['backbone'])
        return loss(plain, params | {'backbone': backbone}, x, y)

    return jax.grad(stopped)(params)


def of_what_is_live(params, x, y):
    return sg.grad(functools.partial(loss, frozen), wrt=live)(params, x, y)


ways = {
    'optimizer only': (of_all, optax.chain(clip, masked)),
    '... without a clip': (of_all, masked),
    'stop by hand': (with_zeros, optax.chain(clip, adamw)),
    'frozen': (of_what_is_live, sg.freeze(optax.chain(clip, adamw), ~live)),
}

# %% [markdown]
# Sizes are exact: they are those of the compiled program. Times depend on the machine,
# so the four steps run in turn, again and again, and what counts is the ratio in each
# turn.


# %%
def size(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) / 1e3


def step_of(gradients, tx):
    def step(params, state, x, y):
        updates, state = tx.update(gradients(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    return step


compiled, costs, after = {}, {}, {}
for name, (gradients, tx) in ways.items():
    arguments = params, tx.init(params), x, y
    program = jax.jit(step_of(gradients, tx)).lower(*arguments).compile()
    compiled[name] = program, arguments
    after[name], state = program(*arguments)
    costs[name] = {
        'MFLOP': program.cost_analysis()['flops'] / 1e6,
        'temporary kB': program.memory_analysis().temp_size_in_bytes / 1e3,
        'gradients kB': size(jax.eval_shape(gradients, params, x, y)),
        'optimizer kB': size(state),
    }


def seconds(name):
    program, arguments = compiled[name]
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - start


turns = [{name: seconds(name) for name in ways} for _ in range(TURNS + 2)][2:]
for name in ways:
    ratios = [turn[name] / turn['optimizer only'] for turn in turns]
    costs[name]['time'] = float(np.median(ratios))

print(f'{"":20}', *(f'{column:>13}' for column in costs['frozen']))
for name, row in costs.items():
    print(f'{name:20}', *(f'{value:13.2f}' for value in row.values()))

# %%
figure, axes = plt.subplots(1, 5, figsize=(11, 2.6), sharey=True)
for ax, column in zip(axes, costs['frozen'], strict=True):
    values = [row[column] for row in costs.values()]
    bars = ax.barh(list(costs), values, color=[GREY, GREY, ORANGE, BLUE])
    texts = [f'{value:,.0f}' if value >= 10 else f'{value:.2g}' for value in values]
    ax.bar_label(bars, texts, padding=3)
    ax.set(title=column, xticks=[], xmargin=0.4)
    ax.spines.bottom.set_visible(False)
axes[0].invert_yaxis()
axes[-1].set_title('time, a ratio')
plt.show()

# %% [markdown]
# All but the first do the same work. They differ in what they return and store: zeros
# for every frozen weight, or nothing. If the clip counts the gradients of the backbone,
# the head gets a smaller step:


# %%
@jax.jit
def left_by_the_clip(params):
    grads = of_all(params, x, y)
    return {
        part: 1 / jnp.maximum(1, optax.global_norm(counted))
        for part, counted in (('all', grads), ('head', grads['head']))
    }


left = left_by_the_clip(params)
print(
    f'counted with the backbone, {left["all"]:.0%} of the gradient of the head is left'
)
print(f'counted by itself, {left["head"]:.0%}')

# %% [markdown]
# ## A zero gradient is not frozen
#
# After one step the backbone should be the same. With the stop by hand and AdamW it is
# not: weight decay needs no gradient. No loss curve shows this for a long time.


# %%
def moved(name):
    """How far the backbone is from where it was, relative to its size."""
    before, now = (
        jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree['backbone'])])
        for tree in (params, after[name])
    )
    return float(jnp.linalg.norm(now - before) / jnp.linalg.norm(before))


for name in ways:
    print(f'{name:20} the backbone has moved by {moved(name):.1e} of itself')

# %% [markdown]
# ## Thaw from the top
#
# Three stages: the head alone, then the last block too, then everything. The backbone
# should learn more slowly than the head.
#
# `nn.scale_gradient` does that for plain SGD, where a tenth of the gradient is a tenth
# of the learning rate. **Adam divides the factor out again**, so there it does nothing:


# %%
@jax.jit
def shrunk(params):
    """The first update of the backbone with a tenth of its gradient, as a share."""

    def gradients(factor):
        with nn.scale_gradient('backbone/**', factor):
            return jax.grad(functools.partial(loss, plain))(params, x, y)

    def norm(tx, grads):
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.global_norm(updates['backbone'])

    whole, tenth = gradients(1.0), gradients(0.1)
    optimizers = {'SGD': optax.sgd(0.1), 'Adam': optax.adam(0.1, eps=0)}
    return {name: norm(tx, tenth) / norm(tx, whole) for name, tx in optimizers.items()}


slower = shrunk(params)
for name, ratio in slower.items():
    print(f'{name}: a tenth of the gradient makes {ratio:.2f} of the update')

# %% [markdown]
# With AdamW a part needs a learning rate of its own. `sg.labels` makes the groups for
# `optax.multi_transform`, and `sg.freeze` goes around everything.

# %%
HEAD = sg.where('head/**')
LAST = sg.where(f'backbone/block_{DEPTH - 1}/**', 'backbone/norm/*')
ALL = sg.where(True)

groups = optax.multi_transform(
    {
        'head': optax.adamw(1e-2, weight_decay=0.05),
        'backbone': optax.adamw(2e-3, weight_decay=0.05),
    },
    lambda params: sg.labels(params, lambda path: path.parts[0]),
)
slow_backbone = optax.chain(clip, groups)

# %% [markdown]
# Each stage freezes less. `sg.adopt` takes the state along: parameters that were
# trained keep their moments, the new ones get fresh moments. The same filter goes to
# the gradient call, so nothing is computed for parameters that are still frozen.
#
# One program trains all seeds. Each has its own 25 images, five of each digit, and its
# own head.


# %%
def loop(tx, gradients):
    """Trains for STEPS steps, and looks at held-out accuracy ten times."""

    def step(x, y, carry, _):
        params, state = carry
        updates, state = tx.update(gradients(params, x, y), state, params)
        return (optax.apply_updates(params, updates), state), None

    def look(x, y, carry, _):
        carry, _ = jax.lax.scan(
            functools.partial(step, x, y), carry, length=STEPS // 10
        )
        return carry, accuracy(carry[0], held_x, held_y)

    def run(params, state, x, y):
        carry = params, state
        (params, state), curve = jax.lax.scan(
            functools.partial(look, x, y), carry, length=10
        )
        return params, state, curve

    return jax.jit(lambda *seeds: jax.lax.map(lambda seed: run(*seed), seeds))


@functools.cache  # Equal filters are one key, and one compiled program.
def loop_of(live):
    gradients = sg.grad(functools.partial(loss, plain), wrt=live)
    return loop(sg.freeze(slow_backbone, ~live), gradients)


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, None))
def start(key, params):
    chosen, head = jax.random.split(key)
    score = jax.random.uniform(chosen, second_y.shape)
    of_digit = [jnp.argsort(jnp.where(second_y == d, score, 2))[:5] for d in range(5)]
    chosen = jnp.concatenate(of_digit)
    head = {
        'kernel': 0.1 * jax.random.normal(head, (WIDTH, 5)),
        'bias': jnp.zeros(5),
    }
    return params | {'head': head}, second_x[chosen], second_y[chosen]


def fine_tuned(params, stages):
    params, x, y = start(jax.random.split(jax.random.key(2), SEEDS), params)
    state = jax.vmap(sg.freeze(slow_backbone, ~stages[0]).init)(params)
    states, curves = [], []
    for live in stages:
        adopt = functools.partial(sg.adopt, sg.freeze(slow_backbone, ~live))
        state = jax.vmap(adopt)(params, state)  # For each seed.
        states.append(state)
        params, state, curve = loop_of(live)(params, state, x, y)
        states.append(state)
        curves.append(curve)
    return params, states, jnp.concatenate(curves, axis=1)


results = {
    'head only': fine_tuned(learned, [HEAD, HEAD, HEAD]),
    'all at once': fine_tuned(learned, [ALL, ALL, ALL]),
    'thawed from the top': fine_tuned(learned, [HEAD, HEAD | LAST, ALL]),
}
finals = {name: curves[:, -1] for name, (_, _, curves) in results.items()}

for name, final in finals.items():
    print(f'{name:20} {float(final.mean()):.3f} right, from {final.min():.3f} up')

# %%
figure, ax = plt.subplots(figsize=(9, 3.8))
steps = (np.arange(30) + 1) * (STEPS // 10)
looks = {
    'head only': (ORANGE, '-.'),
    'all at once': (GREEN, '--'),
    'thawed from the top': (BLUE, '-'),
}
for name, (color, style) in looks.items():
    curves = results[name][2]
    ax.plot(steps, curves.mean(0), color=color, ls=style, label=name)
    ax.fill_between(steps, curves.min(0), curves.max(0), color=color, alpha=0.12, lw=0)
for number, stage in enumerate(['head', 'and the last block', 'and all below']):
    ax.axvline(number * STEPS, color=GREY, lw=0.8)
    ax.text(number * STEPS + 1, 1.01, stage, color=GREY, va='bottom')
ax.set(xlabel='step', ylabel='held-out digits 5 to 9, right', xlim=(0, 3 * STEPS))
ax.set_ylim(0.2 if FULL else 0, 1)
ax.legend(loc='lower right', title='mean and range of all seeds')
plt.show()

# %% [markdown]
# A frozen backbone is not good enough for digits that it has never seen. Thawed in
# stages it gets as far as with everything trained at once, and two thirds of the steps
# have a short backward pass. (Notebook 07 has LoRA and training
# from scratch beside it.)
#
# Accuracy dips after the last thaw, because of Adam. New moments begin at zero, and
# Adam corrects for that by its step count. All parameters share one count, which goes
# on. So the first steps of a parameter that is thawed late are several times too long.
# Set the count to zero as well, and they are right. Parameters that were trained before
# then take shorter steps for a while.


# %%
def longest_step(after_thaw):
    """Of a parameter that is thawed after 300 steps; a right one has the length 1."""
    pair = {'head': jnp.zeros(()), 'backbone': jnp.zeros(())}
    ones = {'head': jnp.ones(()), 'backbone': jnp.ones(())}
    adam = optax.adam(1.0)
    tx = sg.freeze(adam, 'backbone')
    state, update = tx.init(pair), jax.jit(tx.update)
    for _ in range(300):
        _, state = update(ones, state, pair)
    state = after_thaw(sg.adopt(adam, pair, state))
    update = jax.jit(adam.update)
    steps = []
    for _ in range(20):
        updates, state = update(ones, state, pair)
        steps.append(max(map(abs, map(float, updates.values()))))
    return max(steps)


as_it_is = longest_step(lambda state: state)
count_at_zero = longest_step(lambda state: optax.tree_utils.tree_set(state, count=0))
print(
    f'the longest step: {as_it_is:.1f}, and with the count at zero {count_at_zero:.1f}'
)

# %% [markdown]
# ## And back again
#
# Parameters that are frozen later lose their moments. Keep the state of before, and
# `sg.adopt` finds them there when they are thawed.

# %%
tuned, states, _ = results['thawed from the top']
frozen_again = functools.partial(sg.adopt, sg.freeze(slow_backbone, 'backbone/**'))
in_use = jax.vmap(frozen_again)(tuned, states[-1])
thawed_again = functools.partial(sg.adopt, slow_backbone)
again = jax.vmap(thawed_again)(tuned, in_use, states[-1])
print(f'The state of all seeds while frozen: {size(in_use):.1f} kB')

# %% [markdown]
# ## What was claimed

# %%
# One checkpoint serves both models, and only the head is live.
assert same_tree
mask = sg.mask(params, trained=live)
assert all(jax.tree.leaves(mask['head'])) and not any(jax.tree.leaves(mask['backbone']))

# Frozen is frozen to the last bit; a zero gradient under AdamW is not: it decays.
assert equal(after['frozen']['backbone'], params['backbone'])
assert equal(after['optimizer only']['backbone'], params['backbone'])
assert abs(moved('stop by hand') - 2e-3 * 0.05) < 1e-6

# The head is throttled by gradients that nobody uses.
assert left['all'] < 0.7 * left['head']

# Less is computed and kept, and less is handed on.
assert costs['... without a clip']['MFLOP'] < 0.7 * costs['optimizer only']['MFLOP']
for column in ('MFLOP', 'temporary kB', 'gradients kB'):
    assert costs['frozen'][column] < 0.7 * costs['optimizer only'][column], column
assert costs['frozen']['gradients kB'] == size(params['head'])
assert costs['frozen']['optimizer kB'] < 0.1 * costs['stop by hand']['optimizer kB']
assert costs['frozen']['MFLOP'] <= costs['stop by hand']['MFLOP']
if FULL:  # A ratio of times of programs that take long enough.
    assert costs['frozen']['time'] < 0.8

# Adam does not see a scaled gradient, SGD does.
assert abs(slower['SGD'] - 0.1) < 1e-3
assert abs(slower['Adam'] - 1) < 1e-3


# With the count at zero no step after a thaw is too long.
assert count_at_zero < 1.001


# Thawing keeps the moments of what was trained, and those of what was kept.
def moments(state, group):
    return state[1].inner_states[group].inner_state[0]


before, after_thaw = (moments(state, 'head').mu['head'] for state in states[1:3])
assert equal(before, after_thaw)
assert not jnp.any(moments(states[2], 'backbone').mu['backbone']['norm']['scale'])
assert equal(again, states[-1])

# What was learned on other digits helps, and so does thawing it.
if FULL:
    assert first_accuracy > 0.98
    assert finals['thawed from the top'].mean() > finals['head only'].mean() + 0.05
    assert finals['thawed from the top'].mean() > finals['all at once'].mean() - 0.03

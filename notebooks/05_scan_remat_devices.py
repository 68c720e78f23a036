# %% [markdown]
# # Frozen parts of a scanned transformer, with remat, on many devices
#
# Large models are a stack of equal layers. In linen that is one layer in `nn.scan`: one
# trace, one compiled body, and one array for all kernels of a kind. That makes two
# things harder to freeze. The layers share a path, so no path says "the first twelve".
# And the place of a stop, inside of the loop or around it, decides how much memory the
# backward pass needs.
#
# This notebook trains a small scanned transformer that draws digits. It learns new
# digits by **five rows of its embedding**. Then we measure what a frozen part costs in
# the compiled program, with and without `nn.remat`. At the end there are eight devices,
# and we count the bytes that are all-reduced.

# %%
import re
from functools import partial
from math import prod

import jax

jax.config.update('jax_num_cpu_devices', 8)  # This computer plays eight.

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from shared import BLUE, FULL, ORANGE

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing
from flax_sg.demo import data

DEPTH, NEW_STEPS = (4, 120) if FULL else (2, 4)
BLACK, SKY = '#000000', '#56b4e9'

# %% [markdown]
# ## A transformer that draws digits
#
# An image is a sequence: first the digit that it shows, then its 64 pixels in 17 greys.
# The embedding has a row for each of the ten digits and a row for each grey. The layer
# has a `base` (attention and a small MLP, in parallel), which will be frozen, and an
# `adapter` of rank 8 that begins as zero. The field `freeze` is for later.

# %%
CLASSES, GREYS, PIXELS = 10, 17, 64


class Base(nn.Module):
    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        mask = nn.make_causal_mask(x[..., 0])
        x = nn.RMSNorm(name='norm')(x)
        seen = nn.MultiHeadDotProductAttention(4, use_bias=False, name='attention')(
            x, mask=mask
        )
        wide = nn.relu(nn.Dense(2 * width, use_bias=False, name='wide')(x))
        return seen + nn.Dense(width, use_bias=False, name='narrow')(wide)


class Adapter(nn.Module):
    @nn.compact
    def __call__(self, x):
        low = nn.Dense(8, use_bias=False, name='down')(x)
        zeros = nn.initializers.zeros
        return nn.Dense(x.shape[-1], use_bias=False, kernel_init=zeros, name='up')(low)


class Layer(nn.Module):
    freeze: str = ''

    @nn.compact
    def __call__(self, x, _):
        if self.freeze == 'by hand':
            stopped = partial(jax.tree.map, jax.lax.stop_gradient)
            init = self.is_initializing()
            base = nn.map_variables(Base, 'params', stopped, init=init)(name='base')
        elif self.freeze == 'Frozen':
            base = nn.Frozen(Base(name='base'))
        else:
            base = Base(name='base')
        return x + base(x) + Adapter(name='adapter')(x), None


class Drawer(nn.Module):
    depth: int = DEPTH
    width: int = 64
    remat: bool = False
    freeze: str = ''
    frozen_layers: slice | None = None
    unroll: int = 1

    @nn.compact
    def __call__(self, digits, pixels):
        embed = nn.Embed(CLASSES + GREYS, self.width, name='embed')
        tokens = jnp.concatenate([digits[:, None], CLASSES + pixels[:, :-1]], axis=1)
        normal = nn.initializers.normal(0.02)
        x = embed(tokens) + self.param('place', normal, (PIXELS, self.width))
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        layers = nn.scan(
            layer,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=self.depth,
            unroll=self.unroll,
            frozen_layers=self.frozen_layers,
        )
        x, _ = layers(self.freeze, name='layers')(x, None)
        x = nn.RMSNorm(name='norm')(x)
        return nn.Dense(GREYS, use_bias=False, name='head')(x)


def loss_of(model, params, digits, pixels):
    """How many nats a pixel takes."""
    logits = model.apply({'params': params}, digits, pixels)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, pixels))


loss = partial(loss_of, Drawer())

# %% [markdown]
# It learns the digits **0 to 4** first. `fit` trains what a filter selects. The filter
# goes to the gradient call and to the optimizer, which never sees the other parameters.


# %%
def greys(digits, which):
    """The digits of some kinds: what they are, and their pixels."""
    taken = np.isin(digits.labels, which)
    pixels = np.round(16 * digits.images[taken])
    return jnp.asarray(digits.labels[taken]), jnp.asarray(pixels, jnp.int32)


train, held_out = data.load()
OLD, NEW = range(0, 5), range(5, 10)
old, new = greys(train, OLD), greys(train, NEW)
old_held_out, new_held_out = (
    [part[:160] for part in greys(held_out, which)] for which in (OLD, NEW)
)


def fit(params, where, examples, steps):
    digits, pixels = examples
    where = sg.where(where)
    tx = sg.freeze(optax.adamw(3e-3), ~where)

    def step(state, batch):
        params, moments = state
        value, grads = sg.value_and_grad(loss, wrt=where)(
            params, digits[batch], pixels[batch]
        )
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    batches = jax.random.randint(jax.random.key(1), (steps, 32), 0, len(digits))
    run = jax.jit(lambda state: jax.lax.scan(step, state, batches))
    (params, _), losses = run((params, tx.init(params)))
    return params, losses


start = jax.jit(Drawer().init)(jax.random.key(0), *greys(train, [0]))['params']
learned = start
if FULL:  # The small notebook goes on with random weights.
    learned, losses = fit(start, True, old, 500)
    print(f'{losses[0]:.2f} -> {losses[-1]:.2f} nats a pixel')

# %% [markdown]
# ## Five rows of an embedding
#
# Now it should draw **5 to 9**. Only the five rows of the embedding for these digits
# are trained, 320 numbers. (Textual inversion, Gal et al., 2022, teaches an image
# generator a new word in this way.) A path cannot name rows, because they are part of
# one array.
# `sg.at` can, with any index that numpy takes.

# %%
ROWS = sg.at('embed/embedding', np.s_[5:10])
ADAPTERS = ['layers/adapter/**', ROWS]
CHOICES = {'rows': ROWS, 'rows and adapters': ADAPTERS, 'everything': True}
tuned = {
    name: fit(learned, CHOICES[name], new, NEW_STEPS)
    for name in (CHOICES if FULL else ['rows'])
}


def numbers(params):
    """How many numbers have changed."""
    differ = jax.tree.map(
        lambda a, b: np.sum(np.asarray(a) != np.asarray(b)), learned, params
    )
    return sum(jax.tree.leaves(differ))


evaluate = jax.jit(loss)
before = [float(evaluate(learned, *part)) for part in (old_held_out, new_held_out)]
after = {
    name: [float(evaluate(params, *part)) for part in (old_held_out, new_held_out)]
    for name, (params, _) in tuned.items()
}
print(f'{"trained":18}  changed   old digits   new digits   (held out)')
print(f'{"nothing yet":18} {0:8}   {before[0]:10.6f}   {before[1]:10.6f}')
for name, (of_old, of_new) in after.items():
    changes = numbers(tuned[name][0])
    print(f'{name:18} {changes:8}   {of_old:10.6f}   {of_new:10.6f}')

# %% [markdown]
# Look at the column *old digits*. With the rows alone it is the same number, because no
# weight that an old digit reads has changed. That takes two things: the gradient has to
# stop at the other 22 rows, and the *optimizer* must not move them either. A zero
# gradient is not enough, because AdamW decays weights. Here is one step of AdamW on
# gradients that are zero outside of the five rows, with and without `sg.freeze`.

# %%
zeros = jax.tree.map(jnp.zeros_like, learned)
rows_only = zeros | {
    'embed': {'embedding': zeros['embed']['embedding'].at[5:10].set(1.0)}
}


@partial(jax.jit, static_argnums=0)
def changed(tx):
    """How many numbers a step changes, in the five rows and in all."""
    updates, _ = tx.update(rows_only, tx.init(learned), learned)
    after = optax.apply_updates(learned, updates)
    differ = jax.tree.map(lambda a, b: jnp.sum(a != b), learned, after)
    in_rows = learned['embed']['embedding'][5:10] != after['embed']['embedding'][5:10]
    return jnp.sum(in_rows), sum(jax.tree.leaves(differ))


adamw = optax.adamw(3e-3)
plain, frozen = map(changed, (adamw, sg.freeze(adamw, ~ROWS)))
for name, (in_rows, in_all) in {'AdamW': plain, 'sg.freeze(AdamW)': frozen}.items():
    print(f'{name:17} changes {in_rows} numbers in the rows, {in_all} in all')


# %% [markdown]
# What did the five rows learn? Each picture is drawn pixel by pixel. All rows use the
# same random numbers.


# %%
@jax.jit
def draw(params, digits, key):
    def pixel(n, pixels):
        logits = Drawer().apply({'params': params}, digits, pixels)[:, n]
        drawn = jax.random.categorical(jax.random.fold_in(key, n), 2.0 * logits)
        return pixels.at[:, n].set(drawn)

    return jax.lax.fori_loop(0, PIXELS, pixel, jnp.zeros((len(digits), PIXELS), int))


everything = jnp.arange(CLASSES)
drawn = {
    name: draw(params, everything, jax.random.key(4))
    for name, params in {
        'before': learned,
        **{name: params for name, (params, _) in tuned.items()},
    }.items()
}
figure, grid = plt.subplots(len(drawn), CLASSES, figsize=(8, 0.95 * len(drawn)))
for row, (name, images) in zip(grid, drawn.items(), strict=True):
    for axes, image in zip(row, images, strict=True):
        axes.imshow(image.reshape(8, 8), cmap='gray_r', vmin=0, vmax=16)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    row[0].set_ylabel(name, rotation=0, ha='right', va='center')
for axes, digit in zip(grid[0], range(CLASSES), strict=True):
    axes.set_title(digit, color=BLACK if digit in OLD else BLUE, loc='center')
plt.show()

# %% [markdown]
# 320 numbers cannot make new strokes: they combine those of 0 to 4. Old digits are
# drawn as before, pixel for pixel. The adapters draw better new digits, and change the
# old ones. Training everything draws the best new ones and begins to forget the old
# ones.
#
# ## Where the stop stands in a scan
#
# With adapters the base of *every* layer is frozen. There are three ways to write that.
# Their gradients are equal, their programs are not. `nn.scan` saves the residuals of
# its body, a slice for each step. A weight that is an input of the loop needs no
# residual. A weight that was *stopped in the body* is a result of the body for JAX, so
# the loop saves it: a second copy of all frozen weights.
#
# - **by hand**: `nn.map_variables` with `lax.stop_gradient`, in the body.
# - **`nn.Frozen(Base())`** in the body: the backward pass recomputes the stop, so there
#   is nothing to save.
# - **a block around the scan**, `with nn.stop_gradient('layers/base/**')`: the weights
#   are stopped before they enter the loop.
#
# The other job is to freeze the **first layers** of the stack, here three quarters of
# it. `sg.at('layers/**', np.s_[:18])` is a mask on the arrays. It is right, but the
# backward pass of all layers is computed before most of it is dropped. `nn.scan(...,
# frozen_layers=slice(18))` splits the loop instead, and the first part has no backward
# pass. The tree of parameters is that of one scan.
#
# We compile a training step of a model with 24 layers and 512 units, 50 million
# weights, and ask XLA for its temporary memory and its flops. Nothing is run. (XLA
# counts the body of a loop once, so the flops are those of the unrolled loop.)

# %%
SIZE = {'depth': 24, 'width': 512} if FULL else {'depth': 4, 'width': 128}
FIRST = SIZE['depth'] * 3 // 4
BELOW = ['embed/**', 'place']
WAYS = {
    'everything trained': ({}, False),
    'bases: by hand': ({'freeze': 'by hand'}, BELOW),
    'bases: Frozen': ({'freeze': 'Frozen'}, BELOW),
    'bases: block': ({}, ['layers/base/**', *BELOW]),
    'first layers: sg.at': ({}, [sg.at('layers/**', np.s_[:FIRST]), *BELOW]),
    'first layers: frozen_layers=': ({'frozen_layers': slice(FIRST)}, BELOW),
}
examples = jnp.zeros(4, int), jnp.zeros((4, PIXELS), int)
shapes = jax.eval_shape(Drawer(**SIZE).init, jax.random.key(0), *examples)['params']
weights = sum(leaf.size for leaf in jax.tree.leaves(shapes)) * 4 / 1e6


def program(way, remat, **options):
    """Loss and gradients, as JAX hands it to XLA."""
    fields, stopped = WAYS[way]
    model = Drawer(**SIZE, **fields, **options, remat=remat)

    def stopped_loss(params, digits, pixels):
        with nn.stop_gradient(stopped):
            return loss_of(model, params, digits, pixels)

    return jax.jit(jax.value_and_grad(stopped_loss)).lower(shapes, *examples)


def flops(way, remat):
    """In units of 10^9."""
    written_out = program(way, remat, unroll=SIZE['depth'])
    return written_out.cost_analysis()['flops'] / 1e9


# The small notebook compiles less.
REMAT = (False, True) if FULL else (False,)
compiled = {
    (way, remat): program(way, remat).compile()
    for way in WAYS
    for remat in REMAT
    if FULL or way.startswith('bases')
}
memory = {
    case: found.memory_analysis().temp_size_in_bytes / 1e6
    for case, found in compiled.items()
}
work = {
    (way, remat): flops(way, remat)
    for way in WAYS
    for remat in REMAT
    if FULL or not way.startswith('bases')
}

# %%
figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
titles = 'temporary memory (MB)', 'flops of a step (10⁹)'
for axes, title, costs in zip(panels, titles, (memory, work), strict=True):
    for remat, color, shift in zip(REMAT, (BLUE, ORANGE), (-0.2, 0.2), strict=False):
        values = [costs.get((way, remat), 0) for way in WAYS]
        places = np.arange(len(WAYS)) + shift
        label = 'with nn.remat' if remat else 'without remat'
        bars = axes.barh(places, values, 0.38, color=color, label=label)
        axes.bar_label(bars, fmt='%.0f', padding=3, fontsize=8)
    axes.set(title=title, yticks=range(len(WAYS)), yticklabels=WAYS)
    axes.margins(x=0.12)
panels[0].invert_yaxis()
panels[1].legend(loc='lower right')
plt.show()
print(f'The weights themselves take {weights:.0f} MB.')

# %% [markdown]
# The stop by hand in the body costs 201 MB: all weights a second time. Freezing was
# meant to save memory, and this needs more than training everything. `Frozen` in the
# body and the block around the loop need 200 MB less. The block compiles to the program
# with the stop written before the loop by hand, instruction by instruction. With remat
# the backward pass recomputes the layer, so all three are alike.
#
# Freezing the first layers by a mask saves nothing: it has as many flops as training
# all. `frozen_layers=` has half of them. (The parameters below the stack are frozen
# here too. If they were trained, their gradient would pass through the frozen layers,
# and only the gradients of the layers' weights would be saved.)
#
# With remat `frozen_layers=` takes more *temporary* memory than training everything: 63
# MB beside 28. The stack is one array, and so is its gradient, which is an output and
# not temporary. If everything is trained, the loop writes into that output. If the loop
# is split, the gradient of the last six layers is an array of its own, 50 MB, which is
# then copied into an output of zeros. The other 13 MB are what the six layers need.
# Two stacks under two names would save the copy; they would also change the checkpoint.


# %%
def hoisted(params, digits, pixels):
    """The block, by hand."""
    stop = partial(jax.tree.map, jax.lax.stop_gradient)
    layers = params['layers'] | {'base': stop(params['layers']['base'])}
    below = {'embed': stop(params['embed']), 'place': stop(params['place'])}
    return loss_of(Drawer(**SIZE), params | {'layers': layers} | below, digits, pixels)


testing.assert_same_program(
    compiled['bases: block', False], jax.value_and_grad(hoisted), shapes, *examples
)

# The three ways, as programs that run: their gradients, on the same weights.
random = np.random.default_rng(0)
some = jax.tree.map(lambda s: random.normal(0, 0.05, s.shape).astype('float32'), shapes)
gradients = [
    compiled[way, False](some, *examples)[1]['layers']
    for way in WAYS
    if way.startswith('bases')
]

# %% [markdown]
# ## Eight devices
#
# Data parallel: each device has all weights and an eighth of the batch. Each step
# all-reduces the gradients. A frozen base should send nothing. Three ways to train the
# adapters and the head:
#
# - **frozen in the optimizer**, the usual recipe: clip by the global norm, AdamW behind
#   a mask, zero updates for the rest;
# - **frozen in the model**: a block, and the same optimizer for all;
# - **not differentiated**: `sg.value_and_grad(wrt=)` with `sg.freeze`.

# %%
TRAINED = sg.where('layers/adapter/**', 'head/**')
mesh = jax.sharding.Mesh(np.array(jax.devices()), ('devices',))


def on(spec, tree):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def clipped(tx):
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def masked_adamw(params):
    frozen = sg.mask(params, frozen=~TRAINED)
    trained = jax.tree.map(lambda is_frozen: not is_frozen, frozen)
    adamw = optax.masked(optax.adamw(1e-3), trained)
    return clipped(optax.chain(adamw, optax.masked(optax.set_to_zero(), frozen)))


def stopped_loss(params, digits, pixels):
    with nn.stop_gradient(~TRAINED):
        return loss(params, digits, pixels)


RECIPES = {
    'frozen in the optimizer': (loss, True, masked_adamw(learned)),
    'frozen in the model': (stopped_loss, True, clipped(optax.adamw(1e-3))),
    'not differentiated': (
        loss,
        TRAINED,
        sg.freeze(clipped(optax.adamw(1e-3)), ~TRAINED),
    ),
}


def step_of(loss, wrt, tx):
    def step(params, moments, digits, pixels):
        value, grads = sg.value_and_grad(loss, wrt=wrt)(params, digits, pixels)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, grads, value

    return step


def compiled_step(recipe, params, batch):
    tx = RECIPES[recipe][-1]
    moments = tx.init(params)
    return jax.jit(step_of(*RECIPES[recipe])).lower(params, moments, *batch).compile()


batch = on(PartitionSpec('devices'), [part[:64] for part in old])
replicated = on(PartitionSpec(), learned)
if not FULL:  # The small notebook compiles less, here too.
    RECIPES = {name: RECIPES[name] for name in ('not differentiated',)}
steps = {recipe: compiled_step(recipe, replicated, batch) for recipe in RECIPES}


# %% [markdown]
# The bytes can be read in the compiled program: the shapes of each `all-reduce`, times
# the iterations of its loop.


# %%
def all_reduced(compiled):
    """Bytes that come out of the all-reduces of a compiled program."""
    text = compiled.as_text()
    turns = dict(
        re.findall(r'body=%([\w.-]+).*?"known_trip_count":\{"n":"(\d+)"\}', text)
    )
    found, times = 0, 1
    for line in text.splitlines():
        if head := re.match(r'(?:ENTRY )?%([\w.-]+) \(', line):
            times = int(turns.get(head[1], 1))
        if shapes := re.search(r'= (.+?) all-reduce(?:-start)?\(', line):
            sizes = re.findall(r'[a-z]+(\d+)\[([\d,]*)\]', shapes[1])
            found += times * sum(
                int(bits) // 8 * prod(map(int, filter(None, dims.split(','))))
                for bits, dims in sizes
            )
    return found


moved = {recipe: all_reduced(step) for recipe, step in steps.items()}
live, _ = sg.partition(learned, TRAINED)
size = {
    'all weights': sum(leaf.nbytes for leaf in jax.tree.leaves(learned)),
    'adapters and head': sum(leaf.nbytes for leaf in jax.tree.leaves(live)),
}
for name, found in (size | moved).items():
    print(f'{name:24} {found:10,} bytes')

# %% [markdown]
# A mask in the optimizer is too late: the norm reads all gradients, so they are
# computed and sent, and then dropped. The other two ways send the trained gradients and
# the four bytes of the loss, and nothing else.
#
# ## Sharded weights, and one device by hand
#
# Fully sharded: every array is cut along its longest axis, and each device has an
# eighth of weights, gradients and moments. Gradients are sharded like their parameters.
# Frozen parameters have none.
#
# We run one step of training, and the same step on *one* device by hand: explicit
# stops, optax on the two trained branches, no flax_sg. Eight devices add numbers in
# another order. So both steps compute in float64 and round to float32, and the results
# are compared to the last bit.


# %%
def cut(leaf):
    """Along its longest axis of a multiple of eight."""
    lengths = [length if length % 8 == 0 else 0 for length in leaf.shape]
    axis = int(np.argmax(lengths))
    spec = [None] * axis + ['devices'] if lengths[axis] else []
    return on(PartitionSpec(*spec), leaf)


def loss_by_hand(trained, params, digits, pixels):
    params = jax.tree.map(jax.lax.stop_gradient, params)
    layers = params['layers'] | {'adapter': trained['adapter']}
    params = params | {'layers': layers, 'head': trained['head']}
    return loss(params, digits, pixels)


@jax.jit
def step_by_hand(params, digits, pixels):
    trained = {'adapter': params['layers']['adapter'], 'head': params['head']}
    value, grads = jax.value_and_grad(loss_by_hand)(trained, params, digits, pixels)
    tx = clipped(optax.adamw(1e-3))
    updates, _ = tx.update(grads, tx.init(trained), trained)
    return optax.apply_updates(trained, updates), grads, value


with jax.enable_x64(True):
    double = jax.tree.map(partial(np.asarray, dtype=np.float64), learned)
    sharded = jax.tree.map(cut, double)
    *_, tx = RECIPES['not differentiated']
    moments = tx.init(sharded)
    step = jax.jit(step_of(*RECIPES['not differentiated']))
    stepped, moments, grads, value = step(sharded, moments, *batch)
    hand = step_by_hand(double, *(part[:64] for part in old))

mu = moments[1][0].mu
for kind, tree in {'parameter': stepped, 'gradient': grads, 'moment': mu}.items():
    for part, name in (('base', 'wide'), ('adapter', 'down')):
        leaf = tree['layers'][part][name]['kernel']
        where = getattr(leaf, 'sharding', None)
        shown = leaf if where is None else f'{leaf.shape} {where.spec}'
        print(f'{kind:9} layers/{part}/{name}/kernel  {shown}')

# %% [markdown]
# ## What was claimed

# %%


def same(one, other):
    """Whether two trees are equal to the last bit, in float32."""

    def equal(a, b):
        return np.array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))

    return all(jax.tree.leaves(jax.tree.map(equal, one, other)))


# Five rows are trained: nothing else changes, and old digits are what they were.
of_rows, _ = tuned['rows']
rest = [np.delete(p['embed']['embedding'], range(5, 10), 0) for p in (learned, of_rows)]
assert same(*rest) and same(learned | {'embed': 0}, of_rows | {'embed': 0})
assert after['rows'][0] == before[0] and after['rows'][1] < before[1]
assert np.array_equal(drawn['before'][:5], drawn['rows'][:5])
assert frozen == (320, 320) and plain[0] == 320 < plain[1]
# A stop in the body, by hand, keeps the weights once more; ours do not.
by_hand, in_body, block = (memory[way, False] for way in WAYS if 'bases' in way)
bases = sum(leaf.size for leaf in jax.tree.leaves(shapes['layers']['base'])) * 4 / 1e6
assert in_body <= block < by_hand - 0.9 * bases
assert not FULL or by_hand > memory['everything trained', False]
# And the gradients are those of the stop by hand.
for other in gradients:
    pairs = zip(*map(jax.tree.leaves, (other, gradients[0])), strict=True)
    for one, first in pairs:
        assert np.linalg.norm(one - first) <= 1e-5 * np.linalg.norm(first)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(other['base']))
# A mask on layers saves no work, split loops do.
everything, masked, split = (
    work[way, False] for way in WAYS if not way.startswith('bases')
)
assert split < 0.55 * everything <= 0.55 * masked
# With remat split loops need less than all layers, but for the gradient of the trained
# layers, which is copied into that of the stack.
if FULL:
    copied = weights * (1 - FIRST / SIZE['depth'])
    rest = memory['first layers: frozen_layers=', True] - copied
    assert 0 < rest < 0.6 * memory['everything trained', True]
# Nobody sends what is not trained, unless the stop is in the optimizer alone.
sent = {name: 4 + size['adapters and head'] for name in RECIPES}
if FULL:
    sent['frozen in the optimizer'] = 4 + size['all weights']
assert moved == sent
# One device by hand and eight devices, to the last bit; frozen is frozen.
trained = {'adapter': stepped['layers']['adapter'], 'head': stepped['head']}
of_trained = {'adapter': grads['layers']['adapter'], 'head': grads['head']}
assert same((trained, of_trained, value), hand)
assert not same(trained['head'], double['head'])
pairs = zip(
    *(jax.tree.leaves(tree['layers']['base']) for tree in (stepped, double)),
    strict=True,
)
assert all(np.array_equal(now, then) for now, then in pairs)
# Arrays are cut alike, and what is frozen has no gradient and no moments.
live = sg.partition(sharded, TRAINED)[0]
shardings = [
    jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (live, grads, mu)
]
assert shardings[0] == shardings[1] == shardings[2]

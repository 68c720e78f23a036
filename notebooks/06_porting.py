# %% [markdown]
# # Porting: how you froze it before, and here
#
# Every framework has a way to say "do not train this", and no two mean the same. This
# notebook shows them side by side: Haiku, PyTorch, Keras, Flux, equinox, optax and NNX.
# The JAX libraries are *run* on the same weights and digits, and their gradients are
# compared with those of flax_sg, to the last bit. The others are shown as text.
#
# | you know | and mean | here |
# |---|---|---|
# | `hk.custom_getter` | stop what is read | `with nn.stop_gradient(where):` |
# | `hk.data_structures.partition` | differentiate a part | `sg.grad(loss, wrt=where)` |
# | `p.requires_grad_(False)` | no gradient for `p`, anywhere | `nn.Frozen(module)` |
# | `y.detach()` | no gradient through `y` | `jax.lax.stop_gradient(y)` |
# | `torch.no_grad()` | both, for what runs inside | a block, and the line above |
# | `functional_call(m, values, x)` | other values, once | `nn.substitute`, `apply` |
# | a deep copy, and EMA | a target network | `nn.mirror(m, variables=ema)` |
# | `layer.trainable = False` | that, *and* inference mode | `nn.Frozen(m, state=...)` |
# | `Flux.freeze!(state.encoder)` | no update | `sg.freeze(tx, where)`, `sg.adopt` |
# | `eqx.partition`, `filter_grad` | differentiate a part | `sg.partition`, `sg.grad` |
# | `eqx.tree_at` | other values in a tree | `sg.substitute(tree, values)` |
# | `optax.masked`, `set_to_zero` | no update | `sg.freeze(tx, where)` |
# | `nnx.DiffState(0, filter)` | differentiate a part | `sg.grad(loss, wrt=where)` |

# %%
from collections.abc import Callable
from functools import partial

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from shared import BLUE, FULL, GREEN, GREY, ORANGE

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.demo import data

STEPS = 60 if FULL else 20
BLACK = '#000000'

# %% [markdown]
# One small classifier of digits is written in each framework, with the same weights.

# %%
train, _ = data.load()
images, labels = jnp.asarray(train.images[:128]), jnp.asarray(train.labels[:128])


def cross_entropy(logits):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


class Classifier(nn.Module):
    def setup(self):
        self.encoder = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(16), nn.relu])
        self.head = nn.Dense(10)

    def __call__(self, x):
        return self.head(self.encoder(x))


model = Classifier()
params = jax.jit(model.init)(jax.random.key(0), images)['params']
# Biases begin as zero, and a zero hides a good deal.
params = jax.tree.map(lambda p: p + 0.01, params)


def loss(params, x=images):
    return cross_entropy(model.apply({'params': params}, x))


def layers(tree):
    """Kernel and bias of the three layers, in the order in which they run."""
    dense = [tree['encoder']['layers_0'], tree['encoder']['layers_2'], tree['head']]
    return [(layer['kernel'], layer['bias']) for layer in dense]


def assert_same(ours, theirs):
    """To the last bit: two lists of arrays."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)


def norms(grads):
    """How long the gradient of each layer is."""
    return [round(float(optax.tree.norm(layer)), 4) for layer in grads]


# %% [markdown]
# ## Haiku
#
# Haiku's getters are the closest relatives of our blocks, and `custom_getter` is what
# google/flax#1857 asks for by name. A getter sees each parameter as it is read.


# %%
def theirs(stop):
    encoder = hk.nets.MLP([32, 16], activate_final=True, name='encoder')
    head = hk.Linear(10, name='head')

    def getter(next_getter, value, context):
        value = next_getter(value)
        return jax.lax.stop_gradient(value) if stop(context.full_name) else value

    with hk.custom_getter(getter):
        features = encoder(images)
    return cross_entropy(head(features))


haiku = hk.without_apply_rng(
    hk.transform(partial(theirs, lambda name: 'encoder' in name))
)
names = ['encoder/~/linear_0', 'encoder/~/linear_1', 'head']
haiku_params = {
    name: {'w': kernel, 'b': bias}
    for name, (kernel, bias) in zip(names, layers(params), strict=True)
}
haiku_grads = jax.grad(haiku.apply)(haiku_params)


# Ours.
def stopped(params):
    with nn.stop_gradient('encoder/**'):
        return loss(params)


grads = jax.grad(stopped)(params)
assert_same(layers(grads), [(haiku_grads[n]['w'], haiku_grads[n]['b']) for n in names])
print('lengths of the gradients, layer by layer:', norms(layers(grads)))

# %% [markdown]
# `hk.data_structures.partition` splits by a predicate of module, name and value, and
# one part is differentiated. With us the filter goes to the gradient call; what is not
# differentiated has no gradient at all, where a stop gives zeros.

# %%
trained, fixed = hk.data_structures.partition(
    lambda module, name, value: module == 'head', haiku_params
)
everything = hk.without_apply_rng(hk.transform(partial(theirs, lambda name: False)))
haiku_grads = jax.grad(
    lambda trained: everything.apply(hk.data_structures.merge(trained, fixed))
)(trained)

# Ours.
grads = sg.grad(loss, wrt='head/**')(params)
assert_same(
    grads['head'],
    {'kernel': haiku_grads['head']['w'], 'bias': haiku_grads['head']['b']},
)
grads['encoder']

# %% [markdown]
# **What bites.** A predicate that matches nothing is silent in Haiku: the model trains
# as a whole, and nobody notices that `encoder` was renamed. Here it raises, and names
# what is there:

# %%
haiku = hk.without_apply_rng(
    hk.transform(partial(theirs, lambda name: 'encodr' in name))
)
silent = jax.grad(haiku.apply)(haiku_params)
print('Haiku:', norms([silent[name] for name in names]))


def misspelled(params):
    with nn.stop_gradient('encodr/**'):
        return loss(params)


try:
    jax.grad(misspelled)(params)
except sg.errors.UnusedFilterError as error:
    complaint = str(error)
    print('here: ', complaint)

# %% [markdown]
# ## PyTorch
#
# Three things that are called freezing, and that differ in what happens to the layers
# *below*:
#
# ```python
# model.encoder[2].requires_grad_(False)        # 1. the upper layer of the encoder
# logits = model.head(model.encoder(x))
#
# features = model.encoder(x).detach()          # 2. a value
# logits = model.head(features)
#
# with torch.no_grad():                         # 3. all that runs in here
#     features = model.encoder(x)
# logits = model.head(features)
# ```
#
# The first stops a *parameter*: gradient still runs through the layer into the one
# below. The others cut the *activation*, and with it all that is below. Blocks,
# `Frozen` and filters are of the first kind, and for the second there is
# `jax.lax.stop_gradient`, which JAX has for it. Ours of the three:


# %%
class Ported(Classifier):
    how: str = ''

    def __call__(self, x):
        if self.how == 'requires_grad_(False)':
            with nn.stop_gradient('encoder/layers_2/**'):
                return self.head(self.encoder(x))
        features = self.encoder(x)
        if self.how == 'detach()':
            features = jax.lax.stop_gradient(features)
        return self.head(features)


def gradient(how):
    ported = Ported(how=how)
    return layers(
        jax.grad(lambda p: cross_entropy(ported.apply({'params': p}, images)))(params)
    )


torch_ways = {how: gradient(how) for how in ('', 'requires_grad_(False)', 'detach()')}
for how, found in torch_ways.items():
    print(f'{how or "nothing frozen":22}', norms(found))

# %% [markdown]
# With `requires_grad_(False)` the first layer has the very gradient that it has when
# nothing is frozen. With `detach` it has none.
#
# **Other values for a call.** `torch.func.functional_call` replaces parameters for one
# call of a module, and a target network is a deep copy with a hand-written average:
#
# ```python
# logits = torch.func.functional_call(model, {**weights, **other}, (x,))
#
# target = copy.deepcopy(model.encoder).requires_grad_(False)
# with torch.no_grad():
#     for slow, fast in zip(target.parameters(), model.encoder.parameters()):
#         slow.mul_(0.99).add_(fast, alpha=0.01)
# ```
#
# All of linen is a functional call; `nn.substitute` does it for a part of a model, and
# inside of one. A mirror is the target: no second module, no second tree of names, and
# it cannot be trained by accident.


# %%
class Distilled(Classifier):
    def __call__(self, x, ema):
        target = nn.mirror(self.encoder, variables={'params': ema})(x)
        return jnp.mean((self.encoder(x) - target) ** 2)


ema = jax.tree.map(lambda p: 0.9 * p, params['encoder'])
of_params, of_ema = jax.grad(
    lambda p, ema: Distilled().apply({'params': p}, images, ema), argnums=(0, 1)
)(params, ema)
ema = optax.incremental_update(params['encoder'], ema, step_size=0.01)

with nn.substitute({'encoder': ema}):
    of_average = loss(params)

# By hand.
assert of_average == loss({**params, 'encoder': ema})
assert not any(bool(leaf.any()) for leaf in jax.tree.leaves(of_ema))
print(
    'gradient of the encoder:',
    norms([of_params['encoder']]),
    'of its target:',
    norms([of_ema]),
)

# %% [markdown]
# ## Keras, and what is no parameter
#
# ```python
# model.encoder.trainable = False
# model.compile(optimizer, loss)     # again, since compile has looked at it before
# ```
#
# That is `nn.Frozen(self.encoder)`, and there is nothing to compile again.
#
# **What bites.** A stop is about parameters, and batch statistics are none. In PyTorch
# a BatchNorm with `requires_grad_(False)` still normalises by the batch and updates its
# averages, until somebody calls `.eval()`, which the next `model.train()` undoes. Keras
# decided the other way: a BatchNormalization that is not trainable uses its averages,
# even if it is called with `training=True`, while a Dropout that is not trainable goes
# on dropping. Here it is a choice that is written down: `state='update'` is PyTorch,
# `'eval'` is Keras, with Dropout off as well, and `'hold'` normalises by the batch and
# leaves the averages alone.


# %%
def normed(state):
    norm = nn.Frozen(nn.BatchNorm(use_running_average=False), state=state)
    return norm.apply(NORM, images, mutable=['batch_stats'])


def normed_by_hand(**options):
    return nn.BatchNorm(**options).apply(NORM, images, mutable=['batch_stats'])


NORM = nn.BatchNorm(use_running_average=False).init(jax.random.key(0), images)
STATES = 'update', 'hold', 'eval'
norm_ways = {state: normed(state) for state in STATES}
for state, (out, new) in norm_ways.items():
    mean = new['batch_stats']['mean']
    moves = 'stays' if np.array_equal(mean, NORM['batch_stats']['mean']) else 'moves'
    print(f'{state:6} the average {moves}, mean of the output {jnp.mean(out):.2f}')

# %% [markdown]
# ## Flux
#
# Flux freezes in the *optimizer's state*, and gradients are explicit:
#
# ```julia
# state = Flux.setup(AdamW(1e-3), model)
# Flux.freeze!(state.encoder)
# grads = Flux.gradient(m -> loss(m, x, y), model)   # of everything
# Flux.update!(state, model, grads[1])               # of the head
# Flux.thaw!(state.encoder)
# ```
#
# The counterpart is `sg.freeze` and `sg.adopt`. As in Flux, moments of what goes on
# being trained survive a thaw. In Flux the gradient of the frozen part is computed and
# dropped; hand the same filter to `sg.grad` and it is not computed.

# %%
adamw = optax.adamw(1e-3)
tx = sg.freeze(adamw, 'encoder/**')
state = tx.init(params)
updates, state = tx.update(sg.grad(loss, wrt='head/**')(params), state, params)
stepped = optax.apply_updates(params, updates)
before = state[0].mu['head']['kernel']
with_moments = [part for part, tree in state[0].mu.items() if jax.tree.leaves(tree)]

state = sg.adopt(adamw, stepped, state)
after = state[0].mu
print('AdamW has moments of', with_moments, 'and after the thaw of', sorted(after))

# %% [markdown]
# ## equinox
#
# In equinox a model is a pytree, `partition` splits it by a tree of bools, and
# `tree_at` makes such a tree from one that says False everywhere.


# %%
class Dense(eqx.Module):
    kernel: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.kernel + self.bias


class Network(eqx.Module):
    encoder: list
    head: Dense
    activation: Callable = jax.nn.relu

    def __call__(self, x):
        for layer in self.encoder:
            x = self.activation(layer(x))
        return self.head(x)


*encoder, head = [Dense(kernel, bias) for kernel, bias in layers(params)]
network = Network(encoder, head)

spec = jax.tree.map(lambda _: False, network)
spec = eqx.tree_at(lambda n: (n.head.kernel, n.head.bias), spec, (True, True))


@eqx.filter_grad
def of_trained(trained, fixed):
    return cross_entropy(eqx.combine(trained, fixed)(images))


theirs = of_trained(*eqx.partition(network, spec))

# %% [markdown]
# With a filter there is no tree to build, and nothing to partition first. It need not
# be a linen model either: `sg.grad` takes any pytree, this one too, and leaves the
# activation, which is no array, alone.

# %%
ours = sg.grad(loss, wrt='head/**')(params)
assert_same(ours['head'], {'kernel': theirs.head.kernel, 'bias': theirs.head.bias})

ours = sg.grad(lambda n: cross_entropy(n(images)), wrt='head/**')(network)
assert_same(ours.head, theirs.head)

# tree_at, by path: the values of a part are replaced.
doubled = jax.tree.map(lambda p: 2 * p, params['head'])
theirs = eqx.tree_at(lambda p: p['head'], params, doubled)
assert_same(sg.substitute(params, {'head': doubled}), theirs)
ours

# %% [markdown]
# **What bites.** A tree of bools is made for one structure: add a layer to the model
# and it has to be made again. A stop in a *part* of the computation (frozen in one
# call, trained in another) takes a partition by hand for each call; that is what blocks
# are for.
#
# ## NNX
#
# In `flax.nnx` the variables are in the modules, and `DiffState` says which are
# differentiated.


# %%
class NNXClassifier(nnx.Module):
    def __init__(self, weights):
        rngs = nnx.Rngs(0)
        lower, upper = nnx.Linear(64, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.encoder = nnx.List([lower, upper])
        self.head = nnx.Linear(16, 10, rngs=rngs)
        for linear, given in zip([lower, upper, self.head], weights, strict=True):
            linear.kernel[...], linear.bias[...] = given

    def __call__(self, x):
        for linear in self.encoder:
            x = nnx.relu(linear(x))
        return self.head(x)


of_head = nnx.DiffState(0, nnx.All(nnx.Param, nnx.PathContains('head')))
theirs = nnx.grad(lambda m: cross_entropy(m(images)), argnums=of_head)(
    NNXClassifier(layers(params))
)

ours = sg.grad(loss, wrt='head/**')(params)
assert_same(
    ours['head'], {name: theirs['head'][name][...] for name in ('bias', 'kernel')}
)

# %% [markdown]
# The same gradient. `DiffState` speaks of the gradient call; a stop in one part of a
# model is written there with `lax.stop_gradient`, or with a view of `flax_sg.nnx`.
# Its `PathContains('head')` takes every path with that name in it, `encoder/head` too;
# a glob says from where.
#
# ## optax, and the things that move frozen weights
#
# Stops and filters are about gradients. The optimizer comes after them, and most
# mistakes happen there. Here the encoder should be frozen and the head trained, in five
# common ways, and we measure how far both move. (A mask is easily inverted:
# `optax.masked(tx, mask)` applies `tx` where the mask is True, `optax.freeze(mask)`
# freezes there.)

# %%
trainable = sg.mask(params, trained='head/**')
frozen = sg.mask(params, frozen='encoder/**')
adamw = optax.adamw(3e-3, weight_decay=0.1)
to_zero = optax.masked(optax.set_to_zero(), frozen)
WAYS = {
    'stopped, AdamW': (stopped, adamw, 0),
    'stopped after 10 steps, Adam': (stopped, optax.adam(3e-3), 10),
    'optax.masked(AdamW)': (loss, optax.masked(adamw, trainable), 0),
    'masked, then set_to_zero': (
        loss,
        optax.chain(optax.masked(adamw, trainable), to_zero),
        0,
    ),
    'sg.freeze(AdamW)': (loss, sg.freeze(adamw, 'encoder/**'), 0),
}


def distances(frozen_loss, tx, warmup):
    """How far encoder and head are from where they were, after each step."""

    @partial(jax.jit, static_argnums=0)
    def step(loss, params, state):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    now, state = params, tx.init(params)
    for _ in range(warmup):
        now, state = step(loss, now, state)
    then, found = now, {'encoder': [], 'head': []}
    for _ in range(STEPS):
        now, state = step(frozen_loss, now, state)
        for part, distance in found.items():
            change = optax.tree.sub(now[part], then[part])
            distance.append(float(optax.tree.norm(change)))
    return found


moved = {name: distances(*case) for name, case in WAYS.items()}

# %%
figure, axes = plt.subplots(figsize=(8.5, 3.6))
colors, styles = (BLUE, ORANGE, GREEN, GREY, BLACK), ('-', '--', '-.', '-', ':')
for (name, found), color, style in zip(moved.items(), colors, styles, strict=True):
    width = 5 if color == GREY else 2
    axes.plot(
        range(1, STEPS + 1), found['encoder'], style, color=color, lw=width, label=name
    )
axes.set_yscale('symlog', linthresh=1e-3)
axes.set(xlabel='step', ylabel='distance of the encoder', xlim=(1, STEPS))
axes.set_ylim(-2e-4, 30)
axes.set_title('How far a frozen encoder moves')
axes.legend(loc='center left', bbox_to_anchor=(1, 0.5))
plt.show()
far = {
    name: {part: distance[9] for part, distance in found.items()}
    for name, found in moved.items()
}
print(f'{"after ten steps":28}      encoder   head')
for name, found in far.items():
    print(f'{name:28} {found["encoder"]:12.3f} {found["head"]:6.3f}')

# %% [markdown]
# - **Stopped, AdamW**: the gradient is zero, and the weights decay. Weight decay reads
#   weights, not gradients. (PyTorch skips a parameter whose gradient is None, decay and
#   all. optax is given zeros and cannot know.)
# - **Stopped after ten steps, Adam**: the gradient is zero from then on, and momentum
#   still moves the weights for a while. PyTorch does the same if `zero_grad` sets
#   gradients to zero; its default is None.
# - **`optax.masked`** alone: where the mask is False it passes on the *raw gradient*,
#   and `apply_updates` adds it. That is gradient ascent with a rate of one: the curve
#   leaves the picture at once, and some steps later the weights are NaN.
# - **`set_to_zero`** after it (or `optax.freeze`) keeps the encoder where it is. But
#   its
#   gradient was not stopped, and a clip by the global norm before it counts it.
# - **`sg.freeze`**, outermost, hides the encoder from the optimizer: no decay, no
#   moments, no share in the norm.
#
# The clip changes the result, not only the cost. The part that *is* trained gets
# another step:

# %%
clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))


def head_step(tx):
    updates, _ = tx.update(jax.grad(loss)(params), tx.init(params), params)
    return float(optax.tree.norm(updates['head']))


clips = {
    'clip, then set_to_zero': head_step(optax.chain(clipped, to_zero)),
    'sg.freeze(clip)': head_step(sg.freeze(clipped, 'encoder/**')),
}
for name, length in clips.items():
    print(f'{name:22} a step of {length:.3f} for the head, where 0.1 is allowed')

# %% [markdown]
# ## What was claimed
#
# The comparisons above are to the last bit. These follow:

# %%
plain, lower_flows, cut = torch_ways.values()
# requires_grad_(False): the layer itself has no gradient, the one below all of it.
assert_same(lower_flows[0], plain[0])
assert not any(leaf.any() for leaf in lower_flows[1])
# detach: nothing below has.
assert not any(leaf.any() for layer in cut[:2] for leaf in layer)
assert_same(cut[2], plain[2])
# A misspelled name is silent there, and an error that suggests a name here.
assert all(leaf.any() for name in names for leaf in silent[name].values())
assert "Did you mean 'encoder/**'?" in complaint

# Batch statistics: who updates them, and who uses them.
by_batch, _ = normed_by_hand(use_running_average=False)
by_average, _ = normed_by_hand(use_running_average=True)
for state, (out, new) in norm_ways.items():
    assert_same(out, by_average if state == 'eval' else by_batch)
    stays = jax.tree.map(np.array_equal, new['batch_stats'], NORM['batch_stats'])
    assert all(jax.tree.leaves(stays)) == (state != 'update')

# Frozen and thawed: the encoder had no moments, and the head keeps its own.
assert_same(stepped['encoder'], params['encoder'])
assert not np.array_equal(stepped['head']['kernel'], params['head']['kernel'])
assert_same(after['head']['kernel'], before)
assert with_moments == ['head'] and sorted(after) == ['encoder', 'head']
assert not any(leaf.any() for leaf in jax.tree.leaves(after['encoder']))

# The masks are what their names say.
assert trainable == {
    'encoder': {name: {'bias': False, 'kernel': False} for name in params['encoder']},
    'head': {'bias': True, 'kernel': True},
}
assert frozen == jax.tree.map(lambda is_trained: not is_trained, trainable)
# Of five ways to freeze, three move what is frozen. All of them train the head.
encoder = {name: found['encoder'] for name, found in far.items()}
assert encoder['sg.freeze(AdamW)'] == encoder['masked, then set_to_zero'] == 0.0
assert min(encoder['stopped, AdamW'], encoder['stopped after 10 steps, Adam']) > 0.001
assert encoder['optax.masked(AdamW)'] > 1000
assert min(found['head'] for found in far.values()) > 0.1
# Where the encoder stays, the head takes the very same steps.
assert moved['sg.freeze(AdamW)']['head'] == moved['masked, then set_to_zero']['head']
# Where it does not stay, the first update adds its raw gradient: ascent.
tx = WAYS['optax.masked(AdamW)'][1]
grads = jax.grad(loss)(params)
updates, _ = tx.update(grads, tx.init(params), params)
assert_same(updates['encoder'], grads['encoder'])
assert not np.array_equal(updates['head']['kernel'], grads['head']['kernel'])
assert abs(clips['sg.freeze(clip)'] - 0.1) < 1e-6
assert clips['clip, then set_to_zero'] < 0.05

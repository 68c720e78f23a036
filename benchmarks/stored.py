"""Losses with a frozen part, and each as a trainer by hand that stores features."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen

import flax_sg as sg
from benchmarks.models import Layer, Transformer
from flax_sg import linen as nn


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large the models are.

    Attributes:
        depth: layers of a frozen part; a trained denoiser or student has half of them.
        width: the width of layers, and four times the channels of a convolution.
        batch: the number of examples.
        tokens: tokens in an example.
        image: the side of an image, in pixels.
    """

    depth: int = 8
    width: int = 256
    batch: int = 32
    tokens: int = 32
    image: int = 32


SMALL = Sizes(2, 8, 3, 4, 8)


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss of which a part is frozen.

    Attributes:
        name: the name in the tables.
        loss: a function of parameters, data, and what is new at each step.
        params: the parameters.
        data: the arguments for a batch.
        each: the arguments that are new at each step, such as keys.
        trained: the entries of ``params`` that are trained.
        early: by hand: the features, of parameters and data.
        late: by hand: the loss of parameters, features, and what is new at each step.
            None if there is nothing to store.
    """

    name: str
    loss: Callable[..., jax.Array]
    params: dict[str, Any]
    data: Sequence[jax.Array]
    trained: Sequence[str]
    early: Callable[..., Any]
    late: Callable[..., jax.Array] | None
    each: Sequence[jax.Array] = ()

    @functools.cached_property
    def live(self) -> Any:
        """What the loss trains."""
        return sg.live(self.loss, self.params, *self.data, *self.each)

    def precomputed(self) -> Any:
        """The loss in two."""
        first = 1 + len(self.data)
        each = range(first, first + len(self.each))
        args = *self.data, *self.each
        return sg.precompute(
            self.loss, self.params, *args, wrt=self.live, each=tuple(each)
        )

    @property
    def parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The entries that are trained, and the others."""
        own = {name: self.params[name] for name in self.trained}
        return own, {name: x for name, x in self.params.items() if name not in own}

    def step(self, late: Callable[..., Any]) -> Callable[..., Any]:
        """Value and gradient of a function of parameters, by hand."""

        def step(own: dict[str, Any], others: dict[str, Any], *args: Any) -> Any:
            return jax.value_and_grad(lambda own: late({**others, **own}, *args))(own)

        return step


class Tower(linen.Module):
    """Layers of a perceptron with residuals."""

    depth: int
    width: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The last layer."""
        for _ in range(self.depth):
            x = x + linen.gelu(linen.Dense(self.width)(linen.LayerNorm()(x)))
        return x


class Backbone(linen.Module):
    """Convolutions with batch normalization, and the mean over the image."""

    depth: int
    channels: int

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Features of each image."""
        for _ in range(self.depth):
            x = linen.Conv(self.channels, (3, 3), use_bias=False)(x)
            x = linen.relu(linen.BatchNorm(use_running_average=False)(x))
        return x.mean((1, 2))


class Denoiser(linen.Module):
    """A tower that is told the time."""

    depth: int
    width: int

    @linen.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """The noise in a latent."""
        x = jnp.concatenate([x, time], -1)
        return Tower(self.depth, self.width)(linen.Dense(self.width)(x))


def _made(number: int, module: linen.Module, *args: Any) -> Any:
    return jax.jit(module.init)(jax.random.key(number), *args)['params']


def _data(number: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape)


def _entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.mean(entropy)


def convolutions(size: Sizes) -> Case:
    """A head on a convolutional backbone in evaluation mode."""
    backbone = Backbone(size.depth, size.width // 4)
    layers = linen.Dense(8 * size.width), linen.relu, linen.Dense(10)
    head = linen.Sequential(layers)
    x = _data(0, size.batch, size.image, size.image, 3)
    labels = jnp.arange(size.batch) % 10
    variables = jax.jit(backbone.init)(jax.random.key(1), x)
    stats = variables['batch_stats']
    params = {
        'backbone': variables['params'],
        'head': _made(2, head, _data(3, 1, size.width // 4)),
    }

    def run(module: linen.Module, params: Any, x: jax.Array) -> jax.Array:
        return module.apply({'params': params['backbone'], 'batch_stats': stats}, x)

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return late(params, (run(nn.Frozen(backbone, state='eval'), params, x), labels))

    def early(params: Any, x: jax.Array, labels: jax.Array) -> Any:
        h = x
        for n in range(size.depth):
            layer, norm = f'Conv_{n}', f'BatchNorm_{n}'
            own, seen = params['backbone'][norm], stats[norm]
            conv = linen.Conv(size.width // 4, (3, 3), use_bias=False)
            h = conv.apply({'params': params['backbone'][layer]}, h)
            norms = linen.BatchNorm(use_running_average=True)
            h = linen.relu(norms.apply({'params': own, 'batch_stats': seen}, h))
        return h.mean((1, 2)), labels

    def late(params: Any, features: Any) -> jax.Array:
        h, labels = features
        return _entropy(head.apply({'params': params['head']}, h), labels)

    data = x, labels
    return Case('head on a CNN', loss, params, data, ['head'], early, late)


def encoder(size: Sizes) -> Case:
    """A head on a transformer."""
    model = Transformer(size.depth, size.width)
    x = _data(0, size.batch, size.tokens, size.width)
    tree = _made(1, model, x)
    params = {'head': tree.pop('head'), 'encoder': tree}
    stop = nn.stop_gradient

    def loss(params: Any, x: jax.Array) -> jax.Array:
        net = model.clone(stop=stop, frozen='layer_*/**')
        tree = {**params['encoder'], 'head': params['head']}
        return jnp.mean(net.apply({'params': tree}, x) ** 2)

    def early(params: Any, x: jax.Array) -> jax.Array:
        for number in range(size.depth):
            tree = {'params': params['encoder'][f'layer_{number}']}
            x, _ = Layer(size.width).apply(tree, x)
        return x

    def late(params: Any, h: jax.Array) -> jax.Array:
        return jnp.mean(linen.Dense(3).apply({'params': params['head']}, h) ** 2)

    return Case('head on a transformer', loss, params, [x], ['head'], early, late)


def denoiser(size: Sizes) -> Case:
    """A denoiser of latents: the encoder of images is frozen, noise is new."""
    frozen = linen.Sequential([Tower(size.depth, size.width), linen.Dense(8)])
    net = Denoiser(size.depth // 2, size.width)
    x = _data(0, size.batch * size.tokens, size.width)
    latents = _data(1, size.batch * size.tokens, 8)
    params = {
        'encoder': _made(2, frozen, x),
        'denoiser': _made(3, net, latents, x[:, :1]),
    }
    params['out'] = _made(4, linen.Dense(8), x)

    def early(params: Any, x: jax.Array) -> jax.Array:
        return frozen.apply({'params': params['encoder']}, x)

    def loss(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        z = nn.Frozen(frozen).apply({'params': params['encoder']}, x)
        return late(params, z, key)

    def late(params: Any, z: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key)
        time = jax.random.uniform(keys[0], (len(z), 1))
        noise = jax.random.normal(keys[1], z.shape)
        noisy = jnp.sqrt(1 - time) * z + jnp.sqrt(time) * noise
        h = net.apply({'params': params['denoiser']}, noisy, time)
        found = linen.Dense(8).apply({'params': params['out']}, h)
        return jnp.mean((found - noise) ** 2)

    trained, each = ['denoiser', 'out'], [jax.random.key(5)]
    return Case(
        'denoiser behind an encoder', loss, params, [x], trained, early, late, each
    )


def student(size: Sizes) -> Case:
    """A student of half the depth, who reads the inputs and what the teacher says."""
    teacher = linen.Sequential([Tower(size.depth, size.width), linen.Dense(10)])
    layers = linen.Dense(size.width), Tower(size.depth // 2, size.width)
    pupil = linen.Sequential([*layers, linen.Dense(10)])
    x = _data(0, size.batch * size.tokens, size.width)
    params = {'teacher': _made(1, teacher, x), 'student': _made(2, pupil, x)}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        said = nn.Frozen(teacher).apply({'params': params['teacher']}, x)
        return late(params, (x, said))

    def early(params: Any, x: jax.Array) -> Any:
        return x, teacher.apply({'params': params['teacher']}, x)

    def late(params: Any, features: Any) -> jax.Array:
        x, said = features
        found = pupil.apply({'params': params['student']}, x)
        target = jax.nn.softmax(said)
        return -jnp.mean(jnp.sum(target * jax.nn.log_softmax(found), -1))

    name = 'student beside a teacher'
    return Case(name, loss, params, [x], ['student'], early, late)


def stack(size: Sizes) -> Case:
    """A scanned stack of which the first three quarters are frozen, and a head."""
    layers = functools.partial(
        nn.scan,
        Layer,
        variable_axes={'params': 0},
        split_rngs={'params': True},
        length=size.depth,
    )
    head, frozen = linen.Dense(3), 3 * size.depth // 4
    x = _data(0, size.batch, size.tokens, size.width)
    params = {'layers': _made(1, layers()(size.width), x), 'head': _made(2, head, x)}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        net = layers(frozen_layers=slice(frozen))(size.width)
        return end(params, net.apply({'params': params['layers']}, x, None)[0])

    def run(layers: Any, x: jax.Array) -> jax.Array:
        def turn(x: jax.Array, layer: Any) -> Any:
            return Layer(size.width).apply({'params': layer}, x)

        return jax.lax.scan(turn, x, layers)[0]

    def early(params: Any, x: jax.Array) -> jax.Array:
        return run(jax.tree.map(lambda leaf: leaf[:frozen], params['layers']), x)

    def late(params: Any, x: jax.Array) -> jax.Array:
        above = jax.tree.map(lambda leaf: leaf[frozen:], params['layers'])
        return end(params, run(above, x))

    def end(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(head.apply({'params': params['head']}, x) ** 2)

    name, trained = 'first layers of a scanned stack', ['layers', 'head']
    return Case(name, loss, params, [x], trained, early, late)


def adapter(size: Sizes) -> Case:
    """A trained layer in front of a frozen tower: there is nothing to store."""
    tower = Tower(size.depth, size.width)
    first = linen.Dense(size.width)
    x = _data(0, size.batch * size.tokens, size.width)
    params = {'adapter': _made(1, first, x), 'tower': _made(2, tower, x)}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        x = first.apply({'params': params['adapter']}, x)
        return jnp.mean(nn.Frozen(tower).apply({'params': params['tower']}, x) ** 2)

    def early(params: Any, x: jax.Array) -> jax.Array:
        del params
        return x

    return Case('adapter in front', loss, params, [x], ['adapter'], early, None)


CASES = (convolutions, encoder, denoiser, student, stack, adapter)

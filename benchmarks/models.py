"""Small models of the kinds that people freeze.

Each takes ``stop``, which makes a context manager. ``nn.stop_gradient`` makes blocks.
``no_stop`` gives the bare model, which an oracle applies to stopped copies.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

Stop = Callable[[Any], contextlib.AbstractContextManager[Any]]


def no_stop(where: Any) -> contextlib.AbstractContextManager[None]:
    """Stops nothing."""
    del where
    return contextlib.nullcontext()


class Layer(nn.Module):
    """A transformer layer with the signature of a scan body."""

    width: int
    heads: int = 2

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        """One layer."""
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads)(h)
        h = nn.LayerNorm()(x)
        return x + nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(h))), None


class Transformer(nn.Module):
    """A stack of separate layers and a head."""

    depth: int = 12
    width: int = 16
    stop: Stop = no_stop
    frozen: Any = ()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of each token."""
        with self.stop(self.frozen):
            for number in range(self.depth):
                x, _ = Layer(self.width, name=f'layer_{number}')(x)
        return nn.Dense(3, name='head')(x)


class ScannedTransformer(nn.Module):
    """A transformer with one scanned layer.

    Attributes:
        depth: the number of layers.
        width: the width of each.
        remat: whether layers are checkpointed.
        stop: opens a block around the embedding and the layers.
        frozen: the filter of the block.
        scan: ``nn.scan``, or a function with the same arguments.
    """

    depth: int = 12
    width: int = 16
    remat: bool = False
    stop: Stop = no_stop
    frozen: Any = ()
    scan: Any = nn.scan

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of each token."""
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        scanned = self.scan(
            layer,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=self.depth,
        )
        with self.stop(self.frozen):
            x = nn.Dense(self.width, name='embed')(x)
            x, _ = scanned(self.width, name='layers')(x, None)
        return nn.Dense(3, name='head')(x)


class ThreeLosses(nn.Module):
    """One inference pass and one sampler, shared by three losses (flax #1857)."""

    stop: Stop = no_stop
    width: int = 8

    def setup(self) -> None:
        """Names the modules so that each part is one pattern."""
        self.code_in = nn.Dense(self.width)
        self.code_out = nn.Dense(8)
        self.gln_0 = nn.Dense(self.width)
        self.gln_1 = nn.Dense(1)
        self.explanation = nn.Dense(6)

    def infer(self, x: jax.Array) -> jax.Array:
        """The code of an input."""
        return self.code_out(jnp.tanh(self.code_in(x)))

    def score(self, code: jax.Array) -> jax.Array:
        """How good a code is."""
        return self.gln_1(jnp.tanh(self.gln_0(code)))

    def sample(self, x: jax.Array) -> jax.Array:
        """A code that was improved step by step."""

        def refine(model: 'ThreeLosses', code: jax.Array) -> tuple[jax.Array, None]:
            return code + 0.1 * jnp.tanh(model.score(code)), None

        sampler = nn.scan(
            lambda model, code, _: refine(model, code),
            variable_broadcast='params',
            split_rngs={'params': False},
            length=4,
        )
        return sampler(self, self.infer(x), None)[0]

    def gln_loss(self, x: jax.Array) -> jax.Array:
        """The loss of ``gln_*``."""
        return jnp.mean(self.score(self.infer(x)) ** 2)

    def code_loss(self, x: jax.Array, sample: jax.Array) -> jax.Array:
        """The loss of ``code_*``."""
        code = self.infer(x)
        return jnp.mean((code - sample) ** 2) + jnp.mean(self.score(code))

    def explanation_loss(self, x: jax.Array, sample: jax.Array) -> jax.Array:
        """The loss of ``explanation``."""
        explained = self.explanation(sample) + self.explanation(self.infer(x))
        return jnp.mean((explained - x) ** 2)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The sum of three losses, each of which trains one part."""
        with self.stop(True):
            sample = self.sample(x)
        with self.stop('code_*/**'):
            gln = self.gln_loss(x)
        with self.stop('gln_*/**'):
            code = self.code_loss(x, sample)
        with self.stop('code_*/**'):
            explanation = self.explanation_loss(x, sample)
        return gln + code + explanation


class Encoder(nn.Module):
    """Two dense layers."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The features of a view."""
        return nn.Dense(self.width)(nn.relu(nn.Dense(self.width)(x)))


class Byol(nn.Module):
    """Two views, each predicting the target network's features of the other view.

    The weights of ``target`` are a slow average of the weights of ``online``. Both are
    parameters, as in a train state, and no gradient may reach ``target``.

    Attributes:
        width: the width of all layers.
        stop: opens a block around the target.
        view: makes the target to call from both networks; by default, ``target``.
    """

    width: int = 16
    stop: Stop = no_stop
    view: Any = staticmethod(lambda online, target: target)

    def setup(self) -> None:
        """Makes the networks."""
        self.online = Encoder(self.width)
        self.target = Encoder(self.width)
        self.predictor = nn.Dense(self.width)

    def __call__(self, one: jax.Array, two: jax.Array) -> jax.Array:
        """The loss of a batch of pairs."""
        return self.distance(one, two) + self.distance(two, one)

    def distance(self, seen: jax.Array, other: jax.Array) -> jax.Array:
        """The distance of one view's prediction from the other view's target."""
        predicted = self.predictor(self.online(seen))
        with self.stop('target/**'):
            wanted = self.view(self.online, self.target)(other)
        return jnp.mean((predicted - wanted) ** 2)


class LoRA(nn.Module):
    """A frozen base layer with a trained low-rank update."""

    features: int
    rank: int = 2
    stop: Stop = no_stop

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The sum of both."""
        a = self.param('a', nn.initializers.normal(), (x.shape[-1], self.rank))
        b = self.param('b', nn.initializers.normal(), (self.rank, self.features))
        with self.stop('base/**'):
            y = nn.Dense(self.features, name='base')(x)
        return y + x @ a @ b


class LoRANet(nn.Module):
    """Layers with a low-rank update each."""

    stop: Stop = no_stop
    widths: tuple[int, ...] = (16, 4)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The output of the last layer."""
        for width in self.widths[:-1]:
            x = jnp.tanh(LoRA(width, stop=self.stop)(x))
        return LoRA(self.widths[-1], stop=self.stop)(x)


class Convolution(nn.Module):
    """A convolution, normalized by statistics of the batch."""

    width: int
    kernel: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns images with ``width`` channels."""
        x = nn.Conv(self.width, (self.kernel, self.kernel), use_bias=False)(x)
        return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)


class ResNet(nn.Module):
    """Residual blocks of two convolutions on a stem."""

    depth: int = 4
    width: int = 8
    stop: Stop = no_stop

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of each image."""
        with self.stop('stem/**'):
            x = nn.relu(Convolution(self.width, 7, name='stem')(x))
        for _ in range(self.depth):
            h = nn.relu(Convolution(self.width)(x))
            x = nn.relu(x + Convolution(self.width)(h))
        return nn.Dense(10, name='head')(jnp.mean(x, (1, 2)))

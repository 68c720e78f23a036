"""Models that programs are made of: small, and of the kinds that people freeze.

Each takes ``stop``, which makes a context manager: ``nn.stop_gradient`` to spell a stop
as a block, ``no_stop`` for the bare model that an oracle applies to stopped copies.
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
        with self.stop(self.frozen):
            for number in range(self.depth):
                x, _ = Layer(self.width, name=f'layer_{number}')(x)
        return nn.Dense(3, name='head')(x)


class ScannedTransformer(nn.Module):
    """The same with one scanned layer."""

    depth: int = 12
    width: int = 16
    remat: bool = False
    stop: Stop = no_stop
    frozen: Any = ()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(self.width, name='embed')(x)
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        scanned = nn.scan(
            layer,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=self.depth,
        )
        with self.stop(self.frozen):
            x, _ = scanned(self.width, name='layers')(x, None)
        return nn.Dense(3, name='head')(x)


class ThreeLosses(nn.Module):
    """One inference pass and one sampler, shared by three losses (flax #1857)."""

    stop: Stop = no_stop

    def setup(self) -> None:
        self.code_in = nn.Dense(8)
        self.code_out = nn.Dense(8)
        self.gln_0 = nn.Dense(8)
        self.gln_1 = nn.Dense(1)
        self.explanation = nn.Dense(6)

    def infer(self, x: jax.Array) -> jax.Array:
        return self.code_out(jnp.tanh(self.code_in(x)))

    def score(self, code: jax.Array) -> jax.Array:
        return self.gln_1(jnp.tanh(self.gln_0(code)))

    def __call__(self, x: jax.Array) -> jax.Array:
        with self.stop(True):
            code = self.infer(x)

            def refine(model: 'ThreeLosses', code: jax.Array) -> tuple[jax.Array, None]:
                return code + 0.1 * jnp.tanh(model.score(code)), None

            sampler = nn.scan(
                lambda model, code, _: refine(model, code),
                variable_broadcast='params',
                split_rngs={'params': False},
                length=4,
            )
            sample, _ = sampler(self, code, None)
        with self.stop(['code_*/**', 'explanation/**']):
            gln = jnp.mean(self.score(self.infer(x)) ** 2)
        with self.stop(['gln_*/**', 'explanation/**']):
            coding = jnp.mean((self.infer(x) - sample) ** 2) + jnp.mean(
                self.score(self.infer(x))
            )
        with self.stop(['gln_*/**', 'code_*/**']):
            explained = self.explanation(sample) + self.explanation(self.infer(x))
            explanation = jnp.mean((explained - x) ** 2)
        return gln + coding + explanation


class Siamese(nn.Module):
    """An online encoder that predicts its own stopped output."""

    stop: Stop = no_stop

    def setup(self) -> None:
        self.encoder = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(8)])
        self.predictor = nn.Dense(8)

    def encode(self, x: jax.Array) -> jax.Array:
        return self.encoder(x)

    def predict(self, x: jax.Array) -> jax.Array:
        return self.predictor(self.encoder(x))

    def __call__(self, x: jax.Array) -> jax.Array:
        predicted = self.predict(x)
        with self.stop('encoder/**'):
            target = self.encode(x[:, ::-1])
        return jnp.mean((predicted - target) ** 2)


class LoRA(nn.Module):
    """A frozen base layer with a trained low-rank update."""

    features: int
    rank: int = 2
    stop: Stop = no_stop

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        a = self.param('a', nn.initializers.normal(), (x.shape[-1], self.rank))
        b = self.param('b', nn.initializers.normal(), (self.rank, self.features))
        with self.stop('base/**'):
            y = nn.Dense(self.features, name='base')(x)
        return y + x @ a @ b


class LoRANet(nn.Module):
    """Two layers with a low-rank update each."""

    stop: Stop = no_stop

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(LoRA(16, stop=self.stop)(x))
        return LoRA(4, stop=self.stop)(x)

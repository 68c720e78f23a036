"""Modules without blocks, of plain Flax, which programs use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen


def param(module: linen.Module, name: str, size: int = 3) -> jax.Array:
    """A parameter, a vector."""
    return module.param(name, linen.initializers.normal(), (size,))


class Do(linen.Module):
    """Does something, given as a function of the module and its arguments."""

    body: Callable[..., Any]

    @linen.compact
    def __call__(self, *args: Any) -> Any:
        return self.body(self, *args)


class Cell(linen.Module):
    """Uses one of its layers twice."""

    @linen.compact
    def __call__(self, x):
        a, b = linen.Dense(3, name='a'), linen.Dense(3, name='b')
        return x + a(jnp.tanh(b(jnp.tanh(a(x)))))


class Affine(linen.Module):
    """Reads its parameters at each call."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        size = x.shape[-1]
        return x * param(self, 'w', size) + param(self, 'b', size)


class Kid(linen.Module):
    """Keeps the same parameters, raw and derived."""

    def setup(self):
        self.w = param(self, 'w')
        self.b = param(self, 'b')
        self.w2 = self.w * self.w + self.b

    def __call__(self, x):
        return x * self.w + self.b

    @property
    def doubled(self):
        return self.w + self.get_variable('params', 'b')


class Kept(linen.Module):
    """Keeps a function, too."""

    def setup(self):
        self.w, self.b = param(self, 'w', 4), param(self, 'b', 4)
        self.w2 = jnp.tanh(self.w) * self.b
        self.scaled = lambda x: x * self.w2

    def __call__(self, x):
        return self.scaled(x) + self.w2 + self.w + self.variables['params']['b']


class Square(linen.Dense):
    """A dense layer between vectors of four numbers."""

    features: int = 4


class Recurrent(linen.Module):
    """A cell that belongs to this module, in an RNN."""

    @linen.compact
    def __call__(self, x):
        cell = linen.SimpleCell(4, name='cell')
        return linen.RNN(cell, name='rnn')(x[None])[0]


class Boxed(linen.Module):
    @linen.compact
    def __call__(self, x):
        normal = linen.initializers.lecun_normal()
        boxed = linen.with_partitioning(normal, ('a', None))
        return linen.Dense(4, kernel_init=boxed, name='base')(x)


class Lora(linen.Module):
    """``nn.share_scope``: both have one path."""

    def setup(self):
        self.base = linen.Dense(4)
        linen.share_scope(self, self.base)
        self.a = self.param('A', linen.initializers.normal(), (4, 4))
        self.a2 = self.a * 2.0

    def __call__(self, x):
        return self.base(x) + x @ self.a2


# The modules of random models, by the kind of a ``Leaf``: arrays of shape (2, 4) to
# arrays of that shape.
LEAVES: dict[str, type[linen.Module]] = {
    'affine': Affine,
    'kept': Kept,
    'dense': Square,
    'rnn': Recurrent,
    'boxed': Boxed,
    'lora': Lora,
}

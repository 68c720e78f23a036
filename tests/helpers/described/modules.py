"""Modules without blocks, of plain Flax, which programs use."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen


def param(module: linen.Module, name: str, size: int = 3) -> jax.Array:
    """A parameter, a vector."""
    return module.param(name, linen.initializers.normal(), (size,))


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

"""The compiled program equals one with the stop by hand at the same place (G6)."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from benchmarks import models
from flax_sg import linen as nn
from flax_sg.testing import assert_same_program
from tests.helpers import oracle, programs

X = jnp.linspace(-1.0, 1.0, 2 * 4 * 16).reshape(2, 4, 16)


def shapes_of(model: linen.Module, x: Any) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0), x)['params']


def step_of(model: linen.Module) -> Callable[..., Any]:
    """A function that returns the loss, and gradients of parameters and input."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply({'params': params}, x))

    return jax.value_and_grad(loss, argnums=(0, 1))


def by_hand(model: linen.Module, pattern: str) -> Callable[..., Any]:
    """The same on a copy of the weights in which those selected are stopped."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        selects = lambda path: re.fullmatch(pattern, path) is not None  # noqa: E731
        return jnp.sum(model.apply({'params': oracle.stopped(params, selects)}, x))

    return jax.value_and_grad(loss, argnums=(0, 1))


class Cell(linen.Module):
    """A scanned layer: plain, rematerialized as a method, or around another scan."""

    kind: str = 'plain'
    width: int = 32

    @linen.compact
    def plain(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return x + jnp.tanh(linen.Dense(self.width)(x)), None

    @linen.remat
    @linen.compact
    def remat(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return x + jnp.tanh(linen.Dense(self.width)(x)), None

    @linen.compact
    def nested(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return scanned(Cell, 3)(width=self.width)(x, None)

    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return getattr(self, self.kind)(x, _)


def scanned(cell: Any, length: int) -> Any:
    return linen.scan(cell, length=length, **oracle.STACKED)


class MadeBefore(linen.Module):
    """A scanned layer that was made before the block opens."""

    kind: str = 'plain'
    stop: models.Stop = models.no_stop

    def setup(self) -> None:
        self.embed = linen.Dense(32)
        self.layers = scanned(Cell, 8)(kind=self.kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        with self.stop('layers/**'):
            x, _ = self.layers(x, None)
        return x


@pytest.mark.parametrize('kind', ['plain', 'remat', 'nested'])
def test_a_stop_around_a_scan_costs_no_copy_of_the_stack(kind: str) -> None:
    """Inside the body the stopped stack would become a residual of every step."""
    bare = MadeBefore(kind)
    args = shapes_of(bare, X), X
    blocked = programs.compiled(step_of(MadeBefore(kind, nn.stop_gradient)), *args)
    hand = programs.compiled(by_hand(bare, 'layers/.*'), *args)
    assert_same_program(blocked, hand)
    temporary = blocked.memory_analysis().temp_size_in_bytes
    assert temporary == hand.memory_analysis().temp_size_in_bytes

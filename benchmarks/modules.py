"""Measures the time to trace and lower gradients of many small modules."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen

from benchmarks import foreign, spellings, timing, trainers
from benchmarks.rivals import BY_HAND
from benchmarks.selections import NOTHING, Selection
from flax_sg import linen as nn

WIDTH = 4
KERNELS = Selection.of('.*/kernel')
NUMBERS = (10, 100, 1000, 3000)
FEW = (2, 4)
# Up to this number all ways are measured; above it, only those in GROWING.
MANY = 100
# No round begins after this time, except the first two.
SECONDS = 25.0


class Small(linen.Module):
    """A dense layer.

    Attributes:
        stop: opens a block in the module.
    """

    stop: Any = None

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns as many features as the input has."""
        with self.stop('dense/kernel') if self.stop else contextlib.nullcontext():
            return jnp.tanh(linen.Dense(WIDTH, name='dense')(x))


class Parameters(linen.Module):
    """The sum of some parameters, which are numbers."""

    names: tuple[str, ...]

    @linen.compact
    def __call__(self) -> jax.Array:
        """Returns the sum."""
        ones = linen.initializers.ones
        return jnp.sum(jnp.stack([self.param(name, ones, ()) for name in self.names]))


class Many(linen.Module):
    """Small modules, one after another.

    Attributes:
        number: the number of modules.
        make: makes one module, given its name.
    """

    number: int
    make: Callable[..., Any] = Small

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the sum of the last module's output."""
        for number in range(self.number):
            x = self.make(name=f'small_{number}')(x)
        return jnp.sum(x)


def mapped(name: str) -> Any:
    """Makes a module whose class is lifted by ``nn.map_variables``."""

    def stop(variables: Any) -> Any:
        dense = variables['params']['dense']
        stopped = {**dense, 'kernel': jax.lax.stop_gradient(dense['kernel'])}
        return {'params': {'dense': stopped}}

    return linen.map_variables(Small, 'params', trans_in_fn=stop)(name=name)


# By way to freeze: how modules are made, and how the whole model is applied.
WAYS: dict[str, tuple[Callable[..., Any], spellings.Spelling]] = {
    BY_HAND: (Small, spellings.by_hand),
    'nothing stopped': (Small, spellings.bare),
    'nn.map_variables': (Small, trainers.map_variables),
    'nn.map_variables in each': (mapped, spellings.bare),
    'hk.custom_getter': (Small, foreign.custom_getter),
    'flax_sg block': (Small, spellings.block_around),
    'flax_sg block in each': (
        lambda name: Small(nn.stop_gradient, name=name),
        spellings.bare,
    ),
    'flax_sg lifted class in each': (
        lambda name: nn.stop_gradient(Small, 'dense/kernel')(name=name),
        spellings.bare,
    ),
    'flax_sg Frozen in each': (
        lambda name: nn.Frozen(Small(name=name), 'dense/kernel'),
        spellings.bare,
    ),
}
GROWING = (BY_HAND, 'flax_sg block', 'flax_sg block in each')


def shapes(number: int) -> tuple[Any, Any]:
    """Returns the shapes of the parameters and of an input."""
    dense = {
        'bias': jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
        'kernel': jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
    }
    params = {f'small_{i}': {'dense': dense} for i in range(number)}
    return params, jax.ShapeDtypeStruct((2, WIDTH), jnp.float32)


def lower(way: str, number: int) -> Any:
    """Traces and lowers the gradient."""
    make, spelling = WAYS[way]
    selection = NOTHING if make is not Small else KERNELS
    apply = spelling(Many(number, make), selection)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return apply({'params': params}, x)

    params, x = shapes(number)
    if spelling is foreign.custom_getter:
        run = hk.without_apply_rng(hk.transform(lambda x: loss(params, x))).apply
        return jax.jit(jax.value_and_grad(run)).lower(foreign.held(params), x)
    return jax.jit(jax.value_and_grad(loss)).lower(params, x)


def measured(numbers: Sequence[int], rounds: int) -> dict[int, dict[str, timing.Ratio]]:
    """Returns times relative to stops by hand, by the number of modules."""
    out = {}
    for number in numbers:
        ways = WAYS if number <= MANY else GROWING
        runs = {way: lambda way=way, n=number: lower(way, n) for way in ways}
        times = timing.interleaved(runs, rounds, SECONDS, warm=number <= MANY)
        out[number] = timing.ratios(times, BY_HAND)
    return out

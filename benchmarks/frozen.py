"""Measures frozen layers: memory in a scan, and time of the backward pass.

Run as ``python -m benchmarks.frozen``. Compiles for the CPU and prints one line for
each program.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from benchmarks.compiled import shapes
from benchmarks.timing import interleaved
from flax_sg import linen as nn

DEPTH, WIDTH, RANK, BATCH = 16, 256, 4, 8
# Not of JAX, which would ask for a device when this file is imported.
X = np.random.default_rng(0).standard_normal((BATCH, WIDTH), np.float32)


class Adapted(linen.Module):
    """A base layer with a low-rank adapter."""

    wrap: Any

    @linen.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        """One layer."""
        normal = linen.initializers.normal()
        a = self.param('A', normal, (WIDTH, RANK))
        b = self.param('B', normal, (RANK, WIDTH))
        base = self.wrap(linen.Dense(WIDTH, use_bias=False, name='base'))
        return jnp.tanh(base(x)) + x @ a @ b, None


class Stack(linen.Module):
    """Scanned layers; ``stop`` is a stop around the scan, hoisted by hand."""

    wrap: Any = staticmethod(lambda module: module)
    lift: Any = staticmethod(lambda cls: cls)
    stop: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """All layers."""
        layers = linen.scan(
            self.lift(Adapted),
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=DEPTH,
        )(self.wrap, name='layers')
        if self.stop:
            layers = nn.Frozen(layers, 'base/**')
        return layers(x, None)[0]


class InBody(linen.Module):
    """A layer with a stop in the scan body, written by hand."""

    dense: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        """The layer, on a stopped copy of its weights."""
        if self.is_initializing():
            return self.dense(x)
        copy = jax.lax.stop_gradient(self.dense.variables)
        return self.dense.clone(parent=None, name=None).apply(copy, x)


def step(model: Any) -> Callable[..., Any]:
    """Jits the loss with its gradients by parameters and input."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply({'params': params}, x) ** 2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def programs(place: Callable[[Any], Any] = shapes) -> dict[str, Any]:
    """Compiles a step for each place of the stop; ``place`` names the device."""
    remat = functools.partial(linen.remat, prevent_cse=False)
    models = {
        'no stop': Stack(),
        'stop in the body, by hand': Stack(InBody),
        'Frozen in the body': Stack(nn.Frozen),
        'Frozen around the scan': Stack(stop=True),
        'remat, Frozen in the body': Stack(nn.Frozen, remat),
        'remat, Frozen around the scan': Stack(lift=remat, stop=True),
    }
    out = {}
    for name, model in models.items():
        params = jax.eval_shape(model.init, jax.random.key(0), X)['params']
        out[name] = step(model).lower(*place((params, X))).compile()
    return out


def memory() -> None:
    """Prints the temporary memory and flops of a step, by where the stop is."""
    for name, compiled in programs().items():
        size = compiled.memory_analysis().temp_size_in_bytes / 1e6
        flops = compiled.cost_analysis()['flops'] / 1e6
        print(f'{name:32} {size:6.2f} MB  {flops:6.2f} MFLOP a step of the loop')


def times() -> None:
    """Prints the time of the forward and backward pass through twelve layers."""

    def model(wrap: Any) -> Any:
        return linen.Sequential([wrap(linen.Dense(1024)) for _ in range(12)])

    x = jax.random.normal(jax.random.key(0), (256, 1024))
    bare, frozen = model(lambda module: module), model(nn.Frozen)
    params = bare.init(jax.random.key(0), x)['params']
    runs = {'bare': step(bare), 'frozen': step(frozen)}
    calls = {name: functools.partial(run, params, x) for name, run in runs.items()}
    for name, seconds in interleaved(calls, 11).items():
        print(f'12 layers, {name:8} {1000 * statistics.median(seconds):7.1f} ms')


if __name__ == '__main__':
    memory()
    times()

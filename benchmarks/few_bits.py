"""Measures frozen int8 weights of a scanned stack: arguments and temporary memory.

Run as ``python -m benchmarks.few_bits``. The stack has eight layers, 512 wide, and
adapters of rank 8, which are trained. Prints a row for each way to read the weights.
``--smoke`` takes a small stack, and fails if the weights of all layers are saved.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from benchmarks.compiled import shapes
from flax_sg import errors
from flax_sg import linen as nn

DEPTH, BATCH, RANK = 8, 16, 8


def floats(path: str, weight: jax.Array) -> jax.Array:
    """The weight that is multiplied with."""
    return weight.astype(jnp.float32) * (1 / 127)


class Stored(linen.Module):
    """A product with a weight of any type."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``x @ w``."""
        shape = x.shape[-1], x.shape[-1]
        return x @ self.param('w', linen.initializers.ones, shape).astype(x.dtype)


class Adapted(linen.Module):
    """A layer with an adapter."""

    base: Callable[..., linen.Module]

    @linen.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        """One layer."""
        normal, width = linen.initializers.normal(), x.shape[-1]
        down = self.param('down', normal, (width, RANK))
        up = self.param('up', normal, (RANK, width))
        return jnp.tanh(self.base(name='base')(x) + x @ down @ up), None


def wrapped(name: str) -> linen.Module:
    """The wrapper in the body."""
    return nn.substitute(Stored(name=name), floats, where='w')


IN_CLASS = nn.substitute(Stored, floats, where='w')
AROUND = nn.substitute(floats, where='base/w')


def programs(width: int, place: Callable[[Any], Any] = shapes) -> dict[str, Any]:
    """Compiles a step for each way to read the weights; ``place`` names the device."""

    def compiled(base: Any, dtype: Any, rule: Any = lambda fn: fn) -> Any:
        model = linen.scan(
            Adapted,
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=DEPTH,
        )(base)
        x = jax.ShapeDtypeStruct((BATCH, width), jnp.float32)
        params = jax.eval_shape(model.init, jax.random.key(0), x, None)['params']
        frozen = jax.ShapeDtypeStruct((DEPTH, width, width), dtype)

        def loss(adapters: Any, frozen: Any, x: Any) -> Any:
            params = {**adapters, 'base': {'w': frozen}}
            return jnp.sum(rule(model.apply)({'params': params}, x, None)[0] ** 2)

        adapters = {name: params[name] for name in ('down', 'up')}
        args = place((adapters, frozen, x))
        return jax.jit(jax.value_and_grad(loss)).lower(*args).compile()

    with warnings.catch_warnings():
        warnings.simplefilter('ignore', errors.ScanMemoryWarning)
        return {
            'float32': compiled(Stored, jnp.float32),
            'int8, a block around the scan': compiled(Stored, jnp.int8, AROUND),
            'int8, the class form in the body': compiled(IN_CLASS, jnp.int8),
            'int8, the wrapper in the body': compiled(wrapped, jnp.int8),
        }


def rows(width: int) -> dict[str, tuple[float, float]]:
    """Returns MB (2^20 bytes) of arguments and of temporary memory, by way."""
    sizes = {n: step.memory_analysis() for n, step in programs(width).items()}
    return {
        name: (size.argument_size_in_bytes / 2**20, size.temp_size_in_bytes / 2**20)
        for name, size in sizes.items()
    }


def main() -> None:
    """Prints the table."""
    smoke = '--smoke' in sys.argv
    width = 64 if smoke else 512
    print('| the weights | arguments | temporary memory |\n|---|---|---|')
    found = rows(width)
    for name, (arguments, temporary) in found.items():
        print(f'| {name} | {arguments:.2f} MB | {temporary:.2f} MB |')
        if smoke and 'body' in name and temporary > 1.1 * found['float32'][1]:
            sys.exit(f'{name}: a scan saves what is made of frozen weights')


if __name__ == '__main__':
    main()

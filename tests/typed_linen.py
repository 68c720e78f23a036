"""A typed user program, which pyright and mypy check and nobody runs.

An `ignore` expects an error on its line, from mypy (`type:`) or from pyright. An unused
`ignore` is an error too. Both tools must see the names and types of Flax and flax_sg.
"""

from typing import assert_type

import flax.linen
import jax
import jax.numpy as jnp

import flax_sg as sg
from flax_sg import filters, testing
from flax_sg import linen as nn
from flax_sg.forms.block_decorator import BlockDecorator

# Names of Flax: classes with their fields, functions, submodules.

assert_type(nn.Dense(3), flax.linen.Dense)
assert_type(nn.Dense(features=3, use_bias=False).features, int)
assert_type(nn.relu(jnp.ones(3)), jax.Array)
assert_type(nn.recurrent.GRUCell(3), flax.linen.GRUCell)
_ = nn.Densse  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
nn.Dense(3, use_bais=False)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


class Model(nn.Module):
    """A module written as with flax.linen."""

    width: int

    def setup(self) -> None:
        """With a frozen part."""
        init = nn.initializers.zeros
        self.dense = nn.Frozen(nn.Dense(self.width, kernel_init=init), 'kernel')

    @nn.stop_gradient('dense/**')
    def __call__(self, x: jax.Array) -> jax.Array:
        """In an extent of each kind."""
        with nn.train_only('dense/**'), nn.read_only(True):
            return nn.relu(x)


assert_type(Model(3).width, int)
assert_type(Model(3)(jnp.ones(3)), jax.Array)
Model(widht=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
Model('3')  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

# flax_sg: one argument gives a value; a target gives the same kind of target.

assert_type(nn.stop_gradient('dense/**'), BlockDecorator)
assert_type(nn.stop_gradient(lambda path: path.startswith('a')), BlockDecorator)
assert_type(nn.stop_gradient(nn.Dense, 'kernel'), type[nn.Dense])
assert_type(nn.train_only(nn.Dense, 'kernel')(3), nn.Dense)
assert_type(nn.substitute('ema_params', where='dense/**'), BlockDecorator)
assert_type(nn.substitute(nn.Dense, lambda path, value: value), type[nn.Dense])
assert_type(nn.read_only('dense/**'), BlockDecorator)
nn.substitute(3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
nn.stop_gradient(3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]

half = nn.scale_gradient('dense/**', 0.5)
assert_type(half, BlockDecorator)
assert_type(half(nn.Dense(3)), flax.linen.Dense)
assert_type(half(nn.Dense), type[flax.linen.Dense])
assert_type(nn.scale_gradient(nn.Dense, 'kernel', 0.5), type[flax.linen.Dense])
Attends = nn.scale_gradient(nn.Embed, 'embedding', 0.5, methods=['attend'])
assert_type(Attends, type[flax.linen.Embed])
nn.stop_gradient(nn.Dense, 'kernel', methods=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
with (
    half,
    nn.map_cotangent(True, lambda path, ct: ct),
    nn.stop_gradient(True, levels=1),
):
    pass
nn.copy_cotangent(['a'])  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
nn.clip_gradient('a', norms=1.0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]

# Trees, derivatives, reports.

assert_type(sg.where('a/**') & ~sg.where('b', True), filters.Filter)
assert_type(sg.Path('a/b').parts, tuple[str, ...])
testing.assert_stopped(lambda params: params, 'a', {})
sg.grad(lambda params: params, wrf='a')  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
_ = sg.gradd  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

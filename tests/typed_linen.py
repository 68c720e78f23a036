"""Checked by pyright, not run: what type checkers and editors see in flax_sg.linen.

Every `pyright: ignore` here says that the line is an error; one that is not fails too.
"""

from typing import assert_type

import flax.linen

from flax_sg import linen as nn
from flax_sg import rewrites

assert_type(nn.Dense(3), flax.linen.Dense)
assert_type(nn.Dense(features=3, use_bias=False).features, int)


class Model(nn.Module):
    """A module written as with flax.linen."""

    width: int

    def setup(self) -> None:
        self.dense = nn.Dense(self.width, kernel_init=nn.initializers.zeros)


assert_type(Model(3).width, int)
Model(widht=3)  # pyright: ignore[reportCallIssue]
assert_type(nn.recurrent.GRUCell(3), flax.linen.GRUCell)
_ = nn.Densse  # pyright: ignore[reportAttributeAccessIssue]
assert_type(nn.substitute('ema_params', where='dense/**'), rewrites.Rewrite)
assert_type(nn.substitute(nn.Dense, lambda path, value: value), type[nn.Dense])
assert_type(nn.read_only('dense/**'), rewrites.Rewrite)
nn.substitute(3)  # pyright: ignore[reportArgumentType]

half = nn.scale_gradient('dense/**', 0.5)
assert_type(half, rewrites.Rewrite)
assert_type(half(nn.Dense(3)), flax.linen.Dense)
assert_type(half(nn.Dense), type[flax.linen.Dense])
with (
    half,
    nn.map_cotangent(True, lambda path, ct: ct),
    nn.stop_gradient(True, levels=1),
):
    pass
nn.copy_cotangent(['a'])  # pyright: ignore[reportArgumentType]
nn.clip_gradient('dense/**', norms=1.0)  # pyright: ignore[reportCallIssue]

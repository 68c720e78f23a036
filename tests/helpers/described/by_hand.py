"""What a program does, by hand: a block is a copy of the weights with other values.

This file does not import flax_sg.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, path_aware_map

from tests.helpers.described.language import Block, Interpreter, Path, Where, left


def warped(value: jax.Array) -> jax.Array:
    """What the rule ``'function'`` shows instead of a value."""
    return jnp.sin(value) + 0.25


@jax.custom_jvp
def _scaled(x: jax.Array) -> jax.Array:
    return x


_scaled.defjvp(lambda x, t: (*x, -0.5 * t[0]))

_RULES: dict[str, Callable[[Any, Any], Any]] = {
    'stop': lambda value, _: jax.lax.stop_gradient(value),
    'only': lambda value, _: jax.lax.stop_gradient(value),
    'scale': lambda value, _: jax.tree.map(_scaled, value),
    'function': lambda value, _: jax.tree.map(warped, value),
    'collection': lambda _, twin: twin,
    'read_only': lambda value, _: value,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Values:
    """What readers see.

    Attributes:
        params: the parameters.
        ema: the collection that may replace them, None if there is none.
    """

    params: Any
    ema: Any = None

    def rewritten(self, owner: Path, where: Where, rule: str = 'stop') -> Values:
        """In a block of the module at a path."""
        twins = flatten_dict(self.ema or {})

        def changed(path: Path, value: Any) -> Any:
            taken = where.takes(path, owner)
            return _RULES[rule](value, twins.get(path)) if taken else value

        return dataclasses.replace(self, params=path_aware_map(changed, self.params))


class ByHand(Interpreter):
    """Runs programs, with the values that readers see as the place.

    Attributes:
        path: the path of the module that opens the blocks.
    """

    path: Path = ()

    def block(self, item: Block, place: Values) -> None:
        with left():
            inside = place.rewritten(self.path, item.where, item.rule)
            self.run(item.body, inside)

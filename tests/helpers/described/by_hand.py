"""What a program does, by hand: a block is a copy of the weights with other values.

This file does not import flax_sg.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax.traverse_util import path_aware_map

from tests.helpers.described.language import Block, Interpreter, Path, Where, left


@dataclasses.dataclass(frozen=True, eq=False)
class Values:
    """What readers see.

    Attributes:
        params: the parameters.
    """

    params: Any

    def stopped(self, owner: Path, where: Where) -> Values:
        """In a block of the module at a path."""

        def changed(path: Path, value: Any) -> Any:
            taken = where.takes(path, owner)
            return jax.lax.stop_gradient(value) if taken else value

        return dataclasses.replace(self, params=path_aware_map(changed, self.params))


class ByHand(Interpreter):
    """Runs programs, with the values that readers see as the place.

    Attributes:
        path: the path of the module that opens the blocks.
    """

    path: Path = ()

    def block(self, item: Block, place: Values) -> None:
        with left():
            self.run(item.body, place.stopped(self.path, item.where))

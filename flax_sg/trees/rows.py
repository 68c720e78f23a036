"""``Rows``: the trained rows of an array, as an array of their own.

An optimizer that is given all rows keeps a state for all. So the layers of a stack, or
the rows of an embedding, that ``sg.at`` leaves trained are cut out for it. Which rows
they are is a part of the tree's structure, so that a state tells them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from flax_sg import filters


@dataclasses.dataclass(frozen=True)
class Choice:
    """Some indices of the first axis of an array, or of its first axes.

    Attributes:
        mask: a byte for each index, 1 where it is chosen.
        sizes: the sizes of these axes.
    """

    mask: bytes
    sizes: tuple[int, ...]

    @functools.cached_property
    def index(self) -> tuple[Any, ...]:
        """The indices of each axis; of one axis a slice if they are neighbours."""
        found = np.nonzero(np.frombuffer(self.mask, bool).reshape(self.sizes))
        start, stop = int(found[0][0]), int(found[0][-1]) + 1
        if len(found) == 1 and stop - start == found[0].size:
            return (slice(start, stop),)
        return found

    def of_rows(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of the chosen rows of an array; None if it has no such rows."""
        axes = len(self.sizes)
        same = shape[:axes] == self.sizes
        return (sum(self.mask), *shape[axes:]) if same else None

    def cut(self, array: Any, axes: int) -> Rows:
        """The chosen rows of an array; all of what has no rows.

        Args:
            array: what belongs to a parameter.
            axes: how many axes the parameter has; there may be others in front.
        """
        front = np.ndim(array) - axes
        if front < 0 or self.of_rows(np.shape(array)[front:]) is None:
            return Rows(array, self)
        return Rows(array[(*[slice(None)] * front, *self.index)], self)

    def put(self, rows: Any, array: Any) -> Any:
        """An array with other values in the chosen rows."""
        return jnp.asarray(array).at[self.index].set(rows)


@struct.dataclass
class Rows:
    """Some rows in place of an array, or what an optimizer keeps for them."""

    rows: Any
    choice: Choice = struct.field(pytree_node=False)

    def among(self, rest: float) -> Any:
        """An array with a number in all other rows."""
        rows = jnp.asarray(self.rows)
        shape = (*self.choice.sizes, *rows.shape[1:])
        return self.choice.put(rows, jnp.full(shape, rest, rows.dtype))


def choice_of(takes: Any, array: Any, path: str) -> Choice | None:
    r"""The rows that a filter means, if it means whole rows of an array.

    >>> import jax.numpy as jnp, numpy as np
    >>> takes = filters.at(True, np.s_[1:3])(filters.Path.of('params', ('w',)))
    >>> choice_of(takes, jnp.ones((4, 2)), 'w')
    Choice(mask=b'\x00\x01\x01\x00', sizes=(4,))

    Args:
        takes: what the filter says.
        array: the array.
        path: where it is, for an error.
    """
    if not isinstance(takes, filters.Part):
        return None
    mask = takes.mask(np.shape(array), path)
    axes = max([1, *(n for n, size in enumerate(mask.shape, start=1) if size > 1)])
    sizes = np.shape(array)[:axes]
    are_elements = 1 < axes == mask.ndim
    if mask.shape[:axes] != sizes or are_elements or not mask.any():
        return None
    return Choice(mask.tobytes(), sizes)

"""The trained rows of an array, as an array of their own.

An optimizer that is given all rows keeps a state for all. So the layers of a stack, or
the rows of an embedding, that ``sg.at`` leaves trained are cut out for it. Which rows
they are is known by the filter, not by the state.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from flax_sg import filters
from flax_sg.internals import tracing
from flax_sg.internals.types import Array, Decision, Scalar


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some indices of the first axis of an array, or of its first axes.

    Attributes:
        mask: a byte for each index, 1 where it is chosen.
        sizes: the sizes of these axes.
    """

    mask: bytes
    sizes: tuple[int, ...]

    @property
    def chosen(self) -> NDArray[np.bool_]:
        """Which indices are chosen, as an array of bools."""
        return np.frombuffer(self.mask, bool).reshape(self.sizes)

    @functools.cached_property
    def index(self) -> tuple[Any, ...]:
        """The indices of each axis; of one axis a slice if they are neighbours."""
        indices = np.nonzero(self.chosen)
        if not indices[0].size:
            return indices
        start, stop = int(indices[0][0]), int(indices[0][-1]) + 1
        if len(indices) == 1 and stop - start == indices[0].size:
            return (slice(start, stop),)
        return indices

    def cut(self, array: Array, axes: int) -> Array:
        """The chosen rows of an array; the array itself if it has no such rows.

        Args:
            array: a value of a parameter, such as its gradient.
            axes: how many axes the parameter has. The array may have more in front.
        """
        front = np.ndim(array) - axes
        if front < 0 or np.shape(array)[front:][: len(self.sizes)] != self.sizes:
            return array
        index = (*[slice(None)] * front, *self.index)
        if isinstance(array, jax.ShapeDtypeStruct):
            return jax.eval_shape(lambda array: array[index], array)
        return array[index]

    def put(self, rows: Array, shape: tuple[int, ...], rest: Scalar) -> Array:
        """An array of a shape, with these rows in it, and a number elsewhere.

        >>> first = Rows(bytes([1, 0, 0]), (3,))
        >>> first.put(jnp.ones((1, 2)), (3, 2), -0.0).tolist()
        [[1.0, 1.0], [-0.0, -0.0], [-0.0, -0.0]]
        """
        rows = jnp.asarray(rows)
        return jnp.full(shape, rest, rows.dtype).at[self.index].set(rows)


def rows_of(decision: Decision, array: Array, path: str) -> Rows | None:
    r"""The rows that a filter means, if it means whole rows of an array by an index.

    >>> import flax_sg as sg
    >>> decision = sg.at(True, np.s_[1:3])(sg.Path('w'))
    >>> rows_of(decision, jnp.ones((4, 2)), 'w')
    Rows(mask=b'\x00\x01\x01\x00', sizes=(4,))

    Args:
        decision: what the filter says.
        array: the array.
        path: where it is, for an error.
    """
    if not isinstance(decision, filters.Part) or decision.is_mask:
        return None
    mask = decision.mask(np.shape(array), path)
    axes = max([1, *(n for n, size in enumerate(mask.shape, start=1) if size > 1)])
    sizes = np.shape(array)[:axes]
    are_elements = 1 < axes == mask.ndim
    if mask.shape[:axes] != sizes or are_elements or not mask.any():
        return None
    return Rows(mask.tobytes(), sizes)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Rest:
    """An array of which some elements are in the other part of a partition.

    Attributes:
        array: the whole array.
        rows: the elements that the other part has.
    """

    array: Array
    rows: Rows

    def tree_flatten(self) -> tuple[tuple[Any], Rows]:
        """The array; which rows these are is a part of the structure."""
        return (self.array,), self.rows

    @classmethod
    def tree_unflatten(cls, rows: Rows, children: tuple[Any]) -> Rest:
        """A rest with another array."""
        return cls(*children, rows)

    def with_part(self, part: Array) -> Array:
        """The whole array, with the elements of the other part.

        It is an array of NumPy if both are, and where JAX has 32 bits for its 64. Of
        two dtypes it has the one that keeps the values of both.
        """
        if isinstance(self.array, jax.ShapeDtypeStruct):
            return jax.eval_shape(self._joined, self.array, part)
        return self._joined(self.array, part)

    def _joined(self, array: Array, part: Array) -> Array:
        is_wide = array.dtype != jnp.result_type(array)
        of_numpy = isinstance(part, (np.ndarray, np.generic))
        if isinstance(array, np.ndarray) and (
            of_numpy or (is_wide and not isinstance(part, tracing.Tracer))
        ):
            part = np.asarray(part)
            out = array.astype(np.promote_types(array.dtype, part.dtype))
            out[self.rows.index] = part
            return out
        array, part = jnp.asarray(array), jnp.asarray(part)
        dtype = jnp.promote_types(array.dtype, part.dtype)
        return array.astype(dtype).at[self.rows.index].set(part.astype(dtype))

    def __repr__(self) -> str:
        count = np.size(self.array) - int(self.rows.chosen.sum())
        return f'<{count} of {np.size(self.array)} elements>'


def halves(decision: filters.Part, array: Array, path: str) -> tuple[Any, Rest]:
    """The elements of an array that a filter means, and the rest.

    Whole rows stay rows; other elements are an array of one axis.

    >>> import flax_sg as sg
    >>> decision = filters.as_filter(np.array([True, False, True]))(sg.Path(''))
    >>> part, rest = halves(decision, jnp.array([1.0, 2.0, 3.0]), '')
    >>> part.tolist(), rest, rest.with_part(-part).tolist()
    ([1.0, 3.0], <1 of 3 elements>, [-1.0, 2.0, -3.0])

    Args:
        decision: what the filter says.
        array: the array.
        path: where it is, for an error.
    """
    shape = np.shape(array)
    rows = rows_of(decision, array, path)
    if rows is None:
        mask = np.broadcast_to(decision.mask(shape, path), shape)
        rows = Rows(mask.tobytes(), shape)
    return rows.cut(array, len(shape)), Rest(array, rows)


# The functions below get what an optimizer trains of an array: a bool, ``Rows``, or
# another ``Part``.


def mask_of(trained: Decision, shape: tuple[int, ...], path: str) -> NDArray[np.bool_]:
    """Which elements have a state; of length 1 in axes where all elements are alike.

    An array that a traced condition freezes has one: it is trained again later.
    """
    if isinstance(trained, filters.Part):
        trained = trained.is_conditional or trained.mask(shape, path)
    chosen = trained.chosen if isinstance(trained, Rows) else np.array(trained, bool)
    return chosen.reshape(chosen.shape + (1,) * (len(shape) - chosen.ndim))


def shape_of_part(trained: Decision, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of an array as an optimizer sees it."""
    if not isinstance(trained, Rows):
        return shape
    return (sum(trained.mask), *shape[len(trained.sizes) :])


def whole_of(trained: Decision, array: Array, shape: tuple[int, ...]) -> Array:
    """A value of an optimizer for an array, in the shape of the whole array."""
    return trained.put(array, shape, 0) if isinstance(trained, Rows) else array


def is_cut(part: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether an array of one shape may be some rows of an array of another."""
    front = len(shape) - len(part) + 1
    is_like = 0 < len(part) <= len(shape) and part[1:] == shape[front:]
    return is_like and part[0] < math.prod(shape[:front])

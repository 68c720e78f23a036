"""Batches of the examples of a source."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors
from flax_sg.internals.types import Args, Array, PyTree


class Source:
    """Examples, in batches of one size.

    Args:
        examples: arrays, in a tuple or a dict, or something with ``len`` and ``[n]``.
        batch_size: how many examples are in a batch.
    """

    def __init__(self, examples: Any, batch_size: int) -> None:
        is_mapping = isinstance(examples, Mapping)
        self._examples = dict(examples) if is_mapping else examples
        self._batch_size = batch_size
        # Arrays, and no sequence of examples.
        self._has_arrays = (
            is_mapping or isinstance(examples, tuple) or hasattr(examples, '__array__')
        )
        self._count = self._counted()

    def __len__(self) -> int:
        return self._count

    def _counted(self) -> int:
        """The number of examples."""
        arrays = [self._examples]
        if self._has_arrays:
            arrays = jax.tree.leaves(self._examples)
        try:
            counts = {len(x) for x in arrays}
        except TypeError as error:
            raise errors.ArgumentTypeError(
                f'The source has no length: {error}.\n'
                'Give arrays, in a tuple or a dict, or a list or data set of examples.'
            ) from error
        if len(counts) > 1:
            raise errors.StructureError(
                'The arrays of the source have '
                f'{" and ".join(map(str, sorted(counts)))} examples.\n'
                'Give arrays of the same length, with the examples in front.'
            )
        return counts.pop() if counts else 0

    def batch(self, number: int) -> Args:
        """The arguments of a function of a batch.

        A batch that has too few examples is filled up with the last one.
        """
        start, stop = self._bounds(number)
        fill = np.minimum(np.arange(self._batch_size), stop - start - 1)
        with self.named(number):
            if self._has_arrays:
                rows = jax.tree.map(lambda x: _cut(x, start, stop), self._examples)
            else:
                rows = _stacked(self._read(start, stop), start)
            if stop - start < self._batch_size:
                rows = jax.tree.map(lambda x: x[fill], rows)
        return rows if isinstance(rows, tuple) else (rows,)

    def _bounds(self, number: int) -> tuple[int, int]:
        """The first example of a batch, and the one behind its last."""
        start = number * self._batch_size
        return start, min(start + self._batch_size, len(self))

    @contextlib.contextmanager
    def named(self, number: int) -> Generator[None]:
        """Notes the examples of a batch in an error."""
        start, stop = self._bounds(number)
        try:
            yield
        except Exception as error:
            error.add_note(
                f'sg.store: in examples {start} to {stop - 1} of {len(self)}'
            )
            raise

    def _read(self, start: int, stop: int) -> list[PyTree]:
        """Some examples of a sequence, as arrays of their own."""
        several = getattr(self._examples, '__getitems__', None)
        read = several or (lambda indices: map(self._examples.__getitem__, indices))
        found = [
            jax.tree.map(np.array, example, is_leaf=_is_list)
            for example in read(list(range(start, stop)))
        ]
        if len(found) != stop - start:
            raise errors.StructureError(
                f'Of {stop - start} examples the source returned {len(found)}.\n'
                '__getitems__ has to return an example for each index.'
            )
        return found


def _cut(x: Array, start: int, stop: int) -> Array:
    """Some rows of an array, which may be a file; copies, as functions may write."""
    if not isinstance(x, jax.Array):
        return np.array(x[start:stop])
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return x[start:stop] if is_key else np.array(np.asarray(x)[start:stop])


def _stacked(examples: list[PyTree], start: int) -> PyTree:
    """Examples as a batch. A list within an example is an array."""

    def stacked(*arrays: np.ndarray) -> np.ndarray:
        for n, array in enumerate(arrays):
            if array.shape != arrays[0].shape:
                raise errors.StructureError(
                    f'Example {start} has an array of shape {arrays[0].shape}, and '
                    f'example {start + n} one of shape {array.shape}.\nPad them. If '
                    'these are arrays of examples, give a tuple, and not a list.'
                )
        return np.stack(arrays)

    return jax.tree.map(stacked, *examples)


def _is_list(x: object) -> bool:
    return isinstance(x, list)

"""Batches of the examples of a source."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from flax_sg import errors
from flax_sg.internals.types import Args, Array, PyTree


@dataclasses.dataclass(frozen=True)
class Source:
    """Examples, in batches of one size.

    Attributes:
        examples: arrays, in a tuple or a dict, or something with ``len`` and ``[n]``.
        batch_size: how many examples are in a batch.
    """

    examples: Any
    batch_size: int

    @property
    def has_arrays(self) -> bool:
        """Whether it is an array or a tree of arrays, and no sequence of examples."""
        kinds = tuple, dict
        return isinstance(self.examples, kinds) or hasattr(self.examples, '__array__')

    def __len__(self) -> int:
        """The number of examples."""
        arrays = jax.tree.leaves(self.examples) if self.has_arrays else [self.examples]
        try:
            counts = {len(x) for x in arrays}
        except TypeError as error:
            raise errors.ArgumentTypeError(
                f'The source has no length: {error}.\n'
                'Give arrays, in a tuple or a dict, or a list or data set of examples.'
            ) from error
        if len(counts) > 1:
            raise errors.StructureError(
                f'The arrays of the source have {_listed(counts)} examples.\n'
                'Give arrays of the same length, with the examples in front.'
            )
        return counts.pop() if counts else 0

    def batch(self, number: int) -> Args:
        """The arguments of a function of a batch.

        A batch that has too few examples is filled up with the last one.
        """
        start = number * self.batch_size
        stop = min(start + self.batch_size, len(self))
        fill = np.minimum(np.arange(self.batch_size), stop - start - 1)
        with self.named(number):
            if self.has_arrays:
                cut = jax.tree.map(lambda x: _cut(x, start, stop, fill), self.examples)
            else:
                cut = _stacked(self._examples(start, stop), start, fill)
        return cut if isinstance(cut, tuple) else (cut,)

    @contextlib.contextmanager
    def named(self, number: int) -> Generator[None]:
        """Notes the examples of a batch in an error."""
        start = number * self.batch_size
        stop = min(start + self.batch_size, len(self))
        try:
            yield
        except Exception as error:
            error.add_note(
                f'sg.store: in examples {start} to {stop - 1} of {len(self)}'
            )
            raise

    def _examples(self, start: int, stop: int) -> list[PyTree]:
        """Some examples of a sequence."""
        indices = list(range(start, stop))
        if hasattr(self.examples, '__getitems__'):
            return self.examples.__getitems__(indices)
        return [self.examples[n] for n in indices]


def _cut(x: Array, start: int, stop: int, fill: np.ndarray) -> Array:
    """Some rows of an array, of which a file may hold the rest."""
    rows = x[start:stop]
    rows = rows if isinstance(rows, jax.Array) else np.asarray(rows)
    return rows if len(rows) == len(fill) else rows[fill]


def _stacked(examples: list[PyTree], start: int, fill: np.ndarray) -> PyTree:
    """Examples as a batch. A list within an example is an array."""

    def stacked(*leaves: Array) -> np.ndarray:
        arrays = [np.asarray(leaf) for leaf in leaves]
        for n, array in enumerate(arrays):
            if array.shape != arrays[0].shape:
                raise errors.StructureError(
                    f'Example {start} has an array of shape {arrays[0].shape}, and '
                    f'example {start + n} one of shape {array.shape}.\nPad them. If '
                    'these are arrays of examples, give a tuple, and not a list.'
                )
        return np.stack(arrays)[fill]

    return jax.tree.map(stacked, *examples, is_leaf=lambda x: isinstance(x, list))


def _listed(numbers: set[int]) -> str:
    return ' and '.join(map(str, sorted(numbers)))

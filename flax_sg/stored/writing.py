"""Writes what a function makes of batches. What is there is compared, and stays."""

from __future__ import annotations

import dataclasses
import os
import warnings

import jax.numpy as jnp
import numpy as np

from flax_sg import errors
from flax_sg.internals.types import PyTree
from flax_sg.stored.files import FIXED, About, Records, Wanted, name_of, whole_files
from flax_sg.stored.returned import Returned

# How far what is computed again may be from what is there. Jitted or not, float32
# differs by 3e-7; TF32 by 2e-4; bfloat16 by 5e-3 (measured).
_WARNS, _RAISES = 1e-3, 1e-2
_ANOTHER = 'Give another folder, or delete this one.'


class Writer:
    """Writes the rows of batches into a folder.

    Args:
        folder: the absolute path of the folder.
        rows: how many rows there are.
        batch_size: how many of them are in a batch.
        axes: as for ``store``.

    Raises:
        StaleRowsError: if the folder is for another number of rows, or other batches.
    """

    def __init__(self, folder: str, rows: int, batch_size: int, axes: PyTree) -> None:
        self.folder, self._axes = folder, axes
        # Without entries until a batch is kept here or was kept before.
        self.about = About(rows, batch_size, '', ())
        self._has_kept = False
        self.about = self._there() or self.about

    def _there(self) -> About | None:
        """What the folder has: as many rows, in batches of as many; or nothing."""
        there, now, advice = About.of(self.folder), self.about, _ANOTHER
        if there is None:
            names = os.listdir(self.folder) if os.path.isdir(self.folder) else ()
            if any(name.endswith('.npy') for name in names):
                raise errors.StaleRowsError(
                    f'{self.folder} has files of arrays, and nothing says of what.\n'
                    f'{_ANOTHER}'
                )
            return None
        if (there.rows, there.batch_size) == (now.rows, now.batch_size):
            return there
        count = sum(map(there.rows_in, whole_files(self.folder, there)))
        if count and there.rows == now.rows:
            advice = f'Give batch_size={there.batch_size}: {count} rows are there.'
        raise errors.StaleRowsError(
            f'{self.folder} has {there.rows} rows in batches of {there.batch_size}, '
            f'and not {now.rows} in batches of {now.batch_size}.\n{advice}'
        )

    def done(self) -> set[int]:
        """The batches that are there."""
        return whole_files(self.folder, self.about) if self.about.entries else set()

    def has(self, batch: int) -> bool:
        """Whether a batch is there by now."""
        return os.path.exists(os.path.join(self.folder, name_of(batch)))

    def keep(self, batch: int, out: PyTree) -> int:
        """Writes a batch, or compares it with what is there.

        Args:
            batch: its number.
            out: what the function returned.

        Returns:
            How many rows were written.
        """
        returned = Returned.of(out, self._axes, self.about.batch_size)
        self._settle(batch, returned)
        rows = self.about.rows_in(batch)
        if self.about.fixed.entries:
            self._write(batch, returned, FIXED, self.about.fixed, 1)
        path = name_of(batch)
        is_new = self._write(batch, returned, path, self.about.records, rows)
        self._has_kept = True
        return rows if is_new else 0

    def _settle(self, batch: int, returned: Returned) -> None:
        """Writes what is in a row, or checks that the folder has the same."""
        now = dataclasses.replace(
            self.about, tree=returned.tree, entries=returned.entries
        )
        if not self.about.entries:
            os.makedirs(self.folder, exist_ok=True)
            now.write(self.folder)
            self.about = self._there() or now
        if now == self.about:
            return
        was, is_now = _told_apart(self.about, returned)
        if self._has_kept:
            raise errors.StructureError(
                f'Batch {batch} has {is_now}, and batches before it {was}.\n'
                'The function has to return the same shapes for each batch.'
            )
        raise errors.StaleRowsError(
            f'{self.folder} holds {was}, and the function returned {is_now}.\n'
            f'{_ANOTHER}'
        )

    def _write(
        self, batch: int, returned: Returned, name: str, records: Records, rows: int
    ) -> bool:
        """Writes a file; returns False if it was there, with the same in it."""
        path, arrays = os.path.join(self.folder, name), returned.arrays
        if not os.path.exists(path) and records.write(path, rows, arrays):
            return True
        every = np.arange(rows)
        there = records.read([Wanted(path, rows, every, every)], (rows,))
        for n, was in there.items():
            self._compare(batch, returned.names[n], name, was, arrays[n][:rows])
        return False

    def _compare(
        self,
        batch: int,
        name: str,
        file: str,
        was: np.ndarray,
        now: np.ndarray,
    ) -> None:
        """Compares an array of a batch with what is there."""
        far = distance(was, now)
        if far <= _WARNS:
            return
        if file == FIXED and self._has_kept:
            raise errors.StructureError(
                f'{name} of batch {batch} differs by {far:.1%} from those before.\n'
                'axes= says None, the same for all rows. Give 0, and return rows.'
            )
        differs = f'{name} of batch {batch} differs by {far:.1%}'
        if far <= _RAISES:
            warnings.warn(
                f'{self.folder}: {differs} from what the function returns now. It may '
                'be rounding, as on another device, or other weights.',
                stacklevel=2,
            )
        else:
            raise errors.StaleRowsError(
                f'{self.folder} is stale: {differs} from what the function returns.\n'
                'Weights, code or data have changed, or it draws random numbers.\n'
                f'{_ANOTHER}'
            )


def _told_apart(about: About, returned: Returned) -> tuple[str, str]:
    """What was there and what is returned: the trees, or the first arrays that differ.

    It is asked if something differs.
    """
    if about.tree != returned.tree:
        return f'the tree {about.tree}', f'the tree {returned.tree}'
    pairs = zip(returned.names, about.entries, returned.entries, strict=True)
    name, was, now = next(pair for pair in pairs if pair[1] != pair[2])
    return f'{was} as {name}', f'{now} as {name}'


def distance(was: np.ndarray, now: np.ndarray) -> float:
    """How far two arrays of one shape are from each other, relative to the first.

    What is far larger than most, such as a mask, counts as ten times the median. Of
    bools and of ints of more than 8 bits it is the part that differs, of those that are
    not zero. A NaN is equal to a NaN.

    >>> import numpy as np
    >>> distance(np.array([3.0, 4.0]), np.array([3.0, 4.1]))
    0.01999...
    >>> distance(np.array([0, 0, 3, 4]), np.array([0, 0, 3, 5]))
    0.5
    """
    same = (was == now) | ((was != was) & (now != now))
    if same.all():
        return 0.0
    is_inexact = jnp.issubdtype(was.dtype, np.inexact)
    if was.dtype == bool or (was.dtype.itemsize > 1 and not is_inexact):
        return float(np.mean(~same[(was != 0) | (now != 0)]))
    kind = np.complex128 if was.dtype.kind == 'c' else np.float64
    was, now = was.astype(kind), now.astype(kind)
    sizes = np.abs(was[np.isfinite(was) & (was != 0)])
    most = 10 * np.median(sizes) if sizes.size else 0.0
    far = np.linalg.norm(now[~same] - was[~same])
    norm = np.linalg.norm(np.minimum(sizes, most))
    return float(far / norm) if np.isfinite(far) and norm else float('inf')

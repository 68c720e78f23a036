"""``Rows``: what ``store`` has written, read at random."""

from __future__ import annotations

import os

import jax
import numpy as np

from flax_sg import errors
from flax_sg.internals.types import ArrayIndex, PyTree
from flax_sg.stored.files import FIXED, About, Wanted, name_of


class Rows:
    """Rows in files, which ``sg.store`` has written: ``rows[indices]``.

    A source for Grain, PyTorch and plain loops. It may be pickled and forked, and
    several threads may read it.

    >>> import tempfile
    >>> import numpy as np
    >>> import flax_sg as sg
    >>> folder = tempfile.mkdtemp()
    >>> _ = sg.store(lambda x: {'double': 2 * x}, np.arange(5.0), folder, batch_size=2)
    >>> rows = sg.Rows(folder)  # in another program, without the function and its data
    >>> rows
    <5 rows of float64[]>
    >>> rows[[3, 0]]
    {'double': array([6., 0.])}

    Args:
        folder: the folder that ``sg.store`` was given.

    Attributes:
        folder: its absolute path.

    Raises:
        MissingRowsError: if it holds no rows.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.path.abspath(folder)
        about = About.of(self.folder)
        if about is None:
            raise errors.MissingRowsError(
                f'{self.folder} holds no rows.\nsg.store writes them.'
            )
        self._about, self._treedef = about, about.treedef
        one = np.zeros(1, int)
        self._fixed = about.fixed.read([Wanted(self._path(FIXED), 1, one, one)], ())
        for array in self._fixed.values():
            array.flags.writeable = False

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def __len__(self) -> int:
        """The number of rows."""
        return self._about.rows

    def __repr__(self) -> str:
        """The same in each process: Grain compares it when it restores a loader."""
        own = map(str, self._about.records.entries.values())
        return f'<{len(self)} rows of {", ".join(own)}>'

    def __reduce__(self) -> tuple[type[Rows], tuple[str]]:
        return Rows, (self.folder,)

    def __getitem__(self, indices: ArrayIndex) -> PyTree:
        """Reads rows.

        Args:
            indices: an int, a slice, or a list or an array of ints of any rank.

        Returns:
            The tree that the function returned, of NumPy arrays. Each has the shape of
            ``indices`` in front. What is in no row is the same for all indices, and
            cannot be written.

        Raises:
            ArgumentTypeError: for a mask, and for other things that are no ints.
            PartError: for an index that is out of bounds.
            MissingRowsError: if a file is missing or cut off.
        """
        at = self._checked(indices)
        batches, places = np.divmod(at.reshape(-1), self._about.batch_size)
        by_file = np.argsort(batches, kind='stable')
        starts = np.flatnonzero(np.diff(batches[by_file], prepend=-1))
        wanted = (
            Wanted(self._path(name_of(n)), self._about.rows_in(n), places[to], to)
            for to in np.split(by_file, starts[1:])
            for n in batches[to[:1]].tolist()
        )
        leaves = {**self._fixed, **self._about.records.read(wanted, at.shape)}
        return jax.tree.unflatten(self._treedef, [leaves[n] for n in sorted(leaves)])

    def _checked(self, indices: ArrayIndex) -> np.ndarray:
        """Indices as an array of ints that are not negative."""
        if isinstance(indices, slice):
            indices = range(*indices.indices(len(self)))
        at = np.asarray(indices)
        if not at.size:
            at = at.astype(int)
        if at.dtype.kind not in 'iu':
            raise errors.ArgumentTypeError(
                f'Rows are chosen by ints, not by {at.dtype}.\n'
                'Of a mask, write rows[np.flatnonzero(mask)].'
            )
        if at.size and not -len(self) <= at.min() <= at.max() < len(self):
            far = at.min() if at.min() < -len(self) else at.max()
            raise errors.PartError(f'There is no row {far}: there are {len(self)}.')
        return at.astype(np.int64) % len(self)

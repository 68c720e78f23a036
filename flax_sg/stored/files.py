"""The files of a folder of rows, and what is in each.

A naive store has one file for each array, and a log of what is done. After a crash the
log and the arrays disagree, and two processes write into one file. Here a file holds
the rows of one batch, and it gets its name when it is whole and on the disk. A file
that is there is done, so no log is needed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from flax_sg import errors
from flax_sg.internals.types import TreeDef

_ABOUT = 'about.json'
# Holds what is in no row, once.
FIXED = 'fixed.npy'
# The bytes of a row that takes no longer to copy than to ask for.
_SMALL = 4096
# The name of a file that is not whole yet.
_PART = re.compile(r'(about\.json|fixed\.npy|\d{8,}\.npy)\.[0-9a-f]{32}\.part')


class Entry(NamedTuple):
    """An array of the tree that a function returns.

    Attributes:
        dtype: the name of its dtype.
        shape: its shape, in one row.
        axis: 0 if it has rows; None if it is the same for all of them.
    """

    dtype: str
    shape: tuple[int, ...]
    axis: int | None

    def __str__(self) -> str:
        where = '' if self.axis == 0 else ' in no row'
        return f'{self.dtype}[{",".join(map(str, self.shape))}]{where}'


@dataclasses.dataclass(frozen=True)
class About:
    """What ``about.json`` says.

    Attributes:
        rows: how many rows there are in all files.
        batch_size: how many rows are in a file; the last one may have fewer.
        tree: the text of a tree with the number of each array in its place.
        entries: the arrays.
    """

    rows: int
    batch_size: int
    tree: str
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, folder: str) -> About | None:
        """What is said of a folder; None if it holds no rows."""
        try:
            with open(os.path.join(folder, _ABOUT), encoding='utf-8') as file:
                said = json.load(file)
        except FileNotFoundError:
            return None
        entries = [Entry(d, tuple(shape), axis) for d, shape, axis in said['entries']]
        return cls(said['rows'], said['batch_size'], said['tree'], tuple(entries))

    def write(self, folder: str) -> bool:
        """Writes it; returns False if another process has."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        return _write_new(os.path.join(folder, _ABOUT), text.encode())

    @property
    def batches(self) -> range:
        """The numbers of the batches."""
        return range(-(-self.rows // self.batch_size))

    def rows_in(self, batch: int) -> int:
        """How many rows a batch has."""
        return min(self.batch_size, self.rows - batch * self.batch_size)

    @property
    def treedef(self) -> TreeDef:
        """The structure of what the function returned."""
        return jax.tree.structure(ast.literal_eval(self.tree))

    @functools.cached_property
    def records(self) -> Records:
        """What is in the files of the batches."""
        return Records({n: x for n, x in enumerate(self.entries) if x.axis == 0})

    @functools.cached_property
    def fixed(self) -> Records:
        """What is in ``fixed.npy``, as one record."""
        return Records({n: x for n, x in enumerate(self.entries) if x.axis is None})


def name_of(batch: int) -> str:
    """The file of a batch.

    >>> name_of(12)
    '00000012.npy'
    """
    return f'{batch:08d}.npy'


def whole_files(folder: str, about: About) -> set[int]:
    """The batches whose files are there. Files that are cut off are removed."""
    sizes = dict[str, int]()
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # It has its own name by now.
            info = entry.stat()
            sizes[entry.name] = info.st_size
            # A process that was killed has left it: to write a file takes no hour.
            if _PART.fullmatch(entry.name) and info.st_mtime < time.time() - 3600:
                os.unlink(entry.path)
    wanted = {name_of(n): about.records.size(about.rows_in(n)) for n in about.batches}
    for name, size in {**wanted, FIXED: about.fixed.size(1)}.items():
        if sizes.get(name, size) != size:
            _remove(os.path.join(folder, name))
    return {n for n in about.batches if sizes.get(name_of(n)) == wanted[name_of(n)]}


class Wanted(NamedTuple):
    """Rows of a file that are read.

    Attributes:
        path: the path of the file.
        rows: how many rows it has.
        places: which of them are read.
        to: where they go.
    """

    path: str
    rows: int
    places: np.ndarray
    to: np.ndarray


class Records:
    """The format of a file for ``numpy.load``: records of some arrays.

    It is `version 2.0 of NumPy's
    <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>`__. The
    header is made here. If another NumPy made it longer, all files would have another
    size.

    Attributes:
        entries: the arrays, by number, which is the name of their field.
    """

    def __init__(self, entries: Mapping[int, Entry]) -> None:
        self.entries = entries
        # The format knows no types such as bfloat16: they are bytes there.
        fields = list[tuple[str, str, tuple[int, ...]]]()
        for n, entry in entries.items():
            dtype = np.dtype(entry.dtype)
            is_known = dtype.isbuiltin == 1
            text = dtype.str if is_known else f'|V{dtype.itemsize}'
            fields.append((str(n), text, entry.shape))
        self._dtype = np.dtype(fields)
        before = f"{{'descr': {fields}, 'fortran_order': False, 'shape': ("
        # For any number of rows the header has the same length, a multiple of 64.
        length = -(-(len(before) + 36) // 64) * 64 - 12
        self._before = b'\x93NUMPY\x02\x00' + length.to_bytes(4, 'little')
        self._before += before.encode()
        self._begin = length + 12

    def size(self, rows: int) -> int:
        """The bytes of a file."""
        return self._begin + rows * self._dtype.itemsize

    def write(self, path: str, rows: int, arrays: Sequence[np.ndarray]) -> bool:
        """Writes a file, whole or not at all; returns False if there is one.

        Args:
            path: the path of the file.
            rows: how many rows are written.
            arrays: all arrays by number, with at least as many rows.
        """
        records = np.empty(rows, self._dtype)
        for n in self.entries:
            field = self._dtype[str(n)].base
            records[str(n)] = arrays[n][:rows].view(field)
        data = records.view(np.uint8).data if records.nbytes else b''
        return _write_new(path, self._header(rows), data)

    def _header(self, rows: int) -> bytes:
        return (self._before + f'{rows},)}}'.encode()).ljust(self._begin - 1) + b'\n'

    def read(
        self,
        wanted: Iterable[Wanted],
        shape: tuple[int, ...],
    ) -> dict[int, np.ndarray]:
        """Reads rows of files.

        Args:
            wanted: which rows, of each file.
            shape: what the arrays have in front, for as many rows.

        Returns:
            The arrays, by number.

        Raises:
            MissingRowsError: if a file is missing, cut off, or has other rows.
        """
        count = math.prod(shape)
        raw = {
            n: np.empty((count, self._dtype[str(n)].itemsize), np.uint8)
            for n in self.entries
        }
        for some in wanted if raw else ():
            if not self._read_into(raw, some):
                raise errors.MissingRowsError(
                    f'{some.path} is missing, cut off, or of another store.\n'
                    'sg.store computes its rows.'
                )
        return {
            n: raw[n].reshape(-1).view(x.dtype).reshape((*shape, *x.shape))
            for n, x in self.entries.items()
        }

    def _read_into(self, raw: Mapping[int, np.ndarray], some: Wanted) -> bool:
        """Reads rows of a file; returns whether they are there."""
        missing = contextlib.suppress(FileNotFoundError)
        # Without a buffer, a small row is one read of its own bytes alone.
        with missing, open(some.path, 'rb', buffering=0) as file:
            if file.read(self._begin) != self._header(some.rows):
                return False
            is_small = self._dtype.itemsize <= _SMALL
            if is_small and 2 * len(some.places) > some.rows:  # One read for all.
                records = np.fromfile(file, self._dtype, some.rows)
                if len(records) < some.rows:
                    return False
                for n, array in raw.items():
                    field = np.ascontiguousarray(records[str(n)][some.places])
                    array[some.to] = (
                        field.reshape(-1)
                        .view(np.uint8)
                        .reshape(len(some.to), array.shape[1])
                    )
                return True
            for place, n in zip(some.places.tolist(), some.to.tolist(), strict=True):
                file.seek(self._begin + place * self._dtype.itemsize)
                for array in raw.values():
                    if file.readinto(array[n].data) != array.shape[1]:
                        return False
            return True
        return False


def _write_new(path: str, *parts: bytes | memoryview) -> bool:
    """Writes a file, whole or not at all; returns False if there is one of its name.

    A link fails if there is one, where a renaming would replace it. File systems
    without links, such as those of mounted buckets, have to do with the renaming.
    """
    part = f'{path}.{uuid.uuid4().hex}.part'
    try:
        with open(part, 'xb') as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError:
            os.replace(part, path)
        return True
    finally:
        _remove(part)


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)

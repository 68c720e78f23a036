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
import json
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_sg import errors
from flax_sg.internals.types import TreeDef

_ABOUT = 'about.json'
# Holds what is in no row, once.
FIXED = 'fixed.npy'
# Ends the name of a file that is not whole yet.
_PART = '.part'


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

    def record(self, axis: int | None = 0) -> np.dtype[np.void]:
        """All arrays of a row; or, for None, all that are in no row.

        The format of NumPy knows no types such as bfloat16: they are bytes there.
        """
        fields: list[Any] = []
        for n, entry in enumerate(self.entries):
            dtype = np.dtype(entry.dtype)
            if dtype.isbuiltin != 1:
                dtype = np.dtype(f'V{dtype.itemsize}')
            if entry.axis == axis:
                fields.append((str(n), dtype, entry.shape))
        return np.dtype(fields)

    def empty(self, axis: int | None, rows: int) -> dict[str, np.ndarray]:
        """Bytes to read rows into, ``uint8[rows, bytes]`` for each field."""
        record = self.record(axis)
        sizes = {name: record[name].itemsize for name in record.names or ()}
        return {name: np.empty((rows, size), np.uint8) for name, size in sizes.items()}

    def typed(
        self, fields: Mapping[str, np.ndarray], shape: tuple[int, ...]
    ) -> dict[int, np.ndarray]:
        """Bytes as the arrays that they are, by number.

        Args:
            fields: the bytes of each field.
            shape: what the arrays have in front, in place of the number of rows.
        """
        arrays = dict[int, np.ndarray]()
        for name, field in fields.items():
            entry = self.entries[int(name)]
            flat = field.reshape(-1).view(entry.dtype)
            arrays[int(name)] = flat.reshape((*shape, *entry.shape))
        return arrays


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
            if entry.name.endswith(_PART) and info.st_mtime < time.time() - 3600:
                os.unlink(entry.path)
    wanted = {FIXED: _size(about.record(None), 1)}
    wanted.update(
        (name_of(n), _size(about.record(), about.rows_in(n))) for n in about.batches
    )
    for name in sizes.keys() & wanted.keys():
        if sizes[name] != wanted[name]:
            _remove(os.path.join(folder, name))
    return {n for n in about.batches if sizes.get(name_of(n)) == wanted[name_of(n)]}


def write_records(
    path: str, record: np.dtype, rows: int, arrays: Sequence[np.ndarray]
) -> bool:
    """Writes rows into a file for ``numpy.load``; returns False if there is one.

    Args:
        path: the path of the file.
        record: what is in a row, with the number of an array as the name of each field.
        rows: how many rows are written.
        arrays: all arrays, with at least as many rows.
    """
    records = np.empty(rows, record)
    for name in record.names or ():
        records[name] = arrays[int(name)][:rows].view(record[name].base)
    data = records.view(np.uint8).data if records.nbytes else b''
    return _write_new(path, _header(record, rows), data)


def read_records(
    path: str,
    record: np.dtype,
    places: Iterable[tuple[int, int]],
    fields: Mapping[str, np.ndarray],
) -> None:
    """Reads rows of a file.

    Args:
        path: the path of the file.
        record: what is in a row.
        places: for each row that is read its number in the arrays and in the file.
        fields: the bytes to read into, see ``About.empty``.

    Raises:
        MissingRowsError: if there is no such file, or it is cut off.
    """
    begin = _size(record, 0)
    # Without a buffer, a small row is one read of its own bytes alone.
    with contextlib.suppress(FileNotFoundError), open(path, 'rb', buffering=0) as file:
        for to, place in places:
            file.seek(begin + place * record.itemsize)
            if any(file.readinto(x[to]) != x.shape[1] for x in fields.values()):
                break
        else:
            return
    raise errors.MissingRowsError(
        f'{path} is missing, or cut off.\nsg.store computes its rows.'
    )


def read_first(
    path: str, about: About, axis: int | None, rows: int
) -> dict[int, np.ndarray]:
    """Reads the first rows of a file: its arrays by number, with the rows in front."""
    fields, record = about.empty(axis, rows), about.record(axis)
    if fields:
        read_records(path, record, ((n, n) for n in range(rows)), fields)
    return about.typed(fields, (rows,))


def _size(record: np.dtype, rows: int) -> int:
    """The bytes of a file."""
    return len(_header(record, rows)) + rows * record.itemsize


def _header(record: np.dtype, rows: int) -> bytes:
    """The header of a file, of one length for any number of rows.

    It is that of `version 2.0 of NumPy's format
    <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>`__, made
    here: if another NumPy made it longer, all files would have another size.
    """
    fields = [(n, record[n].base.str, record[n].shape) for n in record.names or ()]
    text = f"{{'descr': {fields}, 'fortran_order': False, 'shape': ({rows},)}}"
    longest = len(text) - len(str(rows)) + 20
    begin = b'\x93NUMPY\x02\x00'
    length = -(-(len(begin) + 4 + longest) // 64) * 64 - len(begin) - 4
    return begin + length.to_bytes(4, 'little') + f'{text:{length - 1}}\n'.encode()


def _write_new(path: str, *parts: bytes | memoryview) -> bool:
    """Writes a file, whole or not at all; returns False if there is one of its name.

    A link fails if there is one, where a renaming would replace it. File systems
    without links, such as those of mounted buckets, have to do with the renaming.
    """
    part = f'{path}.{uuid.uuid4().hex}{_PART}'
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

"""Rows of a whole data set: what is no row, and folders of other rows."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import flax_sg as sg

X = np.arange(12.0).reshape(6, 2)
LABELS = np.arange(6)


class InAFolder:
    """A program that runs in an empty folder."""

    def __init__(self, program: Callable[[], Any]) -> None:
        self.program = program

    def __call__(self) -> Any:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            return self.program()


def store(fun: Any, source: Any = X, batch_size: int = 4, **options: Any) -> Any:
    return sg.store(fun, source, 'features', batch_size=batch_size, **options)


def then(fun: Any, source: Any = X, batch_size: int = 4, **options: Any) -> Any:
    """Stores rows where others are."""
    store(lambda x: (x, x) if options else x)
    return store(fun, source, batch_size, **options)


def changing() -> Any:
    """A function that returns other shapes for the second batch."""
    shapes = iter([(4, 2), (4, 3)])
    return lambda x: np.zeros(next(shapes))


def growing() -> Any:
    """A function that returns another value in no row for the second batch."""
    numbers = iter([1.0, 2.0])
    return lambda x: (x, next(numbers))


def read(indices: Any) -> Any:
    return store(lambda x: x)[indices]


def without_a_file() -> Any:
    rows = store(lambda x: x)
    Path('features/00000001.npy').unlink()
    return rows[:]


class Features(NamedTuple):
    x: Any


class Spread(jax.Array):
    """An array of several processes, which a test of one process has not."""

    is_fully_addressable = False
    is_fully_replicated = False
    dtype = np.dtype('float32')
    shape = (4,)


def of_keys(x: Any) -> Any:
    return jax.random.split(jax.random.key(0), len(x))


class Endless:
    """What ``grain.MapDataset.repeat`` is: its length is the largest there is."""

    def __len__(self) -> int:
        return sys.maxsize


class Short(list[Any]):
    """A data set that returns too few of several examples."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[n] for n in indices][:-1]


def without_about() -> Any:
    store(lambda x: x)
    Path('features/about.json').unlink()
    return store(lambda x: x)


PROGRAMS: dict[str, Any] = {
    'no examples': (lambda: store(lambda x: x, X[:0]), lambda: store(lambda x: x)),
    'a loader that never ends': lambda: store(lambda x: x, Endless()),
    'a bucket': lambda: sg.store(lambda x: x, X, 'gs://rows', batch_size=4),
    'no function': lambda: sg.store(X, lambda x: x, 'features', batch_size=4),
    'no folder': lambda: sg.store(lambda x: x, 'features', X, batch_size=4),
    'too few of several examples': lambda: store(lambda x: x, Short(X)),
    'a source without a length': (
        lambda: store(lambda x: x, iter(X)),
        lambda: store(lambda x: x, list(X)),
    ),
    'arrays of other lengths': lambda: store(lambda x, y: x, (X, LABELS[:5])),
    'ragged examples': (
        lambda: store(lambda x: x, [X[0], X[1], X[0, :1]]),
        lambda: store(lambda x: x, [X[0], X[1], X[0]]),
    ),
    'a mean over the batch': (
        lambda: store(lambda x: x.mean(0)),
        lambda: store(lambda x: (x, x[0] * 0), axes=(0, None)),
    ),
    'nothing but what is in no row': lambda: store(lambda x: X, axes=None),
    'axes of another tree': lambda: store(lambda x: (x, x), axes=(0, 0, None)),
    'rows along another axis': lambda: store(lambda x: x.T, axes=1),
    'a class of its own': (
        lambda: store(lambda x: Features(x)),
        lambda: store(lambda x: [x]),
    ),
    'typed keys': (
        lambda: store(of_keys),
        lambda: store(lambda x: jax.random.key_data(of_keys(x))),
    ),
    'texts': lambda: store(lambda x: np.array(['a', 'b', 'c', 'd'])),
    'an array of several processes': lambda: store(lambda x: object.__new__(Spread)),
    'other shapes in a later batch': lambda: store(changing()),
    'what is said to be in no row differs': (
        lambda: store(growing(), axes=(0, None)),
        lambda: store(lambda x: (x, 1.0), axes=(0, None)),
    ),
    'rows of another shape are there': lambda: then(lambda x: x[:, :1]),
    'another tree is there': lambda: then(lambda x: [x]),
    'what was a row is in no row': lambda: then(lambda x: (x, x), axes=(0, None)),
    'another number of examples': lambda: then(lambda x: x, X[:5]),
    'another size of batches': (
        lambda: then(lambda x: x, X, 2),
        lambda: then(lambda x: x, X, 4),
    ),
    'other weights': lambda: then(lambda x: 1.1 * x),
    'nearly the same weights': lambda: then(lambda x: 1.005 * x),
    'files of rows that nothing tells of': without_about,
    'no rows in a folder': lambda: sg.Rows('.'),
    'a file that was deleted': without_a_file,
    'a mask of rows': (
        lambda: read(LABELS > 3),
        lambda: read(np.flatnonzero(LABELS > 3)),
    ),
    'a row that is not there': lambda: read([0, 6]),
    'a row before the first': lambda: read(-7),
}

CASES: dict[str, Any] = {
    name: tuple(x if isinstance(x, str) else InAFolder(x) for x in row)
    if isinstance(row, tuple)
    else InAFolder(row)
    for name, row in PROGRAMS.items()
}

"""What a function returned of a batch, as arrays of rows."""

from __future__ import annotations

import ast
import contextlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors
from flax_sg.internals.types import Array, PyTree
from flax_sg.stored.files import Entry


class Returned(NamedTuple):
    """What a function returned of a batch.

    Attributes:
        arrays: its arrays, with the rows in front: one row of what is in no row.
        entries: what each of them is.
        names: how each is read, such as ``"rows['label']"``.
        tree: the text of a tree with the number of each array in its place.
    """

    arrays: list[np.ndarray]
    entries: tuple[Entry, ...]
    names: list[str]
    tree: str

    @classmethod
    def of(cls, out: PyTree, axes: PyTree, batch_size: int) -> Returned:
        """Takes apart what was returned; see ``store`` for what it may be."""
        leaves, treedef = jax.tree_util.tree_flatten_with_path(out)
        names = [f'rows{jax.tree_util.keystr(keys)}' for keys, _ in leaves]
        arrays, entries = list[np.ndarray](), list[Entry]()
        for name, (_, x), axis in zip(names, leaves, _spread(axes, out), strict=True):
            array = _host(name, x)
            if axis is None:
                array = array[None]
            elif array.shape[:1] != (batch_size,):
                raise errors.StructureError(
                    f'Of {batch_size} examples the function returned '
                    f'{array.dtype}{[*array.shape]} as {name}.\nReturn rows, with the '
                    'examples in front. What is the same for all rows has axis None.'
                )
            arrays.append(array)
            entries.append(Entry(array.dtype.name, array.shape[1:], axis))
        if all(entry.axis is None for entry in entries):
            raise errors.StructureError(
                'The function returned no rows.\n'
                'Return an array with the examples in front, or a tree of them.'
            )
        tree = repr(jax.tree.unflatten(treedef, range(len(leaves))))
        with contextlib.suppress(SyntaxError, ValueError):
            if jax.tree.structure(ast.literal_eval(tree)) == treedef:
                return cls(arrays, tuple(entries), names, tree)
        raise errors.ArgumentTypeError(
            f'The function returned {tree}.\n'
            'Return dicts, lists and tuples of arrays, as files hold no classes.'
        )


def _spread(axes: PyTree, out: PyTree) -> list[int | None]:
    """The axis of each array, of a tree that may end above them."""
    spread = list[int | None]()

    def add(axis: int | None, x: PyTree) -> None:
        spread.extend([axis] * len(jax.tree.leaves(x)))

    try:
        jax.tree.map(add, axes, out, is_leaf=lambda x: x is None)
    except (TypeError, ValueError) as error:
        raise errors.StructureError(
            f'axes is {axes}, and the function returned {jax.tree.structure(out)}.\n'
            'Give 0 or None for all arrays, or a tree like that of the arrays.'
        ) from error
    if wrong := [axis for axis in spread if axis not in (0, None)]:
        raise errors.ArgumentValueError(
            f'axes has {wrong[0]!r}.\n'
            'Give 0 for rows in front, and None for what is the same in all rows.'
        )
    return [axis if axis is None else 0 for axis in spread]


def _host(name: str, x: Array) -> np.ndarray:
    """An array in the memory of this machine."""
    if isinstance(x, jax.Array):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise errors.ArgumentTypeError(
                f'The function returned typed keys as {name}.\n'
                'Return jax.random.key_data(keys).'
            )
        if not x.is_fully_addressable:
            raise errors.ArgumentTypeError(
                f'What the function returned as {name} is spread over processes.\n'
                'Give each process weights and a batch of its own.'
            )
    array = np.asarray(x)
    if not (array.dtype == bool or jnp.issubdtype(array.dtype, np.number)):
        raise errors.ArgumentTypeError(
            f'The function returned {array.dtype} as {name}.\n'
            'Return arrays of numbers: for a text, its number in a list.'
        )
    return array.astype(array.dtype.newbyteorder('='), copy=False)

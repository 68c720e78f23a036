"""Checks that one value can be read in place of another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.frozen_dict import FrozenDict

from flax_sg import errors
from flax_sg.errors.texts import shown
from flax_sg.filters.paths import Path
from flax_sg.internals import core_scopes


def fitting(path: Path, value: Any, other: Any) -> Any:
    """Returns the value that is read in place of another; raises if it does not fit."""
    expected, treedef = jax.tree_util.tree_flatten(value)
    found, other_treedef = jax.tree_util.tree_flatten(other)
    if treedef != other_treedef:
        fix = ''
        if jax.tree_util.tree_structure(core_scopes.unbox(value)) == other_treedef:
            fix = 'keep the box: map over the tree with jax.tree.map.'
        raise misfit(path, described(value), described(other), fix)
    for old, new in zip(expected, found, strict=True):
        if (dtype_of(old), shape_of(old)) != (dtype_of(new), shape_of(new)):
            same_shape = shape_of(old) == shape_of(new)
            fix = f'convert it with .astype({dtype_of(old)})' if same_shape else ''
            raise misfit(path, described(value), described(other), fix)
    return other


def as_array(leaf: Any) -> Any:
    """A number or a NumPy array as a JAX array; anything else as it is."""
    if isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
        return jnp.asarray(leaf)
    return leaf


def dtype_of(leaf: Any) -> Any:
    """The dtype of a leaf; its type if it is no array."""
    return getattr(leaf, 'dtype', type(leaf))


def shape_of(leaf: Any) -> Any:
    """The shape of a leaf."""
    return getattr(leaf, 'shape', ())


def described(value: Any) -> str:
    """A value by the types in it."""
    leaves, treedef = jax.tree_util.tree_flatten(value)
    texts = [shown(leaf) for leaf in leaves]
    if jax.tree_util.treedef_is_leaf(treedef) and texts:
        return texts[0]
    if isinstance(value, (dict, FrozenDict)):
        return f'a tree of {len(value)} names'
    return str(treedef.unflatten(texts))


def misfit(
    path: Any, expected: str, found: str, fix: str = ''
) -> errors.StructureError:
    """A value does not fit the variable that it should be read in place of."""
    lines = [
        f'nn.substitute: the value for {str(path)!r} of the collection '
        f'{path.collection!r} does not fit.',
        f'Expected: {expected}',
        f'Found:    {found}',
        f'Fix: {fix}' if fix else '',
    ]
    return errors.StructureError('\n'.join(filter(None, lines)))


def no_value(path: Any, where: str) -> errors.StructureError:
    """The error for a selected variable that has no other value."""
    return errors.StructureError(
        f'nn.substitute: there is no value for {str(path)!r} of the collection '
        f'{path.collection!r} in {where}.\n'
        'Fix: give one, or leave the variable out with substitute(..., where=).',
    )

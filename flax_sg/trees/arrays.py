"""``arrays``: a filter of leaves by what they are, not by what they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors, filters
from flax_sg.errors.texts import brief
from flax_sg.filters.predicates import describe
from flax_sg.trees.leaves import leaves_of


def arrays(fn: Callable[[jax.ShapeDtypeStruct], Any], tree: Any) -> filters.Filter:
    """Returns the filter of the leaves of a tree with a certain shape or dtype.

    Weights decay, biases and scales do not:

    >>> import jax.numpy as jnp, optax, flax_sg as sg
    >>> params = {'dense': {'kernel': jnp.ones((2, 3)), 'bias': jnp.ones(3)}}
    >>> matrices = sg.arrays(lambda a: a.ndim > 1, params)
    >>> matrices
    <arrays: 'dense/kernel'>
    >>> tx = optax.adamw(1e-3, mask=sg.mask(params, trained=matrices))

    A filter is asked for paths alone, so it is made from the tree once. It then serves
    wherever a filter does: blocks, ``sg.freeze``, ``wrt=``, ``~ & |``.

    Args:
        fn: called with the shape and dtype of each array or number, a
            ``jax.ShapeDtypeStruct`` with ``.ndim`` and ``.size``; returns a bool.
        tree: the tree, or its shapes. Paths begin in it.

    Returns:
        A filter. Two are equal if they select the same of the same leaves.

    Raises:
        FilterTypeError: if ``fn`` returns no bool.
        UnusedFilterError: where it is used, if ``fn`` held for no leaf.
        UnknownNameError: where it is asked for a leaf that was not in ``tree``.

    Note:
        ``eqx.is_array`` and its kin, ``hk.data_structures.filter`` and NNX's filters
        of a path and a value choose so.
    """
    leaves = leaves_of(tree)
    found: set[tuple[str, tuple[str, ...]]] = set()
    for path, leaf in leaves:
        if not (hasattr(leaf, 'shape') or isinstance(leaf, (int, float, complex))):
            continue
        said = fn(jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf)))
        if not isinstance(said, (bool, np.bool_)):
            raise errors.FilterTypeError(
                f'{describe(fn)} returned {brief(said)} for the leaf {str(path)!r}.\n'
                'Return a bool: sg.arrays(lambda a: a.ndim > 1, params).'
            )
        if said:
            found.add(path.place)
    known = frozenset(path.place for path in leaves.paths)
    return filters.Derived(frozenset(found), known, 'arrays')

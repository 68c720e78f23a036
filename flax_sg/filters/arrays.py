"""``arrays``: a filter of variables by what they are, not by what they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from flax_sg.filters import predicates
from flax_sg.filters.expressions import Filter
from flax_sg.filters.paths import Path


class Arrays(predicates.Predicate):
    """The arrays for whose shape and dtype a function returns True; see ``arrays``."""

    names_leaves = True
    fix = 'Return a bool: sg.arrays(lambda a: a.ndim > 1).'

    def matches(self, path: Path) -> bool:
        """Whether the function returns True; what is no array is not meant."""
        return path.array is not None and self.returned(path.array, path)

    def __repr__(self) -> str:
        return f'arrays({predicates.describe(self.fn)})'


def arrays(fn: Callable[[jax.ShapeDtypeStruct], Any]) -> Filter:
    """Selects arrays by shape and dtype.

    Weights decay, biases and scales do not:

    >>> import jax.numpy as jnp, optax, flax_sg as sg
    >>> params = {'dense': {'kernel': jnp.ones((2, 3)), 'bias': jnp.ones(3)}}
    >>> matrices = sg.arrays(lambda a: a.ndim > 1)
    >>> sg.mask(params, trained=matrices)
    {'dense': {'bias': False, 'kernel': True}}
    >>> tx = optax.adamw(1e-3, mask=sg.mask(params, trained=matrices))

    It serves wherever a filter does: blocks, ``sg.freeze``, ``wrt=``, ``~ & |``. In a
    filter that looks at names as well, ``path.array`` is the same:
    ``lambda path: path.name != 'embedding' and path.array.ndim > 1``.

    Args:
        fn: called with the shape and dtype of each array or number, a
            ``jax.ShapeDtypeStruct`` with ``.ndim`` and ``.size``; returns a bool.
            A block sees an array as it is stored where the block is open: around
            ``nn.scan`` with the axis of the layers, in its body without.

    Raises:
        FilterTypeError: where it is used, if ``fn`` returns no bool.
        UnusedFilterError: where it is used, if ``fn`` held for no leaf.

    Note:
        ``eqx.is_array`` and its kin, ``hk.data_structures.filter`` and NNX's filters
        of a path and a value choose so.
    """
    return Arrays(fn)

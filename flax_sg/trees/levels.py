"""One level of a pytree: the children of a node, whatever is in them."""

from __future__ import annotations

from typing import Any

import jax

from flax_sg.internals.types import PyTree


def one_level(node: PyTree) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """The children of a node with JAX's keys of them, and what puts them together.

    >>> pairs, treedef = one_level({'a': (1, 2), 'b': None})
    >>> [child for _, child in pairs]
    [(1, 2), None]
    >>> treedef.unflatten([3, 4])
    {'a': 3, 'b': 4}

    A leaf has none: it is returned without a key.
    """
    root = iter([False])  # JAX asks for the node first, and the node may hold itself.
    return jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda _: next(root, True)
    )

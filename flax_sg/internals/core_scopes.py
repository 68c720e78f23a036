"""Wraps private names of ``flax.core`` scopes."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.core import lift
from flax.core.scope import Scope

from flax_sg.internals.types import PyTree


def stored(scope: Scope) -> dict[str, Any]:
    """The dict of all collections that ``scope`` holds; the original, not a copy."""
    scope._populate_collections()
    return scope._variables


def variables_of(scope: Scope) -> dict[str, Any]:
    """The dict that ``scope`` keeps its collections in; ``rewound`` copies share it."""
    return scope._variables


def minimal_scopes(scope_tree: PyTree) -> tuple[Scope, ...]:
    """The outermost scopes of a tree of scopes, in the order of ``lift.pack``."""
    return lift._dedup_scopes(jax.tree_util.tree_leaves(scope_tree))[0]


def copied(tree: PyTree) -> PyTree:
    """Copies nested dicts, and shares their leaves."""
    if isinstance(tree, Mapping):
        return {key: copied(value) for key, value in tree.items()}
    return tree


def copied_mutable(scope: Scope) -> dict[str, Any]:
    """Copies the mutable collections of a scope."""
    return {
        col: copied(tree)
        for col, tree in stored(scope).items()
        if scope.is_mutable_collection(col)
    }


def scratch_scope(scope: Scope) -> Scope:
    """Makes a separate scope with the same values: writes leave ``scope`` unchanged."""
    kept = {
        c: t for c, t in stored(scope).items() if not scope.is_mutable_collection(c)
    }
    rngs: dict[str, Any] = dict(scope.rngs)
    return Scope(
        {**kept, **copied_mutable(scope)},
        rngs=rngs,
        name=scope.name,
        mutable=scope.mutable,
        path=scope.path,
        debug_path=scope.debug_path,
        flags=scope.flags,
    )


def copy_scopes(
    scopes: list[Scope], copy: Callable[[Scope], Scope]
) -> tuple[dict[Scope, Scope], list[Scope]]:
    """Copies the outermost of some scopes, and finds all others inside the copies.

    Returns:
        The outermost scopes with their copies; and for each of ``scopes``, the scope at
        the same path inside a copy.
    """
    tops, paths = lift._dedup_scopes(scopes)
    copies = {top: copy(top) for top in tops}
    return copies, lift._dup_scopes(tops, list(copies.values()), paths)

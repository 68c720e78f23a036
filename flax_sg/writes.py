"""Real writes to variables that are read only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax.core.scope import Scope

from flax_sg import _private, blocks, errors, views


def check(
    scope: Scope, open_blocks: Sequence[blocks.Block], key: views.Key, value: Any
) -> None:
    """Raises if a variable, or one in a subtree, is about to be changed.

    What is stored already, the very objects, is no write: a lifted transform publishes
    all that it was given.

    Args:
        scope: the scope that writes.
        open_blocks: the blocks that hold.
        key: where ``value`` stands.
        value: what is to be stored.

    Raises:
        ReadOnlyError: if one of the blocks says so.
    """
    refusing = [
        block
        for block in open_blocks
        if block.rewrite_value.rule.refuses_writes and block.wants(key[0])
    ]
    if not refusing:
        return
    root = blocks.root_of(scope)
    if root.scratch:  # A second run of a ``setup``: nothing is kept of it.
        return
    stored = _private.stored(scope)
    for (collection, names), new in views.iter_variables(key, value):
        old = views.find(stored, collection, names[len(scope.path) :])
        if old is views.AS_IT_IS and root.initializing:
            continue  # That is what initialization is for.
        for block in refusing:
            if block.selects(root, (collection, names)) and not _same(old, new):
                path = block.path(root, (collection, names))
                raise errors.ReadOnlyError(
                    block.rewrite_value, path, _writer(), old is not views.AS_IT_IS
                )


def _same(old: Any, new: Any) -> bool:
    before, treedef = jax.tree_util.tree_flatten(old)
    after, treedef_after = jax.tree_util.tree_flatten(new)
    return treedef == treedef_after and all(
        a is b for a, b in zip(before, after, strict=True)
    )


def _writer() -> str:
    """Who is running."""
    running = _private.running_method()
    if running is None:
        return 'A function of a scope'
    module, method = running
    path = '/'.join(getattr(module.scope, 'path', ()))
    return f'{type(module).__name__}.{method} (at {path!r})'

"""Raises when code really writes to a variable under ``nn.read_only``."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax.core.scope import Scope

from flax_sg import errors
from flax_sg.engine import blocks, selection
from flax_sg.engine.roots import Root
from flax_sg.filters.paths import Path
from flax_sg.internals import core_scopes, modules
from flax_sg.internals.types import PyTree
from flax_sg.rules.rules import Rewrite
from flax_sg.trees.variables import MISSING, Key, find, iter_variables, leaf_keys


def check(
    scope: Scope, open_blocks: Sequence[blocks.Block], key: Key, value: PyTree
) -> None:
    """Raises if a read-only variable, or one in a subtree, is about to be changed.

    Storing the very objects that are already stored is no write: a lifted transform
    publishes all that it was handed.

    Args:
        scope: the scope that writes.
        open_blocks: the open blocks that apply to the write.
        key: the collection and names of ``value``.
        value: the variable or subtree to store.

    Raises:
        BlockError: if one of the blocks refuses the write.
    """
    root = blocks.root_of(scope)
    _check_handed(root, key, value)
    refusing = [b for b in open_blocks if b.rewrite.rule.acts_on == 'writes']
    if not refusing:
        return
    refusing = [b for b in refusing if selection.wants(b, root, key[0])]
    if root.setups.made_in is not None:  # A second run of setup writes to a copy.
        return
    stored = core_scopes.stored(scope)
    for variable, new in iter_variables(key, value):
        old = find(stored, variable[0], variable[1][len(scope.path) :])
        if old is MISSING and root.initializing:
            continue  # Initialization creates variables.
        for block in refusing:
            changed = [
                leaf_key
                for leaf_key in _changed(variable, old, new)
                if selection.selects(block, root, leaf_key, False, True) is not False
            ]
            if changed:
                path = selection.path_of(block, changed[0]).variable
                raise _read_only(block.rewrite, path, _writer(), old is not MISSING)


def _check_handed(root: Root, key: Key, value: PyTree) -> None:
    """Raises if a lifted body changes a variable that was rewritten outside of it."""
    if not root.handed.selected:
        return
    for variable, new in iter_variables(key, value):
        block = root.handed.selected.get(variable)
        if block is None or variable in root.sown:
            continue
        if _changed(variable, root.handed.values[variable], new):
            path = selection.path_of(block, variable)
            raise errors.BlockError(
                f'{_writer()} writes the variable {path.name!r} of the collection '
                f'{path.collection!r} in a transform, and {block.rewrite!r}, which '
                'selects it, is open around the transform.\n'
                'Leave the collection out with collections=, or open the block inside '
                'of the transform.'
            )


def _changed(key: Key, old: PyTree, new: PyTree) -> list[Key]:
    """Returns the leaves of a variable that change; all if its structure changes."""
    before, treedef = jax.tree_util.tree_flatten(old)
    after, treedef_after = jax.tree_util.tree_flatten(new)
    if treedef != treedef_after:
        old_keys = [] if old is MISSING else leaf_keys(key, old)
        return [*old_keys, *leaf_keys(key, new)]
    pairs = zip(leaf_keys(key, new), before, after, strict=True)
    return [leaf_key for leaf_key, a, b in pairs if a is not b]


def _writer() -> str:
    """Names the running method and its module, for the error."""
    running = modules.running_method()
    if running is None:
        return 'A function of a scope'
    module, method = running
    path = '/'.join(getattr(module.scope, 'path', ()))
    return f'{type(module).__name__}.{method} (at {path!r})'


def _read_only(
    rewrite: Rewrite, path: Path, by: str, exists: bool
) -> errors.BlockError:
    """The error for a write to a variable under ``nn.read_only``."""
    done = 'wrote' if exists else 'created'
    return errors.BlockError(
        f'{by} {done} the variable {path.name!r} of the collection '
        f'{path.collection!r} in the module at '
        f'{path.absolute.rpartition("/")[0]!r}, which is read only under {rewrite!r}.\n'
        'Fix: leave the block for the write, or leave the variable out with where= '
        'or collections=.'
    )

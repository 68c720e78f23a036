"""A scope that a transform lifts: views of its variables go in, stored values out."""

from __future__ import annotations

from typing import Any

import jax
from flax.core.scope import Scope, intersect_filters, is_filter_empty

from flax_sg.engine import blocks, roots, selection, views
from flax_sg.internals import core_scopes
from flax_sg.internals.types import PyTree
from flax_sg.trees.variables import Key, iter_variables, map_variables


class LiftedScope:
    """A scope that is lifted, and its variables in the open blocks.

    Attributes:
        path: the path of the scope.
        root: the root of its tree, outside of the transform.
    """

    def __init__(self, scope: Scope, open_blocks: roots.Blocks, is_map: bool) -> None:
        self.path, self.root = scope.path, blocks.root_of(scope)
        self._mutable, self._is_map = scope.mutable, is_map
        self._open_blocks = open_blocks
        # Blocks that rewrite come first. Of a variable that is rewritten and read only,
        # ``selected_by`` then tells that the body was handed a rewritten value.
        self._by_effect = sorted(open_blocks, key=views.only_refuses)
        # The variables that a block looks at, as they are stored.
        self._stored: dict[Key, Any] = {}

    def viewed(self, group: dict[str, Any]) -> dict[str, Any]:
        """The variables of a group as the body gets them."""
        out: dict[str, Any] = {}
        for col, tree in group.items():
            key = col, self.path
            out[col] = views.view(self.root, self._open_blocks, key, tree)
            if any(selection.wants(b, self.root, col) for b in self._open_blocks):
                self._stored.update(iter_variables(key, tree))
        return out

    def hand_over(self, root: roots.Root, inner: Scope, is_kept: bool) -> None:
        """Tells the root of the body which variables it starts with.

        Args:
            root: the root of the body.
            inner: the scope in the body.
            is_kept: whether JAX keeps the body. What it writes without a read depends
                on the answers of the blocks, too.
        """
        root.handed.stored.update(self._stored)
        for col, tree in core_scopes.variables_of(inner).items():
            noted = is_kept and inner.is_mutable_collection(col)
            for key, value in iter_variables((col, inner.path), tree):
                root.handed.values[key] = value
                block = self.selected_by(key, root, noted)
                if block is not None and not views.only_refuses(block):
                    root.handed.selected[key] = block

    def published(self, group: dict[str, Any]) -> dict[str, Any]:
        """The variables of a group as they are stored when the body has ended."""
        return {
            col: map_variables(self._published, (col, self.path), tree)
            for col, tree in group.items()
        }

    def _published(self, key: Key, value: PyTree) -> PyTree:
        if self.selected_by(key, self.root) is None:
            return value
        if self._is_as_written():
            return views.stored(self.root, self._open_blocks, key, value)
        stored = self._stored[key]
        return _with_sown(stored, value) if key in self.root.sown else stored

    def _is_as_written(self) -> bool:
        """Whether what comes out of the body is stored, but for views that it has read.

        That is so when ``init`` makes variables under ``nn.map_variables``: its body is
        not traced, so an array that was only read comes out as the array that went in.
        Out of a trace all arrays come anew, and nothing tells which of them were read.
        """
        return self._is_map and self.root.initializing

    def selected_by(
        self, key: Key, root: roots.Root, noted: bool = False
    ) -> blocks.Block | None:
        """Returns a block that rewrites a variable or refuses its writes, or None.

        Args:
            key: the variable.
            root: the root that the variable is asked about in: of the tree, or of the
                body.
            noted: whether the running trace depends on the answer without a read.
        """
        if key not in self._stored:  # ``nn.map_variables`` gives other names in a body.
            return None
        if key in self.root.handed.selected:
            return self.root.handed.selected[key]
        for block in self._by_effect:
            if views.acts(block, root) and selection.wants(block, root, key[0]):
                keys = self.root.handed.leaf_keys(block, key, self._stored[key])
                answers = [
                    selection.selects(block, root, k, False, noted) for k in keys
                ]
                if any(answer is not False for answer in answers):
                    return block
        return None

    def may_write(self, block: blocks.Block) -> bool:
        """Whether the body may write or make variables that a block looks at."""
        shared = intersect_filters(self._mutable, block.rewrite.collections)
        return not is_filter_empty(shared)


def _with_sown(stored: PyTree, value: PyTree) -> PyTree:
    """A stored variable with what a body has sown.

    ``sow`` appends to a tuple, which begins with entries as the body saw them. What a
    ``reduce_fn`` of the user adds up is new.
    """
    before, (leaves, treedef) = jax.tree.leaves(stored), jax.tree.flatten(value)
    if len(leaves) > len(before):
        leaves[: len(before)] = before
    return treedef.unflatten(leaves)

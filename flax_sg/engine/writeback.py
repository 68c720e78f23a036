"""Makes a lifted transform in a block publish stored values.

``flax.core.lift.pack`` hands variables into a transform and publishes all that comes
out, read or written. Inside a block the transform gets rewritten values. If they were
published, reads after the block would stay stopped for good. So of a selected variable
the stored value is published, whatever comes out. A body that writes such a variable
raises at the write; what it sows is appended to what is stored. Under
``nn.map_variables`` in ``init`` that is what was written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from flax.core.scope import Scope, intersect_filters, is_filter_empty

from flax_sg import errors
from flax_sg.engine import blocks, marks, roots, selection, views
from flax_sg.engine.marks import Groups, map_groups
from flax_sg.internals import core_scopes, lifting, patching
from flax_sg.internals.places import warn_once
from flax_sg.trees.leaves import is_array
from flax_sg.trees.variables import Key, iter_variables, leaf_keys, map_variables


def partial_pack(
    scope_tree: Any, ins: Any, outs: Any, rngs: Any, name: str | None = None
) -> Any:
    """The hook for ``flax.core.lift._partial_pack``; ``name`` is the transform's."""
    packed = patching.originals['partial_pack'](scope_tree, ins, outs, rngs, name)
    scopes = core_scopes.minimal_scopes(scope_tree)
    return _Lift(scopes, blocks.active(), name).wrap(*packed)


class _Lift:
    """One call of a lifted transform.

    Views go into the body, and stored values come out. The body has a root of its own:
    its variables are others, in another trace.
    """

    def __init__(
        self, scopes: Sequence[Scope], open_blocks: roots.Blocks, name: str | None
    ) -> None:
        self.scopes, self.open_blocks = scopes, open_blocks
        # Those come first that rewrite what is read.
        self.acting = sorted(open_blocks, key=views.only_refuses)
        self._asking = [block for block in open_blocks if block.asker.asks_path]
        self.roots = [blocks.root_of(scope) for scope in scopes]
        self.is_jit, self.is_scan = name == lifting.JIT, name == lifting.SCAN
        self.is_map = name == lifting.MAP
        # The variables that a block looks at, as they are stored.
        self.stored: list[dict[Key, Any]] = [{} for _ in scopes]

    def wrap(
        self,
        scope_fn: Callable[..., Any],
        repack_fn: Callable[..., Any],
        variable_groups: Groups,
        rng_groups: Any,
        publish_fn: Callable[..., Any],
    ) -> tuple[Any, ...]:
        """Wraps what ``_partial_pack`` returns, in the order in which Flax uses it."""

        def begins(groups: Groups, *args: Any, **kwargs: Any) -> Any:
            scope_tree = scope_fn(marks.without(groups), *args, **kwargs)
            self._begin(core_scopes.minimal_scopes(scope_tree))
            return scope_tree

        def ends(scope_tree: Any) -> Any:
            inner = core_scopes.minimal_scopes(scope_tree)
            sown = frozenset(
                (index, col, names[len(scope.path) :])
                for index, scope in enumerate(inner)
                for col, names in blocks.root_of(scope).sown
                if names[: len(scope.path)] == scope.path
            )
            self._note_sown(sown)
            out = repack_fn(scope_tree)
            return marks.added(out, sown) if self.is_jit and sown else out

        def publish(groups: Groups) -> None:
            self._note_sown(*marks.facts_of(groups))
            publish_fn(map_groups(self._as_stored, marks.without(groups)))

        if not self.open_blocks:
            return begins, repack_fn, variable_groups, rng_groups, publish_fn
        viewed = map_groups(self._viewed, variable_groups)
        if self.is_scan:  # The groups before are broadcast or carried.
            self._warn_of_more(variable_groups[2:], viewed[2:])
        if self.is_jit and self._may_write():
            viewed = marks.added(viewed, self._names())
        return begins, ends, viewed, rng_groups, publish

    def _viewed(self, index: int, group: dict[str, Any]) -> dict[str, Any]:
        scope, root = self.scopes[index], self.roots[index]
        out: dict[str, Any] = {}
        for col, tree in group.items():
            out[col] = views.view(root, self.open_blocks, (col, scope.path), tree)
            if any(selection.wants(block, root, col) for block in self.open_blocks):
                self.stored[index].update(iter_variables((col, scope.path), tree))
        return out

    def _as_stored(self, index: int, group: dict[str, Any]) -> dict[str, Any]:
        root, path = self.roots[index], self.scopes[index].path

        def as_stored(key: Key, value: Any) -> Any:
            if self._selecting(index, key, root) is None:
                return value
            # Of a trace all arrays come out anew, here those alone that are written.
            if self.is_map and root.initializing:
                return views.stored(root, self.open_blocks, key, value)
            stored = self.stored[index][key]
            if key not in root.sown:
                return stored
            # ``sow`` appends; what it adds up in another way is new.
            before, (leaves, treedef) = jax.tree.leaves(stored), jax.tree.flatten(value)
            if len(leaves) > len(before):
                leaves[: len(before)] = before
            return treedef.unflatten(leaves)

        return {
            col: map_variables(as_stored, (col, path), tree)
            for col, tree in group.items()
        }

    def _selecting(
        self, index: int, key: Key, root: roots.Root, noted: bool = False
    ) -> blocks.Block | None:
        """Returns a block by which a stored variable stays as it is, if there is one.

        The body sees it rewritten, or must not write it.
        """
        if key not in self.stored[index]:  # ``nn.map_variables`` makes other names.
            return None
        if key in self.roots[index].handed.selected:
            return self.roots[index].handed.selected[key]
        keys = leaf_keys(key, self.stored[index][key])
        for block in self.acting:
            if views.acts(block, root) and selection.wants(block, root, key[0]):
                said = [selection.selects(block, root, k, False, noted) for k in keys]
                if any(said):
                    return block
        return None

    def _begin(self, inner_scopes: Sequence[Scope]) -> None:
        inner_roots: dict[int, roots.Root] = {}
        for index, inner in enumerate(inner_scopes):
            outer, variables = self.roots[index], core_scopes.variables_of(inner)
            root = inner_roots.get(id(outer))
            if root is None:
                root = blocks.used(outer.within(self.open_blocks, inner))
                inner_roots[id(outer)] = root
            else:
                root.parts.append((inner.path, variables))
            roots.carry(inner, root)
            for col, tree in variables.items() if self.open_blocks else ():
                # JAX keeps the body of ``nn.jit``. Of the others each call has a new
                # one.
                noted = self.is_jit and inner.is_mutable_collection(col)
                for key, value in iter_variables((col, inner.path), tree):
                    root.handed.values[key] = value
                    block = self._selecting(index, key, root, noted)
                    if block is not None and not views.only_refuses(block):
                        root.handed.selected[key] = block

    def _may_write(self) -> bool:
        """Whether the body may write what a block looks at by name; it need not exist.

        Such a variable, made and read again in the body, is rewritten there by name. So
        modules whose names differ need traces of their own.
        """
        return any(
            block.rewrite.rule.asks_place
            or not is_filter_empty(
                intersect_filters(scope.mutable, block.rewrite.collections)
            )
            for scope in self.scopes
            for block in self._asking
        )

    def _names(self) -> Any:
        """How the blocks name what is at the scopes."""
        return tuple(
            (scope.path, *(b.owner_path for b in self._asking if b.covers(root)))
            for scope, root in zip(self.scopes, self.roots, strict=True)
        )

    def _note_sown(self, *sown: Iterable[tuple[int, str, tuple[str, ...]]]) -> None:
        # By index and names below the scope: ``nn.jit`` shares a trace among paths.
        for index, col, names in itertools.chain(*sown):
            self.roots[index].sown.add((col, (*self.scopes[index].path, *names)))

    def _warn_of_more(self, stored: Groups, viewed: Groups) -> None:
        """Warns if a function makes more of stacked variables than is stored."""
        before, after = map(_bytes, (stored, viewed))
        for block in self.open_blocks if after > before else ():
            if block.rewrite.rule.runs_code:
                text = (
                    f'{block.rewrite!r} is open around a scan, and makes {after:,} '
                    f'bytes of {before:,} bytes of stacked variables.\n'
                    'Values are right, but those of all layers are there at a time, '
                    'and are kept for the backward pass.\n'
                    'Let each layer make its own, in the body of the scan: '
                    'nn.substitute(Layer, function, where=...).'
                )
                warn_once(text, block.place, errors.ScanMemoryWarning)
                return


def _bytes(groups: Groups) -> int:
    leaves = filter(is_array, jax.tree.leaves(groups))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

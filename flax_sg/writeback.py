"""What a lifted transform really wrote.

``flax.core.lift.pack`` hands variables into a transform and publishes what comes out,
read or written. Inside a block what goes in is rewritten, and publishing it would store
rewritten values: reads after the block would be stopped for good. So each body is
watched: a leaf that leaves as the very object that came in was not written, and the
stored value is published in its place.

This is judged inside each trace of the body, since a transform such as ``nn.jit`` or
``nn.scan`` returns new arrays for what it was merely given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax.core.frozen_dict import FrozenDict
from flax.core.scope import Scope, intersect_filters, is_filter_empty

from flax_sg import _private, blocks, nodes, views

_JIT = 'jit'
_LOOPS = ('scan', 'while_loop')
_SCAN = 'scan'
_BRANCHES = ('cond', 'switch')
_Origin: TypeAlias = tuple[int | None, ...]
_MARK = '\0flax_sg'  # No collection has this name: it would not be a str to type.

Groups = tuple[tuple[dict[str, Any], ...], ...]


def partial_pack(original: Callable[..., Any]) -> Callable[..., Any]:
    """The hook for ``flax.core.lift._partial_pack``."""

    # As Flax declares it: the name is that of the transform.
    def hook(scope_tree: Any, ins: Any, outs: Any, rngs: Any, name: Any = None) -> Any:
        packed = original(scope_tree, ins, outs, rngs, name)
        open_blocks = blocks.active()
        if not open_blocks and blocks.thread.replay is None:
            return packed
        scopes = _private.minimal_scopes(scope_tree)
        for scope in scopes:
            blocks.note_trace(scope)
        lift = _Lift(
            scopes=scopes,
            open_blocks=open_blocks,
            name=name,
            axes=_private.axes_of_caller(),
        )
        return lift.wrap(*packed)

    return hook


class _Lift:
    """One call of a lifted transform while blocks are open."""

    def __init__(
        self,
        scopes: Sequence[Scope],
        open_blocks: tuple[blocks.Block, ...],
        name: str | None,
        axes: Callable[[str], tuple[int | None, int | None]],
    ) -> None:
        self.scopes = scopes
        self.roots = [blocks.root_of(scope) for scope in scopes]
        self.open_blocks = open_blocks
        self.is_jit = name == _JIT
        self.is_loop = name in _LOOPS
        self.is_scan = name == _SCAN
        self.has_branches = name in _BRANCHES
        self.axes = axes
        self.trace = _private.current_trace()
        self.stored: list[dict[views.Key, Any]] = [{} for _ in scopes]
        # For each variable the stored leaf that each of its leaves is, None if it was
        # written; as far as all traces of the body agree.
        self.origins: list[dict[views.Key, _Origin]] = [{} for _ in scopes]

    def wrap(
        self,
        scope_fn: Callable[..., Any],
        repack_fn: Callable[..., Any],
        variable_groups: Groups,
        rng_groups: Any,
        publish_fn: Callable[..., Any],
    ) -> tuple[Any, ...]:
        """The five values of ``_partial_pack``, with views in and stored values out."""

        def viewed_scope_fn(groups: Groups, *args: Any, **kwargs: Any) -> Any:
            scope_tree = scope_fn(self._without_names(groups), *args, **kwargs)
            self._note_handed(_private.minimal_scopes(scope_tree))
            return scope_tree

        def judged_repack_fn(scope_tree: Any) -> Any:
            origins = self._judge(_private.minimal_scopes(scope_tree))
            out = repack_fn(scope_tree)
            if self.is_jit:
                return self._map_leaves(
                    out, origins, lambda _, k, *__: nodes.Unwritten(k)
                )
            if self.has_branches:
                # Another branch may write: then this one's value is selected by data.
                return self._map_leaves(out, origins, leaf_stored)
            return out

        def leaf_stored(value: Any, origin: int, leaf: Any, key: views.Key) -> Any:
            stored = jax.tree_util.tree_leaves(value)[origin]
            return _moved(stored, *self.axes(key[0]), leaf)

        def stored_publish_fn(groups: Groups) -> None:
            publish_fn(self._map_leaves(groups, self.origins, leaf_stored))

        return (
            viewed_scope_fn,
            judged_repack_fn,
            self._with_names(self._view(variable_groups)),
            rng_groups,
            stored_publish_fn,
        )

    def _view(self, groups: Groups) -> Groups:
        def viewed(index: int, group: dict[str, Any]) -> dict[str, Any]:
            scope, root = self.scopes[index], self.roots[index]
            out = {}
            for col, tree in group.items():
                key = (col, scope.path)
                out[col] = views.view(root, self.open_blocks, key, tree)
                if self._wanted(col):
                    self.stored[index].update(views.iter_variables(key, tree))
            return out

        return tuple(
            tuple(viewed(index, group) for index, group in enumerate(group_of_scopes))
            for group_of_scopes in groups
        )

    def _wanted(self, collection: str) -> bool:
        return any(block.wants(collection) for block in self.open_blocks)

    def _selected(self, index: int, key: views.Key) -> bool:
        root = self.roots[index]
        return key in root.selected or any(
            block.wants(key[0]) and block.selects(root, key)
            for block in self.open_blocks
        )

    def _note_handed(self, inner_scopes: Sequence[Scope]) -> None:
        inner_roots: dict[int, views.Root] = {}
        for index, inner in enumerate(inner_scopes):
            handed: dict[views.Key, Any] = {}
            for col, tree in _private.variables_of(inner).items():
                if self._wanted(col):
                    handed.update(views.iter_variables((col, inner.path), tree))
            selected = frozenset(
                key
                for key in handed
                # A name that does not exist outside: ``nn.map_variables`` made it.
                if key not in self.stored[index] or self._selected(index, key)
            )
            outer = self.roots[index]
            root = inner_roots.get(id(outer))
            if root is None:
                root = inner_roots[id(outer)] = outer.within(self.open_blocks)
                root.level = inner.trace_level
            root.begin(inner.path, _private.variables_of(inner), handed, selected)
            for block in self.open_blocks:
                block.made.note_handed(block, root, handed)
            inner.flags = FrozenDict({**inner.flags, blocks.ROOT_FLAG: root})

    def _judge(self, inner_scopes: Sequence[Scope]) -> list[dict[views.Key, _Origin]]:
        """Notes for each selected variable which leaves one trace left as they were."""
        found: list[dict[views.Key, _Origin]] = [{} for _ in inner_scopes]
        # In the trace of the caller (``nn.map_variables``, ``jax.disable_jit``) the
        # leaves themselves come out, and storing them finds the way back. A scan cuts
        # them to pieces and puts them together again even there.
        if _private.current_trace() == self.trace and not self.is_scan:
            return found
        for index, inner in enumerate(inner_scopes):
            root = blocks.root_of(inner)
            for col, tree in _private.variables_of(inner).items():
                if not inner.is_mutable_collection(col):
                    continue
                for key, value in views.iter_variables((col, inner.path), tree):
                    if key in root.selected and key in self.stored[index]:
                        origin = _origin(root.handed[key], value)
                        if self.is_loop:
                            # What moves up by one at each step is none that came in.
                            origin = _unmoved(origin)
                        found[index][key] = origin
                        before = self.origins[index].get(key, origin)
                        self.origins[index][key] = _agreed(before, origin)
        return found

    def _map_leaves(
        self,
        groups: Groups,
        origins: Sequence[dict[views.Key, _Origin]],
        fn: Callable[[Any, int, Any, views.Key], Any],
    ) -> Groups:
        """Maps the leaves that were not written, in groups of a transform's results."""

        def mapped(index: int, key: views.Key, value: Any) -> Any:
            stored = self.stored[index].get(key)
            leaves, treedef = jax.tree_util.tree_flatten(
                value, is_leaf=lambda x: isinstance(x, nodes.Unwritten)
            )
            origin = origins[index].get(key, ())
            if len(origin) != len(leaves):  # Nobody knows, or traces do not agree.
                origin = (None,) * len(leaves)
            out: list[Any] = []
            for leaf, before in zip(leaves, origin, strict=True):
                at = leaf.leaf if isinstance(leaf, nodes.Unwritten) else before
                out.append(leaf if at is None else fn(stored, at, leaf, key))
            return jax.tree_util.tree_unflatten(treedef, out)

        return tuple(
            tuple(
                {
                    col: views.map_variables(
                        lambda key, value, index=index: mapped(index, key, value),
                        (col, self.scopes[index].path),
                        tree,
                    )
                    for col, tree in group.items()
                }
                for index, group in enumerate(group_of_scopes)
            )
            for group_of_scopes in groups
        )

    def _with_names(self, groups: Groups) -> Groups:
        asking = [block for block in self.open_blocks if _asks_names(block)]
        # What may be written need not be there yet.
        writable = any(
            not is_filter_empty(
                intersect_filters(scope.mutable, block.rewrite_value.collections)
            )
            for scope in self.scopes
            for block in asking
        )
        if not (self.is_jit and writable and groups and groups[0]):
            return groups
        names = nodes.Names(
            tuple(
                tuple(block.names(root, scope.path) for block in asking)
                for scope, root in zip(self.scopes, self.roots, strict=True)
            )
        )
        first, *rest = groups[0]
        return (({**first, _MARK: names}, *rest), *groups[1:])

    def _without_names(self, groups: Groups) -> Groups:
        if not self.is_jit:
            return groups
        return tuple(
            tuple({col: tree for col, tree in g.items() if col != _MARK} for g in of)
            for of in groups
        )


def _asks_names(block: blocks.Block) -> bool:
    """Whether a block may show two variables of different names differently."""
    return bool(block.where.atoms) or block.rewrite_value.rule.asks_path


def _origin(handed: Any, value: Any) -> _Origin:
    by_id = {id(leaf): i for i, leaf in enumerate(jax.tree_util.tree_leaves(handed))}
    return tuple(by_id.get(id(leaf)) for leaf in jax.tree_util.tree_leaves(value))


def _unmoved(origin: _Origin) -> _Origin:
    return tuple(at if at == i else None for i, at in enumerate(origin))


def _moved(stored: Any, axis_in: Any, axis_out: Any, out: Any) -> Any:
    """A leaf that was not written, with its axis where the transform puts it."""
    # JAX refuses that what is mapped comes out as one for all.
    if axis_in == axis_out:
        return stored
    if axis_in is None:
        return jnp.broadcast_to(jnp.expand_dims(stored, axis_out), out.shape)
    return jnp.moveaxis(stored, axis_in, axis_out)


def _agreed(one: _Origin, other: _Origin) -> _Origin:
    if len(one) != len(other):
        return ()
    return tuple(a if a == b else None for a, b in zip(one, other, strict=True))

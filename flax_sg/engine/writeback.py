"""Makes a lifted transform publish only what its body really wrote.

``flax.core.lift.pack`` hands variables into a transform and publishes all that comes
out, read or written. Inside a block the transform gets rewritten values. If they were
published, reads after the block would stay stopped for good. So each body is watched. A
leaf that leaves as the very object that came in was not written: the stored value is
published in its place.

This check runs inside each trace of the body: a transform such as ``nn.jit`` or
``nn.scan`` returns new arrays even for leaves that it was merely handed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
from flax.core.frozen_dict import FrozenDict
from flax.core.scope import Scope, intersect_filters, is_filter_empty

from flax_sg import errors
from flax_sg.engine import blocks, selection, views
from flax_sg.filters.expressions import unknown_class
from flax_sg.internals import core_scopes, lifting, patching, tracing
from flax_sg.internals.places import warn_once
from flax_sg.trees.leaves import is_array, shape_of
from flax_sg.trees.variables import Key, iter_variables, leaf_keys, map_variables

_Origin: TypeAlias = tuple[int | None, ...]
_MARK = '\0flax_sg'  # A name that no user gives to a collection.

Groups = tuple[tuple[dict[str, Any], ...], ...]

# Leafless pytree nodes that carry facts into and out of a trace of ``nn.jit``. A cache
# hit runs no Python, so the pytree structure has to say them.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Unwritten:
    """Replaces, in the output of ``nn.jit``, a leaf that the body did not write.

    Attributes:
        leaf: the index of the leaf among those of the stored variable.
    """

    leaf: int


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Mark:
    """What a jitted body depends on, or what it did.

    ``nn.jit`` shares one trace among modules at different paths. A variable that the
    body writes in a selected collection and reads again is rewritten inside the trace,
    by name. So modules whose names differ need traces of their own.

    Attributes:
        facts: going in, how the open blocks name the variables that the body may write;
            coming out, the variables that the body has sown.
    """

    facts: Any


def partial_pack(
    scope_tree: Any, ins: Any, outs: Any, rngs: Any, name: str | None = None
) -> Any:
    """The hook for ``flax.core.lift._partial_pack``; ``name`` is the transform's."""
    packed = patching.originals['partial_pack'](scope_tree, ins, outs, rngs, name)
    open_blocks = blocks.active()
    if not open_blocks and blocks.thread.doubts is None:
        return packed
    scopes = core_scopes.minimal_scopes(scope_tree)
    return _Lift(scopes, open_blocks, name).wrap(*packed)


class _Lift:
    """One call of a lifted transform while blocks are open."""

    def __init__(
        self,
        scopes: Sequence[Scope],
        open_blocks: tuple[blocks.Block, ...],
        name: str | None,
    ) -> None:
        self.scopes = scopes
        self.roots = [blocks.root_of(scope) for scope in scopes]
        self.inside = tuple(b for b in open_blocks if b.asker.asks_classes)
        self.outside = tuple(b for b in open_blocks if not b.asker.asks_classes)
        # Blocks that choose by class rewrite in the body, where the modules run.
        self.too_late = _too_late(open_blocks, name)
        self.open_blocks = open_blocks
        self.is_jit = name == lifting.JIT
        self.is_loop = name in lifting.LOOPS
        self.is_scan = name == lifting.SCAN
        self.has_branches = name in lifting.BRANCHES
        self.trace = tracing.current_trace()
        self.stored: list[dict[Key, Any]] = [{} for _ in scopes]
        # For each leaf of each variable the index of the same stored leaf; None if the
        # leaf was written, or if the traces of the body disagree.
        self.origins: list[dict[Key, _Origin]] = [{} for _ in scopes]

    def wrap(
        self,
        scope_fn: Callable[..., Any],
        repack_fn: Callable[..., Any],
        variable_groups: Groups,
        rng_groups: Any,
        publish_fn: Callable[..., Any],
    ) -> tuple[Any, ...]:
        """Wraps what ``_partial_pack`` returns: views go in, stored values come out."""
        viewed = self._view(variable_groups)
        if self.is_scan:  # The groups before are broadcast or carried.
            self._warn_of_more(variable_groups[2:], viewed[2:])

        def viewed_scope_fn(groups: Groups, *args: Any, **kwargs: Any) -> Any:
            scope_tree = scope_fn(self._without_marks(groups), *args, **kwargs)
            self._note_handed(core_scopes.minimal_scopes(scope_tree))
            return scope_tree

        def judged_repack_fn(scope_tree: Any) -> Any:
            inner_scopes = core_scopes.minimal_scopes(scope_tree)
            origins = self._judge(inner_scopes)
            sown = {key for s in inner_scopes for key in blocks.root_of(s).sown}
            self._note_sown(sown)
            out = repack_fn(scope_tree)
            if self.is_jit:
                out = self._map_leaves(out, origins, lambda _, k, *__: Unwritten(k))
                return _marked(out, Mark(frozenset(sown))) if sown else out
            if self.has_branches:
                # Another branch may write. Then data select the result at run time, so
                # this branch has to return the stored value itself.
                return self._map_leaves(out, origins, leaf_stored)
            return out

        def leaf_stored(value: Any, origin: int, leaf: Any, key: Key) -> Any:
            stored = jax.tree_util.tree_leaves(value)[origin]
            if isinstance(leaf, Unwritten) or shape_of(leaf) == shape_of(stored):
                return stored
            raise _moved(key)

        def stored_publish_fn(groups: Groups) -> None:
            for group in groups[0] if groups else ():
                if _MARK in group:
                    self._note_sown(group[_MARK].facts)
            groups = self._without_marks(groups)
            groups = self._map_leaves(groups, self.origins, leaf_stored)
            if not self.inside:
                return publish_fn(groups)
            with blocks.thread.only(self.outside):  # The body asked the others.
                publish_fn(groups)

        return (
            viewed_scope_fn,
            judged_repack_fn,
            self._with_names(viewed),
            rng_groups,
            stored_publish_fn,
        )

    def _view(self, groups: Groups) -> Groups:
        def viewed(index: int, group: dict[str, Any]) -> dict[str, Any]:
            scope, root = self.scopes[index], self.roots[index]
            out = {}
            for col, tree in group.items():
                key = (col, scope.path)
                self._check_late(root, key, tree)
                out[col] = views.view(root, self.outside, key, tree)
                if any(selection.wants(block, col) for block in self.outside):
                    self.stored[index].update(iter_variables(key, tree))
            return out

        return _map_groups(viewed, groups)

    def _warn_of_more(self, stored: Groups, viewed: Groups) -> None:
        """Warns if a function makes more of stacked variables than is stored."""
        before, after = map(_bytes, (stored, viewed))
        for block in self.outside if after > before else ():
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

    def _check_late(self, root: blocks.Root, key: Key, tree: Any) -> None:
        """Raises if a block needs the class of a module that does not exist yet."""
        block = self.too_late
        if block is not None and selection.wants(block, key[0]):
            for variable, _ in iter_variables(key, tree):
                path = selection.path_of(block, root, variable)
                raise unknown_class(block.rewrite.where, path)

    def _selected(self, inner: blocks.Root, index: int, key: Key, value: Any) -> bool:
        root = self.roots[index]
        # JAX keeps the body of ``nn.jit``. Of the others each call has a new one.
        return key in root.handed.selected or any(
            selection.selects(block, inner, leaf_key, read=False, noted=self.is_jit)
            for block in self.outside
            if selection.wants(block, key[0])
            for leaf_key in leaf_keys(key, value)
        )

    def _note_handed(self, inner_scopes: Sequence[Scope]) -> None:
        inner_roots: dict[int, blocks.Root] = {}
        for index, inner in enumerate(inner_scopes):
            outer = self.roots[index]
            root = inner_roots.get(id(outer))
            if root is None:
                root = inner_roots[id(outer)] = outer.within(self.outside)
                root.level = inner.trace_level
                root.kept_trace = tracing.kept_trace(inner)
            handed: dict[Key, Any] = {}
            for col, tree in core_scopes.variables_of(inner).items():
                handed.update(iter_variables((col, inner.path), tree))
            selected = frozenset(
                key
                for key, value in handed.items()
                # ``nn.map_variables`` makes names that do not exist outside.
                if key not in self.stored[index]
                or self._selected(root, index, key, value)
            )
            root.parts.append((inner.path, core_scopes.variables_of(inner)))
            root.handed.values |= handed
            root.handed.selected |= selected
            for block in self.outside:
                views.note_handed(block, root, handed)
            inner.flags = FrozenDict({**inner.flags, blocks.ROOT_FLAG: root})

    def _judge(self, inner_scopes: Sequence[Scope]) -> list[dict[Key, _Origin]]:
        """Notes for each selected variable which leaves one trace did not write."""
        found: list[dict[Key, _Origin]] = [{} for _ in inner_scopes]
        # In the caller's trace (``nn.map_variables``, ``jax.disable_jit``) the leaves
        # themselves come out, and ``views.stored`` maps them back. A scan slices them
        # and stacks them again even there.
        if tracing.current_trace() == self.trace and not self.is_scan:
            return found
        for index, inner in enumerate(inner_scopes):
            root = blocks.root_of(inner)
            for col, tree in core_scopes.variables_of(inner).items():
                if not inner.is_mutable_collection(col):
                    continue
                for key, value in iter_variables((col, inner.path), tree):
                    if key in root.handed.selected and key in self.stored[index]:
                        origin = _origin(root.handed.values[key], value)
                        if self.is_loop:
                            # A leaf that changes its position at each step was written.
                            origin = _unmoved(origin)
                        found[index][key] = origin
                        before = self.origins[index].get(key, origin)
                        self.origins[index][key] = _agreed(before, origin)
        return found

    def _map_leaves(
        self,
        groups: Groups,
        origins: Sequence[dict[Key, _Origin]],
        fn: Callable[[Any, int, Any, Key], Any],
    ) -> Groups:
        """Applies ``fn`` to the unwritten leaves in the results of a transform."""

        def mapped(index: int, key: Key, value: Any) -> Any:
            stored = self.stored[index].get(key)
            leaves, treedef = jax.tree_util.tree_flatten(
                value, is_leaf=lambda x: isinstance(x, Unwritten)
            )
            origin = origins[index].get(key, ())
            if len(origin) != len(leaves):  # Unknown, or the traces disagree.
                origin = (None,) * len(leaves)
            out: list[Any] = []
            for leaf, before in zip(leaves, origin, strict=True):
                at = leaf.leaf if isinstance(leaf, Unwritten) else before
                out.append(leaf if at is None else fn(stored, at, leaf, key))
            return jax.tree_util.tree_unflatten(treedef, out)

        def mapped_group(index: int, group: dict[str, Any]) -> dict[str, Any]:
            variable, path = functools.partial(mapped, index), self.scopes[index].path
            return {
                col: map_variables(variable, (col, path), tree)
                for col, tree in group.items()
            }

        return _map_groups(mapped_group, groups)

    def _with_names(self, groups: Groups) -> Groups:
        asking = [block for block in self.open_blocks if block.asker.asks_path]
        # A variable that the body may write need not exist yet.
        writable = any(
            not is_filter_empty(
                intersect_filters(scope.mutable, block.rewrite.collections)
            )
            for scope in self.scopes
            for block in asking
        )
        if not (self.is_jit and (writable or self.inside)):
            return groups
        names = tuple(
            tuple(_names(block, root, scope.path) for block in asking)
            for scope, root in zip(self.scopes, self.roots, strict=True)
        )
        return _marked(groups, Mark(names))

    def _note_sown(self, keys: Iterable[Key]) -> None:
        for root in self.roots:
            root.sown.update(keys)

    def _without_marks(self, groups: Groups) -> Groups:
        if not self.is_jit:
            return groups
        return _map_groups(
            lambda _, group: {c: tree for c, tree in group.items() if c != _MARK},
            groups,
        )


def _bytes(groups: Groups) -> int:
    leaves = filter(is_array, jax.tree.leaves(groups))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _map_groups(fn: Callable[[int, dict[str, Any]], Any], groups: Groups) -> Groups:
    """Maps over the groups of collections; ``fn`` gets the index of their scope."""
    return tuple(tuple(fn(i, group) for i, group in enumerate(of)) for of in groups)


def _marked(groups: Groups, mark: Any) -> Groups:
    """Adds a mark to the pytree structure of groups; Flax does not see the mark."""
    if not (groups and groups[0]):
        return groups
    first, *rest = groups[0]
    return (({**first, _MARK: mark}, *rest), *groups[1:])


def _names(
    block: blocks.Block, root: blocks.Root, path: tuple[str, ...]
) -> tuple[Any, ...]:
    """Returns all that the block's names for a module at ``path`` depend on."""
    classes = None
    if block.asker.asks_classes:
        classes = selection.classes_of(root, ('params', (*path, '')))
    return root.tree is block.tree, block.owner_path, path, classes


def _too_late(
    open_blocks: Sequence[blocks.Block], name: str | None
) -> blocks.Block | None:
    """Returns the block that chooses by class, but cannot rewrite in the body.

    In the body, a variable that went through a function is another variable, and the
    elements of an array are others too. Blocks opened inside this block rewrite outside
    the body, so their rules apply first. This order does not matter
    to a stopped gradient.
    """
    first = next((b for b in open_blocks if b.asker.asks_classes), None)
    if first is None:
        return None
    for block in open_blocks[open_blocks.index(first) :]:
        rule = block.rewrite.rule
        has_parts = block.asker.asks_classes and 'array' in block.rewrite.where.needs
        if name not in lifting.SAME_VARIABLES or not rule.anywhere or has_parts:
            return first
    return None


def _origin(handed: Any, value: Any) -> _Origin:
    by_id = {id(leaf): i for i, leaf in enumerate(jax.tree_util.tree_leaves(handed))}
    return tuple(by_id.get(id(leaf)) for leaf in jax.tree_util.tree_leaves(value))


def _unmoved(origin: _Origin) -> _Origin:
    return tuple(at if at == i else None for i, at in enumerate(origin))


def _moved(key: Key) -> errors.BlockError:
    """Returns the error for a transform that gives back another shape than it got."""
    return errors.BlockError(
        f'a transform in a block gives the variable {"/".join(key[1])!r} of the '
        f'collection {key[0]!r} back in another shape than it got.\n'
        'Give nn.vmap and nn.scan one axis for the collection, in and out, or leave '
        'it out of the block with collections=.'
    )


def _agreed(one: _Origin, other: _Origin) -> _Origin:
    if len(one) != len(other):
        return ()
    return tuple(a if a == b else None for a, b in zip(one, other, strict=True))

"""Makes a lifted transform in a block publish stored values.

``flax.core.lift.pack`` hands variables into a transform and publishes all that comes
out, read or written. Inside a block the transform gets rewritten values. If they were
published, reads after the block would stay stopped for good. So of a selected variable
the stored value is published, whatever comes out. A body that writes such a variable
raises at the write; what it sows is appended to what is stored. ``init`` under
``nn.map_variables`` publishes what the body has made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
from flax.core.scope import Scope

from flax_sg import errors
from flax_sg.engine import blocks, marks, roots
from flax_sg.engine.lifted_scopes import LiftedScope
from flax_sg.engine.marks import Groups, map_groups
from flax_sg.internals import core_scopes, lifting, patching
from flax_sg.internals.places import warn_once
from flax_sg.internals.types import PyTree
from flax_sg.trees.leaves import is_array

# The index of a lifted scope, a collection, and names below the scope: modules at other
# paths may share the trace, under ``nn.jit``.
Sown: TypeAlias = tuple[int, str, tuple[str, ...]]


def partial_pack(
    scope_tree: PyTree, ins: PyTree, outs: PyTree, rngs: PyTree, name: str | None = None
) -> tuple[Any, ...]:
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
        is_map, self._is_scan = name == lifting.MAP, name == lifting.SCAN
        # Of ``nn.jit`` JAX keeps the body. Other transforms make one in each call.
        self._is_jit = name == lifting.JIT
        self._open_blocks = open_blocks
        self._lifted = [LiftedScope(scope, open_blocks, is_map) for scope in scopes]

    def wrap(
        self,
        scope_fn: Callable[..., Any],
        repack_fn: Callable[..., Any],
        variable_groups: Groups,
        rng_groups: PyTree,
        publish_fn: Callable[..., Any],
    ) -> tuple[Any, ...]:
        """Wraps what ``_partial_pack`` returns, in the order in which Flax uses it."""

        def begins(groups: Groups, *args: Any, **kwargs: Any) -> Any:
            scope_tree = scope_fn(marks.without(groups), *args, **kwargs)
            self._begin(core_scopes.minimal_scopes(scope_tree))
            return scope_tree

        def ends(scope_tree: PyTree) -> Any:
            sown = _sown_in(core_scopes.minimal_scopes(scope_tree))
            self._note_sown(sown)
            out = repack_fn(scope_tree)
            return marks.added(out, sown) if self._is_jit and sown else out

        def publish(groups: Groups) -> None:
            self._note_sown(*marks.facts_of(groups))
            publish_fn(map_groups(self._published, marks.without(groups)))

        if not self._open_blocks:
            return begins, repack_fn, variable_groups, rng_groups, publish_fn
        viewed = map_groups(self._viewed, variable_groups)
        if self._is_scan:
            # The first two groups are broadcast and carried, the others are stacked.
            self._warn_of_more(variable_groups[2:], viewed[2:])
        if self._is_jit and self._depends_on_names():
            viewed = marks.added(viewed, self._names())
        return begins, ends, viewed, rng_groups, publish

    def _viewed(self, index: int, group: dict[str, Any]) -> dict[str, Any]:
        return self._lifted[index].viewed(group)

    def _published(self, index: int, group: dict[str, Any]) -> dict[str, Any]:
        return self._lifted[index].published(group)

    def _begin(self, inner_scopes: Sequence[Scope]) -> None:
        """Gives the scopes of the body a root, which knows what the body is handed."""
        inner_roots: dict[int, roots.Root] = {}
        for lifted, inner in zip(self._lifted, inner_scopes, strict=True):
            root = inner_roots.get(id(lifted.root))
            if root is None:
                root = blocks.used(lifted.root.within(self._open_blocks, inner))
                inner_roots[id(lifted.root)] = root
            else:  # Another module of the same tree.
                root.parts.append((inner.path, core_scopes.variables_of(inner)))
            roots.carry(inner, root)
            if self._open_blocks:
                lifted.hand_over(root, inner, self._is_jit)

    def _depends_on_names(self) -> bool:
        """Whether modules whose names differ need traces of ``nn.jit`` of their own.

        A variable that the body makes and reads again is rewritten there by its name.
        """
        return any(
            block.rewrite.rule.asks_place or lifted.may_write(block)
            for lifted in self._lifted
            for block in self._asking_names()
        )

    def _asking_names(self) -> list[blocks.Block]:
        return [block for block in self._open_blocks if block.asker.asks_path]

    def _names(self) -> Any:
        """The path of each scope, and of the owners of blocks that ask for names."""
        asking = self._asking_names()
        return tuple(
            (lifted.path, *(b.owner_path for b in asking if b.covers(lifted.root)))
            for lifted in self._lifted
        )

    def _note_sown(self, *sown: Iterable[Sown]) -> None:
        for index, col, names in itertools.chain(*sown):
            lifted = self._lifted[index]
            lifted.root.sown.add((col, (*lifted.path, *names)))

    def _warn_of_more(self, stored: Groups, viewed: Groups) -> None:
        """Warns if a function makes more of stacked variables than is stored."""
        before, after = map(_bytes, (stored, viewed))
        for block in self._open_blocks if after > before else ():
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


def _sown_in(inner_scopes: Sequence[Scope]) -> frozenset[Sown]:
    """The variables that ``Module.sow`` has written in a body."""
    return frozenset(
        (index, col, names[len(scope.path) :])
        for index, scope in enumerate(inner_scopes)
        for col, names in blocks.root_of(scope).sown
        if names[: len(scope.path)] == scope.path
    )


def _bytes(groups: Groups) -> int:
    leaves = filter(is_array, jax.tree.leaves(groups))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

"""The extent of a rewrite: which blocks are open, for whom, and what they cover.

Blocks are kept on a stack of the thread. While one is open anywhere in the process,
hooks stand on Flax's reads (``hooks.py``); they ask here which blocks hold for the
calling thread and how these name and select a variable.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Generator, Hashable, Iterable
from typing import Any

from flax.core.scope import Scope, in_filter

from flax_sg import (
    _private,
    contexts,
    errors,
    filters,
    frames,
    paths,
    placing,
    rules,
    views,
)

if 'ROOT_FLAG' in globals():  # It was loaded before.
    raise errors.ReloadError(__name__)

ROOT_FLAG = 'flax_sg'
# fp8 layers receive the *new value* of these as a gradient: no rule may touch them.
OVERWRITE_WITH_GRADIENT = '_overwrite_with_gradient'
_AS_IT_IS = contextlib.nullcontext()
_KnownRoot = tuple[views.Root, tuple[str, ...], dict[str, Any]]


class Block(frames.Place):
    """One open extent of a rewrite.

    Attributes:
        source: the rewrite that the block was opened with.
        rewrite_value: the rewrite, as it was when the block opened.
        key: what stands for it in the keys of JAX's caches.
        outer, level: the blocks that were open then, and the trace.
        owner: the scope of the module that opened the block; None at top level, and
            once the block is closed.
        owner_path: the path of that scope; () at top level.
        tree: identity of the tree that the owner belongs to.
        decisions: what the filter said of each variable met so far.
        matched: the atoms of the filter that took at least one of these variables.
        collections: the collections met so far.
    """

    def __init__(self, rewrite: rules.Rewrite, owner: Scope | None) -> None:
        super().__init__()
        self.source = rewrite
        self.rewrite_value = rewrite.snapshot()
        self.key = self.rewrite_value.key()
        self.values = self.rewrite_value.rule.values()
        self.outer, self.level = thread.blocks, _private.current_trace()
        self._kept_trace = _private.kept_trace()
        self.made = placing.Made()
        self.where = self.rewrite_value.where
        self.owner = owner
        self.owner_path = () if owner is None else owner.path
        self._closed_root: weakref.ref[Scope] | None = None
        self.decisions: dict[tuple[str, str, str], tuple[paths.Path, Any]] = {}
        self.matched: set[filters.Filter] = set()
        self.collections: set[str] = set()
        self._selected: dict[tuple[bool, views.Key], Any] = {}
        self._wanted: dict[str, bool] = {}
        self._asks_functions = any(
            isinstance(atom, filters.Predicate) for atom in self.where.atoms
        )
        self.abandoned = False  # Set by a thread that closes a block of another one.
        # Last: it notes the tree, which nobody forgets if the block is never opened.
        self.tree = None if owner is None else root_of(owner).tree

    def wants(self, collection: str) -> bool:
        """Whether the block looks at variables of this collection at all."""
        try:
            return self._wanted[collection]
        except KeyError:
            wanted = collection != OVERWRITE_WITH_GRADIENT and in_filter(
                self.rewrite_value.collections, collection
            )
            return self._wanted.setdefault(collection, wanted)

    def selects(self, root: views.Root, key: views.Key) -> Any:
        """Whether the filter takes the variable; asks it once for each variable."""
        inside = root.tree is self.tree
        if (inside, key) not in self._selected:
            self._selected[inside, key] = self._decide(self.path(root, key))
        return self._selected[inside, key]

    def _decide(self, path: paths.Path) -> Any:
        self.collections.add(path.collection)
        # Paths are strings and compare as such; collections may share their names.
        key = (path.collection, path, path.absolute)
        if key not in self.decisions:
            if self._asks_functions and not self.decisions and self.where.changed():
                raise errors.FilterChangedError(self.rewrite_value)
            # What is meant cannot depend on what the block shows of it.
            try:
                with thread.only(()) if self._asks_functions else _AS_IT_IS:
                    results = {atom: atom(path) for atom in self.where.atoms}
            except Exception as error:
                if thread.replay is not None:
                    thread.replay.of_filter = error
                raise
            self.matched.update(atom for atom, took in results.items() if took)
            self.decisions[key] = (path, self.where.combine(results))
        return self.decisions[key][1]

    def unmatched(self) -> tuple[filters.Filter, ...]:
        """The atoms of the filter that have taken no variable yet."""
        return tuple(a for a in self.where.atoms if a not in self.matched)

    def path(self, root: views.Root, key: views.Key) -> paths.Path:
        """The variable, as the filter and the rule see it."""
        return paths.Path.of(*key, self.owner_path if root.tree is self.tree else ())

    def close(self) -> None:
        """Lets go of the owner, which may hold tracers."""
        if self._asks_functions and self.where.changed():
            # Some variables may have been judged by what the filter read later.
            contexts.forget(self.key)
        if self.owner is not None:
            # Not the owner: Flax makes another one when a compact method ends.
            self._closed_root = weakref.ref(self.owner.root)
            self.owner = None

    @property
    def owner_key(self) -> Hashable:
        """Which module opened the block, in which tree, and which values it brings."""
        return self.tree, self.owner_path, self.values

    def reopen(self) -> None:
        """Knows the owner's tree again, for a while, if that is still in use."""
        top = None if self._closed_root is None else self._closed_root()
        if top is not None and ROOT_FLAG not in top.flags:
            known = _known(self.tree, top)
            thread.roots.setdefault(id(known[2]), known)

    def names(self, root: views.Root, path: tuple[str, ...]) -> tuple[Any, ...]:
        """All that tells the block's names for a module at ``path`` from others."""
        return (root.tree is self.tree, self.owner_path, path)

    def rewrite(self, root: views.Root, key: views.Key, leaf: Any) -> Any:
        """Applies the rule to one leaf, where the extent begins."""
        runs_code = self.rewrite_value.rule.runs_code  # It sees what is outside.
        with thread.only(self.outer) if runs_code else _AS_IT_IS:
            return placing.rewritten(self, root, key, leaf)

    def instead(self, root: views.Root, key: views.Key, value: Any) -> Any:
        """What stands for a whole variable, if the rule says so."""
        return placing.instead(self, root, key, value)

    def note_rewritten(self) -> None:
        """Counts what a reader saw rewritten."""
        self.note_values()
        thread.rewritten += 1

    def note_values(self) -> None:
        """Notes that something which depends on the values is read here."""
        if self.values is not None and _private.kept_trace() != self._kept_trace:
            thread.number_of.tell_apart()


class _Thread(threading.local):
    """The open blocks of a thread and what is known of the trees they have met."""

    def __init__(self) -> None:
        self.blocks: tuple[Block, ...] = ()
        self.roots: dict[int, _KnownRoot] = {}
        self._no_context = _private.user_context(0)
        with self._no_context:
            pass
        self.number_of = contexts.InUse()
        self.rewritten = 0
        self._aside = 0  # How often blocks are set aside that will be open again.
        self.replay: Any = None  # Watches a second run of a ``setup``.

    def set_blocks(self, blocks: tuple[Block, ...]) -> None:
        """Makes these the open blocks, for the hooks and for JAX's trace caches.

        One context is entered at a time, whatever the order in which blocks close. An
        exception may come between any two lines (Ctrl-C): a second call completes it.
        """
        # First what may raise: a rule of the user that cannot be hashed.
        context = _private.user_context(self.number_of(blocks)) if blocks else None
        self.blocks = blocks
        self._no_context.__exit__(None, None, None)  # As it was before it was entered.
        if context is not None:
            context.__enter__()

    @contextlib.contextmanager
    def only(self, blocks: tuple[Block, ...]) -> Generator[None]:
        """Makes these the open blocks for a while."""
        before = self.blocks, self._aside
        try:
            self._set_aside(blocks, self._aside + 1)
            yield
        finally:
            try:
                self._set_aside(*before)
            except BaseException:
                self._set_aside(*before)
                raise

    def _set_aside(self, blocks: tuple[Block, ...], aside: int) -> None:
        self._aside = aside
        self.set_blocks(blocks)

    def forget(self, block: Block) -> None:
        """Drops what was kept for a block that is closed."""
        self.number_of.forget(block)
        for root, _, _ in self.roots.values():
            root.forget(block)
        if not self.blocks and not self._aside:
            self.roots.clear()


thread = _Thread()


def note_trace(scope: Scope) -> None:
    """Notes a read that becomes part of a trace which another owner may find."""
    if scope.root.trace_level != _private.current_trace():
        thread.number_of.tell_apart()


# Of the process, to find one that another thread wants to close.
_open_blocks: set[Block] = set()


def active() -> tuple[Block, ...]:
    """The blocks that hold for the running code, outermost first."""
    blocks = thread.blocks
    for block in blocks:
        if block.suspendable:
            if block.abandoned:
                remove(block)
                return active()
            holder = block.is_here()
            if holder is not None:
                raise errors.BlockLeakError(block.rewrite_value, holder)
    return blocks


def add(block: Block) -> None:
    """Makes a block the innermost one of this thread."""
    _open_blocks.add(block)
    thread.set_blocks((*thread.blocks, block))


def remove(block: Block) -> None:
    """Takes away a block of this thread, or what an exception has left of that."""
    _open_blocks.discard(block)
    thread.set_blocks(tuple(other for other in thread.blocks if other is not block))
    thread.forget(block)
    block.close()
    _private.release_hooks(block)


def abandon(rewrite: rules.Rewrite) -> None:
    """Marks the block that a generator, run by the wrong thread, wants to close."""
    for block in list(_open_blocks):
        if block.source is rewrite and block.is_run_by_caller():
            block.abandoned = True


def root_of(scope: Scope) -> views.Root:
    """What the open blocks know of the tree that a scope belongs to."""
    top = scope.root
    root: Any = top.flags.get(ROOT_FLAG)
    if root is not None:
        return root
    variables = _private.variables_of(top)
    known = thread.roots.get(id(variables))
    if known is None:
        # The body of a transform that was entered before any block opened has roots
        # with a path; they belong to the tree of the module that opened a block in it.
        owners = [b.tree for b in thread.blocks if b.tree is not None]
        tree = owners[-1] if top.path and owners else object()
        beside = (r for r, _, _ in thread.roots.values() if r.tree is tree and top.path)
        known = thread.roots[id(variables)] = _known(tree, top, beside)
    return known[0]


def _known(tree: object, top: Scope, beside: Iterable[views.Root] = ()) -> _KnownRoot:
    same = (root for root in beside if root.level == top.trace_level)
    root = next(same, views.Root(tree))
    variables, root.level = _private.variables_of(top), top.trace_level
    root.initializing = top.get_flag('initializing', False)
    root.parts.append((top.path, variables))
    return root, top.path, variables

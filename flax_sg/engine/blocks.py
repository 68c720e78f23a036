"""Tracks a thread's open blocks, and the trees of variables read in them."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
from flax.core.scope import Scope

from flax_sg.engine import numbers
from flax_sg.filters.paths import Path
from flax_sg.internals import core_scopes, patching, tracing, versions
from flax_sg.internals.places import Place
from flax_sg.rules import rules
from flax_sg.trees.variables import Facts, Key

versions.load_once(globals())

ROOT_FLAG = 'flax_sg'


@dataclass(eq=False)
class Block:
    """Holds the data of one open block: code in which a rewrite holds.

    That is a ``with`` statement, or a call of a wrapper, a lifted class or a function.

    Attributes:
        rewrite: the rule, and the variables that it applies to.
        outer: the blocks that were open when this block opened, outermost first.
        owner: the scope of the module that opened the block; None at top level, and
            once the block is closed.
        owner_path: the path of ``owner``; () at top level.
        tree: identity of the tree that ``owner`` belongs to; None at top level.
        asker: answers the questions of ``numbers``.
        lease: the block's number in JAX's cache keys.
        depth: how many calls of ``apply`` were running when the block opened.
        level, kept_trace: the trace in which the block was opened, and the innermost
            trace around the block that JAX may cache.
        place: the line of the user's program that opened the block.
        decisions: the path of each variable met so far, and the filter's answer.
        collections: the collections met so far.
        reads: the variables that were read.
        uncovered: variables of trees that have ended, and that are not covered.
        took: whether the filter has had an effect on one of ``reads``.
        closed_root: the top scope of the owner, once the block is closed.
        is_open: whether the block's code runs, or a ``jax.custom_vjp`` rule of a
            function called in the block; see ``late_rules.py``.
        beside: the variables that were met while JAX traced nothing in the block.
    """

    rewrite: rules.Rewrite
    outer: tuple[Block, ...]
    owner: Scope | None
    owner_path: tuple[str, ...]
    tree: Tree | None
    asker: numbers.Asker
    lease: numbers.Lease
    depth: int
    level: Any
    kept_trace: Any
    place: Place
    decisions: dict[Facts, tuple[Path, Any]] = field(default_factory=dict)
    collections: set[str] = field(default_factory=set)
    reads: set[Key] = field(default_factory=set)
    uncovered: set[Facts] = field(default_factory=set)
    took: bool = False
    closed_root: weakref.ref[Scope] | None = None
    is_open: bool = True
    beside: set[Facts] = field(default_factory=set)

    def covers(self, root: Root) -> bool:
        """Whether the block covers a tree: that of its owner alone.

        At top level it covers each tree that begins in it, or was bound before. A tree
        that begins inside of another ``apply`` sees what it is given.
        """
        if self.tree is not None:
            return root.tree is self.tree
        return root.depth <= self.depth


@dataclass
class Handed:
    """What the body of a lifted transform starts with; nothing elsewhere.

    Attributes:
        covered: the blocks that were open when the body began. They apply outside.
        values: the variables, as Flax passed them in.
        selected: those that were rewritten outside, and a block that did so.
    """

    covered: tuple[Block, ...] = ()
    values: dict[Key, Any] = field(default_factory=dict)
    selected: dict[Key, Block] = field(default_factory=dict)

    def has(self, block: Block, key: Key, value: Any) -> bool:
        """Whether the block's rule was applied to ``value`` outside the body.

        ``value`` is a variable or one of its leaves. Only the leaves are compared,
        since their containers may have been rebuilt.
        """
        if block not in self.covered:
            return False
        begun = {id(leaf) for leaf in jax.tree.leaves(self.values.get(key))}
        return all(id(leaf) in begun for leaf in jax.tree.leaves(value))


@dataclass
class Setups:
    """The runs of ``setup`` of the modules of a tree.

    Attributes:
        made_in: if the tree serves a second run, the blocks of that run.
        running: by id, modules whose ``setup`` runs, or ran for a second time in this
            tree, and the blocks that were open.
        values: for each block, the values kept by ``setup``, as readers see them.
        is_new: whether the tree began in a second run of a ``setup``.
    """

    made_in: tuple[Block, ...] | None = None
    running: dict[int, tuple[Block, ...]] = field(default_factory=dict)
    values: dict[Block, dict[int, Any]] = field(default_factory=dict)
    is_new: bool = False


class Root:
    """Holds what the open blocks know of one tree of variables.

    A tree belongs to an ``apply``, a bound module, or the body of a lifted transform.

    Attributes:
        tree: identity of the ``apply`` that the tree comes from. The body of a lifted
            transform shares the identity of the scope it was lifted from.
        parts: the paths and collections that make up the tree; several in the body of
            a transform of several modules.
        depth: in how many calls of ``apply`` the tree began.
        initializing: whether ``init`` is making the variables.
        level, kept_trace: the trace in which the tree began, and the innermost trace
            around the tree that JAX may cache.
        handed: what the tree starts with, if it belongs to a lifted body.
        views: for each block, what readers of the tree see in it; see ``views.py``.
        setups: the runs of ``setup`` of its modules.
        sown: the variables that ``Module.sow`` has written in a block.
        pending: closed blocks that are judged when the tree is complete, each with
            the exception that was being handled when it closed.
    """

    def __init__(self, tree: Tree, depth: int) -> None:
        self.tree = tree
        self.depth = depth
        self.parts: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        self.initializing = False
        self.level: Any = None
        self.kept_trace: Any = None
        self.handed = Handed()
        self.views: dict[Block, Any] = {}
        self.setups = Setups()
        self.sown: set[Key] = set()
        self.pending: list[Any] = []

    def as_scratch(self, made_in: tuple[Block, ...]) -> Root:
        """Returns a root of the same tree, for a second run of ``setup`` in blocks."""
        scratch = copy.copy(self)
        scratch.setups, scratch.pending, scratch.sown = Setups(made_in), [], set()
        return scratch

    def within(self, covered: tuple[Block, ...]) -> Root:
        """Returns a root of the same tree, for a body that begins in blocks."""
        inner = Root(self.tree, self.depth)
        inner.initializing, inner.pending = self.initializing, self.pending
        inner.handed, inner.setups = Handed(covered), Setups(self.setups.made_in)
        inner.setups.is_new = self.setups.is_new
        return inner

    # All roots are equal, and no dataclasses: scopes carry them in their flags, and
    # ``nn.jit`` hashes the flags, and dataclasses in them by field, to tell modules
    # apart. JAX's own cache keys tell the blocks apart.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Root)

    def __hash__(self) -> int:
        return hash(Root)

    def forget(self, block: Block) -> None:
        """Drops the values kept for a closed block."""
        self.views.pop(block, None)
        self.setups.values.pop(block, None)


Blocks: TypeAlias = tuple[Block, ...]
_KnownRoot = tuple[Root, tuple[str, ...], dict[str, Any]]


class _Thread(threading.local):
    """Holds a thread's open blocks, and the roots of the trees read in them."""

    def __init__(self) -> None:
        self.blocks: tuple[Block, ...] = ()
        # One context is entered at a time, so blocks may close in any order.
        self._no_context = tracing.user_context(0)
        with self._no_context:
            pass
        self.applies: list[Any] = []  # One for each ``apply`` that runs.
        self.roots: dict[int, _KnownRoot] = {}
        self.rewritten = 0  # How often a reader saw a rewritten value.
        self._aside = 0  # How many calls of ``only`` are running.
        # Why a second run of ``setup`` may differ; None outside of such a run.
        self.doubts: list[str] | None = None

    def set_blocks(self, blocks: tuple[Block, ...]) -> None:
        """Sets the open blocks, for the hooks and for JAX's trace caches.

        Ctrl-C may raise between any two lines: a second call completes the change.
        """
        self.blocks = blocks
        self._no_context.__exit__(None, None, None)  # Restores the initial number.
        if blocks:
            tracing.user_context(self.number.value).__enter__()

    @property
    def number(self) -> numbers.Number:
        """The number of the open blocks in JAX's cache keys."""
        if not self.blocks:
            return numbers.NONE
        block = self.blocks[-1]
        number = block.lease.number
        return number if len(self.applies) <= block.depth else number.deeper

    @contextlib.contextmanager
    def applying(self, scope: Any) -> Generator[Any]:
        """Counts an ``apply``, given the context in which it runs.

        Which trees a block covers depends on it, so it is part of JAX's keys.
        """
        mark = object()
        with scope as root:
            try:
                self.applies.append(mark)
                self.set_blocks(self.blocks)
                yield root
            finally:
                if mark in self.applies:
                    self.applies.remove(mark)
                self.set_blocks(self.blocks)

    def _set_aside(self, blocks: tuple[Block, ...], aside: int) -> None:
        self._aside = aside
        self.set_blocks(blocks)

    @contextlib.contextmanager
    def only(self, blocks: tuple[Block, ...]) -> Generator[None]:
        """Makes ``blocks`` the only open blocks inside the ``with`` body."""
        before, aside = self.blocks, self._aside

        def restore() -> None:
            # One that was set aside may have been closed.
            self._set_aside(tuple(b for b in before if b.is_open), aside)

        try:
            self._set_aside(blocks, aside + 1)
            yield
        finally:
            try:
                restore()
            except BaseException:
                restore()
                raise

    def forget(self, block: Block | None = None) -> None:
        """Drops the values of a closed block, and all trees if no block is left.

        Trees with pending checks stay. So do all trees while ``only`` runs, since the
        blocks that it set aside will be open again.
        """
        for root, _, _ in self.roots.values():
            if block is not None:
                root.forget(block)
        if self.blocks or self._aside:
            return
        if self.roots:
            self.roots = {
                i: known for i, known in self.roots.items() if known[0].pending
            }


thread = _Thread()


def active() -> tuple[Block, ...]:
    """Returns the blocks that are open for the running code, outermost first.

    Raises:
        BlockError: if another asyncio task has opened one of them.
    """
    blocks = thread.blocks
    for block in blocks:
        block.place.check_task(block.rewrite)
    return blocks


def remove(block: Block) -> None:
    """Removes a block from this thread, even if an exception left it half open."""
    rest = tuple(other for other in thread.blocks if other is not block)
    for number, other in enumerate(rest):
        if block in other.outer:
            # ``other`` opened inside ``block``, so traces under its number depend on
            # ``block``: it gets a fresh number.
            other.lease.give_back()
            other.outer, other.lease = (
                rest[:number],
                numbers.unknown(other.asker),
            )
    thread.set_blocks(rest)
    thread.forget(block)
    block.is_open = False
    block.lease.give_back()
    if block.owner is not None:
        # The root, because Flax replaces the owner's scope when a compact method ends.
        # A weak reference, because scopes may hold tracers.
        block.closed_root = weakref.ref(block.owner.root)
        block.owner = None
    patching.release_hooks(block)


def root_of(scope: Scope, depth: int = 0) -> Root:
    """Returns the root of the tree that a scope belongs to, or makes one.

    Args:
        scope: the scope.
        depth: in how many calls of ``apply`` its tree begins, if it begins now.
    """
    top = scope.root
    root: Any = top.flags.get(ROOT_FLAG)
    if root is not None:
        return root
    known = thread.roots.get(id(core_scopes.variables_of(top)))
    if known is None:
        known = _begin(top, depth)
    return known[0]


def _begin(top: Scope, depth: int) -> _KnownRoot:
    tree = Tree()
    beside: list[Root] = []
    if top.path:
        # The body of a transform that was entered before any block opened: a part of
        # the ``apply`` that runs.
        apply = patching.running_apply(innermost=True)
        owners = [b.tree for b in thread.blocks if b.tree is not None]
        tree = root_of(apply).tree if apply else owners[-1] if owners else tree
        beside = [r for r, _, _ in thread.roots.values() if r.tree is tree]
    known = _known(tree, top, depth, beside)
    if thread.doubts is not None and not top.path:
        known[0].setups.made_in, known[0].setups.is_new = thread.blocks, True
    thread.roots[id(known[2])] = known
    return known


class Tree:
    """Identifies a tree of variables. Numbers hold only weak references to it."""


def reopen(block: Block) -> None:
    """Registers the tree of a closed block's owner again, if still in use."""
    top = None if block.closed_root is None else block.closed_root()
    if top is not None and block.tree and ROOT_FLAG not in top.flags:
        known = _known(block.tree, top, block.depth)
        thread.roots.setdefault(id(known[2]), known)


def _known(
    tree: Tree, top: Scope, depth: int, beside: Iterable[Root] = ()
) -> _KnownRoot:
    same = (root for root in beside if root.level == top.trace_level)
    root = next(same, Root(tree, depth))
    variables, root.level = core_scopes.variables_of(top), top.trace_level
    root.kept_trace = tracing.kept_trace(top)
    root.initializing = top.get_flag('initializing', False)
    root.parts.append((top.path, variables))
    return root, top.path, variables

"""Tracks a thread's open blocks, and the trees that each of them has met."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Generator, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from flax.core.scope import Scope

from flax_sg import filters
from flax_sg.engine import numbers, roots
from flax_sg.engine.roots import Root, Tree
from flax_sg.filters.paths import Path
from flax_sg.internals import tracing, versions
from flax_sg.internals.places import Place
from flax_sg.internals.types import Level
from flax_sg.internals.weak import ByIdentity
from flax_sg.rules import rules
from flax_sg.trees.variables import Facts

versions.load_once(globals())


# The path of a variable, and the filter's decision: a bool, or a ``Part``.
Decided: TypeAlias = tuple[Path, Any]


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
        decisions: of each variable met so far, the path and the filter's decision.
        matched: the atoms of the filter that mean one of these variables.
        collections: the collections met so far.
        uncovered: variables of trees that are not covered.
        effective: the shape of the filter, if it selects a variable that was read; of
            a list also the shapes of the atoms that do.
        is_open: whether the block's code runs, or a ``jax.custom_vjp`` rule of a
            function called in the block; see ``late_rules.py``.
        untraced: the variables that were met while no trace in the block ran that JAX
            may cache: a block that finds a compiled program meets these again.
        roots: the roots that were met. The block keeps a root alive that is older.
    """

    rewrite: rules.Rewrite
    outer: tuple[Block, ...]
    owner: Scope | None
    owner_path: tuple[str, ...]
    tree: Tree | None
    asker: numbers.Asker
    lease: numbers.Lease
    depth: int
    level: Level
    kept_trace: Any
    place: Place
    decisions: dict[Facts, Decided] = field(default_factory=dict)
    matched: set[filters.Filter] = field(default_factory=set)
    collections: set[str] = field(default_factory=set)
    uncovered: set[Facts] = field(default_factory=set)
    effective: set[Hashable] = field(default_factory=set[Hashable])
    is_open: bool = True
    untraced: set[Facts] = field(default_factory=set)
    roots: ByIdentity[Root | None] = field(default_factory=ByIdentity)

    def covers(self, root: Root) -> bool:
        """Whether the block covers a tree: that of its owner alone.

        At top level it covers each tree that begins in it, or was bound before. A tree
        that begins inside of another ``apply`` is not covered: its variables are what
        the outer module hands to it, read in the block or computed.
        """
        if self.tree is not None:
            return root.tree is self.tree
        return root.tree.depth <= self.depth

    def meet(self, root: Root, is_older: bool) -> None:
        """Notes that a tree, or the body of a transform, is used in the block."""
        root.met_by.add(self)
        self.roots.put(root, root if is_older else None)

    def forget_roots(self) -> None:
        """Drops the values that readers of trees have seen in the block."""
        for root in self.roots:
            root.forget(self)
        self.roots.known.clear()


_IS_OPEN = operator.attrgetter('is_open')


class _Thread(threading.local):
    """Holds a thread's open blocks, and counts its running applies."""

    def __init__(self) -> None:
        self.blocks: tuple[Block, ...] = ()
        # One context of JAX is entered at a time. Several would have to be left in
        # order, and blocks may close in any order.
        self._no_context = tracing.user_context(0)
        with self._no_context:
            pass
        self.applies: list[Any] = []  # One for each ``apply`` that runs.
        self.rewritten = 0  # How often a reader saw a rewritten value.
        self.aside: tuple[Block, ...] = ()  # Blocks that ``only`` has set aside.
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
    def number(self) -> numbers.TraceNumber:
        """The number of the open blocks in JAX's cache keys."""
        if not self.blocks:
            return numbers.NONE
        block = self.blocks[-1]
        number = block.lease.number
        return number if len(self.applies) <= block.depth else number.deeper

    def applies_changed(self) -> None:
        """Sets JAX's key anew: which trees a block covers depends on the applies."""
        if self.blocks:
            self.set_blocks(self.blocks)

    @contextlib.contextmanager
    def only(self, blocks: tuple[Block, ...]) -> Generator[None]:
        """Makes ``blocks`` the only open blocks inside the ``with`` body."""
        before, aside = self.blocks, self.aside

        def restore() -> None:
            # A block that was set aside may have been closed meanwhile.
            self.aside = aside
            self.set_blocks(tuple(filter(_IS_OPEN, before)))

        try:
            self.aside = (*aside, *before)
            self.set_blocks(blocks)
            yield
        finally:
            try:
                restore()
            except BaseException:
                restore()
                raise


thread = _Thread()


def active() -> tuple[Block, ...]:
    """Returns the blocks that are open for the running code, outermost first.

    Raises:
        BlockError: if another asyncio task has opened one of them.
    """
    blocks = thread.blocks
    for block in blocks:
        if block.place.task is not None:
            block.place.check_task(block.rewrite)
    return blocks


def remove(block: Block) -> None:
    """Removes a block from this thread, even if an exception left it half open."""
    remaining = tuple(other for other in thread.blocks if other is not block)
    for index, other in enumerate(remaining):
        if block in other.outer:
            # ``other`` opened inside ``block``, so traces under its number depend on
            # ``block``: it gets a fresh number.
            other.lease.give_back()
            other.outer = remaining[:index]
            other.lease = numbers.unknown(other.asker, other.lease)
    thread.set_blocks(remaining)
    block.forget_roots()
    block.is_open = False
    block.lease.give_back()
    block.owner = None  # Scopes may hold tracers.


def root_of(scope: Scope) -> Root:
    """Returns the root of the tree that a scope belongs to."""
    root: Any = scope.root.flags[roots.ROOT_FLAG]
    for block in thread.blocks:
        if block not in root.met_by:
            block.meet(root, is_older=True)
    return root


def begin(top: Scope, depth: int) -> Root:
    """Makes the root of a tree that begins with a scope.

    Args:
        top: the scope.
        depth: in how many calls of ``apply`` the tree begins.
    """
    root = Root(Tree(depth), top)
    if thread.doubts is not None:
        root.setups.made_in, root.setups.is_new = thread.blocks, True
    roots.carry(top, root)
    return used(root)


def used(root: Root) -> Root:
    """A root that begins in the open blocks, which do not keep it alive."""
    for block in thread.blocks:
        block.meet(root, is_older=False)
    return root

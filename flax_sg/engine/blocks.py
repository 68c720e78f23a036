"""The open blocks of a thread, and the trees of variables that they have met."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Generator, Iterable, Mapping
from typing import Any, TypeAlias

from flax.core.scope import Scope

from flax_sg import errors
from flax_sg.engine import askers, cache_keys
from flax_sg.filters.paths import Classes, Path
from flax_sg.internals import core_scopes, hooking, tracing, versions
from flax_sg.internals.places import Place
from flax_sg.rules import rules
from flax_sg.trees.variables import Key, leaves_of

versions.load_once(globals())

ROOT_FLAG = 'flax_sg'

# Whether a variable is one of the owner's tree, which one, and in modules of which
# classes, where a filter has to know.
# The last is how many of its names are within the value of a variable.
Question: TypeAlias = tuple[bool, Key, Classes | None, int]


@dataclasses.dataclass(eq=False)
class Block:
    """One open extent of a rewrite: what is known of it, and nothing done with it.

    Attributes:
        rewrite: the rule, and the variables that it applies to.
        outer: the blocks that were open when it opened, outermost first.
        owner: the scope of the module that opened it; None at top level, and once the
            block is closed.
        owner_path: the path of that scope; () at top level.
        tree: identity of the tree that the owner belongs to.
        asker: what it answers questions of ``cache_keys`` with.
        number: its number in JAX's cache keys.
        level, kept_trace: the trace in which it was opened, and the innermost one
            around it that JAX may keep.
        place: where in the user's program it was opened.
        decisions: what the filter said of each variable met so far, with its path.
        collections: the collections met so far.
        reads: the variables that were read.
        took: whether the filter takes one of them.
        made: what the rule has made, for rules on cotangents; see ``placing.py``.
        closed_root: the top scope of the owner, once the block is closed.
        ended: set by another thread, in which the code of the block has ended.
        is_open: whether the code of the block runs, or a rule that belongs into it.
        home: while such a rule runs, the number under which it was compiled, if the
            block was opened outside of what was compiled.
        lent: modules of which a helper that reads them was seen, by their id and the
            name of the helper, until the block closes.
    """

    rewrite: rules.Rewrite
    outer: tuple[Block, ...]
    owner: Scope | None
    owner_path: tuple[str, ...]
    tree: object
    asker: askers.Asker
    number: cache_keys.Number
    level: Any
    kept_trace: Any
    place: Place
    decisions: dict[Question, tuple[Path, Any]] = dataclasses.field(
        default_factory=dict
    )
    collections: set[str] = dataclasses.field(default_factory=set)
    reads: set[Key] = dataclasses.field(default_factory=set)
    took: bool = False
    made: Any = None
    closed_root: weakref.ref[Scope] | None = None
    ended: bool = False
    is_open: bool = True
    home: cache_keys.Number | None = None
    lent: dict[tuple[int, str], Any] = dataclasses.field(default_factory=dict)


class Root:
    """What the open blocks know of one tree of variables.

    A tree belongs to an ``apply``, a bound module, or the body of a lifted transform.

    Attributes:
        tree: identity of the ``apply`` that the tree comes from; the body of a lifted
            transform has that of the scope it was lifted from.
        covered: the blocks that were open when the body of a lifted transform began:
            what it starts with was rewritten outside.
        handed: what the body starts with, as it was handed in.
        selected: the variables in ``handed`` that were rewritten outside.
        initializing: whether the variables are being made.
        seen: the leaves that were rewritten for readers of this tree; see ``views.py``.
        level, kept_trace: the trace in which the tree began, and the innermost one
            around it that JAX may keep.
        parts: the collections that it consists of, and where they stand; several in the
            body of a transform of several modules.
        joint: what readers see of leaves that a block rewrites together.
        setup_values: values kept by ``setup``, seen under a block.
        set_up_in: by id a module whose ``setup`` runs, or has run on scratch scopes,
            and the blocks that were open then.
        scratch: whether the tree serves a second run of a ``setup``.
        from_nothing: whether all its variables are made in that run.
        pending: what is judged when the tree is complete; see ``judgement.py``.
        sown: the variables that ``Module.sow`` has written in a block.
    """

    def __init__(
        self,
        tree: object,
        covered: tuple[Block, ...] = (),
        handed: Mapping[Key, Any] | None = None,
        selected: frozenset[Key] = frozenset(),
    ) -> None:
        self.tree = tree
        self.covered = covered
        self.handed = handed or {}
        self.selected = selected
        self.initializing = False
        self.seen: dict[Block, dict[Key, Any]] = {}
        self.level: Any = None
        self.kept_trace: Any = None
        self.parts: list[tuple[tuple[str, ...], dict[str, Any]]] = []
        self.joint: dict[Block, Any] = {}
        self.setup_values: dict[Block, dict[int, Any]] = {}
        self.set_up_in: dict[int, tuple[weakref.ref[Any], tuple[Block, ...]]] = {}
        self.scratch = False
        self.from_nothing = False
        self.pending: list[Any] = []
        self.sown: set[tuple[str, tuple[str, ...]]] = set()

    def as_scratch(self, from_nothing: bool = False) -> Root:
        """The same tree for code that runs a second time."""
        scratch = Root(self.tree, self.covered, self.handed, self.selected)
        scratch.seen = self.seen
        scratch.level, scratch.kept_trace = self.level, self.kept_trace
        scratch.parts, scratch.joint = self.parts, self.joint
        scratch.initializing = self.initializing
        scratch.scratch = True
        scratch.from_nothing = from_nothing
        return scratch

    def within(self, covered: tuple[Block, ...], scope: Scope | None = None) -> Root:
        """The same tree in the body of a lifted transform that begins at ``scope``."""
        inner = Root(self.tree, covered)
        inner.initializing = self.initializing
        inner.scratch = self.scratch
        inner.from_nothing = self.from_nothing
        inner.pending = self.pending
        inner.level, inner.kept_trace = self.level, self.kept_trace
        if scope is not None:
            inner.level = scope.trace_level
            inner.kept_trace = tracing.kept_trace(scope)
        return inner

    def begin(
        self,
        path: tuple[str, ...],
        variables: dict[str, Any],
        handed: Mapping[Key, Any],
        selected: frozenset[Key],
    ) -> None:
        """Notes what a part of the tree in such a body begins with."""
        self.parts.append((path, variables))
        self.handed = {**self.handed, **handed}
        self.selected |= selected

    # A root travels in the flags of scopes, which ``nn.jit`` hashes to tell modules
    # apart. What a root holds is told apart by JAX's own cache keys.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Root)

    def __hash__(self) -> int:
        return hash(Root)

    def forget(self, block: Block) -> None:
        """Drops what was kept for a block that is closed."""
        self.seen.pop(block, None)
        self.joint.pop(block, None)
        self.setup_values.pop(block, None)

    def begins_with(self, block: Block, key: Key, value: Any) -> bool:
        """Whether a variable, or a leaf of it, came in with the block's rule applied.

        By its leaves: what holds them may have been made anew.
        """
        if block not in self.covered:
            return False
        begun = {id(leaf) for leaf in leaves_of(self.handed.get(key))}
        return all(id(leaf) in begun for leaf in leaves_of(value))


_KnownRoot = tuple[Root, tuple[str, ...], dict[str, Any]]


class _Thread(threading.local):
    """The open blocks of a thread and what is known of the trees they have met."""

    def __init__(self) -> None:
        self.blocks: tuple[Block, ...] = ()
        self.roots: dict[int, _KnownRoot] = {}
        self._no_context = tracing.user_context(0)
        with self._no_context:
            pass
        self.rewritten = 0  # How often a reader saw something rewritten.
        self._aside = 0  # How often blocks are set aside that will be open again.
        # Why a second run of a ``setup`` may differ; None if there is no such run.
        self.doubts: list[str] | None = None
        # Whether a block chooses by class; then, the scope that a variable is read of.
        self.asks_classes = False
        self.reader: tuple[str, ...] | None = None

    def set_blocks(self, blocks: tuple[Block, ...]) -> None:
        """Makes these the open blocks, for the hooks and for JAX's trace caches.

        One context is entered at a time, whatever the order in which blocks close. An
        exception may come between any two lines (Ctrl-C): a second call completes it.
        """
        number = blocks[-1].number if blocks else cache_keys.NONE
        context = tracing.user_context(number.value)
        self.blocks = blocks
        self.asks_classes = any(block.asker.asks_classes for block in blocks)
        self._no_context.__exit__(None, None, None)  # As it was before it was entered.
        if blocks:
            context.__enter__()

    def _set_aside(self, blocks: tuple[Block, ...], aside: int) -> None:
        self._aside = aside
        self.set_blocks(blocks)

    @contextlib.contextmanager
    def reading(self, path: tuple[str, ...]) -> Generator[None]:
        """Notes in which scope a variable is read, for filters that choose by class."""
        before, self.reader = self.reader, path
        try:
            yield
        finally:
            self.reader = before

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

    def forget(self, block: Block | None = None) -> None:
        """Drops what was kept for a block that is closed, and trees without blocks."""
        for root, _, _ in self.roots.values():
            if block is not None:
                root.forget(block)
        if not self.blocks and not self._aside:
            self.roots = {
                i: known for i, known in self.roots.items() if known[0].pending
            }


thread = _Thread()


def active() -> tuple[Block, ...]:
    """The blocks that hold for the running code, outermost first.

    Raises:
        BlockError: if another asyncio task has opened one of them.
    """
    blocks = thread.blocks
    for block in blocks:
        if block.ended:
            remove(block)
            return active()
        if not block.place.is_in_this_task():
            raise _other_task(block.rewrite, block.place)
    return blocks


def remove(block: Block | None) -> None:
    """Takes away a block of this thread, or what an exception has left of that."""
    if block is None:
        return thread.forget()
    rest = tuple(other for other in thread.blocks if other is not block)
    for number, other in enumerate(rest):
        if block in other.outer:
            # It was inside of this one, and so are the traces under its number.
            other.number.give_back(other.asker)
            other.outer, other.number = rest[:number], cache_keys.fresh()
    thread.set_blocks(rest)
    thread.forget(block)
    block.is_open = False
    block.lent.clear()
    block.number.give_back(block.asker)
    if block.owner is not None:
        # Not the owner: Flax makes another one when a compact method ends. It may hold
        # tracers.
        block.closed_root = weakref.ref(block.owner.root)
        block.owner = None
    hooking.release_hooks(block)


def root_of(scope: Scope) -> Root:
    """What the open blocks know of the tree that a scope belongs to."""
    top = scope.root
    root: Any = top.flags.get(ROOT_FLAG)
    if root is not None:
        return root
    variables = core_scopes.variables_of(top)
    known = thread.roots.get(id(variables))
    if known is None:
        # The body of a transform that was entered before any block opened has roots
        # with a path; they belong to the tree of the module that opened a block in it.
        owners = [b.tree for b in thread.blocks if b.tree is not None]
        tree = owners[-1] if top.path and owners else Tree()
        beside = (r for r, _, _ in thread.roots.values() if r.tree is tree and top.path)
        known = thread.roots[id(variables)] = _known(tree, top, beside)
    return known[0]


class Tree:
    """The identity of a tree of variables; numbers refer to it weakly."""


def is_of_tree(scope: Scope, root: Root) -> bool | None:
    """Whether a scope is one of the tree of a root; None if nobody has read it yet."""
    known: Any = scope.root.flags.get(ROOT_FLAG)
    if known is None:
        found = thread.roots.get(id(core_scopes.variables_of(scope.root)))
        known = None if found is None else found[0]
    return None if known is None else known.tree is root.tree


def reopen(block: Block) -> None:
    """Knows the owner's tree again, for a while, if that is still in use."""
    top = None if block.closed_root is None else block.closed_root()
    if top is not None and ROOT_FLAG not in top.flags:
        known = _known(block.tree, top)
        thread.roots.setdefault(id(known[2]), known)


def _known(tree: object, top: Scope, beside: Iterable[Root] = ()) -> _KnownRoot:
    same = (root for root in beside if root.level == top.trace_level)
    root = next(same, Root(tree))
    variables, root.level = core_scopes.variables_of(top), top.trace_level
    root.kept_trace = tracing.kept_trace(top)
    root.initializing = top.get_flag('initializing', False)
    root.parts.append((top.path, variables))
    return root, top.path, variables


def _other_task(rewrite: object, place: object) -> errors.BlockError:
    """A variable is read in another asyncio task than the one that opened a block."""
    return errors.BlockError(
        f'the block of {rewrite!r}, opened at {place}, belongs to another asyncio '
        'task, which was suspended inside it.\n'
        'Leave the block before await.'
    )

"""The trees of variables, and what is known of each of them.

A tree begins with a scope that is made of variables: by an ``apply``, an ``init`` or a
``bind``, or by the user. Flax hands on the flags of a scope to each scope that it makes
of it: children, rewound copies, and the scopes in the body of a lifted transform. So a
scope carries its ``Root`` as a flag.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
from flax.core.frozen_dict import FrozenDict
from flax.core.scope import Scope

from flax_sg.filters import Filter
from flax_sg.internals import core_scopes, tracing
from flax_sg.internals.places import Place
from flax_sg.internals.types import PyTree
from flax_sg.trees.variables import Key, LeafKey, leaf_keys

if TYPE_CHECKING:
    from flax_sg.engine.blocks import Block

ROOT_FLAG = 'flax_sg'


class IdlePart(NamedTuple):
    """A part of a filter that selected nothing that was read in a block.

    Attributes:
        where: the part.
        text: the warning.
        place: the line that opened the block.
    """

    where: Filter
    text: str
    place: Place


class Tree:
    """Identifies a tree of variables. Numbers hold only weak references to it.

    Attributes:
        depth: how many calls of ``apply`` ran when the tree began.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth


@dataclass
class Handed:
    """The variables that the body of a lifted transform starts with.

    Attributes:
        covered: the blocks that were open when the body began: what they select was
            rewritten before it was handed in.
        values: the variables, as Flax passed them in.
        selected: the variables that were rewritten, each with a block that did so.
        around: the root around the transform.
        stored: the variables as they are stored there.
    """

    covered: tuple[Block, ...] = ()
    values: dict[Key, Any] = field(default_factory=dict)
    selected: dict[Key, Block] = field(default_factory=dict)
    around: Root | None = None
    stored: dict[Key, Any] = field(default_factory=dict)

    def has(self, key: Key, value: PyTree) -> bool:
        """Whether the body starts with ``value``: the rules were applied outside.

        ``value`` is a variable or one of its leaves. Only the leaves are compared,
        since their containers may have been rebuilt.
        """
        begun = {id(leaf) for leaf in jax.tree.leaves(self.values.get(key))}
        return all(id(leaf) in begun for leaf in jax.tree.leaves(value))

    def leaf_keys(self, block: Block, key: Key, value: PyTree) -> list[LeafKey]:
        """The leaves of a variable, as they are stored where a block was opened.

        The body of a scan begins with slices, and filters see the shapes of arrays.
        """
        # ``nn.map_variables`` gives other names in a body.
        is_known = block in self.covered and key in self.stored
        if self.around and is_known and self.has(key, value):
            return self.around.handed.leaf_keys(block, key, self.stored[key])
        return leaf_keys(key, value)


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
    """Holds what is known of a tree, or of its part in the body of a lifted transform.

    Attributes:
        tree: identity of the tree. The body of a transform has that of the scope which
            it was lifted from.
        parts: the paths and collections that make up the tree; several in the body of
            a transform of several modules.
        level: the trace in which the tree, or the body, began.
        initializing: whether ``init`` is making the variables.
        handed: the variables that a lifted body starts with; empty for a whole tree.
        met_by: the open blocks in which it is used.
        views: for each block, what readers of the tree see in it; see ``views.py``.
        sown: the variables that ``Module.sow`` has written in a block.
        pending: closed blocks that are judged when the tree is complete, each with
            the exception that was being handled when it closed.
        lists: for each list of filters, by its shape, which of its atoms selected what
            was read in a block of the tree, and the warnings of the others.
    """

    def __init__(self, tree: Tree, scope: Scope) -> None:
        self.tree = tree
        self.parts = [(scope.path, core_scopes.variables_of(scope))]
        self.level = scope.trace_level
        self.initializing: Any = scope.get_flag('initializing', False)
        self.handed = _NOTHING
        self.met_by: set[Block] = set()
        self.views: dict[Block, Any] = {}
        self.setups = Setups()
        self.sown: set[Key] = set()
        self.pending: list[Any] = []
        self.lists: dict[Hashable, tuple[set[Hashable], list[IdlePart]]] = {}

    @functools.cached_property
    def kept_trace(self) -> weakref.ref[Any] | None:
        """The innermost trace around the tree that JAX may cache."""
        return tracing.kept_trace(self.level)

    def as_scratch(self, made_in: tuple[Block, ...]) -> Root:
        """Returns a root of the same tree, for a second run of ``setup`` in blocks."""
        scratch = copy.copy(self)
        scratch.setups, scratch.pending, scratch.sown = Setups(made_in), [], set()
        scratch.lists = {}
        scratch.met_by = set()
        return scratch

    def within(self, covered: tuple[Block, ...], scope: Scope) -> Root:
        """Returns a root of the same tree, for a body that begins in blocks."""
        inner = Root(self.tree, scope)
        inner.initializing, inner.pending = self.initializing, self.pending
        inner.lists = self.lists
        if covered:  # Otherwise nothing was rewritten, and an empty one is shared.
            inner.handed = Handed(covered, around=self)
        inner.setups = Setups(self.setups.made_in, is_new=self.setups.is_new)
        return inner

    # All roots are equal: ``nn.jit`` hashes the flags of scopes to tell modules apart,
    # and JAX's cache keys tell blocks apart already. A root is no dataclass, since
    # ``nn.jit`` would hash its fields.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Root)

    def __hash__(self) -> int:
        return hash(Root)

    def __deepcopy__(self, memo: dict[int, Any]) -> Root:
        """The copy of a bound module has a tree of its own."""
        new = copy.copy(self)
        memo[id(self)] = new
        new.tree = Tree(self.tree.depth)
        new.parts = copy.deepcopy(self.parts, memo)
        new.views, new.sown, new.setups, new.met_by = {}, set(), Setups(), set()
        return new

    def forget(self, block: Block) -> None:
        """Drops the values kept for a closed block."""
        self.met_by.discard(block)
        self.views.pop(block, None)
        self.setups.values.pop(block, None)


_NOTHING = Handed()

Blocks: TypeAlias = 'tuple[Block, ...]'


def carry(scope: Scope, root: Root) -> None:
    """Lets a scope, and each scope that Flax makes of it, carry a root."""
    flags = {**scope.flags, ROOT_FLAG: root}
    scope.flags = FrozenDict(flags, __unsafe_skip_copy__=True)


def is_carried_by(scope: Scope) -> bool:
    """Whether a scope carries a root that knows its variables."""
    root: Any = scope.flags.get(ROOT_FLAG)
    variables = core_scopes.variables_of(scope)
    return root is not None and any(part is variables for _, part in root.parts)

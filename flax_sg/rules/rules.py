"""What readers see instead of the stored value of a variable.

A rule is a small immutable value with one method. Filters say which variables it is
applied to, blocks say where. So a new rule is written once and works everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from flax.core.scope import CollectionFilter, DenyList

from flax_sg import errors, filters
from flax_sg.filters import paths
from flax_sg.internals import tracing
from flax_sg.internals.types import Leaf, PyTree
from flax_sg.rules import primitives
from flax_sg.trees.leaves import (
    OVERWRITE_WITH_GRADIENT,
    check_unused,
    is_differentiable,
)
from flax_sg.trees.variables import MISSING as MISSING

# What ``instead`` returns if the rule is to act on each leaf alone.
LEAF_BY_LEAF: Any = object()

# Variables that a rule rewrites together, each with its leaves.
Selected: TypeAlias = Sequence[tuple[paths.Path, Sequence[Any]]]


class Rule:
    """What is done to each array of the selected variables when it is read.

    Blocks with equal rules may share compiled programs, so a rule has to be hashable
    and to compare by value. A frozen dataclass does both if it has no fields. A rule
    with numbers or arrays is a ``Keyed``: ``nn.jit`` keeps the hashes of fields alone,
    and -1 and -2 have the same hash.
    """

    name: str
    """The name in reprs and in the debug paths of Flax's scopes."""
    args: str = ''
    """The other arguments as reprs show them, after the filter: ``', 0.5'``."""
    asks_path: bool = True
    """Whether the result depends on the path, not on the leaf alone."""
    asks_place: bool = False
    """Whether a module may compute something else by where it is in the tree."""
    acts_on: ClassVar[Literal['values', 'cotangents', 'writes', 'nothing']] = 'values'
    """On what is read, or on its cotangents, or on writes, which raise then. Of a rule
    on cotangents each block, in each ``apply``, makes a value of its own in the trace
    where the block begins. Otherwise one value is made in the trace of the leaf."""
    jointly: ClassVar[bool] = False
    """Whether the result for one leaf depends on all selected leaves."""
    of_constants: ClassVar[bool] = False
    """Whether a rule on cotangents acts on leaves that nothing differentiates, too."""
    operands: Sequence[Any] = ()
    """Numbers and arrays that the rule uses, apart from the leaves."""
    brings: bool = False
    """Whether readers see values that are not computed from the leaf alone. They
    belong to the trace in which the block began."""
    at_init: ClassVar[bool] = True
    """Whether the rule is applied to variables that ``init`` is making."""
    runs_code: bool = False
    """Whether the rule runs a function of the user, which may read variables."""

    def __repr__(self) -> str:
        return f'<{self.name}{self.args}>'  # In reprs of modules an address is noise.

    def __call__(self, path: paths.Path, leaf: Leaf) -> Leaf:
        """Returns what a reader sees instead of ``leaf``, by default ``leaf`` itself.

        Called once for each leaf and block, in the trace that the leaf belongs to.

        Args:
            path: the variable that the leaf belongs to.
            leaf: one leaf of the variable's value: an array, a tracer, or any object
                that the user keeps in a variable.

        Returns:
            The leaf to read; ``leaf`` itself if the rule does not change it.
        """
        del path
        return leaf

    def together(self, selected: Selected) -> list[list[Any]]:
        """Returns what readers see instead of the selected variables of one tree.

        Args:
            selected: the variables, each with its leaves.

        Returns:
            Leaves for each of the variables.
        """
        return [[self(path, leaf) for leaf in leaves] for path, leaves in selected]

    def instead(
        self, path: paths.Path, value: PyTree, find: Callable[[str], Any]
    ) -> PyTree:
        """Returns what readers see instead of a whole variable, boxes included.

        Args:
            path: the variable.
            value: its value, as readers outside of the block see it.
            find: finds the variable of the same place in another collection;
                ``MISSING`` if there is none.

        Returns:
            The value to read, or ``LEAF_BY_LEAF`` to apply the rule to each leaf alone.
        """
        del path, value, find
        return LEAF_BY_LEAF

    def key(self) -> Hashable:
        """What tells the rule from rules with another effect; it outlives the rule."""
        return self

    def token(self) -> Hashable:
        """Stands for the values that the rule brings, if ``key`` does not tell them.

        It is compared if a trace that JAX caches has read one of the values.
        """
        return None


@dataclasses.dataclass(frozen=True)
class StopGradient(Rule):
    """Reads are seen through ``jax.lax.stop_gradient``.

    Attributes:
        levels: None, or 1: reads are constants for the innermost derivative alone.
    """

    name = 'stop_gradient'
    asks_path = False
    levels: int | None = None

    def __call__(self, path: paths.Path, leaf: Leaf) -> Leaf:
        """Returns ``jax.lax.stop_gradient(leaf)`` if a gradient can pass ``leaf``."""
        # An array that is no tracer is a constant to every derivative in progress,
        # and arrays of other types (integers, keys) carry no gradient.
        if not (isinstance(leaf, tracing.Tracer) and is_differentiable(leaf)):
            return leaf
        stop = primitives.stop_one_level if self.levels else tracing.stopped
        return stop(leaf)


@dataclasses.dataclass(frozen=True)
class ReadOnly(Rule):
    """Writes raise; reads see the stored value."""

    name = 'read_only'
    asks_path = False
    acts_on = 'writes'


class Keyed(Rule):
    """A rule that may have arrays, and is compared by a key without them.

    It is no dataclass: ``nn.jit`` would look at the fields of a dataclass in a module's
    field, arrays and all. Give numbers as tokens (``filters/tokens.py``).

    Args:
        key: what tells it from other rules of its class, without arrays.
        token: tells which values it brings, if ``key`` does not.
    """

    def __init__(self, key: Hashable, token: Hashable = None) -> None:
        self._key, self._token = (type(self), key), token

    def key(self) -> Hashable:
        """What tells the rule from rules with another effect."""
        return self._key

    def token(self) -> Hashable:
        """Stands for the values that it brings."""
        return self._token

    def __eq__(self, other: object) -> bool:
        own = self._key, self._token
        return isinstance(other, Keyed) and own == (other._key, other._token)

    def __hash__(self) -> int:
        return hash((self._key, self._token))


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """A rule, applied to the variables that a filter selects.

    Attributes:
        where: the filter.
        rule: what a reader sees instead of the stored value.
        collections: the collections that the filter looks at.
        unused: what to do if a part of the filter matches no variable: ``'raise'`` or
            ``'ignore'``. Judged when a block ends.
        written: what the user wrote instead: ``'nn.Frozen(Dense)'``.
    """

    where: filters.Filter
    rule: Rule
    collections: CollectionFilter = 'params'
    unused: str = dataclasses.field(default='raise', compare=False)
    written: str = dataclasses.field(default='', compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, 'collections', _collections(self.collections))
        check_unused(self.unused)
        if isinstance(self.rule, StopGradient):
            filters.named(self.where, 'frozen', 'nn.stop_gradient({})')

    def __repr__(self) -> str:
        if self.written:
            return self.written
        more = f', collections={self.collections!r}'
        shown = '' if self.collections == 'params' else more
        return f'{self.rule.name}({self.where!r}{self.rule.args}{shown})'


def _collections(collections: Any) -> CollectionFilter:
    """A hashable collection filter; raises for anything else."""
    if isinstance(collections, bool):
        return collections
    if isinstance(collections, DenyList):
        return DenyList(_collections(collections.deny))
    names: Any
    if isinstance(collections, str):
        names = (collections,)
    else:
        names = tuple(collections) if isinstance(collections, Iterable) else (None,)
    for name in names:
        if not isinstance(name, str):
            raise errors.FilterTypeError(
                f'collections={collections!r} is no collection filter: expected a '
                'name, a sequence of names, True, or flax.core.DenyList.'
            )
        if set(name) & set('/*[{'):
            raise errors.FilterTypeError(
                f'collections={collections!r}: {name!r} is a filter of paths, and no '
                "name of a collection such as 'batch_stats'.\n"
                'Write several filters as a list: nn.Frozen(module, '
                f"['encoder/**', {name!r}])."
            )
    if OVERWRITE_WITH_GRADIENT in names:
        raise errors.ArgumentValueError(
            f'collections={names!r} selects "{OVERWRITE_WITH_GRADIENT}": '
            'its variables receive their new value as a gradient, and no rule may '
            'touch them.\n'
            'Leave it out; collections=True leaves it out by itself.'
        )
    return collections if isinstance(collections, str) else names

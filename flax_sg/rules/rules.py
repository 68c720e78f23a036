"""What a reader sees instead of the stored value.

A rule is one small immutable value with one method. Everything else (which variables,
over which extent) is somebody else's, so that a new rule is written once and works at
every extent.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar, TypeAlias

from flax.core.scope import CollectionFilter, DenyList

from flax_sg import errors, filters
from flax_sg.filters import paths
from flax_sg.internals import tracing
from flax_sg.rules import custom_gradients
from flax_sg.trees.leaves import OVERWRITE_WITH_GRADIENT, is_differentiable
from flax_sg.trees.variables import AS_IT_IS as AS_IT_IS

Selected: TypeAlias = Sequence[tuple[paths.Path, Sequence[Any]]]
Read: TypeAlias = Callable[[str, str], Sequence[Any]]
# Returns ``AS_IT_IS`` where there is none.
Find: TypeAlias = Callable[[str], Any]


class Rule(abc.ABC):
    """What is done to each array of the selected variables when it is read.

    A rule is part of JAX's cache keys while it is in force, so it has to be hashable
    and to compare by value: a frozen dataclass does both.
    """

    name: ClassVar[str]
    """The name in reprs and in the debug paths of Flax's scopes."""
    asks_path: ClassVar[bool] = True
    """Whether what a reader sees depends on the path, not on the leaf alone."""
    in_extent: ClassVar[bool] = False
    """Whether each extent, in each ``apply``, makes a value of its own, in the trace
    where it begins, and not one for all in the trace that the leaf belongs to."""
    jointly: ClassVar[bool] = False
    """Whether what a reader sees of one leaf depends on all that are selected."""
    brought: Sequence[Any] = ()
    """Numbers and arrays that the rule needs besides."""
    brings: bool = False
    """Whether readers see values that come from elsewhere, not from the leaf alone:
    they belong to the trace in which the extent began."""
    at_init: ClassVar[bool] = True
    """Whether the rule holds for variables that are being made, at initialization."""
    runs_code: bool = False
    """Whether the rule runs a function of the user, which may read variables."""
    refuses_writes: ClassVar[bool] = False
    """Whether a write to a selected variable raises."""

    def __repr__(self) -> str:
        return f'<{self.name}>'  # Without its address: a module shows it.

    @abc.abstractmethod
    def __call__(self, path: paths.Path, leaf: Any) -> Any:
        """Returns what a reader sees instead of ``leaf``.

        Called once for each leaf and extent, in the trace that the leaf belongs to.

        Args:
            path: the variable that the leaf belongs to.
            leaf: one leaf of the variable's value: an array, a tracer, or whatever
                else the user keeps in a variable.

        Returns:
            The leaf to read. Returning ``leaf`` itself means that there is nothing
            to rewrite.
        """

    def together(self, selected: Selected, read: Read) -> list[list[Any]]:
        """Returns what readers see instead of all selected variables of one tree.

        Args:
            selected: the variables, each with its leaves.
            read: finds the leaves of any variable in the tree, by path and collection.

        Returns:
            Leaves for each of the variables.
        """
        del read
        return [[self(path, leaf) for leaf in leaves] for path, leaves in selected]

    def instead(self, path: paths.Path, value: Any, find: Find) -> Any:
        """Returns what stands for a whole variable, its boxes and all.

        Args:
            path: the variable.
            value: its value, as readers outside of the extent see it.
            find: finds another variable in the same place, in another collection.

        Returns:
            ``AS_IT_IS`` for a rule that looks at each leaf alone.
        """
        del path, value, find
        return AS_IT_IS

    def key(self) -> Hashable:
        """What stands for the rule in the keys of JAX's caches, which outlive it."""
        return self

    def values(self) -> Hashable:
        """Which values the rule brings, where ``key`` says only what kind; or None.

        Compared where a trace that JAX keeps has read one of them.
        """
        return None


@dataclasses.dataclass(frozen=True)
class StopGradient(Rule):
    """Reads are seen through ``jax.lax.stop_gradient``."""

    name: ClassVar[str] = 'stop_gradient'
    asks_path: ClassVar[bool] = False

    def __call__(self, path: paths.Path, leaf: Any) -> Any:
        """Returns ``jax.lax.stop_gradient(leaf)`` if a gradient can pass ``leaf``."""
        # An array that is no tracer is a constant to every derivative in progress,
        # and arrays of other types (integers, keys) carry no gradient.
        if not isinstance(leaf, tracing.Tracer):
            return leaf
        return tracing.stopped(leaf) if is_differentiable(leaf) else leaf


@dataclasses.dataclass(frozen=True)
class StopOneLevel(Rule):
    """Reads are constants to what differentiates them first, and to nothing else."""

    name: ClassVar[str] = 'stop_gradient'
    asks_path: ClassVar[bool] = False

    def __call__(self, path: paths.Path, leaf: Any) -> Any:
        """Returns the leaf behind a stop for one level of differentiation."""
        if not (isinstance(leaf, tracing.Tracer) and is_differentiable(leaf)):
            return leaf
        return custom_gradients.stop_one_level(leaf)


@dataclasses.dataclass(frozen=True)
class ReadOnly(Rule):
    """Reads are what they are, and writes raise."""

    name: ClassVar[str] = 'read_only'
    asks_path: ClassVar[bool] = False
    refuses_writes: ClassVar[bool] = True

    def __call__(self, path: paths.Path, leaf: Any) -> Any:
        """Returns the leaf."""
        return leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Rewrite:
    """A rule, applied to the variables that a filter selects.

    Attributes:
        where: the filter.
        rule: what a reader sees instead of the stored value.
        collections: the collections that the filter looks at.
        unused: what to do if a part of the filter matches no variable: ``'raise'`` or
            ``'ignore'``. Judged when an extent ends.
    """

    where: filters.Filter
    rule: Rule
    collections: CollectionFilter = 'params'
    unused: str = 'raise'

    def __post_init__(self) -> None:
        object.__setattr__(self, 'collections', _collections(self.collections))
        if self.unused not in ('raise', 'ignore'):
            raise errors.FilterValueError(
                f"unused={self.unused!r}: expected 'raise' or 'ignore'."
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rewrite) and self._meaning() == other._meaning()

    def __hash__(self) -> int:
        return hash(self._meaning())

    def _meaning(self) -> tuple[Any, ...]:
        return self.where, self.rule, self.collections

    def __repr__(self) -> str:
        more = '' if self.collections == 'params' else f', {self.collections=!r}'
        return f'{self.rule.name}({self.where!r}{more.replace("self.", "")})'


def _collections(collections: Any) -> CollectionFilter:
    """A hashable collection filter; raises for anything else."""
    if isinstance(collections, (bool, str)):
        out: Any = collections
    elif isinstance(collections, DenyList):
        out = DenyList(_collections(collections.deny))
    elif isinstance(collections, Iterable):
        out = tuple(collections)
    else:
        out = None
    names = (out,) if isinstance(out, str) else out if isinstance(out, tuple) else ()
    if out is None or not all(isinstance(name, str) for name in names):
        raise errors.FilterTypeError(
            f'collections={collections!r} is no collection filter: expected a name, '
            'a sequence of names, True, or flax.core.DenyList.'
        )
    if OVERWRITE_WITH_GRADIENT in names:
        raise _overwrites(names)
    return out


def _overwrites(collections: Sequence[str]) -> errors.ArgumentValueError:
    """A rule was asked for on the collection ``_overwrite_with_gradient``."""
    return errors.ArgumentValueError(
        f'collections={tuple(collections)!r} selects "_overwrite_with_gradient": '
        'its variables receive their new value as a gradient, and no rule may '
        'touch them.\n'
        'Leave it out; collections=True leaves it out by itself.'
    )

"""What a reader sees instead of the stored value.

A rule is one small immutable value with one method. Everything else (which variables,
over which extent) is somebody else's, so that a new rule is written once and works at
every extent.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax.core.scope import CollectionFilter

from flax_sg import _private, filters, paths


class Rule(abc.ABC):
    """What is done to each array of the selected variables when it is read.

    A rule is part of JAX's cache keys while it is in force, so it has to be hashable
    and to compare by value: a frozen dataclass does both.
    """

    name: ClassVar[str]
    """The name in reprs and in the debug paths of Flax's scopes."""
    asks_path: ClassVar[bool] = True
    """Whether what a reader sees depends on the path, not on the leaf alone."""
    brings: Any = None
    """A traced value that the rule puts in place of others, if it brings any: what is
    computed from what readers see belongs to the trace of it."""

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


@dataclasses.dataclass(frozen=True)
class StopGradient(Rule):
    """Reads are seen through ``jax.lax.stop_gradient``."""

    name: ClassVar[str] = 'stop_gradient'
    asks_path: ClassVar[bool] = False

    def __call__(self, path: paths.Path, leaf: Any) -> Any:
        """Returns ``jax.lax.stop_gradient(leaf)`` if a gradient can pass ``leaf``."""
        # An array that is no tracer is a constant to every derivative in progress,
        # and arrays of other types (integers, keys) carry no gradient.
        if not isinstance(leaf, _private.Tracer):
            return leaf
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        return jax.lax.stop_gradient(leaf)


class Rewrite(Protocol):
    """A rule, the variables it applies to, and what to say if there are none."""

    @property
    def where(self) -> filters.Filter:
        """Which variables."""
        ...

    @property
    def collections(self) -> CollectionFilter:
        """The collections that ``where`` looks at."""
        ...

    @property
    def rule(self) -> Rule:
        """What a reader sees instead of the stored value."""
        ...

    @property
    def unused(self) -> str:
        """``'raise'`` or ``'ignore'``."""
        ...

    def snapshot(self) -> Rewrite:
        """The rewrite as it is now."""
        ...

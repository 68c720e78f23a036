"""What the rest of the library asks a filter, beside calling it."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any

from flax_sg import errors
from flax_sg.filters.expressions import And, Atom, Filter, Owner
from flax_sg.filters.paths import Path


def decide(where: Filter, path: Path, matched: set[Filter] | None = None) -> Any:
    """Whether a variable is meant; adds the atoms that take it.

    Returns:
        A bool or a ``Part``; None if it depends on the class of a module that is not
        known.
    """
    took, unknown = where._ask(path)
    if matched is not None:
        matched |= took
    return where._evaluate(took, unknown)


def matching(where: Filter, path: Path) -> Set[Filter]:
    """The atoms that take a variable, or may: they do not know a class."""
    took, unknown = where._ask(path)
    return took | unknown


def takes(atom: Filter, path: Path) -> bool | None:
    """Whether an atom takes a variable, or the leaf of one; None if it cannot say."""
    assert isinstance(atom, Atom)
    return atom._takes(path)


def evaluate(where: Filter, path: Path, asks: Callable[[Filter, Path], Any]) -> Any:
    """The same as ``decide``, of atoms that are asked in another way."""
    said = {atom: asks(atom, path) for atom in where.atoms}
    took = {atom for atom, takes in said.items() if takes}
    return where._evaluate(took, {atom for atom, it in said.items() if it is None})


def kinds_of(where: Filter) -> frozenset[type[Filter]]:
    """The classes of the filters that an expression is made of."""
    return where._kinds


def shape_of(where: Filter) -> Hashable:
    """Equal for filters that are spelled alike: functions made by the same code."""
    return where._shape


def as_function(where: Filter) -> tuple[Callable[[Path], Any], bool] | None:
    """The one function that a filter asks, and whether the filter says the opposite."""
    return where._as_function()


def may_be_empty(where: Filter) -> bool:
    """Whether it is no mistake if it matches nothing: what was derived may."""
    return where._may_be_empty


def find_unused(
    where: Filter,
    matched: Set[Filter],
    paths: Sequence[Path],
    owner: Owner,
    any_taken: bool,
) -> errors.FlaxSGError | None:
    """The error if a part of a filter means something that does not exist.

    Args:
        where: the filter.
        matched: the atoms that took a variable.
        paths: the path of every variable there is.
        owner: path of the module that they are relative to, if one is known.
        any_taken: whether the filter as a whole takes a variable.
    """
    for atom in where.atoms:
        if error := atom._unused(atom in matched, paths, owner):
            return error
    return where._unused(any_taken, paths, owner) if isinstance(where, And) else None

"""Finds the part of a filter that means nothing that there is."""

from __future__ import annotations

from collections.abc import Sequence, Set

from flax_sg import errors
from flax_sg.filters.conditions import Condition
from flax_sg.filters.expressions import And, Constant, Filter
from flax_sg.filters.paths import Owner, Path

CONDITIONS = Constant, Condition


def find_unused(
    where: Filter,
    matched: Set[Filter],
    paths: Sequence[Path],
    owner: Owner,
    any_selected: bool,
) -> errors.FlaxSGError | None:
    """The error if a part of a filter means something that does not exist.

    Args:
        where: the filter.
        matched: the atoms that mean a variable.
        paths: the path of every variable.
        owner: the names of the module that they are relative to, if one is known.
        any_selected: whether the filter as a whole selects a variable.
    """
    for atom in where.atoms:
        if error := atom.unused(atom in matched, paths, owner):
            return error
    if isinstance(where, And):
        # A condition leaves nothing out that the rest names: ``~filter & flag``.
        named = [part for part in where.parts if not isinstance(part, CONDITIONS)]
        if len(named) > 1:
            return where.unused(any_selected, paths, owner)
    return None

"""What a rule on cotangents looks up: which leaves have one, other variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flax_sg import errors
from flax_sg.errors.texts import shown
from flax_sg.filters import hints, paths
from flax_sg.internals import tracing
from flax_sg.rules import rules
from flax_sg.trees.leaves import is_differentiable
from flax_sg.trees.variables import Key


def has_cotangent(rewrite: rules.Rewrite, path: paths.Path, leaf: Any) -> bool:
    """Whether a rule for cotangents has anything to do for a leaf.

    Raises:
        CotangentError: if it cannot have, and was selected by name.
    """
    if not is_differentiable(leaf):
        # As everywhere: True takes what there is to take, a name means what it says.
        if rewrite.where.atoms:
            raise _no_cotangent(path, leaf, rewrite)
        return False
    # What is no tracer is a constant to every derivative in progress.
    return isinstance(leaf, tracing.Tracer)


class Reader:
    """Finds the leaves of any variable in a tree.

    Args:
        variables: the leaves at each path, by collection and names.
        owner: the names of the module that paths are relative to.
    """

    def __init__(
        self, variables: Mapping[Key, list[Any]], owner: tuple[str, ...]
    ) -> None:
        self._variables, self._owner = variables, owner

    def __call__(self, path: str, collection: str) -> list[Any]:
        """The leaves of a variable; raises if there is none."""
        names = tuple(path.strip('/').split('/'))
        absolute = names if path.startswith('/') else (*self._owner, *names)
        try:
            return self._variables[collection, absolute]
        except KeyError:
            known = [
                paths.Path.of(*key, self._owner)
                for key in self._variables
                if key[0] == collection
            ]
            nearest = hints.nearest(path, known)
            raise _missing_variable(path, collection, nearest) from None


def _no_cotangent(path: str, leaf: Any, rule: object) -> errors.CotangentError:
    """A rule for cotangents was asked for on a variable that has none."""
    return errors.CotangentError(
        f'{rule} selects {str(path)!r}, which has no cotangent: it holds '
        f'{shown(leaf)}.\n'
        'Select real or complex variables; True takes those and no others.'
    )


def _missing_variable(
    path: str, collection: str, known: Iterable[str]
) -> errors.UnknownNameError:
    """A variable whose value shall be a cotangent is not there."""
    return errors.UnknownNameError(
        f'there is no variable {path!r} in the collection {collection!r}, whose '
        f'value was to be a cotangent; nearest: {", ".join(map(repr, known))}.'
    )

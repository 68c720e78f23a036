"""What rules on cotangents look up: which leaves have one, and other variables."""

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
    """Whether a rule on cotangents has to act on a leaf.

    Raises:
        CotangentError: if the leaf was selected by name and cannot have a cotangent.
    """
    if not is_differentiable(leaf):
        # As in every rule: True skips such leaves, and selecting one by name fails.
        if rewrite.where.atoms:
            raise _no_cotangent(path, leaf, rewrite)
        return False
    # JAX differentiates tracers only: every other array is a constant.
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
        """Returns the leaves of a variable; raises if there is no such variable."""
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
    """A rule on cotangents selects a variable that has no cotangent."""
    return errors.CotangentError(
        f'{rule} selects {str(path)!r}, which has no cotangent: it holds '
        f'{shown(leaf)}.\n'
        'Select real or complex variables; True takes those and no others.'
    )


def _missing_variable(
    path: str, collection: str, known: Iterable[str]
) -> errors.UnknownNameError:
    """There is no variable at the path whose value is to be a cotangent."""
    return errors.UnknownNameError(
        f'there is no variable {path!r} in the collection {collection!r}, whose '
        f'value was to be a cotangent; nearest: {", ".join(map(repr, known))}.'
    )

"""A filter that was derived from a function, by ``sg.live``."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Hashable, Sequence
from typing import ClassVar

from flax_sg import errors
from flax_sg.filters.expressions import Atom
from flax_sg.filters.paths import Path


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Derived(Atom):
    """The variables that something was found out about; it may well be none.

    Two are equal if they say the same of the same variables, wherever they come from.

    Attributes:
        selected: the variables that are meant, by collection and absolute path.
        known: all variables that there were.
    """

    selected: frozenset[tuple[str, str]]
    names_leaves: ClassVar[bool] = True
    known: frozenset[tuple[str, str]]

    @functools.cached_property
    def _value(self) -> Hashable:
        return self.selected, self.known

    @property
    def may_be_empty(self) -> bool:
        """Always: a function may train nothing."""
        return True

    def _matches(self, path: Path) -> bool:
        key = path.collection, path.absolute
        if key not in self.known:
            raise _not_declared(path.absolute, [name for _, name in self.known])
        return key in self.selected

    def __repr__(self) -> str:
        names = sorted(name for _, name in self.selected)
        shown = [repr(name) for name in names[:3]] + ['...'] * (len(names) > 3)
        return f'<live: {", ".join(shown) or "nothing"}>'


def _not_declared(path: str, known: Sequence[str]) -> errors.UnknownNameError:
    """A filter from ``sg.live`` is asked for a variable that it has not seen."""
    near = difflib.get_close_matches(path, known, 3, cutoff=0.0)
    return errors.UnknownNameError(
        f'there was no {path!r} in the parameters that this filter was derived '
        f'from by sg.live.\nNearest: {", ".join(map(repr, near)) or "none"}.\n'
        'Derive it again, from the tree that it is used for.'
    )

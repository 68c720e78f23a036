"""The variables of given names, as a filter: those that a tree of values has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence

from flax_sg.errors import UnusedSubstituteError
from flax_sg.filters.expressions import Atom
from flax_sg.filters.paths import Path


@dataclasses.dataclass(frozen=True, eq=False)
class Names(Atom):
    """The variables that are named, each by its collection and the names of its path.

    Every name has to be that of a variable. One outside the module that opened the
    block has no such name, and is not meant.

    >>> names = Names(frozenset({('params', ('dec', 'kernel'))}))
    >>> [names(Path.of('params', ('dec', name))) for name in ('kernel', 'bias')]
    [True, False]
    """

    names: frozenset[tuple[str, tuple[str, ...]]]

    @functools.cached_property
    def _value(self) -> Hashable:
        return self.names

    @property
    def may_be_empty(self) -> bool:
        """Whether there are no names: at initialization nothing has a value yet."""
        return not self.names

    def _matches(self, path: Path) -> bool:
        return not path.outside and (path.collection, path.parts) in self.names

    def missing(self, paths: Iterable[Path]) -> list[str]:
        """The names that belong to none of these variables."""
        met = {(path.collection, path.parts) for path in paths if not path.outside}
        return sorted('/'.join(parts) for _, parts in self.names - met)

    def misfit(
        self, missing: Sequence[str], paths: Iterable[str]
    ) -> UnusedSubstituteError:
        """The error for names that are ``missing``."""
        return UnusedSubstituteError(missing, paths)

    def __repr__(self) -> str:
        names = sorted('/'.join(parts) for _, parts in self.names)
        more = f', and {len(names) - 3} more' if len(names) > 3 else ''
        return f'<{", ".join(names[:3])}{more}>'

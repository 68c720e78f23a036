"""The variables of given names, as a filter: those that a tree of values has."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Hashable, Iterable, Sequence

from flax_sg import errors
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
        variables = [path.variable for path in paths if not path.outside]
        met = {(path.collection, path.parts) for path in variables}
        return sorted('/'.join(parts) for _, parts in self.names - met)

    def misfit(
        self, missing: Sequence[str], paths: Iterable[str]
    ) -> errors.UnusedFilterError:
        """The error for names that are ``missing``."""
        return unused_value(missing, paths)

    def __repr__(self) -> str:
        names = sorted('/'.join(parts) for _, parts in self.names)
        more = f', and {len(names) - 3} more' if len(names) > 3 else ''
        return f'<{", ".join(names[:3])}{more}>'


def unused_value(
    missing: Sequence[str], paths: Iterable[str]
) -> errors.UnusedFilterError:
    """A value was given that belongs to no variable."""
    known = list(dict.fromkeys(map(str, paths)))
    values = 'value' if len(missing) == 1 else 'values'
    lines = [f'nn.substitute: {len(missing)} {values} without a variable:']
    for name in missing[:3]:
        near = difflib.get_close_matches(name, known, 1, cutoff=0.0)
        lines.append(f'  {name!r}' + (f', nearest {near[0]!r}' if near else ''))
    if len(missing) > 3:
        lines.append(f'  and {len(missing) - 3} more')
    first = missing[0].partition('/')
    if first[2] in known:
        lines.append(f'Fix: give values[{first[0]!r}] in place of values.')
    else:
        lines.append(
            'Fix: spell them as the variables, or take them out. If they may be '
            "missing, pass unused='ignore'."
        )
    return errors.UnusedFilterError('\n'.join(lines))

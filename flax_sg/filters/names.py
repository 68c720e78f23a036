"""Variables by name: those of a tree of values, or those found in a program."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import ClassVar

from flax_sg import errors
from flax_sg.filters.expressions import Atom, Owner
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
    def _may_be_empty(self) -> bool:
        return not self.names  # At initialization nothing has a value yet.

    def _matches(self, path: Path) -> bool:
        return not path.outside and (path.collection, path.parts) in self.names

    def _unused(
        self, took: bool, paths: Sequence[Path], owner: Owner
    ) -> errors.UnusedFilterError | None:
        variables = [path.variable for path in paths if not path.outside]
        met = {(path.collection, path.parts) for path in variables}
        missing = sorted('/'.join(parts) for _, parts in self.names - met)
        return unused_value(missing, paths) if missing else None

    def __repr__(self) -> str:
        names = sorted('/'.join(parts) for _, parts in self.names)
        more = f', and {len(names) - 3} more' if len(names) > 3 else ''
        return f'<{", ".join(names[:3])}{more}>'


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Derived(Atom):
    """The variables that something was found out about.

    Two are equal if they say the same of the same variables.

    Attributes:
        selected: the variables that are meant, by collection and absolute path.
        known: all variables that there were.
        source: what has found them.
    """

    selected: frozenset[tuple[str, str]]
    names_leaves: ClassVar[bool] = True
    known: frozenset[tuple[str, str]]
    source: str = 'live'

    @functools.cached_property
    def _value(self) -> Hashable:
        return self.selected, self.known, self._may_be_empty

    @property
    def _may_be_empty(self) -> bool:
        return self.source == 'live'  # A function may train nothing.

    def _matches(self, path: Path) -> bool:
        key = path.collection, path.absolute
        if key not in self.known:
            raise _not_known(self.source, path, [name for _, name in self.known])
        return key in self.selected

    def __repr__(self) -> str:
        names = sorted(name for _, name in self.selected)
        shown = [repr(name) for name in names[:3]] + ['...'] * (len(names) > 3)
        return f'<{self.source}: {", ".join(shown) or "nothing"}>'


def without_variable(missing: Sequence[str], paths: Iterable[str]) -> list[str]:
    """Lines that name what belongs to no variable, each with the nearest one."""
    known = list(dict.fromkeys(map(str, paths)))
    lines: list[str] = []
    for name in missing[:3]:
        near = difflib.get_close_matches(name, known, 1, cutoff=0.0)
        lines.append(f'  {name!r}' + (f', nearest {near[0]!r}' if near else ''))
    if len(missing) > 3:
        lines.append(f'  and {len(missing) - 3} more')
    return lines


def unused_value(
    missing: Sequence[str], paths: Iterable[str]
) -> errors.UnusedFilterError:
    """A value was given that belongs to no variable."""
    paths = list(map(str, paths))
    values = 'value' if len(missing) == 1 else 'values'
    first, _, rest = missing[0].partition('/')
    fix = (
        'Fix: spell them as the variables, or take them out. If they may be missing, '
        "pass unused='ignore'."
    )
    if rest in paths:
        fix = f'Fix: give values[{first!r}] in place of values.'
    title = f'nn.substitute: {len(missing)} {values} without a variable:'
    return errors.UnusedFilterError(
        '\n'.join([title, *without_variable(missing, paths), fix])
    )


def _not_known(
    source: str, path: Path, known: Sequence[str]
) -> errors.UnknownNameError:
    """A filter that was found from a program is asked for another variable."""
    near = difflib.get_close_matches(path.absolute, known, 3, cutoff=0.0)
    return errors.UnknownNameError(
        f'there was no {path.absolute!r} in the parameters that this filter was '
        f'derived from by sg.{source}.\n'
        f'Nearest: {", ".join(map(repr, near)) or "none"}.\n'
        'Derive it again, from the tree that it is used for.'
    )

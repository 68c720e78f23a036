"""Filters as expressions: what all of them share, and ``~ & |`` on them."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from flax_sg import errors
from flax_sg.filters.paths import Path, nearest

Owner: TypeAlias = tuple[str, ...] | None


class Filter(abc.ABC):
    """Which variables are meant: a value that is called with a path.

    It is either an elementary filter, an *atom*, or an expression of atoms.
    """

    # numpy's bools stand aside for our reflected operators.
    __array_ufunc__ = None
    # Makes a filter of the other side of an operator; filters.py, which knows every
    # kind of filter, sets it to as_filter.
    convert: ClassVar[Callable[[Any], Filter]]

    @abc.abstractmethod
    def _evaluate(self, ask: Callable[[Filter], bool]) -> Any:
        """The value of the expression, given what to ask for that of an atom.

        It is a bool, or a ``Part`` if elements of the variable are meant; see
        ``indices.py``.
        """

    @functools.cached_property
    @abc.abstractmethod
    def _value(self) -> Hashable:
        """What equality and hash look at, beside the type."""

    @property
    def _parts(self) -> tuple[Filter, ...]:
        return ()

    def __call__(self, path: Path) -> Any:
        """Whether the variable at this path is meant: a bool, or a ``Part`` of it."""
        return self._evaluate(lambda atom: atom(path))

    def combine(self, results: Mapping[Filter, bool]) -> Any:
        """Whether a variable is meant, given what each of the atoms says of it.

        With it a caller asks every atom once, and learns which of them matched.
        """
        return self._evaluate(results.__getitem__)

    def decide(self, path: Path, matched: set[Filter]) -> Any:
        """Whether a variable is meant; adds the elementary filters that take it.

        Each elementary filter is asked once.
        """
        if len(self.atoms) == 1:
            [atom] = self.atoms
            took = atom(path)
            if took:
                matched.add(atom)
            return self._evaluate(lambda _: took)
        results = {atom: atom(path) for atom in self.atoms}
        matched.update(atom for atom, took in results.items() if took)
        return self.combine(results)

    @functools.cached_property
    def has_functions(self) -> bool:
        """Whether it asks functions, whose answers may change."""
        return any(part.has_functions for part in self._parts)

    @functools.cached_property
    def shape(self) -> Hashable:
        """Equal for filters that are spelled alike: functions made by the same code."""
        if not self.has_functions:
            return self
        return type(self), tuple(part.shape for part in self._parts)

    def as_function(self) -> tuple[Callable[[Path], Any], bool] | None:
        """The one function that it asks, and whether it says the opposite."""
        return None

    @functools.cached_property
    def atoms(self) -> tuple[Filter, ...]:
        """The distinct elementary filters in it.

        Each of them has to match something, where a filter may not be empty.
        """
        return tuple(dict.fromkeys(a for part in self._parts for a in part.atoms))

    @property
    def may_be_empty(self) -> bool:
        """Whether it is no mistake if it matches nothing: what was derived may."""
        return any(part.may_be_empty for part in self._parts)

    def explain(self, paths: Sequence[Path], owner: Owner) -> list[str]:
        """Says in lines why the filter may match none of these paths.

        Args:
            paths: the path of every variable there is.
            owner: path of the module that they are relative to, if one is known.
        """
        text = self._text()
        near = nearest(text, paths) if text else list(dict.fromkeys(paths))[:3]
        title = 'Nearest paths:' if text else 'Paths look like this:'
        lines = [title, *(f'  {str(path)!r}' for path in near)] if near else []
        hint = self._hint(paths, owner) if near else None
        return [*lines, f'Hint: {hint}'] if hint else lines

    def _text(self) -> str | None:
        """What the filter looks for, to be compared with paths, if that is known."""
        return next(filter(None, (part._text() for part in self._parts)), None)

    def _hint(self, paths: Sequence[Path], owner: Owner) -> str | None:
        """What was probably meant."""
        del paths, owner
        return None

    @functools.cached_property
    def _hash(self) -> int:
        # Filters are part of JAX's trace cache keys: hashed again and again.
        return hash((type(self), self._value))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Filter) or type(self) is not type(other):
            return NotImplemented
        return self._value == other._value

    def __reduce__(self) -> Any:
        fields: Any = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return type(self), tuple(getattr(self, f.name) for f in fields if f.init)

    def __invert__(self) -> Filter:
        return Not(self)

    def __and__(self, other: Any) -> Filter:
        return And((self, Filter.convert(other)))

    def __rand__(self, other: Any) -> Filter:
        return And((Filter.convert(other), self))

    def __or__(self, other: Any) -> Filter:
        return Or((self, Filter.convert(other)))

    def __ror__(self, other: Any) -> Filter:
        return Or((Filter.convert(other), self))

    def __bool__(self) -> bool:
        raise errors.FilterTypeError(
            f'{self!r} is neither true nor false: `not`, `and` and `or` would drop a '
            'part of a filter.\nFix: write ~a, a & b, a | b.'
        )


class Atom(Filter):
    """A filter that is no expression of others.

    One that takes a variable takes all leaves of its value.
    """

    names_leaves: ClassVar[bool] = False
    """Whether it has an answer for each leaf, and is not asked for the variable."""

    @abc.abstractmethod
    def _matches(self, path: Path) -> bool:
        """Whether the variable at this path is meant."""

    def __call__(self, path: Path) -> bool:
        """Whether the variable, or the leaf of one, at this path is meant."""
        if self._matches(path):
            return True
        return path.is_inner and not self.names_leaves and self._matches(path.variable)

    def _evaluate(self, ask: Callable[[Filter], bool]) -> bool:
        return ask(self)

    @functools.cached_property
    def atoms(self) -> tuple[Filter, ...]:
        """The filter itself."""
        return (self,)


@dataclasses.dataclass(frozen=True, eq=False)
class Constant(Filter):
    """Every variable, or none. It has no atoms, so it may well select nothing."""

    value: bool

    @functools.cached_property
    def _value(self) -> Hashable:
        return self.value

    def _evaluate(self, ask: Callable[[Filter], bool]) -> bool:
        return self.value

    def __invert__(self) -> Filter:
        return Constant(not self.value)

    def __repr__(self) -> str:
        return f'Constant({self.value})'


@dataclasses.dataclass(frozen=True, eq=False)
class Not(Filter):
    """The variables that another filter does not mean."""

    filter: Filter

    @functools.cached_property
    def _value(self) -> Hashable:
        return self.filter

    @property
    def _parts(self) -> tuple[Filter, ...]:
        return (self.filter,)

    def _evaluate(self, ask: Callable[[Filter], bool]) -> Any:
        said = self.filter._evaluate(ask)
        return not said if isinstance(said, bool) else ~said

    def as_function(self) -> tuple[Callable[[Path], Any], bool] | None:
        """The function of the other filter."""
        simple = self.filter.as_function()
        return None if simple is None else (simple[0], not simple[1])

    def __invert__(self) -> Filter:
        return self.filter

    def __repr__(self) -> str:
        return f'~{_enclosed(self.filter)}'


@dataclasses.dataclass(frozen=True, eq=False)
class _Several(Filter):
    """What And and Or share. The order of the parts is for reading alone."""

    filters: tuple[Filter, ...]

    def __post_init__(self) -> None:
        flat: list[Filter] = []
        for part in self.filters:
            flat.extend(part.filters if isinstance(part, type(self)) else (part,))
        object.__setattr__(self, 'filters', tuple(dict.fromkeys(flat)))

    @functools.cached_property
    def _value(self) -> Hashable:
        return frozenset(self.filters)

    @property
    def _parts(self) -> tuple[Filter, ...]:
        return self.filters


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class And(_Several):
    """The variables that all of several filters mean."""

    def _evaluate(self, ask: Callable[[Filter], bool]) -> Any:
        said: Any = True
        for part in self.filters:
            said = said & part._evaluate(ask)
            if said is False:
                break
        return said

    def __repr__(self) -> str:
        return ' & '.join(map(_enclosed, self.filters)) or 'And(())'

    def _hint(self, paths: Sequence[Path], owner: Owner) -> str | None:
        return 'its parts match something each, and no variable is in all of them.'


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Or(_Several):
    """The variables that at least one of several filters means."""

    def _evaluate(self, ask: Callable[[Filter], bool]) -> Any:
        said: Any = False
        for part in self.filters:
            said = said | part._evaluate(ask)
            if said is True:
                break
        return said

    def __repr__(self) -> str:
        return ' | '.join(map(_enclosed, self.filters)) or 'Or(())'


def _enclosed(part: Filter) -> str:
    several = isinstance(part, _Several) and len(part.filters) > 1
    return f'({part!r})' if several else repr(part)

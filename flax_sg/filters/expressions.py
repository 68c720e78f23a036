"""Filters as expressions: what all filters share, and ``~ & |`` of them.

The functions at the end are what the rest of the library asks a filter.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
from collections.abc import Callable, Hashable, Sequence, Set
from typing import Any, ClassVar

from flax_sg import errors
from flax_sg.filters.hints import unused_filter
from flax_sg.filters.paths import Owner, Path


class Filter(abc.ABC):
    """Which variables are meant: a value that is called with a path.

    A filter is elementary, an *atom*, or an expression of atoms. Filters are immutable,
    compare and hash by what they say, and combine with ``~ & |``.
    """

    # numpy's bools stand aside for our reflected operators.
    __array_ufunc__ = None
    # Makes a filter of the other side of an operator; it is as_filter.
    convert: ClassVar[Callable[[Any], Filter]]

    @abc.abstractmethod
    def _evaluate(self, took: Set[Filter], unknown: Set[Filter]) -> Any:
        """The value of the expression for one variable.

        Args:
            took: the atoms that take the variable.
            unknown: the atoms that cannot say.

        Returns:
            A bool; a ``Part`` if elements of the variable are meant, see
            ``indices.py``; None if that depends on an atom that cannot say.
        """

    @functools.cached_property
    @abc.abstractmethod
    def _value(self) -> Hashable:
        """What equality and hash look at, beside the type."""

    @property
    def _parts(self) -> tuple[Filter, ...]:
        return ()

    @functools.cached_property
    def atoms(self) -> tuple[Filter, ...]:
        """The distinct elementary filters in it.

        Each of them has to match something, where a filter may not be empty.
        """
        return tuple(dict.fromkeys(a for part in self._parts for a in part.atoms))

    @functools.cached_property
    def _kinds(self) -> frozenset[type[Filter]]:
        return frozenset({type(self)}).union(*(part._kinds for part in self._parts))

    @functools.cached_property
    def _by_path(self) -> tuple[dict[str, list[Filter]], list[Filter]]:
        """The atoms that mean one path, by this path; and the others."""
        exact: dict[str, list[Filter]] = {}
        others: list[Filter] = []
        for atom in self.atoms:
            assert isinstance(atom, Atom)
            if not atom._only:
                others.append(atom)
            for path in atom._only:
                exact.setdefault(path, []).append(atom)
        return exact, others

    def __call__(self, path: Path) -> Any:
        """Whether the variable at this path is meant: a bool, or a ``Part`` of it."""
        said = decide(self, path)
        if said is None:
            raise unknown_class(self, path)
        return said

    @functools.cached_property
    def _shape(self) -> Hashable:
        shapes = tuple(part._shape for part in self._parts)
        if all(map(operator.is_, shapes, self._parts)):
            return self
        return type(self), shapes

    def _as_function(self) -> tuple[Callable[[Path], Any], bool] | None:
        return None

    @property
    def _may_be_empty(self) -> bool:
        return any(part._may_be_empty for part in self._parts)

    def _unused(
        self, took: bool, paths: Sequence[Path], owner: Owner
    ) -> errors.FlaxSGError | None:
        """The error if it means something that does not exist."""
        if took or self._may_be_empty:
            return None
        return unused_filter(self, self._advice(paths, owner), paths, owner)

    def _advice(self, paths: Sequence[Path], owner: Owner) -> str:
        """A line of an error that says what was probably meant; '' if unknown."""
        return ''

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
            'part of a filter.\nWrite ~a, a & b, a | b.'
        )


class Atom(Filter):
    """A filter that is no expression of others.

    One that takes a variable takes all leaves of its value.
    """

    names_leaves: ClassVar[bool] = False
    """Whether it has an answer for each leaf, and is not asked for the variable."""

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f'cannot assign to field {name!r}')

    @abc.abstractmethod
    def _matches(self, path: Path) -> bool | None:
        """Whether the variable at this path is meant; None if that is not known."""

    @functools.cached_property
    def _only(self) -> tuple[str, ...]:
        """The paths that it means, if it means no others; () if it has to be asked."""
        return ()

    def _evaluate(self, took: Set[Filter], unknown: Set[Filter]) -> bool | None:
        return self in took or (None if self in unknown else False)

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

    def _evaluate(self, took: Set[Filter], unknown: Set[Filter]) -> bool:
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

    def _evaluate(self, took: Set[Filter], unknown: Set[Filter]) -> Any:
        said = self.filter._evaluate(took, unknown)
        if said is None or isinstance(said, bool):
            return None if said is None else not said
        return ~said

    def _as_function(self) -> tuple[Callable[[Path], Any], bool] | None:
        simple = self.filter._as_function()
        return None if simple is None else (simple[0], not simple[1])

    def __invert__(self) -> Filter:
        return self.filter

    def __repr__(self) -> str:
        return f'~{_enclosed(self.filter)}'


@dataclasses.dataclass(frozen=True, eq=False)
class _Several(Filter):
    """What And and Or share. The order of the parts is for reading alone."""

    filters: tuple[Filter, ...]
    symbol: ClassVar[str]

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

    def __repr__(self) -> str:
        texts = map(_enclosed, self.filters)
        return f' {self.symbol} '.join(texts) or f'{type(self).__name__}(())'


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class And(_Several):
    """The variables that all of several filters mean."""

    symbol: ClassVar[str] = '&'

    def _evaluate(self, took: Set[Filter], unknown: Set[Filter]) -> Any:
        said = [part._evaluate(took, unknown) for part in self.filters]
        if None in said:
            return False if False in said else None
        return functools.reduce(operator.and_, said, True)

    def _advice(self, paths: Sequence[Path], owner: Owner) -> str:
        return 'Each part matches something, but no variable is in all of them.'


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Or(_Several):
    """The variables that at least one of several filters means."""

    symbol: ClassVar[str] = '|'

    @functools.cached_property
    def _split(self) -> tuple[frozenset[Filter], list[Filter]]:
        """The atoms among the parts, and the other parts."""
        atoms = frozenset(part for part in self.filters if isinstance(part, Atom))
        return atoms, [part for part in self.filters if part not in atoms]

    def _evaluate(self, took: Set[Filter], unknown: Set[Filter]) -> Any:
        # Of thousands of atoms few took the variable: only these are looked at.
        atoms, others = self._split
        if any(atom in atoms for atom in took):
            return True
        said = [part._evaluate(took, unknown) for part in others]
        said.extend(None for atom in unknown if atom in atoms)
        if None in said:
            return True if True in said else None
        return functools.reduce(operator.or_, said, False)


def _enclosed(part: Filter) -> str:
    several = isinstance(part, _Several) and len(part.filters) > 1
    return f'({part!r})' if several else repr(part)


def takes(atom: Filter, path: Path) -> bool | None:
    """Whether an atom takes a variable, or the leaf of one; None if it cannot say."""
    assert isinstance(atom, Atom)
    said = atom._matches(path)
    if said or not path.is_inner or atom.names_leaves:
        return said
    return atom._matches(path.variable)


Asks = Callable[[Filter, Path], bool | None]


def asked(
    where: Filter, path: Path, asks: Asks = takes
) -> tuple[set[Filter], set[Filter]]:
    """The atoms of a filter that take a variable, and those that cannot say.

    Atoms that mean one path are looked up; ``asks`` answers for the others.
    """
    exact, others = where._by_path
    took: set[Filter] = set(exact.get(path, ()))
    if path.is_inner:
        took.update(exact.get(path.variable, ()))
    unknown: set[Filter] = set()
    for atom in others:
        if said := asks(atom, path):
            took.add(atom)
        elif said is None:
            unknown.add(atom)
    return took, unknown


def decide(
    where: Filter,
    path: Path,
    matched: set[Filter] | None = None,
    asks: Asks = takes,
) -> Any:
    """Whether a variable is meant; adds the atoms that take it to ``matched``.

    None if it depends on the class of a module that is not known.
    """
    took, unknown = asked(where, path, asks)
    if matched is not None:
        matched |= took
    return where._evaluate(took, unknown)


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
        paths: the path of every variable.
        owner: the names of the module that they are relative to, if one is known.
        any_taken: whether the filter as a whole takes a variable.
    """
    for atom in where.atoms:
        if error := atom._unused(atom in matched, paths, owner):
            return error
    return where._unused(any_taken, paths, owner) if isinstance(where, And) else None


def unknown_class(where: Filter, path: Path) -> errors.FilterTypeError:
    """A filter chooses by the class of a module, and nobody knows the class."""
    return errors.FilterTypeError(
        f'{where!r} has to know the class of the module that holds {str(path)!r}, '
        'which is not known here.\n'
        'Give the model and example inputs: '
        'filters.of_type(nn.BatchNorm, model, x).'
    )

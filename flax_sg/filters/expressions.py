"""Filters as expressions: what all filters share, and ``~ & |`` of them.

The functions at the end are what the rest of the library asks a filter.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import jax

from flax_sg import errors
from flax_sg.filters import tokens
from flax_sg.filters.paths import Owner, Path, all_paths, is_parameter, shape_and_dtype
from flax_sg.internals.modules import ToldByHash
from flax_sg.internals.types import Decision, is_meant

# Asks an elementary filter about a variable.
Ask: TypeAlias = 'Callable[[Atom, Path], Any]'

# What an answer may depend on, beside the path: 'code' of the user, which may answer
# otherwise next time; a 'part' of the array may be meant, and if it is 'unclear', no
# analysis tells which; a 'mask' tells which elements, and may be another one next time;
# it may be one traced bool for all of them, a 'condition'; 'names' of all variables,
# since it is judged by each of them.
Need: TypeAlias = Literal['code', 'part', 'unclear', 'mask', 'condition', 'names']


class Filter(ToldByHash, abc.ABC):
    """The base class of filters. Calling one with a path tells whether it selects it.

    A filter is elementary, an *atom*, or an expression of atoms. Filters are immutable,
    compare and hash by what they say, and combine with ``~ & |``.
    """

    # Otherwise numpy.True_ & filter would be an array of filters, not a filter.
    __array_ufunc__ = None
    own_needs: ClassVar[frozenset[Need]] = frozenset()
    """What the filter's answer depends on, beside its parts and the path."""
    # ``as_filter``, for the other operand. ``filters/__init__.py``, which imports this
    # file, sets it.
    convert: ClassVar[Callable[[Any], Filter]]

    @abc.abstractmethod
    def answer(self, path: Path, ask: Ask) -> Decision:
        """Whether a variable is meant: a bool, or a ``Part``, see ``indices.py``.

        Args:
            path: the variable.
            ask: asks the elementary filters in this one.
        """

    @functools.cached_property
    def identity(self) -> Hashable:
        """What equality and hash look at, beside the type: by default all fields."""
        return tokens.of_numbers_in(tuple(self.__getstate__().values()))

    @property
    def parts(self) -> tuple[Filter, ...]:
        """The filters that an expression is made of."""
        return ()

    @functools.cached_property
    def atoms(self) -> tuple[Atom, ...]:
        """The distinct elementary filters in it.

        Each of them has to match something, where a filter may not be empty.
        """
        return tuple(dict.fromkeys(a for part in self.parts for a in part.atoms))

    @functools.cached_property
    def needs(self) -> frozenset[Need]:
        """What the filter's answer depends on, beside the path."""
        return self.own_needs.union(*(part.needs for part in self.parts))

    def __call__(self, path: Any, value: Any = None) -> Decision:
        """Whether the variable at this path is meant: a bool, or a ``Part`` of it.

        It is a filter of NNX, too: Flax calls it with the keys of a path, and what is
        there. Then it selects the parameters that are meant.

        Args:
            path: the path; from Flax its keys.
            value: from Flax what is there.
        """
        if isinstance(path, tuple):
            return _decide_in_nnx(self, path, value)
        return decide(self, path)

    @functools.cached_property
    def shape(self) -> Hashable:
        """Equal for filters that are spelled alike: functions made by the same code.

        Caches keep it, so there is no array in it, and no filter.
        """
        return type(self), frozenset(p.shape for p in self.parts) or self.identity

    @property
    def side(self) -> str | None:
        """What the filter names: ``'trained'`` or ``'frozen'``; None if unknown."""
        return None

    @property
    def may_be_empty(self) -> bool:
        """Whether the filter may match nothing: a derived one may."""
        return any(part.may_be_empty for part in self.parts)

    def unused(
        self, matches: bool, paths: Sequence[Path], owner: Owner
    ) -> errors.FlaxSGError | None:
        """The error if it means something that does not exist.

        Args:
            matches: whether it means one of the variables.
            paths: the path of every variable.
            owner: the names of the module that the paths are relative to.
        """
        if matches or self.may_be_empty:
            return None
        under = f' under {"/".join(owner)!r}' if owner else ''
        advice = self._advice(paths) if paths else 'There are no variables.'
        if [*paths] == ['']:
            advice = 'There is one array, and no tree: are arguments exchanged?'
        variables = 'variable' if len(paths) == 1 else 'variables'
        return errors.UnusedFilterError(
            f'{self!r} matches none of the {len(paths)} {variables}{under}.',
            advice,
            "If nothing has to match, pass unused='ignore'.",
        )

    def _advice(self, paths: Sequence[Path]) -> str:
        """The part of an error that helps to find what was meant."""
        examples = itertools.islice(dict.fromkeys(paths), 3)
        return f'Paths look like this: {", ".join(map(repr, examples))}.'

    @functools.cached_property
    def _hash(self) -> int:
        # Filters are keys of tables that each block looks into.
        return hash((type(self), self.identity))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Filter) or type(self) is not type(other):
            return NotImplemented
        return self.identity == other.identity

    def __getstate__(self) -> dict[str, Any]:
        """The fields that the filter was made of, without cached values."""
        kept = functools.cached_property
        attributes = {k: getattr(type(self), k, None) for k in vars(self)}
        return {
            k: vars(self)[k] for k, v in attributes.items() if not isinstance(v, kept)
        }

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f'cannot assign to field {name!r}')

    def __invert__(self) -> Filter:
        return Not(self)

    def __and__(self, other: object) -> Filter:
        return And((self, Filter.convert(other)))

    def __rand__(self, other: object) -> Filter:
        return And((Filter.convert(other), self))

    def __or__(self, other: object) -> Filter:
        return Or((self, Filter.convert(other)))

    def __ror__(self, other: object) -> Filter:
        return Or((Filter.convert(other), self))

    def __bool__(self) -> bool:
        raise errors.FilterTypeError(
            f'{self!r} is neither true nor false: `not`, `and` and `or` would drop a '
            'part of a filter.\nWrite ~a, a & b, a | b.'
        )


class Atom(Filter):
    """A filter that is no expression of others.

    One that means a variable means all leaves of its value.
    """

    names_leaves: ClassVar[bool] = False
    """Whether it has an answer for each leaf, and is not asked for the variable."""

    @abc.abstractmethod
    def matches(self, path: Path) -> Decision:
        """Whether the variable at this path is meant: a bool, or a ``Part`` of it."""

    @functools.cached_property
    def only(self) -> str | None:
        """The one path that it means; None if it has to be asked."""
        return None

    def answer(self, path: Path, ask: Ask) -> Decision:
        """The answer."""
        return ask(self, path)

    @functools.cached_property
    def atoms(self) -> tuple[Atom, ...]:
        """The filter itself."""
        return (self,)


@dataclasses.dataclass(frozen=True, eq=False)
class Constant(Filter):
    """Selects every variable, or none. It may select nothing without an error."""

    value: bool

    @property
    def may_be_empty(self) -> bool:
        """Whether the filter selects nothing: its condition may be False."""
        return not self.value

    def answer(self, path: Path, ask: Ask) -> bool:
        """The constant."""
        return self.value

    def __invert__(self) -> Filter:
        return Constant(not self.value)

    def __repr__(self) -> str:
        return f'Constant({self.value})'


@dataclasses.dataclass(frozen=True, eq=False)
class Not(Filter):
    """The variables that another filter does not mean."""

    filter: Filter

    @property
    def parts(self) -> tuple[Filter, ...]:
        """The other filter."""
        return (self.filter,)

    @property
    def side(self) -> str | None:
        """The side that the other filter does not name."""
        return _OTHER_SIDE[self.filter.side]

    def answer(self, path: Path, ask: Ask) -> Decision:
        """The opposite of what the other filter says."""
        return negated(self.filter.answer(path, ask))

    def __invert__(self) -> Filter:
        return self.filter

    def __repr__(self) -> str:
        return f'~{_enclosed(self.filter)}'


@dataclasses.dataclass(frozen=True, eq=False)
class _Several(Filter):
    """What And and Or share. The order of the parts is for reading alone."""

    filters: tuple[Filter, ...]
    symbol: ClassVar[str]
    combine: ClassVar[Callable[[Any, Any], Any]]
    decisive: ClassVar[bool]
    """What settles the value, whatever the other parts say."""

    def __post_init__(self) -> None:
        flat: list[Filter] = []
        for part in self.filters:
            # The type has to be the same: a ``Trained``, which is an Or, has a side.
            is_same = isinstance(part, _Several) and type(part) is type(self)
            flat.extend(part.parts if is_same else (part,))
        object.__setattr__(self, 'filters', tuple(dict.fromkeys(flat)))

    @functools.cached_property
    def identity(self) -> Hashable:
        """The parts, in any order."""
        return frozenset(self.filters)

    @property
    def parts(self) -> tuple[Filter, ...]:
        """The filters that it combines."""
        return self.filters

    @property
    def side(self) -> str | None:
        """The side of all parts; None if they differ."""
        sides = {part.side for part in self.filters}
        return sides.pop() if len(sides) == 1 else None

    def _parts_for(self, path: Path) -> Sequence[Filter]:
        """The parts that may mean a variable."""
        del path
        return self.filters

    def answer(self, path: Path, ask: Ask) -> Decision:
        """What the parts say, combined. Each is asked: all have to match something."""
        answers = [part.answer(path, ask) for part in self._parts_for(path)]
        if self.decisive in answers:
            return self.decisive
        return functools.reduce(self.combine, answers, not self.decisive)

    def __repr__(self) -> str:
        texts = map(_enclosed if len(self.filters) > 1 else repr, self.filters)
        return f' {self.symbol} '.join(texts) or f'{type(self).__name__}(())'


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class And(_Several):
    """The variables that all of several filters mean."""

    symbol = '&'
    combine = operator.and_
    decisive = False

    def _advice(self, paths: Sequence[Path]) -> str:
        return 'Each part matches something, but no variable is in all of them.'


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Or(_Several):
    """The variables that at least one of several filters means."""

    symbol = '|'
    combine = operator.or_
    decisive = True

    @functools.cached_property
    def _by_path(self) -> tuple[dict[str, Filter], list[Filter]]:
        """The parts that mean one path, by this path; the other parts."""
        paths = {part: getattr(part, 'only', None) for part in self.filters}
        exact = {path: part for part, path in paths.items() if path is not None}
        return exact, [part for part, path in paths.items() if path is None]

    def _parts_for(self, path: Path) -> Sequence[Filter]:
        if path.also is not None:  # A tied weight has several paths.
            return self.filters
        # Otherwise each of thousands of paths in a list is compared with this one.
        exact, patterns = self._by_path
        names = (path, path.variable) if path.is_inner else (path,)
        return [*(exact[name] for name in names if name in exact), *patterns]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Trained(Or):
    """The variables that a model trains: the filter knows which side it names."""

    @property
    def side(self) -> str:
        """What is trained."""
        return 'trained'


def _enclosed(part: Filter) -> str:
    while isinstance(part, _Several) and len(part.filters) == 1:
        part = part.filters[0]
    is_joined = isinstance(part, _Several) and part.filters
    return f'({part!r})' if is_joined else repr(part)


_OTHER_SIDE = {'trained': 'frozen', 'frozen': 'trained', None: None}


def named(where: Filter, side: str, call: str) -> Filter:
    """Returns the filter; raises if it is known to name the other side.

    Args:
        where: the filter.
        side: what the call names: ``'trained'`` or ``'frozen'``.
        call: the call, with ``{}`` for the filter.
    """
    if where.side in (None, side):
        return where
    wrong, right = ('live', '~live') if side == 'frozen' else ('~live', 'live')
    raise errors.FilterTypeError(
        f'{call.format("where")} names what is {side}, and {where!r} names what is '
        f'{where.side}.\n'
        f'Write {call.format(right)}, where live is the filter of what is trained.\n'
        f'If you mean it as it is, write {call.format(wrong + " & True")}.'
    )


def negated(decision: Decision) -> Decision:
    """The opposite of what a filter says."""
    return not decision if isinstance(decision, bool) else ~decision


def takes(atom: Atom, path: Path) -> Decision:
    """Whether an atom means a variable, or the leaf of one, or a ``Part`` of it."""
    answer = atom.matches(path)
    if answer is not False or not path.is_inner or atom.names_leaves:
        return answer
    return atom.matches(path.variable)


def of_a_part(
    path: Path, whole: str, decision: Decision, write: str
) -> errors.PartError:
    """The error for a filter that selects a part, where only whole arrays are.

    Args:
        path: the path of the array.
        whole: what is for whole arrays.
        decision: what the filter says of the array.
        write: what to write for a part.
    """
    if getattr(decision, 'is_conditional', False):
        return decision.traced(path)
    return errors.PartError(
        f'The filter selects a part of {str(path)!r}, and {whole}.\n{write}'
    )


def of_a_part_in_nnx(path: Path, decision: Decision) -> errors.PartError:
    """The error for a filter of NNX that selects a part of a Variable."""
    write = (
        'To train a part, write nnx.Optimizer(model, sg.freeze(tx, ~live), '
        'wrt=nnx.Param), where live is the filter of what is trained.'
    )
    return of_a_part(path, 'a filter of NNX selects whole Variables', decision, write)


def decide(
    where: Filter,
    path: Path,
    matched: set[Filter] | None = None,
    ask: Ask = takes,
) -> Decision:
    """Whether a variable is meant; adds the atoms that mean it to ``matched``.

    An atom that stands twice in the filter is asked once.
    """
    if path.also is not None:
        ask = functools.partial(_by_any_path, ask)
    if isinstance(where, Atom):  # The common case.
        decision = ask(where, path)
        if decision is not False and matched is not None:
            matched.add(where)
    else:
        answers: dict[Filter, Any] = {}

        def ask_once(atom: Atom, path: Path) -> Any:
            if atom not in answers:
                answers[atom] = ask(atom, path)
            return answers[atom]

        decision = where.answer(path, ask_once)
        if matched is not None:
            matched.update(atom for atom, x in answers.items() if is_meant(x))
    return decision if isinstance(decision, bool) else decision.settled(path)


def _decide_in_nnx(where: Filter, keys: tuple[Any, ...], value: Any) -> bool:
    """What a filter decides as a filter of NNX: about a parameter as a whole."""
    if not is_parameter(value):
        return False
    raw = value.get_raw_value() if hasattr(value, 'get_raw_value') else value
    arrays = [*map(shape_and_dtype, jax.tree.leaves(raw))] or [None]
    names = tuple(map(str, keys))
    paths = [Path.of('params', names, array=array) for array in arrays]
    decisions = [decide(where, path) for path in paths]
    if all(decision is True for decision in decisions):
        return True
    if any(decision is not False for decision in decisions):
        raise of_a_part_in_nnx(paths[0], decisions[0])
    return False


def _by_any_path(ask: Ask, atom: Atom, path: Path) -> Decision:
    """What an atom says of a tied weight, by any of its paths.

    A tree of bools, or a filter of ``sg.live``, raises for a path that it does not
    know. It need not know all paths of a tied weight, so one of them is enough.
    """
    answer: Decision = None
    error = None
    for each in all_paths(path):
        try:
            answer = ask(atom, each)
        except errors.FlaxSGError as raised:
            if not atom.names_leaves:
                raise
            error = error or raised
        if answer is not None and is_meant(answer):
            return answer
    if error and answer is None:
        raise error
    return answer

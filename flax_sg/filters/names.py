"""Variables by name: a tree of bools, the names of given values, what was derived."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np

from flax_sg import errors
from flax_sg.errors.texts import brief
from flax_sg.filters.expressions import Atom
from flax_sg.filters.hints import nearest
from flax_sg.filters.paths import Owner, Path, names_within

_Bools: TypeAlias = dict[tuple[str, ...], bool]


class BoolTree(Atom):
    """The variables that a tree of bools, in the shape of the variables, marks True.

    A bool stands for everything below it, so a prefix of the tree will do. Every
    variable has to be in the tree. One outside the module that opened the block is
    not in the tree, and is not meant. Leaves in one box (``nn.Partitioned``) share its
    path, and therefore have to agree.

    >>> tree = BoolTree({'gln': True, 'dec': {'kernel': False}})
    >>> tree(Path.of('params', ('gln', 'dense', 'kernel')))
    True

    Attributes:
        bools: the bool of each name in the tree, by the names that lead to it.

    Raises:
        FilterTypeError: if a leaf is no bool.
        FilterValueError: when called, if the tree has no answer for the path.
    """

    names_leaves: ClassVar[bool] = True
    bools: _Bools

    # No dataclass: see ``Predicate``.
    def __init__(self, tree: Mapping[str, Any]) -> None:
        object.__setattr__(self, 'bools', _bools_in(tree, ()))

    @functools.cached_property
    def _value(self) -> Hashable:
        return frozenset(self.bools.items())

    @functools.cached_property
    def _below(self) -> dict[tuple[str, ...], set[bool]]:
        """The bools in each subtree."""
        out: dict[tuple[str, ...], set[bool]] = {}
        for names, take in self.bools.items():
            for depth in range(len(names) + 1):
                out.setdefault(names[:depth], set()).add(take)
        return out

    def _matches(self, path: Path) -> bool:
        if path.outside:
            return False
        names = path.parts
        for depth in range(len(names) + 1):
            if (take := self.bools.get(names[:depth])) is not None:
                return take
        # Below the path are the leaves of one variable, if its value is a dict.
        if names not in self._below:
            raise self._misfit(path)
        return _agreed(self._below[names], names)

    @property
    def takes_nothing(self) -> bool:
        """Whether no leaf of the tree is True."""
        return not any(self.bools.values())

    def _unused(
        self, took: bool, paths: Sequence[Path], owner: Owner
    ) -> errors.FilterValueError | None:
        variables = {path.parts for path in paths if not path.outside}
        known = {parts[:n] for parts in variables for n in range(len(parts) + 1)}
        missing = ['/'.join(names) for names in self.bools if names not in known]
        if not missing:
            return None
        return errors.FilterValueError(
            f'A tree of bools names {without_variable(missing, paths)}.\n'
            'Take that out of the tree, or spell it as the variables.'
        )

    def _misfit(self, path: Path) -> errors.FilterValueError:
        names = ['/'.join(names) for names in self.bools]
        near = ', '.join(map(repr, nearest(path, names))) or 'none'
        depth = 1
        while path.parts[:depth] in self._below:
            depth += 1
        fix = f'Add True or False for {"/".join(path.parts[:depth])!r} to the tree.'
        if depth == 1 and (path.collection,) in self._below.keys() - self.bools.keys():
            fix = f'A tree starts below the collection: give tree[{path.collection!r}].'
        return errors.FilterValueError(
            f'A tree of bools has no answer for the variable {str(path)!r} of the '
            f'collection {path.collection!r}.\nNearest in the tree: {near}.\n{fix}'
        )

    def __reduce__(self) -> Any:
        return BoolTree, (self._tree(),)

    def __repr__(self) -> str:
        return f'BoolTree({self._tree()!r})'

    def _tree(self) -> Any:
        if () in self.bools:
            return self.bools[()]
        out: dict[str, Any] = {}
        for names, take in self.bools.items():
            node = out
            for name in names[:-1]:
                node = node.setdefault(str(name), {})
            node[str(names[-1])] = take
        return out


def _bools_in(tree: Any, names: tuple[str, ...]) -> _Bools:
    """The bools of a tree, Python's own, by name."""
    place = f'at {"/".join(names)!r}' if names else 'at its top'
    out: _Bools = {}
    if isinstance(tree, Mapping):
        for name, below in tree.items():
            if not isinstance(name, str):
                raise errors.FilterTypeError(
                    f'A tree of bools has the key {brief(name)} {place}.\n'
                    'Keys are the names of modules and variables, which are str.'
                )
            out.update(_bools_in(below, (*names, name)))
        return out
    leaves = jax.tree.leaves(tree)
    wrong = [leaf for leaf in leaves if not isinstance(leaf, (bool, np.bool_))]
    if wrong or not leaves:
        raise errors.FilterTypeError(
            f'A tree of bools has {brief((*wrong, tree)[0])} {place}.\n'
            "Give True or False at every leaf: {'gln': True, 'dec': {'bias': False}}.\n"
            'For a tree of arrays write sg.stop_gradient(tree, where).'
        )
    if len(set(leaves)) == 1:
        return {names: bool(leaves[0])}
    for inner, node in names_within(tree):  # A tuple or a dataclass of bools, or a box.
        path = (*names, *inner)
        out[path] = _agreed(map(bool, jax.tree.leaves(node)), path)
    return out


def _agreed(leaves: Iterable[bool], names: Sequence[str]) -> bool:
    """The one value of the leaves of one variable."""
    values = set(leaves)
    if len(values) > 1:
        raise errors.FilterValueError(
            f'A tree of bools has both True and False within {"/".join(names)!r}, '
            'whose leaves share one path.\n'
            'Give it one bool.'
        )
    return True in values


@dataclasses.dataclass(frozen=True, eq=False)
class Names(Atom):
    """The variables that are named, each by its collection and the names of its path.

    Every name has to belong to a variable. A variable outside the module that opened
    the block is not meant.

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
    """The variables that ``sg.live`` or ``of_type`` found.

    Two are equal if they say the same of the same variables.

    Attributes:
        selected: the variables that are meant, by collection and absolute path.
        known: all variables that were looked at.
        source: what found them.
    """

    names_leaves: ClassVar[bool] = True
    selected: frozenset[tuple[str, str]]
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


def without_variable(missing: Sequence[str], paths: Iterable[str]) -> str:
    """Words that name what belongs to no variable, with the nearest variable."""
    near = difflib.get_close_matches(missing[0], list(map(str, paths)), 1, cutoff=0.0)
    more = f' and {len(missing) - 1} more' if len(missing) > 1 else ''
    hint = f' (nearest: {near[0]!r})' if near else ''
    return f'{missing[0]!r}{more}, which is no variable{hint}'


def unused_value(
    missing: Sequence[str], paths: Iterable[str]
) -> errors.UnusedFilterError:
    """A value was given that belongs to no variable."""
    paths = list(map(str, paths))
    first, _, rest = missing[0].partition('/')
    fix = (
        'Spell the names as the variables. If some may be missing, pass '
        "unused='ignore'."
    )
    if rest in paths:
        fix = f'Give values[{first!r}] in place of values.'
    return errors.UnusedFilterError(
        f'nn.substitute has a value for {without_variable(missing, paths)}.\n{fix}'
    )


def _not_known(
    source: str, path: Path, known: Sequence[str]
) -> errors.UnknownNameError:
    """A filter that was derived from a program is asked for another variable."""
    near = difflib.get_close_matches(path.absolute, known, 3, cutoff=0.0)
    return errors.UnknownNameError(
        f'There was no {path.absolute!r} in the parameters that sg.{source} derived '
        'this filter from.\n'
        f'Nearest: {", ".join(map(repr, near)) or "none"}.\n'
        'Derive the filter again, from the tree that it is used for.'
    )

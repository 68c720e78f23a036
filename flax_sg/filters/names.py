"""Variables by name: a tree of bools, given values, what was derived from a model."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from flax import traverse_util

from flax_sg import errors
from flax_sg.errors.nearest import nearest
from flax_sg.errors.texts import brief, listed
from flax_sg.filters.conditions import Condition
from flax_sg.filters.expressions import Atom, Filter, Need
from flax_sg.filters.indices import Mask, Part
from flax_sg.filters.paths import Owner, Path, all_paths, names_in
from flax_sg.internals import tracing
from flax_sg.internals.types import Leaf, PyTree, is_meant


class BoolTree(Atom):
    """The variables that a tree of bools, in the shape of the variables, marks True.

    A bool stands for everything below it, so a prefix of the tree will do. Every
    variable has to be in the tree; None may stand for a module without variables. A
    variable outside the module that opened the block is not in the tree, and is not
    meant. Leaves in one box (``nn.Partitioned``) share its path, and therefore have to
    agree.

    In place of a bool, an array of bools in the shape of the variable marks elements. A
    bool may be traced: it is a condition, for all variables below it.

    >>> from flax_sg import Path
    >>> from flax_sg.filters import BoolTree
    >>> tree = BoolTree({'gln': True, 'dec': {'kernel': False}})
    >>> tree(Path.of('params', ('gln', 'dense', 'kernel')))
    True
    >>> tree = BoolTree({'dec': {'kernel': np.array([True, False])}})
    >>> tree(Path.of('params', ('dec', 'kernel')))
    Part(elements=Mask(bool[2]))

    Attributes:
        bools: the bool of each name in the tree, or the part that an array marks, by
            the names that lead to it.
        shapes: the shape of each array, by the same names.

    Raises:
        FilterTypeError: if a leaf is no bool, and no array of bools.
        ArgumentValueError: when called, if the tree has no answer for the path.
        PartError: when called, if an array has not the shape of its variable.
    """

    names_leaves: ClassVar[bool] = True
    bools: dict[tuple[str, ...], bool | Part]
    shapes: dict[tuple[str, ...], tuple[int, ...]]

    def __init__(self, tree: PyTree) -> None:
        bools: dict[tuple[str, ...], bool | Part] = {}
        shapes: dict[tuple[str, ...], tuple[int, ...]] = {}
        for outer, inner, node in names_in(plain(tree)):
            names = (*outer, *inner)
            leaves = jax.tree.leaves(node)
            decisions = {_decision(leaf) for leaf in leaves if is_bool(leaf)}
            if len(decisions) != 1 or not all(map(is_bool, leaves)):
                raise errors.FilterTypeError(
                    f'A tree of bools has {brief(node)} at {"/".join(names)!r}.\n'
                    'Give True or False for every leaf or for a whole module: '
                    "{'head': True, 'body': {'bias': False}}. Or an array of bools in "
                    'the shape of a leaf.\n'
                    'For a tree of other arrays write sg.stop_gradient(tree, where).'
                )
            [bools[names]] = decisions
            if len(leaves) == 1 and np.ndim(leaves[0]):
                shapes[names] = np.shape(leaves[0])
        object.__setattr__(self, 'bools', bools)
        object.__setattr__(self, 'shapes', shapes)

    @functools.cached_property
    def own_needs(self) -> frozenset[Need]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The names of all variables, and what its arrays of bools need."""
        parts = [x for x in self.bools.values() if isinstance(x, Part)]
        names: frozenset[Need] = frozenset({'names'})
        return names.union(*(part.elements.needs for part in parts))

    @functools.cached_property
    def identity(self) -> Hashable:
        """The answers of the tree, in any order; no array, which caches would keep."""
        return frozenset(
            (
                names,
                decision.elements.identity if isinstance(decision, Part) else decision,
            )
            for names, decision in self.bools.items()
        )

    def matches(self, path: Path) -> bool | Part:
        """What the tree says; raises if it says nothing."""
        if path.outside:
            return False
        for depth in range(len(path.parts) + 1):
            if (decision := self.bools.get(path.parts[:depth])) is not None:
                shape = self.shapes.get(path.parts[:depth])
                if shape and path.array and shape != path.array.shape:
                    raise errors.PartError(
                        f'An array of bools of shape {shape} does not fit '
                        f'{str(path)!r}, an array of shape {path.array.shape}.\n'
                        'Give one in the shape of the variable, or True or False.'
                    )
                return decision
        tops = {names[0] for names in self.bools}
        advice = f'Give tree[{path.collection!r}]: a tree starts below the collection.'
        if path.collection not in tops:
            advice = 'Give True or False for it.'
            if path.parts[0] not in tops:
                advice += (
                    f'\nNothing of {path.parts[0]!r} is in the tree. If it belongs to '
                    'another model, name the model of the tree: nn.Frozen(actor, tree).'
                )
        raise errors.ArgumentValueError(
            f'A tree of bools has no answer for the variable {str(path)!r} of the '
            f'collection {path.collection!r}.\n{advice}'
        )

    @property
    def may_be_empty(self) -> bool:
        """Whether no leaf of the tree is True."""
        return not any(map(is_meant, self.bools.values()))

    def unused(
        self, matches: bool, paths: Sequence[Path], owner: Owner
    ) -> errors.UnusedFilterError | None:
        """The error if a name in the tree belongs to no variable."""
        every = [each for path in paths for each in all_paths(path)]
        variables = {path.parts for path in every if not path.outside}
        prefixes = {parts[:n] for parts in variables for n in range(len(parts) + 1)}
        missing = [names for names in self.bools if names not in prefixes]
        return no_variables('A tree of bools', missing, every) if missing else None

    def __repr__(self) -> str:
        # A tree that is one array has no names.
        alone = self.bools.get(())
        tree = traverse_util.unflatten_dict(self.bools) if alone is None else alone
        return f'BoolTree({tree!r})'


def is_bool(leaf: Leaf) -> bool:
    """Whether a leaf is a bool, or an array of bools."""
    if isinstance(leaf, (np.ndarray, jax.Array)):
        return leaf.dtype == np.bool_
    return isinstance(leaf, (bool, np.bool_))


def _decision(leaf: Leaf) -> bool | Part:
    """What a bool, or an array of bools, says of a variable."""
    if isinstance(leaf, tracing.Tracer):
        return Part(Mask(leaf) if leaf.ndim else Condition(leaf))
    array = np.asarray(leaf)
    if array.all() or not array.any():
        return bool(array.any())
    return Part(Mask(array))


def plain(tree: PyTree) -> Any:
    """A tree with dicts and lists in place of mappings and sequences unknown to JAX."""

    def opened(leaf: Leaf) -> Any:
        if isinstance(leaf, Mapping):
            return {key: plain(value) for key, value in leaf.items()}
        if isinstance(leaf, Sequence) and not isinstance(leaf, (str, bytes)):
            return [plain(value) for value in leaf]
        return leaf

    return jax.tree.map(opened, tree)


@dataclasses.dataclass(frozen=True, eq=False)
class Collection(Atom):
    """The variables of one collection, in a tree of several.

    Paths begin below the collection, so globs cannot name it.

    >>> from flax_sg import Path
    >>> from flax_sg.filters import Collection
    >>> target = Collection('target_params')
    >>> target(Path.of('target_params', ('head', 'kernel')))
    True
    >>> import flax_sg as sg
    >>> agent = {'params': {'w': 1.0}, 'target_params': {'w': 2.0}}
    >>> sg.partition(agent, target & 'w')[0]
    {'params': {'w': ABSENT}, 'target_params': {'w': 2.0}}

    A block looks at the collection 'params', unless ``collections=`` names others.
    """

    name: str

    def matches(self, path: Path) -> bool:
        """Whether the variable is in the collection."""
        return path.collection == self.name

    def _advice(self, paths: Sequence[Path]) -> str:
        collections = sorted({path.collection for path in paths})
        return f'The collections are {", ".join(map(repr, collections))}.'

    def __repr__(self) -> str:
        return f'Collection({self.name!r})'


@dataclasses.dataclass(frozen=True, eq=False)
class Names(Atom):
    """The variables that are named, each by its collection and the names of its path.

    Every name has to belong to a variable. A variable outside the module that opened
    the block is not meant.

    >>> names = Names(frozenset({('params', ('dec', 'kernel'))}))
    >>> [names(Path.of('params', ('dec', name))) for name in ('kernel', 'bias')]
    [True, False]
    """

    own_needs: ClassVar[frozenset[Need]] = frozenset({'names'})
    names: frozenset[tuple[str, tuple[str, ...]]]

    @property
    def may_be_empty(self) -> bool:
        """Whether no name is given: at initialization nothing has a value yet."""
        return not self.names

    def matches(self, path: Path) -> bool:
        """Whether the variable is named."""
        return not path.outside and (path.collection, path.parts) in self.names

    def unused(
        self, matches: bool, paths: Sequence[Path], owner: Owner
    ) -> errors.UnusedFilterError | None:
        """The error if a name belongs to no variable."""
        every = [each for path in paths for each in all_paths(path)]
        variables = [path.variable for path in every if not path.outside]
        met = {(path.collection, path.parts) for path in variables}
        missing = sorted(parts for _, parts in self.names - met)
        return no_variables('A tree of values', missing, every) if missing else None

    def __repr__(self) -> str:
        names = sorted('/'.join(parts) for _, parts in self.names)
        more = f', and {len(names) - 3} more' if len(names) > 3 else ''
        return f'<{", ".join(names[:3])}{more}>'


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Derived(Atom):
    """The variables that ``sg.live`` or another found in a model or a tree.

    In a block of a module, or a wrapper, names begin at this module, as those of a tree
    of bools do. A variable outside of it is not meant.

    Attributes:
        selected: the variables that are meant, each by its collection and its names.
        known: all variables that were looked at.
        source: what found them.
        conditional: those of the selected that a condition stops for a while. Filters
            are equal without it.
    """

    names_leaves: ClassVar[bool] = True
    selected: frozenset[tuple[str, tuple[str, ...]]]
    known: frozenset[tuple[str, tuple[str, ...]]]
    source: str = 'live'
    conditional: frozenset[tuple[str, tuple[str, ...]]] = dataclasses.field(
        default=frozenset(), kw_only=True
    )

    @functools.cached_property
    def identity(self) -> Hashable:
        """The variables, and what found them."""
        return self.selected, self.known, self.source

    @property
    def may_be_empty(self) -> bool:
        """Whether a function may train nothing, or read nothing."""
        return self.source in ('live', 'ahead.reads')

    def matches(self, path: Path) -> bool:
        """Whether the variable is selected; raises if it was not looked at."""
        if path.outside:
            return False
        # ``sg.live`` knows a box as one place, and this path may lead into the box.
        lengths = range(len(path.parts), 0, -1)
        places = ((path.collection, path.parts[:n]) for n in lengths)
        place = next((place for place in places if place in self.known), None)
        if place is None and path.array is None and self._is_above(path):
            return False  # ABSENT, for all that was there.
        if place is None:
            near = nearest(path, ('/'.join(names) for _, names in self.known))
            who = (
                self.source if re.search(r'[.(]', self.source) else f'sg.{self.source}'
            )
            raise errors.UnknownNameError(
                f'There was no {str(path)!r} in the parameters that '
                f'{who} derived this filter from.\n'
                f'Nearest: {", ".join(map(repr, near)) or "none"}.\n'
                'Derive the filter again, from the tree that it is used for.'
            )
        return place in self.selected

    def _is_above(self, path: Path) -> bool:
        """Whether variables that were looked at lie below a path."""
        place, length = (path.collection, path.parts), len(path.parts)
        return any((where, names[:length]) == place for where, names in self.known)

    def __repr__(self) -> str:
        text = f'{self.source}: {_some(self.selected) or "nothing"}'
        if self.conditional:
            text += f', with a condition on {_some(self.conditional)}'
        return f'<{text}>'


def conditional(where: Filter) -> frozenset[tuple[str, tuple[str, ...]]]:
    """The variables in a filter of which ``sg.live`` knows that a condition stops them.

    >>> conditional(~Derived(frozenset(), frozenset()))
    frozenset()
    """
    derived = (atom for atom in where.atoms if isinstance(atom, Derived))
    return frozenset().union(*(atom.conditional for atom in derived))


def _some(variables: Iterable[tuple[str, tuple[str, ...]]]) -> str:
    """The paths of the first three of some variables."""
    names = sorted('/'.join(names) for _, names in variables)
    return listed([*map(repr, names)])


def no_variables(
    who: str, missing: Sequence[tuple[str, ...]], paths: Iterable[str]
) -> errors.UnusedFilterError:
    """A tree has names that belong to no variable."""
    path, texts = '/'.join(missing[0]), [*map(str, paths)]
    outside = f'/{path.lstrip("/")}'
    if outside in texts:
        return errors.UnusedFilterError(
            f'{who} has a value for {path!r}, which lies outside of the module.',
            '',
            "It names the module's own variables. For others give a function "
            '(path, value) -> value; or open nn.substitute(tree) in the module around '
            'them, where they have names.',
        )
    near = nearest(path, texts, 1)
    if path in near and '/' in ''.join(missing[0]):
        return errors.UnusedFilterError(
            f'{who} is flat: it has {path!r} for nested names.',
            '',
            "Nest it: flax.traverse_util.unflatten_dict(tree, sep='/').",
        )
    more = f' and {len(missing) - 1} more' if len(missing) > 1 else ''
    hint = f' (nearest: {near[0]!r})' if near else ''
    return errors.UnusedFilterError(
        f'{who} has a value for {path!r}{more}, which is no variable{hint}.',
        '',
        'Spell names as the variables, from below the collection. If some may be '
        "missing, pass unused='ignore'.",
    )

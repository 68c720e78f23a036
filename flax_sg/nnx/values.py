"""The values that ``nnx.substitute`` gives to a model, for each of its Variables once.

Model and values are walked through together, by all paths. So weights may be tied in
one of the two and not in the other: a Variable that is given two values is an error.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
from flax import nnx

from flax_sg import errors, filters
from flax_sg.filters.paths import name_of, shape_and_dtype
from flax_sg.internals.types import Kind, PyTree
from flax_sg.rules import rules, substitutes
from flax_sg.trees.leaf_types import is_array, is_variable
from flax_sg.trees.leaves import ABSENT
from flax_sg.trees.levels import one_level
from flax_sg.trees.nnx_paths import Names
from flax_sg.trees.nnx_walks import Leaf, Walk


def other_values(
    walk: Walk, values: PyTree, kind: Kind, where: Any = ABSENT, unused: str = 'raise'
) -> rules.Rewrite:
    """The rule by which a model reads other values.

    A value is of the kind of the Variable that it is for, so states of optimizers and
    pure states will do. Others are left out.

    Args:
        walk: the model.
        values: a model, a state, or a tree with some of both.
        kind: an NNX filter.
        where: what is read as other values; by default what has some.
        unused: as for filters.
    """
    value_at = _values(walk, values, kind)
    entries = {('params', names): raw(value) for names, value in value_at.items()}
    if not entries:
        raise substitutes.no_values('a tree without a value')
    where = filters.Names(frozenset(entries)) if where is ABSENT else where
    rule = substitutes.FromTree(entries)
    return rules.Rewrite(filters.as_filter(where), rule, unused=unused)


def _values(walk: Walk, values: PyTree, kind: Kind) -> dict[Names, Any]:
    """Values by the first path of each Variable, and those for no path of the model.

    An error in the place of a value is for whoever reads it.
    """
    is_kind, targets = nnx.filterlib.to_predicate(kind), _Given(walk, values)
    value_at = {
        leaf.names: targets.value_for(leaf)
        for leaf in walk.leaves.values()
        if is_kind(leaf.keys, leaf.value)
    }
    target = Walk(values)
    for leaf in target.leaves.values():
        # A plain tree has arrays where the model has Variables: they have no kind.
        is_plain = not target.modules and not isinstance(leaf.value, nnx.Variable)
        is_meant = is_plain or is_kind(leaf.keys, leaf.value)
        if is_meant and walk.ways.at(leaf.names) is None:
            value_at[leaf.names] = leaf.value
    return {names: value for names, value in value_at.items() if value is not None}


class _Given:
    """What is given for the Variables of a model, at all paths of each.

    Args:
        walk: the model.
        values: a model, a state, or a tree with some of both.
    """

    def __init__(self, walk: Walk, values: PyTree) -> None:
        self._read = _reader(values)
        self._paths = {
            leaf: [tuple(map(str, keys)) for keys in walk.ways.every[key]]
            for key, leaf in walk.leaves.items()
        }
        # For each Variable the paths that the values tell of, and the values there.
        self._given = {
            leaf: [(names, self._read(names)) for names in paths if self._tells(names)]
            for leaf, paths in self._paths.items()
        }
        pairs = itertools.chain(*self._given.values())
        self._forms = {_form(value) for _, value in pairs}

    def value_for(self, leaf: Leaf) -> Any:
        """The value for a Variable, or an error; None for the Variable's own."""
        if pairs := self._given[leaf]:
            return _common_value(pairs)
        if self._is_left_out(leaf):
            return errors.StructureError(
                f'nnx.substitute: the state has no value for {"/".join(leaf.names)!r}, '
                'beside others of its module.\n'
                'A state has one path of a tied weight, and the view would read the '
                "model's own at the other.\n"
                'Give the target itself, or name what is replaced: where=.'
            )
        return None

    def _tells(self, names: Names) -> bool:
        """Whether the values tell what is read at a path.

        A model tells it of all its paths, with None where it has nothing: then weights
        that are tied in the one model are not tied in the other. A tree or a state
        tells it of what it has.
        """
        return self._read(names) is not None or self._is_in(names, nnx.Pytree)

    def _is_left_out(self, leaf: Leaf) -> bool:
        """Whether a Variable may have its value at another path of the target.

        A state has one path of each Variable, so it lacks the other paths of a weight
        that is tied in the target. Then one of the given values has the Variable's
        shapes and dtypes.
        """
        # An array in no Variable is tied to none.
        if not is_variable(leaf.value) or _form(leaf.value) not in self._forms:
            return False
        return any(map(self._lacks, self._paths[leaf]))

    def _lacks(self, names: Names) -> bool:
        """Whether a state has values for a module, and none at one of its paths."""
        module = self._read(names[:-1])
        if not isinstance(module, Mapping) or not self._is_in(names, nnx.State):
            return False
        return any(is_array(value) or is_variable(value) for value in module.values())

    def _is_in(self, names: Names, cls: type) -> bool:
        """Whether an object of a class is at a path, or on the way to it."""
        on_the_way = (self._read(names[:n]) for n in range(len(names) + 1))
        return any(isinstance(node, cls) for node in on_the_way)


def _reader(root: PyTree) -> Callable[[Names], Any]:
    """A function that reads what a model or a tree has at a path; None for nothing."""

    @functools.cache
    def below(names: Names) -> dict[str, Any]:
        node = read(names)
        pairs, _ = one_level(vars(node) if isinstance(node, nnx.Pytree) else node)
        return {name_of(keys[0]): value for keys, value in pairs if keys}

    @functools.cache
    def read(names: Names) -> Any:
        return below(names[:-1]).get(names[-1]) if names else root

    return read


def raw(value: PyTree) -> PyTree:
    """What is stored in a Variable; an array as it is."""
    return value.get_raw_value() if isinstance(value, nnx.Variable) else value


def _form(value: PyTree) -> Hashable:
    """The shapes and dtypes of the arrays in a value."""
    return tuple(map(shape_and_dtype, jax.tree.leaves(raw(value))))


def _common_value(pairs: list[tuple[Names, Any]]) -> Any:
    """The value that is given at all paths of a Variable; an error if they differ."""
    (first, value), *later = pairs
    for names, other in later:
        if not _is_same(value, other):
            without = [path for path, new in pairs if new is None]
            why = f'{"/".join(without[0])!r} has none' if without else 'they differ'
            path, second = map('/'.join, (first, names))
            return errors.StructureError(
                f'nnx.substitute: {path!r} and {second!r} are one Variable of the '
                f'model, with one value. Of the values {why}.\n'
                'Tie them in the values, too, or give a tree with one of them.'
            )
    return value


def _is_same(value: PyTree, other: PyTree) -> bool:
    """Whether two values are the same arrays."""
    old, new = jax.tree.leaves(raw(value)), jax.tree.leaves(raw(other))
    return len(old) == len(new) and all(map(operator.is_, old, new))

"""The values that ``nnx.substitute`` gives to a model, for each of its Variables once.

Model and values are walked through together, by all paths. So weights may be tied in
one of the two and not in the other: a Variable that is given two values is an error.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx

from flax_sg import errors, filters
from flax_sg.filters.paths import name_of, shape_and_dtype
from flax_sg.rules import rules, substitutes
from flax_sg.trees.kinds import is_array, is_variable
from flax_sg.trees.leaves import ABSENT
from flax_sg.trees.levels import one_level
from flax_sg.trees.nnx_paths import Names
from flax_sg.trees.nnx_walks import Leaf, Walk


def other_values(
    walk: Walk, values: Any, kind: Any, where: Any = ABSENT, unused: str = 'raise'
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
    found = _values(walk, values, kind)
    entries = {('params', names): raw(x) for names, x in found.items()}
    if not entries:
        raise substitutes.no_values('a tree without a value')
    where = filters.Names(frozenset(entries)) if where is ABSENT else where
    rule = substitutes.FromTree(entries)
    return rules.Rewrite(filters.as_filter(where), rule, unused=unused)


def _values(walk: Walk, values: Any, kind: Any) -> dict[Names, Any]:
    """Values by the first path of each Variable, and what has none in the model.

    An error in the place of a value is for whoever reads it.
    """
    is_kind, target = nnx.filterlib.to_predicate(kind), Walk(values)
    theirs, given = _reader(values), dict[Leaf, list[tuple[Names, Any]]]()
    lacking = set[Leaf]()

    paths = walk.ways.every
    for leaf, keys in ((walk.leaves[n], keys) for n in paths for keys in paths[n]):
        names = tuple(map(str, keys))
        value, around = theirs(names), theirs(names[:-1])
        # A model has a value for each Variable; a tree may have some.
        if value is not None or _is_in(theirs, names, nnx.Pytree):
            given.setdefault(leaf, []).append((names, value))
        elif isinstance(around, Mapping) and _is_in(theirs, names, nnx.State):
            beside = around.values()
            if any(is_array(x) or is_variable(x) for x in beside):
                lacking.add(leaf)
    forms = {_form(value) for several in given.values() for _, value in several}
    found: dict[Names, Any] = {}
    for leaf in walk.leaves.values():
        if not is_kind(leaf.keys, leaf.value):
            continue
        if leaf in given:
            found[leaf.names] = _one_of(given[leaf])
        elif leaf in lacking and _form(leaf.value) in forms:
            # It may be tied in the target: a state has one path of such a weight.
            found[leaf.names] = errors.StructureError(
                f'nnx.substitute: the state has no value for {"/".join(leaf.names)!r}, '
                'beside others of its module.\n'
                'A state has one path of a tied weight, and the view would read the '
                "model's own at the other.\n"
                'Give the target itself, or name what is replaced: where=.'
            )
    for leaf in target.leaves.values():
        of_tree = not (target.modules or isinstance(leaf.value, nnx.Variable))
        is_asked = of_tree or is_kind(leaf.keys, leaf.value)
        if is_asked and walk.ways.at(leaf.names) is None:
            found[leaf.names] = leaf.value
    return {names: value for names, value in found.items() if value is not None}


def _reader(root: Any) -> Callable[[Names], Any]:
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


def _is_in(read: Callable[[Names], Any], names: Names, kinds: Any) -> bool:
    """Whether one of these kinds stands at a path, or on the way."""
    way = (read(names[:n]) for n in range(len(names) + 1))
    return any(isinstance(node, kinds) for node in way)


def raw(value: Any) -> Any:
    """What is stored in a Variable; an array as it is."""
    return value.get_raw_value() if isinstance(value, nnx.Variable) else value


def _form(value: Any) -> Any:
    return tuple(map(shape_and_dtype, jax.tree.leaves(raw(value))))


def _one_of(several: list[tuple[Names, Any]]) -> Any:
    """The value that all paths of a Variable have; an error if they differ."""
    first, value = several[0]
    old = jax.tree.leaves(raw(value))
    for names, other in several:
        new = jax.tree.leaves(raw(other))
        if len(old) != len(new) or not all(map(operator.is_, old, new)):
            lacks = next((of for of, x in several if x is None), None)
            one, two = map('/'.join, (first, names))
            which = f'{"/".join(lacks)!r} has none' if lacks else 'they differ'
            return errors.StructureError(
                f'nnx.substitute: {one!r} and {two!r} are one Variable of the model, '
                f'with one value. Of the values {which}.\n'
                'Tie them in the values, too, or give a tree with one of them.'
            )
    return value

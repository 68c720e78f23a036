"""The values that ``nnx.substitute`` gives to a model, for each of its Variables once.

Model and values are walked through together, by all paths. So weights may be tied in
one of the two and not in the other: a Variable that is given two values is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx, traverse_util

from flax_sg import errors
from flax_sg.filters.paths import shape_and_dtype
from flax_sg.graphs.walks import Leaf, Names, Walk


def values_of(walk: Walk, values: Any, kind: Any) -> dict[str, Any]:
    """Nested dicts of values, by the first path of each Variable.

    A value is of the kind of the Variable that it is for, so states of optimizers and
    pure states will do. Others are left out.

    Args:
        walk: the model.
        values: a model, a state, or a tree with some of both.
        kind: an NNX filter.

    Returns:
        The values. An error in the place of one is for whoever reads it.
    """
    is_kind, target = nnx.filterlib.to_predicate(kind), Walk([values])
    given: dict[Leaf, list[tuple[Names, Any]]] = {}
    found: dict[Names, Any] = {}
    met: dict[tuple[int, int], Any] = {}
    gaps: list[Leaf] = []

    def below(node: Any) -> dict[str, Any]:
        if isinstance(node, nnx.Pytree):
            return target.below(node, lambda x: x.value if type(x) is Leaf else x)
        pairs = node.items() if isinstance(node, Mapping) else enumerate(node or ())
        return {str(name): value for name, value in pairs}

    def meet(names: Names, mine: Any, theirs: Any, whole: bool) -> None:
        if type(mine) is Leaf:
            given.setdefault(mine, []).append((names, theirs))
        elif not isinstance(theirs, (nnx.Pytree, Mapping, list, tuple, type(None))):
            found[names] = None  # There is no Variable of this name.
        elif (id(mine), id(theirs)) not in met:
            met[id(mine), id(theirs)] = mine, theirs
            own, others = walk.below(mine), below(theirs)
            # A model has a value for each Variable; a tree may have some.
            whole = whole or isinstance(theirs, nnx.Pytree)
            if isinstance(theirs, nnx.State) and any(
                type(own.get(name)) is Leaf for name in others
            ):
                lacking = (own[name] for name in own.keys() - others.keys())
                gaps.extend(leaf for leaf in lacking if type(leaf) is Leaf)
            for name in dict.fromkeys([*others, *(own if whole else ())]):
                value, plain = others.get(name), not whole
                if name in own:
                    meet((*names, name), own[name], value, whole)
                elif any(
                    is_kind(x.keys, x.value)
                    or (plain and not isinstance(x.value, nnx.Variable))
                    for x in Walk([value]).leaves
                ):
                    found[(*names, name)] = None

    meet((), walk.model, values, False)
    for leaf, several in given.items():
        value = _one_of(several) if is_kind(leaf.keys, leaf.value) else None
        if value is not None:
            found[leaf.names] = as_one(raw(value))
    forms = {_form(value) for several in given.values() for _, value in several}
    for leaf in gaps:
        is_lacking = leaf not in given and is_kind(leaf.keys, leaf.value)
        # It may be tied in the target: a state has one path of such a weight.
        if is_lacking and _form(leaf.value) in forms:
            found[leaf.names] = errors.StructureError(
                f'nnx.substitute: the state has no value for {"/".join(leaf.names)!r}, '
                'beside others of its module.\n'
                'A state has one path of a tied weight, and the view would read the '
                "model's own at the other.\n"
                'Give the target itself, or name what is replaced: where=.'
            )
    return traverse_util.unflatten_dict(found)


def raw(value: Any) -> Any:
    """What is stored in a Variable; an array as it is."""
    return value.get_raw_value() if isinstance(value, nnx.Variable) else value


def as_one(value: Any) -> Any:
    """What a Variable holds; a dict as one value, which nests no Variables."""
    return (value,) if isinstance(value, Mapping) else value


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

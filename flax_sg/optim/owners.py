"""Which parameter each value in a state of an optimizer belongs to.

The names of a parameter stand below those of a tree that is like the parameters:
'0/mu/enc/w' is Adam's 'mu' of 'enc/w'. In the state of a freeze, these are the
parameters that the freeze was given.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from flax_sg import filters
from flax_sg.internals.types import Leaf, PyTree, Transformation
from flax_sg.optim.selections import (
    Names,
    Selection,
    marked,
    names_of,
    selections,
)
from flax_sg.trees.leaves import ABSENT, Leaves, is_differentiable, shape_of
from flax_sg.trees.rows import shape_of_part

# States that remember steps of all parameters together: what they remember of some of
# them is of no use to other ones.
_OF_ONE_SELECTION = (
    'ScaleByLBFGSState',
    'ScaleByBacktrackingLinesearchState',
    'ScaleByZoomLinesearchState',
    'ScaleByOptimisticGradientState',
)


class Owner(NamedTuple):
    """The parameter that a value of a state belongs to.

    Attributes:
        name: the path of the parameter; the value's own place if there is none.
        part: the part of the state that has the value, or the tree that is like the
            parameters: a count stands there beside moments.
        pattern: the names of the value, with '*' in place of those of the parameter.
        selection: the selection of the innermost freeze whose state has the value.
        parameter: the index of the parameter in the selection; -1 for none.
    """

    name: str
    part: Names
    pattern: Names
    selection: Selection
    parameter: int = -1

    @property
    def trained(self) -> Any:
        """The trained part of the parameter."""
        return self.parameter >= 0 and self.selection.trained[self.parameter]

    @property
    def names(self) -> Names:
        """The names of the parameter; () if there is none."""
        return self.selection.names[self.parameter] if self.parameter >= 0 else ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter; () if there is none."""
        return self.selection.shapes[self.parameter] if self.parameter >= 0 else ()

    @property
    def some_trained(self) -> Names:
        """The names of a trained parameter of the selection; () if there is none."""
        pairs = zip(self.selection.names, self.selection.trained, strict=True)
        return next((names for names, part in pairs if filters.is_meant(part)), ())

    def owns(self, value: Leaf) -> bool:
        """Whether a value belongs to a parameter.

        A scalar may count for all parameters, unless its parameter is a scalar.
        """
        return self.parameter >= 0 and not shape_of(value) == () != self.shape

    def is_as_long(self, value: Leaf) -> bool:
        """Whether a value is an array as long as all that is trained."""
        if len(shape_of(value)) != 1:
            return False
        rows = zip(self.selection.trained, self.selection.shapes, strict=True)
        shapes = (shape_of_part(*row) for row in rows if filters.is_meant(row[0]))
        size = sum(map(math.prod, shapes))
        return shape_of(value) == (size,) != (1,) and is_differentiable(value)


def owners_of(
    tx: Transformation, leaves: Leaves, every: Sequence[Names]
) -> dict[Names, Owner]:
    """The owners of the values of some states of a transformation.

    Args:
        tx: the transformation.
        leaves: the parameters.
        every: the names of the values.
    """
    everything = Selection.of(leaves, [True] * len(leaves.values))
    freezes = {(): everything, **selections(tx, leaves.restore(leaves.values))}
    inside: dict[Names, list[Names]] = {top: [] for top in freezes}
    for names in every:  # The innermost freeze whose state has the value decides.
        tops = (names[:n] for n in range(len(names), -1, -1))
        inside[next(top for top in tops if top in freezes)].append(names)
    owners: dict[Names, Owner] = {}
    for top, selection in freezes.items():
        indices = {path: n for n, path in enumerate(selection.names)}
        readings = {
            names: [*_readings(names, len(top), indices)] for names in inside[top]
        }
        votes = collections.Counter(
            names[: reading.first]
            for names, each in readings.items()
            for reading in each
            if reading.last == len(names)
        )
        for names, each in readings.items():
            owners[names] = _owner_of(names, each, votes, selection)
    return owners


def vectors_of(
    tx: Transformation,
    leaves: Leaves,
    pairs: Sequence[Any],
    owners: Mapping[Names, Owner],
) -> set[Names]:
    """The places of the arrays that ``optax.flatten`` made of all parameters.

    They are as long as all that is trained, and shorter without one of these: the
    vectors of ``optax.contrib.mechanize`` are as long with any parameters.
    """
    without = functools.cache(functools.partial(_shapes_without, tx, leaves))
    return {
        names
        for names, value in pairs
        if owners[names].parameter < 0
        and owners[names].is_as_long(value)
        and without(owners[names].some_trained).get(names) != np.shape(value)
    }


def _shapes_without(
    tx: Transformation, leaves: Leaves, parameter: Names
) -> dict[Names, Any]:
    """The shapes in a state without one of the parameters, if it can be made."""
    keys = [*map(names_of, leaves.key_paths)]
    left = (
        ABSENT if names == parameter else leaf
        for names, leaf in zip(keys, leaves.values, strict=True)
    )
    try:
        with marked():  # Otherwise a filter of the parameter that is left out raises.
            state = jax.eval_shape(tx.init, leaves.treedef.unflatten(left))
    except (ValueError, TypeError):  # ``tx`` needs this parameter.
        return {}
    return {names: value.shape for names, value in values_of(state)}


class _Reading(NamedTuple):
    """A run of the names of a value that is the names of a parameter.

    Attributes:
        first: where they begin.
        last: where they end.
        parameter: the index of the parameter.
    """

    first: int
    last: int
    parameter: int


def _readings(
    names: Names, start: int, indices: dict[Names, int]
) -> Iterator[_Reading]:
    for first in range(start, len(names) + 1):
        for last in range(first, len(names) + 1):
            parameter = indices.get(names[first:last])
            if parameter is not None:
                yield _Reading(first, last, parameter)


def _owner_of(
    names: Names,
    readings: Sequence[_Reading],
    votes: collections.Counter[Names],
    selection: Selection,
) -> Owner:
    """The owner of a value: of several readings the most likely one.

    'mu/w' may be the parameter 'w' below Adam's 'mu', or a parameter of this name.
    Where the names in front lead to more parameters, they are those of a tree.
    """

    def likely(reading: _Reading) -> Any:
        # The last end counts: 'b/a' is not 'a'.
        vote = votes[names[: reading.first]]
        is_trained = filters.is_meant(selection.trained[reading.parameter])
        return reading.last, vote, is_trained, -reading.first, reading.parameter

    readings = [reading for reading in readings if votes[names[: reading.first]]]
    if not readings:
        return Owner('/'.join(names), names[:-1], names, selection)
    first, last, parameter = max(readings, key=likely)
    pattern = (*names[:first], '*', *names[last:])
    part = names[: max(first - 1, 0)]
    return Owner(str(selection.paths[parameter]), part, pattern, selection, parameter)


def values_of(state: PyTree) -> list[tuple[Names, Any]]:
    """The values of a state, with the names that lead to them."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_of_one_selection)
    return [(names_of(keys), value) for keys, value in pairs]


def is_of_one_selection(node: object) -> bool:
    """Whether a node of a state remembers steps of all parameters; it is one value."""
    return type(node).__name__ in _OF_ONE_SELECTION

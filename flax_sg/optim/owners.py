"""Which parameter each value in a state of an optimizer belongs to.

Naive attempts look for the names of parameters in those of a value. But a parameter may
be named 'mu', and each name is that of a parameter that is one array. Here
``optax.tree_map_params`` tells which trees of the state are like the parameters: below
these, the names of a value begin with those of its parameter. Inside the state of a
freeze, the parameters are those that the freeze was given.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from flax_sg.internals.types import PyTree, Transformation
from flax_sg.optim.selections import Names, Selection, names_of, structure_of
from flax_sg.trees.leaves import Leaves, is_differentiable, shape_of

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
        place: the names of the value.
        tree: the place of the tree that is like the parameters, and has the value; None
            if the value belongs to no parameter, as a count of steps.
        selection: the selection of the innermost freeze whose state has the value.
        parameter: the index of the parameter in the selection; -1 for none.
        is_known: whether it is known to whom the value belongs.
    """

    place: Names
    tree: Names | None
    selection: Selection
    parameter: int
    is_known: bool

    @property
    def name(self) -> str:
        """The path of the parameter; the value's own place if there is none."""
        if self.parameter < 0:
            return '/'.join(self.place)
        return str(self.selection.paths[self.parameter])

    @property
    def part(self) -> Names:
        """The part of the state that has the value: a count stands beside moments."""
        return (self.place if self.tree is None else self.tree)[:-1]

    @property
    def is_hyperparameter(self) -> bool:
        """Whether ``optax.inject_hyperparams`` was given the value."""
        return self.tree is None and 'hyperparams' in self.place

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


def owners_of(
    tx: Transformation, leaves: Leaves, places: Iterable[Names]
) -> dict[Names, Owner]:
    """The owners of the values of some states of a transformation.

    Args:
        tx: the transformation.
        leaves: the parameters.
        places: the names of the values.
    """
    freezes, trees, vectors = structure_of(tx, leaves.restore(leaves.values))
    everything = Selection.of(leaves, [True] * len(leaves.values))
    owners: dict[Names, Owner] = {}
    for place in places:
        tops = _beginnings(place)  # The innermost freeze that has the value decides.
        selection = next((freezes[top] for top in tops if top in freezes), everything)
        tree = next((top for top in tops if top in (trees or ())), None)
        inside = [] if tree is None else _beginnings(place[len(tree) :])
        indices = (selection.indices[x] for x in inside if x in selection.indices)
        parameter = next(indices, -1)
        is_shared = trees is not None and tree is None and place not in vectors
        is_known = is_shared or parameter >= 0
        owners[place] = Owner(place, tree, selection, parameter, is_known)
    return owners


def _beginnings(names: Names) -> list[Names]:
    """The names, without the last one, and so on."""
    return [names[:n] for n in range(len(names), -1, -1)]


def values_of(state: PyTree) -> list[tuple[Names, Any]]:
    """The values of a state, with the names that lead to them."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_of_one_selection)
    return [(names_of(keys), value) for keys, value in pairs]


def is_of_one_selection(node: object) -> bool:
    """Whether a node of a state remembers steps of all parameters; it is one value."""
    return type(node).__name__ in _OF_ONE_SELECTION


def remembers(value: object) -> bool:
    """Whether a value of all parameters is more than a count, or a random key."""
    is_array = shape_of(value) != () and is_differentiable(value)
    return is_array or is_of_one_selection(value)

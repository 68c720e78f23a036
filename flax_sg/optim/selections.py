"""Which freezes are in a transformation, and which part of its state is of which.

Naive attempts look at the outermost transformation alone, or through the wrappers that
they know. Here ``tx.init`` is traced on shapes, in a context in which each freeze marks
its state. So every wrapper is seen through: the mark stands where it puts the state.
Which trees in the state are like the parameters, ``optax.tree_map_params`` tells.

In the same context a freeze is told whether an outer freeze has cut rows: then its own
filter may name no rows, since it would count them in what is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
import optax
from jax.tree_util import GetAttrKey

from flax_sg.filters.paths import Path, name_of
from flax_sg.internals import tracing
from flax_sg.internals.types import Decision, PyTree, Transformation
from flax_sg.trees.leaves import Leaves, shape_of
from flax_sg.trees.rows import Rows, shape_of_part

# The names that lead to a value of a state.
Names: TypeAlias = tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Selection:
    """What a freeze trains of the parameters that it is given.

    Attributes:
        paths: the path of each parameter.
        names: the names of its key path.
        shapes: its shape, of the whole array.
        trained: whether it is trained, or which rows or part of the whole array.
    """

    paths: list[Path]
    names: list[Names]
    shapes: list[tuple[int, ...]]
    trained: Sequence[Decision]

    @classmethod
    def of(cls, leaves: Leaves, trained: Sequence[Decision]) -> Selection:
        """The selection of some parameters; ``leaves`` are whole arrays."""
        names = [*map(names_of, leaves.key_paths)]
        return cls(leaves.paths, names, [*map(shape_of, leaves.values)], trained)

    @functools.cached_property
    def indices(self) -> dict[Names, int]:
        """The index of each parameter, by its names."""
        return {names: n for n, names in enumerate(self.names)}

    def within(self, outer: Selection) -> Selection:
        """The selection for whole arrays, if an outer freeze has cut some rows."""
        cut = {
            names: (rows, shape)
            for names, rows, shape in zip(
                outer.names, outer.trained, outer.shapes, strict=True
            )
            if isinstance(rows, Rows)
        }
        shapes, trained = [*self.shapes], [*self.trained]
        for n, names in enumerate(self.names if cut else ()):
            rows, shape = cut.get(names, (None, ()))
            if rows and shapes[n] == shape_of_part(rows, shape):
                shapes[n] = shape
                trained[n] = False if trained[n] is False else rows
        return dataclasses.replace(self, shapes=shapes, trained=trained)


def marks() -> bool:
    """Whether a freeze that runs now marks its state."""
    return tracing.freezes.value[0]


def rows_are_cut() -> bool:
    """Whether a freeze outside of the one that runs now has cut rows of an array."""
    return tracing.freezes.value[1]


def marked() -> contextlib.AbstractContextManager[Any]:
    """A context in which each freeze marks its state, and no filter has to match."""
    return tracing.freezes((True, rows_are_cut()))


def inside(trained: Sequence[Decision]) -> contextlib.AbstractContextManager[Any]:
    """Tells the freezes in the transformation of a freeze whether it cuts rows.

    Args:
        trained: for each parameter whether it is trained, or which rows or part.
    """
    cuts = any(isinstance(part, Rows) for part in trained)
    return tracing.freezes((marks(), cuts or rows_are_cut()))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=('value',),
    meta_fields=('selection',),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Marked:
    """The state of a freeze, and its selection. JAX's key of the state has no name."""

    value: PyTree
    selection: Selection


class Structure(NamedTuple):
    """What the state of a transformation is made of, by the names that lead to it.

    Attributes:
        freezes: what each freeze in the transformation selects, by its state.
        trees: the places of the trees that are like the parameters; None if
            ``optax.tree_map_params`` cannot tell, as ``tx.init`` has to see arrays.
        vectors: the places of other arrays whose shapes depend on the parameters.
    """

    freezes: dict[Names, Selection]
    trees: set[Names] | None
    vectors: set[Names]


def structure_of(tx: Transformation, params: PyTree) -> Structure:
    """The freezes and the trees in the state of a transformation.

    >>> import jax.numpy as jnp, optax, flax_sg as sg
    >>> params = {'a': jnp.ones(2), 'b': jnp.ones(2)}
    >>> tx = optax.chain(optax.clip(1.0), sg.freeze(optax.adam(0.1), 'a'))
    >>> structure = structure_of(tx, params)
    >>> [(names, each.trained) for names, each in structure.freezes.items()]
    [(('1',), [False, True])]
    >>> sorted(structure.trees)
    [('1', '0', 'mu'), ('1', '0', 'nu')]
    """
    found = Structure({}, None, set())

    def init() -> None:
        nonlocal found
        state = tx.init(params)
        trees, vectors = _trees(tx, _unmarked(state))
        found = Structure(dict(_freezes(state)), trees, vectors)

    with marked():
        try:
            jax.eval_shape(init)
        except jax.errors.JAXTypeError:  # ``tx.init`` asks for values.
            init()
    return found


def _freezes(
    state: PyTree, top: Names = (), outer: Selection | None = None
) -> Iterator[tuple[Names, Selection]]:
    """The place of each freeze in a state, and what it selects of whole arrays."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_marked)
    for keys, node in pairs:
        if _is_marked(node):
            names, own = top + names_of(keys), node.selection
            selection = own if outer is None else own.within(outer)
            yield names, selection
            yield from _freezes(node.value, names, selection)


def _trees(tx: Transformation, state: PyTree) -> tuple[set[Names] | None, set[Names]]:
    """The places of the trees that are like the parameters, and of vectors."""
    others: list[Any] = []  # What belongs to no parameter, without parameters.

    def init(params: PyTree) -> PyTree:
        begun = _unmarked(tx.init(params))
        others.extend(jax.tree.leaves(begun))
        return begun

    try:
        kinds = optax.tree_map_params(
            init,
            lambda tree: 'tree',
            state,
            transform_non_params=lambda value: (
                'count' if np.shape(others.pop(0)) == np.shape(value) else 'vector'
            ),
            is_leaf=lambda tree: True,  # A tree counts as one value.
        )
    except Exception:  # ``tx.init`` is given a tree without arrays, and may refuse it.
        return None, set()
    pairs = jax.tree_util.tree_leaves_with_path(kinds)
    trees, vectors = (
        {names_of(keys) for keys, kind in pairs if kind == wanted}
        for wanted in ('tree', 'vector')
    )
    return trees, vectors


def _unmarked(state: PyTree) -> PyTree:
    return jax.tree.map(
        lambda node: _unmarked(node.value) if _is_marked(node) else node,
        state,
        is_leaf=_is_marked,
    )


def _is_marked(node: object) -> bool:
    return isinstance(node, Marked)


def names_of(keys: Iterable[Any]) -> Names:
    """The names of a key path; a box, or a Variable of NNX, is its value."""
    return tuple(name_of(key) for key in keys if key != GetAttrKey('value'))

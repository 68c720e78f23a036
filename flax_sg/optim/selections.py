"""Which freezes a transformation holds, and which part of its state is of which.

Naive attempts look at the outermost transformation alone, or through the wrappers that
they know. Here ``tx.init`` is traced on shapes, in a context in which each freeze marks
its state. So every wrapper is seen through: the mark stands where it puts the state.

In the same context a freeze is told which rows the freezes around it have cut. Indices
of its own filter are those of the whole array.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.tree_util import GetAttrKey

from flax_sg.filters.paths import Path, name_of
from flax_sg.internals import tracing
from flax_sg.trees.leaves import Leaves, leaves_of, shape_of
from flax_sg.trees.rows import Choice, shape_of_part

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
    trained: Sequence[Any]

    @classmethod
    def of(cls, leaves: Leaves, trained: Sequence[Any]) -> Selection:
        """The selection of some parameters; ``leaves`` are whole arrays."""
        names = [*map(names_of, leaves.key_paths)]
        return cls(leaves.paths, names, [*map(shape_of, leaves.values)], trained)


class Around(NamedTuple):
    """What a freeze is told.

    Attributes:
        marks: whether it marks its state.
        rows: for arrays that are cut already: the place, the rows, the whole shape.
    """

    marks: bool = False
    rows: tuple[tuple[Any, Choice, tuple[int, ...]], ...] = ()

    def whole(self, leaves: Leaves) -> tuple[Leaves, list[Choice | None]]:
        """The leaves with whole arrays for cut ones, and the rows that these have."""
        known = {place: (rows, shape) for place, rows, shape in self.rows}
        cut: list[Choice | None] = [None] * len(leaves.values)
        values = [*leaves.values]
        for n, (path, leaf) in enumerate(leaves if known else ()):
            rows, shape = known.get(path.place, (None, ()))
            if rows and shape_of(leaf) == shape_of_part(rows, shape):
                cut[n], values[n] = rows, jax.ShapeDtypeStruct(shape, leaf.dtype)
        return leaves_of(leaves.restore(values)) if any(cut) else leaves, cut


def around() -> Around:
    """What a freeze is told where it runs now."""
    return Around(*tracing.freezes.value)


def inside(
    whole: Leaves, trained: Sequence[Any]
) -> contextlib.AbstractContextManager[Any]:
    """Tells the freezes in the transformation of a freeze which rows it has cut.

    Args:
        whole: the parameters, as whole arrays.
        trained: for each whether it is trained, or which rows or part.
    """
    rows = [
        (path.place, takes, shape_of(leaf))
        for takes, (path, leaf) in zip(trained, whole, strict=True)
        if isinstance(takes, Choice)
    ]
    now = around()
    return tracing.freezes((now.marks, tuple(rows) or now.rows))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=('value',),
    meta_fields=('selection',),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Marked:
    """The state of a freeze, with what it selects. The key of the state has no name."""

    value: Any
    selection: Selection


def selections(tx: Any, params: Any) -> dict[Names, Selection]:
    """What each freeze in a transformation selects, by the names of its state.

    >>> import jax.numpy as jnp, optax, flax_sg as sg
    >>> params = {'a': jnp.ones(2), 'b': jnp.ones(2)}
    >>> tx = optax.chain(optax.clip(1.0), sg.freeze(optax.adam(0.1), 'a'))
    >>> {names: found.trained for names, found in selections(tx, params).items()}
    {('1',): [False, True]}
    """
    found: dict[Names, Selection] = {}

    def init() -> None:
        waiting: list[tuple[Names, Any]] = [((), tx.init(params))]
        while waiting:
            outer, state = waiting.pop()
            pairs, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_marked)
            for keys, node in pairs:
                if _is_marked(node):
                    names = outer + names_of(keys)
                    found[names] = node.selection
                    waiting.append((names, node.value))

    with tracing.freezes((True, around().rows)):
        try:
            jax.eval_shape(init)
        except jax.errors.JAXTypeError:  # It asks for values.
            init()
    return found


def _is_marked(node: Any) -> bool:
    return isinstance(node, Marked)


def names_of(keys: Iterable[Any]) -> Names:
    """The names of a key path; a box, or a Variable of NNX, is its value."""
    return tuple(name_of(key) for key in keys if key != GetAttrKey('value'))

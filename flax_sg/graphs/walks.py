"""An NNX model, taken apart: the paths of its Variables, and copies of its modules.

The naive attempts are slow or wrong. ``nnx.clone(model, variables=False)`` and walks
with ``nnx.iter_graph`` take many times as long. ``nnx.recursive_map`` copies new values
*into* the Variables that are there, so it changes the model. JAX alone unties what
stands at two places, and never ends if a module holds the one around it.

Here JAX takes each module apart, down to the next modules and Variables. A copy is what
JAX makes of these: lists and dicts are new, and what is static is the same object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import jax
from flax import nnx

from flax_sg.filters.paths import name_of

Names: TypeAlias = tuple[str, ...]


# A module or a container, taken apart: the names that lead to each child, the children,
# which are modules, Variables and other leaves, and what puts these together again.
_Parts: TypeAlias = tuple[list[Names], list[Any], Any]


def _parts_of(node: Any) -> _Parts:
    # JAX does not know a module class that was made with ``pytree=False``.
    is_unknown = isinstance(node, nnx.Pytree) and jax.tree_util.all_leaves([node])
    pairs, treedef = jax.tree_util.tree_flatten_with_path(
        vars(node) if is_unknown else node,
        is_leaf=lambda x: x is not node and isinstance(x, (nnx.Variable, nnx.Pytree)),
    )
    names = [tuple(map(name_of, keys)) for keys, _ in pairs]
    return names, [child for _, child in pairs], treedef


class Walk:
    """A walk through a model.

    Args:
        model: a module, or a container of modules.

    Attributes:
        model: the model.
        modules: the modules in it, by ``id``.
    """

    def __init__(self, model: Any) -> None:
        self.model, self._parts = model, dict[int, _Parts]()
        found = [model]
        for node in found:  # It grows.
            if id(node) not in self._parts:
                self._parts[id(node)] = parts = _parts_of(node)
                found += [x for x in parts[1] if isinstance(x, nnx.Pytree)]
        self.modules = {id(x): x for x in found if isinstance(x, nnx.Pytree)}

    def variables(self) -> Iterator[tuple[Names, nnx.Variable[Any]]]:
        """Yields each Variable, by each of its paths if it has several."""
        return self._below(self.model, (), ())

    def _below(
        self, node: Any, names: Names, around: tuple[int, ...]
    ) -> Iterator[tuple[Names, nnx.Variable[Any]]]:
        # A module that holds the one around it has paths without end.
        around, (inner, children, _) = (*around, id(node)), self._parts[id(node)]
        for more, child in zip(inner, children, strict=True):
            if isinstance(child, nnx.Variable):
                yield (*names, *more), child
            elif isinstance(child, nnx.Pytree) and id(child) not in around:
                yield from self._below(child, (*names, *more), around)

    def copy(self, new: Mapping[int, nnx.Variable[Any]]) -> Any:
        """Copies the modules; each Variable is the same object, or a new one.

        Args:
            new: Variables to put in the place of others, by the ``id`` of these.
        """
        copies = {key: object.__new__(type(x)) for key, x in self.modules.items()}
        of_child = {**copies, **new}
        made: Any = None
        for key, (_, children, treedef) in reversed(self._parts.items()):
            made = treedef.unflatten(of_child.get(id(x), x) for x in children)
            if key in copies:
                made = made if type(made) is dict else vars(made)
                # In the order of the model's attributes.
                vars(copies[key]).update({**vars(self.modules[key]), **made})
        return copies.get(id(self.model), made)

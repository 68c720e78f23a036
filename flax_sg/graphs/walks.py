"""An NNX model, taken apart: its Variables and arrays, and copies of its modules.

The naive attempts are slow or wrong. ``nnx.clone(model, variables=False)`` and walks
with ``nnx.iter_graph`` take many times as long. ``nnx.recursive_map`` copies new values
*into* the Variables that are there, so it changes the model. JAX alone unties what
stands at two places, and never ends if a module holds the one around it. Modules that
share modules, level by level, have paths without number: each is taken apart once.

Here JAX takes each module apart, down to the next modules and Variables. A copy is what
JAX makes of these: lists and dicts are new. What is static is the same object, unless a
module of the model is in it (``held.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
from flax import nnx

from flax_sg.graphs.held import PLAIN, Held
from flax_sg.trees.leaves import is_array, is_whole

# A path as filters of NNX get it: names, and numbers for what is in a list.
Keys: TypeAlias = tuple[Any, ...]
# The same as filters of flax_sg get it.
Names: TypeAlias = tuple[str, ...]


class Leaf:
    """A Variable, or an array that is in no Variable.

    Attributes:
        value: the Variable or the array.
        keys: the first of its paths, which is the one that Flax knows.
        arrays: what is in the value.
        treedef: the structure of it: a Variable has its type and metadata there.
    """

    keys: Any = None

    def __init__(self, value: Any) -> None:
        self.value = value
        self.arrays, self.treedef = jax.tree.flatten(value, is_leaf=is_whole)

    @property
    def names(self) -> Names:
        """Its path as filters of flax_sg get it."""
        return tuple(map(str, self.keys))


class Walk:
    """A walk through a model.

    Args:
        model: a module, or a container of modules.

    Attributes:
        model: the model.
        modules: the modules in it, by ``id``.
        variables: the leaves that are Variables, by ``id`` of these.
        leaves: each Variable and each other array once.
        is_tree: whether nothing stands at two places.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.leaves = model, list[Leaf]()
        self.modules, self.variables = dict[int, Any](), dict[int, Leaf]()
        # A module or a container, taken apart: the keys that lead to each child, the
        # children, and what puts them together again. A child is a module, a leaf, or
        # in a tuple, if it is static.
        self._parts = dict[int, tuple[list[Keys], list[Any], Any]]()
        for leaf, keys in self.by_path(lambda keys: 0):
            if leaf.keys is None:
                self.leaves.append(leaf)
            leaf.keys = keys if leaf.keys is None else min(keys, leaf.keys)
        children = [id(x) for _, several, _ in self._parts.values() for x in several]
        self.is_tree = len({*children, id(model)}) == len(children) + 1

    def by_path(
        self, state_after: Callable[[Keys], Hashable | None]
    ) -> Iterator[tuple[Leaf, Keys]]:
        """Yields each leaf by its paths.

        Args:
            state_after: what tells apart beginnings of paths. Of those that are equal
                the first one alone is followed. None if nothing is known.
        """
        met = set[tuple[int, Hashable]]()
        found: list[tuple[Keys, Any, tuple[int, ...]]] = [((), self.model, ())]
        while found:
            keys, node, around = found.pop()
            state = state_after(keys)
            mark = id(node), keys if state is None else state
            # A module that holds the one around it has paths without end.
            if mark in met or id(node) in around:
                continue
            met.add(mark)
            around, below = (*around, id(node)), list[Any]()
            inner, children, _ = self._apart(node)
            for more, child in zip(inner, children, strict=True):
                if type(child) is Leaf:
                    yield child, (*keys, *more)
                elif type(child) is not tuple:
                    below.append(((*keys, *more), child, around))
            found += sorted(below, key=operator.itemgetter(0), reverse=True)

    def copy(self, new: Mapping[Leaf, Any]) -> Any:
        """Copies the modules; each Variable is the same object, or a new one.

        Args:
            new: what to put in the place of leaves.
        """
        copies = {key: object.__new__(type(x)) for key, x in self.modules.items()}
        in_place = {id(leaf.value): x for leaf, x in new.items()}

        def is_changed(node: Any) -> bool:
            return any(id(leaf.value) in in_place for leaf in Walk([node]).leaves)

        held = Held(copies | in_place, is_changed)
        made: Any = None
        for key, (keys, children, treedef) in reversed(self._parts.items()):
            node = self.modules.get(key)
            made = treedef.unflatten(
                new.get(x, x.value)
                if type(x) is Leaf
                else held.put(x[0], node, of[0])
                if type(x) is tuple
                else copies[id(x)]
                for of, x in zip(keys, children, strict=True)
            )
            if node is not None:
                made = made if type(made) is dict else vars(made)
                done, attributes = {str(of[0]) for of in keys}, vars(copies[key])
                for name in vars(node):  # In the order of the model's attributes.
                    value = made[name]
                    if type(value) not in PLAIN and not (name in done or name in _OWN):
                        value = held.put(value, node, name)
                    attributes[name] = value
        return copies.get(id(self.model), made)

    def _apart(self, node: Any) -> tuple[list[Keys], list[Any], Any]:
        if id(node) in self._parts:
            return self._parts[id(node)]
        # JAX does not know a module class that was made with ``pytree=False``. There
        # Flax takes modules, Variables and arrays for data, and nothing else.
        is_unknown = isinstance(node, nnx.Pytree) and jax.tree_util.all_leaves([node])
        known, modules = self.variables, self.modules
        if isinstance(node, nnx.Pytree):
            modules[id(node)] = node
        # JAX asks for the node first, and a module may hold itself.
        nodes, inside = set[int](), iter([False])

        def is_leaf(x: Any) -> bool:
            if isinstance(x, nnx.Variable):
                known.setdefault(id(x), Leaf(x))
                return True
            if next(inside, True) and isinstance(x, nnx.Pytree):
                nodes.add(id(x))
                return True
            return is_whole(x)

        def as_child(x: Any) -> Any:
            if id(x) in nodes:
                return x
            is_static = is_unknown and not (id(x) in known or is_array(x))
            return (x,) if is_static else known.get(id(x)) or Leaf(x)

        pairs, treedef = jax.tree_util.tree_flatten_with_path(
            vars(node) if is_unknown else node, is_leaf=is_leaf
        )
        keys = [tuple(_OF_KEYS.get(type(x), str)(x) for x in of) for of, _ in pairs]
        self._parts[id(node)] = keys, [as_child(x) for _, x in pairs], treedef
        return self._parts[id(node)]


_OWN = frozenset(vars(nnx.Module()))  # Attributes that Flax itself has.
# What Flax has for each kind of key in a key path of JAX.
_OF_KEYS: dict[type, Callable[[Any], Any]] = {
    jax.tree_util.GetAttrKey: operator.attrgetter('name'),
    jax.tree_util.SequenceKey: operator.attrgetter('idx'),
    jax.tree_util.DictKey: operator.attrgetter('key'),
    jax.tree_util.FlattenedIndexKey: operator.attrgetter('key'),
}

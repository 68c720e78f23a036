"""A tree with modules of NNX in it, taken apart: each module once.

JAX alone unties what stands at two places, and never ends if a module has its parent in
it. Modules that share modules, level by level, have paths without number. So
JAX takes each module apart by itself, down to the next modules and Variables.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax

from flax_sg.filters.paths import Path
from flax_sg.internals.types import PyTree
from flax_sg.trees.leaf_types import is_array, is_module, is_variable, is_whole
from flax_sg.trees.nnx_paths import Keys, Names, Ways, path_at


class Leaf:
    """A Variable, or another leaf of a tree.

    Attributes:
        value: the Variable, or what else it is.
        keys: the first of its paths, which is the one that Flax knows.
        arrays: what is in the value.
        treedef: the structure of it: a Variable has its type and metadata there.
    """

    keys: Keys

    def __init__(self, value: Any) -> None:
        self.value = value
        self.arrays, self.treedef = jax.tree.flatten(value, is_leaf=is_whole)

    @property
    def names(self) -> Names:
        """Its first path as filters of flax_sg get it."""
        return tuple(map(str, self.keys))


class Walk:
    """A walk through a tree.

    Args:
        tree: a module, or any other tree.
        path_of: the path that filters get, see ``Ways``.
        ties_outside: whether a Variable at two places outside of modules is one leaf,
            as for ``nnx.split``, and not as for JAX.

    Attributes:
        tree: the tree.
        modules: the modules in it, by ``id``.
        parts: each module, and each container with modules in it, by ``id``: the keys
            of its children, the children, which are modules and leaves, and the treedef
            that puts them together again.
        ways: the paths, by the ``id`` of the leaves.
        leaves: each leaf once, by its ``id``, in the order of JAX.
        is_tree: whether nothing stands at two places.
        unknown: the modules that JAX does not take apart, by ``id``.
    """

    def __init__(
        self,
        tree: PyTree,
        path_of: Callable[..., Path] = path_at,
        ties_outside: bool = True,
    ) -> None:
        self._ties_outside = ties_outside
        self.tree, self.modules = tree, dict[int, Any]()
        self.unknown = set[int]()
        self.parts = dict[int, tuple[list[Keys], list[Any], Any]]()
        self._variables = dict[int, Leaf]()
        inside, leaves = dict[int, list[tuple[Keys, int]]](), dict[int, Leaf]()
        nodes = [tree]
        for node in nodes:
            if id(node) in inside:
                continue
            keys, children, _ = self.parts[id(node)] = self._apart(node)
            inside[id(node)] = [*zip(keys, map(id, children), strict=True)]
            for child in children:
                if type(child) is Leaf:
                    leaves[id(child)] = child
                else:
                    nodes.append(child)
        self.ways = Ways(id(tree), inside, path_of)
        self.leaves = {leaf: leaves[leaf] for leaf in self.ways.first}
        for leaf, keys in self.ways.first.items():
            leaves[leaf].keys = keys
        # Each node but the tree stands at one place at least.
        places = sum(map(len, inside.values()))
        self.is_tree = len(inside) + len(leaves) == places + 1

    def paths_of(self, leaf: Leaf) -> list[Path]:
        """A path for each array in a leaf, or one if there is none.

        A Variable is a box: its arrays share its path, and differ in their shapes.
        """
        paths = [path_at(leaf.names, (), array) for array in leaf.arrays or [None]]
        if self.is_tree:
            return paths
        return [self.ways.tell(path, id(leaf)) for path in paths]

    def _apart(self, node: object) -> tuple[list[Keys], list[Any], Any]:
        from flax import nnx  # Models of linen do not wait for it.

        variables, is_root = self._variables, iter([True])
        modules = set[int]()

        is_in_module = isinstance(node, nnx.Pytree)
        is_tying = is_in_module or self._ties_outside

        def is_leaf(x: object) -> bool:
            if isinstance(x, nnx.Variable):
                if is_tying and id(x) not in variables:
                    variables[id(x)] = Leaf(x)
                return True
            # JAX asks for the node first, and a module may have itself in it.
            if not next(is_root, False) and isinstance(x, nnx.Pytree):
                modules.add(id(x))
                return True
            return is_whole(x)

        data = node
        if is_in_module:
            self.modules[id(node)] = node
            # JAX does not know the class if it was made with ``pytree=False``.
            if jax.tree_util.all_leaves([node]):
                self.unknown.add(id(node))
                data = {name: x for name, x in vars(node).items() if _is_data(x)}
        pairs, treedef = jax.tree_util.tree_flatten_with_path(data, is_leaf=is_leaf)
        keys = [tuple(_OF_KEYS.get(type(x), str)(x) for x in path) for path, _ in pairs]
        children = [
            x if id(x) in modules else (is_tying and variables.get(id(x))) or Leaf(x)
            for _, x in pairs
        ]
        return keys, children, treedef


def _is_data(value: object) -> bool:
    """Whether Flax takes an attribute for data, if JAX does not know the module."""

    def is_leaf(x: object) -> bool:
        return is_variable(x) or is_module(x)

    leaves = jax.tree.leaves(value, is_leaf=is_leaf)
    return any(is_leaf(x) or is_array(x) for x in leaves)


# The key that Flax has in a path for each type of key in a key path of JAX.
_OF_KEYS: dict[type, Callable[[Any], Any]] = {
    jax.tree_util.GetAttrKey: operator.attrgetter('name'),
    jax.tree_util.SequenceKey: operator.attrgetter('idx'),
    jax.tree_util.DictKey: operator.attrgetter('key'),
    jax.tree_util.FlattenedIndexKey: operator.attrgetter('key'),
}

"""Tied Variables of NNX and shared modules: what stands at several places of a tree.

Weights are tied in modules. A Variable at two places of a State, a dict or a list is in
no module there. It is two leaves, as for JAX and optax: a target network begins as
``{'online': state, 'target': state}``.

JAX takes a module of NNX apart as a tree, and finds what stands at two places twice.
Each copy would then get a verdict, a mask and an update of its own. Modules that share
modules in levels have copies without number. In a module that has its parent in it JAX
finds no end, and fails for good: later right programs raise, too. A module that was
made with ``pytree=False`` is one leaf for JAX. ``nnx.split`` knows all that, but takes
apart what is one leaf here, such as a ``NonDifferentiable``, and forgets the classes
that ``sg.trainable`` declares. So a ``Walk`` marks all places but the first and opens
the modules that JAX does not know, and JAX takes the rest apart as ever.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax

from flax_sg.internals.types import PyTree
from flax_sg.trees.leaf_types import is_module, is_variable
from flax_sg.trees.levels import one_level
from flax_sg.trees.nnx_walks import Leaf, Walk

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Again:
    """Stands where a Variable or a module stands again. It is a node without leaves.

    Attributes:
        index: which of the Variables and modules it is, in the order in which JAX
            meets them. It is a part of the structure: trees that are tied in other
            ways differ.
    """

    index: int


jax.tree_util.register_pytree_node(
    Again, lambda again: ((), again.index), lambda index, _: Again(index)
)


class Opened(dict[str, Any]):
    """Stands where a module stands that JAX does not know: what is data in it, by name.

    Attributes:
        module: the class, and all else that is in the module.
    """

    def __init__(self, data: Iterable[tuple[str, Any]], module: Static) -> None:
        super().__init__(data)
        self.module = module


class Static:
    """What is static in a module that JAX does not know; a part of the structure.

    Args:
        module: the module.
        data: the names of the attributes that are data.
    """

    def __init__(self, module: object, data: Iterable[str]) -> None:
        self.cls = type(module)
        # In the order of the module, with None for each attribute that is data.
        self.attributes: dict[str, Any] = vars(module) | dict.fromkeys(data)
        self._data = frozenset(data)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or self.cls is not other.cls:
            return False
        left, right = self.attributes, other.attributes
        return (self._data, left.keys()) == (other._data, right.keys()) and all(
            x is right[name] or x == right[name]
            for name, x in left.items()
            if not name.startswith('_pytree__')  # Flax's own notes of an object.
        )

    def __hash__(self) -> int:
        return hash((self.cls, self._data))


def _with_keys(node: Opened) -> tuple[list[tuple[Any, Any]], tuple[Any, Any]]:
    names = sorted(node)
    pairs = [(jax.tree_util.DictKey(name), node[name]) for name in names]
    return pairs, (tuple(names), node.module)


jax.tree_util.register_pytree_with_keys(
    Opened,
    _with_keys,
    lambda form, values: Opened(zip(form[0], values, strict=True), form[1]),
)


def each_once(tree: T) -> tuple[T, Callable[[Any], Any]]:
    """A tree in which modules of NNX have each Variable once, and what ties it.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> w = nnx.Param(jnp.ones(2))
    >>> tree, tie = each_once({'net': nnx.Dict(encoder=w, decoder=w), 'w': w})
    >>> len(jax.tree.leaves(tree))
    2
    >>> doubled = tie(jax.tree.map(lambda leaf: 2 * leaf, tree))
    >>> doubled['net'].encoder is doubled['net'].decoder, doubled['w'] is w
    (True, False)

    Args:
        tree: any pytree, with modules and Variables of NNX anywhere in it.

    Returns:
        The tree with a mark in all places but the first of each, in which JAX knows all
        modules; the tree itself if there is nothing to do. And a function of a tree of
        the same structure, whose leaves may be anything: it puts the first one in the
        place of each mark, and makes modules of those that were opened.
    """
    if 'flax.nnx' not in sys.modules:
        return tree, _as_it_is
    if not any(map(is_module, jax.tree.leaves(tree, is_leaf=_has_places))):
        return tree, _as_it_is
    walk = Walk(tree, ties_outside=False)
    if walk.is_tree and not walk.unknown:
        return tree, _as_it_is
    return _marked(walk), _tied


def _marked(walk: Walk) -> Any:
    """The tree of a walk, with marks in it."""
    indices = dict[int, int]()

    def mark(node: object, is_in_module: bool) -> Any:
        if id(node) in indices:
            return Again(indices[id(node)])
        is_leaf = type(node) is Leaf
        if (is_in_module and is_leaf and is_variable(node.value)) or is_module(node):
            indices[id(node)] = len(indices)
        return node.value if is_leaf else opened(node)

    def opened(node: Any) -> Any:
        _, children, treedef = walk.parts[id(node)]
        is_module = id(node) in walk.modules
        marked = treedef.unflatten([mark(child, is_module) for child in children])
        if id(node) not in walk.unknown:
            return marked
        return Opened(marked.items(), Static(node, marked))

    return mark(walk.tree, False)


def _tied(tree: PyTree) -> Any:
    """The tree that was marked, with other leaves. Modules in it are filled in place.

    Modules and Variables are counted in the same order as ``_marked`` does it.
    """
    met = list[Any]()

    def tie(node: object, is_in_module: bool) -> Any:
        if isinstance(node, Again):
            return met[node.index]
        tied = object.__new__(node.module.cls) if isinstance(node, Opened) else node
        if is_in_module or not is_variable(tied):
            met.append(tied)
        if isinstance(node, Opened):
            data = {name: tie_in(child, True) for name, child in node.items()}
            vars(tied).update(node.module.attributes | data)
        elif is_module(node):
            children, treedef = one_level(node)
            made_of = treedef.unflatten([tie_in(child, True) for _, child in children])
            vars(tied).update(vars(made_of))
        return tied

    def tie_in(tree: PyTree, is_in_module: bool) -> Any:
        """Ties all that JAX finds in a tree, down to the next modules."""
        nodes, treedef = jax.tree.flatten(tree, is_leaf=_is_marked)
        tied = [tie(x, is_in_module) if _is_marked(x) else x for x in nodes]
        return treedef.unflatten(tied)

    return tie_in(tree, False)


def _as_it_is(tree: PyTree) -> Any:
    return tree


def _has_places(node: object) -> bool:
    """Whether a node may be shared: it is a module or a Variable."""
    return is_module(node) or is_variable(node)


def _is_marked(node: object) -> bool:
    return isinstance(node, (Again, Opened)) or _has_places(node)

"""Tied Variables of NNX, which are one leaf, and modules that hold the one around them.

JAX takes a module of NNX apart as a tree, and finds a Variable that stands at two
places twice. Each copy would then get a verdict, a mask and an update of its own. In a
module that holds the one around it JAX finds no end, and fails for good: later right
programs raise, too. ``nnx.split`` knows both, but takes apart what is one leaf here,
such as a ``NonDifferentiable``, and forgets the classes that ``sg.trainable`` declares.
So later places of a Variable, and of a module within itself, are marked, and JAX takes
the rest apart as ever.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from flax_sg.internals.optional import is_of_nnx

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Again:
    """Stands where a Variable or a module stands again. It is a node without leaves.

    Attributes:
        number: which of the Variables it is, in the order of the leaves; -1 for the
            module around, -2 for the next one. It is a part of the structure: trees
            that are tied in other ways differ.
    """

    number: int


jax.tree_util.register_pytree_node(
    Again, lambda again: ((), again.number), lambda number, _: Again(number)
)


def each_once(tree: T) -> tuple[T, Callable[[Any], Any]]:
    """A tree in which each Variable of NNX stands once, and what ties it again.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> w = nnx.Param(jnp.ones(2))
    >>> tree, tie = each_once({'encoder': w, 'decoder': (w, 1.0)})
    >>> len(jax.tree.leaves(tree))
    2
    >>> doubled = tie(jax.tree.map(lambda leaf: 2 * leaf, tree))
    >>> doubled['encoder'] is doubled['decoder'][0]
    True

    Args:
        tree: any pytree, with modules and Variables of NNX anywhere in it.

    Returns:
        The tree with a mark in all later places of a Variable, and of a module within
        itself; the tree itself if there are none. And a function of a tree of the same
        structure, whose leaves may be anything: it puts the first one in the place of
        each mark.
    """
    if 'flax.nnx' not in sys.modules:
        return tree, _as_it_is
    modules, repeated = set[int](), set[int]()

    def is_leaf(node: Any) -> bool:
        if not _is_module(node):
            return _is_variable(node)
        (repeated if id(node) in modules else modules).add(id(node))
        return id(node) in repeated

    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    if repeated:
        tree = _opened(tree, ())
        nodes, treedef = jax.tree.flatten(tree, is_leaf=_is_variable)
    variables = [id(node) for node in nodes if _is_variable(node)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(variables))}
    if len(numbers) == len(variables):
        return tree, functools.partial(_closed, ()) if repeated else _as_it_is
    seen: set[int] = set()
    for index, node in enumerate(nodes):
        if id(node) in seen:
            nodes[index] = Again(numbers[id(node)])
        elif id(node) in numbers:
            seen.add(id(node))
    return treedef.unflatten(nodes), _tie


def _opened(node: Any, around: tuple[int, ...]) -> Any:
    """A tree with marks in the place of modules that hold what is around them."""
    if _is_variable(node):
        return node
    if _is_module(node):
        if id(node) in around:
            return Again(around.index(id(node)) - len(around))
        around = (*around, id(node))
    root = iter([False])  # JAX asks for the node first.
    children, treedef = jax.tree.flatten(node, is_leaf=lambda _: next(root, True))
    if jax.tree_util.treedef_is_leaf(treedef):
        return node
    return treedef.unflatten([_opened(child, around) for child in children])


def _closed(around: tuple[Any, ...], tree: Any) -> Any:
    """Puts modules in the place of marks that stand within them."""

    def put(node: Any) -> Any:
        if isinstance(node, Again):
            return around[node.number]
        if _is_module(node):
            for name, value in vars(node).items():
                vars(node)[name] = _closed((*around, node), value)
        return node

    return jax.tree.map(
        put, tree, is_leaf=lambda node: _is_variable_or_mark(node) or _is_module(node)
    )


def _tie(tree: Any) -> Any:
    nodes, treedef = jax.tree.flatten(tree, is_leaf=_is_variable_or_mark)
    variables = [node for node in nodes if _is_variable(node)]
    tied = treedef.unflatten(
        variables[node.number] if isinstance(node, Again) and node.number >= 0 else node
        for node in nodes
    )
    is_open = any(isinstance(node, Again) and node.number < 0 for node in nodes)
    return _closed((), tied) if is_open else tied


def marks_in(tree: Any, is_whole: Callable[[Any], bool]) -> Iterator[tuple[Any, range]]:
    """Yields the key path of each mark, and the numbers of the leaves that stand there.

    Args:
        tree: a tree from ``each_once``.
        is_whole: whether something is one leaf, whatever is in it.
    """
    pairs, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: _is_variable_or_mark(node) or is_whole(node)
    )
    leaves_of, count = list[range](), 0
    for keys, node in pairs:
        if isinstance(node, Again) and node.number < 0:
            continue
        if isinstance(node, Again):
            yield keys, leaves_of[node.number]
            continue
        size = len(jax.tree.leaves(node, is_leaf=is_whole))
        if _is_variable(node):
            leaves_of.append(range(count, count + size))
        count += size


def _as_it_is(tree: Any) -> Any:
    return tree


def _is_variable(node: Any) -> bool:
    return is_of_nnx(type(node), 'Variable')


def _is_module(node: Any) -> bool:
    return is_of_nnx(type(node), 'Pytree')


def _is_variable_or_mark(node: Any) -> bool:
    return isinstance(node, Again) or _is_variable(node)

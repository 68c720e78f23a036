"""What stands in modules again: tied Variables of NNX, and modules that are shared.

Weights are tied in modules. A Variable at two places of a State, a dict or a list is in
no module there. It is two leaves, as for JAX and optax: a target network begins as
``{'online': state, 'target': state}``.

JAX takes a module of NNX apart as a tree, and finds what stands at two places twice.
Each copy would then get a verdict, a mask and an update of its own. Modules that share
modules in levels have copies without number. In a module that holds the one around it
JAX finds no end, and fails for good: later right programs raise, too. ``nnx.split``
knows all that, but takes apart what is one leaf here, such as a ``NonDifferentiable``,
and forgets the classes that ``sg.trainable`` declares. So all places but the first are
marked, and JAX takes the rest apart as ever.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from flax_sg.trees.kinds import is_module, is_variable

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Again:
    """Stands where a Variable or a module stands again. It is a node without leaves.

    Attributes:
        number: which of the Variables and modules it is, in the order in which JAX
            meets them. It is a part of the structure: trees that are tied in other
            ways differ.
    """

    number: int


jax.tree_util.register_pytree_node(
    Again, lambda again: ((), again.number), lambda number, _: Again(number)
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
        The tree with a mark in all places but the first of each; the tree itself if
        there are none. And a function of a tree of the same structure, whose leaves may
        be anything: it puts the first one in the place of each mark.
    """
    if 'flax.nnx' not in sys.modules:
        return tree, _as_it_is
    outer, around = jax.tree.flatten(tree, is_leaf=_has_places)
    modules = [*filter(_is_tying, outer)]
    if not modules:
        return tree, _as_it_is
    numbers = dict[int, int]()

    def is_leaf(node: Any) -> bool:
        if not _has_places(node):
            return False
        is_again = id(node) in numbers
        numbers.setdefault(id(node), len(numbers))
        return is_again or is_variable(node)

    nodes, treedef = jax.tree.flatten(modules, is_leaf=is_leaf)
    seen, is_tied = set[int](), False
    for index, node in enumerate(nodes):
        if id(node) in numbers:
            # JAX has opened a module at its first place.
            if id(node) in seen or not is_variable(node):
                nodes[index], is_tied = Again(numbers[id(node)]), True
            seen.add(id(node))
    if not is_tied:
        return tree, _as_it_is
    each = iter(treedef.unflatten(nodes))
    return around.unflatten(next(each) if _is_tying(x) else x for x in outer), _tie


def _tie(tree: Any) -> Any:
    outer, around = jax.tree.flatten(
        tree, is_leaf=lambda x: isinstance(x, Again) or _has_places(x)
    )
    each = iter(_tie_modules([*filter(_is_tying, outer)]))
    return around.unflatten(next(each) if _is_tying(x) else x for x in outer)


def _is_tying(node: Any) -> bool:
    """Whether it is a module that JAX knows, or stands for one that stands again."""
    is_module = _has_places(node) and not is_variable(node)
    return isinstance(node, Again) or is_module


def _tie_modules(tree: Any) -> Any:
    known = list[Any]()

    def is_leaf(node: Any) -> bool:
        if _has_places(node):
            known.append(node)
        return isinstance(node, Again) or is_variable(node)

    def put(node: Any) -> Any:
        return jax.tree.map(
            lambda x: known[x.number] if isinstance(x, Again) else x,
            node,
            is_leaf=lambda x: isinstance(x, Again) or _has_places(x),
        )

    jax.tree.leaves(tree, is_leaf=is_leaf)
    for module in filter(is_module, known):
        root = iter([False])  # JAX asks for the module first.
        children, treedef = jax.tree.flatten(module, lambda _: next(root, True))  # noqa: B023
        vars(module).update(vars(treedef.unflatten(map(put, children))))
    return put(tree)


def _as_it_is(tree: Any) -> Any:
    return tree


def _has_places(node: Any) -> bool:
    """Whether it counts where something stands: not for modules unknown to JAX."""
    is_known = is_module(node) and not jax.tree_util.all_leaves([node])
    return is_known or is_variable(node)

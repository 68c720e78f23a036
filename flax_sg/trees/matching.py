"""Trees that have to match another one, as gradients match their parameters.

A gradient is checked here, when the user gives it. Later code relies on its form.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import optax

from flax_sg import errors
from flax_sg.errors.nearest import nearest
from flax_sg.errors.texts import brief, shown
from flax_sg.internals.types import Leaf, PyTree
from flax_sg.trees.leaves import ABSENT, Absent, Leaves, is_array, is_whole, leaves_of
from flax_sg.trees.nnx_tied import each_once


def gradient_of_each(
    leaves: Leaves,
    tree: PyTree,
    needed: Sequence[Any],
    spared: Callable[[], Collection[Any]] = tuple,
) -> list[Any]:
    """The gradient of each parameter, from a tree that may lack some of them.

    ``ABSENT``, None and ``optax.MaskedNode`` may stand in place of each leaf.

    Args:
        leaves: the parameters.
        tree: the gradient.
        needed: for each leaf whether the tree has to have a value there.
        spared: returns the places of leaves at which the tree may lack one all the
            same. It is called if a value is missing. By default there are none.

    Returns:
        The gradient at each leaf, ``ABSENT`` where the tree has none.

    Raises:
        StructureError: if the tree has something else, or nothing where a value is
            needed, or anything where the parameters have no leaf.
    """
    tree, _ = each_once(tree)
    try:
        pairs = [*enumerate(leaves.treedef.flatten_up_to(tree))]
    except (ValueError, TypeError):
        pairs = _by_key_path(leaves, tree)
    values: list[Any] = [ABSENT] * len(leaves.values)
    for index, value in pairs:
        values[index] = ABSENT if is_nothing(value) else value
    for path, need, value in zip(leaves.paths, needed, values, strict=True):
        if need is False:
            continue
        if value is ABSENT:
            if path.place in spared():
                continue
            raise errors.StructureError(
                f'there is nothing at {str(path)!r} in the gradient, and it is not '
                'frozen.\n'
                'wrt= selects what has a gradient, sg.freeze what is frozen.\n'
                'Write sg.grad(loss, wrt=~sg.where(where)) beside '
                'sg.freeze(tx, where).'
            )
        if not (is_array(value) or jax.tree_util.all_leaves([value])):
            raise errors.StructureError(
                f'the gradient has {brief(value)} at {str(path)!r}, where an array is '
                'expected.'
            )
    return values


def _by_key_path(leaves: Leaves, tree: PyTree) -> list[tuple[int, Any]]:
    """The values in a pruned tree, each with the index of its leaf."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: is_whole(node) or is_nothing(node)
    )
    places = {keys: index for index, keys in enumerate(leaves.key_paths)}
    pairs = [(keys, value) for keys, value in pairs if not is_nothing(value)]
    if any(keys not in places for keys, _ in pairs):
        raise different_structures(
            'the parameters', 'the gradient', leaves, leaves_of(tree), pruned=True
        )
    return [(places[keys], value) for keys, value in pairs]


def is_nothing(node: object) -> bool:
    """Whether a node stands for a gradient that does not exist."""
    return node is None or isinstance(node, (Absent, optax.MaskedNode))


def other_shape(
    whose: str, path: str, leaf: Leaf, value: Leaf
) -> errors.StructureError:
    """The error for a value of a parameter that has another shape."""
    return errors.StructureError(
        f'{whose} at {str(path)!r} has another shape than the parameter.\n'
        f'Expected: {shown(leaf)}\nFound:    {shown(value)}'
    )


def different_structures(
    name_a: str, name_b: str, a: Leaves, b: Leaves, pruned: bool = False
) -> errors.StructureError:
    """The error for two trees that have leaves at different paths."""
    lines = [] if pruned else _only_in(a, b, name_a, name_b)
    lines += _only_in(b, a, name_b, name_a)
    if not lines:
        keys_of = dict(zip(a.paths, a.key_paths, strict=True))
        pairs = zip(b.paths, b.key_paths, strict=True)
        boxed = [path for path, keys in pairs if keys_of.get(path, keys) != keys]
        line = '  Their paths are the same: a list in one may be a tuple in the other.'
        if boxed:
            line = f'  {boxed[0]!r} is in a box in one. Unbox: flax.linen.unbox(tree).'
        lines = [line]
    headline = f'{name_a} and {name_b} have different structures.'
    return errors.StructureError('\n'.join([headline, *lines]))


def _only_in(tree: Leaves, other: Leaves, name: str, other_name: str) -> list[str]:
    other_paths = set(other.paths)
    paths = [str(path) for path in dict.fromkeys(tree.paths) if path not in other_paths]
    if not paths:
        return []
    near = nearest(paths[0], map(str, other.paths), 1)
    more = f' and {len(paths) - 1} more' if len(paths) > 1 else ''
    hint = f'; nearest there: {near[0]!r}' if near else ''
    return [f'  {paths[0]!r}{more}: in {name}, not in {other_name}{hint}']

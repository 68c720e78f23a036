"""Trees that belong to another one: gradients, updates and tangents of parameters.

Such a tree is checked here, once, where it enters; what reads it then trusts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax
from flax.core.meta import AxisMetadata

from flax_sg import errors
from flax_sg.errors.texts import brief, shown
from flax_sg.filters.hints import nearest
from flax_sg.filters.paths import name_of
from flax_sg.trees.leaves import ABSENT, Absent, Leaves, is_array, is_whole, leaves_of
from flax_sg.trees.tied import each_once


def beside(
    leaves: Leaves,
    tree: Any,
    what: str,
    *,
    needed: Sequence[Any],
) -> list[Any]:
    """Checks a tree that belongs to some parameters, and may lack some of them.

    ``ABSENT``, None and ``optax.MaskedNode`` may stand in place of each leaf.

    Args:
        leaves: the parameters.
        tree: the tree.
        what: what it is, for errors, such as 'the gradient'.
        needed: the leaves at which it has to have one value or nothing.

    Returns:
        What it has at each leaf, ``ABSENT`` where it has nothing.

    Raises:
        StructureError: if it has something else, or anything where the parameters have
            no leaf.
    """
    tree, _ = each_once(tree)
    try:
        rows = [*enumerate(leaves.treedef.flatten_up_to(tree))]
    except (ValueError, TypeError):
        rows = _by_key_path(leaves, tree, what)
    values: list[Any] = [ABSENT] * len(leaves.values)
    for number, value in rows:
        if is_nothing(value):
            continue
        if needed[number] and not _is_value(value):
            raise errors.StructureError(
                f'{what} has {brief(value)} at {str(leaves.paths[number])!r}, where an '
                'array is expected.'
            )
        values[number] = value
    return values


def _by_key_path(leaves: Leaves, tree: Any, what: str) -> list[Any]:
    """What a pruned tree has, with the number of each leaf."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: is_whole(node) or is_nothing(node)
    )
    places = {keys: number for number, keys in enumerate(leaves.key_paths)}
    found = [(keys, value) for keys, value in pairs if not is_nothing(value)]
    if any(keys not in places for keys, _ in found):
        raise different_structures(
            'the parameters', what, leaves, leaves_of(tree), pruned=True
        )
    return [(places[keys], value) for keys, value in found]


def is_nothing(node: Any) -> bool:
    """Whether something stands in a tree where there is no gradient."""
    return node is None or isinstance(node, (Absent, optax.MaskedNode))


def _is_value(value: Any) -> bool:
    if is_array(value) or is_whole(value):  # Nearly always.
        return True
    return not isinstance(value, (str, bytes)) and jax.tree_util.all_leaves([value])


def missing_leaf(what: str, path: str, why: str, fix: str) -> errors.StructureError:
    """A leaf is needed, and nothing stands there."""
    return errors.StructureError(
        f'there is nothing at {str(path)!r} in {what}, and it {why}.\n{fix}'
    )


def other_shape(what: str, path: str, leaf: Any, value: Any) -> errors.StructureError:
    """What belongs to a parameter has another shape."""
    return errors.StructureError(
        f'{what} at {str(path)!r} has another shape than the parameter.\n'
        f'Expected: {shown(leaf)}\nFound:    {shown(value)}'
    )


def different_structures(
    name_a: str, name_b: str, a: Leaves, b: Leaves, pruned: bool = False
) -> errors.StructureError:
    """Two trees that belong together have leaves at different paths."""
    lines = [] if pruned else _only_in(a, b, name_a, name_b)
    lines += _only_in(b, a, name_b, name_a)
    if not lines:
        path, one, other = _differing(a.tree, b.tree) or ('', a.tree, b.tree)
        place = repr(path) if path else 'the tree'
        lines = [f'  {place}: {brief(one)} in {name_a}, {brief(other)} in {name_b}']
        if isinstance(one, AxisMetadata) != isinstance(other, AxisMetadata):
            lines.append('Unbox both: flax.linen.unbox(tree).')
    said = f'{name_a} and {name_b} have different structures.'
    return errors.StructureError('\n'.join([said, *lines]))


def _differing(a: Any, b: Any) -> tuple[str, Any, Any] | None:
    """The path of the first nodes that differ in type or keys, and these nodes."""
    (one, kind), (other, kind_b) = map(children_of, (a, b))
    if kind != kind_b:
        return '', a, b
    for (keys, child), (_, child_b) in zip(one, other, strict=True):
        if keys and (found := _differing(child, child_b)):
            return '/'.join(filter(None, (name_of(keys[0]), found[0]))), *found[1:]
    return None


def children_of(node: Any) -> Any:
    """The children of a node with their keys, and its own structure."""
    return jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda child: child is not node or is_whole(child)
    )


def _only_in(here: Leaves, there: Leaves, one: str, other: str) -> list[str]:
    known = set(there.paths)
    paths = [str(path) for path in dict.fromkeys(here.paths) if path not in known]
    if not paths:
        return []
    near = nearest(paths[0], map(str, there.paths), 1)
    more = f' and {len(paths) - 1} more' if len(paths) > 1 else ''
    hint = f'; nearest there: {near[0]!r}' if near else ''
    return [f'  {paths[0]!r}{more}: in {one}, not in {other}{hint}']

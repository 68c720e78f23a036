"""The leaves of any pytree, with the paths by which filters know them.

Where a leaf is in a tree says JAX, as a key path; ``Path`` is what a filter sees of
it. The two differ in three things: names are joined by '/', leaves inside a box
(``nn.Partitioned``) share the path of the box, and in a dict of collections the first
name is the collection.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax.core.meta import AxisMetadata

from flax_sg import errors, filters
from flax_sg.filters.asking import decide, find_unused
from flax_sg.filters.expressions import unknown_class
from flax_sg.filters.indices import whole_only
from flax_sg.filters.paths import Path
from flax_sg.trees.absent import is_absent
from flax_sg.trees.nondifferentiable import NonDifferentiable

Keys: TypeAlias = tuple[Any, ...]

# fp8 layers receive the *new value* of these as a gradient: no rule may touch them.
OVERWRITE_WITH_GRADIENT = '_overwrite_with_gradient'


def is_differentiable(leaf: Any) -> bool:
    """Whether a leaf can be differentiated: real or complex, and not marked.

    Arrays, tracers, Python's numbers and ``jax.ShapeDtypeStruct`` can; integers, bools,
    keys, strings, other objects and ``NonDifferentiable`` cannot.
    """
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return jnp.issubdtype(leaf.dtype, jnp.inexact)
    return isinstance(leaf, (float, complex))


@dataclasses.dataclass(frozen=True)
class Leaves:
    """A tree, taken apart.

    Attributes:
        values: the leaves; ``ABSENT`` and ``NonDifferentiable`` count as leaves.
        paths: the path of each.
        key_paths: the key path of each, which tells leaves in one box apart.
        treedef: what puts such a list of leaves together again.
    """

    values: list[Any]
    paths: list[Path]
    key_paths: list[Keys]
    treedef: Any

    def restore(self, values: Iterable[Any]) -> Any:
        """The tree with other leaves."""
        return jax.tree_util.tree_unflatten(self.treedef, list(values))

    def __iter__(self) -> Iterator[tuple[Path, Any]]:
        return zip(self.paths, self.values, strict=True)

    def by_path(self) -> dict[Path, Any]:
        """The leaves by path; of several in one box the last."""
        return dict(zip(self.paths, self.values, strict=True))


def is_whole(node: Any) -> bool:
    """Whether something is one leaf here, whatever is in it."""
    return is_absent(node) or isinstance(node, NonDifferentiable)


def leaves_of(tree: Any) -> Leaves:
    """Takes a tree apart."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_whole)
    boxes = _boxes_in(tree)
    collections = _is_variables(tree)
    paths = [path_of(_outside(keys, boxes), collections) for keys, _ in pairs]
    leaves = [leaf for _, leaf in pairs]
    return Leaves(leaves, paths, [keys for keys, _ in pairs], treedef)


def _boxes_in(tree: Any) -> frozenset[Keys]:
    """The key path of every box in a tree."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: is_whole(node) or isinstance(node, AxisMetadata)
    )
    return frozenset(keys for keys, leaf in pairs if isinstance(leaf, AxisMetadata))


def _outside(keys: Keys, boxes: Set[Keys]) -> Keys:
    """A key path as far as the box that it leads into, if there is one."""
    if not boxes:
        return keys
    ends = (n for n in range(len(keys) + 1) if keys[:n] in boxes)
    return keys[: next(ends, len(keys))]


def path_of(keys: Keys, collections: bool = False) -> Path:
    """The path that a filter sees for a key path of JAX.

    >>> import jax
    >>> tree = {'enc': [1.0, {'w': 2.0}]}
    >>> [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]
    ['enc/0', 'enc/1/w']

    Args:
        keys: a key path, of any kind of keys.
        collections: whether the first key is the name of a collection.
    """
    names = tuple(map(name_of, keys))
    if collections and len(names) > 1:
        return Path.of(names[0], names[1:])
    return Path.of('params', names or ('',))


def name_of(key: Any) -> str:
    """The name that one key of a key path has in a path."""
    for attribute in ('name', 'idx', 'key'):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _is_variables(tree: Any) -> bool:
    """Whether a tree is a dict of collections, as Flax's ``init`` returns it."""
    if not isinstance(tree, Mapping):
        return False
    known = 'params' in tree or OVERWRITE_WITH_GRADIENT in tree
    return known and all(isinstance(below, Mapping) for below in tree.values())


def selected(
    trees: Sequence[Sequence[Path]], where: filters.Filter, unused: str = 'raise'
) -> list[list[Any]]:
    """What a filter says of each leaf of some trees: a bool, or which part of it.

    Args:
        trees: the paths of the leaves of each tree; they are judged together.
        where: the filter.
        unused: ``'raise'`` or ``'ignore'`` if a part of it matches nothing.

    Raises:
        UnusedFilterError: if a part of the filter matched no leaf.
        FilterValueError: if a tree of bools does not fit.
    """
    check_unused(unused)
    matched: set[filters.Filter] = set()
    out = [[_decided(where, path, matched) for path in tree] for tree in trees]
    if unused == 'raise':
        paths = [path for tree in trees for path in tree]
        error = find_unused(where, matched, paths, None, any(map(any, out)))
        if error is not None:
            raise error
    return out


def _decided(where: filters.Filter, path: Path, matched: set[filters.Filter]) -> Any:
    said = decide(where, path, matched)
    if said is None:
        raise unknown_class(where, path)
    return said


def whole(said: Sequence[Any], paths: Sequence[Path], what: str) -> list[bool]:
    """What a filter says of leaves that cannot be split; raises if it means a part."""
    for takes, path in zip(said, paths, strict=True):
        if isinstance(takes, filters.Part):
            raise whole_only(what, path)
    return list(said)


def check_unused(unused: str) -> None:
    """Raises for a value of ``unused=`` that means nothing."""
    if unused not in ('raise', 'ignore'):
        raise errors.FilterValueError(
            f"unused={unused!r}: expected 'raise' or 'ignore'."
        )


def different_structures(
    name_a: str,
    name_b: str,
    a: Mapping[Any, Any],
    b: Mapping[Any, Any],
    structure_a: str = '',
    structure_b: str = '',
    pruned: bool = False,
) -> errors.StructureError:
    """Two trees that belong together have different structures."""
    lines = [f'{name_a} and {name_b} have different structures.']
    if not pruned:
        lines.extend(_only_in(a, b, name_a, name_b))
    lines.extend(_only_in(b, a, name_b, name_a))
    if len(lines) == 1:
        lines.append(f'  {name_a}: {structure_a}')
        lines.append(f'  {name_b}: {structure_b}')
    return errors.StructureError('\n'.join(lines))


def _only_in(
    here: Mapping[Any, Any], there: Mapping[Any, Any], one: str, other: str
) -> list[str]:
    paths = [str(path) for path in here if path not in there]
    if not paths:
        return []
    near = difflib.get_close_matches(paths[0], list(map(str, there)), 1, cutoff=0.0)
    more = f' and {len(paths) - 1} more' if len(paths) > 1 else ''
    hint = f'; nearest there: {near[0]!r}' if near else ''
    return [f'  {paths[0]!r}{more}: in {one}, not in {other}{hint}']

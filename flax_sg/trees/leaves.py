"""The leaves of any pytree, with the paths by which filters know them.

JAX names a leaf by a key path; a filter sees a ``Path``. They differ in four things:
'/' joins the names of a path. Leaves inside a box (``nn.Partitioned``) share the path
of the box. In a dict of collections the first name is the collection. Nested dicts are
modules and variables: everything below the last dict belongs to one variable.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors, filters
from flax_sg.filters.expressions import decide, find_unused, unknown_class
from flax_sg.filters.indices import whole_only
from flax_sg.filters.paths import Path, name_of, names_in
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
    collections = _is_variables(tree)
    paths = [
        _path_of(names, collections)
        for names, node in names_in(tree, is_whole)
        # A box is one name for all that is in it.
        for _ in jax.tree.leaves(node, is_leaf=is_whole)
    ]
    return Leaves([x for _, x in pairs], paths, [keys for keys, _ in pairs], treedef)


def path_of(keys: Keys) -> Path:
    """The path that a filter sees for a key path of JAX.

    >>> import jax
    >>> tree = {'enc': [1.0, {'w': 2.0}]}
    >>> [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]
    ['enc/0', 'enc/1/w']

    Args:
        keys: a key path, of any kind of keys.
    """
    return _path_of(tuple(map(name_of, keys)), False)


def _path_of(names: tuple[str, ...], collections: bool) -> Path:
    if collections and len(names) > 1:
        return Path.of(names[0], names[1:])
    return Path.of('params', names or ('',))


def _is_variables(tree: Any) -> bool:
    """Whether a tree is a dict of collections, as Flax's ``init`` returns it."""
    if not isinstance(tree, Mapping):
        return False
    known = 'params' in tree or OVERWRITE_WITH_GRADIENT in tree
    return known and all(isinstance(below, Mapping) for below in tree.values())


def selected(
    trees: Sequence[Sequence[Path]], where: filters.Filter, unused: str = 'raise'
) -> list[list[Any]]:
    """What a filter says of each leaf of some trees: a bool, or a ``Part`` of it.

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

"""The paths by which the leaves of a tree with modules of NNX are reached.

A module may stand at several places of the tree, and so may the modules in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from flax_sg import errors
from flax_sg.filters.paths import Path, shape_and_dtype
from flax_sg.internals.types import Array, Leaf

# A path as filters of NNX get it: names, and numbers for what is in a list.
Keys: TypeAlias = tuple[Any, ...]
# The same as filters of flax_sg get it.
Names: TypeAlias = tuple[str, ...]

# How many more paths than places the modules and leaves of a tree may have: modules
# that share modules, level by level, have paths without number.
MOST_PATHS = 10_000


class Ways:
    """The paths of the leaves of a tree. It has the ``id`` of nodes, and no node.

    Args:
        root: the tree.
        inside: for each module or container the keys in it, and the nodes that they
            lead to. All other nodes are leaves.
        path_of: makes the path that filters get: ``path_at``, of the first arguments.

    Attributes:
        first: the first path of each leaf, in the order of JAX.
    """

    def __init__(
        self,
        root: int,
        inside: Mapping[int, Sequence[tuple[Keys, int]]],
        path_of: Callable[..., Path],
    ) -> None:
        self._root, self._inside, self._path_of = root, inside, path_of
        self.first = dict(self._each_once())

    def _each_once(self) -> Iterator[tuple[int, Keys]]:
        """Yields each leaf by its first path: each module is walked through once."""
        stack, met = [((), self._root)], set[int]()
        while stack:
            keys, node = stack.pop()
            if node in met:
                continue
            met.add(node)
            if node not in self._inside:
                yield node, keys
            for more, child in reversed(self._inside.get(node, ())):
                stack.append(((*keys, *more), child))

    @functools.cached_property
    def every(self) -> dict[int, list[Keys]]:
        """All paths of each leaf, in the order of JAX; through no module twice.

        Raises:
            FilterTypeError: if there are too many.
        """
        paths = {leaf: list[Keys]() for leaf in self.first}
        stack: list[tuple[Keys, int, frozenset[int]]] = [((), self._root, frozenset())]
        left = MOST_PATHS + sum(map(len, self._inside.values()))
        while stack:
            keys, node, outer = stack.pop()
            if (left := left - 1) < 0:
                raise errors.FilterTypeError(
                    'Modules share modules so often that there are over '
                    f'{MOST_PATHS:,} more paths than places.\n'
                    'A filter is asked for each path of a weight.\n'
                    'Give the part of the model that is meant.'
                )
            if node not in self._inside:
                paths[node].append(keys)
            elif node not in outer:  # A module may have its parent in it.
                stack += [
                    ((*keys, *more), child, outer | {node})
                    for more, child in reversed(self._inside[node])
                ]
        return paths

    def at(self, names: Names) -> int | None:
        """The leaf at a path, or around it; None if there is none."""
        node = self._root
        while node in self._inside:
            below = self._below[node]
            ends = (n for n in range(len(names) + 1) if names[:n] in below)
            if (end := next(ends, None)) is None:
                return None
            node, names = below[names[:end]], names[end:]
        return node

    @functools.cached_property
    def _below(self) -> dict[int, dict[Names, int]]:
        return {
            node: {tuple(map(str, keys)): child for keys, child in children}
            for node, children in self._inside.items()
        }

    def tell(self, path: Path, leaf: int, inner: int = 0) -> Path:
        """The first path of a leaf, which knows the others from now on.

        Args:
            path: the path.
            leaf: the leaf.
            inner: how many of its last names lie within the value of a variable.
        """
        path.also = functools.partial(self._others, leaf, inner, path.array)
        return path

    def _others(self, leaf: int, inner: int, array: Array) -> Iterator[Path]:
        for keys in self.every[leaf][1:]:
            names, outer = tuple(map(str, keys)), len(keys) - inner
            yield self._path_of(names[:outer], names[outer:], array)


def path_at(
    names: Names,
    inner: Names = (),
    leaf: Leaf = None,
    collections: bool = False,
    outer: Names = (),
) -> Path:
    """The path that filters get, of a leaf of a tree.

    Args:
        names: the names of the variable.
        inner: those of the leaf, within the value of the variable.
        leaf: the leaf at the path, if a filter may ask for its shape.
        collections: whether the first name is that of a collection.
        outer: the names that all paths begin with.
    """
    array, names, count = shape_and_dtype(leaf), (*names, *inner), len(inner)
    if collections and len(names) > 1:
        return Path.of(names[0], (*outer, *names[1:]), (), count, array)
    return Path.of('params', (*outer, *names) or ('',), (), count, array)

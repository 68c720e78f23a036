"""The paths by which what stands in a tree is reached.

Modules of NNX may stand at several places, and hold modules that do. Then a weight has
paths without number. So only those are made that a filter can tell apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from flax_sg import errors
from flax_sg.filters.expressions import Atom
from flax_sg.filters.paths import Path, shape_and_dtype
from flax_sg.internals.weak import ByIdentity

# A path as filters of NNX get it: names, and numbers for what is in a list.
Keys: TypeAlias = tuple[Any, ...]
# The same as filters of flax_sg get it.
Names: TypeAlias = tuple[str, ...]

# How often a filter may go on through modules, each by all paths that it tells apart.
MOST = 100_000


class Ways:
    """The paths of the leaves of a tree. It keeps numbers, and none of the leaves.

    Args:
        root: the number of the tree.
        inside: what is in each module or container: keys, and what they lead to. What
            has nothing here is a leaf.
        path_of: makes the path that filters get: ``path_at``, of the first arguments.

    Attributes:
        first: the first path of each leaf, in the order of these.
    """

    def __init__(
        self,
        root: int,
        inside: Mapping[int, Sequence[tuple[Keys, int]]],
        path_of: Callable[..., Path],
    ) -> None:
        self._root, self._inside, self._path_of = root, inside, path_of
        self._is_cyclic = False
        self._of_atoms = ByIdentity[dict[int, list[Names]]]()
        self.first = dict[int, Keys]()
        for leaf, keys in self.by_path(lambda _: 0):
            self.first.setdefault(leaf, keys)

    def by_path(
        self, state_after: Callable[[Keys], Hashable | None]
    ) -> Iterator[tuple[int, Keys]]:
        """Yields each leaf by its paths, in the order of JAX.

        Args:
            state_after: what tells apart beginnings of paths. Of those that are equal
                the first one alone is followed. None if nothing is known.

        Raises:
            FilterTypeError: if there are too many.
        """
        met, is_cyclic = set[Hashable](), self._is_cyclic
        found: list[tuple[Keys, int, frozenset[int]]] = [((), self._root, frozenset())]
        while found:
            keys, node, around = found.pop()
            if node not in self._inside:
                yield node, keys
                continue
            # A module that holds the one around it has paths without end.
            if node in around:
                self._is_cyclic = True
                continue
            state = state_after(keys)
            mark = node, keys if state is None else state, is_cyclic and around
            if mark in met:
                continue
            met.add(mark)
            if len(met) > MOST:
                raise errors.FilterTypeError(
                    'Modules share modules so often that a weight has too many paths '
                    'for this filter.\n'
                    'A function, or a regular expression, is asked for each of them.\n'
                    "Write a glob, such as '**/kernel': it is followed through the "
                    'modules.'
                )
            around |= {node}
            found += [
                ((*keys, *more), child, around)
                for more, child in reversed(self._inside[node])
            ]

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
            node: {tuple(map(str, keys)): child for keys, child in rows}
            for node, rows in self._inside.items()
        }

    def tell(self, path: Path, leaf: int, inner: int = 0) -> Path:
        """A path of a leaf, which knows the others from now on.

        Args:
            path: the path.
            leaf: the leaf.
            inner: how many of its last names lie within a value.
        """
        path.also = functools.partial(self._others, leaf, inner, path.array)
        return path

    def _others(self, leaf: int, inner: int, array: Any, atom: Atom) -> Iterator[Path]:
        """Yields paths of a leaf, one for all that an atom takes alike."""
        paths = self._of_atoms.get(atom)
        if paths is None:
            paths = dict[int, list[Names]]()
            for found, keys in self.by_path(lambda keys: self._state_of(atom, keys)):
                paths.setdefault(found, []).append(tuple(map(str, keys)))
            self._of_atoms.put(atom, paths)
        for names in paths[leaf]:
            outer = len(names) - inner
            yield self._path_of(names[:outer], names[outer:], array)

    def _state_of(self, atom: Atom, keys: Keys) -> Hashable | None:
        path = self._path_of(tuple(map(str, keys)))
        state = atom.state_after(path)
        return None if state is None else (path.collection, state)


def path_at(
    names: Names,
    inner: Names = (),
    leaf: Any = None,
    collections: bool = False,
    outer: Names = (),
) -> Path:
    """The path that filters get, of a leaf of a tree.

    Args:
        names: the names of the variable.
        inner: those of the leaf, within the value of the variable.
        leaf: what is there, if a filter may ask for its shape.
        collections: whether the first name is that of a collection.
        outer: the names that all paths begin with.
    """
    array, names, count = shape_and_dtype(leaf), (*names, *inner), len(inner)
    if collections and len(names) > 1:
        return Path.of(names[0], (*outer, *names[1:]), (), count, array)
    return Path.of('params', (*outer, *names) or ('',), (), count, array)

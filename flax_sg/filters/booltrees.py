"""Trees of bools, in the shape of the variables, as filters."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from flax_sg import errors
from flax_sg.filters.expressions import Atom, Owner
from flax_sg.filters.names import without_variable
from flax_sg.filters.paths import Inner, Path, names_within, nearest
from flax_sg.filters.refusals import brief


@dataclasses.dataclass(frozen=True, eq=False)
class BoolTree(Atom):
    """The variables that a tree of bools, in the shape of the variables, marks True.

    A bool stands for everything below it, so a prefix of the tree will do. Every
    variable has to be in the tree; one outside the module that opened the block is
    not, and is not meant. Leaves in one box (``nn.Partitioned``) share its path, and
    therefore have to agree.

    >>> tree = BoolTree({'gln': True, 'dec': {'kernel': False}})
    >>> tree(Path.of('params', ('gln', 'dense', 'kernel')))
    True

    Raises:
        FilterTypeError: if a leaf is no bool.
        FilterValueError: when called, if the tree has no answer for the path.
    """

    names_leaves: ClassVar[bool] = True
    tree: Mapping[str, Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, 'tree', _bool_tree(self.tree, ()))

    @functools.cached_property
    def _leaves(self) -> dict[tuple[str, ...], bool]:
        return dict(_iter_leaves(self.tree, ()))

    @functools.cached_property
    def _value(self) -> Hashable:
        return frozenset(self._leaves.items())

    def _matches(self, path: Path) -> bool:
        if path.outside:
            return False
        node: Any = self.tree
        for depth, name in enumerate(path.parts):
            if isinstance(node, bool):
                return node
            if name not in node:
                raise self._misfit(path, depth)
            node = node[name]
        # Below the path are the leaves of one variable, if its value is a dict.
        return _agreed((take for _, take in _iter_leaves(node, ())), path.parts)

    @property
    def takes_nothing(self) -> bool:
        """Whether no leaf of the tree is True."""
        return not any(self._leaves.values())

    def _unused(
        self, took: bool, paths: Sequence[Path], owner: Owner
    ) -> errors.FilterValueError | None:
        variables = {path.parts for path in paths if not path.outside}
        modules = {parts[:n] for parts in variables for n in range(len(parts))}
        missing = [
            '/'.join(names)
            for names in self._leaves
            if names not in modules and names not in variables
        ]
        if not missing:
            return None
        leaves = 'leaf' if len(missing) == 1 else 'leaves'
        return errors.FilterValueError(
            '\n'.join(
                [
                    f'A tree of bools has {len(missing)} {leaves} without a variable:',
                    *without_variable(missing, paths),
                    'Fix: take them out of the tree, or spell them as the variables.',
                ]
            )
        )

    def _misfit(self, path: Path, depth: int) -> errors.FilterValueError:
        lines = [
            f'A tree of bools has no answer for the variable {str(path)!r} '
            f'of the collection {path.collection!r}.'
        ]
        near = nearest(path, ['/'.join(names) for names in self._leaves])
        if near:
            lines.append(f'Nearest in the tree: {", ".join(map(repr, near))}.')
        if depth == 0 and isinstance(self.tree.get(path.collection), Mapping):
            lines.append(
                'Fix: a tree starts below the collection. '
                f'Give tree[{path.collection!r}] in place of tree.'
            )
        else:
            branch = '/'.join(path.parts[: depth + 1])
            lines.append(f'Fix: give {branch!r} the value True or False in the tree.')
        return errors.FilterValueError('\n'.join(lines))

    def __reduce__(self) -> Any:
        return BoolTree, (_plain(self.tree),)

    def __repr__(self) -> str:
        return f'BoolTree({_plain(self.tree)!r})'

    def _text(self) -> str | None:
        return next(('/'.join(n) for n, take in self._leaves.items() if take), None)

    def _hint(self, paths: Sequence[Path], owner: Owner) -> str | None:
        if not self.takes_nothing:
            return None
        return 'no leaf of the tree is True: True selects, False leaves out.'


def _bool_tree(tree: Any, names: tuple[str, ...]) -> Any:
    """A read-only copy of a tree of bools, its leaves being Python's own."""
    if isinstance(tree, Mapping):
        odd = next((name for name in tree if not isinstance(name, str)), None)
        if odd is not None:
            raise errors.FilterTypeError(
                f'A tree of bools has the key {odd!r} ({type(odd).__name__})'
                f'{_at(names)}.\n'
                'Expected: the names of modules and variables, which are str.'
            )
        out: dict[str, Any] = {}
        for name, below in tree.items():  # No comprehension: trees may be deep.
            out[name] = _bool_tree(below, (*names, name))
        return types.MappingProxyType(out)
    leaves = jax.tree_util.tree_leaves(tree)
    wrong = [leaf for leaf in leaves if not isinstance(leaf, (bool, np.bool_))]
    if leaves and not wrong:
        parts = dict(names_within(tree))
        if () in parts or len(set(leaves)) == 1:  # A bool, or a box of them.
            return _agreed(map(bool, leaves), names)
        return _bool_tree(_nested(parts), names)
    raise errors.FilterTypeError(
        f'A tree of bools has {brief((*wrong, tree)[0])}{_at(names)}.\n'
        'Expected: True or False at every leaf, such as '
        "{'gln': True, 'dec': {'kernel': False, 'bias': True}}."
    )


def _nested(parts: Mapping[tuple[Inner, ...], Any]) -> dict[str, Any]:
    """A tuple or a dataclass of bools as a dict of the names in it."""
    out: dict[str, Any] = {}
    for names, below in parts.items():
        node = out
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = below
    return out


def _at(names: Sequence[str]) -> str:
    return f' at {"/".join(names)!r}' if names else ' at its top'


def _agreed(leaves: Iterable[bool], names: Sequence[str]) -> bool:
    """The one value of the leaves of one variable."""
    values = set(leaves)
    if len(values) > 1:
        raise errors.FilterValueError(
            f'A tree of bools has both True and False within {"/".join(names)!r}, '
            'whose leaves share one path.\n'
            'Fix: give it one bool.'
        )
    return True in values


def _iter_leaves(
    tree: Any, names: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], bool]]:
    if isinstance(tree, bool):
        yield names, tree
        return
    for name, below in tree.items():
        yield from _iter_leaves(below, (*names, name))


def _plain(tree: Any) -> Any:
    if isinstance(tree, bool):
        return tree
    return {name: _plain(below) for name, below in tree.items()}

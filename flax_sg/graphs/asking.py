"""Asks a filter for the Variables and arrays of an NNX model."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
from flax import nnx

from flax_sg import errors, filters
from flax_sg.errors.texts import raised_by, wrong_argument
from flax_sg.filters.expressions import Atom
from flax_sg.filters.paths import Path, is_parameter, shape_and_dtype
from flax_sg.filters.predicates import describe
from flax_sg.graphs.walks import Keys, Leaf, Names, Walk
from flax_sg.trees.leaves import is_whole, selected


class Asked(NamedTuple):
    """What a filter says of a leaf of a model.

    Attributes:
        leaf: the leaf.
        path: one of its paths, which knows others: the first one, or one by which a
            part of the filter takes it.
        said: the filter's answer for each array in the value, or one if there is none.
    """

    leaf: Leaf
    path: Path
    said: list[Any]

    @property
    def rows(self) -> list[tuple[Path, Any, Any]]:
        """For each array the path, the answer, and the array."""
        pairs = zip(self.said, self.leaf.arrays, strict=bool(self.leaf.arrays))
        return [(self.path, takes, array) for takes, array in pairs]


def parameters(path: Keys, value: Any) -> bool:
    """The kind that views take by default: ``nnx.Param``, and arrays in no Variable."""
    del path
    return is_parameter(value) and not is_whole(value)


# The kind that ``nnx.grad`` and ``nnx.Optimizer`` take.
IN_VARIABLES = nnx.OfType(nnx.Param)


def ask(call: str, walk: Walk, where: Any, kind: Any, unused: str) -> list[Asked]:
    """Asks a filter for each leaf of a kind, by all of its paths together.

    Args:
        call: the function that the user calls, for errors.
        walk: the model.
        where: the filter.
        kind: an NNX filter of what ``where`` is asked for.
        unused: ``'raise'`` or ``'ignore'`` if ``kind`` or a part of ``where`` matches
            nothing.

    Raises:
        ArgumentTypeError: if there is no module.
        UnusedFilterError: if ``kind`` or a part of ``where`` matches nothing.
    """
    if not walk.modules:
        raise wrong_argument(walk.model, 'NNX module', f'{call}(model, where)')
    where, is_kind = filters.as_filter(where), nnx.filterlib.to_predicate(kind)
    leaves = [leaf for leaf in walk.leaves if is_kind(leaf.keys, leaf.value)]
    if kind not in (parameters, IN_VARIABLES):
        call = f'{call}(kind={_shown(kind)})'
        if not leaves and unused == 'raise':
            raise errors.UnusedFilterError(
                f'{call}: the kind matches nothing in the model.\n'
                f'There are: {_kinds_in(walk.leaves) or "no Variables"}.\n'
                'Write a type, such as kind=nnx.Param, or leave kind= out.'
            )
    paths = {leaf: _paths(leaf, leaf.names) for leaf in leaves}
    for atom in () if walk.is_tree else where.atoms:
        _find_others(walk, atom, paths)
    every = [path for several in paths.values() for path in several]
    with raised_by(call):
        try:
            said = iter(selected([every], where, unused)[0])
        except errors.UnusedFilterError as error:
            # It may be the path of another kind.
            lost = (x for x in where.atoms if not any(_takes(x, p) for p in every))
            atom = next(lost, filters.as_filter(False))
            beside = [x for x in walk.leaves if _takes(atom, *_paths(x, x.names))]
            if beside:
                head, *_, last = str(error).splitlines()
                other = f'It takes others: write kind={_kinds_in(beside)}.'
                error.args = (f'{head}\n{other}\n{last}',)
            raise
    return [Asked(x, of[0], [next(said) for _ in of]) for x, of in paths.items()]


def _paths(leaf: Leaf, names: Names) -> list[Path]:
    """A path for each array in a leaf, or one if there is none.

    A Variable is a box: its arrays share its path, and differ in their shapes.
    """
    arrays = [*map(shape_and_dtype, leaf.arrays)] or [None]
    return [Path.of('params', names, array=array) for array in arrays]


def _find_others(walk: Walk, atom: Atom, paths: dict[Leaf, list[Path]]) -> None:
    """Puts a path by which an atom takes a leaf before others; it knows these.

    It is searched for each atom alone: there may be thousands of paths.
    """

    def state_after(keys: Keys) -> Hashable | None:
        return atom.state_after('/'.join(map(str, keys)))

    left = {leaf for leaf, own in paths.items() if not _takes(atom, *own)}
    for leaf, keys in walk.by_path(state_after) if left else ():
        others = _paths(leaf, tuple(map(str, keys)))
        if leaf in left and _takes(atom, *others):
            left.discard(leaf)
            for path, other in zip(paths[leaf], others, strict=True):
                other.also, path.also = (path, *path.also), ()
            paths[leaf] = others


def _takes(where: filters.Filter, *paths: Path) -> bool:
    try:
        return any(map(where, paths))
    except errors.FlaxSGError:  # A tree of bools has one path of tied weights.
        return False


def _shown(kind: Any) -> str:
    if not isinstance(kind, type):
        return describe(kind) if callable(kind) else repr(kind)
    if issubclass(kind, jax.Array):
        return 'jax.Array'
    return f'nnx.{kind.__name__}' if hasattr(nnx, kind.__name__) else kind.__name__


def _kinds_in(leaves: list[Leaf]) -> str:
    names = dict.fromkeys(_shown(type(leaf.value)) for leaf in leaves)
    return ', '.join(names) if len(names) < 2 else f'({", ".join(names)})'

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
        path: the first of its paths that the filter takes; the first one if there is
            none. It knows others.
        said: the filter's answer for each array in the value, or one if there is none.
    """

    leaf: Leaf
    path: Path
    said: list[Any]


def parameters(path: Keys, value: Any) -> bool:
    """The kind that views take by default: ``nnx.Param``, and arrays in no Variable."""
    del path
    is_param = isinstance(value, nnx.Param)  # Of most it is all there is to ask.
    return is_param or (is_parameter(value) and not is_whole(value))


def in_variables(path: Keys, value: Any) -> bool:
    """The kind that ``nnx.grad`` and ``nnx.Optimizer`` take: ``nnx.Param`` alone."""
    del path
    return isinstance(value, nnx.Param)


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
    if kind not in (parameters, in_variables):
        call = f'{call}(kind={_shown(kind)})'
        if not leaves and unused == 'raise':
            raise errors.UnusedFilterError(
                f'{call}: the kind matches nothing in the model.\n'
                f'There are: {_kinds_in(walk.leaves) or "no Variables"}.\n'
                'Write a type, such as kind=nnx.Param, or leave kind= out.'
            )
    arrays = {leaf: _arrays_of(leaf) for leaf in leaves}
    names = _names(walk, where, arrays)
    # A Variable is a box: its arrays share its path, and differ in their shapes.
    rows = [[_path(where, names[x], array) for array in arrays[x]] for x in leaves]
    with raised_by(call):
        try:
            said = iter(selected([[p for of in rows for p in of]], where, unused)[0])
        except errors.UnusedFilterError as error:
            lost = [x for x in where.atoms if not any(_holds(x, y) for y in leaves)]
            beside = [x for x in walk.leaves if lost and _holds(lost[0], x)]
            if beside:
                head, *_, last = str(error).splitlines()
                other = f'It takes others: write kind={_kinds_in(beside)}.'
                error.args = (f'{head}\n{other}\n{last}',)
            raise
    return [
        Asked(leaf, paths[0], [next(said) for _ in paths])
        for leaf, paths in zip(leaves, rows, strict=True)
    ]


def _shown(kind: Any) -> str:
    if not isinstance(kind, type):
        return describe(kind) if callable(kind) else repr(kind)
    if issubclass(kind, jax.Array):
        return 'jax.Array'
    return f'nnx.{kind.__name__}' if hasattr(nnx, kind.__name__) else kind.__name__


def _kinds_in(leaves: list[Leaf]) -> str:
    names = dict.fromkeys(_shown(type(leaf.value)) for leaf in leaves)
    return ', '.join(names) if len(names) < 2 else f'({", ".join(names)})'


def _arrays_of(leaf: Leaf) -> list[Any]:
    leaves = jax.tree.leaves(leaf.value, is_leaf=is_whole)
    return [*map(shape_and_dtype, leaves)] or [None]


def _names(
    walk: Walk, where: filters.Filter, arrays: dict[Leaf, list[Any]]
) -> dict[Leaf, list[Names]]:
    """For each leaf its first path, and one for each atom that does not take this.

    A path is searched for each atom alone: there may be thousands of paths.
    """
    found = {leaf: [leaf.names] for leaf in arrays}
    for atom in () if walk.is_tree else where.atoms:

        def state_after(keys: Keys, atom: Atom = atom) -> Hashable | None:
            return atom.state_after('/'.join(map(str, keys)))

        left = {leaf for leaf in arrays if not _holds(atom, leaf)}
        for leaf, keys in walk.by_path(state_after) if left else ():
            names = tuple(map(str, keys))
            if leaf in left and _holds(atom, leaf, names):
                found[leaf].append(names)
                left.discard(leaf)
    return found


def _path(where: filters.Filter, names: list[Names], array: Any) -> Path:
    """The first path of a leaf that a filter takes; it knows the others."""
    first, *others = paths = [Path.of('params', x, array=array) for x in names]
    if others:
        first = next((path for path in paths if _takes(where, path)), first)
        first.also = tuple(path for path in paths if path is not first)
    return first


def _holds(where: filters.Filter, leaf: Leaf, names: Names | None = None) -> bool:
    """Whether a filter takes any of the arrays in a leaf, by one of its paths."""
    paths = (
        Path.of('params', names or leaf.names, array=array)
        for array in _arrays_of(leaf)
    )
    return any(_takes(where, path) for path in paths)


def _takes(where: filters.Filter, path: Path) -> bool:
    try:
        return bool(where(path))
    except errors.FlaxSGError:  # A tree of bools has one path of tied weights.
        return False

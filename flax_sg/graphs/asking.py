"""Asks a filter for the Variables of an NNX model; ``nnx.where``."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
from flax import nnx

from flax_sg import errors, filters
from flax_sg.errors.texts import raised_by, wrong_argument
from flax_sg.filters.paths import Path, shape_and_dtype
from flax_sg.graphs.walks import Names, Walk
from flax_sg.trees.leaves import is_array, is_whole, of_a_part, selected

# A Variable, the first of its paths that a filter takes, and what the filter says of
# each leaf of its value.
Asked: TypeAlias = tuple[nnx.Variable[Any], Path, list[Any]]


def ask(call: str, walk: Walk, where: Any, kind: Any, unused: str) -> list[Asked]:
    """Asks a filter for each Variable of a kind, by all of its paths together.

    Args:
        call: the function that the user calls, for errors.
        walk: the model.
        where: the filter.
        kind: an NNX filter of the Variables that ``where`` is asked for.
        unused: ``'raise'`` or ``'ignore'`` if a part of ``where`` matches nothing.

    Returns:
        The Variables of the kind. A value without leaves has one answer, too.

    Raises:
        ArgumentTypeError: if there is no module.
        UnusedFilterError: if a part of ``where`` matches no Variable.
    """
    if not walk.modules:
        raise wrong_argument(walk.model, 'NNX module', f'{call}(model, where)')
    where, is_kind = filters.as_filter(where), nnx.filterlib.to_predicate(kind)
    places: dict[int, tuple[nnx.Variable[Any], list[Names]]] = {}
    for names, variable in walk.variables():
        if is_kind(names, variable):
            places.setdefault(id(variable), (variable, []))[1].append(names)
    with raised_by(call):
        # A Variable is a box: its leaves share its path, and differ in their shapes.
        rows = [
            (variable, [_path(where, names, array) for array in _arrays_of(variable)])
            for variable, names in places.values()
        ]
        paths = [path for _, of_leaves in rows for path in of_leaves]
        said = iter(selected([paths], where, unused)[0])
    return [(x, paths[0], [next(said) for _ in paths]) for x, paths in rows]


def _arrays_of(variable: nnx.Variable[Any]) -> list[Any]:
    leaves = jax.tree.leaves(variable.get_raw_value(), is_leaf=is_whole)
    return [*map(shape_and_dtype, leaves)] or [None]


def _path(where: filters.Filter, names: list[Names], array: Any) -> Path:
    """The first path of a leaf that a filter takes; it knows the others."""
    paths = [Path.of('params', each, array=array) for each in names]
    # It need not be asked here if it is the only one.
    several = paths if len(paths) > 1 else ()
    chosen = next((path for path in several if _takes(where, path)), paths[0])
    chosen.also = tuple(path for path in paths if path is not chosen)
    return chosen


def _takes(where: filters.Filter, path: Path) -> bool:
    try:
        return bool(where(path))
    except errors.FlaxSGError:  # A tree of bools has one path of tied weights.
        return False


@dataclasses.dataclass(frozen=True)
class ByPath:
    """An NNX filter of the Variables that a filter of flax_sg selects."""

    filter: filters.Derived

    def __call__(self, path: Names, value: Any) -> bool:
        """Whether it is a Variable, and is selected at its path."""
        names = tuple(map(str, path))
        return not is_array(value) and bool(self.filter(Path.of('params', names)))


def where(
    model: Any, where: filters.Where, *, kind: Any = nnx.Param, unused: str = 'raise'
) -> ByPath:
    """Turns a filter of flax_sg into an NNX filter, and checks its names at once.

    >>> import optax, flax_sg as sg
    >>> from flax_sg import nnx
    >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.relu)
    >>> kernels = nnx.where(model, '**/kernel')
    >>> [path for path, _ in nnx.to_flat_state(nnx.state(model, kernels))]
    [('layers', 0, 'kernel')]
    >>> optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=kernels)
    >>> nnx.where(model, '**/kernle')
    Traceback (most recent call last):
        ...
    flax_sg.errors.UnusedFilterError: nnx.where: Glob('**/kernle') matches none of ...

    Args:
        model: an NNX module.
        where: what is selected: any kind of filter, such as ``sg.live`` returns. Paths
            begin in the model. Tied weights are selected by any of their paths.
        kind: the Variables that may be selected, as an NNX filter: a type, a tag, or
            several. Default ``nnx.Param``.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        A filter for ``nnx.DiffState``, ``nnx.Optimizer(wrt=)``, ``nnx.state``,
        ``nnx.split`` and all else that takes one. Two are equal if they select the same
        of the same paths.

    Raises:
        ArgumentTypeError: if ``model`` is no NNX module.
        UnusedFilterError: if a part of ``where`` matches no Variable.
        PartError: if ``where`` means a part of a Variable, or some leaves of its value.
        UnknownNameError: later, if it is asked for a path that the model has not.
    """
    walk = Walk(model)
    found = [one for one in ask('nnx.where', walk, where, kind, unused) if any(one[2])]
    for _, path, said in found:
        if not all(takes is True for takes in said):
            raise of_a_part(path, 'an NNX filter')
    # Flax asks for one path of tied weights, and any of them may be it.
    meant = {id(variable) for variable, *_ in found}
    places = [(('params', names), id(one) in meant) for names, one in walk.variables()]
    selected = frozenset(place for place, is_meant in places if is_meant)
    known = frozenset(place for place, _ in places)
    return ByPath(filters.Derived(selected, known, 'nnx.where'))

"""The Variables of an NNX model by path, and which of them a filter selects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from flax import nnx

from flax_sg import errors, filters
from flax_sg.errors.texts import raised_by, wrong_argument
from flax_sg.filters.paths import Path
from flax_sg.trees.leaves import selected, whole

Names: TypeAlias = tuple[Any, ...]


# A Variable, one of its paths, and what a filter says of it there. Tied weights have
# several paths, and there is one of these for each.
Chosen: TypeAlias = tuple[nnx.Variable[Any], Path, Any]


def choose(
    call: str, model: Any, where: filters.Where, kind: Any, unused: str
) -> list[Chosen]:
    """Asks a filter for each Variable of a model, by each of its paths.

    Args:
        call: how the call is written, for errors.
        model: an NNX module, or a container of them.
        where: the filter.
        kind: an NNX filter of the Variables that ``where`` is asked for. No others are
            selected.
        unused: ``'raise'`` or ``'ignore'`` if a part of ``where`` matches nothing.

    Raises:
        ArgumentTypeError: if there is no module, or a Variable is a hijax one.
        UnusedFilterError: if a part of ``where`` matches no Variable.
    """
    if not modules_of(model):
        raise wrong_argument(model, 'NNX module', call)
    is_meant, groups = nnx.filterlib.to_predicate(kind), nnx.find_duplicates(model)
    variables = [
        (node, Path.of('params', tuple(map(str, alias))), is_meant(names, node))
        for names, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Variable)
        for alias in _aliases(names, groups)
    ]
    asked = [path for _, path, meant in variables if meant]
    with raised_by(call.partition('(')[0]):
        said = iter(selected([asked], filters.as_filter(where), unused)[0])
    found = [(v, path, meant and next(said)) for v, path, meant in variables]
    for variable, path, takes in found:
        if takes and nnx.Variable not in type(variable).__mro__:
            raise errors.ArgumentTypeError(
                f'{str(path)!r} is a hijax Variable, which has no type of its own.\n'
                'Make it without hijax=True, or stop what you read: '
                'jax.lax.stop_gradient(variable[...]).'
            )
    return found


def modules_of(model: Any) -> list[Any]:
    """The modules in a model, and the containers among them; each is there once."""
    if isinstance(model, nnx.State):
        return []
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Pytree)]


def _aliases(names: Names, groups: Sequence[Sequence[Names]]) -> Iterator[Names]:
    """The paths of a Variable. One that it shares with others leads to more.

    Args:
        names: one path.
        groups: the paths of each module or Variable that has several.
    """
    found = {names: None}
    for group in groups:
        rest = [other for other in groups if other is not group]
        for head in group:
            if names[: len(head)] != head:
                continue
            for other in group:
                # A module that holds the one around it has paths without end.
                if other[: len(head)] != head:
                    longer = other + names[len(head) :]
                    found |= dict.fromkeys(_aliases(longer, rest))
    return iter(found)


@dataclasses.dataclass(frozen=True)
class ByPath:
    """An NNX filter of the Variables that a filter of flax_sg selects."""

    filter: filters.Derived

    def __call__(self, path: Names, value: Any) -> bool:
        """Whether the Variable at a path of the model is selected."""
        del value
        return bool(self.filter(Path.of('params', tuple(map(str, path)))))


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
        PartError: if ``where`` means a part of a Variable.
        UnknownNameError: later, if it is asked for a path that the model has not.
    """
    found = choose("nnx.where(model, 'head/**')", model, where, kind, unused)
    paths = [path for _, path, _ in found]
    whole([said for *_, said in found], paths, 'an NNX filter')
    # Flax asks for one path of tied weights, and any of them may be it.
    meant = {id(variable) for variable, _, said in found if said}
    names = frozenset(path.place for v, path, _ in found if id(v) in meant)
    known = frozenset(path.place for path in paths)
    return ByPath(filters.Derived(names, known, 'nnx.where'))

"""``adopt``: the state of one selection, taken along to another one.

One rule: a value of the new state is that of the old state at the same key path, if it
has the same shape and dtype; else it is fresh. Where rows are frozen, an array holds
the trained rows alone; both arrays are then made whole first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from flax_sg import errors, filters
from flax_sg.errors.texts import wrong_argument
from flax_sg.filters.paths import name_of
from flax_sg.optim.freezing import Freeze
from flax_sg.optim.masks import parameters_of
from flax_sg.trees.leaves import Leaves, is_differentiable, is_number, selected, whole
from flax_sg.trees.rows import Choice, is_cut, mask_of, shape_of_part, whole_of

# The names that lead to a value of a state.
Names: TypeAlias = tuple[str, ...]

# States that remember steps of all parameters together: what they know of some of them
# is of no use beside others.
_OF_ONE_SELECTION = (
    'ScaleByLBFGSState',
    'ScaleByBacktrackingLinesearchState',
    'ScaleByZoomLinesearchState',
    'ScaleByOptimisticGradientState',
)


def adopt(
    tx: Any,
    params: Any,
    state: Any,
    *earlier: Any,
    old: Any = None,
    fresh: filters.Where = False,
    report: Callable[[dict[str, list[str]]], Any] | None = None,
) -> Any:
    """Keeps the optimizer's state when you freeze or thaw parameters.

    Make ``tx`` of the new selection, and give ``adopt`` the old state. What was trained
    before keeps its moments.

    >>> import jax.numpy as jnp, optax, flax_sg as sg
    >>> params = {'body': jnp.ones(2), 'head': jnp.ones(1)}
    >>> sgd = optax.sgd(0.1, momentum=0.9)
    >>> tx = sg.freeze(sgd, 'body')
    >>> updates, state = tx.update({'head': jnp.ones(1)}, tx.init(params), params)
    >>> sg.adopt(sgd, params, state)[0].trace
    {'body': Array([0., 0.], dtype=float32), 'head': Array([1.], dtype=float32)}
    >>> thawed = sg.adopt(sgd, params, state, report=print)
    {'carried': ['head'], 'in part': [], 'fresh': ['body'], 'dropped': []}

    Args:
        tx: a transformation from ``sg.freeze``, or the one that it wraps.
        params: the parameters.
        state: a state of the same transformation, frozen in other places or nowhere;
            also of parameters with other names among these, and as ``nnx.Optimizer``
            or a checkpoint has it. States of several seeds with an axis of their own
            are adopted one by one, under ``jax.vmap``.
        *earlier: more of them, for what ``state`` does not know.
        old: the transformation that made ``state``, or a list with one for each state.
            It is needed if it or ``tx`` freezes rows of an array (``sg.at``): a state
            does not tell which rows it is of.
        fresh: the parameters that begin anew, whatever the states know: any kind of
            filter. None by default.
        report: called with a dict of four lists, as printed above: the parameters whose
            values were carried, were carried in part, are fresh, or were dropped. What
            belongs to no parameter is named by its place in the state.

    Returns:
        A state of ``tx``. A value comes from the first state that has one at the same
        key path, of the same shape and dtype, and from ``tx.init`` if none has. What is
        frozen now is dropped, rows and elements included: if it is to go on later from
        where it was, keep the state of today, and give it as ``earlier`` then.

        A jitted step compiles once for each selection. What optimizers share among
        parameters goes on: Adam's count of steps does, so new moments are taken for old
        ones, and begin with larger updates. ``optax.tree_utils.tree_set(state,
        count=0)`` counts anew. The hyperparameters of ``optax.inject_hyperparams`` are
        those of ``tx``. What L-BFGS, a line search and optimistic gradients remember
        belongs to one selection: it begins anew with another.

    Raises:
        ArgumentTypeError: if ``tx`` is no transformation.
        StructureError: if a state is that of another transformation.
        StructureError: if rows are frozen, and ``old`` is not given.
        StructureError: if ``tx`` keeps one array for all parameters, as
            ``optax.flatten`` does.
    """
    if not hasattr(tx, 'init'):
        write = 'sg.adopt(tx, params, state, old=old_tx)'
        raise wrong_argument(tx, 'optax transformation', write)
    states = (state, *earlier)
    made_by = [old] * len(states) if old is None or hasattr(old, 'init') else old
    sources = [
        _Source(dict(_named(given)), None if by is None else _Selection.of(by, params))
        for given, by in zip(states, made_by, strict=True)
    ]
    new = tx.init(params)
    pairs = _named(new)
    every = [*dict(pairs), *(names for source in sources for names in source.values)]
    to = _Selection.of(tx, params).among(every)
    for given, source in zip(states, sources, strict=True):
        _check(to, dict(pairs), given, source)
    [said] = selected([to.leaves.paths], filters.as_filter(fresh))
    begin = whole(said, to.leaves.paths, 'fresh=')
    values: list[Any] = []
    found: dict[str, set[str]] = {}
    for names, made in pairs:
        number = to.owner_of(names)
        value, what = made, 'fresh'
        begins = 'hyperparams' in to.around(names)
        if not begins and not (number is not None and begin[number]):
            value, what = _adopted(to, names, made, sources)
        values.append(value)
        found.setdefault(to.name_of(names), set()).add(what)
    if report is not None:
        lists: dict[str, list[str]] = {'carried': [], 'in part': [], 'fresh': []}
        for name, all_of in sorted(found.items()):
            lists[all_of.pop() if len(all_of) == 1 else 'in part'].append(name)
        known = {to.name_of(names) for source in sources for names in source.values}
        report({**lists, 'dropped': sorted(known - found.keys())})
    return jax.tree.structure(new, is_leaf=_is_one).unflatten(values)


class _Selection(NamedTuple):
    """What a transformation trains of the parameters.

    Attributes:
        leaves: the parameters.
        trained: for each whether it is trained, or which rows or part of it.
        places: the number of each, by its names.
        outer: the names that lead to trees like the parameters. A tuple or a label in
            them may have the name of a parameter.
    """

    leaves: Leaves
    trained: Sequence[Any]
    places: dict[Names, int]
    outer: frozenset[Names] = frozenset()

    @classmethod
    def of(cls, tx: Any, params: Any) -> _Selection:
        """The selection of a transformation: everything, if ``sg.freeze`` made none."""
        freeze = getattr(tx.init, '__self__', None)
        leaves = parameters_of(params)
        trained: Sequence[Any] = [True] * len(leaves.values)
        if isinstance(freeze, Freeze):
            leaves, trained = freeze.parameters(params)
        places = {_names_of(keys): n for n, keys in enumerate(leaves.key_paths)}
        return cls(leaves, trained, places)

    def among(self, every: Iterable[Names]) -> _Selection:
        """The same, for states whose values have these names."""
        found = ((names, self.spot_of(names)) for names in every)
        roots = {n[: at[0]] for n, at in found if at is not None and at[1] == len(n)}
        outer = (root[:count] for root in roots for count in range(len(root) + 1))
        return self._replace(outer=frozenset(outer))

    def spot_of(self, names: Names) -> tuple[int, int] | None:
        """Where in the names of a value those of a parameter are; the last ones."""
        for last in range(len(names), -1, -1):
            for first in range(last + 1):
                is_outer = last < len(names) and names[:last] in self.outer
                if names[first:last] in self.places and not is_outer:
                    return first, last
        return None

    def owner_of(self, names: Names) -> int | None:
        """The parameter that a value belongs to, if it does to one."""
        spot = self.spot_of(names)
        return None if spot is None else self.places[names[slice(*spot)]]

    def name_of(self, names: Names) -> str:
        """The parameter that a value belongs to, or its own place."""
        number = self.owner_of(names)
        return '/'.join(names) if number is None else str(self.leaves.paths[number])

    def around(self, names: Names) -> Names:
        """The names of a value without those of its parameter."""
        spot = self.spot_of(names)
        return names if spot is None else (*names[: spot[0]], '*', *names[spot[1] :])


class _Source(NamedTuple):
    """An old state.

    Attributes:
        values: its values by their names.
        selection: what was trained; None if nobody says so.
    """

    values: dict[Names, Any]
    selection: _Selection | None


def _names_of(keys: Iterable[Any]) -> Names:
    """The names of a key path; a box, or a Variable of NNX, is its value."""
    return tuple(name_of(key) for key in keys if key != GetAttrKey('value'))


def _named(state: Any) -> list[tuple[Names, Any]]:
    """The values of a state, with the names that lead to them."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_one)
    return [(_names_of(keys), value) for keys, value in pairs]


def _is_one(node: Any) -> bool:
    return type(node).__name__ in _OF_ONE_SELECTION


def _type(value: Any) -> Any:
    """The structure of a value, and the shapes and dtypes in it."""
    leaves, treedef = jax.tree.flatten(value)
    kinds = [jnp.result_type(x) if is_number(x) else type(x) for x in leaves]
    return treedef, [*map(np.shape, leaves)], kinds


def _adopted(
    to: _Selection, names: Names, made: Any, sources: Sequence[_Source]
) -> tuple[Any, str]:
    """A value of the new state, and whether it was carried, in part, or is fresh."""
    number, kind = to.owner_of(names), _type(made)
    given = [(x.values[names], x.selection) for x in sources if names in x.values]
    shape = () if number is None else np.shape(to.leaves.values[number])
    of_all = _is_one(made) or np.shape(made) == () != shape
    if number is None or of_all or not to.trained[number]:
        for value, selection in given:
            same = selection is None or selection.trained == to.trained
            if _type(value) == kind and (same or not _is_one(made)):
                return value, 'carried'
        return made, 'fresh'
    path, now = to.leaves.paths[number], to.trained[number]
    trains = mask_of(now, shape, path)
    out, known, left = made, np.False_, np.False_
    for value, selection in reversed(given):  # The first one has the last word.
        was = True if selection is None else selection.trained[number]
        if was == now and _type(value) == kind:
            out, known, left = value, np.True_, np.False_
        elif (
            np.shape(made) == shape_of_part(now, shape)
            and np.shape(value) == shape_of_part(was, shape)
            and _type(value)[2] == kind[2]
        ):
            knew = mask_of(was, shape, path)
            both = (whole_of(*pair, shape) for pair in ((was, value), (now, out)))
            out = jnp.where(trains & knew, *both)
            out = now.cut(out, len(shape)) if isinstance(now, Choice) else out
            known, left = known | knew, left | (knew & ~trains).any()
    if not (known & trains).any():
        return made, 'fresh'
    return out, 'carried' if (known | ~trains).all() and not left else 'in part'


def _check(to: _Selection, new: dict[Names, Any], state: Any, source: _Source) -> None:
    """Raises if a state is of another transformation, or of rows that nobody names."""
    ours, theirs = ({*map(to.around, values)} for values in (new, source.values))
    if ours and not ours & theirs and (theirs or state is None or state == {}):
        their, our = (
            min('/'.join(names) for names in x or [()]) for x in (theirs, ours)
        )
        raise errors.StructureError(
            f'sg.adopt: the state has {repr(their) if their else "nothing"}, where the '
            f'new state has {our!r}.\n'
            'It is the state of another transformation, or of other parameters: give '
            'that of what sg.freeze wraps, sg.adopt(tx, params, state).'
        )
    sizes = [
        int(np.prod(shape_of_part(takes, np.shape(leaf))))
        for takes, leaf in zip(to.trained, to.leaves.values, strict=True)
        if takes
    ]
    for names, made in new.items():
        number = to.owner_of(names)
        if number is None:
            if is_differentiable(made) and (sum(sizes),) == np.shape(made) != (1,):
                raise errors.StructureError(
                    f'sg.adopt: {"/".join(names)!r} of the state is one array for '
                    'several parameters, as optax.flatten makes it, and cannot be '
                    'taken apart.\n'
                    'Begin anew with tx.init(params), or leave optax.flatten out.'
                )
            continue
        shape = np.shape(to.leaves.values[number])
        whole_now = getattr(made, 'shape', None) == shape
        cut = whole_now and is_cut(source.values.get(names), shape)
        if source.selection is None and (cut or isinstance(to.trained[number], Choice)):
            raise errors.StructureError(
                f'sg.adopt: rows of {str(to.leaves.paths[number])!r} are frozen, in '
                'the old state or in the new one.\n'
                'A state does not tell which rows it is of.\n'
                'Give the transformation that made it: sg.adopt(tx, params, state, '
                'old=old_tx).'
            )

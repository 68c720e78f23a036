"""``adopt``: the state of one selection, taken along to another one.

One rule: a value of the new state is that of the old state at the same key path, if it
has the same shape and dtype; else it is fresh. Where rows are frozen, a state has the
trained rows alone; both arrays are then made whole first. A count of steps is fresh if
all moments in the same part of the state are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors, filters
from flax_sg.errors.texts import brief, listed, raised_by, wrong_argument
from flax_sg.internals.places import Place, warn_once
from flax_sg.internals.types import Decision, Leaf, PyTree, Transformation
from flax_sg.optim.belonging import check_transformation
from flax_sg.optim.masks import parameters_of
from flax_sg.optim.owners import (
    Owner,
    is_of_one_selection,
    owners_of,
    remembers,
    values_of,
)
from flax_sg.optim.selections import Names, Selection
from flax_sg.trees.leaves import is_number, shape_of
from flax_sg.trees.rows import Rows, is_cut, mask_of, shape_of_part, whole_of


def adopt(
    tx: Transformation,
    params: PyTree,
    state: PyTree,
    *earlier: Any,
    old: Transformation | Sequence[Transformation] = None,
    report: Callable[[dict[str, list[str]]], Any] | None = None,
) -> PyTree:
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
        tx: a transformation with ``sg.freeze`` in it, or one without.
        params: the parameters.
        state: a state of the same transformation, frozen in other places or nowhere.
        *earlier: more of them, for what ``state`` does not know.
        old: the transformation that made ``state``, or a list with one for each state.
            Needed if it or ``tx`` freezes rows of an array (``sg.at``).
        report: called with what became of the parameters, as printed above.

    Returns:
        A state of ``tx``. The page "Train in stages" has a table of what is carried.

    Raises:
        ArgumentTypeError: if ``tx`` or ``old`` is no transformation.
        StructureError: if a state is that of another transformation, or if ``tx``
            freezes rows and ``old`` is not given.
    """
    states = state, *earlier
    makers = _makers(tx, old, len(states))
    if isinstance(params, tuple) and not isinstance(state, (tuple, list)):
        _check_order(tx, params, state)
    values = [dict(values_of(old_state)) for old_state in states]
    new, leaves = tx.init(params), parameters_of(params)
    pairs = values_of(new)
    every = [*dict(pairs), *itertools.chain(*values)]
    owners = owners_of(tx, leaves, every)
    # The filter of ``old`` is asked for all parameters of today.
    with raised_by('old= of sg.adopt'):
        owners_before = [
            maker if maker is None else owners_of(maker, leaves, every)
            for maker in makers
        ]
    for old_state, old_values, old_owners in zip(
        states, values, owners_before, strict=True
    ):
        check_transformation(owners, new, old_state, dict(pairs), old_values)
        if old_owners is None:
            _check_rows(owners, pairs)
        if old_owners is None and report is None:  # A report names them.
            _warn_of_rows(owners, pairs, old_values)
    outcomes: dict[Names, tuple[Any, str]] = {}
    # For each part of the state what became of the moments in it.
    moments: dict[Names, set[str]] = {}
    for names, initial in pairs:
        owner = owners[names]
        candidates = [
            (old_values[names], None if old_owners is None else old_owners[names])
            for old_values, old_owners in zip(values, owners_before, strict=True)
            if names in old_values and not owner.is_hyperparameter
        ]
        if filters.is_meant(owner.trained):
            outcomes[names] = _of_one(initial, candidates, owner)
        else:
            outcomes[names] = _of_all(initial, candidates, owner)
        if owner.parameter >= 0 or not owner.is_known:
            moments.setdefault(owner.part, set()).add(outcomes[names][1])
    for names, initial in pairs:
        if moments.get(owners[names].part) == {'fresh'}:
            outcomes[names] = initial, 'fresh'  # A count is as old as its moments.
    if report is None:
        _warn_of_unknown(
            owners[names].name
            for names, initial in pairs
            if not owners[names].is_known and outcomes[names][1] == 'fresh'
            if shape_of(initial) != () and any(names in each for each in values)
        )
    else:
        report(_lists(owners, outcomes, itertools.chain(*values)))
    carried = [outcomes[names][0] for names, _ in pairs]
    return jax.tree.structure(new, is_leaf=is_of_one_selection).unflatten(carried)


def _check_order(tx: Transformation, params: PyTree, state: PyTree) -> None:
    """Raises if what is given as parameters is a state, and the other way round."""
    with contextlib.suppress(Exception):
        if isinstance(state, type(tx.init(params))):
            return
    raise errors.ArgumentTypeError(
        f'sg.adopt: params and state are exchanged: params is {brief(params)}, as a '
        f'state is, and state is {brief(state)}.\n'
        'Write sg.adopt(tx, params, state).'
    )


def _makers(tx: Transformation, old: Any, count: int) -> Sequence[Any]:
    """The transformation that made each state, None if it is not given.

    Raises:
        ArgumentTypeError: if ``tx`` or one of them is no transformation.
    """
    write = 'sg.adopt(tx, params, state, old=old_tx)'
    if not hasattr(tx, 'init'):
        raise wrong_argument(tx, 'optax transformation', write)
    makers = [old] * count if old is None or hasattr(old, 'init') else old
    is_list = isinstance(makers, (list, tuple)) and len(makers) == count
    if not (
        is_list and all(maker is None or hasattr(maker, 'init') for maker in makers)
    ):
        expected = 'optax transformation, and no list of one for each state'
        raise wrong_argument(old, expected, write)
    return makers


def _lists(
    owners: Mapping[Names, Owner],
    outcomes: Mapping[Names, tuple[Any, str]],
    old_places: Iterable[Names],
) -> dict[str, list[str]]:
    """What became of each parameter, and of values that belong to none."""
    fates_of: dict[str, set[str]] = {}
    for names, (_, fate) in outcomes.items():
        fates_of.setdefault(owners[names].name, set()).add(fate)
    lists: dict[str, list[str]] = {'carried': [], 'in part': [], 'fresh': []}
    for name, fates in sorted(fates_of.items()):
        lists[fates.pop() if len(fates) == 1 else 'in part'].append(name)
    gone = {owners[names].name for names in old_places} - fates_of.keys()
    return {**lists, 'dropped': sorted(gone)}


# The value of an old state at a place, and its owner; None for the owner if the user
# does not say which transformation made the state.
Candidate: TypeAlias = tuple[Leaf, Owner | None]


def _of_all(
    initial: Leaf, candidates: Sequence[Candidate], owner: Owner
) -> tuple[Any, str]:
    """A value that belongs to all parameters, and whether it is carried."""
    for value, old_owner in candidates:
        if _type(value) != _type(initial):
            continue
        owners = [owner] if old_owner is None else [owner, old_owner]
        selections = [each.selection for each in owners]
        parts = itertools.chain(*(each.trained for each in selections))
        if is_of_one_selection(initial):
            # Its structure tells which parameters it is of, and not which elements.
            are_whole = all(isinstance(part, bool) for part in parts)
            may_be_of_other = old_owner is not None or not are_whole
        elif remembers(initial) and any(isinstance(part, Rows) for part in parts):
            may_be_of_other = True  # It may have a number for each trained row.
        else:
            may_be_of_other = not owner.is_known
        if not may_be_of_other or (old_owner and _is_same_selection(*selections)):
            return value, 'carried'
    return initial, 'fresh'


def _is_same_selection(old: Selection, new: Selection) -> bool:
    """Whether the same elements of the same parameters are trained."""
    return old.shapes == new.shapes and all(
        map(_is_same, old.trained, new.trained, new.shapes, new.paths)
    )


def _is_same(old: Decision, new: Decision, shape: tuple[int, ...], path: str) -> bool:
    """Whether the same elements of a parameter are trained, however it is written."""
    return old == new or bool(
        (mask_of(old, shape, path) == mask_of(new, shape, path)).all()
    )


def _of_one(
    initial: Leaf, candidates: Sequence[Candidate], owner: Owner
) -> tuple[Any, str]:
    """A value that belongs to one parameter, and whether it is carried, or in part."""
    out, trained, shape, path = initial, owner.trained, owner.shape, owner.name
    is_trained, is_carried = mask_of(trained, shape, path), np.False_
    for value, old in reversed(candidates):  # The first one has the last word.
        old_trained = True if old is None or old.shape != shape else old.trained
        has_state = mask_of(old_trained, shape, path)
        if _is_same(old_trained, trained, shape, path) and _type(value) == _type(
            initial
        ):
            out, is_carried = value, has_state
        elif (
            np.shape(initial) == shape_of_part(trained, shape)
            and np.shape(value) == shape_of_part(old_trained, shape)
            and _type(value)[2] == _type(initial)[2]
        ):
            pair = whole_of(old_trained, value, shape), whole_of(trained, out, shape)
            out = jnp.where(is_trained & has_state, *pair)
            out = trained.cut(out, len(shape)) if isinstance(trained, Rows) else out
            is_carried = is_carried | has_state
    if not (is_carried & is_trained).any():
        return initial, 'fresh'
    return out, 'carried' if (is_carried == is_trained).all() else 'in part'


def _check_rows(owners: Mapping[Names, Owner], pairs: Sequence[Any]) -> None:
    """Raises if the new state is of rows: an old one does not tell which it has."""
    for names, _ in pairs:
        if isinstance(owners[names].trained, Rows):
            raise errors.StructureError(
                f'sg.adopt: rows of {owners[names].name!r} are frozen in the new '
                'state.\n'
                'A state does not tell which rows it is of.\n'
                'Give the transformation that made it: sg.adopt(tx, params, state, '
                'old=old_tx).'
            )


def _warn_of_rows(
    owners: Mapping[Names, Owner], pairs: Sequence[Any], old_values: Mapping[Names, Any]
) -> None:
    """Warns of an array that has grown, or of which rows were frozen."""
    for names, initial in pairs:
        owner, old_shape = owners[names], shape_of(old_values.get(names))
        if shape_of(initial) == owner.shape and is_cut(old_shape, owner.shape):
            warn_once(
                f'sg.adopt: {owner.name!r} has the shape {owner.shape}, and its '
                f'moments in the state have {old_shape}: they are left out.\n'
                'If the array has grown, carry those of its first rows: old=sg.freeze('
                f'tx, sg.at({owner.name!r}, np.s_[{old_shape[0]}:])).\n'
                'If rows of it were frozen, give the transformation that made the '
                'state: sg.adopt(tx, params, state, old=old_tx).',
                Place.here(),
                UserWarning,
            )


def _warn_of_unknown(places: Iterable[str]) -> None:
    """Warns of moments that begin anew, as optax does not tell whose they are."""
    if names := [*places]:
        warn_once(
            f'sg.adopt: {listed(names)} in the state begins anew.\n'
            'optax.tree_map_params does not tell to which parameters that belongs.\n'
            'With the same parameters trained, it is carried if you give the '
            'transformation that made the state: sg.adopt(tx, params, state, '
            'old=old_tx).',
            Place.here(),
            UserWarning,
        )


def _type(value: Leaf) -> Any:
    """The structure of a value, and the shapes and dtypes in it."""
    leaves, treedef = jax.tree.flatten(value)
    dtypes = [jnp.result_type(x) if is_number(x) else type(x) for x in leaves]
    return treedef, [*map(np.shape, leaves)], dtypes

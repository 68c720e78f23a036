"""``adopt``: the state of one selection, taken along to another one.

One rule: a value of the new state is that of the old state at the same key path, if it
has the same shape and dtype; else it is fresh. Where rows are frozen, an array holds
the trained rows alone; both arrays are then made whole first. What belongs to no
parameter is fresh where all moments beside it are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors
from flax_sg.errors.texts import raised_by, wrong_argument
from flax_sg.internals.places import Place, warn_once
from flax_sg.optim.belonging import check_transformation
from flax_sg.optim.masks import parameters_of
from flax_sg.optim.owners import (
    Owner,
    is_of_one_selection,
    owners_of,
    values_of,
    vectors_of,
)
from flax_sg.optim.selections import Names
from flax_sg.trees.leaves import (
    is_differentiable,
    is_number,
    shape_of,
)
from flax_sg.trees.rows import Choice, is_cut, mask_of, shape_of_part, whole_of


def adopt(
    tx: Any,
    params: Any,
    state: Any,
    *earlier: Any,
    old: Any = None,
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
    values = [dict(values_of(each)) for each in states]
    new, leaves = tx.init(params), parameters_of(params)
    pairs = values_of(new)
    every = [*dict(pairs), *itertools.chain(*values)]
    owners = owners_of(tx, leaves, every)
    with raised_by('old= of sg.adopt'):  # It has to know all parameters of today.
        before = [by if by is None else owners_of(by, leaves, every) for by in makers]
    for each, known, was in zip(states, values, before, strict=True):
        check_transformation(owners, new, each, dict(pairs), known)
        if was is None:
            _check_rows(owners, pairs)
        if was is None and report is None:  # A report names these.
            _warn_of_rows(owners, pairs, known)
    vectors = vectors_of(tx, leaves, pairs, owners)
    outcomes: dict[Names, tuple[Any, str]] = {}
    # By the part of the state that they stand in, what became of moments.
    moments: dict[Names, set[str]] = {}
    for names, made in pairs:
        owner = owners[names]
        given = [
            (known[names], None if was is None else was[names])
            for known, was in zip(values, before, strict=True)
            if names in known and 'hyperparams' not in owner.around
        ]
        is_own = owner.owns(made) and owner.trained and not is_of_one_selection(made)
        if is_own:
            outcomes[names] = _of_one(made, given, owner)
        else:
            outcomes[names] = _of_all(made, given, owner, names in vectors)
        if owner.owns(made) or names in vectors:
            moments.setdefault(owner.part, set()).add(outcomes[names][1])
    for names, made in pairs:
        if moments.get(owners[names].part) == {'fresh'}:
            outcomes[names] = made, 'fresh'  # A count is as old as its moments.
    if report is not None:
        report(_lists(owners, outcomes, itertools.chain(*values)))
    carried = [outcomes[names][0] for names, _ in pairs]
    return jax.tree.structure(new, is_leaf=is_of_one_selection).unflatten(carried)


def _makers(tx: Any, old: Any, count: int) -> Sequence[Any]:
    """The transformation that made each state, None if it is not given.

    Raises:
        ArgumentTypeError: if ``tx`` or one of them is no transformation.
    """
    write = 'sg.adopt(tx, params, state, old=old_tx)'
    if not hasattr(tx, 'init'):
        raise wrong_argument(tx, 'optax transformation', write)
    makers = [old] * count if old is None or hasattr(old, 'init') else old
    is_row = isinstance(makers, (list, tuple)) and len(makers) == count
    if not (is_row and all(by is None or hasattr(by, 'init') for by in makers)):
        raise wrong_argument(old, 'transformation, nor one for each state', write)
    return makers


def _lists(
    owners: Mapping[Names, Owner],
    outcomes: Mapping[Names, tuple[Any, str]],
    known: Iterable[Names],
) -> dict[str, list[str]]:
    """What became of each parameter, and of what belongs to none."""
    became: dict[str, set[str]] = {}
    for names, (_, fate) in outcomes.items():
        became.setdefault(owners[names].name, set()).add(fate)
    lists: dict[str, list[str]] = {'carried': [], 'in part': [], 'fresh': []}
    for name, fates in sorted(became.items()):
        lists[fates.pop() if len(fates) == 1 else 'in part'].append(name)
    gone = {owners[names].name for names in known} - became.keys()
    return {**lists, 'dropped': sorted(gone)}


# What a state has at a place, and whom it belongs to there, if somebody says which
# transformation made the state.
Given: TypeAlias = tuple[Any, Owner | None]


def _of_all(
    made: Any, given: Sequence[Given], owner: Owner, is_vector: bool
) -> tuple[Any, str]:
    """A value that belongs to all parameters, and whether it is carried."""
    now = owner.selection
    for value, before in given:
        # If nobody says whose it was, its structure has to tell.
        is_free = before is None or not is_of_one_selection(made)
        fits = not is_vector and is_free
        # It may have a number for each row.
        if before is not None and shape_of(made) and is_differentiable(made):
            both = (*before.selection.trained, *now.trained)
            fits &= not any(isinstance(trained, Choice) for trained in both)
        if before is not None and before.selection.shapes == now.shapes:
            fits |= all(
                map(
                    _is_same,
                    before.selection.trained,
                    now.trained,
                    now.shapes,
                    now.paths,
                )
            )
        if fits and _type(value) == _type(made):
            return value, 'carried'
    return made, 'fresh'


def _is_same(was: Any, now: Any, shape: tuple[int, ...], path: str) -> bool:
    """Whether the same elements of a parameter are trained, however it is written."""
    return was == now or bool(
        (mask_of(was, shape, path) == mask_of(now, shape, path)).all()
    )


def _of_one(made: Any, given: Sequence[Given], owner: Owner) -> tuple[Any, str]:
    """A value that belongs to one parameter, and whether it is carried, or in part."""
    out, now, shape, path = made, owner.trained, owner.shape, owner.name
    trains, known = mask_of(now, shape, path), np.False_
    for value, before in reversed(given):  # The first one has the last word.
        was = True if before is None or before.shape != shape else before.trained
        knew = mask_of(was, shape, path)
        if _is_same(was, now, shape, path) and _type(value) == _type(made):
            out, known = value, knew
        elif (
            np.shape(made) == shape_of_part(now, shape)
            and np.shape(value) == shape_of_part(was, shape)
            and _type(value)[2] == _type(made)[2]
        ):
            pair = whole_of(was, value, shape), whole_of(now, out, shape)
            out = jnp.where(trains & knew, *pair)
            out = now.cut(out, len(shape)) if isinstance(now, Choice) else out
            known = known | knew
    if not (known & trains).any():
        return made, 'fresh'
    return out, 'carried' if (known == trains).all() else 'in part'


def _check_rows(owners: Mapping[Names, Owner], pairs: Sequence[Any]) -> None:
    """Raises if the new state is of rows: an old one does not tell which it has."""
    for names, _ in pairs:
        if isinstance(owners[names].trained, Choice):
            raise errors.StructureError(
                f'sg.adopt: rows of {owners[names].name!r} are frozen in the new '
                'state.\n'
                'A state does not tell which rows it is of.\n'
                'Give the transformation that made it: sg.adopt(tx, params, state, '
                'old=old_tx).'
            )


def _warn_of_rows(
    owners: Mapping[Names, Owner], pairs: Sequence[Any], known: Mapping[Names, Any]
) -> None:
    """Warns of an array that has grown, or of which rows were frozen."""
    for names, made in pairs:
        owner, was = owners[names], shape_of(known.get(names))
        if shape_of(made) == owner.shape and is_cut(was, owner.shape):
            warn_once(
                f'sg.adopt: {owner.name!r} has the shape {owner.shape}, and its '
                f'moments in the state have {was}: they are left out.\n'
                'If the array has grown, carry those of its first rows: old=sg.freeze('
                f'tx, sg.at({owner.name!r}, np.s_[{was[0]}:])).\n'
                'If rows of it were frozen, give the transformation that made the '
                'state: sg.adopt(tx, params, state, old=old_tx).',
                Place.here(),
                UserWarning,
            )


def _type(value: Any) -> Any:
    """The structure of a value, and the shapes and dtypes in it."""
    leaves, treedef = jax.tree.flatten(value)
    kinds = [jnp.result_type(x) if is_number(x) else type(x) for x in leaves]
    return treedef, [*map(np.shape, leaves)], kinds

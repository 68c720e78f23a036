"""``adopt``: the state of one selection, taken along to another one.

One rule: a value of the new state is that of the old state at the same key path, if it
has the same shape and dtype; else it is fresh. Where rows are frozen, an array holds
the trained rows alone; both arrays are then made whole first.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from flax_sg import errors, filters
from flax_sg.errors.texts import wrong_argument
from flax_sg.filters.paths import name_of
from flax_sg.optim.freezing import Freeze, pruned
from flax_sg.optim.masks import parameters_of
from flax_sg.trees.leaves import (
    Leaves,
    is_differentiable,
    is_number,
    selected,
    shape_of,
    whole,
)
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
        belongs to one selection: it begins anew with another. So does an array that
        ``optax.flatten`` made of all parameters, unless ``old`` has the same selection.

    Raises:
        ArgumentTypeError: if ``tx`` is no transformation.
        StructureError: if a state is that of another transformation.
        StructureError: if rows are frozen, and ``old`` is not given.
    """
    if not hasattr(tx, 'init'):
        write = 'sg.adopt(tx, params, state, old=old_tx)'
        raise wrong_argument(tx, 'optax transformation', write)
    states = [dict(_named(given)) for given in (state, *earlier)]
    made_by = [old] * len(states) if old is None or hasattr(old, 'init') else old
    before = [None if by is None else _selection(by, params)[1] for by in made_by]
    new, (leaves, trained) = tx.init(params), _selection(tx, params)
    pairs = _named(new)
    owners = _owners(leaves, [*dict(pairs), *itertools.chain(*states)])
    for one, values, was in zip((state, *earlier), states, before, strict=True):
        if values or one is None or one == {}:  # All may have been frozen.
            _check_transformation(owners, dict(pairs), values)
        if was is None:
            _check_rows(owners, pairs, values, leaves, trained)
    [said] = selected([leaves.paths], filters.as_filter(fresh))
    begin = [*whole(said, leaves.paths, 'fresh='), False]  # The last one is of none.
    adopted: list[Any] = []
    found: dict[str, set[str]] = {}
    for names, made in pairs:
        number, name, around = owners[names]
        given = [
            (values[names], was)
            for values, was in zip(states, before, strict=True)
            if names in values and not begin[number] and 'hyperparams' not in around
        ]
        shape = np.shape(leaves.values[number]) if number >= 0 else ()
        is_own = number >= 0 and trained[number] and not _is_one(made)
        if not is_own or np.shape(made) == () != shape:
            value, what = _of_all(made, given, leaves, trained)
        else:
            value, what = _of_one(made, given, trained, number, shape)
        adopted.append(value)
        found.setdefault(name, set()).add(what)
    if report is not None:
        lists: dict[str, list[str]] = {'carried': [], 'in part': [], 'fresh': []}
        for name, all_of in sorted(found.items()):
            lists[all_of.pop() if len(all_of) == 1 else 'in part'].append(name)
        known = {owners[names].name for names in itertools.chain(*states)}
        report({**lists, 'dropped': sorted(known - found.keys())})
    return jax.tree.structure(new, is_leaf=_is_one).unflatten(adopted)


def _selection(tx: Any, params: Any) -> tuple[Leaves, Sequence[Any]]:
    """The parameters, and what a transformation trains of each."""
    freeze = getattr(tx.init, '__self__', None)
    if isinstance(freeze, Freeze):
        return freeze.parameters(params)
    leaves = parameters_of(params)
    return leaves, [True] * len(leaves.values)


# What a state has at a place, and what was trained of each parameter when the state was
# made; None if nobody says so.
Given: TypeAlias = tuple[Any, Sequence[Any] | None]


def _of_all(
    made: Any, given: Sequence[Given], leaves: Leaves, trained: Sequence[Any]
) -> tuple[Any, str]:
    """A value that belongs to all parameters, and whether it is carried."""
    size = sum(map(np.size, jax.tree.leaves(pruned(leaves, trained))))
    flat = shape_of(made) == (size,) != (1,) and is_differentiable(made)
    shapes = list(map(jnp.shape, leaves.values))
    for value, was in given:
        same = not (flat or _is_one(made))
        if not same:
            same = not flat if was is None else all(map(_is_same, was, trained, shapes))
        if same and _type(value) == _type(made):
            return value, 'carried'
    return made, 'fresh'


def _is_same(was: Any, now: Any, shape: tuple[int, ...]) -> bool:
    """Whether the same elements of a parameter are trained, however it is written."""
    return was == now or bool(
        (mask_of(was, shape, '') == mask_of(now, shape, '')).all()
    )


def _of_one(
    made: Any,
    given: Sequence[Given],
    trained: Sequence[Any],
    number: int,
    shape: tuple[int, ...],
) -> tuple[Any, str]:
    """A value that belongs to one parameter, and whether it is carried, or in part."""
    out, now = made, trained[number]
    trains, known = mask_of(now, shape, ''), np.False_
    for value, was_trained in reversed(given):  # The first one has the last word.
        was = True if was_trained is None else was_trained[number]
        knew = mask_of(was, shape, '')
        if _is_same(was, now, shape) and _type(value) == _type(made):
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


class _Owner(NamedTuple):
    """Whom a value of a state belongs to.

    Attributes:
        number: which parameter; -1 for none.
        name: its path; the value's own place if there is none.
        around: the names of the value without those of the parameter.
    """

    number: int
    name: str
    around: Names


def _owners(leaves: Leaves, every: Collection[Names]) -> dict[Names, _Owner]:
    """The owners of the values of some states.

    The names of a parameter stand below those of a tree that is like the parameters.
    """
    places = {_names_of(keys): n for n, keys in enumerate(leaves.key_paths)}
    splits = {names: range(len(names) + 1) for names in every}
    roots = {
        next((names[:n] for n in ns if names[n:] in places), None)
        for names, ns in splits.items()
    }
    owners = {names: _Owner(-1, '/'.join(names), names) for names in every}
    for names, ns in splits.items():
        # The last end counts, then the first start: 'b/a' is not 'a'.
        for last, first in itertools.product(ns, reversed(ns)):
            if names[:first] in roots and names[first:last] in places:
                number = places[names[first:last]]
                around = (*names[:first], '*', *names[last:])
                owners[names] = _Owner(number, str(leaves.paths[number]), around)
    return owners


def _check_transformation(owners: dict[Names, _Owner], new: Any, old: Any) -> None:
    """Raises if a state is that of another transformation."""
    ours, theirs = ({'/'.join(owners[n].around) for n in of} for of in (new, old))
    if ours and not ours & theirs:
        its = repr(min(theirs)) if theirs else 'nothing'
        raise errors.StructureError(
            f'sg.adopt: the state has {its}, where the new state has {min(ours)!r}.\n'
            'It is the state of another transformation, or of other parameters: give '
            'that of what sg.freeze wraps, sg.adopt(tx, params, state).'
        )


def _check_rows(
    owners: dict[Names, _Owner], new: Any, old: Any, leaves: Leaves, trained: Any
) -> None:
    """Raises if rows are frozen, and nobody says which they were in the old state."""
    for names, made in new:
        number, name, _ = owners[names]
        if number < 0:
            continue
        shape = np.shape(leaves.values[number])
        cut = shape_of(made) == shape and is_cut(old.get(names), shape)
        if cut or isinstance(trained[number], Choice):
            raise errors.StructureError(
                f'sg.adopt: rows of {name!r} are frozen, in the old state or in the '
                'new one.\n'
                'A state does not tell which rows it is of.\n'
                'Give the transformation that made it: sg.adopt(tx, params, state, '
                'old=old_tx).'
            )


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

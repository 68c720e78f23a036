"""``adopt``: the state of one selection, taken along to another one.

One rule: a value of the new state is that of the old state at the same key path, if it
has the same shape and dtype; else it is fresh. Where rows are frozen, an array holds
the trained rows alone; both arrays are then made whole first. What belongs to no
parameter is fresh where all moments beside it are.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors
from flax_sg.errors.texts import raised_by, wrong_argument
from flax_sg.optim.masks import parameters_of
from flax_sg.optim.selections import Names, Selection, names_of, selections
from flax_sg.trees.leaves import (
    Leaves,
    is_differentiable,
    is_number,
    shape_of,
)
from flax_sg.trees.rows import Choice, is_cut, mask_of, shape_of_part, whole_of

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
        state: a state of the same transformation, frozen in other places or nowhere;
            also of parameters with other names among these, and as ``nnx.Optimizer``
            or a checkpoint has it. States of several seeds with an axis of their own
            are adopted one by one, under ``jax.vmap``.
        *earlier: more of them, for what ``state`` does not know.
        old: the transformation that made ``state``, or a list with one for each state.
            It is needed if it or ``tx`` freezes rows of an array (``sg.at``): a state
            does not tell which rows it is of. In both, ``sg.freeze`` may stand in
            any other transformation; both are traced with ``params``.
        report: called with a dict of four lists, as printed above: the parameters whose
            values were carried, were carried in part, are fresh, or were dropped. What
            belongs to no parameter is named by its place in the state.

    Returns:
        A state of ``tx``. A value comes from the first state that has one at the same
        key path, of the same shape and dtype, and from ``tx.init`` if none has. What is
        frozen now is dropped, rows and elements included: if it is to go on later from
        where it was, keep the state of today, and give it as ``earlier`` then.

        A jitted step compiles once for each selection. A count of steps goes on, unless
        all moments beside it in the state begin anew: then it does, too. So Adam's
        count goes on where some parameters are carried, and the first updates of the
        others have another size. ``optax.tree_utils.tree_set(state,
        count=0)`` counts anew. The hyperparameters of ``optax.inject_hyperparams`` are
        those of ``tx``. What L-BFGS, a line search and optimistic gradients remember
        belongs to one selection: it begins anew with another. So do an array that
        ``optax.flatten`` made of all parameters, and SM3's numbers for each row where
        rows are frozen, unless ``old`` has the same selection.

    Raises:
        ArgumentTypeError: if ``tx`` or ``old`` is no transformation.
        StructureError: if a state is that of another transformation.
        StructureError: if rows are frozen, and ``old`` is not given.
    """
    if not hasattr(tx, 'init'):
        write = 'sg.adopt(tx, params, state, old=old_tx)'
        raise wrong_argument(tx, 'optax transformation', write)
    states = [dict(_named(given)) for given in (state, *earlier)]
    made_by = [old] * len(states) if old is None or hasattr(old, 'init') else old
    is_row = isinstance(made_by, (list, tuple)) and len(made_by) == len(states)
    if not (is_row and all(by is None or hasattr(by, 'init') for by in made_by)):
        write = 'sg.adopt(tx, params, state, old=old_tx)'
        raise wrong_argument(old, 'transformation, nor one for each state', write)
    new, leaves = tx.init(params), parameters_of(params)
    pairs = _named(new)
    every = [*dict(pairs), *itertools.chain(*states)]
    owners = _owners(tx, leaves, every)
    with raised_by('old= of sg.adopt'):  # It has to know all parameters of today.
        before = [None if by is None else _owners(by, leaves, every) for by in made_by]
    for one, values, was in zip((state, *earlier), states, before, strict=True):
        if values or one is None or one == {}:  # All may have been frozen.
            _check_transformation(owners, dict(pairs), values)
        if was is None:
            _check_rows(owners, pairs, values)
    found: dict[Names, tuple[Any, str]] = {}
    # By the part of the state that they stand in, what became of moments.
    moments: dict[Names, set[str]] = {}
    for names, made in pairs:
        owner = owners[names]
        begins = 'hyperparams' in owner.around
        given = [
            (values[names], None if was is None else was[names])
            for values, was in zip(states, before, strict=True)
            if names in values and not begins
        ]
        is_own = owner.owns(made) and owner.trained and not _is_one(made)
        found[names] = (_of_one if is_own else _of_all)(made, given, owner)
        if owner.is_moment(made):
            moments.setdefault(owner.part, set()).add(found[names][1])
    became: dict[str, set[str]] = {}
    for names, made in pairs:
        owner = owners[names]
        if moments.get(owner.part) == {'fresh'}:
            found[names] = made, 'fresh'  # A count is as old as its moments.
        became.setdefault(owner.name, set()).add(found[names][1])
    if report is not None:
        lists: dict[str, list[str]] = {'carried': [], 'in part': [], 'fresh': []}
        for name, all_of in sorted(became.items()):
            lists[all_of.pop() if len(all_of) == 1 else 'in part'].append(name)
        known = {owners[names].name for names in itertools.chain(*states)}
        report({**lists, 'dropped': sorted(known - became.keys())})
    values = [found[names][0] for names, _ in pairs]
    return jax.tree.structure(new, is_leaf=_is_one).unflatten(values)


class _Owner(NamedTuple):
    """Whom a value of a state belongs to.

    Attributes:
        name: the path of the parameter; the value's own place if there is none.
        part: the part of the state that has the value, or the tree that is like the
            parameters: a count stands there beside moments.
        around: the names of the value without those of the parameter.
        of: what the innermost freeze around it selects.
        number: which parameter of these; -1 for none.
    """

    name: str
    part: Names
    around: Names
    of: Selection
    number: int = -1

    @property
    def trained(self) -> Any:
        """What is trained of the parameter."""
        return self.number >= 0 and self.of.trained[self.number]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter; () if there is none."""
        return self.of.shapes[self.number] if self.number >= 0 else ()

    def owns(self, made: Any) -> bool:
        """Whether a value belongs to a parameter; a number may be that of a tree."""
        return self.number >= 0 and not shape_of(made) == () != self.shape

    def is_flat(self, made: Any) -> bool:
        """Whether a value is one array for all parameters, as ``optax.flatten`` has."""
        if len(shape_of(made)) != 1:
            return False
        rows = zip(self.of.trained, self.of.shapes, strict=True)
        size = sum(math.prod(shape_of_part(*row)) for row in rows if row[0])
        return shape_of(made) == (size,) != (1,) and is_differentiable(made)

    def is_moment(self, made: Any) -> bool:
        """Whether a value is what an optimizer remembers of parameters."""
        return self.owns(made) or self.is_flat(made)


# What a state has at a place, and whom it belongs to there, if somebody says which
# transformation made the state.
Given: TypeAlias = tuple[Any, _Owner | None]


def _of_all(made: Any, given: Sequence[Given], owner: _Owner) -> tuple[Any, str]:
    """A value that belongs to all parameters, and whether it is carried."""
    flat, now = owner.is_flat(made), owner.of
    for value, before in given:
        # If nobody says whose it was, its structure has to tell.
        fits = not flat and (before is None or not _is_one(made))
        # It may have a number for each row.
        if before is not None and shape_of(made) and is_differentiable(made):
            both = (*before.of.trained, *now.trained)
            fits &= not any(isinstance(takes, Choice) for takes in both)
        if before is not None and before.of.shapes == now.shapes:
            fits |= all(
                map(_is_same, before.of.trained, now.trained, now.shapes, now.paths)
            )
        if fits and _type(value) == _type(made):
            return value, 'carried'
    return made, 'fresh'


def _is_same(was: Any, now: Any, shape: tuple[int, ...], path: str) -> bool:
    """Whether the same elements of a parameter are trained, however it is written."""
    return was == now or bool(
        (mask_of(was, shape, path) == mask_of(now, shape, path)).all()
    )


def _of_one(made: Any, given: Sequence[Given], owner: _Owner) -> tuple[Any, str]:
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


def _owners(tx: Any, leaves: Leaves, every: Sequence[Names]) -> dict[Names, _Owner]:
    """The owners of the values of some states of a transformation.

    The names of a parameter stand below those of a tree that is like the parameters. In
    the state of a freeze, these are the parameters that the freeze was given.

    Args:
        tx: the transformation.
        leaves: the parameters.
        every: the names of the values.
    """
    everything = Selection.of(leaves, [True] * len(leaves.values))
    found = {(): everything, **selections(tx, leaves.restore(leaves.values))}
    tops = {
        names: max((top for top in found if names[: len(top)] == top), key=len)
        for names in every
    }
    owners: dict[Names, _Owner] = {}
    for top, of in found.items():
        places = {names: n for n, names in enumerate(of.names)}
        inside = [names for names in every if tops[names] == top]
        splits = {names: range(len(top), len(names) + 1) for names in inside}
        # A tree that is like the parameters leads to most of them: 'mu/w' may be the
        # parameter 'w' below Adam's 'mu', or a parameter of this name.
        roots = collections.Counter(
            names[:n] for names, ns in splits.items() for n in ns if names[n:] in places
        )
        for names, ns in splits.items():
            found = [
                (last, roots[names[:first]], bool(of.trained[number]), -first, number)
                for first, last in itertools.combinations_with_replacement(ns, 2)
                if names[:first] in roots
                and (number := places.get(names[first:last], -1)) >= 0
            ]
            owners[names] = _Owner('/'.join(names), names[:-1], names, of)
            if found:  # The last end counts: 'b/a' is not 'a'.
                last, _, _, first, number = max(found)
                around = (*names[:-first], '*', *names[last:])
                part, path = names[: max(-first - 1, 0)], str(of.paths[number])
                owners[names] = _Owner(path, part, around, of, number)
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


def _check_rows(owners: dict[Names, _Owner], new: Any, old: Any) -> None:
    """Raises if rows are frozen, and nobody says which they were in the old state."""
    for names, made in new:
        owner = owners[names]
        if owner.number < 0:
            continue
        shape = owner.shape
        cut = shape_of(made) == shape and is_cut(old.get(names), shape)
        if cut or isinstance(owner.trained, Choice):
            raise errors.StructureError(
                f'sg.adopt: rows of {owner.name!r} are frozen, in the old state or in '
                'the new one.\n'
                'A state does not tell which rows it is of.\n'
                'Give the transformation that made it: sg.adopt(tx, params, state, '
                'old=old_tx).'
            )


def _named(state: Any) -> list[tuple[Names, Any]]:
    """The values of a state, with the names that lead to them."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_one)
    return [(names_of(keys), value) for keys, value in pairs]


def _is_one(node: Any) -> bool:
    return type(node).__name__ in _OF_ONE_SELECTION


def _type(value: Any) -> Any:
    """The structure of a value, and the shapes and dtypes in it."""
    leaves, treedef = jax.tree.flatten(value)
    kinds = [jnp.result_type(x) if is_number(x) else type(x) for x in leaves]
    return treedef, [*map(np.shape, leaves)], kinds

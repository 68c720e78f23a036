"""Whether a state is that of a transformation, whatever is frozen in either.

Naive attempts ask for one common name. RMSProp's state has Adam's 'nu', and AdaBelief's
'nu' is another one. So each record (``optax.ScaleByAdamState``) has to be the record
that the new state has at its place. A state that was stored as plain dicts has no
records: there the names of the fields count, and those of the trees of moments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax

from flax_sg import errors
from flax_sg.internals.types import PyTree
from flax_sg.optim.owners import Owner, is_of_one_selection, remembers
from flax_sg.optim.selections import Names, names_of
from flax_sg.trees.leaves import is_differentiable

# The values of a state, by their names.
Values: TypeAlias = Mapping[Names, Any]


def check_transformation(
    owners: Mapping[Names, Owner],
    new: PyTree,
    state: PyTree,
    new_values: Values,
    old_values: Values,
) -> None:
    """Raises if a state is that of another transformation.

    Args:
        owners: the owners of all values.
        new: a new state.
        state: the state.
        new_values: the values of ``new``, by their names.
        old_values: the values of ``state``.
    """
    trees = {owner.tree for owner in owners.values() if owner.tree is not None}
    # Records in these trees are parameters, which may have another class now.
    new_records, old_records = (
        {place: name for place, name in _records(each) if not _is_in(place, trees)}
        for each in (new, state)
    )
    if not old_records and not (new_values and old_values):
        if new_values and _is_hole(state):
            raise _other_fields(owners, new_values, old_values)
        return  # All may be frozen. Plain dicts without values tell no more.
    if old_records:
        places = _places(owners, new_values, old_values, new_records, old_records)
        for place in sorted(
            places, key=lambda place: (place not in old_records, place)
        ):
            found, wanted = old_records.get(place), new_records.get(place)
            if found != wanted:
                raise _other_record(place, wanted, found)
    both = new_records.keys() & old_records.keys()
    new_fields, old_fields = (
        _fields(owners, [names for names in values if not _is_in(names, both)])
        for values in (new_values, old_values)
    )
    common = new_fields.keys() & old_fields.keys()
    is_other = bool(new_fields and old_fields and not common)
    is_other |= any(
        not _fit(new_fields[part], old_fields[part], trees) for part in common
    )
    is_other |= any(
        _is_foreign(owner, new_values, old_values, old_records)
        for owner in owners.values()
    )
    is_recognized = any(
        owners[names].parameter >= 0 or names in new_values for names in old_values
    )
    if is_other or (new_values and old_values and not is_recognized):
        raise _other_fields(owners, new_values, old_values)


def _is_hole(state: PyTree) -> bool:
    """Whether a state is empty, as a checkpoint restores one without values."""
    return state is None or (isinstance(state, dict) and not state)


def _is_foreign(
    owner: Owner, new_values: Values, old_values: Values, records: Collection[Names]
) -> bool:
    """Whether a value of no parameter is where the other state has something else."""
    place = owner.place
    above = {place[:n] for n in range(len(place))}
    is_inside = any(is_of_one_selection(new_values.get(top)) for top in above)
    if owner.parameter >= 0 or is_inside:  # What is inside begins anew.
        return False
    # An array of one state is a tree in the other: optax.flatten makes one of a tree.
    if place == owner.tree or above & (new_values.keys() | old_values.keys()):
        return True
    # Other records differ; plain dicts have none.
    is_extra = owner.is_known and not (place in new_values or _is_in(place, records))
    is_memory = is_differentiable(old_values.get(place)) and not owner.is_hyperparameter
    return is_extra and is_memory


def _places(
    owners: Mapping[Names, Owner],
    new_values: Values,
    old_values: Values,
    new_records: Mapping[Names, str],
    old_records: Mapping[Names, str],
) -> set[Names]:
    """The places at which both states have to have the same record.

    They have values in both states, or moments in one. A record that only counts steps,
    as that of a schedule, may be in one state alone: it begins anew, or ends.
    """
    if not (new_values or old_values):
        return new_records.keys() & old_records.keys()
    places = _outer(new_values, new_records) & _outer(old_values, old_records)
    for values, records in ((new_values, new_records), (old_values, old_records)):
        moments = [
            names
            for names, value in values.items()
            if owners[names].parameter >= 0 or remembers(value)
        ]
        places |= _outer(moments, records)
    return places


def _outer(values: Iterable[Names], places: Iterable[Names]) -> set[Names]:
    """Of some places those that have one of the values in them."""
    prefixes = {names[:n] for names in values for n in range(len(names) + 1)}
    return prefixes.intersection(places)


def _is_in(names: Names, places: Collection[Names]) -> bool:
    return any(names[:n] in places for n in range(len(names) + 1))


def _fields(
    owners: Mapping[Names, Owner], values: Iterable[Names]
) -> dict[Names, set[Names]]:
    """The fields of each part of a state, without hyperparameters: these are new.

    A field is a tree that is like the parameters, or a value of none.
    """
    parts: dict[Names, set[Names]] = {}
    for names in values:
        owner = owners[names]
        if not owner.is_hyperparameter:
            field = names if owner.tree is None else owner.tree
            parts.setdefault(owner.part, set()).add(field)
    return parts


def _fit(new: set[Names], old: set[Names], trees: set[Names]) -> bool:
    """Whether two sets of fields are of the same part, whatever is frozen in either.

    A tree of which all is frozen has no values.
    """
    same = new & trees == old & trees or not (new & trees and old & trees)
    return same and new - trees == old - trees


def _records(state: PyTree, top: Names = ()) -> Iterator[tuple[Names, str]]:
    """The names of the class of each record in a state, by their places."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: node is not state and _is_record(node)
    )
    if _is_record(state):
        yield top, type(state).__name__
    for keys, node in pairs:
        if _is_record(node):
            yield from _records(node, top + names_of(keys))


def _is_record(node: object) -> bool:
    return isinstance(node, tuple) and hasattr(node, '_fields')


def _other_record(
    place: Names, new: str | None, old: str | None
) -> errors.StructureError:
    at_place = f' at {"/".join(place)!r}' if place else ''
    return errors.StructureError(
        f'sg.adopt: the state has {old or "nothing"}{at_place}, where the new state '
        f'has {new or "nothing"}.\n{_ADVICE}'
    )


def _other_fields(
    owners: Mapping[Names, Owner], new_values: Values, old_values: Values
) -> errors.StructureError:
    new_names, old_names = (
        {_shown(owners[names]) for names in values}
        for values in (new_values, old_values)
    )
    actual = repr(min(old_names - new_names or old_names)) if old_names else 'nothing'
    expected = repr(min(new_names - old_names or new_names)) if new_names else 'nothing'
    return errors.StructureError(
        f'sg.adopt: the state has {actual}, where the new state has {expected}.\n'
        f'{_ADVICE}'
    )


def _shown(owner: Owner) -> str:
    return '/'.join(owner.place if owner.tree is None else (*owner.tree, '*'))


_ADVICE = (
    'It is the state of another transformation, or of other parameters: give that of '
    'what sg.freeze wraps, sg.adopt(tx, params, state).'
)

"""The moments of parameters that are frozen for a while stay as they are.

A traced condition, or a mask, may freeze something in this step and train it in the
next one. So the optimizer sees it in every step, with a zero gradient while it is
frozen. By zero gradients Adam's moments decay: here the old ones are put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors, filters
from flax_sg.internals.types import Array, PyTree, Transformation
from flax_sg.optim.owners import Owner, owners_of, remembers
from flax_sg.optim.selections import Names, names_of
from flax_sg.trees.leaves import Leaves
from flax_sg.trees.rows import Rows


def with_paused(
    tx: Transformation,
    leaves: Leaves,
    trained: Mapping[Names, Any],
    before: PyTree,
    after: PyTree,
) -> PyTree:
    """The state after an update, with the old values of frozen elements.

    Values that belong to all parameters, such as a count of steps, go on.

    Args:
        tx: the transformation.
        leaves: the parameters that it sees.
        trained: the part that is trained, by the names of the parameter, for those
            of which a part is.
        before: the state before the update.
        after: the state after it.
    """
    old = dict(jax.tree_util.tree_leaves_with_path(before))
    pairs, treedef = jax.tree_util.tree_flatten_with_path(after)
    values = [(names_of(keys), value) for keys, value in pairs]
    owners = owners_of(tx, leaves, [names for names, _ in values])
    out: list[Any] = []
    for keys, new in pairs:
        owner, old_value = owners[names_of(keys)], old.get(keys)
        if old_value is None:  # The state has grown.
            out.append(new)
        elif not owner.is_known and remembers(new):
            raise _unknown(owner.name)
        else:
            part = trained.get(owner.names) if owner.parameter >= 0 else None
            out.append(new if part is None else _paused(part, new, old_value, owner))
    return treedef.unflatten(out)


def _unknown(name: str) -> errors.StructureError:
    return errors.StructureError(
        f'sg.freeze: optax does not tell to which parameters {name!r} in the state '
        'belongs.\n'
        'The filter has a traced condition, or names elements: moments of what it '
        'freezes would decay.\n'
        'Leave out optax.flatten, and what else makes an array of all parameters; or '
        "freeze whole parameters: sg.freeze(tx, 'backbone/**')."
    )


def _paused(part: filters.Part, new: Array, old: Array, owner: Owner) -> Array:
    """A value of one parameter; the old one where its elements are frozen.

    A value of another shape, such as Adafactor's sums of rows, belongs to all elements:
    the old one stays if all of them are frozen.
    """
    shape, rows = owner.shape, owner.trained
    mask = part.any_mask(shape, owner.name)
    if isinstance(rows, Rows):  # A freeze in ``tx`` cut these rows.
        mask = rows.cut(jnp.broadcast_to(mask, shape), len(shape))
        shape = mask.shape
    front = np.ndim(old) - len(shape)
    fits = front >= 0 and np.shape(old)[front:] == shape
    mask = jnp.broadcast_to(mask, np.shape(old)) if fits else jnp.any(mask)
    return jnp.where(mask, new, old)

"""Masks and labels of parameters, for optax."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_sg import errors, filters
from flax_sg.errors.texts import raised_by
from flax_sg.filters.paths import Path
from flax_sg.internals.types import Decision, Leaf, PyTree
from flax_sg.trees import classified, one_label
from flax_sg.trees.leaves import (
    ABSENT,
    OVERWRITE_WITH_GRADIENT,
    Absent,
    Leaves,
    collections_of,
    is_absent,
    is_differentiable,
    leaves_of,
    selected,
    tree_before,
)
from flax_sg.trees.trainable import Declared, chosen


def mask(
    tree: PyTree,
    *where: Any,
    trained: filters.Where | Declared | Absent = ABSENT,
    frozen: filters.Where | Declared | Absent = ABSENT,
    unused: str = 'raise',
) -> PyTree:
    """A tree of bools for optax, True at the parameters that you name.

    ``optax.masked(tx, mask)`` applies ``tx`` where the mask is True, and passes raw
    gradients on where it is False: give it ``trained=`` for an optimizer, and
    ``frozen=`` for ``optax.set_to_zero()``.

    >>> import optax, flax_sg as sg
    >>> params = {'body': {'w': 1.0}, 'head': {'w': 2.0, 'steps': 3}}
    >>> sg.mask(params, trained='head/**')
    {'body': {'w': False}, 'head': {'steps': False, 'w': True}}
    >>> sg.mask(params, frozen='body/**')
    {'body': {'w': True}, 'head': {'steps': True, 'w': False}}
    >>> tx = optax.chain(
    ...     optax.masked(optax.adam(0.1), sg.mask(params, trained='head/**')),
    ...     optax.masked(optax.set_to_zero(), sg.mask(params, frozen='body/**')),
    ... )

    ``optax.multi_transform`` takes labels: see ``sg.labels``. ``sg.freeze`` needs no
    mask.

    Args:
        tree: parameters, or their shapes (``jax.eval_shape``).
        *where: none: a filter without a name does not say its side, and raises.
        trained: the parameters that are True: any kind of filter. What has no gradient
            (integers, keys, ``NonDifferentiable``) is False.
        frozen: in its place, these are True, and what has no gradient. The mask is the
            opposite of ``trained=~filter``.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    ``trained=sg.DECLARED`` means what the classes in the tree declare, see
    ``sg.trainable``, and ``frozen=sg.DECLARED`` the rest. What a module trains, given
    its ``Frozen`` parts and blocks, says ``trained=sg.live(module, variables, *args)``.

    Returns:
        The tree with a bool at each leaf, and at each ``NonDifferentiable``. Of an
        array of which the filter means a part: an array of bools in its shape; of a
        condition that is traced: one traced bool. ``optax.masked`` takes neither, and
        ``sg.freeze`` does. A mask is a filter, too.

    Raises:
        ArgumentValueError: unless either ``trained`` or ``frozen`` is given.
        UnusedFilterError: if a part of the filter matches no leaf.
        FilterTypeError: if the filter is known to name the other side.
        ArgumentTypeError: if what ``trained`` matches has no gradient.
        PartError: if a part that the filter means does not fit its array.
        ArgumentValueError: if there is a collection that no optimizer may see.
    """
    if where or is_absent(trained) == is_absent(frozen):
        raise errors.ArgumentValueError(
            'sg.mask takes one filter, by name: trained= or frozen=.\n'
            'A mask is True at what you name, and the other way round it freezes what '
            'should be trained.\n'
            "Write sg.mask(params, trained='head/**') or sg.mask(params, "
            "frozen='backbone/**')."
        )
    leaves = parameters_of(tree, 'sg.mask(tree, trained=where)')
    side, where = ('trained', trained) if is_absent(frozen) else ('frozen', frozen)
    if not isinstance(where, Declared | Absent):
        call = f'sg.mask(params, {side}={{}})'
        filters.named(filters.as_filter(where), side, call)
    with raised_by(f'sg.mask({side}=...)'):
        if is_absent(frozen):
            [decisions] = chosen([leaves], trained, unused)
        else:
            updated = trained_leaves(leaves, frozen, unused)
            decisions = [filters.negated(decision) for decision in updated]
    return _in_place_of_leaves(
        leaves, map(_bools, decisions, leaves.values, leaves.paths)
    )


def _bools(decision: Decision, leaf: Leaf, path: str) -> Any:
    """The bool of a mask at a leaf, or a bool for each element."""
    if not isinstance(decision, filters.Part):
        return decision
    shape = np.shape(leaf)
    mask = decision.any_mask(shape, path)
    if decision.is_conditional and mask.size == 1:
        return mask.reshape(())
    if isinstance(mask, np.ndarray):
        return np.array(np.broadcast_to(mask, shape))
    return jnp.broadcast_to(mask, shape)


def labels(
    tree: PyTree,
    groups: Mapping[Any, filters.Where] | Callable[[Path], Hashable],
    rest: Hashable = ABSENT,
    *,
    unused: str = 'raise',
) -> PyTree:
    """A tree of labels, for ``optax.multi_transform``.

    >>> import flax_sg as sg
    >>> params = {'body': {'w': 1.0}, 'head': {'w': 2.0, 'steps': 3}}
    >>> sg.labels(params, {'slow': 'body/**', 'fast': 'head/**'})
    {'body': {'w': 'slow'}, 'head': {'steps': 'frozen', 'w': 'fast'}}
    >>> sg.labels(params, {'fast': 'head/**'}, rest='frozen')
    {'body': {'w': 'frozen'}, 'head': {'steps': 'frozen', 'w': 'fast'}}

    ``optax.multi_transform`` needs a transformation for each label, such as
    ``'frozen': optax.set_to_zero()``.

    Args:
        tree: parameters, as for ``sg.mask``.
        groups: filters by label, or a function that returns the label of a path. They
            are asked for what has a gradient; each such leaf has to get one label.
        rest: the label of what has none. By default only integers, keys and
            ``NonDifferentiable`` may have none, and get ``'frozen'``.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        The tree with a label at each leaf.

    Raises:
        StructureError: if a leaf has no label, or two.
        UnusedFilterError: if one of the filters matches nothing.
        FilterTypeError: if ``groups`` is neither, or the function returns no label.
        ArgumentValueError: if there is a collection that no optimizer may see.
    """
    leaves = parameters_of(tree, 'sg.labels(tree, {label: where})')
    # A leaf that is absent may have had a gradient, so filters may name it.
    may_have = [is_absent(leaf) or is_differentiable(leaf) for leaf in leaves.values]
    paths = list(itertools.compress(leaves.paths, may_have))
    with raised_by('sg.labels'):
        # optax asks for the labels of a tree without leaves: no filter matches.
        unused = unused if leaves.values else 'ignore'
        labels_of_paths = iter(classified(paths, groups, unused)[0])
    out: list[Any] = []
    for may, (path, leaf) in zip(may_have, leaves, strict=True):
        candidates = next(labels_of_paths) if may else []
        if candidates or (may and is_absent(rest) and not is_absent(leaf)):
            out.append(one_label(path, candidates, ", or pass rest='frozen'"))
        else:
            out.append('frozen' if is_absent(rest) else rest)
    return _in_place_of_leaves(leaves, out)


def _in_place_of_leaves(leaves: Leaves, values: Iterable[Any]) -> PyTree:
    """The tree with other values in place of its leaves; ``ABSENT`` stays."""
    # Inside of sg.freeze, optax.multi_transform asks for labels of a pruned tree.
    pairs = zip(leaves.values, values, strict=True)
    return leaves.restore(leaf if is_absent(leaf) else new for leaf, new in pairs)


def trained_leaves(
    leaves: Leaves, frozen: filters.Where | Declared, unused: str
) -> list[Any]:
    """For each leaf whether an optimizer updates it, or which part of it."""
    if isinstance(frozen, Declared):
        return chosen([leaves], frozen, unused)[0]
    [decisions] = selected([leaves.paths], filters.as_filter(frozen), unused)
    pairs = zip(decisions, leaves.values, strict=True)
    return [
        is_differentiable(leaf) and filters.negated(decision)
        for decision, leaf in pairs
    ]


def parameters_of(tree: PyTree, call: str = '') -> Leaves:
    """The leaves of a tree that an optimizer is given.

    Args:
        tree: the tree.
        call: how a call with a filter after the tree is written, if there is one.
    """
    leaves = tree_before(call, tree) if call else leaves_of(tree)
    if OVERWRITE_WITH_GRADIENT in collections_of(tree):
        raise errors.ArgumentValueError(
            'the variables hold "_overwrite_with_gradient": they receive their new '
            'value as a gradient, and no optimizer may see them.\n'
            "Give it variables['params']; Flax's TrainState takes both and does so.",
        )
    return leaves

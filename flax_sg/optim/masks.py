"""Masks and labels of parameters, for optax."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from flax_sg import errors, filters
from flax_sg.filters.paths import Path
from flax_sg.trees.absent import is_absent
from flax_sg.trees.leaves import Leaves, is_differentiable, leaves_of, selected, whole
from flax_sg.trees.partition import classified
from flax_sg.trees.trainable import chosen, overwritten


def trainable_mask(
    tree: Any, where: filters.Where | None = None, *, unused: str = 'raise'
) -> Any:
    """A tree of bools, True at the parameters that are trained: those of ``where``.

    >>> import flax_sg as sg
    >>> params = {'body': {'w': 1.0}, 'head': {'w': 2.0, 'steps': 3}}
    >>> sg.trainable_mask(params, 'head/**')
    {'body': {'w': False}, 'head': {'steps': False, 'w': True}}

    Args:
        tree: parameters, or their shapes (``jax.eval_shape``).
        where: what is **trained**: any kind of filter. By default what the classes in
            the tree declare, see ``sg.trainable``; everything, if none does. What a
            module freezes, ``Frozen`` parts and blocks, is said by
            ``sg.live(module, variables, *args)``.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        The tree with a bool at each leaf, and at each ``NonDifferentiable``. What has
        no gradient (integers, keys, ``NonDifferentiable``) is False.

    Raises:
        UnusedFilterError: if a part of ``where`` matches no leaf.
        NotDifferentiableError: if what it matches has no gradient.
        PartError: if it means a part of a leaf.
        ArgumentValueError: if there is a collection that no optimizer may see.
    """
    leaves = parameters_of(tree)
    said = chosen([leaves], where, unused)[0]
    return _beside(leaves, whole(said, leaves.paths, 'a mask'))


def frozen_mask(
    tree: Any, where: filters.Where | None = None, *, unused: str = 'raise'
) -> Any:
    """A tree of bools, True at the parameters that are frozen: those of ``where``.

    >>> import flax_sg as sg
    >>> params = {'body': {'w': 1.0}, 'head': {'w': 2.0, 'steps': 3}}
    >>> sg.frozen_mask(params, 'body/**')
    {'body': {'w': True}, 'head': {'steps': True, 'w': False}}

    Args:
        tree: parameters, as for ``trainable_mask``.
        where: what is **frozen**: any kind of filter. By default what the classes in
            the tree declare as not trained. From the ``Frozen`` parts of a module:
            ``~sg.live(module, variables, *args)``.
        unused: ``'ignore'`` to let a filter pass that matches nothing.

    Returns:
        The tree with a bool at each leaf. What has no gradient is True.

    Raises:
        UnusedFilterError: if a part of ``where`` matches no leaf.
        ArgumentValueError: if there is a collection that no optimizer may see.
    """
    leaves = parameters_of(tree)
    live = whole(live_leaves(leaves, where, unused), leaves.paths, 'a mask')
    return _beside(leaves, (not takes for takes in live))


def labels(
    tree: Any,
    groups: Mapping[Any, filters.Where] | Callable[[Path], Hashable],
    rest: Hashable = 'frozen',
) -> Any:
    """A tree of labels, for ``optax.multi_transform``.

    >>> import flax_sg as sg
    >>> params = {'body': {'w': 1.0}, 'head': {'w': 2.0, 'steps': 3}}
    >>> sg.labels(params, {'slow': 'body/**', 'fast': 'head/**'})
    {'body': {'w': 'slow'}, 'head': {'steps': 'frozen', 'w': 'fast'}}

    Args:
        tree: parameters, as for ``trainable_mask``.
        groups: filters by label, or a function that returns the label of a path. They
            are asked for what has a gradient; each such leaf has to get one label.
        rest: the label of everything else: integers, keys, ``NonDifferentiable``.

    Returns:
        The tree with a label at each leaf.

    Raises:
        StructureError: if a leaf has no label, or two.
        UnusedFilterError: if one of the filters matches nothing.
        ArgumentValueError: if there is a collection that no optimizer may see.
    """
    leaves = parameters_of(tree)
    asked = list(map(is_differentiable, leaves.values))
    paths = [path for path, ask in zip(leaves.paths, asked, strict=True) if ask]
    found = iter(classified(paths, groups)[0])
    return _beside(leaves, (next(found) if ask else rest for ask in asked))


def _beside(leaves: Leaves, found: Iterable[Any]) -> Any:
    """The tree with what was found at each leaf, and nothing where nothing is."""
    # In `freeze`, optax.multi_transform asks for labels of what is trained alone.
    pairs = zip(leaves.values, found, strict=True)
    return leaves.restore(leaf if is_absent(leaf) else new for leaf, new in pairs)


def live_leaves(leaves: Leaves, frozen: filters.Where | None, unused: str) -> list[Any]:
    """For each leaf whether an optimizer updates it, or which part of it."""
    if frozen is None:
        return chosen([leaves], None)[0]
    [takes] = selected([leaves.paths], filters.as_filter(frozen), unused)
    pairs = zip(takes, leaves.values, strict=True)
    return [is_differentiable(leaf) and filters.negated(take) for take, leaf in pairs]


def parameters_of(tree: Any) -> Leaves:
    """The leaves of a tree that an optimizer is given."""
    leaves = leaves_of(tree)
    if any(map(overwritten, leaves.paths)):
        raise _overwrites()
    return leaves


def _overwrites() -> errors.ArgumentValueError:
    """The error for variables that are given to an optimizer."""
    return errors.ArgumentValueError(
        'the variables hold "_overwrite_with_gradient": they receive their new '
        'value as a gradient, and no optimizer may see them.\n'
        "Give it variables['params']; sg.TrainState takes both and does so.",
    )

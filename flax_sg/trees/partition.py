"""Splits a tree into parts by path, and combines parts to a tree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from flax_sg import errors, filters
from flax_sg.errors.texts import shown
from flax_sg.filters.paths import Path
from flax_sg.trees.absent import ABSENT, is_absent
from flax_sg.trees.leaves import (
    Leaves,
    different_structures,
    leaves_of,
    selected,
    whole,
)


def partition(
    tree: Any, where: filters.Where, *, unused: str = 'raise'
) -> tuple[Any, Any]:
    """Splits a tree into the leaves that a filter selects and the rest.

    Both parts have the structure of the tree. ``ABSENT``, which has no leaves, marks a
    leaf that is in the other part. ``combine`` undoes the split.

    >>> import flax_sg as sg
    >>> params = {'backbone': {'w': 1.0}, 'head': {'w': 2.0, 'b': 3.0}}
    >>> head, rest = sg.partition(params, 'head/**')
    >>> head
    {'backbone': {'w': ABSENT}, 'head': {'b': 3.0, 'w': 2.0}}
    >>> sg.combine(head, rest) == params
    True

    Args:
        tree: any pytree, its leaves of any kind. In a dict of collections
            (``{'params': ..., 'batch_stats': ...}``) paths start below the collection,
            which is ``path.collection``. Leaves in a box share the path of the box. A
            ``NonDifferentiable`` is one leaf.
        where: which leaves the first part holds: any kind of filter.
        unused: ``'raise'`` (default), or ``'ignore'`` if the filter may match nothing.

    Returns:
        The selected part and the rest.

    Raises:
        FilterTypeError: if ``where`` is no filter.
        UnusedFilterError: if a part of ``where`` matches no leaf.
        PartError: if ``where`` means a part of a leaf.

    Note:
        ``equinox.partition`` and ``haiku.data_structures.partition`` do this; here
        None is no sentinel, so that trees which hold None come back as they were.
    """
    leaves = leaves_of(tree)
    [said] = selected([leaves.paths], filters.as_filter(where), unused)
    takes = whole(said, leaves.paths, 'partition')
    pairs = list(zip(takes, leaves.values, strict=True))
    return (
        leaves.restore(leaf if take else ABSENT for take, leaf in pairs),
        leaves.restore(ABSENT if take else leaf for take, leaf in pairs),
    )


def combine(*parts: Any) -> Any:
    """Puts the parts of a tree together again.

    >>> import flax_sg as sg
    >>> sg.combine({'a': 1.0, 'b': sg.ABSENT}, {'a': sg.ABSENT, 'b': 2.0})
    {'a': 1.0, 'b': 2.0}

    Args:
        *parts: trees of one structure, of which at most one has a leaf at each place,
            the others ``ABSENT``. In any order.

    Returns:
        The tree with every leaf. ``ABSENT`` stays where no part has one.

    Raises:
        StructureError: if the structures differ, with the first path that does.
        StructureError: if two parts have a leaf at one path.
        TypeError: if there are no parts.
    """
    if not parts:
        raise TypeError('combine() takes at least one part')
    first, *others = map(leaves_of, parts)
    values = list(first.values)
    for number, other in enumerate(others, start=2):
        check_same_structure(first, other, 'part 1', f'part {number}')
        for index, leaf in enumerate(other.values):
            if is_absent(leaf):
                continue
            if not is_absent(values[index]):
                raise _overlap(first.paths[index], values[index], leaf)
            values[index] = leaf
    return first.restore(values)


def partition_n(
    tree: Any,
    classify: Callable[[Path], Hashable] | Mapping[Any, filters.Where],
) -> dict[Any, Any]:
    """Splits a tree into several parts, with each leaf in exactly one part.

    >>> import flax_sg as sg
    >>> params = {'gln_0': {'w': 1.0}, 'code': {'w': 2.0}}
    >>> parts = sg.partition_n(params, {'gln': 'gln_*/**', 'code': 'code/**'})
    >>> parts['gln']
    {'code': {'w': ABSENT}, 'gln_0': {'w': 1.0}}
    >>> sg.combine(*parts.values()) == params
    True

    Args:
        tree: any pytree, as for ``partition``.
        classify: a dict from labels to filters, or a function that returns the label
            of a path, None if it knows none.

    Returns:
        For each label the part of the tree that it names: for filters all labels in
        their order, for a function those that occur, in the order of the leaves.

    Raises:
        StructureError: if a leaf has no label, or two.
        UnusedFilterError: if one of the filters matches nothing.

    Note:
        The exhaustive ``partition_n`` of dm-haiku, as google/flax#1857 uses it.
    """
    leaves = leaves_of(tree)
    found, names = classified(leaves.paths, classify)
    return {
        name: leaves.restore(
            leaf if label == name else ABSENT
            for label, leaf in zip(found, leaves.values, strict=True)
        )
        for name in names
    }


def classified(
    paths: Sequence[Path],
    classify: Callable[[Path], Hashable] | Mapping[Any, filters.Where],
) -> tuple[list[Any], list[Any]]:
    """The label of each path, and all labels."""
    if not isinstance(classify, Mapping):
        if not callable(classify):
            raise errors.FilterTypeError(
                f'{classify!r} classifies nothing: expected filters by label, such as '
                "{'gln': 'gln_*/**', ...}, or a function of the path."
            )
        found = [classify(path) for path in paths]
        for path, label in zip(paths, found, strict=True):
            if label is None:
                raise _unclassified(path, [], None)
        return found, list(dict.fromkeys(found))
    labels: list[list[Any]] = [[] for _ in paths]
    for label, where in classify.items():
        [said] = selected([paths], filters.as_filter(where))
        for index, take in enumerate(whole(said, paths, 'a label')):
            if take:
                labels[index].append(label)
    for path, several in zip(paths, labels, strict=True):
        if len(several) != 1:
            raise _unclassified(path, several, list(classify))
    return [label for [label] in labels], list(classify)


def check_same_structure(a: Leaves, b: Leaves, name_a: str, name_b: str) -> None:
    """Raises if two trees differ in structure, naming the first path that does."""
    if a.treedef == b.treedef:
        return
    raise different_structures(
        name_a, name_b, a.by_path(), b.by_path(), str(a.treedef), str(b.treedef)
    )


def _overlap(path: str, one: Any, other: Any) -> errors.StructureError:
    """Two parts of a tree have a leaf at the same place."""
    return errors.StructureError(
        f'Two parts have a leaf at {str(path)!r}: '
        f'{shown(one)} and {shown(other)}.\n'
        'Each leaf has to be in one part, and ABSENT in the others.'
    )


def _unclassified(
    path: str, labels: Sequence[Any], known: Sequence[Any] | None
) -> errors.StructureError:
    """A leaf has no label, or more than one."""
    if labels:
        found = f'has {len(labels)} labels: {", ".join(map(repr, labels))}'
        fix = 'Let the filters exclude each other, with & and ~.'
    elif known is None:
        found = 'has no label: the function returned None'
        fix = 'Return a label for it.'
    else:
        found = f'has no label: none of {", ".join(map(repr, known))} takes it'
        fix = 'Give a filter for it, such as the complement (~) of the others.'
    return errors.StructureError(f'the leaf at {str(path)!r} {found}.\n{fix}')

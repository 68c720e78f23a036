"""Splits a tree into parts by path, and combines parts to a tree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from flax_sg import errors, filters
from flax_sg.errors.texts import brief, raised_by, shown
from flax_sg.filters.paths import Path
from flax_sg.internals.types import PyTree
from flax_sg.trees.leaves import (
    ABSENT,
    is_absent,
    leaves_of,
    selected,
    tree_before,
    whole,
)
from flax_sg.trees.matching import different_structures
from flax_sg.trees.rows import Rest, halves


def partition(
    tree: PyTree, where: filters.Where, *, unused: str = 'raise'
) -> tuple[PyTree, PyTree]:
    """Splits a tree into the leaves that a filter selects and the rest.

    Both parts have the structure of the tree. ``ABSENT``, which has no leaves, marks a
    leaf that is in the other part. ``combine`` undoes the split.

    Of an array of which the filter means some elements, the first part has these alone:
    rows as rows, others in one axis.

    >>> import flax_sg as sg
    >>> params = {'backbone': {'w': 1.0}, 'head': {'w': 2.0, 'b': 3.0}}
    >>> head, rest = sg.partition(params, 'head/**')
    >>> head
    {'backbone': {'w': ABSENT}, 'head': {'b': 3.0, 'w': 2.0}}
    >>> sg.combine(head, rest) == params
    True
    >>> import jax.numpy as jnp
    >>> w = jnp.array([1.0, 2.0, 3.0])
    >>> part, rest = sg.partition({'w': w}, {'w': w > 1.5})
    >>> part['w'].tolist(), sg.combine({'w': 10 * part['w']}, rest)['w'].tolist()
    ([2.0, 3.0], [1.0, 20.0, 30.0])

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
        PartError: if a part that ``where`` means does not fit its array, or is traced.

    Note:
        ``equinox.partition`` and ``haiku.data_structures.partition`` do this; here
        None is no sentinel, so that trees with None in them come back as they were.
    """
    leaves = tree_before('sg.partition(tree, where)', tree)
    [decisions] = selected([leaves.paths], filters.as_filter(where), unused)
    pairs: list[tuple[PyTree, PyTree]] = []
    for decision, (path, leaf) in zip(decisions, leaves, strict=True):
        if isinstance(decision, filters.Part) and not is_absent(leaf):
            pairs.append(halves(decision, leaf, path))
        else:
            pairs.append((ABSENT, leaf) if decision is False else (leaf, ABSENT))
    return leaves.restore(part for part, _ in pairs), leaves.restore(
        rest for _, rest in pairs
    )


def combine(part: PyTree, *others: PyTree) -> PyTree:
    """Puts the parts of a tree together again.

    >>> import flax_sg as sg
    >>> sg.combine({'a': 1.0, 'b': sg.ABSENT}, {'a': sg.ABSENT, 'b': 2.0})
    {'a': 1.0, 'b': 2.0}

    Args:
        part: a tree with ``ABSENT`` where another part has a leaf.
        *others: trees of the same structure, in any order. At each place at most one
            part has a leaf, the others ``ABSENT``.

    Returns:
        The tree with every leaf. ``ABSENT`` stays where no part has one.

    Raises:
        StructureError: if the structures differ, with the first path that does.
        StructureError: if two parts have a leaf at one path.
    """
    first = leaves_of(part)
    parts = part if type(part) in (tuple, list) and not others else ()
    same = len({leaves_of(each).treedef for each in parts}) == 1 < len(parts)
    if same and any(map(is_absent, first.values)):
        raise errors.ArgumentTypeError(
            f'combine() got {brief(part)} of {len(parts)} parts as one tree.\n'
            'Give it each part: sg.combine(*parts).'
        )
    values = list(first.values)
    for position, other in enumerate(map(leaves_of, others), start=2):
        if other.treedef != first.treedef:
            raise different_structures('part 1', f'part {position}', first, other)
        for index, leaf in enumerate(other.values):
            if is_absent(leaf):
                continue
            present = values[index]
            rest, part = (
                (present, leaf) if isinstance(present, Rest) else (leaf, present)
            )
            if is_absent(present):
                values[index] = leaf
            elif isinstance(rest, Rest) and not isinstance(part, Rest):
                values[index] = rest.with_part(part)
            else:
                raise errors.StructureError(
                    f'Two parts have a leaf at {str(first.paths[index])!r}: '
                    f'{shown(present)} and {shown(leaf)}.\n'
                    'Each leaf has to be in one part, and ABSENT in the others.'
                )
    return first.restore(values)


def partition_n(
    tree: PyTree,
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
    leaves = tree_before('sg.partition_n(tree, classify)', tree)
    with raised_by('sg.partition_n(tree, classify)'):
        candidates, names = classified(leaves.paths, classify)
    labels = [*map(one_label, leaves.paths, candidates)]
    return {
        name: leaves.restore(
            leaf if label == name else ABSENT
            for label, leaf in zip(labels, leaves.values, strict=True)
        )
        for name in names
    }


def classified(
    paths: Sequence[Path],
    classify: Callable[[Path], Hashable] | Mapping[Any, filters.Where],
    unused: str = 'raise',
) -> tuple[list[list[Any]], list[Any]]:
    """The labels of each path, and all labels."""
    labels: list[list[Any]] = [[] for _ in paths]
    if isinstance(classify, Mapping):
        for label, where in classify.items():
            [decisions] = selected([paths], filters.as_filter(where), unused)
            bools = whole(decisions, paths)
            for labels_of_path, is_meant in zip(labels, bools, strict=True):
                labels_of_path.extend([label] if is_meant else [])
        return labels, list(classify)
    if not callable(classify):
        raise errors.FilterTypeError(
            f'{brief(classify)} is no dict of filters by label.\n'
            "Write {'slow': 'body/**', 'fast': 'head/**'}, or a function of the path "
            'that returns a label.'
        )
    for path, labels_of_path in zip(paths, labels, strict=True):
        label: Any = classify(path)
        if not isinstance(label, Hashable):
            raise errors.FilterTypeError(
                f'The function of labels returned {brief(label)} for {str(path)!r}.\n'
                'Return one label, such as a str, or None if it knows none.'
            )
        labels_of_path.extend([] if label is None else [label])
    return labels, list(dict.fromkeys(label for [label] in filter(None, labels)))


def one_label(path: Path, labels: Sequence[Any], rest: str = '') -> Any:
    """The label of a leaf; raises unless it has one."""
    if len(labels) == 1:
        return labels[0]
    if labels:
        problem = f'{len(labels)} labels: {", ".join(map(repr, labels))}'
        fix = 'Give each leaf one label: subtract a filter from another by & ~.'
    else:
        problem, fix = 'no label', f'Give it one: add a filter that selects it{rest}.'
    raise errors.StructureError(f'The leaf at {str(path)!r} has {problem}.\n{fix}')

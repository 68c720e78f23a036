"""Which leaves are trained: by a filter, or as the classes in a tree declare it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import jax

from flax_sg import errors, filters
from flax_sg.errors.texts import brief, listed, shown
from flax_sg.filters.paths import Path
from flax_sg.internals.optional import is_of_nnx
from flax_sg.internals.types import PyTree
from flax_sg.trees.leaves import (
    OVERWRITE_WITH_GRADIENT,
    Leaves,
    check_unused,
    is_absent,
    is_differentiable,
    is_whole,
    name_of,
    selected,
)
from flax_sg.trees.levels import one_level


class Declared:
    """Selects what the classes in a tree declare as trained, see ``sg.trainable``.

    ``sg.DECLARED`` is the only one. In a tree without declarations it selects every
    real or complex leaf. ``sg.freeze`` freezes the rest.
    """

    def __invert__(self) -> NoReturn:
        raise errors.FilterTypeError(
            'sg.DECLARED has no complement: it is no filter.\n'
            'Give it as it is: wrt=sg.DECLARED differentiates what the classes declare '
            'as trained,\nand sg.freeze(tx, sg.DECLARED) freezes the rest.'
        )

    def __repr__(self) -> str:
        return 'DECLARED'


DECLARED = Declared()
"""In place of a filter: what the classes in a tree declare, see ``trainable``."""

T = TypeVar('T', bound=type)

# The attribute of a class that holds its trained fields; subclasses inherit it.
_FIELDS = '_flax_sg_trained_fields'


def trainable(*fields: str) -> Callable[[T], T]:
    """Declares which fields of a pytree class are trained; the others are not.

    The other fields remain leaves: they are moved to a device, traced, cast and saved.
    ``sg.grad`` and its relatives, the masks and ``sg.freeze`` follow the declaration
    wherever an instance is in a tree. A filter in the call overrides it.

    >>> import jax, flax.struct, flax_sg as sg
    >>> @sg.trainable('kernel', 'bias')
    ... class Whitened(flax.struct.PyTreeNode):
    ...     kernel: jax.Array
    ...     bias: jax.Array
    ...     mean: jax.Array
    >>> layer = Whitened(2.0, 1.0, 0.5)
    >>> def loss(layer, x):
    ...     return layer.kernel * (x - layer.mean) + layer.bias
    >>> sg.grad(loss)(layer, 3.0).mean
    ABSENT
    >>> float(sg.grad(loss, wrt='mean')(layer, 3.0).mean)
    -2.0

    Args:
        *fields: the names of the trained fields, as they are in key paths; none, if
            nothing in the class is trained.

    Returns:
        A decorator for a class that is, or will be, registered as a pytree with keys:
        ``flax.struct``, ``jax.tree_util.register_dataclass``, a NamedTuple. Subclasses
        inherit the declaration, or make their own.

    Raises:
        ArgumentTypeError: if it is given the class; later, if an instance in a tree
            has no such field.

    Note:
        ``Flux.trainable`` and the fields of ``Functors.functor`` draw the same line.
    """
    names: tuple[Any, ...] = fields
    # It may have been given the class, or a list of names.
    if not all(isinstance(name, str) for name in names):
        raise errors.ArgumentTypeError(
            f'trainable() got {", ".join(map(brief, fields))}, and takes names of '
            "fields.\nWrite @sg.trainable('kernel', ...) above a pytree class."
        )

    def declare(cls: T) -> T:
        setattr(cls, _FIELDS, frozenset(fields))
        return cls

    return declare


def _fields_of(cls: type) -> frozenset[str] | None:
    fields = getattr(cls, _FIELDS, None)
    return frozenset() if fields is None and _is_state(cls) else fields


def _is_state(cls: type) -> bool:
    return is_of_nnx(cls, 'Variable') and not is_of_nnx(cls, 'Param')


def states(tree: PyTree) -> list[bool]:
    """For each leaf whether it is in a Variable of NNX that is no Param."""
    return [cls is not None and _is_state(cls) for cls in variable_types(tree)]


def variable_types(tree: PyTree) -> list[type | None]:
    """For each leaf the class of the Variable of NNX that it is in, if there is one."""

    def is_variable(node: object) -> bool:
        return is_of_nnx(type(node), 'Variable')

    nodes = jax.tree.leaves(tree, lambda node: is_whole(node) or is_variable(node))
    return [
        type(node) if is_variable(node) else None
        for node in nodes
        for _ in ([node] if is_whole(node) else jax.tree.leaves(node, is_whole))
    ]


def declared(tree: PyTree) -> list[bool]:
    """For each leaf whether no class on the way to it declares it as not trained.

    Of the Variables of NNX each Param is trained, as ``nnx.grad`` has it.
    """

    def is_leaf(node: object) -> bool:
        return is_whole(node) or _fields_of(type(node)) is not None

    out: list[bool] = []
    for node in jax.tree.leaves(tree, is_leaf=is_leaf):
        fields = None if is_whole(node) else _fields_of(type(node))
        out.extend([True] if fields is None else _declared_in(node, fields))
    return out


def _declared_in(node: object, fields: frozenset[str]) -> list[bool]:
    children, _ = one_level(node)
    names = [name_of(keys[0]) for keys, _ in children]
    for name in sorted(fields - set(names)):
        raise errors.ArgumentTypeError(
            f'{type(node).__name__} declares the field {name!r} as trained; its fields '
            f'are {", ".join(map(repr, names)) or "none"}.'
        )
    out: list[bool] = []
    for name, (_, child) in zip(names, children, strict=True):
        out.extend(is_trained and name in fields for is_trained in declared(child))
    return out


def chosen(
    trees: Sequence[Leaves],
    where: filters.Where | Declared,
    unused: str = 'raise',
) -> list[list[Any]]:
    """Which leaves of some trees, or which parts of them, are trained.

    Args:
        trees: the trees; they are judged together.
        where: a filter, or ``DECLARED``.
        unused: ``'raise'`` or ``'ignore'`` if a part of the filter matches nothing.

    Returns:
        For each leaf whether it is meant and can be differentiated. The leaves of
        ``_overwrite_with_gradient`` always are: their gradient is their new value.

    Raises:
        UnusedFilterError: if a part of the filter matches nothing.
        ArgumentTypeError: if a part of the filter selects nothing that can be
            differentiated.
    """
    check_unused(unused)
    if isinstance(where, Declared):
        meant: list[list[Any]] = [declared(tree.tree) for tree in trees]
    else:
        where = filters.as_filter(where)
        meant = selected([tree.paths for tree in trees], where, unused)
        _check_differentiable([pair for tree in trees for pair in tree], where)
    return [
        [
            is_differentiable(leaf) and (overwritten(path) or decision)
            for decision, (path, leaf) in zip(decisions, tree, strict=True)
        ]
        for tree, decisions in zip(trees, meant, strict=True)
    ]


def overwritten(path: Path) -> bool:
    """Whether the gradient of a leaf is its new value."""
    return path.collection == OVERWRITE_WITH_GRADIENT


def _check_differentiable(
    leaves: Sequence[tuple[Path, Any]], where: filters.Filter
) -> None:
    # A leaf that is absent may have had a gradient: its filter is no mistake.
    may_have = [is_absent(leaf) or is_differentiable(leaf) for _, leaf in leaves]
    fixed = [pair for pair, may in zip(leaves, may_have, strict=True) if not may]
    for part in where.parts if isinstance(where, filters.Or) else (where,):
        meant = {path: leaf for path, leaf in fixed if filters.is_meant(part(path))}
        paths = (path for path, _ in itertools.compress(leaves, may_have))
        may_be_any = isinstance(part, filters.Constant)
        if meant and not (may_be_any or any(filters.is_meant(part(x)) for x in paths)):
            raise not_differentiable(part, meant)


def not_differentiable(
    where: object, leaves: Mapping[Any, Any]
) -> errors.ArgumentTypeError:
    """The error for a filter that names only what cannot be differentiated."""
    texts = [f'{str(path)!r} ({shown(leaf)})' for path, leaf in leaves.items()]
    return errors.ArgumentTypeError(
        f'{where!r} selects only what cannot be differentiated: {listed(texts)}.\n'
        'Select real or complex leaves; True selects those and no others.'
    )

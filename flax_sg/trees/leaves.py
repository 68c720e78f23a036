"""The leaves of any pytree, with the paths by which filters know them.

JAX names a leaf by a key path; a filter sees a ``Path``. They differ in four things:
'/' joins the names of a path. Leaves inside a box (``nn.Partitioned``) share the path
of the box. In a dict of collections the first name is the collection. Nested dicts are
modules and variables: everything below the last dict belongs to one variable.

``ABSENT`` stands in place of a leaf that was taken out of a tree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization

from flax_sg import errors, filters
from flax_sg.errors.texts import brief, shown
from flax_sg.filters.expressions import find_unused
from flax_sg.filters.paths import Path, name_of, names_in
from flax_sg.filters.patterns import nearest
from flax_sg.internals import frames
from flax_sg.trees.nondifferentiable import NonDifferentiable
from flax_sg.trees.operators import operators

Keys: TypeAlias = tuple[Any, ...]


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    updates = frames.argument_of('optax', 'apply_updates', 'updates')
    absent = [path for path, leaf in leaves_of(updates) if is_absent(leaf)]
    if absent:  # The first one is the one that is added.
        raise errors.AbsentLeafError(
            f'optax.apply_updates adds ABSENT to {absent[0]!r}: no gradient was '
            'computed for this parameter.\n'
            'Write sg.apply_updates(params, updates), and sg.freeze(tx, where) for tx.'
        )
    raise errors.AbsentLeafError(
        'ABSENT is no array: this leaf was not selected, or is in another part of the '
        'tree.\n'
        'With optax, write sg.freeze(tx, where) for tx, and sg.apply_updates(params, '
        'updates).\n'
        "For a value, select the leaf in wrt= or where=, or pass absent='zeros' to "
        'the gradient call.'
    )


class _NamedInErrors(type):
    """Makes JAX's own error of two trees that differ say what to do."""

    def __repr__(cls) -> str:
        return (
            'ABSENT: no gradient was computed for this leaf. Wrap the optimizer, '
            'sg.freeze(tx, where), and use sg.apply_updates'
        )


class Absent(operators(_refuse), metaclass=_NamedInErrors):
    """Marks a leaf that is not in this part of a tree. ``sg.ABSENT`` is the only one.

    ``ABSENT`` is a pytree node without leaves. It is not None, which many trees hold
    for reasons of their own. Arithmetic, indexing, attributes and conversions raise.

    >>> import jax, flax_sg as sg
    >>> sg.ABSENT, jax.tree.leaves({'a': sg.ABSENT, 'b': 1.0})
    (ABSENT, [1.0])
    >>> sg.ABSENT + 1.0
    Traceback (most recent call last):
        ...
    flax_sg.errors.AbsentLeafError: ABSENT is no array: ...

    Raises:
        AbsentLeafError: when it is used as a value.
    """

    __slots__ = ()
    __array_priority__ = 1000

    def __repr__(self) -> str:
        return 'ABSENT'

    def __reduce__(self) -> str:
        return 'ABSENT'

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__'):  # Python, numpy and JAX ask what an object can do.
            raise AttributeError(name)
        _refuse(self)

    __call__ = __array__ = __jax_array__ = _refuse
    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__


ABSENT = Absent()

jax.tree_util.register_pytree_node(Absent, lambda _: ((), None), lambda *_: ABSENT)
serialization.register_serialization_state(Absent, lambda _: {}, lambda *_: ABSENT)


def is_absent(leaf: Any) -> bool:
    """Whether something is ``ABSENT``; an ``is_leaf`` that keeps it in a tree."""
    return leaf is ABSENT


def missing_leaf(what: str, path: str, why: str, fix: str) -> errors.StructureError:
    """A leaf is needed, and ``ABSENT`` (or None, or a ``MaskedNode``) stands there."""
    return errors.StructureError(
        f'there is nothing at {str(path)!r} in {what}, and it {why}.\n{fix}'
    )


# fp8 layers receive the *new value* of these as a gradient: no rule may touch them.
OVERWRITE_WITH_GRADIENT = '_overwrite_with_gradient'


def is_differentiable(leaf: Any) -> bool:
    """Whether a leaf can be differentiated: real or complex, and not marked.

    Arrays, tracers, Python's numbers and ``jax.ShapeDtypeStruct`` can; integers, bools,
    keys, strings, other objects and ``NonDifferentiable`` cannot.
    """
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return jnp.issubdtype(leaf.dtype, jnp.inexact)
    return isinstance(leaf, (float, complex))


@dataclasses.dataclass(frozen=True)
class Leaves:
    """A tree, taken apart.

    Attributes:
        values: the leaves; ``ABSENT`` and ``NonDifferentiable`` count as leaves.
        paths: the path of each.
        key_paths: the key path of each, which tells leaves in one box apart.
        treedef: what puts such a list of leaves together again.
    """

    values: list[Any]
    paths: list[Path]
    key_paths: list[Keys]
    treedef: Any

    def restore(self, values: Iterable[Any]) -> Any:
        """The tree with other leaves."""
        return jax.tree_util.tree_unflatten(self.treedef, list(values))

    def __iter__(self) -> Iterator[tuple[Path, Any]]:
        return zip(self.paths, self.values, strict=True)


def is_whole(node: Any) -> bool:
    """Whether something is one leaf here, whatever is in it."""
    return is_absent(node) or isinstance(node, NonDifferentiable)


def leaves_of(tree: Any) -> Leaves:
    """Takes a tree apart."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_whole)
    collections = _is_variables(tree)
    paths = [
        _path_of(names, collections)
        for names, node in names_in(tree, is_whole)
        # A box is one name for all that is in it.
        for _ in jax.tree.leaves(node, is_leaf=is_whole)
    ]
    return Leaves([x for _, x in pairs], paths, [keys for keys, _ in pairs], treedef)


def path_of(keys: Keys) -> Path:
    """The path that a filter sees for a key path of JAX.

    >>> import jax
    >>> tree = {'enc': [1.0, {'w': 2.0}]}
    >>> [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]
    ['enc/0', 'enc/1/w']

    Args:
        keys: a key path, of any kind of keys.
    """
    return _path_of(tuple(map(name_of, keys)), False)


def _path_of(names: tuple[str, ...], collections: bool) -> Path:
    if collections and len(names) > 1:
        return Path.of(names[0], names[1:])
    return Path.of('params', names or ('',))


def _is_variables(tree: Any) -> bool:
    """Whether a tree is a dict of collections, as Flax's ``init`` returns it."""
    if not isinstance(tree, Mapping):
        return False
    known = 'params' in tree or OVERWRITE_WITH_GRADIENT in tree
    return known and all(isinstance(below, Mapping) for below in tree.values())


def selected(
    trees: Sequence[Sequence[Path]], where: filters.Filter, unused: str = 'raise'
) -> list[list[Any]]:
    """What a filter says of each leaf of some trees: a bool, or a ``Part`` of it.

    Args:
        trees: the paths of the leaves of each tree; they are judged together.
        where: the filter.
        unused: ``'raise'`` or ``'ignore'`` if a part of it matches nothing.

    Raises:
        UnusedFilterError: if a part of the filter matched no leaf.
        FilterValueError: if a tree of bools does not fit.
    """
    check_unused(unused)
    matched: set[filters.Filter] = set()
    out = [[where(path, matched) for path in tree] for tree in trees]
    if unused == 'raise':
        paths = [path for tree in trees for path in tree]
        error = find_unused(where, matched, paths, None, any(map(any, out)))
        if error is not None:
            raise error
    return out


def whole(said: Sequence[Any], paths: Sequence[Path], what: str) -> list[bool]:
    """What a filter says of leaves that cannot be split; raises if it means a part."""
    for takes, path in zip(said, paths, strict=True):
        if isinstance(takes, filters.Part):
            raise errors.PartError(
                f'The filter means a part of {path!r}, and {what} takes whole leaves.\n'
                'Blocks, gradient calls and sg.freeze take parts; here name whole '
                'leaves.'
            )
    return list(said)


def check_unused(unused: str) -> None:
    """Raises for a value of ``unused=`` that means nothing."""
    if unused not in ('raise', 'ignore'):
        raise errors.FilterValueError(
            f"unused={unused!r}: expected 'raise' or 'ignore'."
        )


def different_structures(
    name_a: str, name_b: str, a: Sequence[Path], b: Sequence[Path], pruned: bool = False
) -> errors.StructureError:
    """Two trees that belong together have leaves at different paths."""
    lines = [] if pruned else _only_in(a, b, name_a, name_b)
    lines += _only_in(b, a, name_b, name_a)
    lines = lines or ['  Their nodes are of different types, such as list and tuple.']
    said = f'{name_a} and {name_b} have different structures.'
    return errors.StructureError('\n'.join([said, *lines]))


def _only_in(
    here: Sequence[Path], there: Sequence[Path], one: str, other: str
) -> list[str]:
    known = set(there)
    paths = [str(path) for path in dict.fromkeys(here) if path not in known]
    if not paths:
        return []
    near = nearest(paths[0], map(str, there), 1)
    more = f' and {len(paths) - 1} more' if len(paths) > 1 else ''
    hint = f'; nearest there: {near[0]!r}' if near else ''
    return [f'  {paths[0]!r}{more}: in {one}, not in {other}{hint}']


def fitting(path: Path, value: Any, other: Any) -> Any:
    """Returns the value that is read in place of another; raises if it does not fit."""
    if _form(value) != _form(other):
        raise misfit(path, described(value), described(other))
    return other


def _form(value: Any) -> Any:
    leaves, treedef = jax.tree.flatten(value)
    return treedef, [(getattr(x, 'dtype', type(x)), shape_of(x)) for x in leaves]


def as_array(leaf: Any) -> Any:
    """A number or a NumPy array as a JAX array; anything else as it is."""
    if isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
        return jnp.asarray(leaf)
    return leaf


def shape_of(leaf: Any) -> Any:
    """The shape of a leaf; () if it is no array."""
    return getattr(leaf, 'shape', ())


def described(value: Any) -> str:
    """A value by the types in it."""
    leaves, treedef = jax.tree.flatten(value)
    if jax.tree_util.treedef_is_leaf(treedef) and leaves:
        return shown(leaves[0])
    more = ', ...' if len(leaves) > 3 else ''
    return f'{brief(value)} of {", ".join(map(shown, leaves[:3])) or "nothing"}{more}'


def misfit(path: Path, expected: str, found: str) -> errors.StructureError:
    """A value does not fit the variable that it should be read in place of."""
    return errors.StructureError(
        f'nn.substitute: the value for {str(path)!r} of the collection '
        f'{path.collection!r} does not fit.\nExpected: {expected}\nFound:    {found}'
    )


def no_value(path: Path, where: str) -> errors.StructureError:
    """The error for a selected variable that has no other value."""
    return errors.StructureError(
        f'nn.substitute: there is no value for {str(path)!r} of the collection '
        f'{path.collection!r} in {where}.\n'
        'Fix: give one, or leave the variable out with substitute(..., where=).',
    )

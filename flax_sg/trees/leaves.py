"""The leaves of any pytree, with the paths by which filters know them.

JAX names a leaf by a key path; a filter sees a ``Path``. They differ in four things:
'/' joins the names of a path. Leaves inside a box (``nn.Partitioned``) share the path
of the box. In a dict of collections the first name is the collection. Nested dicts are
modules and variables: everything below the last dict belongs to one variable.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.core import meta

from flax_sg import errors, filters
from flax_sg.errors.texts import brief, shown, wrong_argument
from flax_sg.filters.expressions import decide, of_a_part
from flax_sg.filters.paths import Path, name_of, names_in
from flax_sg.filters.unused import find_unused
from flax_sg.internals.types import Decision, Leaf, PyTree, TreeDef
from flax_sg.trees.absent import ABSENT as ABSENT
from flax_sg.trees.absent import Absent as Absent
from flax_sg.trees.absent import is_absent as is_absent
from flax_sg.trees.leaf_types import is_array as is_array
from flax_sg.trees.leaf_types import is_differentiable as is_differentiable
from flax_sg.trees.leaf_types import is_module, is_variable
from flax_sg.trees.leaf_types import is_number as is_number
from flax_sg.trees.leaf_types import is_whole as is_whole
from flax_sg.trees.nnx_paths import path_at
from flax_sg.trees.nnx_tied import each_once
from flax_sg.trees.nnx_walks import Walk

Keys: TypeAlias = tuple[Any, ...]


# fp8 layers receive the *new value* of these as a gradient: no rule may touch them.
OVERWRITE_WITH_GRADIENT = '_overwrite_with_gradient'


class Leaves:
    """A tree, taken apart.

    Attributes:
        values: the leaves; ``ABSENT`` and ``NonDifferentiable`` count as leaves.
        treedef: what puts such a list of leaves together again.
        tree: the tree. Tied Variables of NNX stand in it once.
        outer: the names that all paths begin with.
    """

    values: list[Any]
    treedef: TreeDef

    def __init__(self, tree: PyTree, outer: tuple[str, ...] = ()) -> None:
        self.tree, self._tie = each_once(tree)
        self._tied = tree if self.tree is not tree else None
        self.values, self.treedef = jax.tree.flatten(self.tree, is_leaf=is_whole)
        self.outer = outer

    # Computed when it is asked for: most trees are put together again without paths.
    @functools.cached_property
    def paths(self) -> list[Path]:
        """The path of each leaf."""
        path_of = functools.partial(
            path_at, collections=bool(collections_of(self.tree)), outer=self.outer
        )
        names_of_leaves = _names_of(self.tree)
        paths = [
            path_of(names, inner, x)
            for (names, inner), x in zip(names_of_leaves, self.values, strict=True)
        ]
        if self._tied is not None:
            walk = Walk(self._tied, path_of, ties_outside=False)
            for (names, inner), path in zip(names_of_leaves, paths, strict=True):
                leaf = walk.ways.at((*names, *inner))
                if leaf is not None:
                    is_box = is_variable(walk.leaves[leaf].value)
                    walk.ways.tell(path, leaf, 0 if is_box else len(inner))
        return paths

    @functools.cached_property
    def key_paths(self) -> list[Keys]:
        """The key path of each leaf. Leaves in one box have different ones."""
        pairs, _ = jax.tree_util.tree_flatten_with_path(self.tree, is_leaf=is_whole)
        return [keys for keys, _ in pairs]

    @property
    def form(self) -> Callable[[Iterable[Any]], Any]:
        """A function that makes such a tree of other leaves; it keeps no leaf alive."""
        return functools.partial(_put_together, self.treedef, self._tie)

    def restore(self, values: Iterable[Any]) -> PyTree:
        """The tree with other leaves."""
        return self.form(values)

    def __iter__(self) -> Iterator[tuple[Path, Any]]:
        return zip(self.paths, self.values, strict=True)


def _put_together(
    treedef: TreeDef, tie: Callable[[Any], Any], values: Iterable[Leaf]
) -> PyTree:
    return tie(jax.tree_util.tree_unflatten(treedef, list(values)))


def collections_of(tree: PyTree) -> Collection[str]:
    """The collections in a tree, if it is a dict of them as Flax's ``init`` returns it.

    Other values, such as a count of steps, may be in the dict, too.

    >>> collections_of({'params': {'w': 1.0}, 'step': 3}), collections_of({'w': 1.0})
    (dict_keys(['params', 'step']), ())
    """
    # An nnx.Dict is a module: 'params' in it is an attribute.
    mapping = tree if isinstance(tree, Mapping) and not is_module(tree) else {}
    values = (mapping.get(name) for name in ('params', OVERWRITE_WITH_GRADIENT))
    return mapping.keys() if any(isinstance(value, Mapping) for value in values) else ()


def leaves_of(tree: PyTree) -> Leaves:
    """Takes a tree apart."""
    return Leaves(tree)


def arguments_of(
    args: Sequence[Any], argnums: int | Sequence[int]
) -> dict[int, Leaves]:
    """Takes the arguments apart that hold parameters, by their position.

    If ``argnums`` is a sequence, each path begins with the position of the argument.

    >>> encoder, decoder = {'w': 1.0}, {'w': 2.0}
    >>> several = arguments_of((encoder, 'batch', decoder), (0, 2))
    >>> [path for tree in several.values() for path in tree.paths]
    ['0/w', '2/w']
    >>> arguments_of((encoder, 'batch', decoder), 2)[2].paths
    ['w']
    """
    given_positions = argnums if isinstance(argnums, Sequence) else [argnums]
    try:
        positions = [range(len(args))[n] for n in given_positions]
    except (IndexError, TypeError):
        positions = []
    if len({*positions}) == len(given_positions):
        is_prefixed = given_positions is argnums
        return {n: Leaves(args[n], (str(n),) if is_prefixed else ()) for n in positions}
    argument: Any = argnums
    name = getattr(argument, '__name__', None) or repr(argument)
    message = (
        f'argnums={name} names no arguments of the call, which has {len(args)}.\n'
        'Give different positions, counted from 0: argnums=0, or argnums=(0, 1).'
    )
    with contextlib.suppress(errors.FilterTypeError):
        filters.as_filter(argument)  # The user meant wrt=.
        message += f'\nTo name leaves by path, write wrt=: sg.grad(fun, wrt={name}).'
    raise errors.ArgumentTypeError(message)


def tree_before(call: str, tree: PyTree) -> Leaves:
    """Takes a tree apart that comes before a filter; raises if the filter comes first.

    Args:
        call: the call, as it is to be written.
        tree: the tree.
    """
    if isinstance(tree, (str, re.Pattern, filters.Filter)):
        expected = 'tree: the tree comes first, then the filter'
        if isinstance(tree, Path):  # As optax calls the function of a mask.
            expected = 'tree: a function in place of a filter gets each path'
            call = 'the filter itself, or a tree of bools'
        raise wrong_argument(tree, expected, call)
    if isinstance(tree, linen.Module):
        raise errors.ArgumentTypeError(
            f'{brief(tree)} is a module of linen, and its variables are not in it.\n'
            f'Write nn.Frozen(module, where), from flax_sg import linen as nn. Or give '
            f'its parameters: {call}.'
        )
    return leaves_of(tree)


def _names_of(tree: PyTree) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The names of each leaf: of its variable, and within it, as ``names_in`` says."""
    out: list[tuple[tuple[str, ...], tuple[str, ...]]] = []

    def walk(node: PyTree, outer: tuple[str, ...]) -> None:
        if type(node) is dict:  # Nearly always.
            for key in sorted(node):
                walk(node[key], (*outer, str(key)))
        elif is_array(node):
            out.append((outer, ()))
        else:
            for names, inner, box in names_in(node, is_whole):
                # All leaves in a box have the path of the box.
                count = len(jax.tree.leaves(box, is_leaf=is_whole))
                out.extend([((*outer, *names), inner)] * count)

    walk(tree, ())
    return out


def path_of(keys: Keys, leaf: Leaf = None) -> Path:
    """The path that a filter sees for a key path of JAX.

    >>> import jax
    >>> tree = {'enc': [1.0, {'w': 2.0}]}
    >>> [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)]
    ['enc/0', 'enc/1/w']

    Args:
        keys: a key path, of any kind of keys.
        leaf: the leaf at the path, if a filter may ask for its shape.
    """
    return path_at(tuple(map(name_of, keys)), (), leaf)


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
        ArgumentValueError: if a tree of bools does not fit.
    """
    check_unused(unused)
    matched: set[filters.Filter] = set()
    out = [[decide(where, path, matched) for path in tree] for tree in trees]
    if unused != 'ignore':
        paths = [path for tree in trees for path in tree]
        any_selected = any(filters.is_meant(x) for each in out for x in each)
        error = find_unused(where, matched, paths, None, any_selected)
        if error is not None:
            raise error
    return out


def whole(decisions: Sequence[Decision], paths: Sequence[Path]) -> list[bool]:
    """The decisions on leaves that get a label; raises if one is a part."""
    for decision, path in zip(decisions, paths, strict=True):
        if isinstance(decision, filters.Part):
            write = (
                'For a part write sg.freeze(tx, where) or sg.partition(tree, where).'
            )
            raise of_a_part(path, 'a label is for a whole array', decision, write)
    return list(decisions)


def check_unused(unused: str) -> None:
    """Raises for a value of ``unused=`` that means nothing."""
    if unused not in ('raise', 'ignore'):
        raise errors.ArgumentValueError(
            f"unused={unused!r}: expected 'raise' or 'ignore'."
        )


def fitting(path: Path, value: PyTree, other: PyTree) -> PyTree:
    """Returns the value that is read in place of another; raises if it does not fit.

    One of the two may be in a box: averages are often kept without.
    """
    if _form(value) == _form(other):
        return other
    boxes = [isinstance(x, meta.AxisMetadata) for x in (value, other)]
    if any(boxes) and _form(meta.unbox(value)) == _form(meta.unbox(other)):
        return jax.tree.unflatten(jax.tree.structure(value), jax.tree.leaves(other))
    raise misfit(path, described(value), described(other))


def _form(value: PyTree) -> tuple[Any, ...]:
    leaves, treedef = jax.tree.flatten(value)
    return treedef, [(_type_of(x), shape_of(x)) for x in leaves]


def _type_of(leaf: Leaf) -> Any:
    """The dtype of an array: of one of NumPy that which JAX makes of it."""
    dtype = getattr(leaf, 'dtype', type(leaf))
    if isinstance(leaf, (np.ndarray, np.generic)) and dtype.kind in 'biufc':
        return jax.dtypes.canonicalize_dtype(dtype)
    return dtype


def as_array(leaf: Leaf) -> Leaf:
    """A number or a NumPy array as a JAX array; anything else as it is."""
    if isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
        return jnp.asarray(leaf)
    return leaf


def shape_of(leaf: Leaf) -> Any:
    """The shape of a leaf; () if it is no array."""
    return getattr(leaf, 'shape', ())


def described(value: PyTree) -> str:
    """A value by the types in it."""
    leaves, treedef = jax.tree.flatten(value)
    if jax.tree_util.treedef_is_leaf(treedef) and leaves:
        return shown(leaves[0])
    more = ', ...' if len(leaves) > 3 else ''
    return f'{brief(value)} of {", ".join(map(shown, leaves[:3])) or "nothing"}{more}'


def misfit(path: Path, expected: str, actual: str) -> errors.StructureError:
    """The error for a value that does not fit the variable it should replace."""
    return errors.StructureError(
        f'The value for {str(path)!r} of the collection {path.collection!r} does not '
        f'fit.\nExpected: {expected}\nFound:    {actual}'
    )


def no_value(path: Path, source: str, outer: str = '') -> errors.StructureError:
    """The error for a selected variable that has no other value.

    Args:
        path: its path.
        source: what has none.
        outer: the module in which the source has one: it is that of a larger model.
    """
    advice = (
        f'It has {outer}/{path}: give the values in {outer!r} alone.'
        if outer
        else 'Give one, or leave the variable out: by where= of substitute, by '
        'sg.ABSENT in its place for nn.mirror.'
    )
    return errors.StructureError(
        f'There is no value for {str(path)!r} of the collection {path.collection!r} in '
        f'{source}.\n{advice}'
    )

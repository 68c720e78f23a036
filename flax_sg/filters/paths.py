"""The path of a variable, as filters see it; the paths of a tree."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax.core.frozen_dict import FrozenDict
from flax.core.meta import AxisMetadata

from flax_sg.internals.optional import is_of_nnx
from flax_sg.internals.types import Leaf, PyTree

# The names of the module that paths are relative to, if one is known.
Owner: TypeAlias = tuple[str, ...] | None

# What Flax nests variables in: modules, collections.
SUBTREES = (dict, FrozenDict)


class Path(str):
    """The path of one variable: a str of names joined by '/'.

    A path is relative to its *owner*, the module that opened the block. A variable
    outside the owner has its absolute path with a leading '/'. A path compares, hashes
    and slices as a str does: two variables of the same name in two collections have
    equal paths, and differ in ``collection`` only.

    A variable may hold a tuple or a dataclass. Each leaf of such a variable has a path
    of its own, which begins with that of the variable: ``path.variable``. A function of
    the path is asked about the leaf first, then about the variable.

    Modules of one class share what ``nn.jit`` has traced. If such a class opens a
    block, its filter must not ask for ``absolute``.

    >>> from flax_sg import Path
    >>> path = Path.of('params', ('enc', 'gln_0', 'dense', 'kernel'), owner=('enc',))
    >>> path
    'gln_0/dense/kernel'
    >>> path.parts, path.name, path.module
    (('gln_0', 'dense', 'kernel'), 'kernel', 'gln_0/dense')
    >>> path.collection, path.absolute
    ('params', 'enc/gln_0/dense/kernel')
    >>> Path.of('params', ('cell', 'kernel'), owner=('enc',))
    '/cell/kernel'
    """

    parts: tuple[str, ...]
    """The names of the path; of the absolute one where it lies outside the owner."""
    collection: str
    """The collection of the variable, such as 'params'."""
    is_inner: bool = False
    """Whether a path leads to a leaf within the value of a variable."""
    also: Callable[[], Iterable[Path]] | None = None
    """Makes the paths of a tied weight."""
    _shape_and_dtype: tuple[Any, Any] | None = None
    _absolute: tuple[str, ...]
    _owner: tuple[str, ...]
    _depth: int

    def __new__(cls, text: str = '') -> Path:
        """Returns a path that is written as text, of a variable in any collection."""
        names, outside = str.__str__(text), text.startswith('/')
        owner = ('',) if outside else ()
        return cls.of('', tuple(names[outside:].split('/')), owner)

    @classmethod
    def of(
        cls,
        collection: str,
        absolute: tuple[str, ...],
        owner: tuple[str, ...] = (),
        inner: int = 0,
        array: tuple[Any, Any] | None = None,
    ) -> Path:
        """Returns the path of a variable as its owner sees it.

        Args:
            collection: the collection it is in.
            absolute: its names from the root of the variables tree, its own last; then
                those within its value.
            owner: the names of the module that the path is relative to.
            inner: how many of the names lie within the value.
            array: the shape and dtype of the leaf; None if it is no array.
        """
        depth = len(owner)
        # All names of a tree that is no dict lie within its value: then they count.
        names = len(absolute) - inner or len(absolute)
        # A variable may have the name of a module, in another collection. One at the
        # owner's own path is not inside the owner.
        inside = names > depth and absolute[:depth] == owner
        parts = absolute[depth:] if inside else absolute
        self = str.__new__(cls, '/'.join(parts) if inside else '/' + '/'.join(parts))
        self.parts = parts
        self.collection = collection
        self._shape_and_dtype = array
        self._absolute = absolute
        self._owner = owner
        self._depth = names
        self.is_inner = names < len(absolute)
        return self

    @property
    def array(self) -> jax.ShapeDtypeStruct | None:
        """The shape and dtype of the leaf; None where it is no array, or unknown."""
        facts = self._shape_and_dtype
        return None if facts is None else jax.ShapeDtypeStruct(*facts)

    @property
    def variable(self) -> Path:
        """The path of the variable that the leaf belongs to; most often the same."""
        if not self.is_inner:
            return self
        names = self._absolute[: self._depth]
        return Path.of(self.collection, names, self._owner, 0, self._shape_and_dtype)

    @property
    def name(self) -> str:
        """The variable's own name, such as 'kernel'."""
        return self._absolute[self._depth - 1]

    @property
    def module(self) -> str:
        """The module that holds the variable, '' for the owner itself."""
        variable = self.variable
        return variable[: -len(self.name) - 1] or ('/' if self.outside else '')

    @property
    def absolute(self) -> str:
        """The path from the root of the variables tree, without a leading '/'."""
        return '/'.join(self._absolute)

    @property
    def place(self) -> tuple[str, tuple[str, ...]]:
        """The collection, and the names from the root: one place in one tree."""
        return self.collection, self._absolute

    @property
    def outside(self) -> bool:
        """Whether the variable lies outside the owner."""
        return self.parts is self._absolute and bool(self._owner)

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells variables apart: two of them may have paths of equal text."""
        facts = self._shape_and_dtype
        return self.collection, self._absolute, self._owner, self._depth, facts

    def __reduce__(self) -> Any:
        inner = len(self._absolute) - self._depth
        args = (self.collection, self._absolute, self._owner, inner)
        return _restored, (*args, self._shape_and_dtype)


def _restored(*args: Any) -> Path:
    # Not `Path.of`: cloudpickle would take the code of a class method with it.
    return Path.of(*args)


def all_paths(path: Path) -> Iterator[Path]:
    """Yields a path, and the others of a tied weight."""
    yield path
    if path.also:
        yield from path.also()


def shape_and_dtype(leaf: Leaf) -> tuple[Any, Any] | None:
    """What a filter may know of a leaf; None if it is neither array nor number."""
    if isinstance(leaf, (bool, int, float, complex)):
        return (), jnp.result_type(leaf)
    shape, dtype = getattr(leaf, 'shape', None), getattr(leaf, 'dtype', None)
    return None if shape is None or dtype is None else (shape, dtype)


def is_parameter(value: object) -> bool:
    """Whether something in a model of NNX counts as a parameter: views, reports, trees.

    It is a Param, or a real or complex array that is in no Variable: ``jax.grad``
    differentiates these as well.

    >>> is_parameter(jnp.ones(2)), is_parameter(jnp.arange(2))
    (True, False)
    """
    nnx = sys.modules.get('flax.nnx')
    if nnx is not None and isinstance(value, nnx.Param):
        return True
    if nnx is not None and isinstance(value, nnx.Variable):
        return False
    facts = shape_and_dtype(value)
    return facts is not None and jnp.issubdtype(facts[1], jnp.inexact)


def names_within(
    value: object, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the leaves of a variable's value, with their names within it.

    A box (``nn.Partitioned``, a Variable of NNX) is one leaf, whatever is in it.

    >>> list(names_within((1.0, {'u': 2.0}))), list(names_within(3.0))
    ([(('0',), 1.0), (('1', 'u'), 2.0)], [((), 3.0)])

    Args:
        value: any pytree.
        is_leaf: tells which other nodes are one leaf.
    """
    if isinstance(value, jax.Array) or is_of_nnx(type(value), 'Variable'):
        yield (), value
        return
    pairs, _ = jax.tree_util.tree_flatten_with_path(
        value,
        is_leaf=lambda node: (
            isinstance(node, AxisMetadata)
            or is_of_nnx(type(node), 'Variable')
            or (is_leaf is not None and is_leaf(node))
        ),
    )
    for keys, leaf in pairs:
        yield tuple(map(name_of, keys)), leaf


def names_in(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Any]]:
    """Yields the leaves of a tree: names of the variable, those within it, the leaf.

    >>> list(names_in({'enc': {'w': 1.0, 'pair': (2.0,)}}))
    [(('enc', 'pair'), ('0',), 2.0), (('enc', 'w'), (), 1.0)]

    Args:
        tree: dicts of dicts of variables, whose values are any pytrees.
        is_leaf: tells which other nodes are one leaf.
    """
    variables, _ = jax.tree_util.tree_flatten_with_path(
        tree,
        is_leaf=lambda node: (
            not (isinstance(node, SUBTREES) or is_of_nnx(type(node), 'Pytree', 'State'))
        ),
    )
    for keys, value in variables:
        outer = tuple(map(name_of, keys))
        for inner, leaf in names_within(value, is_leaf):
            yield outer, inner, leaf


def name_of(key: object) -> str:
    """The name that one key of a key path of JAX has in a path."""
    return jax.tree_util.keystr((key,), simple=True)


def natural_key(path: str) -> list[Any]:
    """A key that sorts paths by name, and 'layer_2' before 'layer_10'.

    >>> sorted(['b/10', 'b/2', 'a'], key=natural_key)
    ['a', 'b/2', 'b/10']
    """
    return [*map(_natural_name, path.split('/'))]


@functools.lru_cache(4096)  # A model has many paths, and few names.
def _natural_name(name: str) -> tuple[list[str], list[int]]:
    texts = re.split('([0-9]{1,99})', name)
    return texts[::2], [*map(int, texts[1::2])]

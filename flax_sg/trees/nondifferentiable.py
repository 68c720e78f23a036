"""A value in a tree that gets no gradient, whatever differentiates the tree.

``jax.grad`` takes trees of floats only, so a ``NonDifferentiable`` flattens to floats.
An integer of 32 bits does not fit into a float32, and its bit pattern read as a float
is not safe: JAX rewrites NaNs and flushes denormals. Pieces of 16 bits are small
integers, which are exact as floats.

Beside the pieces of a value stands a *witness*, an array of ones. The gradient of all
is zero, so an optimizer leaves them alone. But weight decay moves every parameter
towards zero, and of all floats 1.0 is the first to move. A value whose witness is no
longer 1.0 is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax.typing import DTypeLike

from flax_sg import errors
from flax_sg.internals import tracing
from flax_sg.internals.types import Array, ArrayIndex, Leaf, PyTree
from flax_sg.trees.operators import operators

_PIECE = np.uint16


@dataclasses.dataclass(frozen=True)
class _Static:
    """A leaf that is no number: part of the structure.

    Attributes:
        key: what it is compared by: its value, its identity if it has no hash.
        value: the leaf.
    """

    key: Hashable
    value: object = dataclasses.field(compare=False)

    @classmethod
    def of(cls, leaf: Leaf) -> _Static:
        """A leaf with its key."""
        try:
            hash(leaf)
        except TypeError:
            return cls(id(leaf), leaf)
        return cls((type(leaf), leaf), leaf)


@dataclasses.dataclass(frozen=True)
class _Encoding:
    """How a number or an array of numbers is stored as floats.

    Attributes:
        dtype: the type of the value; of its key data, if it is a key.
        weak: whether JAX takes the type for weak, as that of Python's numbers.
        key: the implementation of random keys, None for what is no key.
    """

    dtype: DTypeLike
    weak: bool = False
    key: str | None = None

    @property
    def is_float(self) -> bool:
        """Whether the value is of a type that ``jax.grad`` takes."""
        return bool(jnp.issubdtype(self.dtype, jnp.inexact))

    @property
    def witness(self) -> bool:
        """Whether a witness is stored.

        A bool needs none: weight decay keeps 0, and any other number is True.
        """
        return self.dtype != jnp.bool_

    @property
    def pieces(self) -> int:
        """How many arrays of floats there are, without the witness."""
        sizes = np.dtype(self.dtype).itemsize, np.dtype(_PIECE).itemsize
        return 1 if self.is_float else max(1, sizes[0] // sizes[1])


def _encoding_of(leaf: Leaf) -> _Encoding | _Static:
    """How a leaf of a value is stored."""
    if isinstance(leaf, (bool, int, float, complex)):
        return _Encoding(jnp.result_type(leaf), weak=not isinstance(leaf, bool))
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return _Static.of(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        key: Any = leaf
        return _Encoding(np.dtype(np.uint32), key=str(jax.random.key_impl(key)))
    if leaf.dtype.kind in 'OSUmM':
        return _Static.of(leaf)
    weak = bool(getattr(leaf, 'weak_type', False))
    return _Encoding(jax.dtypes.canonicalize_dtype(leaf.dtype), weak)


def _encode(leaf: Leaf, encoding: _Encoding) -> list[Any]:
    """The pieces of a leaf, and its witness."""
    # In a trace, operations of jnp are staged out. Those of numpy run here.
    like: Any = jnp if isinstance(leaf, jax.Array) else np
    if encoding.is_float:
        is_number = isinstance(leaf, (float, complex))
        return [leaf, 1.0 if is_number else like.ones_like(leaf)]
    if encoding.key is not None:
        leaf = jax.random.key_data(leaf)
    bits = like.asarray(leaf, encoding.dtype)
    if encoding.pieces > 1:
        halves = bits.reshape(*bits.shape, 1).view(_PIECE)
        pieces = [halves[..., n] for n in range(encoding.pieces)]
    else:
        pieces = [bits]
    # numpy makes scalars of arrays without axes; checkpoints take arrays only.
    arrays = [like.asarray(piece.astype(np.float32)) for piece in pieces]
    return [*arrays, like.ones_like(arrays[0])] if encoding.witness else arrays


def _decode(arrays: list[Any], encoding: _Encoding) -> Array:
    """The value of some pieces, refused where the witness is no longer 1.

    No gradient flows. A refused value is NaN, or the integer farthest from zero. A
    witness of zero belongs to a gradient.
    """
    arrays = [jax.lax.stop_gradient(jnp.asarray(array)) for array in arrays]
    if not encoding.witness:
        return arrays[0] != 0
    *pieces, witness = arrays
    if encoding.is_float:
        value, refused = pieces[0], jnp.nan
    else:
        refused = jnp.iinfo(encoding.dtype).min or jnp.iinfo(encoding.dtype).max
        if encoding.pieces == 1:
            value = pieces[0].astype(encoding.dtype)
        else:
            # No bit cast: JAX cannot batch one over the last axis.
            unsigned = np.dtype(f'u{np.dtype(encoding.dtype).itemsize}')
            bits = jnp.zeros(pieces[0].shape, unsigned)
            for piece in reversed(pieces):
                bits = bits << unsigned.type(16) | piece.astype(unsigned)
            value = bits.astype(encoding.dtype)
    is_intact = (witness == 1) | (witness == 0)
    value = jnp.where(is_intact, value, jnp.full(value.shape, refused, value.dtype))
    if encoding.key is not None:
        return jax.random.wrap_key_data(value, impl=encoding.key)
    return tracing.as_weak(value) if encoding.weak else value


def value_of(x: PyTree) -> PyTree:
    """The value of a ``NonDifferentiable``; anything else is its own."""
    return x.value if isinstance(x, NonDifferentiable) else x


@jax.tree_util.register_pytree_node_class
class NonDifferentiable(operators(value_of)):
    """Marks a value in a tree of parameters that must never get a gradient.

    Plain ``jax.grad`` accepts a tree with these in it, and returns a gradient of zero
    for them; ``sg.grad`` leaves them out. Use it as the value: arithmetic,
    comparisons, indexing, functions of ``jnp``, attributes and calls all work.

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> def loss(params):
    ...     return params['x'] * params['y'] ** 2
    >>> params = {'x': 2.0, 'y': sg.NonDifferentiable(100)}
    >>> grads = jax.grad(loss)(params)
    >>> float(grads['x']), int(grads['y'])
    (10000.0, 0)
    >>> sg.NonDifferentiable(jnp.zeros(3)) + 1.0
    Array([1., 1., 1.], dtype=float32)

    Numbers, arrays, keys and tracers in it are traced under ``jit``, ``vmap`` and
    ``scan``: a new value needs no retrace. Strings and other objects are static: they
    are part of the tree's structure. Numbers get the dtype that JAX gives them: without
    ``jax_enable_x64`` an int64 loses its upper bits, as in ``jnp.asarray``. Integers of
    that dtype are exact.

    ``sg.freeze``, the masks and the labels skip it by its type. A plain optimizer sees
    a gradient of zero and leaves the value alone, *unless it decays weights*. A value
    that an optimizer changed is refused: outside of a trace reading it raises; inside
    it reads as NaN, or as the integer farthest from zero. To notice, each array is
    accompanied by an array of ones. To keep large weights fixed, freeze them by path.

    JAX itself does not take it as an index, as a random key, or as an argument of
    ``jax.lax``: write ``x[n.value]``, ``jax.random.uniform(key.value)``.
    ``jax.export`` cannot serialize it.

    Attributes:
        value: the value, behind ``jax.lax.stop_gradient``.

    Raises:
        ArgumentValueError: when a value is read that an optimizer has changed.

    Note:
        As asked for in google/jax#2588. A value stored as static metadata instead
        would compile again for each new one, and could hold no tracer (jax#2912).
    """

    __slots__ = ('_arrays', '_given', '_structure')
    __array_priority__ = 100

    def __init__(self, value: PyTree) -> None:
        self._given = value_of(value)
        self._arrays: list[Any] | None = None
        self._structure: Any = None

    @property
    def value(self) -> Any:
        """The value, through which no gradient flows."""
        if self._arrays is None:
            return jax.tree.map(_stopped, self._given)
        treedef, encodings = self._structure
        arrays = iter(self._arrays)
        return treedef.unflatten([_decoded(encoding, arrays) for encoding in encodings])

    def tree_flatten(self) -> tuple[list[Any], Any]:
        """The value as floats."""
        if self._arrays is not None:
            return self._arrays, self._structure
        leaves, treedef = jax.tree.flatten(self._given)
        encodings = tuple(map(_encoding_of, leaves))
        arrays: list[Any] = []
        for leaf, encoding in zip(leaves, encodings, strict=True):
            if isinstance(encoding, _Encoding):
                arrays.extend(_encode(leaf, encoding))
        return arrays, (treedef, encodings)

    @classmethod
    def tree_unflatten(cls, structure: Any, arrays: Iterable[Any]) -> NonDifferentiable:
        """Takes any children, as JAX gives; the value is made when it is read."""
        self = object.__new__(cls)
        self._given = None
        self._arrays = list(arrays)
        self._structure = structure
        return self

    def __repr__(self) -> str:
        try:
            return f'NonDifferentiable({self.value!r})'
        except Exception:  # A tree may have shapes or shardings in its place.
            return f'NonDifferentiable(<{self._arrays!r}>)'

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        return np.array(self.value, dtype=dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value)

    def __getattr__(self, name: str) -> Any:
        # Python asks for these while it copies an object, which has no value yet.
        if name.startswith('__') or name in NonDifferentiable.__slots__:
            raise AttributeError(name)
        return getattr(self.value, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value."""
        return self.value(*args, **kwargs)

    def __getitem__(self, index: ArrayIndex) -> Any:
        is_tuple = isinstance(index, tuple)
        return self.value[tuple(map(value_of, index)) if is_tuple else value_of(index)]


def _stopped(leaf: Leaf) -> Leaf:
    return jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf


def _decoded(encoding: _Encoding | _Static, arrays: Iterator[Any]) -> Any:
    if isinstance(encoding, _Static):
        return encoding.value
    pieces = [next(arrays) for _ in range(encoding.pieces + encoding.witness)]
    if isinstance(pieces[0], jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda *pieces: _decode([*pieces], encoding), *pieces)
    if encoding.witness and not encoding.is_float:
        dtype = jnp.result_type(pieces[0])
        if not jnp.can_cast(jnp.float32, dtype):  # It is float16 or bfloat16.
            raise errors.ArgumentValueError(
                f'A NonDifferentiable of {np.dtype(encoding.dtype)} was cast to '
                f'{dtype}, which cannot hold it: it is stored as float32.\n'
                'Cast the other leaves alone: jax.tree.map(cast, tree, '
                'is_leaf=lambda x: isinstance(x, sg.NonDifferentiable)), where cast '
                'returns these as they are.'
            )
    if encoding.witness and not isinstance(pieces[-1], tracing.Tracer):
        witness = np.asarray(pieces[-1])
        changed = witness[(witness != 1) & (witness != 0)]
        if changed.size:
            raise errors.ArgumentValueError(
                'An optimizer changed a NonDifferentiable: its guard value is '
                f'{changed[0]} instead of 1.0.\n'
                'Weight decay, averaging and scaling change parameters without a '
                'gradient.\nWrap the optimizer: sg.freeze(tx).'
            )
    return _decode(pieces, encoding)


def _to_state_dict(x: NonDifferentiable) -> dict[str, Any]:
    return {str(n): leaf for n, leaf in enumerate(x.tree_flatten()[0])}


def _from_state_dict(x: NonDifferentiable, state: dict[str, Any]) -> NonDifferentiable:
    old, structure = x.tree_flatten()
    arrays = [state[str(n)] for n in range(len(old))]
    return NonDifferentiable.tree_unflatten(structure, arrays)


serialization.register_serialization_state(
    NonDifferentiable, _to_state_dict, _from_state_dict
)

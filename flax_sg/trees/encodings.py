"""Numbers of every type as floats and back, exactly: what plain ``jax.grad`` accepts.

``jax.grad`` takes trees of floats only. An integer of 32 bits does not fit into a
float32, and its bit pattern read as a float is not safe: NaNs are rewritten, denormals
flushed. Two halves of 16 bits each are small integers, and those are exact as floats.

Beside the pieces of a value travels a *witness*, an array of ones. The gradient of all
of them is zero, so an optimizer leaves them alone; but decay moves every parameter
towards zero, and of all floats of a type 1.0 is the first to move. Where the witness
is no longer 1.0, the value is not what it was, and is refused.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg.internals import tracing

Array: TypeAlias = Any
_HALF = 16


@dataclasses.dataclass(frozen=True)
class Static:
    """A leaf that is no number: part of the structure, compared by value if it can be.

    Attributes:
        value: the leaf.
    """

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static):
            return NotImplemented
        if self.value is other.value:
            return True
        try:
            hash(self.value)
            same: Any = type(self.value) is type(other.value)
            return same and bool(self.value == other.value)
        except Exception:  # What cannot be hashed or compared is equal to itself.
            return False

    def __hash__(self) -> int:
        try:
            return hash(self.value)
        except TypeError:
            return id(self.value)


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How a number or an array of numbers is kept as floats.

    Attributes:
        dtype: the type of the value; of its key data, if it is a key.
        weak: whether JAX takes the type for weak, as that of Python's numbers.
        key: the implementation of random keys, None for what is no key.
        pieces: how many arrays of floats there are, without the witness.
    """

    dtype: Any
    weak: bool
    key: str | None
    pieces: int

    @property
    def witness(self) -> bool:
        """Whether there is one. A bool has none: decay keeps zero zero."""
        return self.dtype != jnp.bool_

    @property
    def arrays(self) -> int:
        """How many arrays there are."""
        return self.pieces + self.witness


def encoding_of(leaf: Any) -> Encoding | Static:
    """How a leaf of a value is kept."""
    if isinstance(leaf, (bool, int, float, complex)):
        return _encoding(jnp.result_type(leaf), not isinstance(leaf, bool), None)
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return Static(leaf)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _encoding(np.dtype(np.uint32), False, _implementation(leaf))
    if leaf.dtype.kind in 'OSUmM':
        return Static(leaf)
    weak = bool(getattr(leaf, 'weak_type', False))
    return _encoding(jax.dtypes.canonicalize_dtype(leaf.dtype), weak, None)


def _implementation(key: Any) -> str:
    return str(jax.random.key_impl(key))


def _encoding(dtype: Any, weak: bool, key: str | None) -> Encoding:
    bits = 8 * np.dtype(dtype).itemsize
    whole = jnp.issubdtype(dtype, jnp.inexact) or bits <= _HALF
    return Encoding(dtype, weak, key, 1 if whole else bits // _HALF)


def encode(leaf: Any, how: Encoding) -> list[Array]:
    """The pieces of a leaf and its witness."""
    if jnp.issubdtype(how.dtype, jnp.inexact):
        one = 1.0 if isinstance(leaf, (float, complex)) else _ones_like(leaf)
        return [leaf, one]
    if how.key is not None:
        leaf = jax.random.key_data(leaf)
    # Not to be staged out, in a trace, if it need not be.
    np_like: Any = jnp if isinstance(leaf, jax.Array) else np
    bits = np_like.asarray(leaf, how.dtype)
    if how.pieces == 1:
        pieces = [bits.astype(np.float32)]
    else:
        unsigned = np.dtype(f'u{np.dtype(how.dtype).itemsize}')
        bits = bits.astype(unsigned)
        mask = unsigned.type(2**_HALF - 1)
        shifts = [unsigned.type(_HALF * n) for n in range(how.pieces)]
        pieces = [((bits >> shift) & mask).astype(np.float32) for shift in shifts]
    # numpy makes scalars of arrays without axes; checkpoints take arrays only.
    arrays = [np_like.asarray(piece) for piece in pieces]
    return [*arrays, np_like.ones_like(pieces[0])] if how.witness else arrays


def _ones_like(leaf: Any) -> Any:
    like: Any = jnp if isinstance(leaf, jax.Array) else np
    return like.ones_like(leaf)


def decode(arrays: list[Array], how: Encoding) -> Array:
    """The value of some pieces, refused where the witness is no longer one.

    No gradient flows. What is refused is NaN, for integers the value farthest from
    zero. A witness of zero is that of a gradient.
    """
    arrays = [jax.lax.stop_gradient(array) for array in arrays]
    if not how.witness:
        return arrays[0] != 0
    *pieces, witness = arrays
    if jnp.issubdtype(how.dtype, jnp.inexact):
        value, refused = pieces[0], jnp.full((), jnp.nan, pieces[0].dtype)
    else:
        value = _integer(pieces, how.dtype)
        refused = _farthest(how.dtype)
    kept = (witness == 1) | (witness == 0)
    value = jnp.where(kept, value, jnp.broadcast_to(refused, value.shape))
    if how.key is not None:
        return jax.random.wrap_key_data(value, impl=how.key)
    return tracing.as_weak(value) if how.weak else value


def _integer(pieces: list[Array], dtype: Any) -> Array:
    if len(pieces) == 1:
        return pieces[0].astype(dtype)
    unsigned = np.dtype(f'u{np.dtype(dtype).itemsize}')
    bits = jnp.zeros(pieces[0].shape, unsigned)
    for number, piece in enumerate(pieces):
        bits |= piece.astype(unsigned) << unsigned.type(_HALF * number)
    return bits.astype(dtype)


def _farthest(dtype: Any) -> Array:
    info = jnp.iinfo(dtype)
    return jnp.full((), info.min or info.max, dtype)


def is_refused(arrays: list[Array], how: Encoding) -> bool:
    """Whether it is known here that a value is refused: not of a tracer."""
    witness = arrays[-1]
    if not how.witness or isinstance(witness, tracing.Tracer):
        return False
    found = np.asarray(witness)
    return not np.all((found == 1) | (found == 0))

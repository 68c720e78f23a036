"""Numbers and arrays that a rule brings along, as parts of JAX's cache keys."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from flax_sg import _private, errors


class Operand:
    """A number or an array, told apart from others.

    Equal values are one: Python's and numpy's, and single numbers of JAX. Other arrays
    of JAX are compared by identity, traced ones too, and not kept alive by a key: a
    rule with a new array in it is a new rule.

    Attributes:
        value: the number or the array.
        key: stands for it in cache keys.
    """

    def __init__(self, value: Any) -> None:
        if isinstance(value, np.ndarray):
            value = value.copy()  # It may be written to.
        self.value = value
        self.key = _key_of(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Operand) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        if isinstance(self.value, (int, float, complex)) or not np.ndim(self.value):
            return str(self.value)
        return f'<{self.value.dtype}{list(self.value.shape)}>'


def _key_of(value: Any) -> Hashable:
    traced = isinstance(value, _private.Tracer)
    if traced or (isinstance(value, jax.Array) and value.ndim):
        return _Identity(value)
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return value.dtype, value.shape, np.asarray(value).tobytes()
    return type(value), value


class _Identity:
    """Which object it is, as long as there is one."""

    def __init__(self, value: Any) -> None:
        self._ref = weakref.ref(value)
        self._hash = id(value)

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, _Identity):
            return self is other
        mine = self._ref()
        return mine is not None and mine is other._ref()

    def __hash__(self) -> int:
        return self._hash


def array(name: str, value: Any) -> Operand:
    """An operand, of a number or an array; raises for anything else."""
    known = isinstance(value, (bool, int, float, complex, np.ndarray, np.generic))
    if not known and not hasattr(value, 'aval'):
        raise errors.CotangentValueError(
            f'{name}={value!r}: expected a number or an array.'
        )
    return Operand(value)


def number(name: str, value: Any) -> Operand:
    """An operand, of one number; raises for anything else."""
    if np.ndim(array(name, value).value):
        raise errors.CotangentValueError(
            f'{name} has the shape {np.shape(value)}: expected one number.'
        )
    return Operand(value)

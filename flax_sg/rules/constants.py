"""Numbers, arrays and functions that a rule uses, as parts of JAX's cache keys."""

from __future__ import annotations

import types
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from flax_sg import errors
from flax_sg.internals import tracing


def owned(value: Any) -> Any:
    """A value that nobody else writes to: numpy arrays are copied."""
    return value.copy() if isinstance(value, np.ndarray) else value


def key_of(value: Any) -> Hashable:
    """Stands for a number or an array in cache keys.

    Python's and numpy's values and single numbers of JAX are compared by value. Other
    arrays of JAX, and tracers, are compared by identity: a rule with a new array is a
    new rule. A key does not keep them alive.
    """
    traced = isinstance(value, tracing.Tracer)
    if traced or (isinstance(value, jax.Array) and value.ndim):
        return _Identity(value)
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return value.dtype, value.shape, np.asarray(value).tobytes()
    return type(value), value


class _Identity:
    """Equal for the same object, as long as the object lives."""

    def __init__(self, value: Any) -> None:
        self._ref = weakref.ref(value)
        self._hash = id(value)

    def __eq__(self, other: object) -> bool:
        mine = self._ref()
        return self is other or (
            isinstance(other, _Identity) and mine is not None and mine is other._ref()
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:  # Beside the rule, which holds the value.
        return _Identity, (self._ref(),)


def identity_of(fn: Any) -> Hashable:
    """Stands for a function in cache keys: which object it is, not what it does."""
    if isinstance(fn, types.MethodType):
        return identity_of(fn.__self__), fn.__func__
    try:
        return _Identity(fn)
    except TypeError:  # Nothing can refer to it weakly.
        return fn if isinstance(fn, Hashable) else object()


def array(name: str, value: Any) -> Any:
    """A number or an array; raises for anything else."""
    known = isinstance(value, (bool, int, float, complex, np.ndarray, np.generic))
    if not known and not hasattr(value, 'aval'):
        raise errors.ArgumentValueError(
            f'{name}={value!r}: expected a number or an array.'
        )
    return owned(value)


def number(name: str, value: Any) -> Any:
    """One number; raises for anything else."""
    if np.ndim(array(name, value)):
        raise errors.ArgumentValueError(
            f'{name} has the shape {np.shape(value)}: expected one number.'
        )
    return owned(value)

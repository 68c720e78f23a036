"""Tokens: texts that stand for values where values are compared or hashed.

Of a module's fields ``nn.jit`` keeps the hash alone, and a cache key must not keep its
values alive. Python's own hashes and ids do not serve: ``hash(-1.0) == hash(-2.0)``,
``0.0 == -0.0``, and an object gets the ``id`` of one that was collected. So a value is
told by its text, and an object by a number that is never given twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import numbers
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flax_sg.internals.types import Array
from flax_sg.internals.weak import ByIdentity

_serials = itertools.count(1)
_known: ByIdentity[int] = ByIdentity()


def of_value(value: Any) -> str:
    """Returns the token of a number, an index, an array or a random key.

    Tokens are equal if the type, the shape, the dtype, the weak type and all bytes are.
    Arrays of JAX with several elements are told apart as objects are: to read them
    would wait for the device.

    >>> of_value(-1.0) == of_value(-2.0), of_value(0.0) == of_value(-0.0)
    (False, False)
    >>> of_value(np.s_[:-1, ...]) == of_value(np.s_[:-1, ...]), of_value(2j)
    (True, 'complex 0x0.0p+0 0x1.0000000000000p+1')
    """
    cls = type(value)
    if value is None or value is Ellipsis or cls in (bool, int, str, bytes):
        return f'{cls.__name__} {value!r}'
    if cls is float:
        return f'float {value.hex()}'
    if cls is complex:
        return f'complex {value.real.hex()} {value.imag.hex()}'
    if cls is tuple:
        return f'({", ".join(map(of_value, value))})'
    if cls is slice:
        return f'slice {of_value((value.start, value.stop, value.step))}'
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return _of_array(cls, value)
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            with jax.ensure_compile_time_eval():  # In a trace it would be a tracer.
                data = of_value(np.asarray(jax.random.key_data(value)))
            return f'{value.dtype} {data}'
        if not value.ndim:
            weak = ' weak' if value.aval.weak_type else ''
            return _of_array(jax.Array, np.asarray(value)) + weak
    return of_object(value)


def of_numbers_in(value: Any) -> Any:
    """Returns a value, or a tuple of values, with tokens in place of numbers.

    >>> of_numbers_in(('kernel', -1)), hash((-1, 2)) == hash((-2, 2))
    (('kernel', 'int -1'), True)
    """
    if isinstance(value, tuple):
        return tuple(map(of_numbers_in, value))
    return of_value(value) if isinstance(value, numbers.Number) else value


def _of_array(cls: type, array: Array) -> str:
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    return f'{cls.__name__} {array.dtype.str} {array.dtype} {array.shape} {digest}'


def of_object(value: object) -> str:
    """Returns the token of a function, a class or an object: which one it is.

    A bound method is told by its object and its function. What cannot be referred to
    weakly gets another token each time.

    >>> one, other = (lambda path: True), (lambda path: True)
    >>> of_object(one) == of_object(one), of_object(one) == of_object(other)
    (True, False)
    """
    if isinstance(value, types.MethodType):
        return f'{of_object(value.__self__)}.{of_object(value.__func__)}'
    serial = _known.get(value)
    if serial is None:
        serial = next(_serials)
        with contextlib.suppress(TypeError):
            _known.put(value, serial)
    return f'#{serial}'

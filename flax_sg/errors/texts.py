"""What messages are made of."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from flax_sg.errors import ArgumentTypeError, ArgumentValueError, FlaxSGError


def shown(leaf: Any) -> str:
    """A leaf in a few words."""
    if hasattr(leaf, 'dtype') and hasattr(leaf, 'shape'):
        return f'{_dtype_name(leaf.dtype)}{list(leaf.shape)}'
    text = repr(leaf)
    return text if len(text) <= 40 else f'{type(leaf).__name__} object'


@functools.lru_cache(256)  # Its text takes longer than all the rest.
def _dtype_name(dtype: DTypeLike) -> str:
    return str(dtype)


def brief(value: object) -> str:
    """What kind of thing a value is, in a few words."""
    if isinstance(value, Tracer):
        return f'a traced value ({value.aval.str_short()})'
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return f'an array ({shown(value)})'
    name = type(value).__qualname__
    if value is None or isinstance(value, type):
        return 'None' if value is None else f'the class {value.__qualname__}'
    if isinstance(value, (int, float, complex, str, bytes)):
        return f'{value!r} ({name})'
    return f'{"an" if name[0].lower() in "aeiou" else "a"} {name}'


def listed(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    more = f' and {len(names) - 3} more' if len(names) > 3 else ''
    return ', '.join(map(str, names[:3])) + more


@contextlib.contextmanager
def raised_by(call: str) -> Generator[None]:
    """Says at the head of an error which call of the user it comes from."""
    try:
        yield
    except FlaxSGError as error:
        error.args = (f'{call}: {error.args[0]}', *error.args[1:])
        raise


def wrong_argument(got: object, expected: str, write: str) -> ArgumentTypeError:
    """The error for an argument of the wrong kind."""
    return ArgumentTypeError(f'{brief(got)} is no {expected}.\nWrite {write}.')


def unknown_choice(
    option: str, value: object, choices: Iterable[Any]
) -> ArgumentValueError:
    """The error for an option with a value that it does not have."""
    expected = ' or '.join(map(repr, choices))
    return ArgumentValueError(f'{option}={value!r}: expected {expected}.')

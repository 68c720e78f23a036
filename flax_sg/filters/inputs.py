"""What to write if a model raises for what stands in the place of its inputs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from flax_sg import errors
from flax_sg.filters.expressions import Filter
from flax_sg.internals.types import Kwargs, Model


@contextlib.contextmanager
def inputs_explained(
    write: str, model: Model, args: Sequence[Any], kwargs: Kwargs
) -> Generator[None]:
    """Says what to write if a model raises for what it is given as its inputs.

    A model may take a text, such as a mode, or a random key: nothing is said before
    it raises.

    Args:
        write: what the user calls, with ``{}`` for the model and its inputs.
        model: the model.
        args: what the model is given.
        kwargs: the keyword arguments that the model is given.

    Raises:
        ArgumentTypeError: from the error of the model.
    """
    try:
        yield
    except Exception as error:
        lines = _explanation(write, model, args, kwargs, error)
        if lines is None:
            raise
        mistake, advice = lines
        raise errors.ArgumentTypeError(
            f'{_name_in(write)}() gave {type(model).__name__} {mistake}, '
            f'which raised {type(error).__name__}.\n{advice}'
        ) from error


def _name_in(call: str) -> str:
    """The name of what is called: ``'tabulate'`` of ``'sg.tabulate({})'``."""
    return call.partition('(')[0].rpartition('.')[2]


def _explanation(
    write: str,
    model: Model,
    args: Sequence[Any],
    kwargs: Kwargs,
    error: Exception,
) -> tuple[str, str] | None:
    """What was given in the place of inputs, and what to write; None if nothing was."""
    filter_ = next(filter(_is_filter, (*args, kwargs.get('where'))), None)
    if filter_ is not None:
        inputs = 'model, x' if isinstance(model, linen.Module) else 'model'
        written = repr(filter_) if isinstance(filter_, str) else 'where'
        return (
            f'{filter_!r} as an input',
            'A filter is no input: sg.paths shows what it names.\n'
            f'Write sg.paths({inputs}, where={written}).',
        )
    mistake = next(filter(None, map(_for_init, args)), '')
    if mistake:
        return (
            f'{mistake} as its argument',
            f'{_name_in(write)}() makes the variables itself, from the inputs.\n'
            f'Write {write.format("model, x")}.',
        )
    if not args and isinstance(error, TypeError) and 'missing' in str(error):
        return (
            'no inputs',
            f'{error}.\nWrite {write.format("model, x")}: arrays, or their shapes.',
        )
    return None


def _is_filter(value: object) -> bool:
    """Whether something is a filter; a text without a sign of globs may be a mode."""
    if isinstance(value, str):
        return not {*'/*'}.isdisjoint(value)
    return isinstance(value, (Filter, re.Pattern))


def _for_init(x: object) -> str:
    """What other functions take first, in words, or ''."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return 'a random key'
    # A batch may have names of parameters: ``{'embedding': ..., 'mask': ...}``.
    return 'variables' if isinstance(x, Mapping) and 'params' in x else ''

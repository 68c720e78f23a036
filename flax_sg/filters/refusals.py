"""What to say of something that is no filter, and what to write in place of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.core import Tracer

from flax_sg import errors

EXAMPLE = "lambda path: path.startswith('gln')"
RESULT_FIXES: dict[type, str] = {
    type(None): f'return a bool on every way through it, as {EXAMPLE}',
    re.Match: 'return match is not None, or give the re.Pattern in place of it',
}
KINDS = """\
Accepted:
  'gln_*/**'                   a glob on whole path components
  re.compile('gln_[0-9]+/.*')  a regular expression for the whole path
  lambda path: ...             a function of the path that returns a bool
  True, False                  every variable, none
  {'gln': True, 'dec': False}  a tree of bools
  ['gln/**', 'dec/**']         any of several; filters also combine with ~ & |"""


def refuse_target(where: Any) -> None:
    """Raises for what people give when they mean something else than a filter."""
    target = where
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, type) and issubclass(target, nn.Module):
        name = target.__name__
        spelled = f'nn.{name}' if getattr(nn, name, None) is target else name
        raise errors.FilterTypeError(
            f'The Module class {name} is no filter: a filter says which variables.\n'
            f'Fix: to lift the class, write nn.stop_gradient({spelled}, where), with '
            "where such as '**'."
        )
    if isinstance(target, type):
        raise errors.FilterTypeError(
            f'The class {target.__name__} is no filter.\n{KINDS}'
        )
    if isinstance(where, nn.Module):
        raise errors.FilterTypeError(
            f'The module {type(where).__name__}(...) is no filter: a filter says which '
            'variables.\n'
            'Fix: open a block around the call:\n'
            '  with nn.stop_gradient(where):\n'
            '    y = module(x)\n'
            'or wrap the module, for all that goes through the wrapper:\n'
            '  nn.Frozen(module, where)'
        )
    if isinstance(where, (jax.Array, np.ndarray, np.generic)):
        raise errors.FilterTypeError(
            f'{brief(where)} is no filter: a filter says which variables.\n'
            'Fix: to stop the gradient of a value, write jax.lax.stop_gradient(x).'
        )


def brief(value: Any) -> str:
    """What kind of thing a value is, in a few words."""
    if isinstance(value, Tracer):
        return f'a traced value ({value.aval.str_short()})'
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return f'an array ({value.dtype}{list(value.shape)})'
    name = type(value).__qualname__
    if value is None or isinstance(value, type):
        return 'None' if value is None else f'the class {value.__qualname__}'
    if isinstance(value, (int, float, complex, str, bytes)):
        return f'{value!r} ({name})'
    return f'{"an" if name[0].lower() in "aeiou" else "a"} {name}'


def fix_of(where: Any) -> str:
    """The last line of the message for something that is no filter."""
    if where is None:
        return '\nFix: write False for no variable, True for every one.'
    if isinstance(where, int):
        return f'\nFix: write {bool(where)}.'
    if isinstance(where, bytes):
        return f'\nFix: write {where.decode(errors="replace")!r}.'
    if isinstance(where, Iterator):
        return '\nFix: an iterator is empty after its first use; give a list.'
    return ''

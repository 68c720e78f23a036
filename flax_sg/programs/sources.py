"""What the user wrote: the line of an equation, in words, and names of arguments."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from flax_sg.internals import frames
from flax_sg.internals.jaxprs import CUSTOM_CALLS, JITTED, body_of

# The file in which JAX makes equations for ``cond`` and ``switch``.
_CONDITIONALS = inspect.unwrap(jax.lax.cond).__code__.co_filename


class Frame(NamedTuple):
    """A line of a function."""

    file: str
    function: str
    line: int


def frames_of(eqn: JaxprEqn, within: str = '') -> Iterator[Frame]:
    """The lines of the user's program that made an equation, the innermost first.

    Args:
        eqn: an equation of a jaxpr.
        within: the jitted function around the equation, from ``function_in``. JAX
            caches its trace, so frames outside the function belong to the first call.
            jax 0.7.2 records those frames, 0.10.2 does not.
    """
    traceback = eqn.source_info.traceback
    for code, last in zip(*traceback.raw_frames(), strict=True) if traceback else ():
        if frames.is_of_user(code):
            # ``co_positions`` has one entry per instruction of two bytes.
            line = next(itertools.islice(code.co_positions(), last // 2, None))[0]
            yield Frame(code.co_filename, code.co_qualname, line or 0)
        if within == f'{code.co_name} at {code.co_filename}:{code.co_firstlineno}':
            return


def is_of_cond(eqn: JaxprEqn) -> bool:
    """Whether JAX itself made an equation, for ``lax.cond`` or ``lax.switch``.

    The frames that traced the branches do not count; jax 0.7.2 records these, too.
    """
    traceback = eqn.source_info.traceback
    codes = traceback.raw_frames()[0] if traceback else ()
    of_jax = itertools.takewhile(
        lambda code: not (frames.is_of_user(code) or 'to_jaxpr' in code.co_name), codes
    )
    return any(code.co_filename == _CONDITIONALS for code in of_jax)


def described(frame: Frame) -> str:
    """A line in words: ``'model.py:31 (Net.__call__)'``, or a cell of a notebook."""
    return f'{frames.file_name(frame.file)}:{frame.line} ({frame.function})'


def nearest(lines: Iterable[Frame]) -> str:
    """The innermost line in words; '' if there is none.

    A line of the user's own files is nearer than one of a package, such as optax.
    """
    known = [*lines]
    own = (frame for frame in known if not frames.is_installed(frame.file))
    return next(map(described, itertools.chain(own, known)), '')


def source_of(eqn: JaxprEqn, within: str = '') -> str:
    """The line of the user that made an equation, or ''; see ``frames_of``."""
    return nearest(frames_of(eqn, within))


def operation(eqn: JaxprEqn) -> str:
    """What an equation does, in the words of a user."""
    name, params = eqn.primitive.name, eqn.params
    if name in CUSTOM_CALLS:
        named = params.get('name') or body_of(eqn).debug_info.func_name
        return f'the rule of {named}'
    if name == 'convert_element_type':
        return f'a cast to {params["new_dtype"]}'
    return f'{params["name"]}' if name in JITTED else name


def function_in(eqn: JaxprEqn) -> str:
    """The name, file and line of the function that a jit equation runs."""
    return str(eqn.params['jaxpr'].jaxpr.debug_info.func_src_info)


def names_of_arguments(fun: Callable[..., Any]) -> dict[int, str]:
    """The names that a function gives its arguments, by their position."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # Written in C.
        return {}
    by_position = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return {n: x.name for n, x in enumerate(parameters) if x.kind in by_position}

"""Functions that users give: their names, and the traced values in their closures."""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from jax.core import Tracer


def describe(fn: Any) -> str:
    """The name of a function and where it stands, for messages."""
    fn = _innermost(fn)
    if not isinstance(fn, types.FunctionType):
        name = getattr(fn, '__qualname__', None)
        return name if isinstance(name, str) else type(fn).__qualname__
    code = fn.__code__
    file = os.path.basename(code.co_filename)
    return (
        f'{fn.__qualname__.rpartition("<locals>.")[2]} at {file}:{code.co_firstlineno}'
    )


def shape_of(fn: Callable[..., Any]) -> Hashable:
    """Equal for functions that were made by the same code, a lambda in a loop say."""
    fn = _innermost(fn)
    if isinstance(fn, types.FunctionType):
        return fn.__code__
    return type(fn), getattr(fn, '__qualname__', None)


def tracer_in(fn: Callable[..., Any]) -> tuple[str, Any] | None:
    """A traced value that a function holds in its closure, by its name."""
    return next(
        (
            (name, value)
            for name, value in _held_by(fn)
            if Tracer in type(value).__mro__  # It asks nothing of the value.
        ),
        None,
    )


def _innermost(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, '__func__', fn)


def _held_by(fn: Any) -> Iterator[tuple[str, Any]]:
    while isinstance(fn, functools.partial):
        yield from ((f'argument {n}', value) for n, value in enumerate(fn.args))
        yield from fn.keywords.items()
        fn = fn.func
    fn = getattr(fn, '__func__', fn)
    if isinstance(fn, types.FunctionType):
        for name, cell in zip(
            fn.__code__.co_freevars, fn.__closure__ or (), strict=True
        ):
            try:
                yield name, cell.cell_contents
            except ValueError:  # It has no value yet.
                continue
        names = fn.__code__.co_varnames[: fn.__code__.co_argcount][::-1]
        yield from zip(names, (fn.__defaults__ or ())[::-1], strict=False)
        yield from (fn.__kwdefaults__ or {}).items()

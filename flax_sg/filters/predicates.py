"""Functions of the path as filters, and what is asked of functions that users give."""

from __future__ import annotations

import dis
import functools
import inspect
import os
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar

import jax
import numpy as np
from jax.core import Tracer

from flax_sg import errors
from flax_sg.errors.texts import brief
from flax_sg.filters import tokens
from flax_sg.filters.expressions import Atom, Need
from flax_sg.filters.paths import Path

_FIX = (
    "Return True or False for every path, as lambda path: path.startswith('encoder') "
    'does. For a traced bool write sg.where(where) & (step < k); pass other '
    'values that it depends on by static_argnames of jax.jit.'
)
_ARRAYS = (
    'A filter is given the path alone. For shapes and dtypes write sg.arrays(lambda a: '
    'a.ndim < 2), or lambda path: path.array.ndim < 2.'
)


class Predicate(Atom):
    """The variables for which a function of the path returns True.

    The function may read anything: a config, a table, a file. It is asked when a block
    opens and when a variable is read. JAX finds a cached program again if a function of
    the same code gives the same answers. Two predicates are equal if their functions
    are the same object.

    >>> from flax_sg import Path
    >>> from flax_sg.filters import Predicate
    >>> bias = Predicate(lambda path: path.name == 'bias')
    >>> [bias(Path.of('params', ('dense', name))) for name in ('bias', 'kernel')]
    [True, False]

    Raises:
        FilterTypeError: if the function takes anything but one path, or, when called,
            returns anything but a bool.
        FilterTypeError: if it reads a traced value.
    """

    fix: ClassVar[str] = _FIX
    """What to write instead, for errors."""
    fn: Callable[[Any], Any]

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        object.__setattr__(self, 'fn', fn)
        if not _is_of_one_argument(fn):
            # This takes longer than all the rest of a block that opens.
            try:
                inspect.signature(fn).bind(None)
            except ValueError:  # Written in C: it does not say.
                pass
            except TypeError as error:
                raise self._error(
                    f'cannot be called with a path: {error}',
                    f'{_ARRAYS} To lift a function of a module, write '
                    'nn.stop_gradient(fn, where), or @nn.stop_gradient(where) above '
                    'it. A filter of NNX goes into kind=.',
                ) from None
        if traced := tracer_in(fn):
            name, value = traced
            raise self._error(f'reads {brief(value)} as {name!r}')

    @functools.cached_property
    def own_needs(self) -> frozenset[Need]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Nothing, if the function reads the path alone: then its code is a value."""
        fn = self.fn
        reads_path_alone = (
            type(fn) is types.FunctionType
            and not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__)
            and _reads_arguments_alone(fn.__code__)
        )
        return frozenset() if reads_path_alone else frozenset({'code'})

    @functools.cached_property
    def identity(self) -> str:
        """Which function it is."""
        return tokens.of_object(self.fn)

    @functools.cached_property
    def shape(self) -> Hashable:
        """Equal for functions of the same code, wherever it stands."""
        fn = innermost(self.fn)
        if isinstance(fn, types.FunctionType):
            return _without_place(fn.__code__)
        return type(fn), getattr(fn, '__qualname__', None)

    def matches(self, path: Path) -> bool:
        """Whether the function returns True; raises if it returns no bool."""
        return self.returned(path, path)

    def returned(self, argument: Any, path: Path) -> bool:
        """What the function returns for an argument; raises if it is no bool."""
        try:
            result = self.fn(argument)
        except jax.errors.ConcretizationTypeError as error:
            raise self._error('reads a traced value') from error
        except Exception as error:
            name = getattr(error, 'name', None) or ''
            if getattr(error, 'obj', None) is path and hasattr(np.ndarray, name):
                raise self._error(f'reads .{name} of a path', _ARRAYS) from error
            error.add_note(f'raised by {self!r} for the path {str(path)!r}')
            raise
        if isinstance(result, (bool, np.bool_)):
            return bool(result)
        raise self._error(f'returned {brief(result)} for the path {str(path)!r}')

    def _error(self, problem: str, fix: str | None = None) -> errors.FilterTypeError:
        return errors.FilterTypeError(f'{self!r} {problem}.\n{fix or self.fix}')

    def __repr__(self) -> str:
        return f'Predicate({describe(self.fn)})'


def _without_place(code: types.CodeType) -> Hashable:
    """The code of a function without its line.

    A notebook cell that runs again may have its lambda on another line.
    """
    consts = [
        _without_place(c) if isinstance(c, types.CodeType) else (type(c), repr(c))
        for c in code.co_consts
    ]
    how = code.co_flags & ~inspect.CO_NESTED, code.co_exceptiontable
    return code.co_code, code.co_names, code.co_freevars, tuple(consts), how


# The names of the instructions that read and write names contain one of these.
_OF_NAMES = ('GLOBAL', 'NAME', 'IMPORT', 'CLASS')


@functools.lru_cache(4096)
def _reads_arguments_alone(code: types.CodeType) -> bool:
    """Whether code reads its arguments and constants, and neither names nor cells.

    Whatever else it may read, a config, a table, a file, it gets at by a name.
    """
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    used = {instruction.opname for instruction in dis.get_instructions(code)}
    return not any(part in name for name in used for part in _OF_NAMES) and all(
        map(_reads_arguments_alone, inner)
    )


def _is_of_one_argument(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` is a plain function with one argument, as most predicates are."""
    if type(fn) is not types.FunctionType or fn.__dict__:
        return False
    code = fn.__code__
    return code.co_argcount == 1 and not code.co_kwonlyargcount


def describe(fn: Callable[..., Any]) -> str:
    """The name of a function and where it stands, for messages."""
    fn = innermost(fn)
    if not isinstance(fn, types.FunctionType):
        return getattr(fn, '__qualname__', type(fn).__qualname__)
    code = fn.__code__
    file = os.path.basename(code.co_filename)
    name = fn.__qualname__.rpartition('<locals>.')[2]
    return f'{name} at {file}:{code.co_firstlineno}'


def tracer_in(fn: Callable[..., Any]) -> tuple[str, Any] | None:
    """A traced value that a function captures, with its name; None if there is none."""
    for name, value in captured_by(fn):
        if Tracer in type(value).__mro__:  # ``isinstance`` would run code of the value.
            return name, value
    return None


def innermost(fn: Any) -> Any:
    """The function within partials and a bound method."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, '__func__', fn)


def captured_by(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields what a function captures, by name: in closure, defaults and partials."""
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

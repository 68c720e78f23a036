"""The walk through all that a function reads: where it is, what it has seen.

What is seen of each kind of value stands in the subclasses: plain values
(``contents.py``), functions (``calls.py``), modules, classes and other objects
(``objects.py``).
"""

from __future__ import annotations

import abc
import functools
import os
import pathlib
import re
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NoReturn, TypeAlias

import numpy as np

from flax_sg.errors import TracerInFilterError
from flax_sg.functions.libraries import Libraries
from flax_sg.functions.reads import WHOLE, Reads, atom


class Held:
    """An object by identity. It is kept alive, so that its id stays its own."""

    __slots__ = ('value',)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self.value is other.value


# Types whose values are compared as they are.
ATOMS = frozenset(
    (str, bool, int, float, complex, bytes, range, type(None), type(...), np.dtype)
) | {type(NotImplemented), re.Pattern, pathlib.PurePosixPath, pathlib.PosixPath}


def describe(fn: Any) -> str:
    """Returns the name of a function and where it stands."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, '__func__', fn)
    if not isinstance(fn, types.FunctionType):
        name = getattr(fn, '__qualname__', None)
        return name if isinstance(name, str) else type(fn).__qualname__
    code = fn.__code__
    file = os.path.basename(code.co_filename)
    return (
        f'{fn.__qualname__.rpartition("<locals>.")[2]} at {file}:{code.co_firstlineno}'
    )


MISSING_KEY: Hashable = ('missing',)
# The methods that look at values of a type.
Looks: TypeAlias = dict[type, Callable[[Any, Any, Reads], Hashable]]


class Walk(abc.ABC):
    """One walk through all that a function reads.

    Attributes:
        fn: the function, for messages.
        libraries: what is not looked into.
        loose: the attribute names read off values that are not known.
        refusal: why the function cannot be compared, once that is known.
        labels: the way from the function to the value at hand.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.libraries = Libraries()
        self.loose: set[str] = set()
        self.refusal: str | None = None
        self.labels: list[tuple[str, Any]] = []
        self._restart()

    def _restart(self) -> None:
        self.loose_used = self.stale = False
        self.busy: dict[Hashable, int] = {}
        self.cycles = 0
        # With the values: the id of a value that is gone may be used again.
        self.done: dict[int, tuple[Any, Hashable]] = {}
        self.called: dict[Hashable, tuple[Any, Hashable]] = {}

    def _refuse(self, reason: str) -> Hashable:
        if self.refusal is None:
            self.refusal = f'{self._where()}: {reason}'
        return 'incomparable'

    def _where(self) -> str:
        text = ''
        for kind, name in self.labels:
            if kind in ('.', '['):
                text += f'.{name}' if kind == '.' else f'[{name!r}]'
            else:
                text += f'{" -> " if text else ""}{kind}{name!r}'
        name = describe(self.fn)
        return f'{text} of {name}' if text else name

    def _below(self, kind: str, name: Any, value: Any, reads: Reads) -> Hashable:
        self.labels.append((kind, name))
        key = self._look(value, reads)
        self.labels.pop()
        return key

    def _entries(self, kind: str, items: Iterable[tuple[Any, Any]]) -> Hashable:
        return tuple((k, self._below(f'{kind} ', k, v, WHOLE)) for k, v in items)

    def _look(self, value: Any, reads: Reads = WHOLE) -> Hashable:
        kind = type(value)
        if kind in ATOMS:
            return atom(value)
        if reads.attrs:
            return self._look_into(value, kind, reads)
        if not reads.whole:
            return 'unread'
        # A value that is used as a whole: the same in every place.
        known = self.done.get(id(value))
        if known is not None:
            return known[1]
        level = self.busy.get(id(value))
        if level is not None:
            self.cycles += 1
            return 'cycle', len(self.busy) - level
        self.busy[id(value)] = len(self.busy)
        cycles = self.cycles
        key = self._look_into(value, kind, reads)
        del self.busy[id(value)]
        if cycles == self.cycles:
            self.done[id(value)] = value, key
        return key

    @abc.abstractmethod
    def _look_into(self, value: Any, kind: type, reads: Reads) -> Hashable:
        """The key of what is read of a value."""

    def _add_loose(self, names: set[str]) -> None:
        if not names <= self.loose:
            self.loose |= names
            self.stale |= self.loose_used

    def _names(self, reads: Reads) -> set[str]:
        if not reads.whole:
            return set(reads.attrs)
        self.loose_used = True
        return self.loose | set(reads.attrs)

    def _attributes(self, value: Any, reads: Reads, found: dict[str, Any]) -> Hashable:
        """What is read of the attributes in ``found``."""
        return tuple(
            [
                (name, self._below('.', name, found[name], self._of(reads, name)))
                for name in sorted(self._names(reads) & set(found))
            ]
        )

    def _of(self, reads: Reads, name: str) -> Reads:
        return reads.attrs.get(name, WHOLE)

    def _raise_traced(self, value: Any) -> NoReturn:
        raise TracerInFilterError(
            f'A filter reads a traced value ({value.aval.str_short()}): '
            f'{self._where()}.\n'
            'Which variables are meant is decided while the program is traced, when '
            'traced values are not known yet.\n'
            'Fix: let the filter read a Python value, such as a static argument '
            "(jax.jit(..., static_argnames='freeze')) or a field of the module."
        )

"""What can be reached from a value: arrays in it, and modules to be replaced in it."""

from __future__ import annotations

import collections
import copy
import dis
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax.core.frozen_dict import FrozenDict
from flax.core.scope import Scope

from flax_sg.internals import modules, tracing

# Not those of numpy: they are made of no parameter that is traced.
_ARRAYS = (tracing.Tracer, jax.Array)
# What may be made of parameters that are not.
_NUMBERS = (*_ARRAYS, np.ndarray, np.generic, float, complex)
_PLAIN = (str, bytes, int, type(None), types.ModuleType, types.CodeType)
# What is looked at as a whole, not into.
CLOSED = (modules.Module, modules.Variable, Scope, *_PLAIN)
# A value of more parts is one that nobody can look through.
_MOST = 20_000


def holds_arrays(value: Any, numbers: bool = False) -> bool:
    """Whether an array can be reached from a value; True if that cannot be told.

    Args:
        value: anything.
        numbers: whether arrays of numpy and numbers of Python are looked for as well.
    """
    kinds = _NUMBERS if numbers else _ARRAYS
    return _search(value, lambda part: isinstance(part, kinds))


def holds_modules(value: Any) -> bool:
    """Whether a module can be reached from a value; True if that cannot be told."""
    kinds = (modules.Module, modules.Variable)
    return _search(value, lambda part: isinstance(part, kinds))


def keeps_what_it_reads(value: Any) -> bool:
    """Whether a value may come to hold arrays that it reads of a module.

    A memo does: a helper with a cached property, a function that fills a dict, a list
    or a variable of its closure.
    """
    return holds_modules(value) and _search(value, _may_fill, _fixed_parts)


def _may_fill(part: Any) -> bool:
    if isinstance(part, types.FunctionType):
        return _binds_again(part.__code__)
    if isinstance(part, (dict, list, set, collections.deque)):
        return True
    if isinstance(part, (*CLOSED, *_ARRAYS, *_FIXED)) or _is_jitted(part):
        return False
    return holds_modules(part)


# What holds the same objects for ever.
_FIXED = (tuple, frozenset, FrozenDict, functools.partial, types.MethodType, type)


def _fixed_parts(value: Any) -> Iterable[Any]:
    """What is held for ever by a value that does not change itself."""
    if isinstance(value, FrozenDict):
        return list(value.values())
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or () if _filled(c)]
        return (*cells, *(value.__defaults__ or ()), *value.__dict__.values())
    if isinstance(value, types.MethodType):
        return (value.__self__, value.__func__)
    if _is_jitted(value):
        return (value.__wrapped__,)
    return value if isinstance(value, (tuple, frozenset)) else ()


def _is_jitted(value: Any) -> bool:
    """Whether it is a function that was compiled, or wrapped otherwise, by JAX."""
    of_jax = type(value).__module__.partition('.')[0] in ('jax', 'jaxlib')
    return of_jax and hasattr(value, '__wrapped__')


@functools.lru_cache(4096)
def _binds_again(code: types.CodeType) -> bool:
    """Whether a function gives variables of its closure another value."""
    return any(
        step.opname == 'STORE_DEREF' and step.argval in code.co_freevars
        for step in dis.get_instructions(code)
    )


def _search(
    value: Any,
    found: Callable[[Any], bool],
    parts: Callable[[Any], Iterable[Any]] | None = None,
) -> bool:
    parts = parts or _parts
    waiting: list[Any] = [value]
    met: dict[int, Any] = {}  # Holds what was met: no other object gets its id.
    while waiting:
        part = waiting.pop()
        if id(part) in met:
            continue
        met[id(part)] = part
        if found(part) or len(met) > _MOST:
            return True
        waiting.extend(parts(part))
    return False


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, (*CLOSED, *_ARRAYS)):
        return ()
    if isinstance(value, types.FunctionType):
        return [
            *(cell.cell_contents for cell in value.__closure__ or () if _filled(cell)),
            value.__defaults__,
            value.__kwdefaults__,
            value.__dict__,
        ]
    if isinstance(value, type):
        return () if _importable(value) else list(vars(value).values())
    return gc.get_referents(value)


def _filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _importable(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    found: Any = module
    for name in cls.__qualname__.split('.'):
        found = getattr(found, name, None)
    return found is cls


class Back:
    """Puts modules back in the place of those that stand for them.

    Args:
        pairs: by id, a module to be replaced and what takes its place.
    """

    def __init__(self, pairs: dict[int, tuple[Any, Any]]) -> None:
        self._pairs = pairs
        self._scopes = {a.scope: b.scope for a, b in pairs.values()}
        self._made: dict[int, tuple[Any, Any]] = {}

    def is_reached_from(self, value: Any) -> bool:
        """Whether one of the modules to be replaced can be reached from a value."""
        return _search(value, lambda part: id(part) in self._pairs)

    def __call__(self, value: Any) -> Any:
        """The value with modules replaced; itself if none can be reached from it."""
        if isinstance(value, modules.Variable):
            scope = self._scopes.get(value.scope, value.scope)
            return type(value)(scope, value.collection, value.name, value.unbox)
        if id(value) in self._pairs:
            return self._pairs[id(value)][1]
        if not self._reaches(value):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = (value, self._copy(value))
        return self._made[id(value)][1]

    def _reaches(self, value: Any) -> bool:
        return _search(
            value,
            lambda part: id(part) in self._pairs or isinstance(part, modules.Variable),
        )

    def _copy(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._copy_function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self(value.__self__))
        if isinstance(value, functools.partial):
            args = map(self, value.args)
            keywords = {key: self(item) for key, item in value.keywords.items()}
            return type(value)(self(value.func), *args, **keywords)
        if isinstance(value, FrozenDict):
            return FrozenDict({key: self(item) for key, item in value.items()})
        if isinstance(value, tuple):
            items = [self(item) for item in value]
            return type(value)(*items) if hasattr(value, '_fields') else tuple(items)
        out = copy.copy(value)
        if out is value:  # A class, or an object of which there is to be but one.
            return out
        self._made[id(value)] = (value, out)  # Before its parts: they may hold it.
        if isinstance(out, list):
            out[:] = [self(item) for item in out]
        elif isinstance(out, dict):
            out.update({key: self(item) for key, item in out.items()})
        else:
            for name, item in getattr(out, '__dict__', {}).items():
                object.__setattr__(out, name, self(item))
        return out

    def _copy_function(self, fn: types.FunctionType) -> types.FunctionType:
        cells = fn.__closure__ or ()
        empty = tuple(types.CellType() for _ in cells)
        out = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, empty)
        self._made[id(fn)] = (fn, out)  # Before its cells: they may hold it.
        for new, old in zip(empty, cells, strict=True):
            if _filled(old):
                new.cell_contents = self(old.cell_contents)
        out.__defaults__ = self(fn.__defaults__)
        out.__kwdefaults__ = self(fn.__kwdefaults__)
        out.__dict__.update({key: self(item) for key, item in fn.__dict__.items()})
        out.__qualname__ = fn.__qualname__
        return out

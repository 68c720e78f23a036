"""Finds out whether arrays or modules can be reached from a Python value."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax.core.scope import Scope

from flax_sg.internals import modules, tracing
from flax_sg.rules import rules

MODULES = (modules.Module, modules.Variable, Scope)
_JITTED: Any = type(jax.jit(id))
FUNCTIONS = (
    *(types.FunctionType, types.MethodType, functools.partial),
    *(_JITTED, jax.custom_jvp, jax.custom_vjp),
)
LAZY = (Iterator, AsyncIterator, Awaitable)
ARRAYS = (tracing.Tracer, jax.Array)
# Types of values that may be computed from untraced variables.
NUMERIC = (*ARRAYS, np.ndarray, np.generic, float, complex)
# Types whose contents are not searched.
CLOSED = (
    *(*MODULES, rules.Rewrite, types.ModuleType, types.CodeType),
    *(type, str, bytes, int, type(None)),
)
_PLAIN = frozenset({str, bytes, int, bool, type(None)})
# A search gives up after this many objects. In iterators it looks farther: an iterator
# is rare, and one over a long list of plain values is no mistake.
MOST, MOST_OF_ITERATORS = 20_000, 1_000_000


def may_hold(value: object, classes: tuple[type, ...], most: int = MOST) -> bool:
    """Whether an object of some types is reached, or the search gives up.

    Args:
        value: where the search begins.
        classes: the types.
        most: after how many objects it gives up.
    """
    waiting: list[Any] = [value]
    met: dict[int, Any] = {}  # Keeps each object alive, so its id stays unique.
    while waiting:
        part = waiting.pop()
        if id(part) in met:
            continue
        met[id(part)] = part
        if isinstance(part, classes) or len(met) > most:
            return True
        waiting.extend(_reached_from(part))
    return False


def gives_reads_away(value: object) -> bool:
    """Whether an iterator or coroutine may read variables when somebody uses it.

    By then the block in which the iterator was made has closed. An iterator over
    finished values, such as ``iter([1, 2])``, reads nothing.

    >>> gives_reads_away(iter([1, 2])), gives_reads_away([map(abs, [1, 2])])
    (False, False)

    Args:
        value: what a method or a function returns. Lists, tuples and dicts are looked
            through.
    """
    if isinstance(value, Mapping):
        return any(map(gives_reads_away, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(gives_reads_away, value))
    return isinstance(value, LAZY) and may_hold(value, MODULES, MOST_OF_ITERATORS)


def _reached_from(value: Any) -> Iterable[Any]:
    if isinstance(value, (*CLOSED, *ARRAYS)):
        return ()
    if type(value) in (list, tuple) and _PLAIN.issuperset(map(type, value)):
        return ()  # The words of a tokenizer would use up the search.
    if isinstance(value, types.FunctionType):  # Not its globals, a whole module.
        parts = (value.__defaults__, value.__kwdefaults__, value.__dict__)
        return (*(value.__closure__ or ()), *parts)
    if isinstance(value, _JITTED):  # Its other referents lead to all of JAX.
        return (value.__wrapped__,)
    return gc.get_referents(value)

"""The functions of Python that a program calls."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any

from flax_sg.internals.jaxprs import opened, within
from flax_sg.internals.types import AnyJaxpr


def callbacks_in(jaxpr: AnyJaxpr) -> list[Hashable]:
    """The functions of Python that a jaxpr calls, and what it prints.

    Two are equal if they are the same object, or compiled from the same code with the
    same values.
    """
    calls: list[Hashable] = []
    for eqn in opened(jaxpr).eqns:
        params = eqn.params
        if eqn.primitive.name.endswith(('callback', 'debug_print')):
            calls.append((eqn.primitive.name, _key_of(params.get('callback', params))))
        for inner in within(eqn):
            calls += callbacks_in(inner)
    return calls


def _key_of(value: Any) -> Hashable:
    """What a value is compared by; of a function its code and the values in it."""
    value = getattr(value, 'callback_func', value)
    if isinstance(value, functools.partial):
        return _key_of(value.func), _key_of(value.args), _key_of(value.keywords)
    if isinstance(value, (tuple, list)):
        return tuple(map(_key_of, value))
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return _key_of(value.__code__), _key_of(cells), _key_of(value.__defaults__)
    if isinstance(value, types.CodeType):
        return value.co_code, value.co_names, _key_of(value.co_consts)
    return value if isinstance(value, Hashable) else repr(value)

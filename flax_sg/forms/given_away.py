"""What a wrapper gives away: the values of its module, as code outside gets them.

Methods, modules and partials of these are wrapped in turn. A value that reads variables
later, when the block has closed, is an error.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from typing import Any

from flax.core.frozen_dict import FrozenDict

from flax_sg.engine import contents
from flax_sg.forms import forwarded
from flax_sg.internals import modules
from flax_sg.internals.modules import Module


def seen(wrapper: Module, name: str, value: Any) -> Any:
    """What code outside of the block gets for a value of the wrapped module.

    Args:
        wrapper: the wrapper.
        name: the attribute or method that has given the value, for errors.
        value: the value.

    Raises:
        BlockError: if it reads variables when it is used, and cannot be wrapped.
    """
    owner = value.__self__ if inspect.ismethod(value) else None
    if owner is wrapper.module:
        return types.MethodType(forwarded.carries(value.__func__), wrapper)
    if wrapper.scope is None:
        return value
    if isinstance(value, modules.Module):
        return wrapper._part(value)
    if isinstance(owner, modules.Module):
        method = forwarded.carries(value.__func__)
        return types.MethodType(method, wrapper._part(owner))
    if isinstance(value, (list, tuple, dict, FrozenDict)):
        return _within(wrapper, name, value)
    if isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
        if (new := _within(wrapper, name, parts)) is not parts:
            return type(value)(new[0], *new[1], **new[2])
    if kind := _kind_that_reads_later(value):
        raise wrapper._read_later(name, kind)
    return value


def _within(wrapper: Module, name: str, value: Any) -> Any:
    """A list, tuple or dict of such values; itself, if nothing in it is another."""
    is_dict = isinstance(value, (dict, FrozenDict))
    items = [*value.values()] if is_dict else [*value]
    new = [seen(wrapper, name, item) for item in items]
    if all(map(operator.is_, new, items)):
        return value
    if hasattr(value, '_fields'):  # A NamedTuple.
        return type(value)(*new)
    return type(value)(zip(value, new, strict=True) if is_dict else new)


def _kind_that_reads_later(value: object) -> str:
    """What a value is, if it may read variables when somebody uses it."""
    if isinstance(value, modules.Variable):
        return 'Variable'
    is_function = isinstance(value, contents.FUNCTIONS)
    if is_function and contents.may_hold(value, contents.MODULES):
        return 'function'
    is_lazy = contents.gives_reads_away(value)
    return 'generator or another lazy iterator' if is_lazy else ''

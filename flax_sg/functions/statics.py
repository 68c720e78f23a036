"""Attributes of objects and classes, looked up without running any user code.

``getattr`` may run properties, ``__getattr__`` and metaclasses, and ``isinstance`` may
ask a value for its ``__class__``. What stands here asks the dicts of classes and
objects alone, through the attributes of ``type`` that no metaclass can replace.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

MISSING = object()
mro_of: Callable[[type], tuple[type, ...]] = type.__dict__['__mro__'].__get__
module_of: Callable[[type], Any] = type.__dict__['__module__'].__get__
dict_of: Callable[[type], Any] = type.__dict__['__dict__'].__get__


def find(cls: type, name: str) -> Any:
    """The attribute of a class as it stands in the class or in one of its bases."""
    for base in mro_of(cls):
        found = dict_of(base).get(name, MISSING)
        if found is not MISSING:
            return found
    return MISSING


def stored_attributes(value: Any) -> dict[str, Any]:
    """The attributes that are stored in the dict of an object, if it has one."""
    found = find(type(value), '__dict__')
    if type(found) in _C_ATTRIBUTES:
        return dict(dict.items(found.__get__(value)))
    return {}


def stored_attribute(value: Any, name: str, default: Any = MISSING) -> Any:
    """An attribute that is stored on an object itself, in its dict or in a slot."""
    attributes = find(type(value), '__dict__')
    if type(attributes) in _C_ATTRIBUTES:
        found = dict.get(attributes.__get__(value), name, MISSING)
        if found is not MISSING:
            return found
    slot = find(type(value), name)
    return (
        slot_value(slot, value) if type(slot) is types.MemberDescriptorType else default
    )


def hides_attributes(cls: type) -> bool:
    """Whether a class stands between its objects and their attributes."""
    found = find(cls, '__getattribute__')
    # While a block is open Module has that of kept.py, which hides nothing.
    if type(found) is types.FunctionType and found.__module__ != 'flax_sg.kept':
        return True
    found = find(cls, '__dict__')
    return found is not MISSING and type(found) not in _C_ATTRIBUTES


_C_ATTRIBUTES = (types.GetSetDescriptorType, types.MemberDescriptorType)


def slot_value(descriptor: types.MemberDescriptorType, value: Any) -> Any:
    """The value in a slot of an object, or MISSING."""
    try:
        return descriptor.__get__(value)
    except AttributeError:
        return MISSING


def is_full(cell: types.CellType) -> bool:
    """Whether a closure variable has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def cell_values(fn: types.FunctionType) -> list[Any]:
    """The values of the closure of a function."""
    return [cell.cell_contents for cell in fn.__closure__ or () if is_full(cell)]


def is_data_descriptor(value: Any) -> bool:
    """Whether an attribute of a class goes before one of the object itself."""
    return has(type(value), '__set__')


def has(cls: type, name: str) -> bool:
    """Whether a class has an attribute."""
    return find(cls, name) is not MISSING

"""Modules, classes and objects: which they are, and the attributes that are read."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import inspect
import operator
import os
import threading
import types
import weakref
from collections.abc import Hashable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.core import Tracer

from flax_sg.functions.calls import CallWalk, is_frozen
from flax_sg.functions.contents import CONTAINERS, CONTENT, is_content
from flax_sg.functions.reads import WHOLE, Reads
from flax_sg.functions.statics import (
    MISSING,
    dict_of,
    find,
    has,
    hides_attributes,
    is_data_descriptor,
    mro_of,
    slot_value,
    stored_attribute,
    stored_attributes,
)
from flax_sg.functions.walks import MISSING_KEY, Held

# They read, by a name that is no part of the code, or a state that shows nowhere.
REFUSED = frozenset(
    map(
        id,
        (
            *(getattr, hasattr, setattr, delattr, vars, dir, super, next, id, input),
            *(eval, exec, compile, globals, locals, open, __import__),
            *(operator.attrgetter, operator.methodcaller),
            *(inspect.getattr_static, inspect.getmembers),
            *(dataclasses.asdict, dataclasses.astuple),
            *(importlib.import_module, importlib.reload, os.getenv),
        ),
    )
)
REFUSED_TYPES = (
    *(types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
    *(types.FrameType, weakref.ref, *weakref.ProxyTypes),
    *(operator.attrgetter, operator.methodcaller),
)
# Methods with such names that no operator runs on an object that is there already.
CONSTRUCTORS = ('__new__', '__init__', '__post_init__', '__class_getitem__')
NOT_IMPLICIT = frozenset(
    (
        *('__init_subclass__', '__set_name__', '__del__', '__subclasshook__'),
        *('__reduce__', '__reduce_ex__', '__getstate__', '__setstate__', '__copy__'),
        *('__deepcopy__', '__getattr__', '__getattribute__', '__dir__'),
        *('__setattr__', '__delattr__'),
    )
)


class ObjectWalk(CallWalk):
    """The whole walk."""

    def _look_into(self, value: Any, kind: type, reads: Reads) -> Hashable:
        # isinstance would ask the value for its __class__: that may be user code.
        mro = mro_of(kind)
        if Tracer in mro:
            self._raise_traced(value)
        if id(value) in REFUSED or kind in REFUSED_TYPES:
            return self._refuse('what it reads cannot be told from its code')
        look = self.looks.get(kind)
        if look is not None:
            return look(self, value, reads)
        if functools.partial in mro:
            return self._of_partial(value, reads)
        if type in mro:
            return self._class(value, reads)
        if types.ModuleType in mro:
            return self._module(value, reads)
        if np.generic in mro:
            return kind, value.dtype, value.tobytes()
        if np.dtype in mro:
            return np.dtype, value
        if issubclass(kind, jax.Array):
            return Held(value)
        return self._instance(value, kind, reads)

    def _module(self, module: types.ModuleType, reads: Reads) -> Hashable:
        found = vars(module)
        if self.libraries.have_module(module):
            return Held(module), self._settings(reads, found)
        if '__getattr__' in found and set(reads.attrs) - set(found):
            return self._refuse('an attribute of it comes from __getattr__')
        return Held(module), self._attributes(module, reads, found)

    def _settings(self, reads: Reads, found: dict[str, Any]) -> Hashable:
        """Attributes of something of a library: functions stay, settings may change."""
        attrs = [name for name in reads.attrs if found.get(name) is not MISSING]
        return tuple(
            [self._below('.', n, found.get(n), reads.attrs[n]) for n in sorted(attrs)]
        )

    def _class(self, cls: type, reads: Reads) -> Hashable:
        if self.libraries.have_class(cls):
            found = {name: find(cls, name) for name in reads.attrs}
            return Held(cls), self._settings(reads, found)
        out: list[Hashable] = [Held(cls)]
        for name in sorted(self._names(reads)):
            self.labels.append(('.', name))
            out.append((name, self._class_attribute(cls, name, reads.attrs.get(name))))
            self.labels.pop()
        if reads.whole and nn.Module not in mro_of(cls):
            # It may be called, and operators may be used on what it returns.
            for name, method in self.libraries.implicit_methods(cls, NOT_IMPLICIT):
                out.append((name, self._function(method, ())))
        if reads.whole and not self.libraries.have_class(type(cls)):
            for name, method in self.libraries.implicit_methods(
                type(cls), NOT_IMPLICIT
            ):
                out.append((name, self._function(method, (cls,))))
        return tuple(out)

    def _class_attribute(self, cls: type, name: str, reads: Reads | None) -> Hashable:
        value, meta = find(cls, name), type(cls)
        if find(meta, name) is not MISSING and find(type, name) is MISSING:
            return self._refuse('its metaclass defines it')
        if value is MISSING:
            computed = find(meta, '__getattr__') is not MISSING
            if computed and not (reads is None and self.libraries.have_class(meta)):
                return self._refuse('it is made when it is read')
            return MISSING_KEY
        if type(value) is classmethod:
            return self._bound(value.__func__, cls)
        return self._look(value, reads or WHOLE)

    def _identity(self, value: Any, kind: type, whole: bool) -> Hashable:
        """Which object it is, apart from the attributes that the code names."""
        mro = mro_of(kind)
        if enum.Enum in mro:
            return Held(value), self._look(stored_attribute(value, '_value_'))
        if is_content(kind):
            content = [get(value) for base, get in CONTENT.items() if base in mro]
            library = any(map(self.libraries.are_opaque, mro))
            state = stored_attributes(value) if library or not content else {}
            return Held(kind), self._look(content), self._look(state)
        if not whole or nn.Module in mro:
            # What is read are attributes. Every apply makes a new clone of a module.
            return Held(kind)
        if is_frozen(kind):
            fields = [field.name for field in dataclasses.fields(kind) if field.compare]
            values = [(name, stored_attribute(value, name)) for name in fields]
            return Held(kind), self._entries('field', values)
        return Held(value)

    def _instance(self, value: Any, kind: type, reads: Reads) -> Hashable:
        is_module = nn.Module in mro_of(kind)
        library = self.libraries.have_class(kind) and not is_module
        if is_stateful(kind, library):
            return self._refuse(f'a {kind.__name__} has a state that shows nowhere')
        out: list[Hashable] = [self._identity(value, kind, reads.whole)]
        for name in sorted(self._names(reads)):
            self.labels.append(('.', name))
            key = self._attribute(value, kind, name, reads.attrs.get(name))
            self.labels.pop()
            if key is not MISSING_KEY:
                out.append((name, key))
        if reads.whole and library:
            out.append(self._functions_in(stored_attributes(value).values()))
        elif reads.whole and not is_module:
            out.append(self._implicit(value, kind))
        return tuple(out)

    def _implicit(self, value: Any, kind: type) -> Hashable:
        """The methods that operators, iteration and calls of the value may run."""
        opaque = next(filter(self.libraries.are_opaque, mro_of(kind)), None)
        if opaque is not None and not is_content(kind):
            return self._refuse(f'{opaque.__name__} is not looked into')
        methods = self.libraries.implicit_methods(kind, {*NOT_IMPLICIT, *CONSTRUCTORS})
        return tuple([(name, self._function(fn, (value,))) for name, fn in methods])

    def _attribute(
        self, value: Any, kind: type, name: str, reads: Reads | None
    ) -> Hashable:
        """One attribute; ``reads`` is None for a loose name, which may be missing."""
        if name == '__class__':
            return self._look(kind, reads) if reads else Held(kind)
        if enum.Enum in mro_of(kind) and name in ('name', 'value'):
            return 'content'
        if hides_attributes(kind):
            return self._refuse('its class says itself what its attributes are')
        of_class = find(kind, name)
        if not is_data_descriptor(of_class):
            stored = stored_attribute(value, name)
            if stored is not MISSING:
                key = self._look(stored, reads or WHOLE)
                if reads is not None or of_class is MISSING:
                    return key
                return key, self._look(of_class)  # For type(value).name.
        if of_class is MISSING:
            return self._absent(value, kind, reads)
        if of_class is dict_of(object).get(name):
            # It may call other methods. Of a whole object these are looked at anyway.
            return self._refuse('every object has it') if reads else 'of every object'
        if self.libraries.have_class(type(of_class)):
            # Flax wraps the properties of modules.
            of_class = stored_attribute(of_class, 'wrapped', of_class)
        how = type(of_class)
        if how is types.FunctionType:
            return self._bound(of_class, value)
        if how is types.MemberDescriptorType:
            stored = slot_value(of_class, value)
            absent = stored is MISSING
            return MISSING_KEY if absent else self._look(stored, reads or WHOLE)
        if property in mro_of(how) or how is functools.cached_property:
            # What it returns is not known, only what that is made of.
            self._add_loose(set() if reads is None else reads.names())
            cached = how is functools.cached_property
            return self._bound(of_class.func if cached else of_class.fget, value)
        if how is classmethod:
            return self._bound(of_class.__func__, kind)
        if how is staticmethod:
            return self._look(of_class.__func__)
        if find(how, '__get__') is MISSING:
            return self._look(of_class, reads or WHOLE)
        if is_content(kind) and self.libraries.have_class(how):
            return 'content'  # What it reads is in the identity already.
        return self._refuse('it is computed by a descriptor')

    def _absent(self, value: Any, kind: type, reads: Reads | None) -> Hashable:
        """An attribute that is neither on an object nor on its class."""
        getter = find(kind, '__getattr__')
        if nn.Module in mro_of(kind):
            # nn.Module has a __getattr__ that runs setup. A loose name is more likely
            # to belong to something else.
            return MISSING_KEY if reads is None else self._refuse('it is not there')
        if getter is not MISSING:
            self._add_loose(set() if reads is None else reads.names())
            if is_content(kind) and self.libraries.have_class(type(getter)):
                return 'content'
            return self._bound(getter, value)
        if (
            reads is not None
            and self.libraries.have_class(kind)
            and not is_content(kind)
        ):
            # Some types written in C have attributes of their own.
            return self._refuse('it is made when it is read')
        return MISSING_KEY


def is_stateful(cls: type, library: bool) -> bool:
    """Whether objects of a class change in a way that their attributes do not show."""
    if threading.local in mro_of(cls) or np.ndarray in mro_of(cls):
        return True
    changing = ('__next__', '__setitem__')
    return (
        library
        and not is_content(cls)
        and (issubclass(cls, CONTAINERS) or any(has(cls, n) for n in changing))
    )

"""Functions: a key of their code and of what it reads, methods and partials too."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Hashable, Iterable
from typing import Any, ClassVar

import flax.linen as nn

from flax_sg.functions.contents import ContentWalk, is_content
from flax_sg.functions.reads import WHOLE, Code, Reads, analyse
from flax_sg.functions.statics import MISSING, cell_values, dict_of, is_full, mro_of
from flax_sg.functions.walks import MISSING_KEY, Held, Looks


class CallWalk(ContentWalk):
    """The part of a walk that looks at functions."""

    def _function(
        self, fn: types.FunctionType, bound: tuple[Any, ...], root: bool = False
    ) -> Hashable:
        outer, fn = fn, self.libraries.unwrap(fn)
        if self.libraries.have_function(fn):
            held = self._functions_in(cell_values(fn))
            return 'library', Held(fn), held, tuple(map(self._look, bound))
        if outer is not fn:
            held = self._functions_in(v for v in cell_values(outer) if v is not fn)
            return 'wrapped', held, self._function(fn, bound, root)
        mark = (fn, *map(id, bound))
        if mark in self.called:
            return self.called[mark][1]
        code = analyse(fn.__code__)
        if mark in self.busy:
            # The first call gets the path, this one may get something else.
            self._add_loose(self._unanchored(fn, code, len(bound), root=False))
            self.cycles += 1
            return 'cycle', len(self.busy) - self.busy[mark]
        self.busy[mark] = len(self.busy)
        cycles = self.cycles
        for reason in code.refusals:
            self._refuse(reason)
        self._add_loose(self._unanchored(fn, code, len(bound), root))
        key = (
            code.fingerprint,
            self._arguments(fn, code, bound),
            self._defaults(fn),
            self._cells(fn, code),
            self._globals(fn, code),
            tuple([self._import(name) for name in sorted(code.imports)]),
        )
        del self.busy[mark]
        if cycles == self.cycles:
            self.called[mark] = bound, key
        return key

    def _functions_in(self, values: Iterable[Any]) -> Hashable:
        """The functions that something of a library holds: it may call them."""
        kinds = (types.FunctionType, types.MethodType)
        flat = [v for value in values for v in (value, *_values_of_dict(value))]
        return tuple([self._look(value) for value in flat if type(value) in kinds])

    def _unanchored(
        self, fn: types.FunctionType, code: Code, bound: int, root: bool
    ) -> set[str]:
        """The attributes that the code reads off values that are not known."""
        names = set(code.loose)
        # What is read off the path itself is read of nothing else.
        known = fn.__code__.co_varnames[: bound + root]
        for param, reads in code.params.items():
            if param not in known[: fn.__code__.co_argcount]:
                names |= reads.names()
        return names

    def _arguments(
        self, fn: types.FunctionType, code: Code, bound: tuple[Any, ...]
    ) -> Hashable:
        names = fn.__code__.co_varnames[: fn.__code__.co_argcount]
        out: list[Hashable] = []
        for index, value in enumerate(bound):
            name = names[index] if index < len(names) else f'argument {index}'
            out.append(
                self._below('argument ', name, value, code.params.get(name, WHOLE))
            )
        return tuple(out)

    def _defaults(self, fn: types.FunctionType) -> Hashable:
        if not fn.__defaults__ and not fn.__kwdefaults__:
            return ()
        code, defaults = fn.__code__, fn.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        return (
            self._entries('default of', zip(names, defaults, strict=True)),
            self._entries('default of', (fn.__kwdefaults__ or {}).items()),
        )

    def _cells(self, fn: types.FunctionType, code: Code) -> Hashable:
        out: list[Hashable] = []
        names = fn.__code__.co_freevars
        for name, cell in zip(names, fn.__closure__ or (), strict=True):
            if not is_full(cell):
                return self._refuse(f'the closure variable {name!r} has no value yet')
            value = cell.cell_contents
            out.append(self._below('closure variable ', name, value, code.cells[name]))
        return tuple(out)

    def _globals(self, fn: types.FunctionType, code: Code) -> Hashable:
        out: list[Hashable] = []
        for name, reads in code.globals.items():
            value = dict.get(fn.__globals__, name, MISSING)
            if value is MISSING:
                value = fn.__builtins__.get(name, MISSING)
            if value is MISSING:
                out.append(MISSING_KEY)
            else:
                out.append(self._below('global ', name, value, reads))
        return tuple(out)

    def _import(self, name: str) -> Hashable:
        top = name.partition('.')[0]
        if top not in sys.modules or name not in sys.modules:
            return self._refuse(f'it imports {name}, which is not loaded yet')
        return self._look(sys.modules[top]), self._look(sys.modules[name])

    def _bound(self, fn: Any, owner: Any) -> Hashable:
        """A function that is called with the owner as its first argument."""
        if type(fn) is not types.FunctionType:
            return 'method', self._look(fn), self._look(owner)
        user = self.libraries.unwrap(fn)
        if not self.libraries.have_function(user):
            return 'method', self._function(user, (owner,))
        kind = type(owner)
        if type in mro_of(kind) or is_frozen(kind) or is_content(kind):
            return 'method', Held(fn), self._look(owner)
        return self._refuse(f'{fn.__name__} is not looked into')

    def _of_partial(self, value: functools.partial[Any], _: Reads) -> Hashable:
        args = self._of_sequence(value.args, WHOLE)
        keywords = self._entries('keyword', value.keywords.items())
        return 'partial', self._look(value.func), args, keywords

    def _of_method(self, value: types.MethodType, _: Reads) -> Hashable:
        return self._bound(value.__func__, value.__self__)

    def _of_builtin(self, value: Any, _: Reads) -> Hashable:
        owner = value.__self__
        mro = mro_of(type(owner))
        if owner is None or types.ModuleType in mro or type in mro:
            return Held(value)
        if not is_content(type(owner)):
            return self._refuse(f'{value.__name__} reads what shows nowhere')
        return 'method', value.__name__, self._look(owner)

    def _of_wrapper(self, value: Any, _: Reads) -> Hashable:
        return type(value), self._look(value.__func__)

    def _of_property(self, value: property, _: Reads) -> Hashable:
        return property, self._look(value.fget)

    def _of_cached(self, value: Any, _: Reads) -> Hashable:
        return type(value), self._look(value.__wrapped__)

    def _of_itself(self, value: Any, _: Reads) -> Hashable:
        return Held(value)

    def _of_plain_function(self, fn: types.FunctionType, reads: Reads) -> Hashable:
        attrs = self._attributes(fn, reads, fn.__dict__) if fn.__dict__ else ()
        return self._function(fn, ()), attrs

    looks: ClassVar[Looks] = {
        **ContentWalk.looks,
        functools.partial: _of_partial,
        types.FunctionType: _of_plain_function,
        types.MethodType: _of_method,
        types.BuiltinFunctionType: _of_builtin,
        types.MethodWrapperType: _of_builtin,
        staticmethod: _of_wrapper,
        classmethod: _of_wrapper,
        property: _of_property,
        type(functools.lru_cache(len)): _of_cached,
        **dict.fromkeys(
            (
                *(types.MethodDescriptorType, types.WrapperDescriptorType),
                *(types.GetSetDescriptorType, types.MemberDescriptorType),
                types.ClassMethodDescriptorType,
            ),
            _of_itself,
        ),
    }


def _values_of_dict(value: Any) -> Iterable[Any]:
    return list(value.values()) if type(value) is dict else ()


def is_frozen(cls: type) -> bool:
    """Whether it is a frozen dataclass."""
    params = dict_of(cls).get('__dataclass_params__')
    return params is not None and params.frozen and nn.Module not in mro_of(cls)

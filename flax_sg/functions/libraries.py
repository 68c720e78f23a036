"""Whose code it is: what belongs to Python or to an installed package."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterable

import flax
import jax
import numpy as np

from flax_sg.functions.statics import dict_of, module_of, mro_of


@dataclasses.dataclass(frozen=True)
class Libraries:
    """What belongs to Python or to an installed package, and is not looked into.

    Attributes:
        home: the folder of an installed package that is looked into nevertheless, since
            the function at hand is its own: a model that was installed writes its
            lambdas in place like any other.
    """

    home: str = ''

    def have_file(self, file: str) -> bool:
        """Whether the code in a file is theirs."""
        own = self.home and (file == self.home or file.startswith(self.home + os.sep))
        return not own and _is_library_file(file)

    def have_function(self, fn: types.FunctionType) -> bool:
        """Whether a function is theirs."""
        return self.have_file(fn.__code__.co_filename)

    def have_module(self, module: types.ModuleType) -> bool:
        """Whether a Python module is theirs."""
        found = vars(module)
        file = found.get('__file__')
        if type(file) is str:
            return self.have_file(file)
        top = str(found.get('__name__', '')).partition('.')[0]
        return top in sys.stdlib_module_names

    def have_class(self, cls: type) -> bool:
        """Whether a class is theirs."""
        name = module_of(cls)
        module = sys.modules.get(name) if type(name) is str else None
        return module is not None and self.have_module(module)

    def unwrap(self, fn: types.FunctionType) -> types.FunctionType:
        """What the user wrote, under decorators of Flax, JAX and the like."""
        while self.have_function(fn):
            inner = fn.__dict__.get('__wrapped__')
            if type(inner) is not types.FunctionType:
                break
            fn = inner
        return fn

    def are_opaque(self, base: type) -> bool:
        """Whether operators on its objects run library code that reads attributes."""
        if module_of(base) in _TRANSPARENT:
            return False
        found = dict_of(base)
        methods = (type(found.get(name)) is types.FunctionType for name in _OPERATORS)
        return self.have_class(base) and any(methods)

    def implicit_methods(
        self, cls: type, but: Iterable[str]
    ) -> list[tuple[str, types.FunctionType]]:
        """The methods of a class, libraries apart, that Python itself may call."""
        return [
            (name, method)
            for base in mro_of(cls)
            if not self.have_class(base)
            for name, method in list(dict_of(base).items())
            if name.startswith('__') and name.endswith('__') and name not in but
            if type(method) is types.FunctionType
        ]


_TRANSPARENT = ('builtins', 'abc', 'typing', 'collections.abc', 'enum')
_OPERATORS = (
    *('__call__', '__getitem__', '__contains__', '__iter__', '__next__', '__len__'),
    *('__bool__', '__eq__', '__lt__', '__gt__', '__str__'),
)
_OWN = os.path.dirname(os.path.dirname(__file__))
_DEMO = os.path.join(_OWN, 'demo')
_FOUNDATIONS = tuple(os.path.dirname(m.__file__ or '') for m in (flax, jax, np))
_PYTHON = tuple(sysconfig.get_path(name) for name in ('stdlib', 'platstdlib'))
_PACKAGE = re.compile(r'.*[/\\](?:site|dist)-packages[/\\][^/\\]+')


@functools.lru_cache(maxsize=4096)
def _is_library_file(file: str) -> bool:
    folders = (*_FOUNDATIONS, *_PYTHON)
    return (
        file.startswith(('<frozen ', *(folder + os.sep for folder in folders)))
        or _is_own(file)
        or _PACKAGE.match(file) is not None
    )


def libraries_seen_from(fn: types.FunctionType) -> Libraries:
    """The libraries for a function: those to which it does not belong itself."""
    return _libraries_seen_from_file(fn.__code__.co_filename)


@functools.lru_cache(maxsize=4096)
def _libraries_seen_from_file(file: str) -> Libraries:
    folder, package = os.path.dirname(file), _PACKAGE.match(file)
    if package is None or _is_own(file) or package[0] in _FOUNDATIONS:
        return Libraries()
    return Libraries(_DEMO if folder.startswith(_DEMO) else package[0])


def _is_own(file: str) -> bool:
    """Whether a file belongs to this package; the demo is a program like a user's."""
    return file.startswith(_OWN + os.sep) and not file.startswith(_DEMO + os.sep)

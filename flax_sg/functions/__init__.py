"""When two functions are equal: a key of what a function does and of what it reads.

JAX's trace caches ask whether the filter of a block is the one of the last trace. By
identity, a lambda written in a training loop would be a new filter on every step. By
its source alone, a lambda whose closure has changed would be the old one, and the
cached program would stop the wrong gradients. So the key holds the code *and* what the
code reads, as found in its instructions: closure cells, globals, defaults, and the
attributes that it names on them, however far a chain such as ``cfg.model.frozen`` goes.

Two parts: what a code object reads (``reads.py``, once for each code object), and the
snapshot of these values (``walks.py`` and its subclasses, at each use). No user code
runs in either.

An attribute is *anchored* when it is read directly off something known: ``a.b.c`` on
a global ``a``. Then ``b`` of that object and ``c`` of its value go into the key. All
other attribute names are *loose*: which object they are read from is not known, so they
are looked up on every object that is used as a whole (passed on, stored, indexed,
called).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

import flax.linen as nn
from jax.core import Tracer

from flax_sg.functions.libraries import Libraries, libraries_seen_from
from flax_sg.functions.objects import ObjectWalk
from flax_sg.functions.reads import Reads
from flax_sg.functions.statics import find, mro_of
from flax_sg.functions.walks import Held, describe


def function_key(fn: Callable[..., Any]) -> Hashable:
    """Returns a key that is equal for functions that do the same.

    Equal keys mean: the same code, constants with their types, names and defaults,
    and equal values of all that the code reads. Containers and numbers are compared
    by value and type, numpy arrays by content, functions and bound methods as here,
    frozen dataclasses by their fields, classes and Python modules by identity and by
    the attributes that the code names. Of any other object, a module of Flax among
    them, the type counts and what the code reads of it; if the code uses the object
    itself, its identity too, but for modules of Flax: every apply makes new ones. What
    is compared by identity is held, so that no id is used twice.

    Functions of Python and of installed packages are what they are: they are not
    looked into, unless ``fn`` itself stands in the package. A function that reads what
    cannot be compared without running it has a key that is equal to no other, an
    ``Incomparable`` with the reason.

    >>> def named(*names):
    ...     return lambda path: path.name in names
    >>> function_key(named('bias')) == function_key(named('bias'))
    True
    >>> function_key(named('bias')) == function_key(named('kernel'))
    False

    Args:
        fn: a function of a path.

    Raises:
        TracerInFilterError: if it reads a value that JAX is tracing.
    """
    return _Snapshot(fn).take()


def reads_key(fn: Callable[..., Any]) -> Hashable:
    """Returns a key of all that a function reads, for one and the same function.

    As ``function_key``, but it asks whether the reads of one function are what they
    were: arrays that are traced, modules of Flax, and whatever cannot be looked into,
    count by identity.

    >>> scale = [2.0]
    >>> def loss(x):
    ...     return scale[0] * x
    >>> before = reads_key(loss)
    >>> before == reads_key(loss)
    True
    >>> scale[0] = 3.0
    >>> before == reads_key(loss)
    False
    """
    return _Reads(fn).take()


class Incomparable:
    """The key of a function that is equal to no other, with the reason why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f'Incomparable({self.reason!r})'


class _Snapshot(ObjectWalk):
    """The walk from a function of a path."""

    def take(self) -> Hashable:
        # A function found late may name an attribute of a value seen before.
        while True:
            key = self._root(self.fn)
            if not self.stale:
                break
            self._restart()
        return key if self.refusal is None else Incomparable(self.refusal)

    def _root(self, fn: Any) -> Hashable:
        self.labels = []
        bound: tuple[Any, ...] = ()
        keywords: dict[str, Any] = {}
        if type(fn) is functools.partial:
            fn, bound, keywords = fn.func, fn.args, fn.keywords
        if type(fn) is types.MethodType:
            fn, bound = fn.__func__, (fn.__self__, *bound)
        call = find(type(fn), '__call__')
        if type(call) is types.FunctionType:
            fn, bound = call, (fn, *bound)
        if type(fn) is not types.FunctionType:
            return 'root', self._look(self.fn)
        self.libraries = libraries_seen_from(Libraries().unwrap(fn))
        more = self._entries('keyword', keywords.items())
        return 'root', more, self._function(fn, bound, root=True)


class _Reads(_Snapshot):
    """The walk that compares a function with itself."""

    # Whether something was met that cannot be looked into.
    opaque = False

    def _look_into(self, value: Any, kind: type, reads: Reads) -> Hashable:
        mro = mro_of(kind)
        if Tracer in mro:
            return Held(value)
        key = super()._look_into(value, kind, reads)
        opaque, self.opaque = self.opaque, False
        return (Held(value), key) if opaque or nn.Module in mro else key

    def _refuse(self, reason: str) -> Hashable:
        del reason
        self.opaque = True
        return 'opaque'


__all__ = ['Incomparable', 'describe', 'function_key', 'reads_key']

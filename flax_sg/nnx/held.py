"""What modules hold outside of the graph, in a copy of a model.

A ``functools.cached_property`` that returns layers, a partial or a bound method in an
attribute, a plain object: Flax takes these for static, so they go on to hold the
model's own layers, and a view would call those. The layers are replaced wherever that
can be done. A closure, and an object of another class, cannot be made anew.

Whatever a value holds is searched, as deep as there is something, since a function may
call another one that holds the layers. A value counts as one that leads to no layer
after all that it holds was searched, and not before.
"""

from __future__ import annotations

import collections
import functools
import gc
import logging
import types
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from flax_sg import errors
from flax_sg.errors.texts import brief
from flax_sg.filters.predicates import captured_by
from flax_sg.trees.leaves import is_array
from flax_sg.trees.levels import one_level

# Classes of values that hold nothing.
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
# What is not searched: code, and what the process has once. A logger leads to records
# of what was logged, and so to whole models.
_CLOSED = type, types.ModuleType, types.CodeType, logging.Logger


class Held:
    """Makes static values anew that hold modules of a model.

    Args:
        copies: what stands for modules and Variables, by the ``id`` of these.
        changed: returns the ``id`` of those that lead to other values than before. The
            model's own do for all others, where they cannot be replaced.
    """

    def __init__(
        self, copies: Mapping[int, Any], changed: Callable[[], Set[int]]
    ) -> None:
        self._copies, self._changed = copies, changed
        # What was searched, by ``id``: it is kept, so that no ``id`` is used again.
        self._apart, self._made = dict[int, _Apart](), dict[int, Any]()
        # The values among these that lead to no copy.
        self._clean = set[int]()

    def put(self, value: Any, owner: str) -> Any:
        """Returns the value itself, or one that holds the copies.

        Args:
            value: what is static.
            owner: what holds it, for the error, such as ``'Model.run'``.

        Raises:
            ArgumentTypeError: if what leads to other values cannot be replaced.
        """
        if id(value) in self._copies:
            return self._copies[id(value)]
        inside = self._search(value)
        holders = leading_to(self._copies.keys(), inside)
        self._clean |= inside.keys() - holders
        if not holders:
            return value
        changed = leading_to(self._changed(), inside)
        for number in reversed(inside):
            apart = self._apart[number]
            if number in changed and apart.make is None:
                raise errors.ArgumentTypeError(
                    f'{owner} holds modules of the model in {brief(apart.value)}, '
                    'which is no part of it.\n'
                    'A view cannot replace them there: they would read what the model '
                    'reads.\n'
                    'Write a method in place of a function, and an nnx.Module in place '
                    'of an object.'
                )
        return self._renewed(value, holders)

    def _search(self, value: Any) -> dict[int, list[int]]:
        """What a value leads to: the ``id`` of what is in each part of it."""
        inside, waiting = dict[int, list[int]](), [value]
        while waiting:
            part = waiting.pop()
            number = id(part)
            if number in inside or number in self._clean or number in self._copies:
                continue
            if number not in self._apart:
                self._apart[number] = _take_apart(part)
            parts = self._apart[number].parts
            is_plain = PLAIN.issuperset(map(type, parts))  # Nearly always, if long.
            parts = [] if is_plain else [x for x in parts if type(x) not in PLAIN]
            inside[number] = [*map(id, parts)]
            waiting += parts
        return inside

    def _renewed(self, value: Any, holders: Set[int]) -> Any:
        """The same value, with copies in it."""
        number = id(value)
        known = self._copies if number in self._copies else self._made
        if number in known:
            return known[number]
        if number not in holders or (apart := self._apart[number]).make is None:
            return value
        if apart.shell is not None:
            self._made[number] = apart.shell  # It may hold itself.
        made = apart.make([self._renewed(part, holders) for part in apart.parts])
        self._made[number] = made
        return made


def leading_to(targets: Set[int], inside: Mapping[int, Sequence[int]]) -> set[int]:
    """What leads to one of some values: all are numbers.

    >>> leading_to({3}, {0: [1, 2], 1: [3], 2: [4], 5: [0]})
    {0, 1, 5}

    Args:
        targets: the values.
        inside: what is directly in each value.
    """
    around = dict[int, list[int]]()
    waiting = list[int]()
    for number, parts in inside.items():
        for part in parts:
            around.setdefault(part, []).append(number)
            if part in targets:
                waiting.append(part)
    found = set[int]()
    while waiting:
        for number in around.get(waiting.pop(), ()):
            if number not in found:
                found.add(number)
                waiting.append(number)
    return found


class _Apart(NamedTuple):
    """A value, taken apart.

    Attributes:
        value: the value.
        parts: what is directly in it.
        make: makes such a value of other parts; None if that cannot be done.
        shell: what ``make`` fills and returns, if the value may hold itself.
    """

    value: Any
    parts: Sequence[Any]
    make: Callable[[list[Any]], Any] | None = None
    shell: Any = None


def _take_apart(value: Any) -> _Apart:
    # Python does not track a table of words, since nothing in it can refer to others.
    if not gc.is_tracked(value) and not isinstance(value, np.ndarray):
        return _Apart(value, ())
    if take_apart := _KINDS.get(type(value)):
        return take_apart(value)
    if isinstance(value, nnx.Pytree):
        return _object(value)
    if isinstance(value, functools.partial):
        return _partial(value)
    if isinstance(value, weakref.ref):  # One of a class of its own.
        return _Apart(value, [value()])
    if isinstance(value, np.ndarray) and value.dtype == np.object_:
        return _Apart(value, value.ravel().tolist())
    if isinstance(value, (*_CLOSED, nnx.Variable)) or is_array(value):
        return _Apart(value, ())
    if not jax.tree_util.all_leaves([value]):
        return _pytree(value)
    attributes = vars(value) if type(value).__dictoffset__ else {}
    if '__wrapped__' in attributes:  # What JAX and functools cache in it is no part.
        return _Apart(value, [*attributes.values()])
    return _Apart(value, gc.get_referents(value))


def _object(value: Any) -> _Apart:
    """A module that is not in the graph, such as a property has made and cached."""
    shell, names = object.__new__(type(value)), [*vars(value)]

    def make(new: list[Any]) -> Any:
        vars(shell).update(zip(names, new, strict=True))
        return shell

    return _Apart(value, [*vars(value).values()], make, shell)


def _list(value: list[Any]) -> _Apart:
    shell = list[Any]()

    def make(new: list[Any]) -> Any:
        shell.extend(new)
        return shell

    return _Apart(value, value, make, shell)


def _dict(value: dict[Any, Any]) -> _Apart:
    of_default = isinstance(value, collections.defaultdict)
    shell: Any = type(value)(value.default_factory) if of_default else type(value)()
    count = len(value)

    def make(new: list[Any]) -> Any:
        shell.update(zip(new[:count], new[count:], strict=True))
        return shell

    return _Apart(value, [*value, *value.values()], make, shell)


def _pytree(value: Any) -> _Apart:
    pairs, treedef = one_level(value)
    parts = [child for _, child in pairs]
    # What is static in it cannot be replaced.
    return _Apart(value, [*parts, treedef], lambda new: treedef.unflatten(new[:-1]))


def _treedef(value: Any) -> _Apart:
    return _Apart(value, [value.node_data()])


def _function(value: Any) -> _Apart:
    return _Apart(value, [*(x for _, x in captured_by(value)), *vars(value).values()])


def _method(value: types.MethodType) -> _Apart:
    fn = value.__func__
    make = lambda new: types.MethodType(*new)  # noqa: E731
    return _Apart(value, [fn, value.__self__], make)


def _partial(value: functools.partial[Any]) -> _Apart:
    parts = [value.func, value.args, value.keywords]
    return _Apart(value, parts, lambda new: type(value)(new[0], *new[1], **new[2]))


def _weak(value: Any) -> _Apart:
    """A weak reference. The view keeps what the new one refers to."""
    return _Apart(value, [value()], lambda new: type(value)(*new))


def _proxy(value: Any) -> _Apart:
    try:
        node = value.__init__.__self__  # Any other name is one of the object behind.
    except ReferenceError:
        return _Apart(value, ())
    return _Apart(value, [node], lambda new: weakref.proxy(*new))


_KINDS: dict[type, Callable[[Any], _Apart]] = {
    list: _list,
    tuple: lambda value: _Apart(value, value, tuple),
    dict: _dict,
    collections.OrderedDict: _dict,
    collections.defaultdict: _dict,
    set: lambda value: _Apart(value, [*value], set),
    frozenset: lambda value: _Apart(value, [*value], frozenset),
    types.FunctionType: _function,
    types.MethodType: _method,
    functools.partial: _partial,
    weakref.ref: _weak,
    weakref.ProxyType: _proxy,
    weakref.CallableProxyType: _proxy,
    jax.tree_util.PyTreeDef: _treedef,
}

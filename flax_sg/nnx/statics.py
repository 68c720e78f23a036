"""The static attributes of modules, in a copy of a model.

A ``functools.cached_property`` that returns layers, a partial or a bound method in an
attribute, a plain object: Flax takes these for static. So the copy would have the same
objects, with the model's own layers in them, and a view would call those. The layers
are replaced wherever that can be done. A closure, and an object of another class,
cannot be made anew.

A static value is searched to its end, since a function may call another one that has
the layers in its closure. A value counts as one that leads to no layer after everything
in it was searched, and not before.
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

# Classes of values with nothing in them.
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
# Classes that are not searched. Code and classes are shared by the whole process, and a
# logger leads to records of what was logged, and so to whole models.
_CLOSED = type, types.ModuleType, types.CodeType, logging.Logger


class Statics:
    """Makes static values anew that lead to modules of a model.

    Args:
        copies: the copies of modules and Variables, by the ``id`` of the originals.
        changed: returns the ``id`` of those originals whose copies read other values.
            The others may stay in a static value that cannot be made anew.
    """

    def __init__(
        self, copies: Mapping[int, Any], changed: Callable[[], Set[int]]
    ) -> None:
        self._copies, self._changed = copies, changed
        # The parts that were searched, by ``id``, and what was made of them. A part is
        # kept alive, so that no later object has its ``id``.
        self._apart, self._made = dict[int, _Apart](), dict[int, Any]()
        # The parts that lead to no copy.
        self._clean = set[int]()

    def put(self, value: Any, owner: str) -> Any:
        """Returns the value itself, or a new one with the copies in it.

        Args:
            value: a static value.
            owner: the attribute that has it, for the error, such as ``'Model.run'``.

        Raises:
            ArgumentTypeError: if a part that leads to changed values cannot be made.
        """
        if id(value) in self._copies:
            return self._copies[id(value)]
        inside = self._search(value)
        outdated = leading_to(self._copies.keys(), inside)
        self._clean |= inside.keys() - outdated
        if not outdated:
            return value
        changed = leading_to(self._changed(), inside)
        for key in reversed(inside):
            apart = self._apart[key]
            if key in changed and apart.make is None:
                raise errors.ArgumentTypeError(
                    f'{owner} holds modules of the model in {brief(apart.value)}, '
                    'which is no part of it.\n'
                    'A view cannot replace them there: they would read what the model '
                    'reads.\n'
                    'Write a method in place of a function, and an nnx.Module in place '
                    'of an object.'
                )
        return self._renewed(value, outdated)

    def _search(self, value: Any) -> dict[int, list[int]]:
        """All parts of a value, by ``id``: what is directly in each of them."""
        inside, waiting = dict[int, list[int]](), [value]
        while waiting:
            part = waiting.pop()
            key = id(part)
            if key in inside or key in self._clean or key in self._copies:
                continue
            if key not in self._apart:
                self._apart[key] = _apart(part)
            parts = self._apart[key].parts
            is_plain = PLAIN.issuperset(map(type, parts))  # Fast, for a long list.
            parts = [] if is_plain else [x for x in parts if type(x) not in PLAIN]
            inside[key] = [*map(id, parts)]
            waiting += parts
        return inside

    def _renewed(self, value: Any, outdated: Set[int]) -> Any:
        """The same value, with copies in it."""
        key = id(value)
        for made in (self._copies, self._made):
            if key in made:
                return made[key]
        if key not in outdated or (apart := self._apart[key]).make is None:
            return value
        if apart.shell is not None:
            self._made[key] = apart.shell  # The value may lead to itself.
        new = apart.make([self._renewed(part, outdated) for part in apart.parts])
        self._made[key] = new
        return new


def leading_to(targets: Set[int], inside: Mapping[int, Sequence[int]]) -> set[int]:
    """The values that lead to one of some targets. Values are told by their ``id``.

    >>> leading_to({3}, {0: [1, 2], 1: [3], 2: [4], 5: [0]})
    {0, 1, 5}

    Args:
        targets: the targets.
        inside: what is directly in each value.
    """
    containers = dict[int, list[int]]()
    waiting = list[int]()
    for value, parts in inside.items():
        for part in parts:
            containers.setdefault(part, []).append(value)
            if part in targets:
                waiting.append(part)
    found = set[int]()
    while waiting:
        for value in containers.get(waiting.pop(), ()):
            if value not in found:
                found.add(value)
                waiting.append(value)
    return found


class _Apart(NamedTuple):
    """A value, taken apart.

    Attributes:
        value: the value.
        parts: what is directly in it.
        make: makes such a value of other parts; None if that cannot be done.
        shell: what ``make`` fills and returns, if the value may lead to itself.
    """

    value: Any
    parts: Sequence[Any]
    make: Callable[[list[Any]], Any] | None = None
    shell: Any = None


def _apart(value: Any) -> _Apart:
    # The garbage collector does not track what cannot lead to others, such as a dict of
    # words.
    if not gc.is_tracked(value) and not isinstance(value, np.ndarray):
        return _Apart(value, ())
    if of_class := _BY_CLASS.get(type(value)):
        return of_class(value)
    if isinstance(value, nnx.Pytree):
        return _object(value)
    if isinstance(value, functools.partial):
        return _partial(value)
    if isinstance(value, weakref.ref):  # A subclass may need other arguments.
        return _Apart(value, [value()])
    if isinstance(value, np.ndarray) and value.dtype == np.object_:
        return _Apart(value, value.ravel().tolist())
    if isinstance(value, (*_CLOSED, nnx.Variable)) or is_array(value):
        return _Apart(value, ())
    if not jax.tree_util.all_leaves([value]):
        return _pytree(value)
    attributes = vars(value) if type(value).__dictoffset__ else {}
    if '__wrapped__' in attributes:  # JAX and functools keep caches in such a function.
        return _Apart(value, [*attributes.values()])
    return _Apart(value, gc.get_referents(value))


def _object(value: Any) -> _Apart:
    """A module that is not in the graph, such as one that a property has cached."""
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
    args = [value.default_factory] if isinstance(value, collections.defaultdict) else []
    shell: Any = type(value)(*args)
    count = len(value)

    def make(new: list[Any]) -> Any:
        shell.update(zip(new[:count], new[count:], strict=True))
        return shell

    return _Apart(value, [*value, *value.values()], make, shell)


def _pytree(value: Any) -> _Apart:
    pairs, treedef = one_level(value)
    parts = [child for _, child in pairs]
    # Its static fields are in ``treedef``, and cannot be replaced.
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
    """A weak reference; the view keeps the copy alive to which the new one refers."""
    return _Apart(value, [value()], lambda new: type(value)(*new))


def _proxy(value: Any) -> _Apart:
    try:
        # This method is bound to the object that the proxy stands for.
        node = value.__init__.__self__
    except ReferenceError:
        return _Apart(value, ())
    return _Apart(value, [node], lambda new: weakref.proxy(*new))


_BY_CLASS: dict[type, Callable[[Any], _Apart]] = {
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

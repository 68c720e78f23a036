"""The static attributes of modules: whether they lead to layers of the model.

A ``functools.cached_property`` that returns layers, a partial or a bound method in an
attribute, a plain object: Flax takes these for static. A copy of the model has the same
objects, with the model's own layers in them. Flax's own ``nnx.grad`` makes such a copy,
too, and these layers get no gradient. So a view raises if it would call layers there
that read other values than its own.

A static value is searched to its end, since a function may call another one that has
the layers in its closure.
"""

from __future__ import annotations

import gc
import logging
import types
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_sg import errors
from flax_sg.errors.texts import brief
from flax_sg.filters.predicates import captured_by
from flax_sg.trees.leaves import is_array

# Classes of values with nothing in them.
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))
# Classes that are not searched. Code and classes are shared by the whole process, and a
# logger leads to records of what was logged, and so to whole models.
_CLOSED = type, types.ModuleType, types.CodeType, logging.Logger, nnx.Variable
_PROXIES = weakref.ProxyType, weakref.CallableProxyType


def check(value: object, owner: str, changed: Set[int], clean: dict[int, Any]) -> None:
    """Raises if a static value leads to a module that reads other values in a view.

    Args:
        value: the value.
        owner: the attribute that has it, for the error, such as ``'Model.run'``.
        changed: the modules and Variables that do, by ``id``.
        clean: parts that lead to none of these, by ``id``; gets those of the value.
    """
    met, waiting = dict[int, Any](), [value]
    while waiting:
        part = waiting.pop()
        if id(part) in changed:
            raise errors.ArgumentTypeError(
                f'{owner} holds modules of the model in {brief(value)}, which is no '
                'part of it.\n'
                'A view cannot replace them there. In plain Flax nnx.grad gives them '
                'no gradient.\n'
                'Write a method in place of a function, and an nnx.Module in place of '
                'an object.'
            )
        if id(part) not in met and id(part) not in clean:
            met[id(part)] = part  # Kept alive, so that no later object has its id.
            waiting += [x for x in _inside(part) if type(x) not in PLAIN]
    clean.update(met)


def _inside(value: Any) -> Sequence[Any]:
    """What is directly in a value."""
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.dtype == np.object_ else ()
    # The garbage collector does not track what cannot lead to others, such as a dict of
    # words.
    if not gc.is_tracked(value):
        return ()
    if isinstance(value, types.FunctionType):  # Not its globals, a whole module.
        return [*(x for _, x in captured_by(value)), *vars(value).values()]
    if isinstance(value, jax.tree_util.PyTreeDef):
        return [value.node_data()]
    if isinstance(value, weakref.ref):
        return [value()]
    if type(value) in _PROXIES:
        try:  # This method is bound to the object that the proxy stands for.
            return [value.__init__.__self__]
        except ReferenceError:
            return ()
    if isinstance(value, _CLOSED) or is_array(value):
        return ()
    attributes = vars(value) if type(value).__dictoffset__ else {}
    if '__wrapped__' in attributes:  # JAX and functools keep caches in such a function.
        return [*attributes.values()]
    return gc.get_referents(value)


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
    reached = set[int]()
    while waiting:
        for value in containers.get(waiting.pop(), ()):
            if value not in reached:
                reached.add(value)
                waiting.append(value)
    return reached

"""What modules hold outside of the graph, in a copy of a model.

A ``functools.cached_property`` that returns layers, a partial or a bound method in an
attribute, a plain object: Flax takes these for static, so they go on to hold the
model's own layers, and a view would call those. The layers are replaced wherever that
can be done. A closure, and an object of another class, cannot be made anew.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from flax_sg import errors
from flax_sg.errors.texts import brief
from flax_sg.filters.predicates import held_by
from flax_sg.trees.leaves import is_array

# Classes of values that hold nothing.
PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))


class Held:
    """Makes static values anew that hold modules of a model.

    Args:
        copies: what stands for modules and Variables, by the ``id`` of these.
        is_changed: whether a module or a container leads to other values than before.
            Of all others the model's own will do.
    """

    def __init__(
        self, copies: Mapping[int, Any], is_changed: Callable[[Any], bool]
    ) -> None:
        self._known, self._is_changed = dict(copies), is_changed

    def put(self, value: Any, node: Any, name: str, depth: int = 2) -> Any:
        """Returns the value itself, or one that holds the copies.

        Args:
            value: what is static.
            node: the module, for the error.
            name: the attribute.
            depth: how far functions and objects are looked through that hold others.

        Raises:
            ArgumentTypeError: if what leads to other values cannot be replaced.
        """
        if id(value) in self._known:
            return self._known[id(value)]
        self._known[id(value)] = value  # It may hold itself.
        parts, make = _apart(value)
        if make is None:
            parts = [x for _, x in held_by(value)]
            if type(value).__dictoffset__:
                parts += vars(value).values()
            parts = [x for x in parts if depth and type(x) not in PLAIN]
        new = [self.put(part, node, name, depth - (make is None)) for part in parts]
        changed = [x for x, y in zip(parts, new, strict=True) if x is not y]
        if changed and make is not None:
            self._known[id(value)] = make(new)
        elif any(self._is_changed(getattr(x, '__self__', x)) for x in changed):
            raise errors.ArgumentTypeError(
                f'{type(node).__name__}.{name} holds modules of the model in '
                f'{brief(value)}, which is no part of it.\n'
                'A view cannot replace them there: they would read what the model '
                'reads.\n'
                'Write a method in place of a function, and an nnx.Module in place of '
                'an object.'
            )
        return self._known[id(value)]


def _apart(value: Any) -> tuple[Sequence[Any], Callable[[Any], Any] | None]:
    """The parts of a value, and what makes one of other parts, if that can be done."""
    if isinstance(value, types.MethodType):
        return [value.__self__], lambda new: types.MethodType(value.__func__, *new)
    if isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
        return parts, lambda new: type(value)(new[0], *new[1], **new[2])
    if isinstance(value, (set, frozenset)):
        return [*value], type(value)
    if isinstance(value, (type, types.ModuleType, nnx.Variable)) or is_array(value):
        return [], lambda new: value
    if jax.tree_util.all_leaves([value]):
        return [], None
    root = iter([False])  # JAX asks for the value first, and it may hold itself.
    parts, treedef = jax.tree.flatten(value, is_leaf=lambda _: next(root, True))
    return parts, treedef.unflatten

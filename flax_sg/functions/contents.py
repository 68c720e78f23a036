"""Values that are compared by what they contain: containers, arrays, numbers."""

from __future__ import annotations

import collections
import types
from collections.abc import (
    Callable,
    Hashable,
    MutableMapping,
    MutableSequence,
    MutableSet,
)
from typing import Any, ClassVar

import jax
import numpy as np
from flax.core import FrozenDict

from flax_sg.functions.reads import WHOLE, Reads
from flax_sg.functions.statics import MISSING, find, mro_of
from flax_sg.functions.walks import ATOMS, Looks, Walk


class ContentWalk(Walk):
    """The part of a walk that looks at containers."""

    def _of_sequence(self, value: Any, _: Reads) -> Hashable:
        self.labels.append(('[', 0))
        out: list[Hashable] = [type(value)]
        for index, item in enumerate(value):
            self.labels[-1] = ('[', index)
            out.append(self._look(item))
        self.labels.pop()
        return tuple(out)

    def _of_set(self, value: Any, _: Reads) -> Hashable:
        return type(value), frozenset(map(self._look, value))

    def _of_mapping(self, value: Any, _: Reads) -> Hashable:
        out: list[Hashable] = [type(value)]
        for name, item in list(value.items()):
            out.append((self._look(name), self._below('[', name, item, WHOLE)))
        return tuple(out)

    def _of_default_dict(self, value: Any, reads: Reads) -> Hashable:
        return self._look(value.default_factory), self._of_mapping(value, reads)

    def _of_array(self, value: np.ndarray, reads: Reads) -> Hashable:
        if value.dtype.hasobject:
            return (
                'array',
                value.shape,
                self._of_sequence(value.ravel().tolist(), reads),
            )
        return 'array', value.dtype, value.shape, value.tobytes()

    def _of_bytearray(self, value: bytearray, _: Reads) -> Hashable:
        return bytearray, bytes(value)

    looks: ClassVar[Looks] = {
        **dict.fromkeys((list, tuple, collections.deque), _of_sequence),
        **dict.fromkeys((set, frozenset), _of_set),
        **dict.fromkeys(
            (
                *(dict, collections.OrderedDict, collections.Counter),
                *(types.MappingProxyType, FrozenDict),
            ),
            _of_mapping,
        ),
        collections.defaultdict: _of_default_dict,
        np.ndarray: _of_array,
        bytearray: _of_bytearray,
    }


# What subclasses of these hold beside their attributes, read without their code.
CONTENT: dict[type, Callable[[Any], Any]] = {
    list: lambda value: list(list.__iter__(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    set: lambda value: frozenset(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    int: int.__int__,
    float: float.__float__,
}


def is_content(cls: type) -> bool:
    """Whether a value of this type is compared by what it contains.

    That also holds for classes of containers written in Python: their attributes are
    all there is to them.
    """
    mro = mro_of(cls)
    return (
        cls in ATOMS
        or cls in ContentWalk.looks
        or any(base in mro for base in (*CONTENT, np.generic, np.dtype))
        or issubclass(cls, jax.Array)
        or (issubclass(cls, CONTAINERS) and find(cls, '__dict__') is not MISSING)
    )


CONTAINERS = (MutableMapping, MutableSequence, MutableSet)

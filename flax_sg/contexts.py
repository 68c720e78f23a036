"""Numbers that stand for what is in force, in the keys of JAX's trace caches.

JAX hashes and compares the number at every look-up in a cache. The same rewrites have
the same number wherever they are opened: with the path of the module in it, every
jitted helper would be traced again for each of 1,000 modules. Only a program that reads
variables inside a raw ``jax.jit`` or ``lax.scan`` can tell owners apart, and does so
from the first such read on. By then its trace has its number, and a block of another
thread may be open: so a number is used for the blocks of one owner at a time.

The values that a rule brings are a part of what is meant by an owner here: where they
are arguments of what is traced, other values of the same kind find the same trace.
"""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Hashable
from typing import Any, Protocol

from flax_sg import errors

if 'Number' in globals():  # It was loaded before.
    raise errors.ReloadError(__name__)


class Block(Protocol):
    """What a number depends on, of an open block."""

    key: Hashable

    @property
    def owner_key(self) -> Hashable:
        """Where the module is that opened the block, and which values it brings."""
        ...


class Number:
    """A number in use: nobody has it for other owners while this object lives.

    Attributes:
        value: the number.
        rewrites: what is in force.
        owners: the modules that opened the blocks.
        is_apart: whether it will never be used for others.
    """

    def __init__(self, value: int, rewrites: Hashable, owners: Hashable) -> None:
        self.value = value
        self.rewrites = rewrites
        self.owners = owners
        self.is_apart = False


# By rewrites and owners, or where these are not told apart by rewrites and a place in
# the row of the numbers that they share: as many as there are owners at a time.
_contexts: collections.OrderedDict[tuple[Any, Hashable], int] = (
    collections.OrderedDict()
)
_told_apart: set[Hashable] = set()
_in_use: weakref.WeakValueDictionary[int, Number] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_numbers = itertools.count(1)
_SIZE = 4096


def number_of(rewrites: Hashable, owners: Hashable) -> Number:
    """A number for what is in force, the same for equal rewrites.

    A number is never given twice: rewrites that were forgotten meanwhile retrace, they
    find nothing stale.

    Args:
        rewrites: what is in force.
        owners: the modules that opened the blocks.
    """
    with _lock:
        place: Any = owners if rewrites in _told_apart else 0
        number = _take((rewrites, place), owners)
        while number.owners != owners:
            place += 1
            number = _take((rewrites, place), owners)
        if len(_contexts) > _SIZE:
            _contexts.popitem(last=False)
    return number


def _take(key: tuple[Any, Hashable], owners: Hashable) -> Number:
    value = _contexts.pop(key, None)
    if value is None:
        value = next(_numbers)
    _contexts[key] = value
    number = _in_use.get(value)
    if number is None:
        number = _in_use[value] = Number(value, key[0], owners)
    return number


def forget(rewrite: Hashable) -> None:
    """Lets nobody find what was traced under this rewrite again."""
    with _lock:
        for key in [key for key in _contexts if rewrite in key[0]]:
            del _contexts[key]


def tell_apart(number: Number) -> None:
    """Gives these rewrites another number for each owner from now on.

    Those in use stay those of the owners that use them.
    """
    rewrites = number.rewrites
    with _lock:
        number.is_apart = True
        _told_apart.add(rewrites)
        place = 0
        while (value := _contexts.pop((rewrites, place), None)) is not None:
            place += 1
            user = _in_use.get(value)
            if user is not None:
                _contexts[rewrites, user.owners] = value


class InUse:
    """The numbers that one thread uses, from when a block is opened to its end.

    Others may be entered meanwhile, for blocks further inside or without some of these,
    and a trace may go on that has begun under any of them.
    """

    def __init__(self) -> None:
        self._of: dict[tuple[Block, ...], Number] = {}

    def __call__(self, blocks: tuple[Block, ...]) -> int:
        """The number for these open blocks."""
        number = self._of.get(blocks)
        if number is None:
            rewrites = tuple(block.key for block in blocks)
            owners = tuple(block.owner_key for block in blocks)
            number = self._of[blocks] = number_of(rewrites, owners)
        return number.value

    def forget(self, block: Block) -> None:
        """Lets go of the numbers for a block that is closed."""
        self._of = {key: n for key, n in self._of.items() if block not in key}

    def tell_apart(self) -> None:
        """Keeps all that is being traced here for the owners of the open blocks."""
        for number in self._of.values():
            if not number.is_apart:
                tell_apart(number)

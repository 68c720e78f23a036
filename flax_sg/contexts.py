"""Numbers that stand for what is in force, in the keys of JAX's trace caches.

JAX hashes and compares the number at every look-up in a cache. The same rewrites have
the same number wherever they are opened: with the path of the module in it, every
jitted helper would be traced again for each of 1,000 modules. Only a program that reads
variables inside a raw ``jax.jit`` or ``lax.scan`` can tell owners apart, and does so
from the first such read on.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Hashable
from typing import Any

_contexts: collections.OrderedDict[Hashable, int] = collections.OrderedDict()
_told_apart: set[Hashable] = set()
_lock = threading.Lock()
_numbers = itertools.count(1)
_SIZE = 4096


def number_of(rewrites: Hashable, owners: Hashable) -> int:
    """A number for what is in force, the same for equal rewrites.

    A number is never given twice: rewrites that were forgotten meanwhile retrace, they
    find nothing stale.

    Args:
        rewrites: what is in force.
        owners: the paths of the modules that opened the blocks.
    """
    with _lock:
        key = (rewrites, owners) if rewrites in _told_apart else rewrites
        number = _contexts.pop(key, None)
        if number is None:
            number = next(_numbers)
        _contexts[key] = number
        if len(_contexts) > _SIZE:
            _contexts.popitem(last=False)
    return number


def forget(rewrite: Hashable) -> None:
    """Lets nobody find what was traced under this rewrite again."""
    with _lock:
        for key in [key for key in _contexts if rewrite in _rewrites_of(key)]:
            del _contexts[key]


def _rewrites_of(key: Any) -> tuple[Hashable, ...]:
    return key[0] if key and isinstance(key[0], tuple) else key


def tell_apart(rewrites: Hashable, owners: Hashable) -> None:
    """Gives these rewrites another number for each owner from now on.

    The number that they have stays that of the owners for which they are open now.
    """
    with _lock:
        if rewrites not in _told_apart:
            _told_apart.add(rewrites)
            if rewrites in _contexts:
                _contexts[rewrites, owners] = _contexts.pop(rewrites)

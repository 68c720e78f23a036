"""A table of objects, which remembers each of them as long as it lives."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar('T')


class ByIdentity(Generic[T]):
    """A table of objects, told by identity, that keeps none of them alive.

    ``weakref.WeakKeyDictionary`` asks for hashes and compares by value, and is slow.
    """

    def __init__(self) -> None:
        self.known: dict[int, tuple[weakref.ref[Any], T]] = {}
        # The garbage collector may call ``forget`` at any time.
        self.lock = threading.RLock()

    def get(self, key: object) -> T | None:
        """Returns what was put in for an object, or None."""
        entry = self.known.get(id(key))
        return None if entry is None or entry[0]() is not key else entry[1]

    def __iter__(self) -> Iterator[Any]:
        """Yields the objects that are alive."""
        for ref, _ in self.known.copy().values():
            if (key := ref()) is not None:
                yield key

    def put(self, key: object, value: T) -> None:
        """Puts in a value; raises TypeError for what nothing can refer to weakly."""
        identity = id(key)
        ref = weakref.ref(key, lambda _: self.forget(identity))
        with self.lock:
            self.known[identity] = ref, value

    def forget(self, identity: int) -> None:
        """Removes the entry of an object that is gone."""
        with self.lock:
            entry = self.known.get(identity)
            # A later object may have the same ``id`` already: its entry stays.
            if entry is not None and entry[0]() is None:
                del self.known[identity]

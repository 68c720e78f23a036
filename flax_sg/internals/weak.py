"""What is remembered of objects as long as they live."""

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

    def get(self, key: Any) -> T | None:
        """Returns what was put in for an object, or None."""
        found = self.known.get(id(key))
        return None if found is None or found[0]() is not key else found[1]

    def __iter__(self) -> Iterator[Any]:
        """Yields the objects that are alive."""
        for ref, _ in self.known.copy().values():
            if (key := ref()) is not None:
                yield key

    def put(self, key: Any, value: T) -> None:
        """Puts in a value; raises TypeError for what nothing can refer to weakly."""
        number = id(key)
        ref = weakref.ref(key, lambda _: self.forget(number))
        with self.lock:
            self.known[number] = ref, value

    def forget(self, number: int) -> None:
        """Removes the entry of an object that is gone."""
        with self.lock:
            found = self.known.get(number)
            if found is not None and found[0]() is None:  # No later object's entry.
                del self.known[number]

"""Some rows of a product, in which the values take turns."""

from collections.abc import Collection
from typing import Any


def in_turn(
    first: Collection[Any], *others: Collection[Any], times: int = 1
) -> list[tuple[Any, ...]]:
    """Rows with each of the first, ``times`` times: each time with others beside it."""
    rest = [list(of) for of in others]
    return [
        (one, *(of[(n + turn) % len(of)] for of in rest))
        for turn in range(times)
        for n, one in enumerate(first)
    ]

"""Which values are kept: the fewest bytes between what is fixed and what changes."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping


def cheapest_cut(
    sizes: Mapping[int, int], makers: Mapping[int, Iterable[int]], read: Iterable[int]
) -> set[int]:
    """The values to keep, so that all that is read can be made of them.

    A value that is cheap may be made again of others; any other must be kept, or be
    needed for none that is made again. This is a smallest cut of vertices in a graph.

    >>> sorted(cheapest_cut({1: 8, 2: 32, 3: 32}, {2: [1], 3: [1]}, [2, 3]))
    [1]
    >>> sorted(cheapest_cut({1: 8, 2: 2}, {2: [1]}, [2]))
    [2]

    Args:
        sizes: the bytes of each value.
        makers: for each value that is cheap the values that it is made of.
        read: the values that are needed.
    """
    # Each value is an edge from (value, 0) to (value, 1), which may carry its bytes.
    source, sink = (-1, 0), (-1, 1)
    capacity: dict[tuple[int, int], dict[tuple[int, int], float]] = {}

    def join(start: tuple[int, int], end: tuple[int, int], room: float) -> None:
        capacity.setdefault(start, {})[end] = room
        capacity.setdefault(end, {}).setdefault(start, 0)

    needed, todo = set[int](), list(read)
    for value in todo:
        join((value, 1), sink, math.inf)
    while todo:
        value = todo.pop()
        if value in needed:
            continue
        needed.add(value)
        # Without a size nothing would hold two values apart.
        join((value, 0), (value, 1), max(sizes[value], 1))
        if value not in makers:
            join(source, (value, 0), math.inf)
            continue
        for origin in makers[value]:
            join((origin, 1), (value, 0), math.inf)
            todo.append(origin)
    if source not in capacity:
        return set()
    while path := _path(capacity, source, sink):
        steps = list(itertools.pairwise(path))
        room = min(capacity[start][end] for start, end in steps)
        for start, end in steps:
            capacity[start][end] -= room
            capacity[end][start] += room
    # Of two cuts of one size the one closer to the end: less is made again.
    behind, todo_nodes = {sink}, [sink]
    while todo_nodes:
        node = todo_nodes.pop()
        for other in capacity[node]:
            if other not in behind and capacity[other][node] > 0:
                behind.add(other)
                todo_nodes.append(other)
    return {v for v in needed if (v, 1) in behind and (v, 0) not in behind}


def _path(
    capacity: Mapping[tuple[int, int], Mapping[tuple[int, int], float]],
    source: tuple[int, int],
    sink: tuple[int, int],
) -> list[tuple[int, int]]:
    """A shortest path with room left; empty if there is none."""
    came: dict[tuple[int, int], tuple[int, int]] = {source: source}
    queue = deque([source])
    while queue:
        node = queue.popleft()
        if node == sink:
            path = [sink]
            while path[-1] != source:
                path.append(came[path[-1]])
            return path[::-1]
        for other, room in capacity[node].items():
            if room > 0 and other not in came:
                came[other] = node
                queue.append(other)
    return []

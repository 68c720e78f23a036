"""Facts that travel with the variables of ``nn.jit``.

``nn.jit`` shares one trace among modules at different paths, and on a cache hit it runs
no Python. So what a trace depends on, and what it did, are pytree nodes without leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeAlias

import jax

# Groups of variables, each with a dict of collections for each scope.
Groups: TypeAlias = tuple[tuple[dict[str, Any], ...], ...]

_NAME = '\0flax_sg'  # A name that no user gives to a collection.


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Mark:
    """Facts, as a part of the structure of a pytree: all that JAX compares."""

    facts: Hashable


def map_groups(fn: Callable[[int, dict[str, Any]], Any], groups: Groups) -> Groups:
    """Maps over the groups of collections; ``fn`` gets the index of their scope."""
    return tuple(
        tuple(fn(index, group) for index, group in enumerate(of_scopes))
        for of_scopes in groups
    )


def added(groups: Groups, facts: Hashable) -> Groups:
    """The groups with facts; as they are, if no scope is there to carry facts."""
    if not (groups and groups[0]):
        return groups
    first, *later = groups[0]
    return (({**first, _NAME: _Mark(facts)}, *later), *groups[1:])


def facts_of(groups: Groups) -> Iterator[Any]:
    """Yields the facts that came with groups."""
    for group in groups[0] if groups else ():
        if _NAME in group:
            yield group[_NAME].facts


def without(groups: Groups) -> Groups:
    """The groups as Flax made them."""
    return map_groups(
        lambda _, group: {col: tree for col, tree in group.items() if col != _NAME},
        groups,
    )

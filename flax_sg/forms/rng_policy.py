"""The random numbers that a view of a module draws: its own, beside the module's."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import Any

from flax_sg import errors
from flax_sg.internals import core_scopes, modules

SAME = 'same'
FRESH = 'fresh'
CHOICES = {
    SAME: 'the n-th call draws what the n-th call of the module does, and leaves the '
    'draws of the module alone',
    FRESH: 'each call draws new numbers, as another call of the module would',
}


class _OfViews:
    """The key, among the counts of a scope's draws, of those of its views."""


_OF_VIEWS: Any = _OfViews()


def check(choice: Any) -> None:
    """Raises for what is no choice."""
    if choice not in CHOICES:
        raise errors.unknown_choice('rngs', choice, CHOICES)


@contextlib.contextmanager
def handled(module: Any, choice: str) -> Generator[None]:
    """Lets a bound module draw as the choice says, in the body."""
    with contextlib.ExitStack() as stack:
        if choice == SAME:
            for scope in modules.own_scopes(module):
                # What initializers draw has to differ from parameter to parameter.
                kept = 'params' if scope.get_flag('initializing', False) else None
                stack.enter_context(_counted_apart(scope.rng_counters, kept))
        yield


@contextlib.contextmanager
def _counted_apart(counts: dict[Any, Any], kept: str | None) -> Generator[None]:
    # In the scope's own dict: there Flax carries it through its transforms.
    of_views = counts.pop(_OF_VIEWS, {})
    of_module = core_scopes.copied(counts)
    _set(counts, of_views, kept)
    try:
        yield
    finally:
        of_views = core_scopes.copied(counts)
        counts.pop(_OF_VIEWS, None)
        _set(counts, of_module, kept)
        if _any(of_views):
            counts[_OF_VIEWS] = of_views


def _set(counts: dict[Any, Any], wanted: Mapping[Any, Any], kept: str | None) -> None:
    for key, count in counts.items():
        if isinstance(count, dict):
            _set(count, wanted.get(key, {}), kept)
        elif key != kept:
            counts[key] = wanted.get(key, 0)


def _any(counts: Mapping[Any, Any]) -> bool:
    return any(_any(c) if isinstance(c, Mapping) else c for c in counts.values())

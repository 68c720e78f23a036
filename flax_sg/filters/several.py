"""The error for several filters that are given as arguments of their own."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from flax_sg import errors
from flax_sg.filters.expressions import Filter

F = TypeVar('F', bound=Callable[..., Any])

# What is surely a filter, and no target or number in its place.
FILTERS = str, re.Pattern, Filter


def takes_one(call: str, name: str = 'where') -> Callable[[F], F]:
    """Decorates a function of one filter: it says how to write several.

    Args:
        call: how the function is called, with ``{}`` for the filter.
        name: the parameter that is the filter.
    """

    def decorate(fn: F) -> F:
        parameters = inspect.signature(fn).parameters
        place = [*parameters].index(name)
        most = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())

        @functools.wraps(fn)
        def with_one(*args: Any, **kwargs: Any) -> Any:
            if len(args) > most:
                check_one(call, args[place:])
            return fn(*args, **kwargs)

        out: Any = with_one
        return out

    return decorate


def check_one(call: str, args: Sequence[Any]) -> None:
    """Raises if the first of too many arguments are filters.

    Args:
        call: the call, with ``{}`` for the filter.
        args: the arguments from the filter on.
    """
    several = [*itertools.takewhile(lambda arg: isinstance(arg, FILTERS), args)]
    if len(several) > 1:
        shown = [f'{each!r}' if isinstance(each, str) else 'where' for each in several]
        raise errors.ArgumentTypeError(
            f'{call.partition("(")[0]} was given {len(several)} filters as separate '
            'arguments.\n'
            f'Write them as a list: {call.format("[" + ", ".join(shown) + "]")}.'
        )

"""How rewrites are spelled: a value for ``with`` and ``@``, or the target first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flax_sg import errors, filters
from flax_sg.forms import rewrites
from flax_sg.forms.lifted import methods_without_class, not_liftable


class _LeftOut:
    """No argument; signatures, as editors and the reference show them, say so."""

    def __repr__(self) -> str:
        return 'LEFT_OUT'


LEFT_OUT: Any = _LeftOut()


def filter_of(name: str, target: Any, where: Any) -> filters.Filter:
    """The filter that is asked for; the only positional argument is the filter."""
    if where is LEFT_OUT:
        where = target
    if where is LEFT_OUT:
        raise errors.FilterTypeError(
            f'{name}() takes a filter that says which parameters are meant, such as '
            f"{name}('encoder/**')."
        )
    return filters.as_filter(where)


def lifted(
    rewrite: rewrites.Rewrite, target: Any, argument: Any, methods: Any, name: str = ''
) -> Any:
    """The lifted target; the rewrite itself if there is no target.

    Args:
        rewrite: what is asked for.
        target: the first positional argument.
        argument: the second one; without it the first is no target.
        methods: the names of the methods of a class that are lifted.
        name: how to name the second argument where the first is no target; by default
            a list of both will do.
    """
    if target is not LEFT_OUT and argument is not LEFT_OUT:
        if isinstance(target, (str, Mapping, Sequence, re.Pattern, filters.Filter)):
            if name:
                fix = f'To say which variables write {name}={argument!r}.'
            else:
                fix = f'For several filters write [{target!r}, {argument!r}].'
            raise not_liftable(target, fix)
        return rewrite.lift(target, methods)
    if methods is not None:
        raise methods_without_class(methods)
    return rewrite

"""Filters: values that say which variables are meant.

A filter is called with a ``Path`` and returns a bool. A filter is immutable, compares
and hashes by what it says, prints as the expression to write, pickles, and combines
with ``~ & |``. ``as_filter`` makes one of whatever users write in place of a filter.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import numpy as np

from flax_sg import errors
from flax_sg.errors.texts import brief
from flax_sg.filters.expressions import And, Constant, Filter, Not, Or
from flax_sg.filters.expressions import negated as negated
from flax_sg.filters.indices import Index as Index
from flax_sg.filters.indices import Part as Part
from flax_sg.filters.indices import at
from flax_sg.filters.indices import merged as merged
from flax_sg.filters.names import BoolTree, of_type
from flax_sg.filters.names import Derived as Derived
from flax_sg.filters.names import Names as Names
from flax_sg.filters.names import OfType as OfType
from flax_sg.filters.paths import Path
from flax_sg.filters.patterns import Glob, Regex
from flax_sg.filters.predicates import Predicate, innermost

# What stands for a filter; as_filter explains the members.
Where: TypeAlias = (
    Filter
    | str
    | bool
    | np.bool_
    | re.Pattern[str]
    | Callable[[Path], bool | np.bool_]
    | Mapping[str, Any]
    | Sequence[Any]
    | Set[Any]
)


def as_filter(where: Where) -> Filter:
    """Makes a filter of a glob, a function, a bool, or whatever else names variables.

    Blocks, ``sg.grad``, ``sg.freeze`` and the like do this with what they are given.
    Call it yourself to combine filters with ``~ & |``.

    >>> as_filter(['gln_*/**', 'dec/**']) & ~as_filter('**/bias')
    (Glob('gln_*/**') | Glob('dec/**')) & ~Glob('**/bias')

    Args:
        where: one of

            * a str: a glob on whole path components, see ``Glob``; the path of a
              variable means that variable;
            * a ``sg.Path``: the variables at this path, in any collection;
            * a ``re.Pattern`` that has to match the whole path, see ``Regex``;
            * a function of the path that returns a bool, see ``Predicate``;
            * True or False: every variable, or none;
            * a dict of bools, nested as the variables are, see ``BoolTree``;
            * a sequence or set of these: any of them;
            * a filter: itself.

    Raises:
        FilterTypeError: for anything else, with what to write instead; and for a
            function that reads a traced value.
        FilterValueError: for a glob that no path can fit.
    """
    if isinstance(where, Filter):
        return where
    if isinstance(where, str):
        if isinstance(where, Path) and _SPECIAL.search(where):
            return Regex(re.compile(re.escape(where)))
        return _glob(str(where))
    if isinstance(where, re.Pattern):
        return Regex(where)
    if isinstance(where, (bool, np.bool_)):
        return Constant(bool(where))
    if isinstance(where, (nn.Module, bytes, *_VALUES)):
        raise _no_filter(where)
    if isinstance(where, Mapping):
        return BoolTree(where)
    if isinstance(where, (Sequence, Set)):
        parts = [as_filter(part) for part in where]
        if isinstance(where, Set):  # The order of a set differs from run to run.
            parts.sort(key=repr)
        any_of = Or(tuple(parts))
        return any_of if len(any_of.filters) > 1 else (*parts, Constant(False))[0]
    if callable(where) and not isinstance(innermost(where), type):
        return Predicate(where)
    raise _no_filter(where)


_VALUES = (jax.Array, np.ndarray, np.generic)
# What a sg.Path may hold, and a glob gives another meaning.
_SPECIAL = re.compile(r'[*?\[\\!]|//|/$|^$')


def _no_filter(where: Any) -> errors.FilterTypeError:
    """The error for what is no filter, with what to write instead."""
    cls, fix = innermost(where), "Write a glob such as 'encoder/**'."
    if isinstance(cls, type) and issubclass(cls, nn.Module):
        of_flax = getattr(nn, cls.__name__, None) is cls
        name = f'nn.{cls.__name__}' if of_flax else cls.__name__
        fix = f'To lift the class, write nn.stop_gradient({name}, where).'
    elif isinstance(where, nn.Module):
        fix = (
            'Open a block around the call, `with nn.stop_gradient(where): ...`, or '
            'wrap the module: nn.Frozen(module, where).'
        )
    elif isinstance(where, _VALUES):
        fix = 'To stop the gradient of a value, write jax.lax.stop_gradient(x).'
    return errors.FilterTypeError(
        f'{brief(cls if isinstance(cls, type) else where)} is no filter.\n'
        'A filter is a glob, a compiled regular expression, a function of the path, a '
        f'bool, a tree of bools, or a list of these.\n{fix}'
    )


_glob = functools.lru_cache(1024)(Glob)  # A step opens the same blocks each time.

Filter.convert = staticmethod(as_filter)

__all__ = [
    'And',
    'BoolTree',
    'Constant',
    'Filter',
    'Glob',
    'Not',
    'Or',
    'Predicate',
    'Regex',
    'Where',
    'as_filter',
    'at',
    'of_type',
]

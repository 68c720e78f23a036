"""Filters: values that say which variables are meant.

A filter is called with a ``Path`` and returns a bool. It is immutable, compares and
hashes by what it says, prints as the expression to write, pickles, and combines with
``~ & |``. ``as_filter`` makes one of anything that users write in place of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np

from flax_sg import errors
from flax_sg.filters.atoms import Glob, Predicate, Regex
from flax_sg.filters.booltrees import BoolTree
from flax_sg.filters.classes import OfType, of_type
from flax_sg.filters.expressions import And, Constant, Filter, Not, Or
from flax_sg.filters.indices import Index, Part, at, merged, negated
from flax_sg.filters.names import Derived, Names
from flax_sg.filters.paths import Path
from flax_sg.filters.refusals import KINDS, brief, fix_of, refuse_target

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
    """Returns the filter that something stands for.

    >>> as_filter(['gln_*/**', 'dec/**']) & ~as_filter('**/bias')
    (Glob('gln_*/**') | Glob('dec/**')) & ~Glob('**/bias')

    Args:
        where: one of

            * a str: a glob on whole path components, see ``Glob``; one that is the path
              of a variable means that variable;
            * a ``sg.Path``: the variables at this path, in any collection;
            * a ``re.Pattern`` that has to match the whole path, see ``Regex``;
            * a function of the path that returns a bool, see ``Predicate``;
            * True or False: every variable, or none;
            * a dict of bools, nested as the variables are, see ``BoolTree``;
            * a sequence or set of these: any of them;
            * a filter: itself.

    Raises:
        FilterTypeError: for anything else, with what to write instead.
        FilterValueError: for a glob that can mean nothing.
        FilterTypeError: for a function that reads a traced value.
    """
    if isinstance(where, Filter):
        return where
    if isinstance(where, Path):
        return Glob.of_path(str(where))
    if isinstance(where, str):
        return Glob(str(where))
    if isinstance(where, re.Pattern):
        return Regex(where)
    if isinstance(where, (bool, np.bool_)):
        return Constant(bool(where))
    refuse_target(where)
    if isinstance(where, Mapping):
        return BoolTree(where)
    if isinstance(where, (Sequence, Set)) and not isinstance(where, _NO_SEQUENCES):
        parts = [as_filter(part) for part in where]
        if isinstance(where, Set):  # The order of a set differs from run to run.
            parts.sort(key=repr)
        any_of = Or(tuple(parts))
        return any_of if len(any_of.filters) > 1 else (*parts, Constant(False))[0]
    if callable(where):
        return Predicate(where)
    raise errors.FilterTypeError(
        f'{brief(where)} is no filter.\n{KINDS}{fix_of(where)}'
    )


_NO_SEQUENCES = (bytes, bytearray, memoryview)

Filter.convert = staticmethod(as_filter)

__all__ = [
    'And',
    'BoolTree',
    'Constant',
    'Derived',
    'Filter',
    'Glob',
    'Index',
    'Names',
    'Not',
    'OfType',
    'Or',
    'Part',
    'Predicate',
    'Regex',
    'Where',
    'as_filter',
    'at',
    'merged',
    'negated',
    'of_type',
]

"""Filters: values that say which variables are meant.

A filter is called with a ``Path`` and returns a bool. A filter is immutable, compares
and hashes by what it says, prints as the expression to write, pickles, and combines
with ``~ & |``. ``where`` makes one of whatever users write in place of a filter.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import flax.linen as nn
import jax
import numpy as np

from flax_sg import errors
from flax_sg.errors.texts import brief
from flax_sg.filters.classes import of_type
from flax_sg.filters.conditions import condition, is_condition
from flax_sg.filters.expressions import And as And
from flax_sg.filters.expressions import Constant as Constant
from flax_sg.filters.expressions import Filter, Or
from flax_sg.filters.expressions import Not as Not
from flax_sg.filters.expressions import Trained as Trained
from flax_sg.filters.expressions import named as named
from flax_sg.filters.expressions import negated as negated
from flax_sg.filters.indices import Index as Index
from flax_sg.filters.indices import Part as Part
from flax_sg.filters.indices import Unclear as Unclear
from flax_sg.filters.indices import merged as merged
from flax_sg.filters.indices import part_of as part_of
from flax_sg.filters.indices import within as within
from flax_sg.filters.names import BoolTree, Collection, is_bool
from flax_sg.filters.names import Derived as Derived
from flax_sg.filters.names import Names as Names
from flax_sg.filters.names import conditional as conditional
from flax_sg.filters.names import plain as plain
from flax_sg.filters.paths import Path
from flax_sg.filters.patterns import Glob, Regex
from flax_sg.filters.predicates import Predicate, innermost
from flax_sg.internals.optional import is_nnx_model, is_of_nnx
from flax_sg.internals.types import is_meant as is_meant

# What stands for a filter; ``where`` explains the members.
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


def where(what: Where, /, *others: Where) -> Filter:
    """Makes a filter of a glob, a function, a bool, or whatever else names variables.

    Blocks, ``sg.grad``, ``sg.freeze`` and the like do this with what they are given.
    Call it yourself to combine filters with ``~ & |``: all but the head, or all biases
    of two modules.

    >>> import flax_sg as sg
    >>> ~sg.where('head/**'), sg.where('enc/**', 'dec/**') & '**/bias'
    (~Glob('head/**'), (Glob('enc/**') | Glob('dec/**')) & Glob('**/bias'))

    A filter may hold while a *condition* does. Its bool may be traced, so one compiled
    program serves all steps. Its gradient is a ``jnp.where`` of the condition:

    >>> import jax
    >>> @jax.jit
    ... def gradients(params, step):
    ...     def loss(params):
    ...         frozen = sg.where('last/**') & (step < 2)
    ...         params = sg.stop_gradient(params, frozen)
    ...         return params['last']['w'] * params['body']['w']
    ...     return jax.grad(loss)(params)
    >>> params = {'body': {'w': 2.0}, 'last': {'w': 3.0}}
    >>> [float(gradients(params, step)['last']['w']) for step in range(4)]
    [0.0, 0.0, 2.0, 2.0]

    Args:
        what: one of

            * a str: a glob on whole path components: ``*`` stands for any name, ``**``
              for any number of names, ``{0..11}`` for numbers, ``{a,b}`` for one of
              these; the path of a variable means that variable;
            * a ``sg.Path``: the variables at this path, in any collection;
            * a ``re.Pattern`` that has to match the whole path;
            * a function of the path that returns a bool;
            * True or False, also as an array: every variable, or none. A traced bool is
              a condition, see below;
            * a tree of bools, nested as the variables are: dicts,
              lists, named tuples or any other pytree, as ``sg.mask`` returns it; an
              array of bools in the shape of a variable marks its elements;
            * a sequence or set of globs and other filters: any of them;
            * a filter: itself.
        *others: more of these: any of all that are given.

    Returns:
        A filter. It is called with a ``sg.Path``, and has ``~ & |``, of which the other
        side may be anything of this list.

    Raises:
        FilterTypeError: for anything else, with what to write instead; and for a
            function that reads a traced value.
        ArgumentValueError: for a glob that no path can fit.
    """
    return _any_of([what, *others]) if others else as_filter(what)


def as_filter(where: Where) -> Filter:
    """Makes the filter of whatever stands for one; ``where`` lists what does."""
    if isinstance(where, Filter):
        return where
    if isinstance(where, str):
        if isinstance(where, Path) and _SPECIAL.search(where):
            return Regex(re.compile(re.escape(where)))
        return _glob(str.__str__(where))  # Of an enum too, the text alone.
    if isinstance(where, re.Pattern):
        return Regex(where)
    if is_condition(where):
        return condition(where)
    if isinstance(where, nn.Variable) or is_of_nnx(type(where), 'Variable'):
        raise errors.FilterTypeError(
            f'{brief(where)} is no filter: a filter names Variables by their paths.\n'
            "Write its path, as sg.paths(model) lists it: 'encoder/kernel'; for all "
            'Variables of a type, kind=nnx.Param in a view of NNX.'
        )
    fn = innermost(where)
    if callable(where) and isinstance(fn, types.FunctionType):
        return Predicate(where)
    if isinstance(where, Mapping) or _is_tree_of_bools(where):
        return BoolTree(where)
    if isinstance(where, (Sequence, Set)) and not isinstance(where, bytes):
        return _any_of(where)
    is_module = isinstance(fn, (type, nn.Module)) or is_nnx_model(fn)
    if callable(where) and not is_module:
        return Predicate(where)
    lacking = ' Was a key of a configuration misspelled?' if where is None else ''
    raise errors.FilterTypeError(
        f'{brief(fn)} is no filter.{lacking}\n'
        'A filter is a glob, a compiled regular expression, a function of the path, a '
        f'bool, a tree of bools, or a list of these.{_instead(fn)}'
    )


def _instead(value: Any) -> str:
    """What to write, if what should be a filter is what should be frozen."""
    if is_nnx_model(value):
        write = 'a model of NNX write nnx.stop_gradient(model, where)'
    elif isinstance(value, nn.Module):
        write = 'a module write nn.Frozen(module, where)'
    elif isinstance(value, type) and issubclass(value, nn.Module):
        write = 'a Module class write nn.stop_gradient(nn.Dense, where)'
    elif isinstance(value, type):
        write = 'a type of Variables write kind=nnx.Param in a view of NNX'
    elif isinstance(value, (jax.Array, np.ndarray)):
        write = 'an array write jax.lax.stop_gradient(x)'
    else:
        return ''
    return f'\nFor {write}.'


def _any_of(alternatives: Sequence[Any] | Set[Any]) -> Filter:
    if any(map(is_condition, alternatives)):
        raise errors.FilterTypeError(
            'Several filters select what any of them selects, and one of them is a '
            'bool.\n'
            'Leave the bool out. '
            "For a condition write sg.where('encoder/**') & (step < k)."
        )
    parts = [as_filter(part) for part in alternatives]
    if isinstance(alternatives, Set):  # The order of a set differs from run to run.
        parts.sort(key=repr)
    any_of = Or(tuple(parts))
    return any_of if len(any_of.filters) > 1 else (*parts, Constant(False))[0]


def _is_tree_of_bools(where: Any) -> bool:
    """Whether something is a container of bools, and of nothing else."""
    # A partial function is a container for JAX. An iterator could be read only once.
    if isinstance(where, (str, bytes, Set, Iterator, functools.partial)):
        return False
    leaves = jax.tree.leaves(plain(where))
    return bool(leaves) and all(map(is_bool, leaves))


# Characters that a sg.Path may have, and to which a glob gives a meaning.
_SPECIAL = re.compile(r'[*?\[\\{]|//|/$|^$')


_glob = functools.lru_cache(1024)(Glob)  # A step opens the same blocks each time.

Filter.convert = staticmethod(as_filter)

__all__ = ['Collection', 'Filter', 'Where', 'of_type']


def __dir__() -> list[str]:
    return __all__

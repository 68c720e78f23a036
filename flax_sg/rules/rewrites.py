"""What people write, ``scale_gradient(where, factor)``, checked, as a rewrite.

Blocks of linen and views of NNX models take their rewrites from here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np
from flax.core.scope import CollectionFilter

from flax_sg import errors, filters
from flax_sg.errors.texts import brief, shown, unknown_choice, wrong_argument
from flax_sg.filters import predicates
from flax_sg.internals import modules, tracing
from flax_sg.internals.places import Place, warn_once
from flax_sg.rules import cotangents, rules, substitutes
from flax_sg.rules.rules import Rewrite
from flax_sg.trees.leaves import ABSENT, Absent, collections_of


def stop_gradient(
    where: filters.Where,
    *,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
    levels: int | None = None,
) -> Rewrite:
    """Readers see the variables without a gradient.

    >>> stop_gradient('encoder/**')
    stop_gradient(Glob('encoder/**'))
    """
    if levels not in (None, 1):
        raise unknown_choice('levels', levels, (None, 1))
    rule = rules.StopGradient(levels)
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def train_only(
    where: filters.Where,
    *,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Readers see all other variables without a gradient.

    >>> train_only('head/**')
    stop_gradient(~Glob('head/**'))
    """
    trained = filters.named(filters.as_filter(where), 'trained', 'nn.train_only({})')
    stopped, rule = ~trained, rules.StopGradient()
    is_empty = isinstance(where, (Sequence, Set)) and not where
    if is_empty and unused != 'ignore':
        warn_once(
            f'nn.train_only({where!r}) trains nothing: it names no parameter.\n'
            'Name what is trained, or write nn.stop_gradient(True) if that is meant.',
            Place.here(),
        )
    return Rewrite(stopped, rule, collections, unused)


def read_only(
    where: filters.Where,
    *,
    collections: CollectionFilter = True,
    unused: str = 'raise',
) -> Rewrite:
    """Readers see the stored values, and writing raises.

    >>> read_only('encoder/**')
    read_only(Glob('encoder/**'), collections=True)
    """
    rule = rules.ReadOnly()
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def substitute(
    values: Any,
    *,
    where: filters.Where | Absent = ABSENT,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Readers see other values.

    >>> substitute(lambda path, value: 2 * value, where='bias').where
    Glob('bias')
    """
    if isinstance(values, Mapping) and collections == 'params':
        # With the collections on top, as ``init`` returns variables, or without.
        collections = [*collections_of(values)] or collections
    rule = _rule_of(values, collections)
    if isinstance(where, Absent):
        is_tree = isinstance(rule, substitutes.FromTree)
        where = filters.Names(frozenset(rule.entries)) if is_tree else True
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def _rule_of(values: Any, collections: CollectionFilter) -> substitutes.Substitute:
    if isinstance(values, str) and isinstance(collections, str):
        return substitutes.FromCollection(values)
    if isinstance(values, (Mapping, modules.Module)):
        entries = substitutes.entries_of(values, collections)
        if not entries and not substitutes.is_initializing(values):
            raise substitutes.no_values('a tree without a value')
        return substitutes.FromTree(entries)
    if callable(values) and not isinstance(values, type):
        return substitutes.FromFunction(values)
    raise substitutes.no_values(brief(values))


def map_cotangent(
    where: filters.Where,
    fn: Callable[..., Any],
    *values: Any,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Cotangents go through a function.

    >>> map_cotangent('bias', lambda path, ct: -ct).where
    Glob('bias')
    """
    if not callable(fn):
        write = 'nn.map_cotangent(where, lambda path, ct: 2.0 * ct)'
        raise wrong_argument(fn, 'function of a cotangent', write)
    for value in values:
        _check_numeric(value, 'value for a cotangent')
    traced = predicates.tracer_in(fn)
    if traced is not None:
        name, value = traced
        raise errors.ArgumentTypeError(
            f'{predicates.describe(fn)} reads {brief(value)} as {name!r}.\n'
            'Hand it over: nn.map_cotangent(where, fn, value) calls '
            'fn(path, cotangent, value).'
        )
    rule = cotangents.Each('map_cotangent', fn, *values)
    rule.args = f', {predicates.describe(fn)}{rule.args}'
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def scale_gradient(
    where: filters.Where,
    factor: Any,
    *,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Cotangents are multiplied by a number.

    >>> scale_gradient('bias', 0.5)
    scale_gradient(Glob('bias'), 0.5)
    """
    _check_number('factor', factor)
    rule = cotangents.Scale(factor)
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def reverse_gradient(
    where: filters.Where,
    factor: Any = 1.0,
    *,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Cotangents are multiplied by a number and change their sign.

    >>> reverse_gradient('bias')
    scale_gradient(Glob('bias'), -1.0)
    """
    _check_number('factor', factor)
    return scale_gradient(where, -factor, collections=collections, unused=unused)


def clip_gradient(
    where: filters.Where,
    *,
    value: Any = None,
    norm: Any = None,
    global_norm: Any = None,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Cotangents are clipped by one of three bounds.

    >>> clip_gradient('bias', norm=1.0)
    clip_gradient(Glob('bias'), norm=1.0)
    """
    bounds = {'value': value, 'norm': norm, 'global_norm': global_norm}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    if len(given) != 1:
        raise errors.ArgumentValueError(
            f'clip_gradient() was given {" and ".join(given) or "no bound"}: expected '
            'one of value=, norm= and global_norm=.\n'
            'Write nn.clip_gradient(where, global_norm=1.0); for two, nest two blocks.'
        )
    [(name, bound)] = given.items()
    _check_number(name, bound)
    if not isinstance(bound, tracing.Tracer) and not bound >= 0:
        raise errors.ArgumentValueError(f'{name}={bound}: expected a number from 0 on.')
    fns = {'value': cotangents.clipped_by_value, 'norm': cotangents.clipped_by_norm}
    rule = (
        cotangents.Each('clip_gradient', fns[name], bound)
        if name in fns
        else cotangents.ClipGlobalNorm(bound)
    )
    rule.args = f', {name}={shown(bound)}'
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def print_cotangent(
    where: filters.Where,
    *,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Cotangents are printed in each backward pass.

    >>> print_cotangent('bias')
    print_cotangent(Glob('bias'))
    """
    rule = cotangents.Each('print_cotangent', cotangents.printed)
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def replace_cotangent(
    where: filters.Where,
    value: Any,
    *,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Cotangents are a given value.

    >>> replace_cotangent('bias', 7.0)
    replace_cotangent(Glob('bias'), 7.0)
    """
    _check_numeric(value, 'value for a cotangent')
    rule = cotangents.Each('replace_cotangent', cotangents.replaced, value)
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def copy_cotangent(
    sources: Mapping[str, str],
    *,
    add: bool = False,
    collections: CollectionFilter = 'params',
    unused: str = 'raise',
) -> Rewrite:
    """Cotangents are those of other variables.

    >>> copy_cotangent({'bias': 'scale'}).rule.name
    'copy_cotangent'
    """
    given: Any = sources
    if not isinstance(given, Mapping):
        write = "nn.copy_cotangent({'target': 'source'})"
        raise wrong_argument(given, 'dict of paths', write)
    named = dict.fromkeys([*sources, *sources.values()])
    where = [re.sub(r'([*?\[\]\\])', r'\\\1', path) for path in named]
    rule = cotangents.Copy(sources, add)
    return Rewrite(filters.as_filter(where), rule, collections, unused)


def _check_numeric(value: Any, what: str) -> None:
    if not isinstance(value, (int, float, complex, np.number, np.ndarray, jax.Array)):
        raise wrong_argument(value, what, 'a number or an array of numbers')


def _check_number(name: str, value: Any) -> None:
    _check_numeric(value, f'number for {name}')
    if np.ndim(value):
        raise errors.ArgumentValueError(
            f'{name} has the shape {np.shape(value)}: expected one number.'
        )

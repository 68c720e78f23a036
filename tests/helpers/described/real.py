"""Filters and blocks as flax_sg has them, and the interpreter that opens them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from flax_sg import filters
from flax_sg import linen as nn
from flax_sg.engine.blocks import thread
from flax_sg.internals import tracing
from tests.helpers.described.by_hand import warped
from tests.helpers.described.language import Block, Interpreter, Program, Where, left


@dataclasses.dataclass
class Names:
    """An object that a filter reads."""

    names: tuple[str, ...] = ()


# What filters in the style 'switch' read. It changes between blocks.
SWITCH = Names()

# Paths outside of the owner start with '/'. '**' begins at the owner.
_GLOBS = {'name': '**/{}', 'under': '**/{}/**', 'second': '*/{}/*'}
_REGEXES = {'name': '(.*/)?({})', 'under': '(.*/)?({})/.*'}


def filter_of(where: Where, x: Any = None) -> Any:
    """A filter for flax_sg; a fresh value at each call, objects and all."""
    if where.style == 'switch':
        SWITCH.names = where.names
    plain = True if where.kind == 'all' else _STYLES[where.style](where)
    filter_ = ~filters.as_filter(plain) if where.negated else plain
    if not where.when:
        return filter_
    return filters.as_filter(filter_) & (where.when * jnp.sum(x) > 0)


def _glob(where: Where) -> Any:
    globs = [_GLOBS[where.kind].format(name) for name in where.names]
    return globs if len(globs) > 1 else globs[0]


def _regex(where: Where) -> Any:
    return re.compile(
        _REGEXES[where.kind].format('|'.join(map(re.escape, where.names)))
    )


def _predicate(where: Where) -> Any:
    names = where.names
    if where.kind == 'name':
        return lambda path: path.name in names
    if where.kind == 'root':
        return lambda path: path.absolute.split('/')[0] in names
    return lambda path: any(part in names for part in path.parts[:-1])


def _under_names_of(config: Names) -> Any:
    return lambda path: any(part in config.names for part in path.parts[:-1])


_STYLES: dict[str, Callable[[Where], Any]] = {
    'glob': _glob,
    'regex': _regex,
    'predicate': _predicate,
    'object': lambda where: _under_names_of(Names(where.names)),
    'switch': lambda where: _under_names_of(SWITCH),
}


def rewrite_of(
    where: Where, rule: str = 'stop', judged: bool = False, x: Any = None
) -> Any:
    """The value of flax_sg that serves every extent, for ``x``."""
    options: dict[str, Any] = {'unused': 'raise' if judged else 'ignore'}
    selected = filter_of(where, x)
    if rule == 'only' and where.when:
        return nn.train_only(~selected, **options)
    if rule == 'only':
        others = dataclasses.replace(where, negated=not where.negated)
        return nn.train_only(filter_of(others), **options)
    if rule == 'stop':
        return nn.stop_gradient(selected, **options)
    if rule == 'scale':
        return nn.scale_gradient(selected, -0.5, **options)
    if rule == 'read_only':
        return nn.read_only(selected, collections='params', **options)
    values = 'ema' if rule == 'collection' else _warped
    return nn.substitute(values, where=selected, **options)


def _warped(path: Any, value: Any) -> Any:
    return warped(value)


class Real(Interpreter):
    """Runs programs with real blocks."""

    def run(self, body: Program, place: Any = None) -> None:
        for item in body:
            super().run((item,), place)
            key = tracing.user_context.value
            assert key == thread.number.value, 'JAX would find a program of others'

    def block(self, item: Block, place: Any) -> None:
        with left(), rewrite_of(item.where, item.rule, item.judged, self.x):
            self.run(item.body, place)

"""What a program does, by hand: a block is a copy of the weights with other values.

A loop of Flax is a loop of Python. Modules without blocks run on their part of the
tree as plain Flax. This file does not import flax_sg.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, path_aware_map

from tests.helpers.described import language
from tests.helpers.described.modules import LEAVES


def warped(value: jax.Array) -> jax.Array:
    """What the rule ``'function'`` shows instead of a value."""
    return jnp.sin(value) + 0.25


@jax.custom_jvp
def _scaled(x: jax.Array) -> jax.Array:
    return x


_scaled.defjvp(lambda x, t: (*x, -0.5 * t[0]))

_RULES: dict[str, Callable[[Any, Any], Any]] = {
    'stop': lambda value, _: jax.lax.stop_gradient(value),
    'only': lambda value, _: jax.lax.stop_gradient(value),
    'scale': lambda value, _: jax.tree.map(_scaled, value),
    'function': lambda value, _: jax.tree.map(warped, value),
    'collection': lambda _, twin: twin,
    'read_only': lambda value, _: value,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Values:
    """What readers see.

    Attributes:
        params: the parameters.
        ema: the collection that may replace them, None if there is none.
    """

    params: Any
    ema: Any = None

    def rewritten(
        self,
        owner: language.Path,
        where: language.Where,
        rule: str = 'stop',
        x: Any = None,
    ) -> Values:
        """In a block of the module at a path, which is opened for ``x``."""
        twins = flatten_dict(self.ema or {})

        def changed(path: language.Path, value: Any) -> Any:
            taken = where.takes(path, owner)
            other = _RULES[rule](value, twins.get(path)) if taken else value
            if not (taken and where.when):
                return other
            flag = where.when * jnp.sum(x) > 0
            return jax.tree.map(lambda *two: jnp.where(flag, *two), other, value)

        return dataclasses.replace(self, params=path_aware_map(changed, self.params))


class ByHand(language.Interpreter):
    """Runs programs, with the values that readers see as the place.

    Attributes:
        path: the path of the module that opens the blocks.
    """

    path: language.Path = ()

    def block(self, item: language.Block, place: Values) -> None:
        with language.left():
            inside = place.rewritten(self.path, item.where, item.rule, self.x)
            self.run(item.body, inside)


# Models.


def at(tree: Any, path: language.Path) -> Any:
    """A part of a tree of dicts."""
    return functools.reduce(lambda tree, name: tree[name], path, tree)


def changed(tree: Any, path: language.Path, fn: Callable[[Any], Any]) -> Any:
    """A copy of a tree, with other leaves below a path."""

    def leaf(own: language.Path, value: Any) -> Any:
        return jax.tree.map(fn, value) if own[: len(path)] == path else value

    return path_aware_map(leaf, tree)


def sliced(values: Values, path: language.Path, index: int) -> Values:
    """Without the first axis of the variables below a path."""
    trees = values.params, values.ema
    return Values(*(changed(tree, path, lambda leaf: leaf[index]) for tree in trees))


@dataclasses.dataclass
class Model(language.OnValue, ByHand):
    """A part: where it is, and which module it was handed."""

    part: language.Part
    path: language.Path = ()
    shared_at: language.Path | None = None

    def __call__(self, values: Values, x: jax.Array) -> jax.Array:
        """What it computes of an array."""
        frozen = ('stop',) if self.part.frozen else ()
        return self._wrapped((*self.part.wraps, *frozen), values, x)

    def _wrapped(self, wraps: tuple[str, ...], values: Values, x: Any) -> Any:
        """What its class computes in transforms, the last one outermost."""
        if not wraps:
            return self._bare(values, x)
        *inner, wrap = wraps
        run = functools.partial(self._wrapped, tuple(inner))
        if wrap == 'stop':
            part = self.part
            return run(values.rewritten(self.path, part.where, part.rule), x)
        if wrap == 'scan':
            for index in range(2):
                x = run(sliced(values, self.path, index), x)
            return x
        if wrap == 'vmap':
            each = [run(sliced(values, self.path, index), x) for index in range(2)]
            return sum(each) / 2.0
        return run(values, x)

    def _bare(self, values: Values, x: Any) -> Any:
        if isinstance(self.part.spec, language.Composite):
            return self.result(self.part.spec.body, x, values)
        params = {'params': at(values.params, self.path)}
        return LEAVES[self.part.spec.kind]().apply(params, x)

    def own(self, item: language.Own, place: Values) -> None:
        self.x = self.x * at(place.params, (*self.path, item.name))

    def inner(self, item: language.Inner, place: Values) -> None:
        own = at(place.params, self.path)
        self.x = jnp.tanh(self.x * own['p0'] + own['p1'])

    def shared(self, item: language.Shared, place: Values) -> None:
        if self.shared_at is not None:
            shared = Model(language.Part(language.Leaf('affine')), self.shared_at)
            self.x = jnp.tanh(shared(place, self.x))

    def use(self, item: language.Use, place: Values) -> None:
        assert isinstance(self.part.spec, language.Composite)
        kid, path = self.part.spec.kids[item.kid], (*self.path, f'k{item.kid}')
        shared = self.shared_at or (*self.path, 'shared')
        module = Model(kid, path, shared if kid.shares else None)

        def call(values: Values, x: Any) -> Any:
            if item.mirror is not None:
                values = values.rewritten(path, item.mirror, x=x)
            return jnp.tanh(module(values, x))

        self.x = _lifted(item.lift, call, place, path, self.x)


def _lifted(lift: str, call: Any, values: Values, path: language.Path, x: Any) -> Any:
    """What a function of a module computes in a transform."""
    if lift in ('scan', 'while_loop'):
        return call(values, call(values, x))
    if lift == 'cond':
        return call(values, x) * jnp.where(jnp.sum(x) > 0, 1.0, 2.0)
    if lift == 'map_variables':
        doubled = changed(values.params, path, lambda leaf: leaf * 2.0)
        return call(dataclasses.replace(values, params=doubled), x)
    if lift == 'custom_vjp':
        y = call(values, x)
        return y + 2.0 * (y - jax.lax.stop_gradient(y))
    if lift == 'vjp':
        run = lambda p, x: call(dataclasses.replace(values, params=p), x)  # noqa: E731
        y, pull_back = jax.vjp(run, values.params, x)
        return y + pull_back(y)[1]
    return call(values, x)


class CallsByHand(language.Calls):
    """Calls by hand: what blocks do to parameters is done where they are derived."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._known: dict[Any, Callable[[], Any]] = {}

    def call(self, item: language.Call, place: tuple[language.Open, ...]) -> None:
        """The same in the same blocks is computed once."""
        key = item, tuple((one.block.where, one.block.rule) for one in place)
        if self._session is None and key in self._known:
            self.results.append(self._known[key])
            return
        super().call(item, place)
        if self._session is None:
            self.results[-1] = self._known[key] = functools.cache(self.results[-1])

    def function(self, item: language.Call, place: tuple[language.Open, ...]) -> Any:
        part = self.models[item.model]

        def fn(params: Any, x: Any) -> Any:
            if item.ahead is not None:
                where = item.ahead.trained
                others = dataclasses.replace(where, negated=not where.negated)
                params = Values(params).rewritten((), others).params
                x = x if item.ahead.each else jax.lax.stop_gradient(x)
            values = Values(params, jax.tree.map(jnp.sin, params))
            for one in place:
                block = one.block
                values = values.rewritten((), block.where, block.rule, one.x)
            y = Model(part)(values, x)
            return (y, params) if item.mutable else y

        return language.HOWS[item.how](fn)

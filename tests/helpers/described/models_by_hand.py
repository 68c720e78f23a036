"""What a model of ``models.py`` computes, by hand, as a function of its parameters.

A block is a copy of the tree with other values, and a loop of Flax is a loop of Python.
Modules without blocks run on their part of the tree as plain Flax.

This file does not import flax_sg.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import path_aware_map

from tests.helpers.described import models
from tests.helpers.described.by_hand import ByHand, Values
from tests.helpers.described.language import Path, Use
from tests.helpers.described.modules import LEAVES


def at(tree: Any, path: Path) -> Any:
    """A part of a tree of dicts."""
    return functools.reduce(lambda tree, name: tree[name], path, tree)


def changed(tree: Any, path: Path, fn: Callable[[Any], Any]) -> Any:
    """A copy of a tree, with other leaves below a path."""

    def leaf(own: Path, value: Any) -> Any:
        return jax.tree.map(fn, value) if own[: len(path)] == path else value

    return path_aware_map(leaf, tree)


def sliced(values: Values, path: Path, index: int) -> Values:
    """Without the first axis of the variables below a path."""
    trees = values.params, values.ema
    return Values(*(changed(tree, path, lambda leaf: leaf[index]) for tree in trees))


@dataclasses.dataclass
class Model(models.OnValue, ByHand):
    """A module of a description: where it is, and which module it was handed."""

    spec: Any
    path: Path = ()
    shared_at: Path | None = None

    def __call__(self, values: Values, x: jax.Array) -> jax.Array:
        """What it computes of an array."""
        if isinstance(self.spec, models.Leaf):
            params = {'params': at(values.params, self.path)}
            return LEAVES[self.spec.kind]().apply(params, x)
        return self.result(self.spec.body, x, values)

    def own(self, item: models.Own, place: Values) -> None:
        self.x = self.x * at(place.params, (*self.path, item.name))

    def shared(self, item: models.Shared, place: Values) -> None:
        if self.shared_at is not None:
            shared = Model(models.Leaf('affine'), self.shared_at)
            self.x = jnp.tanh(shared(place, self.x))

    def use(self, item: Use, place: Values) -> None:
        kid, path = self.spec.kids[item.kid], (*self.path, f'k{item.kid}')
        shared = self.shared_at or (*self.path, 'shared')
        module = Model(kid.spec, path, shared if kid.shares else None)

        def call(values: Values, x: Any) -> Any:
            if item.mirror is not None:
                values = values.rewritten(path, item.mirror)
            wraps = (*kid.wraps, 'stop') if kid.frozen else kid.wraps
            return jnp.tanh(_wrapped(wraps, kid, module, values, x))

        self.x = _lifted(item.lift, call, place, path, self.x)


def _wrapped(
    wraps: tuple[str, ...], kid: models.Kid, module: Model, values: Values, x: Any
) -> Any:
    """What a class in transforms computes, the last one outermost."""
    if not wraps:
        return module(values, x)
    *inner, wrap = wraps

    def run(values: Values, x: Any) -> Any:
        return _wrapped(tuple(inner), kid, module, values, x)

    if wrap == 'stop':
        return run(values.rewritten(module.path, kid.where, kid.rule), x)
    if wrap == 'scan':
        for index in range(2):
            x = run(sliced(values, module.path, index), x)
        return x
    if wrap == 'vmap':
        each = [run(sliced(values, module.path, index), x) for index in range(2)]
        return sum(each) / 2.0
    return run(values, x)


def _lifted(lift: str, call: Any, values: Values, path: Path, x: Any) -> Any:
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

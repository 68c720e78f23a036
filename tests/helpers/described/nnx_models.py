"""Models of a description, as those of NNX: a block is a view of the module in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flax_sg import nnx
from tests.helpers.described import language
from tests.helpers.described.by_hand import warped
from tests.helpers.described.real import filter_of

# What is said in NNX in another way: modules, rules, filters, transforms of functions.
LEAVES = {'rnn': 'dense', 'boxed': 'dense'}
RULES = {'collection': 'function', 'read_only': 'stop'}
LIFTS = {'remat', 'jit'}


def possible(part: language.Part) -> language.Part:
    """The nearest model that NNX has: no module at two paths, none that is scoped."""
    spec: Any = part.spec
    if isinstance(spec, language.Leaf):
        spec = language.Leaf(LEAVES.get(spec.kind, spec.kind))
    else:
        kids = tuple(map(possible, spec.kids))
        spec = language.Composite(spec.style, kids, _possible(spec.body))
    rule = RULES.get(part.rule, part.rule)
    where, wraps = _relative(part.where), part.wraps
    return language.Part(spec, wraps, where, frozen=part.frozen, rule=rule)


def _possible(body: language.Program) -> language.Program:
    out: list[Any] = []
    for item in body:
        match item:
            case language.Shared():
                continue
            case language.Residual():
                item = language.Residual(_possible(item.body))
            case language.Block():
                rule, inside = RULES.get(item.rule, item.rule), _possible(item.body)
                item = language.Block(_relative(item.where), inside, rule)
            case language.Use():
                lift = item.lift if item.lift in LIFTS else ''
                mirror = item.mirror and _relative(item.mirror)
                item = language.Use(item.kid, lift, mirror)
        out.append(item)
    return tuple(out)


def _relative(where: language.Where) -> language.Where:
    """A view names paths from itself on."""
    kind = 'under' if where.kind == 'root' else where.kind
    return dataclasses.replace(where, kind=kind)


def viewed(
    module: Any, where: language.Where, rule: str = 'stop', x: Any = None
) -> nnx.Module:
    """A view of a module, for ``x``."""
    selected, options = filter_of(where, x), {'unused': 'ignore'}
    if rule == 'scale':
        return nnx.scale_gradient(module, selected, -0.5, **options)
    if rule == 'function':
        show = lambda path, value: warped(value)  # noqa: E731
        return nnx.substitute(module, show, where=selected, **options)
    return nnx.stop_gradient(module, selected, **options)


class Node(nnx.Module):
    """A part of a model.

    Attributes:
        part: its description.
    """

    def __init__(self, part: language.Part, params: Any) -> None:
        self.part = part
        for name, value in params.items():
            is_module = isinstance(value, dict)
            made = Node(self._kid(name), value) if is_module else nnx.Param(value)
            setattr(self, name, made)

    def _kid(self, name: str) -> language.Part:
        assert isinstance(self.part.spec, language.Composite)
        return self.part.spec.kids[int(name.removeprefix('k'))]

    def __call__(self, x: jax.Array) -> jax.Array:
        frozen = ('stop',) if self.part.frozen else ()
        return _wrapped((*self.part.wraps, *frozen))(self, x)


def _wrapped(wraps: tuple[str, ...]) -> Callable[[Any, Any], Any]:
    """What a part computes in transforms, the last one outermost."""
    if not wraps:
        return _bare
    *inner, wrap = wraps
    run = _wrapped(tuple(inner))
    if wrap == 'stop':
        return lambda node, x: run(viewed(node, node.part.where, node.part.rule), x)
    if wrap == 'scan':
        return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    if wrap == 'vmap':
        mapped = nnx.vmap(run, in_axes=(0, None))
        return lambda node, x: mapped(node, x).mean(0)
    return getattr(nnx, wrap)(run)


def _bare(node: Node, x: jax.Array) -> jax.Array:
    spec = node.part.spec
    if isinstance(spec, language.Composite):
        return Running().result(spec.body, x, node)
    if spec.kind == 'affine':
        return x * node.w + node.b
    if spec.kind == 'kept':
        derived = jnp.tanh(node.w[...]) * node.b
        return x * derived + derived + node.w + node.b
    y = x @ node.kernel[...] + node.bias
    return y + x @ (node.A * 2.0) if spec.kind == 'lora' else y


_inner = jax.jit(lambda p0, p1, x: x * p0 + p1)


class Running(language.OnValue):
    """The statements of a composite module. Their place is a view of it."""

    def block(self, item: language.Block, place: Any) -> None:
        with language.left():
            self.run(item.body, viewed(place, item.where, item.rule, self.x))

    def own(self, item: language.Own, place: Any) -> None:
        self.x = self.x * getattr(place, item.name)

    def inner(self, item: language.Inner, place: Any) -> None:
        self.x = jnp.tanh(_inner(place.p0[...], place.p1[...], self.x))

    def use(self, item: language.Use, place: Any) -> None:
        def call(kid: Any, x: Any) -> Any:
            seen = kid if item.mirror is None else viewed(kid, item.mirror, x=x)
            return jnp.tanh(seen(x))

        lifted = getattr(nnx, item.lift)(call) if item.lift else call
        self.x = lifted(getattr(place, f'k{item.kid}'), self.x)

"""Random functions of arrays: what reports on gradients and splits are tested on.

A function takes some values of one shape and returns as many. Its operations change one
or two of them; bodies of loops, branches, checkpoints and calls are such functions
again. This file does not import flax_sg.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

COUNT = 4
ROWS = np.array([[True], [False], [True], [False]])
SHAPE = (4, 3)
Values = list[Any]


@dataclasses.dataclass
class Weights:
    """What operations read beside the values: a body closes over it.

    Attributes:
        params: square matrices, and a stack of three.
        key: for noise.
    """

    params: dict[str, Any]
    key: Any

    def matrix(self, pick: int) -> Any:
        """One of the matrices, or a layer of the stack."""
        *names, stack = self.params
        every = [self.params[name] for name in names], self.params[stack]
        return every[pick % 4 == 3][pick % 3]


def rule(kind: str) -> Callable[..., Any]:
    """An identity of two values whose backward pass is not the derivative."""
    zero = np.zeros(SHAPE, np.float32)

    def backward(kept: Any, cotangents: Any) -> Any:
        (x, y), (f, g) = kept, cotangents
        return {
            'decay': lambda: (f + 0.01 * x, g + 0.01 * y),
            'constant': lambda: (jnp.ones(SHAPE), g),
            'drops': lambda: (None, f + g),
            'swaps': lambda: (g, f),
            'zeros': lambda: (zero, f * 0.0 + g),
            'masks': lambda: (f * ROWS, jnp.where(ROWS, 0.0, g)),
            'cosine': lambda: (jnp.cos(f), g),
            'joint': lambda: (f / jnp.sqrt(1 + jnp.sum(f**2 + g**2)), g),
        }[kind]()

    if kind == 'symbolic':
        return symbolic

    @jax.custom_vjp
    def fn(x: Any, y: Any) -> Any:
        return 1.5 * x, y + 0.5

    fn.defvjp(lambda x, y: (fn(x, y), (x, y)), backward)
    return fn


@jax.custom_vjp
def symbolic(x, y):
    return x * 2.0, y


symbolic.defvjp(
    lambda x, y: ((x.value * 2.0, y.value), (x.perturbed, y.perturbed)),
    lambda kept, cts: tuple(
        jnp.zeros(SHAPE) if isinstance(ct, jax.custom_derivatives.SymbolicZero) else ct
        for ct in (cts if all(kept) else cts[::-1])
    ),
    symbolic_zeros=True,
)


@jax.custom_jvp
def half(x, y):
    return x + y


half.defjvp(lambda primals, tangents: (half(*primals), tangents[0] * 0.5))


@jax.custom_jvp
def affine(x, y):
    return x * y


affine.defjvp(lambda p, t: (affine(*p), t[0] * p[1] + jnp.ones(SHAPE)))


@jax.custom_vjp
def with_a_rule(u: Any, w: Any) -> Any:
    """A product whose gradients are others than JAX would find."""
    return jnp.tanh(u @ w)


with_a_rule.defvjp(
    lambda u, w: (with_a_rule(u, w), (u, w)),
    lambda kept, g: (2 * g @ kept[1].T, kept[0].T @ jnp.clip(g, -0.1, 0.1)),
)

KINDS = [
    *('decay', 'constant', 'drops', 'swaps', 'zeros', 'masks', 'cosine', 'joint'),
    'symbolic',
]
UNARY: list[Callable[[Any], Any]] = [
    jnp.sin,
    jnp.sign,
    lax.stop_gradient,
    lambda x: x**0,
    lambda x: x[::-1],
    lambda x: jnp.round(x) + 0.5,
    lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    lambda x: x.astype(jnp.int32).astype(jnp.float32),
    lambda x: jnp.sum(x, 0, keepdims=True) + jnp.zeros(SHAPE),
    lambda x: jnp.where(ROWS, x, 0.0),
    lambda x: jnp.where(ROWS, lax.stop_gradient(x), x),
    lambda x: jnp.concatenate([lax.stop_gradient(x[:1]), x[1:]]),
    lambda x: x.at[1].set(0.0),
    lambda x: x.at[:2].set(lax.stop_gradient(x[:2])),
    lambda x: x.reshape(-1).reshape(SHAPE),
    lambda x: jnp.roll(x, 1, 0),
    lambda x: jnp.sort(x, 0),
    lambda x: lax.cumsum(x, 0),
    lambda x: (x.T @ x)[:1] + jnp.zeros(SHAPE),
    lambda x: jax.nn.one_hot(jnp.argmax(x, -1), 3),
    lambda x: jax.nn.softmax(x),
    lambda x: x[jnp.array([0, 0, 2, 2])],
    lambda x: lax.dynamic_slice(x, (1, 0), (3, 3)).repeat(2, 0)[:4],
    lambda x: jnp.pad(x[1:3], ((1, 1), (0, 0))),
    lambda x: lax.pad(x, 0.0, ((-1, 1, 0), (1, -1, 0))),
    lambda x: lax.pad(x, 0.0, ((-2, -1, 1), (-1, -1, 1))),
    lambda x: jnp.concatenate([*jnp.split(x, [1, 3])][::-1]),
    lambda x: jnp.concatenate([x[2:], lax.stop_gradient(x[:2])]),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    jnp.add,
    jnp.multiply,
    lambda x, y: x,
    lambda x, y: x * lax.stop_gradient(y),
    lambda x, y: jnp.where(x > y, x, lax.stop_gradient(y)),
    lambda x, y: jnp.where(ROWS, x, y),
    lambda x, y: jnp.maximum(x, y),
    lambda x, y: jnp.concatenate([x[:2], y[2:]]),
    lambda x, y: jax.grad(lambda x: jnp.sum(x**2 * y))(x),
    lambda x, y: jax.grad(lambda x: jnp.sum(x * y))(x),
    lambda x, y: lax.optimization_barrier((x, y))[0],
    lambda x, y: jax.device_put({'x': x, 'y': y})['y'],
    lambda x, y: lax.sort((x, y), dimension=0, num_keys=1)[1],
    half,
    affine,
]


# These read weights, too.
WEIGHTED: list[Callable[..., Any]] = [
    lambda x, w, key: x @ w,
    lambda x, w, key: jnp.tanh(x @ w),
    lambda x, w, key: with_a_rule(x, w),
    lambda x, w, key: x + jax.random.normal(key, SHAPE),
    lambda x, w, key: jax.vmap(lambda row: jnp.tanh(row @ w) * row.sum())(x),
    lambda x, w, key: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w) ** 2))(x),
    lambda x, w, key: x * (w @ w).sum(),
]


# Bodies in JAX's transforms: of a body, the values, and which of them is special.


def scanned(body: Any, values: Values, kept: int, weights: Any) -> Values:
    def turn(carry: Values, x: Any) -> Any:
        out = body([v if n == kept else carry[n] + x for n, v in enumerate(values)])
        return out, out[kept]

    carry, out = lax.scan(turn, values, values[kept][:2, None].repeat(4, 1))
    return [*carry[:-1], carry[-1] + out.sum(0)]


def carried(body: Any, values: Values, kept: int, weights: Any) -> Values:
    """A turn reads what the last one made, and a count; one value may be known."""

    def turn(carry: Any, _: None) -> Any:
        vs, n = carry
        return (body([v + 0.1 * n for v in vs]), n + 1.0), vs[kept]

    (values, _), out = lax.scan(turn, (values, 0.0), None, 2)
    return [*values[:-1], out[1]]


def branches(body: Any, values: Values, kept: int, weights: Any) -> Values:
    which = (values[kept].sum() > 0.0).astype(jnp.int32)
    return lax.switch(which, [body, lambda vs: [v * 0.5 for v in vs]], values)


def looped(body: Any, values: Values, kept: int, weights: Any) -> Values:
    return lax.fori_loop(0, 3, lambda _, vs: body(vs), values)


def mapped(body: Any, values: Values, kept: int, weights: Any) -> Values:
    return [v.sum(0) for v in jax.vmap(body)([jnp.stack([v, v * 0.5]) for v in values])]


def turning(body: Any, values: Values, kept: int, weights: Any) -> Values:
    """As long as a value says. JAX has no reverse mode: no gradient goes through it."""

    def goes_on(carry: Any) -> Any:
        n, vs = carry
        return (n < 2) | ((n < 4) & (vs[kept].sum() > 0))

    def turn(carry: Any) -> Any:
        return carry[0] + 1, lax.stop_gradient(body(carry[1]))

    _, out = lax.while_loop(goes_on, turn, (0, lax.stop_gradient(values)))
    return [v + w for v, w in zip(values[1:] + values[:1], out, strict=True)]


def with_ref(body: Any, values: Values, kept: int, weights: Any) -> Values:
    ref = jax.new_ref(values[kept])
    values = body(values)
    values[kept] = values[kept] + ref[...]
    ref[...] = values[0] * 2.0
    return [*values[:-1], ref[...]]


def noted(body: Any, values: Values, kept: int, weights: Any) -> Values:
    """A ref that begins with zeros: JAX fails on some that begin with another value."""
    ref = jax.new_ref(jnp.zeros(SHAPE))
    ref[...] = values[kept] * 2.0
    values = body(values)
    return [*values[:-1], values[-1] + ref[...]]


def told(body: Any, values: Values, kept: int, weights: Any) -> Values:
    """An effect that returns nothing."""
    jax.debug.callback(lambda x: None, values[kept].sum())
    return body(values)


def layers(body: Any, values: Values, kept: int, weights: Any) -> Values:
    """A scan over the stack."""

    def turn(carry: Values, layer: Any) -> Any:
        out = body(carry)
        out[kept] = jnp.tanh(out[kept] @ layer)
        return out, out[kept].sum(0)

    stack = [*weights.params.values()][-1]
    values, sums = lax.scan(turn, values, stack, reverse=bool(kept % 2))
    return [*values[:-1], values[-1] + sums.mean()]


BODIES: list[Callable[..., Values]] = [
    lambda body, values, kept, weights: jax.jit(body)(values),
    lambda body, values, kept, weights: jax.checkpoint(body)(values),
    *(scanned, carried, branches, looped, mapped, turning),
]
REFS = [with_ref] * hasattr(jax, 'new_ref')
EFFECTS = [noted] * hasattr(jax, 'new_ref') + [told]


@dataclasses.dataclass
class Language:
    """Draws functions.

    Attributes:
        made: what draws them.
        with_weights: whether they read weights.
        with_refs: whether they write to refs.
        with_effects: whether they write to refs, and call back.
        bound: what is done to each value that is made.
    """

    made: random.Random
    with_weights: bool = False
    with_refs: bool = False
    with_effects: bool = False
    bound: Callable[[Any], Any] = lambda x: x

    def program(self, depth: int = 2) -> Callable[..., Values]:
        """A function of values and, perhaps, weights."""
        steps = [self.step(depth) for _ in range(self.made.randint(2, 6))]

        def run(values: Values, weights: Any = None) -> Values:
            for step in steps:
                values = step([*values], weights)
            return values

        return run

    def step(self, depth: int) -> Callable[[Values, Any], Values]:
        """A function that changes one or two of some values, or all in a body."""
        made = self.made
        i, j = made.sample(range(COUNT), 2)
        kinds = ['unary', 'binary', 'rule'] + ['weighted'] * 3 * self.with_weights
        kind = made.choice(kinds + ['inner'] * (len(kinds) - 1) * (depth > 0))
        if kind == 'inner':
            effects = EFFECTS * self.with_effects + REFS * self.with_refs
            bodies = BODIES + effects + [layers] * self.with_weights
            run, body = made.choice(bodies), self.program(depth - 1)

            def inner(values: Values, weights: Any) -> Values:
                return run(functools.partial(body, weights=weights), values, i, weights)

            return inner
        pick, fn = made.randrange(100), made.choice(OPERATIONS[kind])

        def changed(values: Values, weights: Any) -> Values:
            if kind == 'weighted':
                key = jax.random.fold_in(weights.key, pick)
                values[i] = fn(values[i], weights.matrix(pick), key)
            elif kind == 'rule':
                values[i], values[j] = rule(fn)(values[i], values[j])
            else:
                values[i] = fn(values[i], *[values[j]] * (kind == 'binary'))
            values[i] = self.bound(values[i])
            return values

        return changed


OPERATIONS: dict[str, list[Any]] = {
    'unary': UNARY,
    'binary': BINARY,
    'rule': KINDS,
    'weighted': WEIGHTED,
}

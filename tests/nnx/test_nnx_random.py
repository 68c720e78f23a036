"""Random NNX models with views at random places, against stopped copies.

Models nest, hold lists, stacked layers, batch statistics and dropout. Views stand
around calls of parts, in views, in transforms and around the step.
"""

import random
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import by_hand
import oracle
from by_hand import Layer, X, pure
from flax_sg import nnx

LONG = settings.get_current_profile_name() == 'long'


@nnx.split_rngs(splits=2)
@nnx.vmap(in_axes=0, out_axes=0)
def stacked(rngs: nnx.Rngs) -> Layer:
    return Layer(rngs)


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
def through(layer: Layer, x: jax.Array) -> jax.Array:
    return layer(x)


class Part(nnx.Module):
    """A layer and what stands beside it, chosen by a random generator."""

    def __init__(self, draw: random.Random, rngs: nnx.Rngs, depth: int):
        self.layer = Layer(rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs) if draw.random() < 0.5 else None
        self.drop = nnx.Dropout(0.5, rngs=rngs) if draw.random() < 0.5 else None
        parts = range(draw.randrange(3) if depth else 0)
        self.parts = nnx.List([Part(draw, rngs, depth - 1) for _ in parts])
        self.stack = stacked(rngs) if draw.random() < 0.3 else None
        self.scale = nnx.Param(jnp.ones(4))

    def __call__(self, x, view, plan):
        for place, transform, part in zip(*plan, [self, *self.parts], strict=False):
            if part is self:
                x = transform(lambda part, x: part.own(x))(view(part, place), x)
            else:
                x = view(part, place)(x, view, plan)
        return x * jnp.broadcast_to(self.scale, x.shape)

    def own(self, x):
        x = self.layer(x)
        x = x if self.stack is None else through(self.stack, x)
        x = x if self.norm is None else self.norm(x)
        return x if self.drop is None else self.drop(x)


PLACES = {
    'layer/**': lambda path: path.startswith('layer/'),
    'layer/kernel': lambda path: path == 'layer/kernel',
    'scale': lambda path: path == 'scale',
    '**/bias': lambda path: path.split('/')[-1] == 'bias',
    'st*/**': lambda path: path.startswith('stack/'),
    False: lambda path: False,
}


def trained(seed: int, view: Any) -> Any:
    """The state after some steps, and the gradients of each."""
    draw = random.Random(seed)
    model = Part(draw, nnx.Rngs(seed), 2)
    wraps = [lambda fn: fn, nnx.jit, nnx.remat]
    plan = [draw.choices([*PLACES], k=3), draw.choices(wraps, k=3)]
    around, compiled = draw.choice([*PLACES]), draw.random() < 0.5
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def loss(model):
        out = view(model, around)(X, view, plan)
        return jnp.sum(out**2) + jnp.sum(model.layer.kernel[...])

    def step(model, optimizer):
        grads = nnx.grad(loss)(model)
        optimizer.update(model, grads)
        return grads

    run = nnx.jit(step) if compiled else step
    return [pure(run(model, optimizer)) for _ in range(2)], pure(model)


@settings(max_examples=1000 if LONG else 6)
@given(st.integers(0, 2**16))
@pytest.mark.slow
def test_random_models(seed: int):
    def by_view(model: Any, where: Any) -> Any:
        return nnx.stop_gradient(model, where, unused='ignore')

    def by_copy(model: Any, where: Any) -> Any:
        return by_hand.stopped(model, PLACES[where])

    oracle.assert_same(trained(seed, by_view), trained(seed, by_copy))

"""Random NNX models with blocks at random places, against stopped copies.

Models nest, hold lists, stacked layers, batch statistics and dropout.
Blocks stand around calls of parts, in blocks, in transforms and around the step.
"""

import contextlib
import random
from collections.abc import Callable
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
        for transform, place, part in zip(
            plan.transforms, plan.places, [self, *self.parts], strict=False
        ):
            with view(part, place) as seen:
                if part is self:
                    x = transform(lambda part, x: part.own(x))(seen, x)
                else:
                    x = seen(x, view, plan)
        return x * jnp.broadcast_to(self.scale, x.shape)

    def own(self, x):
        x = self.layer(x)
        x = x if self.stack is None else through(self.stack, x)
        x = x if self.norm is None else self.norm(x)
        return x if self.drop is None else self.drop(x)


class Plan:
    """Where the blocks of a model stand, and what runs its layers."""

    TRANSFORMS = (lambda fn: fn, nnx.jit, nnx.remat)
    PLACES = ('layer/*', 'layer/kernel', 'scale', '**/bias', 'layer/**', 'st*/**', None)

    def __init__(self, draw: random.Random):
        self.transforms = [draw.choice(self.TRANSFORMS) for _ in range(3)]
        self.places = [draw.choice(self.PLACES) for _ in range(3)]
        self.around = draw.choice(self.PLACES)
        self.jit = draw.random() < 0.5


GLOBS: dict[str | None, Callable[[str], bool]] = {
    'layer/*': lambda path: path.startswith('layer/') and path.count('/') == 1,
    'layer/**': lambda path: path.startswith('layer/'),
    'layer/kernel': lambda path: path == 'layer/kernel',
    'scale': lambda path: path == 'scale',
    '**/bias': lambda path: path.split('/')[-1] == 'bias',
    'st*/**': lambda path: path.startswith('stack/'),
    None: lambda path: False,
}


@contextlib.contextmanager
def in_block(model: Any, where: str | None) -> Any:
    with nnx.stop_gradient(model, where or False, unused='ignore'):
        yield model


def by_copy(model: Any, where: str | None) -> Any:
    return contextlib.nullcontext(by_hand.stopped(model, GLOBS[where]))


def trained(seed: int, view: Any) -> Any:
    """The state after some steps, and the gradients of each."""
    draw = random.Random(seed)
    model = Part(draw, nnx.Rngs(seed), 2)
    plan = Plan(draw)
    optimizers = [
        nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.PathContains(name))
        for name in ('layer', 'scale')
    ]

    def loss(model):
        with view(model, plan.around) as seen:
            out = seen(X, view, plan)
        return jnp.sum(out**2) + jnp.sum(model.layer.kernel[...])

    def step(model, optimizers):
        grads = nnx.grad(loss)(model)
        for optimizer in optimizers:
            optimizer.update(model, nnx.state(grads, optimizer.wrt))
        return grads

    run = nnx.jit(step) if plan.jit else step
    grads = [pure(run(model, optimizers)) for _ in range(2)]
    assert by_hand.is_plain(model)
    return grads, pure(model)


@settings(max_examples=1000 if LONG else 6)
@given(st.integers(0, 2**16))
@pytest.mark.slow
def test_random_models(seed: int):
    oracle.assert_same(trained(seed, in_block), trained(seed, by_copy))

"""Random NNX models with views at random places, against stopped copies.

Models nest, hold stacked layers, batch statistics and dropout. Views stand around
parts, in views, in transforms and around the step.
"""

import functools
import random
from typing import Any

import jax.numpy as jnp
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_sg import nnx
from tests.helpers import nnx_by_hand as by_hand
from tests.helpers import oracle
from tests.helpers.nnx_by_hand import Layer, X, pure, stacked, through
from tests.helpers.profile import LONG

KINDS: list[Any] = [
    Layer,
    stacked,
    lambda rngs: nnx.BatchNorm(4, rngs=rngs),
    lambda rngs: nnx.Dropout(0.5, rngs=rngs),
]
PLACES: dict[Any, Any] = {
    '0/**': lambda path: path.startswith('0/'),
    '*/kernel': lambda path: path.endswith('/kernel') and path.count('/') == 1,
    '**/bias': lambda path: path.endswith('/bias'),
    True: lambda path: True,
    False: lambda path: False,
}
WRAPS = [lambda fn: fn, nnx.jit, nnx.remat]


def model_of(draw: random.Random, rngs: nnx.Rngs, depth: int) -> nnx.List:
    nested = [lambda rngs: model_of(draw, rngs, depth - 1)] * 2
    kinds = draw.choices(KINDS + nested * bool(depth), k=draw.randint(1, 4))
    return nnx.List([kind(rngs) for kind in kinds])


def forward(model: Any, x: Any, view: Any, draw: random.Random) -> Any:
    for part in view(model, draw.choice([*PLACES])):
        is_stack = type(part) is Layer and part.kernel.ndim == 3
        run = through if is_stack else lambda part, x: part(x)
        if type(part) is nnx.List:
            x = forward(part, x, view, draw)
        else:
            seen = view(part, draw.choice([True, False, False]))
            x = draw.choice(WRAPS)(run)(seen, x)
    return x


def trained(seed: int, view: Any) -> Any:
    """The state after some steps, and the gradients of each."""
    draw = random.Random(seed)
    model, compiled = model_of(draw, nnx.Rngs(seed), 1 + LONG), draw.random() < 0.5
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(model, optimizer):
        def loss(model):
            return jnp.sum(forward(model, X, view, random.Random(seed)) ** 2)

        grads = nnx.grad(loss)(model)
        optimizer.update(model, grads)
        return grads

    run = nnx.jit(step) if compiled else step
    return [pure(run(model, optimizer)) for _ in range(2)], pure(model)


@settings(max_examples=1000 if LONG else 6)
@given(st.integers(0, 2**16))
def test_random_models(seed: int):
    views = functools.partial(nnx.stop_gradient, unused='ignore')
    copies = trained(seed, lambda model, where: by_hand.stopped(model, PLACES[where]))
    oracle.assert_same(trained(seed, views), copies)

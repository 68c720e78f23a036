"""Measures a frozen backbone in an NNX model: by hand, by views, by ``DiffState``.

    python -m benchmarks.nnx_models

A transformer of twelve layers, written in NNX, with a trained head. Prints a table.
Times are ratios to stops by hand. Then what a view of 200 modules costs, beside
``nnx.clone``.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import timing
from benchmarks.rivals import BY_HAND
from flax_sg import nnx, testing

WIDTH, LAYERS, TOKENS = 64, 12, 128
VIEW, VIEWS = 'a view of the model', 'a view in each layer'
DIFF_STATE = 'nnx DiffState'


class Layer(nnx.Module):
    """A layer of a transformer."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm, self.norm_2 = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.attend = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Adds attention and two dense layers."""
        x = x + self.attend(self.norm(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Transformer(nnx.Module):
    """Layers, and a head."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layers and the head."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model: Transformer, x: jax.Array) -> jax.Array:
    """Returns a loss."""
    return jnp.mean(model(x) ** 2)


def by_hand(model: Transformer, x: jax.Array) -> jax.Array:
    """Computes the loss on a copy whose layers are stopped."""
    graph, frozen, rest = nnx.split(model, nnx.PathContains('layers'), ...)
    return loss_of(nnx.merge(graph, jax.lax.stop_gradient(frozen), rest), x)


def by_view(model: Transformer, x: jax.Array) -> jax.Array:
    """Computes the loss of a view."""
    return loss_of(nnx.stop_gradient(model, 'layers/**'), x)


def by_views(model: Transformer, x: jax.Array) -> jax.Array:
    """Computes the loss with a view of each layer."""
    for layer in model.layers:
        x = nnx.stop_gradient(layer, True)(x)
    return jnp.mean(model.head(x) ** 2)


def gradients() -> dict[str, Callable[..., Any]]:
    """Returns functions from the state and the input to the gradient."""
    graph, _ = nnx.split(Transformer(nnx.Rngs(0)))
    head = nnx.DiffState(0, nnx.PathContains('head'))

    def of(loss: Callable[..., Any], wrt: Any) -> Callable[..., Any]:
        # A new function each time, because JAX caches the traces of functions.
        return lambda state, x: nnx.grad(lambda model: loss(model, x), argnums=wrt)(
            nnx.merge(graph, state)
        )

    return {
        BY_HAND: of(by_hand, 0),
        VIEW: of(by_view, 0),
        VIEWS: of(by_views, 0),
        DIFF_STATE: of(loss_of, head),
    }


def main() -> None:
    """Measures, and prints the table."""
    _, state = nnx.split(Transformer(nnx.Rngs(0)))
    x = jnp.ones((4, TOKENS, WIDTH))

    def forget() -> None:
        jax.clear_caches()
        gc.collect()

    def lower(way: str) -> Callable[[], Any]:
        return lambda: jax.jit(gradients()[way]).lower(state, x)

    lowered = timing.interleaved(
        {way: lower(way) for way in gradients()},
        21,
        clock=time.process_time,
        before=forget,
    )
    steps = {way: jax.jit(of) for way, of in gradients().items()}
    runs = {
        way: lambda step=step: jax.block_until_ready(step(state, x))
        for way, step in steps.items()
    }
    for run in runs.values():
        run()
    ran = timing.interleaved(runs, 21)
    texts = {way: testing.optimized_hlo(of, state, x) for way, of in steps.items()}
    print('| way to freeze | program | trace + lower | gradient |\n|---|---|---|---|')
    for way in runs:
        program = 'stops' if texts[way] == texts[BY_HAND] else 'another'
        ratios = (timing.ratios(times, BY_HAND)[way] for times in (lowered, ran))
        cells = [f'{r.median:.2f} ({r.low:.2f} to {r.high:.2f})' for r in ratios]
        print(f'| {way} | {program} | {" | ".join(cells)} |')
    layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(200)]
    model = nnx.Dict(layers=nnx.List(layers))
    made = timing.interleaved(
        {
            'nnx.clone': lambda: nnx.clone(model, variables=False),
            VIEW: lambda: nnx.stop_gradient(model, 'layers/**'),
        },
        21,
    )
    ratio = timing.ratios(made, 'nnx.clone')[VIEW]
    print(f'\n{VIEW}, to nnx.clone(model, variables=False): {ratio.median:.2f}')


if __name__ == '__main__':
    main()

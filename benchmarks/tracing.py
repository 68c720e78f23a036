"""Time to trace and lower a gradient, relative to stops by hand, of this process alone.

    python -m benchmarks.tracing

Nothing is found in a cache, and no garbage is collected meanwhile. The bounds are 1.05
for one block around a model and 1.15 for a block in each of 1,000 modules.
"""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import models, modules, spellings, timing
from benchmarks.rivals import BY_HAND
from benchmarks.selections import Selection
from flax_sg import linen as nn

WIDTH, NUMBER = 64, 1000


def compare(name: str, applies: Mapping[str, Any], shapes: Any, rounds: int) -> None:
    """Prints the time of each way to stop, as ratios to that by hand."""

    def lower(apply: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            def loss(params: Any, x: jax.Array) -> jax.Array:
                return jnp.sum(apply({'params': params}, x))

            jax.jit(jax.grad(loss)).lower(*shapes)

        return run

    def forget() -> None:
        jax.clear_caches()
        gc.collect()

    runs = {way: lower(apply) for way, apply in applies.items()}
    gc.disable()
    times = timing.interleaved(runs, rounds, clock=time.process_time, before=forget)
    for way, ratio in timing.ratios(times, BY_HAND).items():
        low, high = f'{ratio.low:.3f}', f'{ratio.high:.3f}'
        print(f'{name}, {way}: {ratio.median:.3f} ({low} to {high})')


def main() -> None:
    """Compares a transformer of twelve layers, and a thousand small modules."""
    model = models.Transformer(width=WIDTH)
    x = jnp.ones((2, 8, WIDTH))
    params = jax.eval_shape(model.init, jax.random.key(0), x)['params']
    selection = Selection.of('layer_.*')

    def around(where: Any) -> Callable[..., Any]:
        def apply(*args: Any) -> Any:
            with nn.stop_gradient(where):
                return model.apply(*args)

        return apply

    ways = {
        BY_HAND: spellings.by_hand(model, selection),
        'a glob': around('layer_*/**'),
        'a function': around(lambda path: path.startswith('layer')),
        'Frozen': nn.Frozen(model, 'layer_*/**').apply,
    }
    compare('transformer', ways, (params, x), 21)

    many = modules.Many(NUMBER)
    each = modules.Many(NUMBER, lambda name: modules.Small(nn.stop_gradient, name=name))
    ways = {
        BY_HAND: spellings.by_hand(many, modules.KERNELS),
        'a block': spellings.block_around(many, modules.KERNELS),
        'a block in each': each.apply,
    }
    compare(f'{NUMBER:,} modules', ways, modules.shapes(NUMBER), 7)


if __name__ == '__main__':
    main()

"""Measures reports beside a trace of the gradient, for 1,000 and 10,000 parameters.

    python -m benchmarks.gradient_flow

The bounds are 1.4 times the trace for ``sg.live``, and 1.2 times for a report of 10,000
parameters: reports have to be quick enough for test suites.
"""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from flax_sg.flow import gradient_flow, live


class Deep(nn.Module):
    """Layers of two parameters each, of three kinds in turn."""

    layers: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Runs the layers."""
        for number in range(self.layers):
            layer = nn.Dense(8, name=f'layer_{number}')
            x = nn.relu(layer(x)) if number % 3 else nn.LayerNorm()(layer(x))
        return jnp.mean(x**2)


def seconds(run: Callable[..., Any], *args: Any) -> float:
    """Returns the CPU seconds of this process that a call takes, with empty caches."""
    jax.clear_caches()
    start = time.process_time()
    run(*args)
    return time.process_time() - start


def main() -> None:
    """Prints the times of the trace and of the reports."""
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    for layers, times in ((400, 3), (3750, 1)):
        model = Deep(layers)
        params = jax.eval_shape(model.init, jax.random.key(0), x)['params']
        print(f'{len(jax.tree.leaves(params))} parameters')
        for _ in range(times):

            def loss(params: Any, x: jax.Array, model: nn.Module = model) -> Any:
                return model.apply({'params': params}, x)

            traced = seconds(jax.make_jaxpr(jax.grad(loss)), params, x)
            ways = {'gradient_flow': gradient_flow, 'live': live}
            found = {name: seconds(run, loss, params, x) for name, run in ways.items()}
            shares = (f'{name} {took / traced:.2f}' for name, took in found.items())
            print(f'trace {traced:.2f} s, times the trace: {", ".join(shares)}')


if __name__ == '__main__':
    main()

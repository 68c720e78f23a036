"""Measures ``sg.gradient_flow`` beside a trace of the gradient, for 1,000 parameters.

    python -m benchmarks.gradient_flow

The bound is 1.3 times the trace: reports have to be quick enough for test suites.
"""

import time

import jax
import jax.numpy as jnp
from flax import linen as nn

from flax_sg.flow import gradient_flow


class Deep(nn.Module):
    """Layers of two parameters each, 1,068 in all."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Three kinds of layers in turn."""
        for number in range(400):
            layer = nn.Dense(8, name=f'layer_{number}')
            x = nn.relu(layer(x)) if number % 3 else nn.LayerNorm()(layer(x))
        return jnp.mean(x**2)


def seconds(start: float) -> float:
    """Returns the CPU seconds of this process since ``start``."""
    return time.process_time() - start


def main() -> None:
    """Prints the times of the trace and the report."""
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    model = Deep()
    params = jax.eval_shape(model.init, jax.random.key(0), x)['params']
    print(f'{len(jax.tree.leaves(params))} parameters')
    for _ in range(3):

        def loss(params: object, x: jax.Array) -> jax.Array:
            return model.apply({'params': params}, x)

        jax.clear_caches()
        start = time.process_time()
        jax.make_jaxpr(jax.grad(loss))(params, x)
        traced = seconds(start)
        jax.clear_caches()
        start = time.process_time()
        report = gradient_flow(loss, params, x)
        reported = seconds(start)
        ratio = reported / traced
        print(f'trace {traced:.2f} s, report {reported:.2f} s: {ratio:.2f} times')
        assert all(report.live)


if __name__ == '__main__':
    main()

"""Measures ``testing.moves`` beside a step, for 1,000 parameters.

    python -m benchmarks.step_check

It compares each parameter where it lies, and fetches all results at once.
"""

import time

import jax
import jax.numpy as jnp

from flax_sg import testing

Params = dict[str, jax.Array]


@jax.jit
def step(params: Params) -> Params:
    """Gradient descent on the sum of squares."""
    grads = jax.grad(lambda p: sum(jnp.sum(x**2) for x in p.values()))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def main() -> None:
    """Prints the times of a step and of what it moved."""
    params = {f'layer_{n}': jnp.full((64, 64), 1.0 + n) for n in range(1000)}
    jax.block_until_ready(step(params))
    for _ in range(4):
        start = time.perf_counter()
        new = jax.block_until_ready(step(params))
        middle = time.perf_counter()
        report = testing.moves(params, new, params)
        end = time.perf_counter()
        print(f'step {middle - start:.3f} s, check {end - middle:.3f} s: {report!r}')


if __name__ == '__main__':
    main()

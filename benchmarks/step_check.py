"""Measures ``testing.moves`` beside the step that it runs, for 1,000 parameters.

    python -m benchmarks.step_check

Beyond the step it copies its arguments, and takes two norms for each parameter.
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
    """Prints the times of a step and of the check of one."""
    params = {f'layer_{n}': jnp.full((64, 64), 1.0 + n) for n in range(1000)}
    jax.block_until_ready(step(params))
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(step(params))
        middle = time.perf_counter()
        report = testing.moves(step, params, grads=params)
        end = time.perf_counter()
        print(f'step {middle - start:.3f} s, check {end - middle:.3f} s: {report!r}')


if __name__ == '__main__':
    main()

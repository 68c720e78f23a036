"""Runs compiled steps on a device that is there, and times them."""

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compiled import Step

WARM, ROUNDS = 3, 15


def of_step(step: Step, place: Callable[[Any], Any], inputs: Any) -> float:
    """Returns the seconds of a training step: the median of fifteen, after three.

    Args:
        step: the step; its programs are compiled for the device.
        place: the function that made its shapes on the device.
        inputs: the shapes of the inputs of the loss.
    """
    params = arrays(place(step.trainer.params))
    optimizer = arrays(step.optimizer, zeros=True)
    return of_run(step.runner(params, optimizer, arrays(place(inputs))))


def of_loop(program: Any, carried: Any, fixed: Any) -> float:
    """Returns the seconds of a program that returns its first arguments, changed."""
    held = list(carried)

    def run() -> Any:
        held[:] = program(*held, *fixed)
        return held

    return of_run(run)


def of_run(run: Callable[[], Any]) -> float:
    """Returns the seconds of a function that runs a program."""
    seconds = []
    for _ in range(WARM + ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds[WARM:]))


def arrays(tree: Any, zeros: bool = False) -> Any:
    """Makes arrays of shapes: small random floats, and integers below 100; or zeros."""
    keys = map(jax.random.key, itertools.count())
    return jax.tree.map(
        lambda leaf: jax.device_put(
            _array(next(keys), leaf.shape, leaf.dtype, zeros), leaf.sharding
        ),
        tree,
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _array(key: jax.Array, shape: Any, dtype: Any, zeros: bool) -> jax.Array:
    if zeros:
        return jnp.zeros(shape, dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(key, shape, 0, 100, dtype)
    return 0.02 * jax.random.normal(key, shape, dtype)

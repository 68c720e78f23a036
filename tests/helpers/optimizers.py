"""Optimizers of optax, each made anew: what each kind of state needs has a row."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    'adamw': lambda: optax.adamw(0.1, weight_decay=0.5),
    'adam': lambda: optax.adam(0.1),
    'momentum': lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    'clip': lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.1)),
    'accumulating': lambda: optax.MultiSteps(optax.adamw(0.1), 2),
    'adafactor': lambda: optax.adafactor(0.1, min_dim_size_to_factor=2, momentum=0.9),
    'in groups': lambda: optax.multi_transform(
        {'slow': optax.adam(0.01), 'fast': optax.adamw(0.1)},
        lambda p: jax.tree.map(lambda x: 'slow' if x.ndim > 1 else 'fast', p),
    ),
}


def filled(state: Any) -> Any:
    """A state with other numbers everywhere."""

    def fill(n: int, leaf: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            return jnp.full_like(leaf, n)
        new = np.arange(jnp.size(leaf)) + 100 * n
        return jnp.array(new.reshape(jnp.shape(leaf)), jnp.result_type(leaf))

    leaves, treedef = jax.tree.flatten(state)
    return treedef.unflatten(map(fill, itertools.count(1), leaves))

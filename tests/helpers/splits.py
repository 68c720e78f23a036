"""Losses of which a part is known, in two programs beside the whole one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import flax_sg as sg

PARAMS: Any = {
    name: jax.random.normal(jax.random.key(n), (4, 4)) / 2
    for n, name in enumerate(('torso', 'cell', 'head'))
}
XS = jax.random.normal(jax.random.key(9), (6, 3, 4))
TRAINED = ['cell', 'head']
# What a step of training makes of them. The frozen torso stays.
MOVED: Any = {k: v + 0.1 if k in TRAINED else v for k, v in PARAMS.items()}


def products(fun: Any, *args: Any) -> int:
    """How many products stand in a program, wherever they are."""
    return str(jax.make_jaxpr(fun)(*args)).count('dot_general[')


def bits(kept: Any) -> Any:
    """Arrays that NumPy compares: the data of keys."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [jax.random.key_data(x) if is_key(x) else x for x in kept]


def assert_same(ours: Any, right: Any) -> None:
    """Within the last bits: XLA fuses operations in other ways."""
    assert jax.tree.structure(ours) == jax.tree.structure(right)
    for a, b in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def assert_split(
    fun: Any, *args: Any, wrt: Any = TRAINED, once: int, again: int = 0
) -> Any:
    """Value and gradients are those of the function, also after a step of training.

    Args:
        fun: the loss.
        *args: its data.
        wrt: what is trained.
        once: how many products are made once.
        again: how many of them are made at each step, too.
    """
    ahead = sg.precompute(fun, PARAMS, *args, wrt=wrt)
    kept = ahead.early(PARAMS, *args)
    jax.tree.map(
        np.testing.assert_array_equal, *map(bits, (ahead.early(MOVED, *args), kept))
    )
    how: Any = {'wrt': wrt, 'unused': 'ignore'}
    for params in PARAMS, MOVED:
        right = sg.value_and_grad(fun, **how)(params, *args)
        assert_same(sg.value_and_grad(ahead.late, **how)(params, kept), right)
        if not again:
            away = {k: v if k in TRAINED else sg.ABSENT for k, v in params.items()}
            np.testing.assert_allclose(ahead.late(away, kept), right[0], rtol=1e-4)
    whole = products(fun, PARAMS, *args)
    assert products(ahead.late, PARAMS, kept) == whole - once + again
    assert products(ahead.early, PARAMS, *args) == once
    return ahead


def assert_rows(fun: Any, params: Any, x: Any, trained: list[str]) -> Any:
    """What is kept of two batches may be put together, and in another order.

    Args:
        fun: the loss.
        params: a dict of its parameters.
        x: a batch.
        trained: the names of those that are trained.
    """
    ahead = sg.precompute(fun, params, x, wrt=trained, examples=True)
    both = [ahead.early(params, part) for part in (x, x * 2)]
    kept = jax.tree.map(lambda *parts: jnp.concatenate(parts), *both)
    size = len(x)
    how: Any = {'wrt': trained, 'unused': 'ignore'}
    for scale, rows in (1.0, [2, size + 1, size, 0]), (0.5, [1, size, 2, size + 2]):
        order = np.array(rows[:size])
        given = {k: v * scale if k in trained else v for k, v in params.items()}
        batch = [leaf[order] for leaf in kept]
        right = sg.value_and_grad(fun, **how)(given, jnp.concatenate([x, x * 2])[order])
        assert_same(sg.value_and_grad(ahead.late, **how)(given, batch), right)
    return ahead

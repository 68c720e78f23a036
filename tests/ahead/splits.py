"""Losses of which a part is known, in two programs beside the whole one."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_sg as sg

PARAMS: Any = {
    name: jax.random.normal(jax.random.key(n), (4, 4)) / 2
    for n, name in enumerate(('torso', 'cell', 'head'))
}
XS = jax.random.normal(jax.random.key(9), (6, 3, 4))
TRAINED = ['cell', 'head']
# What training makes of them: signs may change. The frozen torso stays.
MOVED: Any = {k: 0.1 - v if k in TRAINED else v for k, v in PARAMS.items()}


def products(fun: Any, *args: Any) -> int:
    """How many products stand in a program, wherever they are."""
    return str(jax.make_jaxpr(fun)(*args)).count('dot_general[')


def bits(kept: Any) -> Any:
    """Arrays that NumPy compares: the data of keys."""
    types = [getattr(x, 'dtype', int) for x in kept]
    are_keys = [jnp.issubdtype(dtype, jax.dtypes.prng_key) for dtype in types]
    pairs = zip(kept, are_keys, strict=True)
    return [jax.random.key_data(x) if is_key else x for x, is_key in pairs]


def assert_same(ours: Any, right: Any, rtol: float = 2e-5) -> None:
    """Within the last bits: XLA fuses operations in other ways."""
    assert jax.tree.structure(ours) == jax.tree.structure(right)
    for a, b in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def precomputed(fun: Any, *args: Any, once: int | None = None, **how: Any) -> Any:
    """``sg.precompute``, which warns if nothing is computed once."""
    with contextlib.ExitStack() as stack:
        if once == 0:
            warns = pytest.warns(UserWarning, match='^Nothing is computed once')
            stack.enter_context(warns)
        return sg.precompute(fun, *args, **how)


def assert_split(
    fun: Any,
    *args: Any,
    params: Any = PARAMS,
    wrt: Any = TRAINED,
    once: int | None = None,
    again: int = 0,
    reads: bool = False,
    kept: Any = None,
    through: Any = lambda fun: fun,
) -> Any:
    """Value and gradients are those of the function, also after a step of training.

    Args:
        fun: the loss.
        *args: its data.
        params: its parameters.
        wrt: what is trained.
        once: how many products are made once, if that is known.
        again: how many of them are made at each step, too.
        reads: whether late reads frozen parameters.
        kept: a list or a set of the shapes of what is kept, if they are known.
        through: what each program goes through.
    """
    ahead = precomputed(fun, params, *args, wrt=wrt, once=once)
    made = through(ahead.early)(params, *args)
    assert kept is None or type(kept)(k.shape for k in made) == kept
    trained, frozen = sg.partition(params, wrt)
    moved = sg.combine(jax.tree.map(lambda x: 0.1 - x, trained), frozen)
    jax.tree.map(
        np.testing.assert_array_equal,
        *map(bits, (through(ahead.early)(moved, *args), made)),
    )
    read, moves = (
        {one.path for one in sg.paths(params, where=where) if one.selected}
        for where in (ahead.reads, wrt)
    )
    assert bool(read - moves) == (reads or again > 0)
    how: Any = {'wrt': wrt, 'unused': 'ignore'}
    for given in params, moved:
        ours, right = (through(sg.value_and_grad(f, **how)) for f in (ahead.late, fun))
        expected = right(given, *args)
        assert_same(ours(given, made), expected)
        needed = sg.partition(given, ahead.reads)[0]
        assert_same(through(ahead.late)(needed, made), expected[0], 1e-4)
    if once is not None:
        whole = products(fun, params, *args)
        assert products(ahead.late, params, made) == whole - once + again
        assert products(ahead.early, params, *args) == once
    return ahead


def assert_rows(fun: Any, params: Any, x: Any, trained: Any, once: Any = None) -> Any:
    """What is kept of two batches may be put together, and in another order.

    Args:
        fun: the loss.
        params: a dict of its parameters.
        x: a batch.
        trained: the names of those that are trained.
        once: how many products are made once, if that is known.
    """
    ahead = precomputed(fun, params, x, once=once, wrt=trained, examples=True)
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

"""What is told to be zero is zero for all inputs, and here no zero is missed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from flax_sg.flow import zeros

BOOLS = np.array([[True, False, True], [False, False, True]])
SOME, NONE = BOOLS.astype(np.float32), np.zeros((2, 3), np.float32)
# Each is a function of an array of ``SOME.shape``.
ROWS: dict[str, Callable[[Any], Any]] = {
    'in place': lambda x: jnp.tanh(x * SOME),
    'moved': lambda x: (x * SOME).T[None],
    'spread': lambda x: jnp.broadcast_to(x * SOME, (4, 2, 3)),
    'a sum': lambda x: x * SOME + x * SOME[:1],
    'a product': lambda x: (x * SOME) * (x * SOME[::-1]),
    'a quotient': lambda x: (x * SOME) / x,
    'a power': lambda x: (x * SOME) ** 2,
    'padded': lambda x: jnp.pad(x * SOME, ((0, 1), (2, 0))),
    'one of two': lambda x: jnp.where(jnp.asarray(BOOLS), x, x * NONE),
    'the other of two': lambda x: jnp.where(jnp.logical_not(BOOLS), x, x * NONE),
    'not a mask': lambda x: x * jnp.logical_not(BOOLS).astype(x.dtype),
    'a mask that depends on data': lambda x: jnp.where(x > 1.5, x * SOME, x * NONE),
    'rows of zeros': lambda x: jnp.sum(x * SOME[:, :1], axis=1),
    'parts': lambda x: jnp.split(x * SOME, [1], axis=1),
    'parts of one row': lambda x: jnp.split(x * SOME[:1], [1, 1]),
    'a slice': lambda x: (x * SOME)[:, 1:],
    'a slice of one row': lambda x: (x * SOME[:1])[1:, :2],
    'a slice in steps': lambda x: lax.slice(x * SOME, (0, 0), (2, 3), (1, 2)),
    'cut by padding': lambda x: lax.pad(x * SOME, 0.0, ((0, 0, 0), (-1, 1, 0))),
    'spread and cut': lambda x: lax.pad(x * SOME, 0.0, ((0, -1, 1), (1, -2, 2))),
    'cut and small': lambda x: lax.pad(x * SOME[:1], 0.0, ((-1, 0, 0), (0, -1, 0))),
    'joined': lambda x: jnp.concatenate([x * NONE, x * NONE]),
    'joined parts': lambda x: jnp.concatenate([x * NONE, x, x * SOME], axis=1),
    'joined and small': lambda x: jnp.concatenate([x * SOME[:1], x * NONE], axis=0),
    'stacked': lambda x: jnp.stack([x * SOME, x * NONE, x]),
    'stacked along the last axis': lambda x: jnp.stack([x * SOME[:1], x * NONE], 2),
    'unstacked': lambda x: jnp.unstack(x * SOME),
    'unstacked along the last axis': lambda x: jnp.unstack((x * SOME)[:, :2], axis=1),
    'unstacked of one row': lambda x: jnp.unstack(x * SOME[:1]),
    'reshaped': lambda x: (x * SOME).reshape(3, 1, 2),
    'of one row, reshaped': lambda x: (x * SOME[:1]).ravel(),
    'all of it, reshaped': lambda x: (x * NONE).reshape(6),
    'reversed': lambda x: (x * SOME)[::-1, ::-1],
    'padded within': lambda x: lax.pad(x * SOME, 0.0, ((1, 0, 2), (0, 1, 1))),
    'padded, small': lambda x: lax.pad(x * SOME[:1], 0.0, ((0, 0, 0), (0, 0, 2))),
    'sorted': lambda x: jnp.sort(x * NONE),
    'a maximum': lambda x: jnp.max(x * NONE, axis=1),
    'gathered': lambda x: jnp.take(x * NONE, jnp.array([0, 5]), axis=0, mode='clip'),
    'filled with zeros': lambda x: (
        (x * NONE).at[jnp.array([0, 5])].get(mode='fill', fill_value=0.0)
    ),
    'a matrix product': lambda x: (x * NONE) @ x.T,
    'put in': lambda x: lax.dynamic_update_slice(x * NONE, x[:1] * NONE[:1], (1, 0)),
    'branches': lambda x: lax.cond(x[0, 0] > 1.5, jnp.sin, jnp.tanh, x * SOME),
    'turns': lambda x: lax.fori_loop(0, 3, lambda _, y: y + x * SOME, x * SOME),
    'a scan': lambda x: lax.scan(lambda c, y: (c, c * y[:, None]), x * SOME, x.T)[1],
    'a call': lambda x: jax.jit(lambda y: y * x)(x * SOME),
}


@pytest.mark.parametrize('name', ROWS)
def test_zeros_of(name: str) -> None:
    inputs = np.random.default_rng(0).uniform(1.0, 2.0, (20, *SOME.shape))
    outputs = jax.vmap(ROWS[name])(jnp.asarray(inputs, jnp.float32))
    told = zeros.zeros_of(jax.make_jaxpr(ROWS[name])(SOME))
    for mask, leaf in zip(told, jax.tree.leaves(outputs), strict=True):
        expected = np.asarray(leaf == 0.0).all(0)
        np.testing.assert_array_equal(np.broadcast_to(mask, expected.shape), expected)
        assert expected.any() or not expected.size, 'nothing is tried'


@pytest.mark.parametrize(
    'fn',
    [
        lambda x: (x * NONE).at[jnp.array([5])].get(mode='fill', fill_value=1.0),
        lambda x: jnp.take(jnp.int32(x * NONE), jnp.array([9]), mode='fill'),
        lambda x: jnp.prod(x[:0] * NONE[:0]),
        lambda x: jnp.max(x[:0] * NONE[:0], initial=3.0),
    ],
)
def test_values_out_of_nothing(fn: Any) -> None:
    assert fn(jnp.asarray(SOME)).all()
    [told] = zeros.zeros_of(jax.make_jaxpr(fn)(SOME))
    assert not told.any()


def test_what_comes_through_a_long_chain_of_carries_is_not_zero() -> None:
    def chain(x: Any) -> Any:
        start = (x[0, 0] * 0.0,) * 20
        turn = lambda carry, _: ((x[0, 0], *carry[:-1]), None)  # noqa: E731
        return lax.scan(turn, start, None, length=20)[0][-1]

    [told] = zeros.zeros_of(jax.make_jaxpr(chain)(SOME))
    assert not told.any()


@pytest.mark.parametrize('width', (8, 40))
def test_what_moves_along_a_carry_from_turn_to_turn_is_not_zero(width: int) -> None:
    """Each turn tells less of one value; of another, all is known in the end."""

    def line(x: Any) -> Any:
        def turn(carry: Any, _: Any) -> Any:
            return (jnp.roll(carry[0], 1), carry[1] * 2.0), None

        first = jnp.concatenate([x[0, :1], jnp.zeros(width - 1)])
        return lax.scan(turn, (first, x[0] * NONE[0]), None, length=width - 1)[0]

    moved, still = zeros.zeros_of(jax.make_jaxpr(line)(SOME))
    assert not moved.any() and still.all()

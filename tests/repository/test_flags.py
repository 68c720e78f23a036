"""The strict flags are on in every test, and their fixtures do what they say.

Every other test would still pass without the flags.
"""

import warnings

import jax
import jax.numpy as jnp
import pytest


def test_dtype_promotion_is_strict():
    with pytest.raises(ValueError, match='jax_numpy_dtype_promotion=strict'):
        jnp.ones(2, 'int32') + jnp.ones(2, 'float32')


def test_rank_promotion_raises():
    with pytest.raises(ValueError, match='jax_numpy_rank_promotion'):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_warnings_are_errors():
    with pytest.raises(UserWarning, match='told'):
        warnings.warn('told', stacklevel=1)


def leak_a_tracer() -> jax.Array:
    kept = []
    jax.jit(lambda x: kept.append(x) or x)(jnp.float32(1))
    return kept[0]


def test_leaks_are_seen(leaks):
    with pytest.raises(Exception, match='Leaked'):
        leak_a_tracer()

"""Fixtures of all tests."""

import gc
from collections.abc import Iterator

import hypothesis
import jax
import pytest

# Doctests would import the first, which has errors on purpose for pyright to read, and
# the second, a program, which imports what only the extra `notebooks` brings, and those
# in `clients`, programs that import what only `dev.py clients` installs.
collect_ignore = ['typed_linen.py', 'run_notebooks.py', 'clients']

# The same examples on every run and machine; no limit of time, since JAX compiles.
hypothesis.settings.register_profile(
    'deterministic', derandomize=True, deadline=None, database=None
)
# Many others on each run, by `--hypothesis-profile=long`, which Hypothesis loads later.
hypothesis.settings.register_profile(
    'long',
    max_examples=5000,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile('deterministic')


@pytest.fixture
def leaks() -> Iterator[None]:
    """Makes JAX raise when a tracer outlives its trace.

    For chosen tests (`@pytest.mark.usefixtures('leaks')`): the check walks the heap and
    switches JAX's trace caches off, so it is slow and would hide what caches do.
    """
    gc.freeze()  # What is there already is not walked.
    with jax.checking_leaks():
        yield


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Lets operands differ in dtype, where the code of others relies on it.

    With flax 0.12 that is LayerNorm and BatchNorm with a `dtype` other than float32;
    with optax 0.2 every optimizer that counts its steps, Adam among them (`b1**count`).
    """
    with jax.numpy_dtype_promotion('standard'):
        yield

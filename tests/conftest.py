"""Fixtures of all tests."""

import gc
from collections.abc import Iterator
from importlib import metadata

import hypothesis
import jax
import pytest

# Collecting doctests imports files. The first has errors on purpose, for pyright. The
# second is a program that needs the extra `notebooks`. Those in `clients` are programs
# that need the packages of `dev.py clients`. The last is a plugin that needs SlipCover.
collect_ignore = ['typed.py', 'run_notebooks.py', 'clients', 'measure.py']
if metadata.version('flax') == '0.12.0':  # flax_sg.nnx asks for 0.12.1.
    collect_ignore += ['nnx', 'errors/graph_errors.py']
    collect_ignore += ['models/test_nnx_bridge.py', 'trees/test_nnx_tied.py']
    collect_ignore += ['helpers/described/nnx_models.py']

# Same examples on every run and machine. No deadline, since JAX compiles.
hypothesis.settings.register_profile(
    'deterministic', derandomize=True, deadline=None, database=None
)
# New examples on each run. Hypothesis loads `--hypothesis-profile=long` later.
hypothesis.settings.register_profile(
    'long',
    max_examples=5000,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile('deterministic')


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        '--rewrite',
        action='store_true',
        help='write anew what tests make: tests/errors/messages.txt, tables of pages',
    )


@pytest.fixture
def leaks() -> Iterator[None]:
    """Makes JAX raise when a tracer outlives its trace.

    For chosen tests (`@pytest.mark.usefixtures('leaks')`): the check walks the heap and
    switches JAX's trace caches off, so it is slow and would hide what caches do.
    """
    gc.freeze()  # Frozen objects are left out of the walk.
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

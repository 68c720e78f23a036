"""Sets the flags of every test and doctest, before JAX starts.

This file is outside of tests/ so that the doctests of flax_sg get the flags too.
"""

import gc
import tempfile
from importlib import metadata

import pytest

from tests.helpers import quick_compile

_cache = tempfile.TemporaryDirectory(prefix='flax_sg-tests-')
quick_compile.set_flags(_cache.name)

import jax  # noqa: E402

# One device counts as eight, for tests of many devices.
jax.config.update('jax_num_cpu_devices', 8)

# Implicit conversions hide faults, such as a stray float64 or a mask that broadcasts.
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')


# flax_sg.nnx asks for flax 0.12.1: with 0.12.0 there is nothing to test. The tests
# that are left out with it stand in tests/conftest.py.
if metadata.version('flax') == '0.12.0':
    collect_ignore = ['flax_sg/nnx', 'benchmarks/graphs.py']


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keeps the garbage collector from walking through JAX repeatedly."""
    gc.freeze()
    # JAX keeps nearly all that is made later, so a whole walk finds little.
    gc.set_threshold(700, 10, 100)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Lets JAX forget the programs of a file, and what it needed to compile them.

    The more of that there is, the longer each new program takes to lower.
    """
    if nextitem is None or nextitem.path != item.path:
        jax.clear_caches()

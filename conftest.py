"""Sets the flags of every test and doctest, before JAX starts.

This file is outside of tests/ so that the doctests of flax_sg get the flags too.
"""

import gc
import os
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

import coverage
import pytest

from tests.quick_compile import FLAGS

# Results are compared to the last bit with programs that ran on the same device.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('XLA_FLAGS', FLAGS)  # Each program runs only once or twice.
# Equal programs of several tests and processes are compiled once. Each is still traced
# and lowered, so tests that count traces and compilations count right.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix='flax_sg-tests-')
    os.environ['JAX_COMPILATION_CACHE_DIR'] = _cache.name
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
    os.environ['JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES'] = 'none'

import jax

# One device counts as eight, for tests of many devices.
jax.config.update('jax_num_cpu_devices', 8)

# Implicit conversions hide faults, such as a stray float64 or a mask that broadcasts.
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')


# flax_sg.nnx asks for flax 0.12.1: with 0.12.0 there is nothing to test. The tests
# that are left out with it stand in tests/conftest.py.
if metadata.version('flax') == '0.12.0':
    collect_ignore = ['flax_sg/nnx.py', 'flax_sg/graphs', 'benchmarks/graphs.py']


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options that `dev.py test` gives."""
    parser.addoption(
        '--quick',
        action='store_true',
        help='run the first case of each test, without those marked slow or long',
    )
    parser.addoption(
        '--measure',
        action='store_true',
        help='measure the coverage: on imports, and on the first case of each test',
    )


def pytest_configure(config: pytest.Config) -> None:
    """Starts measuring before the first import of flax_sg, in each test process."""
    if config.getoption('--measure') and config.getoption('dist', 'no') == 'no':
        config.pluginmanager.register(Measured())


def first_cases(items: Iterable[pytest.Item]) -> set[str]:
    """The names of the first case of each test."""
    first: dict[str, str] = {}
    for item in items:
        first.setdefault(item.nodeid.partition('[')[0], item.nodeid)
    return set(first.values())


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leaves out slow tests, with `--quick`."""
    if not config.getoption('--quick'):
        return
    chosen = first_cases(items)
    runs, left_out = [], []
    for item in items:
        takes_long = any(map(item.get_closest_marker, ('slow', 'long')))
        runs_it = item.nodeid in chosen and not takes_long
        (runs if runs_it else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = runs


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


class Measured:
    """Measures the coverage of imports, and of the first case of each test.

    Measuring slows Python down by half, JAX's code included. The first case of a test
    nearly always runs the lines of the other cases. The mark ``every_case`` measures
    all cases, for short tests whose cases run different lines. So every machine
    measures the same cases, in any number of processes.

    Attributes:
        cases: the names of the measured cases.
    """

    def __init__(self) -> None:
        self.cases: set[str] = set()
        self.coverage = coverage.Coverage(data_suffix=True)
        self.coverage.start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Stops measuring after the imports, and chooses the cases."""
        self.coverage.stop()
        every = [i for i in session.items if i.get_closest_marker('every_case')]
        self.cases = first_cases(session.items) | {item.nodeid for item in every}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Measures a case, with its fixtures."""
        if item.nodeid not in self.cases:
            return (yield)
        self.coverage.start()
        try:
            return (yield)
        finally:
            self.coverage.stop()

    def pytest_sessionfinish(self) -> None:
        """Leaves a file for each process, which `coverage combine` joins."""
        self.coverage.save()

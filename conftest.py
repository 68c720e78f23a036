"""The flags under which every test and doctest runs; read before JAX starts.

It stands here and not in tests/ so that the doctests of flax_sg get them too.
"""

import gc
import os
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import coverage
import pytest

# Results are compared to the last bit with programs that ran on the same device.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# XLA's own optimizations are all there; machine code that is slower is made in half the
# time, and each program runs but once or twice.
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0')
# Equal programs of several tests, in several processes, are compiled once. They are
# traced and lowered each time, and what is counted as a trace or a compilation is so.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix='flax_sg-tests-')
    os.environ['JAX_COMPILATION_CACHE_DIR'] = _cache.name
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
    os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
    os.environ['JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES'] = 'none'

import jax

# Programs for many devices are tested on one that counts as eight.
jax.config.update('jax_num_cpu_devices', 8)

# Implicit conversions hide faults: a float64 that slipped in, a mask that broadcast.
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')


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
    """Begins before the first import of flax_sg, in each process that runs tests."""
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
    """Leaves out what takes long, with `--quick`."""
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
    """Keeps the garbage collector from walking through JAX again and again."""
    gc.freeze()


class Measured:
    """Measures the coverage of imports, and of the first case of each test.

    Python takes half as much time again while it is measured, JAX's own part of it too.
    The first case runs what the others run, nearly always. All cases are measured of a
    test with the mark ``every_case``: short ones, which run lines of their own. So it
    is the same cases on every machine, and in any number of processes.

    Attributes:
        cases: the names of what is measured.
    """

    def __init__(self) -> None:
        self.cases: set[str] = set()
        self.coverage = coverage.Coverage(data_suffix=True)
        self.coverage.start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Ends with the imports, and chooses the cases."""
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

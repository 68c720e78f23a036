"""Measures coverage in a run of tests: a plugin that ``dev.py test`` names.

It measures imports, and the first case of each test: measuring slows Python down by
half, JAX's code included, and the first case of a test nearly always runs the lines of
the others. The mark ``every_case`` measures all cases, for short tests whose cases run
different lines. So every machine measures the same cases, in any number of processes.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import coverage
import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Starts measuring before the first import of flax_sg, in each test process."""
    if config.getoption('dist', 'no') == 'no':
        config.pluginmanager.register(Measured())


def first_cases(items: Iterable[pytest.Item]) -> set[str]:
    """The names of the first case of each test."""
    first: dict[str, str] = {}
    for item in items:
        first.setdefault(item.nodeid.partition('[')[0], item.nodeid)
    return set(first.values())


class Measured:
    """Measures the coverage of imports, and of the first case of each test.

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

"""Measures which lines of flax_sg the tests run: a plugin that ``dev.py test`` names.

SlipCover puts probes into flax_sg, and takes out those that were hit. A tracer, such as
that of coverage.py, would slow all of Python down by half, JAX's code included.
"""

import json
import os
from pathlib import Path

import pytest
import slipcover
from slipcover.config import read_config

FOLDER = Path(__file__).parents[1] / '.measured'


def pytest_configure(config: pytest.Config) -> None:
    """Starts measuring before the first import of flax_sg, in each test process."""
    if config.getoption('dist', 'no') == 'no':
        config.pluginmanager.register(Measured())


class Measured:
    """Measures the lines that one process runs."""

    def __init__(self) -> None:
        options = read_config()
        source = options['source']
        also = options['exclude-also']
        self.lines = slipcover.Slipcover(source=source, exclude_also=also)
        matcher = slipcover.FileMatcher(sources=source)
        slipcover.ImportManager(self.lines, matcher).__enter__()

    def pytest_sessionfinish(self) -> None:
        """Leaves a file for each process, which `slipcover --merge` joins."""
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f'{os.getpid()}.json').write_text(
            json.dumps(self.lines.get_coverage())
        )

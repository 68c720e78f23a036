"""Measures which lines of flax_sg the tests run: a plugin that ``dev.py test`` names.

As a program it prints those that no page and no notebook runs, but for lines that raise
and the demo: each is for somebody, or goes. ``dev.py test --pages``.

SlipCover puts probes into flax_sg, and takes out those that were hit. A tracer, such as
that of coverage.py, would slow all of Python down by half, JAX's code included.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import slipcover
from slipcover.config import read_config
from slipcover.slipcover import format_missing

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / '.measured'


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


def main() -> int:
    """Runs pages and notebooks; prints the lines of each file that none of them runs.

    Returns:
        The exit status: 0 whatever is found, also if a page fails.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    pages = ['-m', 'pytest', '-q', 'tests/repository/test_readme.py']
    subprocess.run([sys.executable, *pages, '-p', 'tests.measure'], cwd=ROOT)
    small = {'FLAX_SG_NOTEBOOKS': 'ci', 'MPLBACKEND': 'agg', 'PYTHONPATH': str(ROOT)}
    for source in sorted((ROOT / 'notebooks').glob('[0-9]*.py')):
        out = ['--fail-under=0', '--json', f'--out={FOLDER / source.stem}.json']
        command = [sys.executable, '-m', 'slipcover', *out, str(source)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **small})
    found = [(len(lines), text) for lines, text in map(_missing, *_of_all())]
    print(*(f'{n:5} {text}' for n, text in sorted(found, reverse=True) if n), sep='\n')
    print(f'{sum(n for n, _ in found):5} lines')
    return 0


def _of_all() -> tuple[list[Path], list[set[int]], list[set[int]]]:
    """Files, what was run of each, and what could be run."""
    run: dict[Path, set[int]] = {}
    rest: dict[Path, set[int]] = {}
    for file in FOLDER.iterdir():
        for name, lines in json.loads(file.read_text())['files'].items():
            path = (ROOT / name).relative_to(ROOT)
            run.setdefault(path, set()).update(lines['executed_lines'])
            rest.setdefault(path, set()).update(lines['missing_lines'])
    paths = [path for path in run if 'demo' not in path.parts]
    return paths, [run[path] for path in paths], [rest[path] for path in paths]


def _missing(path: Path, run: set[int], rest: set[int]) -> tuple[set[int], str]:
    """The lines of a file that were not run, and how they are shown."""
    tree = ast.walk(ast.parse((ROOT / path).read_text()))
    errors = [node for node in tree if isinstance(node, ast.Raise)]
    raised = {n for x in errors for n in range(x.lineno, (x.end_lineno or 0) + 1)}
    missing = rest - run - raised
    return (
        missing,
        f'{path}: {format_missing(sorted(missing), sorted(run | raised), [])}',
    )


if __name__ == '__main__':
    sys.exit(main())

"""Runs Flax's own linen and core tests in blocks, which must change no outcome.

``python3 dev.py witness CHECKOUT`` runs the tests of a Flax checkout once without
blocks and once in each of ``MODES``. It fails if an outcome differs. Tests that also
fail without blocks are only counted. As a pytest plugin, this file opens the blocks and
records the outcomes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_sg import linen as nn
from flax_sg.filters import as_filter, paths
from flax_sg.forms.block_decorator import BlockDecorator
from flax_sg.rules import rules

# By extent. The tests of flax.core have no modules, so no methods are called.
FOLDERS = {
    'plain': ('tests/linen', 'tests/core'),
    'test': ('tests/linen', 'tests/core'),
    'method': ('tests/linen',),
}


@dataclasses.dataclass(frozen=True)
class Copy(rules.Rule):
    """A rule that copies: another object with the same value and gradient."""

    name: ClassVar[str] = 'copy'
    asks_path: ClassVar[bool] = False

    def __call__(self, path: paths.Path, leaf: Any) -> Any:
        """Returns a copy of an array, anything else as it is."""
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        return jnp.array(leaf, copy=True) if isinstance(leaf, jax.Array) else leaf


# The first two select nothing. `copy` rewrites every read and changes no result. `stop`
# changes gradients and no value.
BLOCKS = {
    'false': nn.stop_gradient(False, unused='ignore'),
    'never': nn.stop_gradient(lambda path: False, collections=True, unused='ignore'),
    'copy': BlockDecorator(as_filter(True), Copy(), True, 'ignore'),
    'stop': nn.stop_gradient(True, collections=True, unused='ignore'),
}
# One block around each test, or one in each call of a module's method.
MODES = tuple(f'{extent}-{block}' for extent in ('test', 'method') for block in BLOCKS)


_NORMALIZATION = 'tests/linen/linen_test.py::NormalizationTest::'
_TRANSFORMS = 'tests/linen/linen_transforms_test.py::TransformTest::'


@dataclasses.dataclass(frozen=True)
class Expected:
    """Tests whose outcome a block may change, and the reason."""

    reason: str
    modes: Collection[str]
    tests: Collection[str]


EXPECTED = (
    Expected(
        'it counts traces of nn.jit while parameters are made: a filter that asks for '
        'names may tell apart what modules of different names make.',
        modes=('test-never', 'method-never'),
        tests=(
            f'{_TRANSFORMS}test_jit_scan_retracing_retracing scan',
            f'{_TRANSFORMS}test_jit_scan_retracing_simple scan',
            f'{_TRANSFORMS}test_jit_stateful_submodules_class',
            f'{_TRANSFORMS}test_jit_stateful_submodules_method',
        ),
    ),
    Expected(
        'a body of a transform writes a variable that the block around it selects.',
        modes=('test-copy', 'test-stop', 'method-copy', 'method-stop'),
        tests=(
            f'{_TRANSFORMS}test_complicated_alias_mutation',
            f'{_TRANSFORMS}test_jit_stateful_submodules_class',
            f'{_TRANSFORMS}test_jit_stateful_submodules_method',
            f'{_TRANSFORMS}test_module_instance_in_args_transform',
            f'{_TRANSFORMS}test_module_instance_in_args_transform_nested',
            f'{_TRANSFORMS}test_multiscope_lifting_argtree',
            f'{_TRANSFORMS}test_multiscope_lifting_argtree_decorator',
            f'{_TRANSFORMS}test_multiscope_lifting_simple',
            f'{_TRANSFORMS}test_multiscope_lifting_simple_decorator',
            f'{_TRANSFORMS}test_multiscope_lifting_simple_decorator_w_jit',
            f'{_TRANSFORMS}test_nested_variable_passing',
            f'{_TRANSFORMS}test_switch',
            f'{_TRANSFORMS}test_switch_multihead',
            f'{_TRANSFORMS}test_variable_in_args_transform',
            f'{_TRANSFORMS}test_while_loop',
        ),
    ),
    Expected(
        'the same, in a function, or in a body whose block opens in it.',
        modes=('test-copy', 'test-stop'),
        tests=(
            'tests/core/core_lift_test.py::LiftTest::test_cond',
            'tests/core/core_lift_test.py::LiftTest::test_switch',
            'tests/core/core_lift_test.py::LiftTest::test_while_loop',
            'tests/core/design/core_scan_test.py::ScanTest::test_scan_shared_params',
            'tests/core/design/core_scan_test.py::ScanTest::test_scan_unshared_params',
            f'{_TRANSFORMS}test_toplevel_submodule_adoption_pytree_transform',
            f'{_TRANSFORMS}test_vmap_batchnorm',
        ),
    ),
    Expected(
        'it trains the parameters or looks at their gradient.',
        modes=('test-stop', 'method-stop'),
        tests=(
            f'{_NORMALIZATION}test_spectral_norm_train1',
            f'{_NORMALIZATION}test_spectral_norm_train2',
            f'{_NORMALIZATION}test_weight_norm_train0',
            f'{_NORMALIZATION}test_weight_norm_train1',
            f'{_NORMALIZATION}test_weight_norm_train2',
            f'{_TRANSFORMS}test_custom_vjp',
        ),
    ),
    Expected(
        'it counts the flops of a backward pass, of which a part is gone.',
        modes=('test-stop', 'method-stop'),
        tests=('tests/linen/summary_test.py::SummaryTest::test_partitioned_params',),
    ),
    Expected(
        'it differentiates a method by the parameters, from outside of the block.',
        modes=('method-stop',),
        tests=(f'{_TRANSFORMS}test_jvp', f'{_TRANSFORMS}test_vjp'),
    ),
)


# As a plugin of pytest.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--witness-mode', choices=('plain', *MODES))
    parser.addoption('--witness-report', type=Path)


def pytest_runtest_setup(item: pytest.Item) -> None:
    mode = item.config.getoption('--witness-mode')
    if mode == 'plain':
        return
    extent, _, block = mode.partition('-')
    runtest, around = item.runtest, {'test': in_block, 'method': in_every_method}

    # A hook around the call would be a generator that is suspended during the test.
    def inside() -> None:
        with around[extent](BLOCKS[block]):
            runtest()

    item.runtest = inside


def in_block(block: Any) -> contextlib.AbstractContextManager[Any]:
    """The block itself."""
    return block


def in_every_method(block: Any) -> contextlib.AbstractContextManager[Any]:
    """The block in each call of a method, ``setup`` included, of any module."""

    def interceptor(
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: Any,
    ) -> Any:
        with block:
            return method(*args, **kwargs)

    return nn.intercept_methods(interceptor)


Outcomes = dict[str, dict[str, str]]
_outcomes: Outcomes = {}
_RANKS = ('passed', 'skipped', 'failed')


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        note(report)


def note(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Keeps the worst that was reported of a test: set-up, call, subtests."""
    known = _outcomes.setdefault(report.nodeid, {'outcome': 'passed', 'error': ''})
    if _RANKS.index(report.outcome) > _RANKS.index(known['outcome']):
        crash = getattr(report.longrepr, 'reprcrash', None)
        said = crash.message if crash else report.longreprtext
        lines = said.strip().splitlines() or ['']
        known |= {'outcome': report.outcome, 'error': lines[0]}


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Workers of pytest-xdist report to the main process.
    if not hasattr(session.config, 'workerinput'):
        report = session.config.getoption('--witness-report')
        report.write_text(json.dumps(_outcomes))


# As a program.


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What blocks have changed.

    Attributes:
        same: how many tests had the same outcome.
        failing: how many of these fail.
        expected: how many had another one, for a known reason.
        faults: what is wrong, a line each.
    """

    same: int
    failing: int
    expected: int
    faults: tuple[str, ...]

    @classmethod
    def of(
        cls, plain: Outcomes, seen: Outcomes, reasons: Mapping[str, str]
    ) -> Comparison:
        """Compares the outcomes of one mode with those without blocks.

        Args:
            plain: without blocks.
            seen: with them.
            reasons: the tests that are expected to differ.
        """
        faults: list[str] = []
        same = failing = expected = 0
        for test in sorted(plain.keys() | seen.keys()):
            absent = {'outcome': 'not run', 'error': ''}
            before, after = plain.get(test, absent), seen.get(test, absent)
            if before['outcome'] == after['outcome']:
                same += 1
                failing += before['outcome'] == 'failed'
                if test in reasons:
                    faults.append(
                        f'{test}: {before["outcome"]} as without a block; it was '
                        f'expected to differ, since {reasons[test]}'
                    )
            elif test in reasons:
                expected += 1
            else:
                change = f'{before["outcome"]} -> {after["outcome"]}'
                error = after['error'] or before['error']
                faults.append(f'{test}: {change}: {error}')
        return cls(same, failing, expected, tuple(faults))

    def __str__(self) -> str:
        counts = f'{self.same} as without a block'
        counts += f' ({self.failing} fail)' if self.failing else ''
        counts += f', {self.expected} differ as expected' if self.expected else ''
        return '\n  '.join([f'{counts}, {len(self.faults)} faults', *self.faults])


def reasons_for(mode: str, expected: Iterable[Expected] = EXPECTED) -> dict[str, str]:
    """The tests that are expected to differ in a mode, each with the reason."""
    return {
        test: group.reason
        for group in expected
        if mode in group.modes
        for test in group.tests
    }


def check_checkout(checkout: Path) -> str | None:
    """What is wrong with a checkout; None if nothing is."""
    missing = [name for name in FOLDERS['plain'] if not (checkout / name).is_dir()]
    version_file = checkout / 'flax/version.py'
    if missing or not version_file.is_file():
        lacks = missing[0] if missing else 'flax/version.py'
        return f'{checkout} is no checkout of Flax: it has no {lacks}.'
    found = re.search(r"__version__ = '([^']+)'", version_file.read_text())
    version, installed = found and found.group(1), metadata.version('flax')
    if version != installed:
        return (
            f'{checkout} has Flax {version}, and {installed} is installed.\n'
            f'Check out what was released as {installed}.'
        )
    if Path(flax.__file__).is_relative_to(checkout):
        return f'The installed Flax is the checkout itself, in {checkout}.'
    return None


def run_tests(checkout: Path, mode: str, options: Sequence[str]) -> Outcomes:
    """Runs Flax's tests in a process of their own, and leaves the checkout as it is."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / 'report.json'
        command = [sys.executable, '-m', 'pytest', '-p', 'witness', '-q', '--tb=no']
        command += ['--no-summary', '--continue-on-collection-errors']
        command += ['-p', 'no:cacheprovider', '--rootdir', str(checkout)]
        command += ['-c', str(checkout / 'pyproject.toml')]
        command += ['--witness-mode', mode, '--witness-report', str(report)]
        folders = FOLDERS[mode.partition('-')[0]]
        command += [*options, *(str(checkout / name) for name in folders)]
        here = Path(__file__).parent
        # Imports the flax_sg of this checkout, whatever is installed.
        places = [str(here), str(here.parent), os.environ.get('PYTHONPATH', '')]
        env = {
            **os.environ,
            'PYTHONPATH': os.pathsep.join(filter(None, places)),
            'PYTHONDONTWRITEBYTECODE': '1',
        }
        # Otherwise files in the current folder could be imported.
        status = subprocess.run(command, cwd=folder, env=env, check=False).returncode
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            sys.exit(f'pytest could not run the tests: it ended with {status}.')
        return json.loads(report.read_text())


def main(argv: Sequence[str]) -> int:
    """Runs the tests in all modes and returns the exit status."""
    parser = argparse.ArgumentParser(
        'dev.py witness', description=__doc__, usage='%(prog)s CHECKOUT [OPTIONS]'
    )
    parser.add_argument('checkout', type=Path, help='a checkout of the installed Flax')
    parser.add_argument(
        '--modes', default=','.join(MODES), help='some of %(default)s, with commas'
    )
    given, options = parser.parse_known_args(argv)
    modes = given.modes.split(',')
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f'no mode {unknown[0]!r}; there are {", ".join(MODES)}')
    checkout = given.checkout.resolve()
    if fault := check_checkout(checkout):
        sys.exit(fault)
    plain: Outcomes = {}
    faults = 0
    for mode in ('plain', *modes):
        print(f'\n== {mode}', flush=True)
        start = time.monotonic()
        outcomes = run_tests(checkout, mode, options)
        plain = plain or outcomes
        folders = FOLDERS[mode.partition('-')[0]]
        before = {test: plain[test] for test in plain if test.startswith(folders)}
        comparison = Comparison.of(before, outcomes, reasons_for(mode))
        print(f'{mode}, {time.monotonic() - start:.0f} s: {comparison}', flush=True)
        faults += len(comparison.faults)
    return int(faults > 0)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

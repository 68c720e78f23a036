"""Puts deliberate faults in, and notes which test catches each: ``dev.py faults``.

Each fault of ``broken.txt`` is put into a copy of the checkout. Then tests run until
one fails: the one that caught it before, those of the fault's own package, cheapest
files first, then all others. A test that fails has to pass without the fault. A row
for each fault goes into ``.faults/results.jsonl`` at once, so a stopped run goes on.

A process that has imported JAX, and has not started it, is copied for each run, and all
runs share what JAX compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / '.faults'
README = ROOT / 'tests' / 'README.md'
SECONDS_OF_A_TEST = 120  # Then it counts as one that does not end.
# The folder of tests of a package, where it has another name.
TESTS = {'': 'commandline'}
NOT_COPIED = ('.git', '.venv*', '.faults', '__pycache__', '_build', 'dist', '.*_cache')
# A row of the table in README.md: the fault, and the test that caught it.
ROW = re.compile(r'^\| `(?P<name>.+?)` \| `(?P<test>.*?)` \|$')


class Fault(NamedTuple):
    """A change of flax_sg.

    Attributes:
        file: the file, below flax_sg/.
        breaks: what goes wrong, in a few words.
        text: stands in the file exactly once.
        other: is put in its place.
    """

    file: str
    breaks: str
    text: str
    other: str

    @property
    def name(self) -> str:
        """The name in the table, and for `--only`."""
        return f'{self.file}: {self.breaks}'

    @property
    def room(self) -> str:
        """The package of the file; '' at the top."""
        return self.file.rpartition('/')[0]


def faults() -> list[Fault]:
    """Reads ``broken.txt``."""
    found: list[Fault] = []
    file = ''
    for line in (ROOT / 'tests' / 'broken.txt').read_text().splitlines():
        begins, rest = line[:2], line[2:]
        if line.startswith('['):
            file = line.strip('[]')
        elif file and begins == '# ':
            found.append(Fault(file, rest, '', ''))
        elif file and begins in ('- ', '+ '):
            part = 'text' if begins == '- ' else 'other'
            before = getattr(found[-1], part)
            text = f'{before}\n{rest}' if before else rest
            found[-1] = found[-1]._replace(**{part: text})
    return found


def main(argv: Sequence[str]) -> int:
    """Tries all faults, or some.

    Args:
        argv: ``[--only REGEX] [--again] [--limit SECONDS] [--table]``.

    Returns:
        The exit status: 0 if each fault was caught.
    """
    parser = argparse.ArgumentParser('dev.py faults', description=main.__doc__)
    parser.add_argument('--only', default='', help='faults that a regex finds by name')
    parser.add_argument('--again', action='store_true', help='forget earlier results')
    parser.add_argument('--named', action='store_true', help='try no other test')
    parser.add_argument('--limit', type=float, default=1800, help='seconds of a fault')
    parser.add_argument('--table', action='store_true', help='write it into README.md')
    options = parser.parse_args(argv)
    results, every = Results(FOLDER / 'results.jsonl'), faults()
    chosen = [f for f in every if re.search(options.only, f.name)]
    if not options.table:
        _try(chosen, results, options)
    else:
        _write_table(every, results)
    missed = [f.name for f in chosen if not results.known.get(f.name, {}).get('test')]
    for name in missed:
        print('not caught:', name)
    print(f'{len(chosen) - len(missed)} of {len(chosen)} faults are caught.')
    return int(bool(missed))


class Results:
    """What was found so far, a row of JSON for each fault."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known: dict[str, dict[str, Any]] = {}
        if file.exists():
            rows = map(json.loads, file.read_text().splitlines())
            self.known = {row['name']: row for row in rows}

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row, or another one in place of an earlier one."""
        self.known[row['name']] = row
        with self.file.open('a') as file:
            file.write(f'{json.dumps(row)}\n')


def table() -> dict[str, str]:
    """Returns the test that caught each fault, as README.md has it."""
    rows = map(ROW.match, README.read_text().splitlines() if README.exists() else ())
    return {r['name']: r['test'] for r in rows if r}


def _write_table(faults: Sequence[Any], results: Results) -> None:
    before, rows = table(), list[str]()
    for fault in faults:
        found = results.known.get(fault.name)
        test = before.get(fault.name, '') if found is None else found['test']
        rows.append(f'| `{fault.name}` | `{test}` |')
    head, *_ = README.read_text().partition('| fault |')
    top = ['| fault | caught by |', '|---|---|']
    README.write_text(head + '\n'.join([*top, *rows]) + '\n')


def _try(faults: Sequence[Any], results: Results, options: Any) -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix='flax_sg-faults-') as name:
        copy = Path(name).resolve() / 'checkout'
        ignored = shutil.ignore_patterns(*NOT_COPIED)
        shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
        runs = Runs(copy, options.limit)
        for fault in faults:
            known_row = results.known.get(fault.name, {})
            is_same = known_row.get('text') == fault.text
            if is_same and known_row['test'] and not options.again:
                continue
            begin = time.monotonic()
            earlier = results.known.get(fault.name, {}).get('test')
            hint = earlier or table().get(fault.name, '')
            with put_in(copy, fault):
                row = runs.first_failure(fault, hint, options.named)
            row = {'name': fault.name, 'text': fault.text, **row}
            results.add({**row, 'in_all': round(time.monotonic() - begin, 1)})
            said = f'{row["test"] or "NOT CAUGHT"} ({row["seconds"]} s)'
            print(f'{fault.name}\n    {said}', flush=True)


@contextlib.contextmanager
def put_in(copy: Path, fault: Any) -> Iterator[None]:
    """Changes a file of the copy for a while; its time tells Python of the change."""
    file = copy / 'flax_sg' / fault.file
    text = file.read_text()
    if text.count(fault.text) != 1:
        sys.exit(f'{fault.name}: its text does not stand once in {fault.file}.')
    with other_text(file, text.replace(fault.text, fault.other)):
        yield


@contextlib.contextmanager
def other_text(file: Path, text: str) -> Iterator[None]:
    """Another text in a file, for a while."""
    before, times = file.read_text(), file.stat()
    file.write_text(text)
    later = next(_moments)
    os.utime(file, (later, later))
    try:
        yield
    finally:
        file.write_text(before)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


_moments = iter(range(int(time.time()) + 1000, 1 << 40))


class Runs:
    """Runs tests of a copy of the checkout, each time in a new process."""

    def __init__(self, copy: Path, limit: float) -> None:
        self.copy, self.limit = copy, limit
        self._seconds_file = FOLDER / 'seconds.json'
        self.seconds: dict[str, float] = {}  # Of each file of tests.
        if self._seconds_file.exists():
            self.seconds = json.loads(self._seconds_file.read_text())
        self._passes: dict[str, bool] = {}
        _prepare()

    def first_failure(self, fault: Any, hint: str, named: bool) -> dict[str, Any]:
        """Returns the first test that fails, and after how many seconds."""
        own, others = self._files(fault)
        exists = hint and (self.copy / hint.partition('::')[0]).exists()
        stages = [[hint]] if exists else []
        for stage in stages if named else (*stages, own, others):
            failed, seconds = self._run(stage)
            while failed and not self._passes_without(failed, fault):
                print(f'    {failed} fails without the fault, too', flush=True)
                stage = _after(stage, failed)
                failed, seconds = self._run(stage) if stage else ('', 0.0)
            if failed:
                return {'test': failed, 'seconds': seconds}
        return {'test': '', 'seconds': 0.0}

    def _files(self, fault: Any) -> tuple[list[str], list[str]]:
        room = f'tests/{TESTS.get(fault.room, fault.room)}/'
        paths = sorted((self.copy / 'tests').glob('*/test_*.py'))
        files = [str(path.relative_to(self.copy)) for path in paths]
        files.sort(key=lambda file: self.seconds.get(file, 10.0))
        own = [f for f in files if f.startswith(room)]
        # The examples in the file itself are tests, too.
        own.insert(0, f'flax_sg/{fault.file}')
        return own, [*(f for f in files if f not in own), 'flax_sg']

    def _passes_without(self, test: str, fault: Any) -> bool:
        if test not in self._passes:
            whole = (ROOT / 'flax_sg' / fault.file).read_text()
            with other_text(self.copy / 'flax_sg' / fault.file, whole):
                failed, _ = self._run([test.removesuffix(' (does not end)')])
            self._passes[test] = not failed
        return self._passes[test]

    def _run(self, tests: Sequence[str]) -> tuple[str, float]:
        """Returns the first test that fails, or '', and the seconds that it took."""
        begin = time.monotonic()
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(read)
            _run_tests(self.copy, tests, write)
        os.close(write)
        failed, running, last = '', '', begin
        with os.fdopen(read) as said:
            while True:
                ready, _, _ = select.select([said], [], [], 5)
                now = time.monotonic()
                if ready:
                    line = said.readline()
                    if not line:
                        break
                    kind, name, seconds = json.loads(line)
                    last = now
                    if kind == 'starts':
                        running = name
                    elif kind == 'fails':
                        failed = name
                        break
                    elif kind == 'done' and seconds not in (0, 4, 5):
                        log = (self.copy.parent / 'log.txt').read_text()
                        sys.exit(f'pytest cannot run {[*tests]}:\n{log}')
                    elif kind == 'done':
                        break
                    else:
                        self.seconds[name] = round(seconds, 1)
                elif now - last > SECONDS_OF_A_TEST or now - begin > self.limit:
                    ends = now - last <= SECONDS_OF_A_TEST
                    failed = '' if ends else f'{running} (does not end)'
                    break
        seconds = round(time.monotonic() - begin, 1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self._seconds_file.write_text(
            json.dumps(self.seconds, indent=1, sort_keys=True)
        )
        return failed, seconds


def _after(stage: Sequence[str], test: str) -> list[str]:
    """The tests of a stage behind the file of one of them."""
    file = test.partition('::')[0]
    places = [n for n, one in enumerate(stage) if one.partition('::')[0] == file]
    return [*stage[places[-1] + 1 :]] if places else []


def _prepare() -> None:
    """Imports what takes long, with the flags of the tests, and starts no device."""
    from tests.helpers import quick_compile

    # From here on the copy is imported.
    sys.path[:] = [x for x in sys.path if Path(x or '.').resolve() != ROOT]
    quick_compile.set_flags(FOLDER / 'compiled')
    import flax.linen
    import flax.nnx
    import jax.experimental
    import optax
    import pytest

    del flax, jax, optax, pytest
    assert 'flax_sg' not in sys.modules
    for name in [name for name in sys.modules if name.partition('.')[0] == 'tests']:
        del sys.modules[name]


def _run_tests(copy: Path, tests: Sequence[str], write: int) -> None:
    """Runs tests in this process until one fails, tells of each, and ends."""
    os.setpgid(0, 0)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ['PYTHONPATH'] = str(copy)
    log = os.open(copy.parent / 'log.txt', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    import pytest

    plain = ['-x', '-q', '-p', 'no:cacheprovider', '-p', 'no:xdist', '-m', 'not long']
    status, told = 70, Told(write)
    try:
        status = pytest.main([*plain, *tests], plugins=[told])
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    finally:
        sys.stdout.flush()
        told.tell('done', '', int(status))
        os._exit(0)


class Told:
    """Tells of each test, as a plugin of pytest."""

    def __init__(self, write: int) -> None:
        self._write = write
        self._file, self._begin = '', time.monotonic()

    def tell(self, *what: Any) -> None:
        os.write(self._write, f'{json.dumps(what)}\n'.encode())

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Puts the first case of each test in front, since it nearly always tells."""
        met, first, more = set[str](), list[Any](), list[Any]()
        for item in items:
            test = item.nodeid.partition('[')[0]
            (more if test in met else first).append(item)
            met.add(test)
        items[:] = [*first, *more]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Tells that a test begins."""
        file = nodeid.partition('::')[0]
        if file != self._file:
            self._ends()
            self._file, self._begin = file, time.monotonic()
        self.tell('starts', nodeid, 0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Tells that a test has failed."""
        if report.failed:
            self.tell('fails', report.nodeid, 0)

    def pytest_collectreport(self, report: Any) -> None:
        """Tells that a file cannot be imported."""
        if report.failed:
            self.tell('fails', report.nodeid, 0)

    def pytest_sessionfinish(self) -> None:
        """Tells how long the last file took."""
        self._ends()

    def _ends(self) -> None:
        if self._file.startswith('tests/'):
            self.tell('ended', self._file, time.monotonic() - self._begin)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

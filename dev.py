#!/usr/bin/env python3
"""Runs this project's commands in an environment of their own.

Needs git, a Python and its standard library only. The first call installs what the
project needs into .venv beside this file; later calls use that as it is until
pyproject.toml changes. The system's Python is left alone.

    python3 dev.py COMMAND [OPTIONS]
"""

import hashlib
import http.client
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PYPROJECT = ROOT / 'pyproject.toml'
OLDEST_PYTHON = (3, 11)
QUIET = ['--quiet', '--disable-pip-version-check']
PYTHON_NAMES = ['python3', *(f'python3.{minor}' for minor in range(11, 20))]


def demo(*args):
    """Train the demo model on real data."""
    return run(development_env(), '-m', 'flax_sg', 'demo', *args)


def test(*args):
    """Run the tests: as CI does, [--quick], [--long], or some: [FILES -k name]."""
    python = development_env()
    if args == ('--quick',):
        slow = [f'--ignore=tests/{name}' for name in ('demo', 'models', 'repository')]
        return pytest(python, (), 'tests', '--quick', *slow)
    if args == ('--long',):
        return pytest(python, (), '--hypothesis-profile=long')
    if args:
        return pytest(python, args)
    # As CI does: pyproject.toml says how much of flax_sg the tests have to run.
    coverage = ['-m', 'coverage']
    run(python, *coverage, 'erase')
    status = pytest(python, (), '-m', 'not long', '--measure')
    run(python, *coverage, 'combine', '--quiet')
    return status or run(python, *coverage, 'report')


def lint(*args):
    """Check style and types with ruff, pyright and mypy: [FILES]."""
    python = development_env()
    tools = [['ruff', 'check'], ['ruff', 'format', '--check'], ['pyright']]
    # Lists, so that every tool reports even when an earlier one has failed. What mypy
    # looks at, a program of a user, is in pyproject.toml.
    faults = [run(python, '-m', *tool, *args) for tool in tools]
    return int(any([*faults, run(python, '-m', 'mypy')]))


def ci(*args):
    """Run everything that CI runs."""
    return run('bash', '.ci/run', *args)


def versions(*args):
    """Run the tests on the oldest and newest dependencies: [--python] [--latest]."""
    options = [arg for arg in args if arg not in ('--python', '--latest')]
    pythons = list(supported_pythons()) if '--python' in args else [base_python()]
    # The lower bounds in pyproject.toml are the oldest; it states the newest as well.
    text = PYPROJECT.read_text()
    core = re.search(r'^dependencies = \[(.*?)\]', text, re.M | re.S)
    newest = text.partition('[tool.flax_sg.newest]')[2].partition('\n[')[0]
    bounds = dict(re.findall(r'"(\w+)>=([\d.]+)"', core.group(1)))
    limits = dict(re.findall(r'^(?!python)(\w+) = "([\d.]+)"', newest, re.M))
    ends = {
        'oldest': [f'{name}=={bound}' for name, bound in bounds.items()],
        # An older Python gets the newest that there is for it.
        'newest': [f'{name}<={limit}' for name, limit in limits.items()],
    }
    if '--latest' in args:  # Whatever there is now, which may be newer than is stated.
        ends['latest'] = []
    results = {}
    for python in pythons:
        for end, pins in ends.items():
            name = 'python{}.{}-{}'.format(*python_version(python), end)
            print(f'\n== {name} {" ".join(pins)}', flush=True)
            env = ROOT / '.venv-versions' / name
            if not pins:  # What is latest changes: never take it as it is.
                shutil.rmtree(env, ignore_errors=True)
            env_python = ensure_env(env, python, '-e', '.[test]', *pins)
            results[name] = pytest(env_python, options)
    for name, status in results.items():
        print('failed' if status else 'passed', name)
    return int(any(results.values()))


def witness(*args):
    """Run Flax's own tests with blocks around: CHECKOUT [--modes A,B] [-k name]."""
    # In the caller's folder, which the path of the checkout may be relative to.
    return run(development_env(), ROOT / 'tests/witness.py', *args, cwd=None)


def clients(*args):
    """Fine-tune models of other packages, compare with by hand: [brax_ppo ...]."""
    folder = ROOT / 'tests' / 'clients'
    pins = (folder / 'requirements.txt').read_text().split()
    python = ensure_env(ROOT / '.venv-clients', None, '-e', '.', *pins)
    files = [f for f in sorted(folder.glob('*_*.py')) if not args or f.stem in args]
    results = {file.stem: run(python, file) for file in files}
    for name, status in results.items():
        print('failed' if status else 'passed', name)
    return int(any(results.values()) or not results)


def notebooks(*args):
    """Run the notebooks and keep what they show, or [--check] them: [01 02 ...]."""
    return run(development_env(), ROOT / 'tests/run_notebooks.py', *args)


def bench(*args):
    """Measure every way to freeze: [--smoke] [--only REGEX] [--out DIR]."""
    return run(development_env(), '-m', 'benchmarks', *args)


def docs(*args):
    """Build the guide and the reference into docs/_build; a warning is an error."""
    strict = ['-b', 'html', '-q', '-W', '-n', '--keep-going']
    return run(development_env(), '-m', 'sphinx', *strict, *args, 'docs', 'docs/_build')


def package(*args):
    """Build what is shipped, check it, run its demo elsewhere: [--download]."""
    python = development_env()
    shutil.rmtree(ROOT / 'dist', ignore_errors=True)
    if run(python, '-m', 'build', '--no-isolation', '--outdir', 'dist'):
        return 1
    sdist, wheel = sorted((ROOT / 'dist').iterdir(), key=lambda file: file.suffix)
    workflows = sorted((ROOT / '.github' / 'workflows').iterdir())
    # A list, so that each of them reports.
    checks = [
        ['twine', 'check', '--strict', sdist, wheel],
        ['check_wheel_contents', wheel],
        ['check_jsonschema', '--builtin-schema', 'vendor.github-workflows', *workflows],
    ]
    faults = [run(python, '-m', *check) for check in checks]
    with tempfile.TemporaryDirectory() as name:
        # Without links, as Python says where a module is from.
        folder = Path(name).resolve()
        clean = clean_env(folder / 'env', python, wheel, '--download' in args)
        for command in (['-c', IMPORT_ALL, folder], ['-m', 'flax_sg', 'demo']):
            faults.append(run(clean, '-I', *command, cwd=folder))
        if '--download' not in args:  # Nor is pytest.
            faults.append(test_shipped(clean, sdist, folder, 'tests/filters', '-q'))
    return int(any(faults))


def shipped(file, sdist, *options):
    """Run an sdist's tests on what a wheel or sdist installs: FILE SDIST [FILES]."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        env = folder / 'env'
        make_env(env, python := python_of(env), base_python())
        if run(python, '-m', 'pip', 'install', *QUIET, f'{Path(file).resolve()}[test]'):
            return 1
        return test_shipped(python, Path(sdist).resolve(), folder, *options)


def test_shipped(python, sdist, folder, *options):
    """Runs the tests in an sdist, on the installed library; returns the status."""
    shutil.unpack_archive(sdist, folder, filter='data')
    root = folder / sdist.name.removesuffix('.tar.gz')
    where = [python, '-I', '-c', 'import flax_sg; print(flax_sg.__path__[0])']
    installed = subprocess.check_output(where, text=True).strip()
    shutil.rmtree(root / 'flax_sg')
    (root / 'flax_sg').symlink_to(installed, target_is_directory=True)
    return pytest(python, options, cwd=root)


def address(*args):
    """Say where the repository is, or write that wherever it stands: [URL]."""
    before = stated(PYPROJECT, r'^Source = "(.*)"')
    for url in args:
        for name in ('pyproject.toml', 'README.md', 'CITATION.cff'):
            text = (ROOT / name).read_text()
            for known, new in ((before, url), (pages_of(before), pages_of(url))):
                text = text.replace(known, new.rstrip('/'))
            (ROOT / name).write_text(text)
    print(*(args or [before]))
    return 0


def release(tag, url):
    """Print what the changelog says of a release, if it fits: TAG URL."""
    version = stated(ROOT / 'flax_sg' / '__init__.py', r"^__version__ = '(.*)'")
    heading = rf'^## \[{re.escape(version)}\] - '
    changelog = ROOT / 'CHANGELOG.md'
    known = stated(PYPROJECT, r'^Source = "(.*)"')
    if tag != f'v{version}':
        sys.exit(f'The tag is {tag!r}, and the version is {version}.')
    if url != known:
        sys.exit(f'pyproject.toml says {known}: python3 dev.py address {url}')
    if not stated(changelog, heading + r'(\d{4}-\d\d-\d\d)$'):
        sys.exit(f'CHANGELOG.md has no heading "## [{version}] - 2026-01-31".')
    print(stated(changelog, heading + r'.*\n((?s:.*?))(?=^## |\Z)').strip())
    return 0


def stated(file, pattern):
    """Returns what a file says where a pattern fits; '' where it does not."""
    found = re.search(pattern, file.read_text(), re.MULTILINE)
    return found.group(1) if found else ''


def pages_of(url):
    """Returns where the site of a repository is published."""
    owner, _, name = url.removeprefix('https://github.com/').partition('/')
    return f'https://{owner}.github.io/{name}'


# Every public name can be had, and comes from the folder that is given.
IMPORT_ALL = """
import importlib, sys
for name in ['', '.linen', '.core', '.filters', '.testing', '.errors']:
    module = importlib.import_module('flax_sg' + name)
    assert module.__file__.startswith(sys.argv[1]), module.__file__
    names = [name for name in dir(module) if getattr(module, name) is not None]
    print(f'{module.__name__}: {len(names)} names')
"""


def pytest(python, options, *more, cwd=ROOT):
    """Runs pytest and returns its exit status."""
    # All tests share the cores; a chosen few start faster without worker processes.
    workers = ['-n', min(os.cpu_count() or 1, 4), '--dist=worksteal']
    command = ['-m', 'pytest', *([] if options else workers), *options, *more]
    return run(python, *command, cwd=cwd)


def run(*command, cwd=ROOT, **options):
    """Runs a command, in the project's root by default; returns its exit status."""
    return subprocess.run([str(c) for c in command], cwd=cwd, **options).returncode


def python_version(python):
    """Returns (major, minor) of an interpreter; None if there is none or it fails."""
    ask = [str(python), '-c', 'import sys; print(*sys.version_info[:2])']
    try:
        out = subprocess.check_output(ask, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(int(number) for number in out.split())


def supported_pythons():
    """Yields one interpreter per supported version: this one, then those on PATH."""
    seen = set()
    for python in [sys.executable, *(shutil.which(name) for name in PYTHON_NAMES)]:
        version = python_version(python) if python else None
        if version and version >= OLDEST_PYTHON and version not in seen:
            seen.add(version)
            yield python


def base_python():
    """Returns the interpreter to make environments with."""
    found = next(supported_pythons(), None)
    return found or sys.exit(
        f'flax_sg needs Python 3.11 or newer. This is {sys.version.split()[0]}, '
        f'and none of {PYTHON_NAMES[1]} to {PYTHON_NAMES[-1]} on PATH runs.\n'
        f'Install one, or name it: /path/to/python3.11 dev.py ...'
    )


def development_env():
    """Returns the Python of .venv, with the project and every extra."""
    return ensure_env(ROOT / '.venv', None, '-e', '.[dev]')


def ensure_env(env, base, *requirements):
    """Makes or renews an environment with this project in it; returns its Python."""
    python = python_of(env)
    state = '\n'.join([PYPROJECT.read_text(), str(ROOT), *requirements])
    wanted = hashlib.sha256(state.encode()).hexdigest()
    stamp = env / 'installed-by-dev.py'
    usable = (python_version(python) or (0, 0)) >= OLDEST_PYTHON
    if usable and stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f'Installing into {env.name}: a minute or two, once.', file=sys.stderr)
    if not usable or run(python, '-c', 'import pip', stderr=subprocess.DEVNULL):
        make_env(env, python, base or base_python())
    if run(python, '-m', 'pip', 'install', *QUIET, *requirements):
        sys.exit('The installation failed: pip says why, above. Is there a network?')
    stamp.write_text(wanted)
    return python


def python_of(env):
    """Returns where the Python of an environment is."""
    return env / ('Scripts/python.exe' if os.name == 'nt' else 'bin/python')


def make_env(env, python, base):
    """Makes an empty environment with pip in it."""
    # Debian's python3 has no ensurepip: there, pip has to be fetched by hand.
    no_pip = run(base, '-c', 'import ensurepip', stderr=subprocess.DEVNULL)
    if run(base, '-m', 'venv', '--clear', *['--without-pip'][:no_pip], env):
        sys.exit(f'{base} could not make an environment in {env}.')
    if no_pip:
        with tempfile.TemporaryDirectory() as folder:
            wheel_file = download_pip(Path(folder))
            # A wheel is a zip file: pip can run from it, and so install itself.
            if run(python, wheel_file / 'pip', 'install', '--no-index', wheel_file):
                sys.exit(f'pip could not be installed into {env}.')


def clean_env(env, development, wheel, download):
    """Makes an environment with the wheel and without a checkout; returns its Python.

    What the wheel requires is downloaded; or that of the environment for development
    is used, which is quick. A file names its folder. The editable install in there is
    a file like that, which does not count where it is not the environment's own.
    """
    python = python_of(env)
    make_env(env, python, development)
    what = (
        [f'{wheel}[demo]'] if download else ['--no-deps', '--ignore-installed', wheel]
    )
    if not download:
        ask = 'import sysconfig; print(sysconfig.get_path("purelib"))'
        folders = [
            Path(subprocess.check_output([str(p), '-c', ask], text=True).strip())
            for p in (development, python)
        ]
        (folders[1] / 'development.pth').write_text(f'{folders[0]}\n')
    if run(python, '-m', 'pip', 'install', *QUIET, *what):
        sys.exit('The wheel could not be installed: pip says why, above.')
    return python


def download_pip(folder):
    """Fetches the newest wheel of pip from the index that pip would use."""
    page = package_index().rstrip('/') + '/pip/'
    try:
        with urllib.request.urlopen(page, timeout=60) as response:
            listing = response.read().decode()
        links = re.findall(r'href="([^"]+/pip-([\d.]+)-py3-none-any\.whl)', listing)
        link = max(links, key=lambda found: [int(n) for n in found[1].split('.')])[0]
        wheel_file = folder / link.rsplit('/', 1)[1]
        url = urllib.parse.urljoin(page, link)
        with urllib.request.urlopen(url, timeout=60) as response:
            wheel_file.write_bytes(response.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        # Without the address: it may hold a password.
        sys.exit(f'No ensurepip here, and no pip from the package index: {error}')
    return wheel_file


def package_index():
    """Returns the package index that pip is configured for, or the public one."""
    configured = os.environ.get('PIP_INDEX_URL')
    for name in ['~/.config/pip/pip.conf', '~/.pip/pip.conf', '/etc/pip.conf']:
        file = Path(name).expanduser()
        text = file.read_text() if file.is_file() else ''
        named = re.search(r'^\s*index[-_]url\s*[=:]\s*(\S+)', text, re.MULTILINE)
        configured = configured or (named and named.group(1))
    return configured or 'https://pypi.org/simple'


COMMANDS = {
    f.__name__: f
    for f in (
        *(demo, test, lint, notebooks, docs, package, bench, ci),
        *(versions, witness, clients, shipped, address, release),
    )
}

if __name__ == '__main__':
    if len(sys.argv) > 1 and sys.argv[1] not in COMMANDS:
        print(f'dev.py has no command {sys.argv[1]!r}.\n', file=sys.stderr)
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        lines = [f'    {n:9} {f.__doc__.splitlines()[0]}' for n, f in COMMANDS.items()]
        sys.exit('\n'.join([__doc__, *lines]))
    try:
        sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)

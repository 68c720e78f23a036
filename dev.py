#!/usr/bin/env python3
"""Runs this project's commands in an environment of their own: .venv beside this file.

Needs git, and a Python from 3.11 on with its standard library. The first call installs
what the project needs; later calls use that until pyproject.toml changes.

A contributor needs test and lint; docs and notebooks after a change of theirs; and ci,
which is all that CI runs. The others are for releases and for changes of the engine:
CONTRIBUTING.md says which command is for what.

    python3 dev.py COMMAND [OPTIONS]
"""

import hashlib
import html.parser
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from pathlib import Path

# Said before tomllib is missing.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f'flax_sg needs Python 3.11 or newer: python3.11 {" ".join(sys.argv)}')

import tomllib

ROOT = Path(__file__).resolve().parent
PYPROJECT = ROOT / 'pyproject.toml'
TABLE = ROOT / 'tests' / 'README.md'
PIP = ['-m', 'pip', '--quiet', '--disable-pip-version-check', 'install']


def demo(*args):
    """Train the demo model on real data."""
    return run(development_env(), '-m', 'flax_sg', 'demo', *args)


def test(*args):
    """Run the tests: as CI does, [--quick | --long | --pages], or [FILES -k name]."""
    python = development_env()
    if args == ('--pages',):  # Prints the lines that no page and no notebook runs.
        return run(python, '-m', 'tests.measure')
    if args == ('--quick',):  # Those that catch the faults of the table.
        rows = re.findall(r'^\| `.+?` \| `(.+?::.+?)` \|', TABLE.read_text(), re.M)
        return pytest(python, (), '-q', *dict.fromkeys(rows))
    if args == ('--long',):
        return pytest(python, (), '--hypothesis-profile=long')
    if args:
        return pytest(python, args)
    # As CI does: pyproject.toml says how much of flax_sg the tests have to run.
    measured = ROOT / '.measured'
    shutil.rmtree(measured, ignore_errors=True)
    status = pytest(python, (), '-m', 'not long', '-p', 'tests.measure')
    found = ['--out', measured / 'all.json', '--merge', *measured.glob('*.json')]
    return status or run(python, '-m', 'slipcover', *found)


def faults(*args):
    """Put faults in and see which test catches each: [--only REGEX] [--table]."""
    return run(development_env(), '-m', 'tests.broken', *args)


def lint(*args):
    """Check style and types with ruff, pyright and mypy: [FILES]."""
    python = development_env()
    tools = [['ruff', 'check'], ['ruff', 'format', '--check'], ['pyright']]
    # Lists, so that every tool reports even when an earlier one has failed. What mypy
    # looks at, a program of a user, is in pyproject.toml.
    faults = [run(python, '-m', *tool, *args) for tool in tools]
    return int(any([*faults, run(python, '-m', 'mypy')]))


def notebooks(*args):
    """Run the notebooks and keep what they show, or [--check] them: [01 02 ...]."""
    return run(development_env(), '-m', 'tests.run_notebooks', *args)


def docs(*args):
    """Build the guide and the reference into docs/_build; a warning is an error."""
    strict = ['-b', 'html', '-q', '-W', '-n', '--keep-going']
    return run(development_env(), '-m', 'sphinx', *strict, *args, 'docs', 'docs/_build')


def bench(*args):
    """Measure every way to freeze: [--smoke] [--only REGEX] [--out DIR]."""
    return run(development_env(), '-m', 'benchmarks', *args)


# What brings the compiler of an accelerator, without a device and without a driver.
COMPILERS = {
    'tpu': ['jax[tpu]'],
    'cuda': ['jax[cuda12-local]', 'nvidia-cuda-nvcc-cu12'],
}


def accelerators(*args):
    """Compile for absent devices: [tpu|cuda] [--smoke] [--only R]; run on one: here."""
    if 'here' in args:
        return run(development_env(), '-m', 'benchmarks.accelerators', *args)
    options = [arg for arg in args if arg not in COMPILERS]
    results = {}
    for name in [arg for arg in args if arg in COMPILERS] or COMPILERS:
        env = ROOT / '.venv-accelerators' / name
        python = ensure_env(env, '-e', '.[bench,test]', *newest(), *COMPILERS[name])
        results[name] = run(python, '-m', 'benchmarks.accelerators', name, *options)
        if '--smoke' in args:
            # Here a test that needs the compiler fails where it would be skipped.
            here = {**os.environ, 'FLAX_SG_COMPILER': name}
            tests = pytest(python, ['tests/accelerators'], env=here)
            results[name] = results[name] or tests
    return summary_of(results)


def package():
    """Build what is shipped into dist/, check it, run the demo and some tests on it."""
    python = development_env()
    shutil.rmtree(ROOT / 'dist', ignore_errors=True)
    if run(python, '-m', 'build', '--no-isolation', '--outdir', 'dist'):
        return 1
    sdist, wheel = sorted((ROOT / 'dist').iterdir(), key=lambda file: file.suffix)
    workflows = sorted((ROOT / '.github' / 'workflows').iterdir())
    checks = [
        ['twine', 'check', '--strict', sdist, wheel],
        ['check_wheel_contents', wheel],
        ['check_jsonschema', '--builtin-schema', 'vendor.github-workflows', *workflows],
    ]
    faults = [run(python, '-m', *check) for check in checks]
    with tempfile.TemporaryDirectory() as name:
        # Without links, as Python says where a module is from.
        folder = Path(name).resolve()
        faults.append(run(python, *PIP, '--no-deps', f'--target={folder}', wheel))
        # Python looks there first, and then for what is installed beside the checkout.
        env = {**os.environ, 'PYTHONPATH': str(folder)}
        for command in (['-c', IMPORT_ALL, folder], ['-m', 'flax_sg', 'demo']):
            faults.append(run(python, *command, cwd=folder, env=env))
        shutil.unpack_archive(sdist, folder, filter='data')
        root = folder / sdist.name.removesuffix('.tar.gz')
        shutil.rmtree(root / 'flax_sg')
        (root / 'flax_sg').symlink_to(folder / 'flax_sg', target_is_directory=True)
        faults.append(
            pytest(python, ['tests/filters/test_paths.py', '-q'], cwd=root, env=env)
        )
    return int(any(faults))


# Every public name can be had, and comes from the folder that is given.
IMPORT_ALL = """
import importlib, sys
for name in ['', '.linen', '.core', '.filters', '.testing', '.errors']:
    module = importlib.import_module('flax_sg' + name)
    assert module.__file__.startswith(sys.argv[1]), module.__file__
    names = [name for name in dir(module) if getattr(module, name) is not None]
    print(f'{module.__name__}: {len(names)} names')
"""


def ci(*args):
    """Run everything that CI runs."""
    return run('bash', '.ci/run', *args)


def versions(*args):
    """Run the tests on both ends of the versions: [--oldest|--newest|--latest]."""
    project = tomllib.loads(PYPROJECT.read_text())
    ends = {
        # The lower bounds are the oldest.
        '--oldest': [b.replace('>=', '==') for b in project['project']['dependencies']],
        '--newest': newest(),
        # Whatever there is now, which may be newer than is stated.
        '--latest': ['--upgrade'],
    }
    options = [arg for arg in args if arg not in ends]
    results = {}
    for end in [arg for arg in args if arg in ends] or ['--oldest', '--newest']:
        name = 'python{}.{}{}'.format(*sys.version_info[:2], end.removeprefix('-'))
        print(f'\n== {name} {" ".join(ends[end])}', flush=True)
        env = ROOT / '.venv-versions' / name
        if end == '--latest':  # What is latest changes: never take it as it is.
            shutil.rmtree(env, ignore_errors=True)
        python = ensure_env(env, '-e', '.[test]', *ends[end])
        results[name] = pytest(python, options)
    return summary_of(results)


def newest():
    """Returns the newest versions; an older Python gets the newest there is for it."""
    stated = tomllib.loads(PYPROJECT.read_text())['tool']['flax_sg']['newest']
    return [f'{name}<={stated[name]}' for name in stated if name != 'python']


def witness(*args):
    """Run Flax's own tests with blocks around: CHECKOUT [--modes A,B] [-k name]."""
    # In the caller's folder, which the path of the checkout may be relative to.
    return run(development_env(), ROOT / 'tests/witness.py', *args, cwd=None)


def clients(*args):
    """Fine-tune models of other packages, compare with by hand: [brax_ppo ...]."""
    folder = ROOT / 'tests' / 'clients'
    pins = (folder / 'requirements.txt').read_text().split()
    python = ensure_env(ROOT / '.venv-clients', '-e', '.', *pins)
    files = [f for f in sorted(folder.glob('*_*.py')) if not args or f.stem in args]
    return summary_of({file.stem: run(python, file) for file in files})


def summary_of(results):
    """Prints what passed and what failed; returns the status of all."""
    for name, status in results.items():
        print('failed' if status else 'passed', name)
    return int(any(results.values()) or not results)


def pytest(python, options, *more, **where):
    """Runs pytest and returns its exit status."""
    # All tests share the cores; a chosen few start faster without worker processes.
    workers = ['-n', min(os.cpu_count() or 1, 4), '--dist=worksteal']
    command = ['-m', 'pytest', *([] if options else workers), *options, *more]
    return run(python, *command, **where)


def run(*command, cwd=ROOT, **options):
    """Runs a command, in the project's root by default; returns its exit status."""
    return subprocess.run([str(c) for c in command], cwd=cwd, **options).returncode


def development_env():
    """Returns the Python of .venv, with the project and every extra."""
    return ensure_env(ROOT / '.venv', '-e', '.[dev]')


def ensure_env(env, *requirements):
    """Makes or renews an environment with this project in it; returns its Python."""
    python = env / ('Scripts/python.exe' if os.name == 'nt' else 'bin/python')
    state = '\n'.join([PYPROJECT.read_text(), str(ROOT), *requirements])
    wanted = hashlib.sha256(state.encode()).hexdigest()
    stamp = env / 'installed-by-dev.py'
    is_whole = python.exists() and stamp.is_file()
    if is_whole and stamp.read_text() == wanted:
        return python
    print(f'Installing into {env.name}: some minutes, once.', file=sys.stderr)
    if not is_whole:
        make_env(env, python)
    if run(python, *PIP, *requirements):
        sys.exit('The installation failed: pip says why, above. Is there a network?')
    stamp.write_text(wanted)
    return python


def make_env(env, python):
    """Makes an empty environment with pip in it."""
    # Debian's python3 has no ensurepip: there, pip has to be fetched by hand.
    no_pip = run(sys.executable, '-c', 'import ensurepip', stderr=subprocess.DEVNULL)
    without = ['--without-pip'] if no_pip else []
    if run(sys.executable, '-m', 'venv', '--clear', *without, env):
        sys.exit(f'{sys.executable} could not make an environment in {env}.')
    if no_pip:
        with tempfile.TemporaryDirectory() as folder:
            wheel = download_pip(Path(folder))
            # A wheel is a zip file: pip can run from it, and so install itself.
            if run(python, wheel / 'pip', 'install', '--no-index', wheel):
                sys.exit(f'pip could not be installed into {env}.')


def download_pip(folder):
    """Fetches the newest wheel of pip from the index that pip would use."""
    index = os.environ.get('PIP_INDEX_URL', 'https://pypi.org/simple')
    page = index.rstrip('/') + '/pip/'
    try:
        with urllib.request.urlopen(page, timeout=60) as response:
            link = newest_wheel(response.read().decode())
        with urllib.request.urlopen(urllib.parse.urljoin(page, link)) as response:
            content = response.read()
    except (OSError, ValueError) as error:
        # Without the address: it may hold a password.
        sys.exit(f'No ensurepip here, and no pip from the package index: {error}')
    path, _, digest = link.partition('#sha256=')
    if digest and hashlib.sha256(content).hexdigest() != digest:
        sys.exit('The wheel of pip is not the one that the package index names.')
    wheel = folder / path.rsplit('/', 1)[1]
    wheel.write_bytes(content)
    return wheel


def newest_wheel(page):
    """Returns the link of the newest release in a page of a package index (PEP 503)."""
    links = []
    parser = html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attrs: links.extend(
        value for name, value in attrs if (tag, name) == ('a', 'href')
    )
    parser.feed(page)
    found = {}
    for link in links:  # The name of a wheel is its project, its version and more.
        _, version, *_ = f'{link.partition("#")[0].rsplit("/", 1)[-1]}--'.split('-')
        numbers = version.split('.')
        if '.whl' in link and all(number.isdigit() for number in numbers):
            found[tuple(map(int, numbers))] = link
    if not found:
        raise ValueError('it lists no wheel')
    return found[max(found)]


COMMANDS = {f.__name__: f for f in (demo, test, lint, docs, notebooks, faults, ci)}
COMMANDS |= {f.__name__: f for f in (bench, accelerators, package, versions)}
COMMANDS |= {f.__name__: f for f in (witness, clients)}

if __name__ == '__main__':
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        lines = [f'    {n:12} {f.__doc__.splitlines()[0]}' for n, f in COMMANDS.items()]
        wrong = [f'dev.py has no command {name!r}.\n' for name in sys.argv[1:2]]
        sys.exit('\n'.join([*wrong, __doc__, *lines]))
    try:
        sys.exit(COMMANDS[sys.argv[1]](*sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(130)

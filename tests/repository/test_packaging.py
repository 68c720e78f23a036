"""Checks the metadata and files of the wheel, and what imports need."""

import ast
import email
import email.message
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import flax_sg

ROOT = Path(__file__).parents[2]
CORE = {'flax', 'jax', 'jaxlib', 'optax'}


def run_python(*args: str, cwd: Path = ROOT) -> str:
    command = [sys.executable, '-W', 'error', *args]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    folder = tmp_path_factory.mktemp('wheel')
    build = f'import hatchling.build as b; print(b.build_wheel({str(folder)!r}))'
    name = run_python('-c', build).split()[-1]
    with zipfile.ZipFile(folder / name) as archive:
        yield archive


@pytest.fixture(scope='module')
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    [name] = [n for n in wheel.namelist() if n.endswith('.dist-info/METADATA')]
    return email.message_from_bytes(wheel.read(name))


def requirements(metadata: email.message.Message, extra: str | None) -> set[str]:
    """The names that an extra requires; for None those that the library requires."""
    lines = [line.partition(';') for line in metadata.get_all('Requires-Dist', [])]
    wanted = f"extra == '{extra}'" if extra else ''
    named = [name for name, _, condition in lines if condition.strip() == wanted]
    return {re.split(r'[^\w-]', name)[0] for name in named}


def test_the_core_needs_exactly_four_packages(metadata: email.message.Message):
    assert requirements(metadata, None) == CORE


def test_dev_brings_every_extra(metadata: email.message.Message):
    extras = set(metadata.get_all('Provides-Extra', []))
    assert {'demo', 'plot', 'test', 'lint', 'docs', 'package', 'dev'} <= extras
    dev = set().union(*(requirements(metadata, extra) for extra in extras - {'dev'}))
    assert requirements(metadata, 'dev') == dev


def test_metadata(metadata: email.message.Message):
    assert metadata['Name'] == 'flax_sg'
    assert metadata['Version'] == flax_sg.__version__
    assert metadata['Requires-Python'] == '>=3.11'
    assert metadata['License-Expression'] == 'Apache-2.0'
    urls = metadata.get_all('Project-URL', [])
    assert urls and all('github' in url for url in urls)
    assert 'Typing :: Typed' in metadata.get_all('Classifier', [])
    assert metadata.get_payload().startswith('# flax_sg')


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile):
    files = {n for n in wheel.namelist() if '.dist-info/' not in n}
    paths = [file for file in (ROOT / 'flax_sg').rglob('*') if file.is_file()]
    sources = [p.relative_to(ROOT) for p in paths if '__pycache__' not in p.parts]
    assert files == {path.as_posix() for path in sources}
    assert 'flax_sg/py.typed' in files
    assert any(n.endswith('.dist-info/licenses/LICENSE') for n in wheel.namelist())


def test_the_sdist_holds_the_tests_and_what_they_read(tmp_path: Path):
    build = f'import hatchling.build as b; print(b.build_sdist({str(tmp_path)!r}))'
    name = run_python('-c', build).split()[-1]
    with tarfile.open(tmp_path / name) as archive:
        files = {n.partition('/')[2] for n in archive.getnames()}
    tests = {str(file.relative_to(ROOT)) for file in (ROOT / 'tests').rglob('*.py')}
    guide = {f'docs/{file.name}' for file in (ROOT / 'docs').glob('*.md')}
    assert tests | guide | {'dev.py', 'README.md', 'CITATION.cff'} <= files
    assert not any(n.startswith(('docs/_build', 'docs/notebooks')) for n in files)


def test_what_is_cited_is_this_version():
    assert f'\nversion: {flax_sg.__version__}\n' in (ROOT / 'CITATION.cff').read_text()


def test_ruff_is_the_same_before_a_commit():
    [pinned] = re.findall(r'"ruff==([\d.]+)"', (ROOT / 'pyproject.toml').read_text())
    assert f'rev: v{pinned}\n' in (ROOT / '.pre-commit-config.yaml').read_text()


def test_the_workflows_call_commands_that_exist():
    done = subprocess.run([sys.executable, ROOT / 'dev.py'], capture_output=True)
    commands = set(re.findall(r'^    (\w+) ', done.stderr.decode(), re.M))
    for workflow in (ROOT / '.github/workflows').iterdir():
        called = re.findall(r'run: python3 dev.py (\w+)', workflow.read_text())
        assert called
        assert set(called) <= commands


def test_pip_is_found_in_a_page_of_a_package_index():
    page = """
    <a href="../p/pip-9.0.1-py2.py3-none-any.whl#sha256=ab">9</a>
    <a data-x="y" href="https://x/pip-25.10-py3-none-any.whl#sha256=cd">25.10</a>
    <a href="pip-25.9-py3-none-any.whl"></a> <a href="pip-26.0b1-py3-none-any.whl"></a>
    <a href="pip-27.0.tar.gz"></a>
    """
    dev = importlib.import_module('dev')
    assert dev.newest_wheel(page).endswith('/pip-25.10-py3-none-any.whl#sha256=cd')
    with pytest.raises(ValueError, match='no wheel'):
        dev.newest_wheel('<a href="pip-27.0.tar.gz">')


def test_the_address_is_written_where_it_stands():
    named = 'pyproject.toml', 'README.md', 'CITATION.cff'
    command = f'`sed -i s/OWNER/NAME/ {" ".join(named)}`'
    assert command in (ROOT / 'CONTRIBUTING.md').read_text()
    for name in named:
        lines = (ROOT / name).read_text().splitlines()
        # sed changes the first in a line.
        assert max(line.count('OWNER') for line in lines) == 1


def test_the_library_imports_only_what_it_requires():
    # numpy comes with jax, which takes and returns its arrays; rich with flax.
    needs = importlib.metadata.requires('flax') or ()
    assert any(need.startswith('rich') for need in needs)
    allowed = {*CORE, 'flax_sg', 'numpy', 'rich', *sys.stdlib_module_names}
    package = ROOT / 'flax_sg'
    found = {}
    for file in set(package.rglob('*.py')) - set(package.glob('demo/**/*.py')):
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            found |= {name.partition('.')[0]: file.name for name in names}
    assert {n: file for n, file in found.items() if n not in allowed} == {}


def test_importing_loads_nothing_of_the_demo():
    code = 'import sys, flax_sg.linen; print(*sorted(sys.modules))'
    loaded = run_python('-c', code).split()
    assert 'flax_sg.linen' in loaded
    assert {'sklearn', 'matplotlib', 'flax_sg.demo'} & set(loaded) == set()


def test_importing_starts_no_device():
    # Programs set JAX's flags and the number of processes after their imports.
    code = 'import flax_sg.linen; from jax.extend import backend as b; import jax\n'
    code += 'jax.config.update("jax_num_cpu_devices", 3); print(jax.device_count())'
    assert run_python('-c', code).split() == ['3']

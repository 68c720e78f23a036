"""`python -m flax_sg`."""

import importlib.abc
import os
import subprocess
import sys
import types
from pathlib import Path

import flax
import jax
import pytest

import flax_sg
from flax_sg.__main__ import main


def test_without_arguments_it_says_what_there_is(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    out, err = capsys.readouterr()
    first, second, *_ = out.splitlines()
    assert first.startswith(f'flax_sg {flax_sg.__version__} on ')
    assert f'flax {flax.__version__}, jax {jax.__version__}, jaxlib ' in first
    assert second == flax_sg.__doc__.splitlines()[0]
    assert 'python -m flax_sg demo [--out DIR] [--steps N]' in out
    assert 'python -m flax_sg flow PLACE [--args PLACE] [--expect TEXT]' in out
    assert max(map(len, out.splitlines())) <= 88
    assert err == ''


def test_help_is_the_same_text(capsys: pytest.CaptureFixture[str]):
    texts = []
    for argv in [[], ['help'], ['-h'], ['--help']]:
        assert main(argv) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1


def test_an_unknown_command_fails(capsys: pytest.CaptureFixture[str]):
    assert main(['dmeo']) == 2
    assert capsys.readouterr().err == "\nUnknown command: 'dmeo'\n"


@pytest.fixture
def fake_demo(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for the demo; records what it is called with."""
    calls: list[list[str]] = []
    demo = types.ModuleType('flax_sg.demo')
    demo.main = lambda argv: calls.append(argv) or 7
    monkeypatch.setitem(sys.modules, 'flax_sg.demo', demo)
    monkeypatch.setattr(flax_sg, 'demo', demo, raising=False)
    return calls


def test_the_demo_gets_the_other_arguments_and_its_status_is_ours(fake_demo):
    assert main(['demo', '--steps', '3']) == 7
    assert fake_demo == [['--steps', '3']]


def test_arguments_come_from_the_command_line(fake_demo, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['flax_sg', 'demo', '--out', 'somewhere'])
    assert main() == 7
    assert fake_demo == [['--out', 'somewhere']]


class Missing(importlib.abc.MetaPathFinder):
    """Lets the import of the demo fail as if a package were not installed."""

    def __init__(self, package: str):
        self.package = package

    def find_spec(self, fullname, path, target=None):
        if fullname == 'flax_sg.demo':
            raise ModuleNotFoundError('not installed', name=self.package)
        return None


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    def remove(package: str) -> None:
        monkeypatch.delitem(sys.modules, 'flax_sg.demo', raising=False)
        monkeypatch.delattr(flax_sg, 'demo', raising=False)
        monkeypatch.setattr(sys, 'meta_path', [Missing(package), *sys.meta_path])

    return remove


@pytest.mark.parametrize('package', ['sklearn', 'matplotlib', 'sklearn.datasets'])
def test_without_the_demos_packages_it_says_what_to_install(package, without, capsys):
    without(package)
    assert main(['demo']) == 1
    assert capsys.readouterr().err.splitlines() == [
        f'The demo needs {package}, which is not installed.',
        "Install what it needs with: pip install 'flax_sg[demo]'",
    ]


def test_another_missing_package_is_not_hidden(without):
    without('numpy')
    with pytest.raises(ModuleNotFoundError):
        main(['demo'])


def test_as_a_process(tmp_path: Path):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, '-W', 'error', '-m', 'flax_sg', 'dmeo'],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "\nUnknown command: 'dmeo'\n"

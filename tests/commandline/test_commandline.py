"""`python -m flax_sg`: its commands, and how they say what is wrong."""

import os
import platform
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import flax
import jax
import pytest

import flax_sg
from flax_sg.__main__ import main


def test_a_report_for_bugs_has_versions_devices_and_flags(monkeypatch, capsys):
    monkeypatch.setenv('JAX_ENABLE_X64', '1')
    monkeypatch.setattr(metadata, 'version', versions := {'jax': '1.2.3'}.__getitem__)
    monkeypatch.setattr(metadata, 'PackageNotFoundError', KeyError)
    assert main(['env']) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ['flax_sg', flax_sg.__version__] in rows
    assert ['jax', versions('jax')] in rows and ['optax', 'not installed'] in rows
    assert ['Python', platform.python_version()] in rows
    assert 'CPU' in dict(rows)['devices'].upper()
    assert ['flag', 'JAX_ENABLE_X64 = 1'] in rows


def test_a_report_for_bugs_says_that_a_driver_fails(monkeypatch, capsys):
    def devices() -> Any:
        raise RuntimeError('no driver')

    monkeypatch.setattr(jax, 'devices', devices)
    assert main(['env']) == 0
    assert 'devices    none: no driver' in capsys.readouterr().out


# Without a command, and the demo.


@pytest.mark.parametrize('argv', [[], ['--help']])
def test_without_a_command_it_says_what_there_is(argv, capsys):
    assert main(argv) == 0
    out, err = capsys.readouterr()
    first, second, *_ = out.splitlines()
    assert first.startswith(f'flax_sg {flax_sg.__version__} on flax {flax.__version__}')
    assert f'jax {jax.__version__}, jaxlib ' in first
    assert second == flax_sg.__doc__.splitlines()[0]
    for command in ('demo', 'env'):
        assert f'python -m flax_sg {command} ' in out
    assert max(map(len, out.splitlines())) <= 88
    assert err == ''


@pytest.mark.parametrize('command', ['dmeo', 'flow', 'paths'])
def test_an_unknown_command_fails(command, capsys):
    assert main([command]) == 2
    assert capsys.readouterr().err == f'Unknown command: {command!r}\n'


def test_the_demo_gets_the_other_arguments_and_its_status_is_ours(monkeypatch):
    calls: list[list[str]] = []
    demo = types.ModuleType('flax_sg.demo')
    demo.main = lambda argv: calls.append(argv) or 7
    monkeypatch.setitem(sys.modules, 'flax_sg.demo', demo)
    monkeypatch.setattr(flax_sg, 'demo', demo, raising=False)
    assert main(['demo', '--steps', '3']) == 7
    monkeypatch.setattr(sys, 'argv', ['flax_sg', 'demo', '--out', 'somewhere'])
    assert main() == 7
    assert calls == [['--steps', '3'], ['--out', 'somewhere']]


def test_a_package_of_the_demo_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    assert main(['demo']) == 1
    assert capsys.readouterr().err.splitlines() == [
        'The demo needs scikit-learn, which is not installed. '
        'Install it with: pip install scikit-learn'
    ]


def in_a_process(**pipes: Any) -> Any:
    command = [sys.executable, '-m', 'flax_sg', 'env']
    env = {**os.environ, 'PYTHONPATH': str(Path(__file__).parents[2])}
    return subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, **pipes)


def test_as_a_process():
    done = in_a_process(stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert f'flax_sg    {flax_sg.__version__}' in done.stdout


def test_a_reader_that_goes_away_ends_it_quietly():
    read, write = os.pipe()
    os.close(read)
    done = in_a_process(stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, '')

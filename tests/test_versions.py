"""Which versions are supported, and what is said of others when they are imported."""

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import flax.linen as fnn
import jax
import pytest
from flax.core import scope
from packaging.specifiers import SpecifierSet

from flax_sg import errors
from flax_sg.internals import hooking, versions

pytestmark = pytest.mark.every_case

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())


def test_all_that_is_needed_is_here():
    versions.check()


def owner_of(place: str) -> tuple[Any, str]:
    """What holds a name, and the last part of the name."""
    module, _, names = place.partition(':')
    *owners, name = names.split('.')
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


@pytest.mark.parametrize('place', versions.NAMES)
def test_a_name_that_is_gone(place):
    module, _, names = place.partition(':')
    first, *rest = names.split('.')
    with pytest.MonkeyPatch.context() as patch:
        if rest:  # Some objects keep what they have: take another one.
            patch.setattr(importlib.import_module(module), first, object())
        else:
            patch.delattr(importlib.import_module(module), first)
        with pytest.raises(errors.UnsupportedVersionError) as caught:
            versions.check()
    assert f'  {place.replace(":", ".")}' in str(caught.value).splitlines()


@pytest.mark.parametrize('place', [p for p, takes in versions.NAMES.items() if takes])
def test_a_function_that_takes_something_else(place):
    owner, name = owner_of(place)

    def other(something, else_):
        raise NotImplementedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, other)
        with pytest.raises(errors.UnsupportedVersionError) as caught:
            versions.check()
    expected = ', '.join(versions.NAMES[place].split())
    line = f'  {place.replace(":", ".")}({expected}), which takes (something, else_)'
    assert line in str(caught.value).splitlines()
    versions.check()


def test_a_function_that_is_something_else(monkeypatch):
    place = next(place for place, takes in versions.NAMES.items() if takes)
    monkeypatch.setattr(*owner_of(place), functools.partial(print))
    assert place.replace(':', '.') in list(versions._faults())


@pytest.mark.parametrize('place', versions.WITHIN)
def test_code_that_names_something_else(place):
    owner, name = owner_of(place)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **kwargs: None)
        faults = list(versions._faults())
    for inner in versions.WITHIN[place].split():
        assert f'{inner} in {place.replace(":", ".")}' in faults
    versions.check()


def test_an_installation_of_another_flax_is_refused_by_the_import():
    code = """
import {module} as owner
del owner.{name}
import flax_sg
"""
    for module, name in (
        ('flax.core.lift', '_partial_pack'),  # Asked for by attribute.
        ('flax.core', 'tracers'),  # Imported by name.
    ):
        if name == 'tracers':
            text = 'import sys, flax.core\nsys.modules["flax.core.tracers"] = None\n'
            text += 'import flax_sg'
        else:
            text = code.format(module=module, name=name)
        done = subprocess.run([sys.executable, '-c', text], capture_output=True)
        said = done.stderr.decode()
        assert 'UnsupportedVersionError: flax_sg needs what this installation' in said
        assert f'  {module}.{name}' in said
        assert 'supported are flax' in said


def private_attributes(tree: ast.Module) -> set[str]:
    """The attributes that a file reads off private modules, and private ones."""
    modules = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module in ('flax.core', 'flax.linen')
        or node.module.startswith('jax._src')
        for alias in node.names
    }
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        if re.match('_[a-z]', node.attr)
        or (isinstance(node.value, ast.Name) and node.value.id in modules)
    }


FUTURE = 'from __future__ import annotations'


def test_every_private_name_is_checked():
    folder = Path(versions.__file__).parent
    files = [path for path in folder.glob('*.py') if path.stem != 'versions']
    tree = ast.parse('\n'.join(path.read_text().replace(FUTURE, '') for path in files))
    listed = [*versions.NAMES, *versions.WITHIN, *versions.WITHIN.values()]
    known = set(re.findall(r'\w+', ' '.join(listed)))
    known.add('_getframe')  # Python's.
    known.add('broadcast')  # Public: nn.broadcast.
    assert private_attributes(tree) - known == set()
    assert {'_state', '_id'} <= vars(fnn.Dense(1)).keys()
    names = set(vars(scope.Scope({})))
    assert set(versions.WITHIN['flax.core.scope:Scope.__init__'].split()) <= names
    for owner, name in hooking._HOOKED.values():
        path = f'{owner.__name__}.{name}'
        in_list = any(re.split('[:.]', p)[-1] == name for p in versions.NAMES)
        assert in_list or name == '__getattribute__', path  # Which every object has.


# What pyproject.toml states.


def bounds() -> dict[str, str]:
    pairs = [line.split('>=') for line in PYPROJECT['project']['dependencies']]
    return {name: bound for name, bound in pairs}


def test_the_message_says_what_pyproject_states():
    newest = PYPROJECT['tool']['flax_sg']['newest']
    for name, (oldest, latest) in versions.SUPPORTED.items():
        assert (oldest, latest) == (bounds()[name], newest[name])
    assert newest.keys() == {'python', *bounds()}


def test_every_supported_python_is_stated():
    project = PYPROJECT['project']
    newest = PYPROJECT['tool']['flax_sg']['newest']['python']
    first, last = (
        int(text.rpartition('.')[2]) for text in (project['requires-python'], newest)
    )
    wanted = [
        f'Programming Language :: Python :: 3.{n}' for n in range(first, last + 1)
    ]
    assert [c for c in project['classifiers'] if ':: 3.' in c] == wanted


def test_what_the_message_installs_is_what_runs_these_tests():
    # The fix, taken literally: the versions that the tests pass on are in it.
    text = str(versions.unsupported(['x']))
    [command] = [line for line in text.splitlines() if line.startswith('Fix: ')]
    pins = dict(re.findall(r"'(\w+)([^']*)'", command))
    for name, old, new in ((n, *ends) for n, ends in versions.SUPPORTED.items()):
        assert {old, new} <= set(SpecifierSet(pins[name]).filter([old, new, '0.1.0']))
    oldest = SpecifierSet(f'>={bounds()["jax"]}')
    assert oldest.contains(jax.__version__)

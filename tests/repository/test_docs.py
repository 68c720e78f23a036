"""The reference shows every public name."""

import inspect
import re
from pathlib import Path
from types import ModuleType

import flax.linen
import pytest

import flax_sg
from flax_sg import core, errors, filters, linen, testing

REFERENCE = Path(__file__).parents[2] / 'docs/reference'


def shown(page: str) -> set[str]:
    """The names that a page lists, each as a directive of its own."""
    listed = re.findall(
        r'\.\. auto(?!module)\w+:: ([\w.]+)', (REFERENCE / page).read_text()
    )
    return {name.rpartition('.')[2] for name in listed}


def public(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not (name.startswith('_') or inspect.ismodule(value))
    }


def test_names_of_the_package():
    # What its functions return.
    names = {'GradientFlow', 'ModuleFlow', 'Use', 'Paths', 'Variable'}
    assert shown('flax_sg.md') == public(flax_sg) | names


def test_names_of_linen_that_are_ours():
    theirs = vars(flax.linen)
    ours = {n for n in public(linen) if getattr(linen, n) is not theirs.get(n)}
    assert shown('linen.md') == ours | {'BlockDecorator'}


def test_names_of_filters():
    assert shown('filters.md') == set(filters.__all__) - {'Where'}  # A type alone.


def test_names_of_core():
    assert shown('core.md') == public(core)


@pytest.mark.parametrize('module', [errors, testing], ids=lambda m: m.__name__)
def test_sphinx_finds_all_names_that_are_imported(module: ModuleType):
    name = module.__name__.rpartition('.')[2]
    found = f'.. automodule:: {module.__name__}\n   :members:\n   :imported-members:\n'
    assert found in (REFERENCE / f'{name}.md').read_text()

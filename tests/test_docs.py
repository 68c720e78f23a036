"""The reference shows every public name."""

import inspect
import re
from pathlib import Path

import flax.linen
import pytest

import flax_sg
from flax_sg import core, errors, filters, linen, testing

REFERENCE = Path(__file__).parents[1] / 'docs/reference'
# Pages for which Sphinx finds the names by itself, in the docstring of the module.
AUTOMATIC = [core, errors, filters, testing]


def shown(page: str) -> set[str]:
    """The names that a page lists, each as a directive of its own."""
    listed = re.findall(r'\.\. auto\w+:: ([\w.]+)', (REFERENCE / page).read_text())
    return {name.rpartition('.')[2] for name in listed}


def public(module: object) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not (name.startswith('_') or inspect.ismodule(value))
    }


def test_names_of_the_package():
    names = {'GradientFlow', 'ModuleFlow', 'Use'}  # What its functions return.
    assert shown('flax_sg.md') == public(flax_sg) | names


def test_names_of_linen_that_are_ours():
    theirs = vars(flax.linen)
    ours = {n for n in public(linen) if getattr(linen, n) is not theirs.get(n)}
    assert shown('linen.md') == ours | {'Rewrite', 'linen'}


@pytest.mark.parametrize('module', AUTOMATIC, ids=lambda module: module.__name__)
def test_all_of_the_other_modules(module: object):
    name = module.__name__.rpartition('.')[2]
    text = (REFERENCE / f'{name}.md').read_text()
    assert f'.. automodule:: flax_sg.{name}\n   :members:' in text

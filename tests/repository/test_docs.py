"""The reference and the page of all names list exactly the public names."""

import inspect
import re
from pathlib import Path
from types import ModuleType

import flax.linen
import flax.nnx
import pytest

import flax_sg
from flax_sg import core, errors, filters, linen, testing

DOCS = Path(__file__).parents[2] / 'docs'

# What has all names of a module of Flax, and its own.
EXTENDED: dict[ModuleType, ModuleType] = {linen: flax.linen}


def names_of(module: ModuleType) -> set[str]:
    """The public names of a module."""
    if module in (filters, core):
        return set(module.__all__)
    public = {n: getattr(module, n) for n in dir(module) if not n.startswith('_')}
    found = {name: x for name, x in public.items() if not inspect.ismodule(x)}
    if module in EXTENDED:
        theirs = vars(EXTENDED[module])
        return {name for name in found if found[name] is not theirs.get(name)}
    if module is errors:
        return {name for name, value in found.items() if _is_exception(value)}
    return set(found)


def _is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


# The module, its short name in the pages, and the classes that its functions return.
# Only the reference shows these classes.
MODULES = [
    (flax_sg, 'sg', {'GradientFlow', 'Why', 'ModuleTable', 'Paths', 'Variable'}),
    (linen, 'nn', {'BlockDecorator'}),
    (filters, 'filters', set[str]()),
    (core, 'core', set[str]()),
    (testing, 'testing', {'Moves'}),
    (errors, 'errors', set[str]()),
]
if hasattr(flax.nnx.Variable, 'get_value'):  # flax_sg.nnx asks for flax 0.12.1.
    from flax_sg import nnx

    EXTENDED[nnx] = flax.nnx
    MODULES.append((nnx, 'nnx', set()))
each_module = pytest.mark.parametrize(
    ('module', 'short', 'returned'), MODULES, ids=[short for _, short, _ in MODULES]
)


@each_module
def test_the_page_of_all_names(module: ModuleType, short: str, returned: set[str]):
    rows = re.findall(r'^\| `(\w+)\.(\w+)`', (DOCS / 'names.md').read_text(), re.M)
    listed = [name for prefix, name in rows if prefix == short]
    assert sorted(listed) == sorted(names_of(module))


@each_module
def test_the_reference(module: ModuleType, short: str, returned: set[str]):
    page = (DOCS / f'reference/{module.__name__.rpartition(".")[2]}.md').read_text()
    shown = re.findall(r'^\.\. auto(?!module|summary)\w+:: ([\w.]+)', page, re.M)
    names = [name.rpartition('.')[2] for name in shown]
    assert sorted(names) == sorted(names_of(module) | returned)


@each_module
def test_the_summary_on_top(module: ModuleType, short: str, returned: set[str]):
    page = (DOCS / f'reference/{module.__name__.rpartition(".")[2]}.md').read_text()
    tables = re.findall(r'^\.\. autosummary::\n((?:   .*\n|\n)+)', page, re.M)
    names = re.findall(r'^   (\w+)$', ''.join(tables), re.M)
    assert sorted(names) == sorted(names_of(module))

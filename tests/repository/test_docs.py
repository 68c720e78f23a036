"""The reference and the page of all names list exactly the public names.

The signatures are made here. ``pytest --rewrite`` on this file writes them to the page.
"""

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import flax.linen
import flax.nnx
import pytest

import flax_sg
from flax_sg import core, errors, filters, linen, testing
from tests.helpers.signatures import returned as returned_objects
from tests.helpers.signatures import signatures

DOCS = Path(__file__).parents[2] / 'docs'

# What has all names of a module of Flax, and its own.
EXTENDED: dict[ModuleType, ModuleType] = {linen: flax.linen}


def names_of(module: ModuleType) -> set[str]:
    """The public names of a module."""
    if module in (filters, core):
        return set(module.__all__)
    public = {n: getattr(module, n) for n in dir(module) if not n.startswith('_')}
    if module is errors:
        return set(public)
    found = {name: x for name, x in public.items() if not inspect.ismodule(x)}
    if module in EXTENDED:
        theirs = vars(EXTENDED[module])
        return {name for name in found if found[name] is not theirs.get(name)}
    return set(found)


# The module, its short name in the pages, and the classes that its functions return.
# Only the reference shows these classes.
REPORTS = {'GradientFlow', 'Precomputed', 'Why', 'ModuleTable', 'Paths', 'Variable'}
MODULES = [
    (flax_sg, 'sg', REPORTS),
    (linen, 'nn', {'BlockDecorator'}),
    (filters, 'filters', set[str]()),
    (core, 'core', set[str]()),
    (testing, 'testing', {'Moves'}),
    (errors, 'errors', set[str]()),
]
# What ``where`` or ``wrt`` of a function names: what the word says.
BY_SIDE: dict[str, list[Any]] = {
    'where stopped': [linen.stop_gradient, linen.mirror, core.stop_gradient],
    'where trained': [linen.train_only, testing.assert_trains_only],
    'where frozen': [linen.Frozen, flax_sg.freeze],
    'wrt differentiated': [flax_sg.grad, flax_sg.value_and_grad, flax_sg.vjp],
    'where moved': [testing.assert_moves_only],
    'wrt trained': [],
}
BY_SIDE['where stopped'] += [flax_sg.stop_gradient, testing.assert_stopped]
BY_SIDE['where trained'] += [testing.assert_flows]

if hasattr(flax.nnx.Variable, 'get_value'):  # flax_sg.nnx asks for flax 0.12.1.
    from flax_sg import nnx

    EXTENDED[nnx] = flax.nnx
    MODULES.append((nnx, 'nnx', set()))
    BY_SIDE['where stopped'].append(nnx.stop_gradient)
    BY_SIDE['where trained'].append(nnx.train_only)
    BY_SIDE['wrt trained'].append(nnx.Optimizer)
SIDES = {function: side for side, of in BY_SIDE.items() for function in of}
each_module = pytest.mark.parametrize(
    ('module', 'short', 'returned'), MODULES, ids=[short for _, short, _ in MODULES]
)


@each_module
def test_the_page_of_all_names(module: ModuleType, short: str, returned: set[str]):
    rows = re.findall(r'^\| `(\w+)\.(\w+)`', (DOCS / 'names.md').read_text(), re.M)
    listed = [name for prefix, name in rows if prefix == short]
    assert sorted(listed) == sorted(names_of(module))


@each_module
def test_the_signatures(
    module: ModuleType, short: str, returned: set[str], request: pytest.FixtureRequest
):
    page = (DOCS / 'names.md').read_text()
    names = re.findall(rf'^\| `{short}\.(\w+)`', page, re.M)
    made = signatures(module, short, names)
    written = re.findall(rf'^```text\n((?:{short}\..*\n)+)```$', page, re.M)
    if made and request.config.getoption('--rewrite'):
        (DOCS / 'names.md').write_text(page.replace(written[0], made))
        return
    assert written == ([made] if made else [])


def test_the_returned_objects(request: pytest.FixtureRequest):
    page = (DOCS / 'names.md').read_text()
    made = returned_objects()
    before, head, rest = page.partition('## Returned objects\n')
    table = re.findall(r'\|---\|---\|\n((?:\|.*\n)*)', rest)[0]
    if request.config.getoption('--rewrite'):
        rest = rest.replace(f'|---|---|\n{table}', f'|---|---|\n{made}', 1)
        (DOCS / 'names.md').write_text(before + head + rest)
        return
    assert table == made


@each_module
def test_the_reference(module: ModuleType, short: str, returned: set[str]):
    page = (DOCS / f'reference/{module.__name__.rpartition(".")[2]}.md').read_text()
    assert page.split('\n\n')[1].startswith('> A code host shows')
    shown = re.findall(r'^\.\. auto(?!module|summary)\w+:: ([\w.]+)', page, re.M)
    names = [name.rpartition('.')[2] for name in shown]
    assert sorted(names) == sorted(names_of(module) | returned)


@each_module
def test_the_summary_on_top(module: ModuleType, short: str, returned: set[str]):
    page = (DOCS / f'reference/{module.__name__.rpartition(".")[2]}.md').read_text()
    tables = re.findall(r'^\.\. autosummary::\n((?:   .*\n|\n)+)', page, re.M)
    names = re.findall(r'^   (\w+)$', ''.join(tables), re.M)
    assert sorted(names) == sorted(names_of(module))


@pytest.mark.parametrize(
    'function', SIDES, ids=lambda f: f'{f.__module__}.{f.__name__}'
)
def test_the_reference_begins_with_the_side(function: Any):
    argument, side = SIDES[function].split()
    _, second, *_ = (inspect.getdoc(function) or '').split('\n\n')
    assert second.startswith(f'``{argument}`` names what is **{side}**')


@pytest.mark.parametrize('module', [flax_sg, core, filters, testing])
def test_a_module_lists_what_is_public(module: ModuleType):
    assert dir(module) == sorted(module.__all__)
    modules = {name for name in dir(module) if inspect.ismodule(getattr(module, name))}
    ours = {'core', 'errors', 'filters', 'linen', 'testing'}
    assert modules == (ours if module is flax_sg else set())


def missing(folder: Path, page: Path) -> list[str]:
    """The files that a page names or links to, and that are not in a folder."""
    text = re.sub(r'^```.*?^```$', '', page.read_text(), flags=re.M | re.S)
    there = [file for file in folder.rglob('*') if not HIDDEN & {*file.parts}]
    ends = {'/'.join(f.parts[-n:]) for f in there for n in range(1, len(f.parts))}
    named = re.findall(r'`([\w./-]+\.(?:py|md|ipynb|toml|cff|svg))`', text)
    links = re.findall(r'\]\(([^)#:\s]+)(?:#[^)]*)?\)', text)
    lost = [link for link in links if not (page.parent / link).exists()]
    return [name for name in named if name not in ends] + lost


HIDDEN = {'.git', '.venv', '_build', '__pycache__', 'node_modules'}
ROOT = DOCS.parent
ROOMS = ['docs', 'flax_sg', 'tests', 'benchmarks', 'notebooks']
EVERY_PAGE = [*ROOT.glob('*.md'), *(p for r in ROOMS for p in (ROOT / r).rglob('*.md'))]


@pytest.mark.parametrize('page', EVERY_PAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page: Path):
    # Files of the reader, in examples.
    assert set(missing(ROOT, page)) <= {'net.py', 'train.py'}


def test_a_file_that_does_not_exist_is_found(tmp_path: Path):
    (tmp_path / 'there.py').touch()
    page = tmp_path / 'README.md'
    page.write_text('`there.py`, `gone.py`, [a](there.py#x), [b](lost.md), [c](#here)')
    assert missing(tmp_path, page) == ['gone.py', 'lost.md']


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page and of what it includes."""
    text = page.read_text()
    included = re.findall(r'^```\{include\} (.+)$', text, re.M)
    text = re.sub(r'^```.*?^```$', '', text, flags=re.M | re.S)
    titles = re.findall(r'^#{1,3} (.+)$', text, re.M)
    made = {re.sub(r'[^\w -]', '', t.lower()).strip().replace(' ', '-') for t in titles}
    return made.union(*(anchors(page.parent / name) for name in included))


def lost_anchors(file: Path) -> list[str]:
    """What a page, a docstring or a notebook links to, and no heading has."""
    text = file.read_text()
    if file.suffix == '.md':
        text = re.sub(r'^```.*?^```$', '', text, flags=re.M | re.S)
        links = re.findall(r'\]\(([^)#:\s]*)#([\w-]+)\)', text)
    else:  # In a text or a comment, from here or from the root; or of the site.
        links = re.findall(r'([\w./-]+\.(?:md|html))#([\w-]+)', text)
    lost: list[str] = []
    for name, anchor in links:
        name = re.sub(r'.*?([\w-]+)\.html$', r'docs/\1.md', name)
        pages = [file] if not name else [file.parent / name, ROOT / name]
        found = [page for page in pages if page.is_file()]
        if not found or anchor not in anchors(found[0]):
            lost.append(f'{name}#{anchor}')
    return lost


WITH_LINKS = [
    *EVERY_PAGE,
    *(file for room in ROOMS for file in (ROOT / room).rglob('*.py')),
    *(ROOT / 'notebooks').glob('*.ipynb'),
]


def test_every_anchor_that_is_linked_to_exists():
    lost = {str(file.relative_to(ROOT)): lost_anchors(file) for file in WITH_LINKS}
    lost.pop('tests/repository/test_docs.py')  # Examples, below.
    assert {name: links for name, links in lost.items() if links} == {}


def test_an_anchor_that_does_not_exist_is_found(tmp_path: Path):
    page = tmp_path / 'page.md'
    page.write_text('# The `sg.at` page\n\n```text\n## Not me\n```\n\n[a](#not-me)\n')
    assert anchors(page) == {'the-sgat-page'}
    assert lost_anchors(page) == ['#not-me']
    code = tmp_path / 'code.py'
    code.write_text(
        '"""See page.md#the-sgat-page, page.md#gone, x/limits.html#gone."""'
    )
    assert lost_anchors(code) == ['page.md#gone', 'docs/limits.md#gone']

"""Runs the code blocks of the README and of the guide, each page as one program.

Blocks marked `python` are executed, and `pycon` sessions are compared with their
output. Commands in `bash` blocks are looked up. Blocks marked `text` are not run: they
are sketches, or need packages that are not installed. Other marks are errors.
"""

import doctest
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from flax import nnx

from tests.helpers.left_over import forget_contexts

ROOT = Path(__file__).parents[2]
README = ROOT / 'README.md'
# Pages that only include another file, such as the README.
GUIDE = sorted((ROOT / 'docs').glob('*.md'))
PAGES = [README, *(p for p in GUIDE if '```{include}' not in p.read_text())]

# Pages that begin with a program on purpose: it is their idea, or that is elsewhere.
WITH_A_MODEL_FIRST = {'README.md', 'quick_start.md', 'names.md'}

every_page = pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)

Block = tuple[int, str, str]


def blocks(text: str) -> list[Block]:
    """Line number, mark and code of the fenced blocks."""
    fence = re.compile(r'^```(\w*)\n(.*?)^```$', re.MULTILINE | re.DOTALL)
    return [
        (text.count('\n', 0, match.start(2)) + 1, match.group(1), match.group(2))
        for match in fence.finditer(text)
    ]


def run_blocks(text: str, page: str = 'page') -> int:
    """Runs the blocks in one namespace; returns how many there were to run."""
    count = 0
    names: dict[str, object] = {'__name__': 'page'}
    for line, mark, code in blocks(text):
        count += mark in ('python', 'pycon')
        if mark == 'python':
            # Empty lines before the code keep the line numbers in tracebacks right.
            padded = '\n' * (line - 1) + code
            exec(compile(padded, page, 'exec'), names)
        elif mark == 'pycon':
            parser = doctest.DocTestParser()
            test = parser.get_doctest(code, names, page, page, line - 1)
            runner = doctest.DebugRunner(optionflags=doctest.ELLIPSIS)
            runner.run(test, clear_globs=False)
            names |= test.globs
    return count


@pytest.fixture
def usual_promotion() -> Iterator[None]:
    """Sets JAX's default promotion rules, which readers of the pages have."""
    with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
        yield


def test_the_guide_is_there():
    names = {'quick_start', 'concepts', 'freeze', 'stages', 'reports', 'nnx', 'limits'}
    assert {f'{name}.md' for name in names} < {page.name for page in PAGES}


def test_the_readme_is_short():
    text = README.read_text()
    prose = re.sub(r'^```.*?^```$|<!--.*?-->', '', text, flags=re.M | re.S)
    assert len([word for word in prose.split() if re.search(r'\w', word)]) <= 900
    assert len(text.splitlines()) <= 200


@every_page
def test_every_block_has_a_mark_that_is_checked(page: Path):
    text = page.read_text()
    found = blocks(text)
    assert {mark for _, mark, _ in found} <= {'bash', 'python', 'pycon', 'text'}
    assert 2 * len(found) == len(re.findall(r'^ *```', text, re.MULTILINE))


@every_page
def test_the_first_screen_says_what_the_page_is_about(page: Path):
    """Imports and toy models are folded, in a way that GitHub and Sphinx both show."""
    before, fence, _ = page.read_text().partition('```python\n')
    if not fence or page.name in WITH_A_MODEL_FIRST:
        return
    text, fold, summary = before.partition('<details>\n')
    assert len(text.split()) >= 50
    # Without the empty line the program would be HTML, and so no code.
    pattern = r'<summary>.+</summary>\n\n'
    assert not fold or '</details>' in summary or re.fullmatch(pattern, summary)


@every_page
@pytest.mark.usefixtures('usual_promotion')
def test_the_code_runs_and_shows_what_it_says(page: Path):
    forget_contexts()  # A program of another test counts as read.
    text = page.read_text()
    if 'flax_sg import nnx' in text and not hasattr(nnx.Variable, 'get_value'):
        pytest.skip('flax_sg.nnx needs flax 0.12.1')
    if 'import haiku' in text:
        for rival in ('haiku', 'equinox'):
            pytest.importorskip(rival, reason="needs the extra 'bench'")
    marks = re.findall(r'^```(?:python|pycon)$', text, re.MULTILINE)
    assert run_blocks(text, str(page)) == len(marks) > 0


@pytest.mark.parametrize(
    'text',
    [
        '```python\n1 / 0\n```\n',
        '```python\nx = 2\n```\n\n```pycon\n>>> 1 / (x - 2)\n```\n',
        '```pycon\n>>> x = 1\n```\n```python\n1 / (x - 1)\n```\n',
    ],
)
def test_a_failing_block_is_seen(text: str):
    with pytest.raises((ZeroDivisionError, doctest.UnexpectedException)):
        run_blocks(text)


def test_another_result_is_seen():
    with pytest.raises(doctest.DocTestFailure):
        run_blocks('```pycon\n>>> 1 + 1\n3\n```\n')


def test_the_commands_exist():
    commands = runpy.run_path(str(ROOT / 'dev.py'))['COMMANDS']
    shown = [code for _, mark, code in blocks(README.read_text()) if mark == 'bash']
    named = re.findall(r'python3 dev\.py (\w+)', README.read_text())
    assert {'test'} <= set(named) <= set(commands)
    assert 'python -m flax_sg demo' in shown[0]
    assert 'python3 dev.py test' in shown[0]

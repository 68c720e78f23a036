"""Every block of code in the README is run, in order, as one program.

Blocks marked `python` are executed, `pycon` sessions compared with what they show, and
commands in `bash` blocks looked up. Other marks are not allowed: nothing else is run.
"""

import doctest
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / 'README.md'

Block = tuple[int, str, str]


def blocks(text: str) -> list[Block]:
    """Line number, mark and code of the fenced blocks."""
    fence = re.compile(r'^```(\w*)\n(.*?)^```$', re.MULTILINE | re.DOTALL)
    return [
        (text.count('\n', 0, match.start(2)) + 1, match.group(1), match.group(2))
        for match in fence.finditer(text)
    ]


def run_blocks(text: str) -> int:
    """Runs the blocks in one namespace; returns how many there were to run."""
    count = 0
    names: dict[str, object] = {'__name__': 'readme'}
    for line, mark, code in blocks(text):
        count += mark in ('python', 'pycon')
        if mark == 'python':
            # Empty lines before the code keep the numbers of lines in tracebacks.
            padded = '\n' * (line - 1) + code
            exec(compile(padded, str(README), 'exec'), names)
        elif mark == 'pycon':
            test = doctest.DocTestParser().get_doctest(
                code, names, 'README.md', str(README), line - 1
            )
            runner = doctest.DebugRunner(optionflags=doctest.ELLIPSIS)
            runner.run(test, clear_globs=False)
            names |= test.globs
    return count


def test_every_block_has_a_mark_that_is_checked():
    text = README.read_text()
    found = blocks(text)
    assert {mark for _, mark, _ in found} == {'bash', 'python', 'pycon'}
    assert 2 * len(found) == len(re.findall(r'^ *```', text, re.MULTILINE))


def test_the_code_runs_and_shows_what_it_says():
    assert run_blocks(README.read_text()) == 16


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
    assert {'demo', 'test'} <= set(named) <= set(commands)
    assert 'python3 dev.py demo' in shown[0]
    assert 'python3 dev.py test' in shown[0]

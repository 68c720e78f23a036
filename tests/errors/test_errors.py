"""Every error: its text, the place that raises it, and what mends it.

A program for each stands in the tables beside this file, its text in `messages.txt`.
"""

import ast
import copy
import importlib
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import optax
import pytest
from flax import nnx

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from tests.errors import messages

# flax_sg.nnx asks for flax 0.12.1.
HAS_NNX = hasattr(nnx.Variable, 'get_value')
ROOMS = [
    *('ahead', 'block', 'cotangent', 'filter', *['graph'] * HAS_NNX, 'name', 'report'),
    *('setup', 'stored', 'tree', 'wrapper'),
]
TABLES = [importlib.import_module(f'tests.errors.{room}_errors') for room in ROOMS]
# Programs, each alone or beside a fix: a snippet of its text, or a program that does
# as it says.
ROWS = {
    case: row if isinstance(row, tuple) else (row,)
    for table in TABLES
    for case, row in table.CASES.items()
}
HOME = {case: table for table in TABLES for case in table.CASES}
TEXTS = messages.read()


def error_of(case: str) -> messages.Raised:
    return messages.raised(ROWS[case][0])


@pytest.mark.parametrize('case', ROWS)
def test_the_text(case, pytestconfig):
    """`pytest tests/errors --rewrite` writes what an error says now: read it."""
    text = messages.settled(error_of(case).text, TEXTS.get(case, ''))
    assert pytestconfig.getoption('rewrite') or text == TEXTS.get(case)


@pytest.mark.skipif(not HAS_NNX, reason='flax 0.12.0 has no rows of nnx')
def test_each_text_is_that_of_a_row(pytestconfig):
    if pytestconfig.getoption('rewrite'):
        messages.rewrite({case: error_of(case).text for case in ROWS})
    assert [*messages.read()] == [*ROWS]


FIXES = {case: row[1] for case, row in ROWS.items() if len(row) > 1}


@pytest.mark.parametrize('case', FIXES)
def test_the_fix_of_the_message_works(case):
    """A snippet of the message, taken literally, or a program that does as it says."""
    fix = FIXES[case]
    if isinstance(fix, str):
        assert fix in error_of(case).text
        _ = eval(fix, dict(vars(HOME[case])))
    else:
        fix()


NAMES = {'nn': nn, 'sg': sg, 'jax': jax, 'optax': optax, 'filters': sg.filters}
if HAS_NNX:
    NAMES['nnx'] = importlib.import_module('flax_sg.nnx')


def test_messages_name_what_exists():
    names = '|'.join(NAMES)
    for case in ROWS:
        text = error_of(case).text
        for of, attributes in re.findall(rf'\b({names})((?:\.[a-zA-Z_]+)+)\(', text):
            found = NAMES[of]
            for name in attributes[1:].split('.'):
                assert hasattr(found, name), (case, of + attributes)
                found = getattr(found, name)


def test_every_row_has_its_name():
    assert sum(len(table.CASES) for table in TABLES) == len(ROWS), 'a name twice'


# What is raised and is not among the rows: for each file, the source and the reason.
ELSEWHERE = {
    # What Python raises for such a module, see test_setup_classes.py.
    ('engine/setup_values.py', 'AttributeError(self._name)'),
    # In other processes, see test_versions.py.
    ('internals/__init__.py', 'versions.unsupported([str(error)])'),
    ('internals/versions.py', 'unsupported([fault], who)'),
    (
        'nnx/__init__.py',
        '_errors.UnsupportedVersionError("flax_sg.nnx needs flax 0.12'
        '.1 or newer: Variables of this one have no get_value.\\nUpdat'
        "e it: pip install 'flax>=0.12.1'. flax_sg.linen works with t"
        'his one.")',
    ),
    # Abstract: a subclass defines it. And what ends a program, and is caught.
    ('engine/opening.py', 'NotImplementedError'),
    ('internals/required.py', '_Called'),
    # Errors of an atom, kept while it has other paths.
    ('filters/expressions.py', 'error'),
    ('engine/judgement.py', 'error'),
    # What Python asks of any object.
    ('trees/absent.py', 'AttributeError(name)'),
    ('trees/nondifferentiable.py', 'AttributeError(name)'),
}


def _raises() -> Iterator[tuple[str, str, range]]:
    """Each place that raises or warns: file, what, and its lines."""
    for file in sorted(Path(messages.LIBRARY).rglob('*.py')):
        name = file.relative_to(messages.LIBRARY).as_posix()
        # What commands print is tested line by line with them.
        if name.startswith(('demo/', '__main__')):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise | ast.Expr):
                said = getattr(node, 'exc', node)  # None for a bare raise.
                what = ast.unparse(said) if said else ''
                if 'warnings.warn' in what or (what and isinstance(node, ast.Raise)):
                    yield name, what, range(node.lineno, node.end_lineno + 1)


@pytest.mark.skipif(not HAS_NNX, reason='flax 0.12.0 has no rows of nnx')
def test_every_place_that_raises_has_a_row():
    met = {site for case in ROWS for site in error_of(case).sites}
    places = list(_raises())
    assert len(places) > 120
    assert {(file, what) for file, what, _ in places} >= ELSEWHERE
    missing = [
        f'{file}:{lines.start} {what}'
        for file, what, lines in places
        if (file, what) not in ELSEWHERE
        if not any(f'{file}:{line}' in met for line in lines)
    ]
    assert missing == []


# The classes.

CLASSES = errors.FlaxSGError.__subclasses__()
BUILTIN = {
    TypeError: 'FilterType ArgumentType Cotangent AbsentLeaf',
    ValueError: 'UnusedFilter ArgumentValue Structure StaleRows',
    AttributeError: 'AbsentLeaf',
    RuntimeError: 'Block',
    ImportError: 'UnsupportedVersion',
    LookupError: 'UnknownName',
    AssertionError: 'Expectation',
    IndexError: 'Part',
    FileNotFoundError: 'MissingRows',
}


def test_every_class_is_a_built_in_exception_too():
    names = {name for names in BUILTIN.values() for name in names.split()}
    assert {cls.__name__ for cls in CLASSES} == {f'{name}Error' for name in names}
    for builtin, names in BUILTIN.items():
        for name in names.split():
            cls = getattr(errors, f'{name}Error')
            assert issubclass(cls, builtin) and issubclass(cls, errors.FlaxSGError)


def test_every_class_has_a_row():
    classes = {*CLASSES, errors.ScanMemoryWarning, errors.NothingStoppedWarning}
    public = {x for x in vars(errors).values() if inspect.isclass(x)}
    ours = {cls for cls in public if cls.__module__ == errors.__name__}
    assert ours == classes | {errors.FlaxSGError}
    assert classes <= {type(error_of(case).error) for case in ROWS}


def test_errors_survive_copies_and_pickles():
    for case in ROWS:
        error = error_of(case).error
        if isinstance(error, errors.FlaxSGError):  # Python's own do as they do.
            for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
                assert type(twin) is type(error)
                assert (str(twin), twin.args) == (str(error), error.args)

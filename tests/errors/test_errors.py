"""Every error of the mechanism: its class, the names in it, and what mends it.

Errors of filters and of their functions are tested with those.
"""

import ast
import copy
import functools
import importlib
import inspect
import os
import pickle
import re
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import flax
import flax.linen as fnn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import flax_sg
import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.internals import required, versions
from tests.errors import (
    ahead_errors,
    block_errors,
    cotangent_errors,
    filter_errors,
    report_errors,
    tree_errors,
)
from tests.helpers.tasks import read_while_another_waits

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Model(fnn.Module):
    """An encoder and a normalisation."""

    def setup(self):
        self.encoder = fnn.Dense(3)
        self.norm = fnn.BatchNorm(use_running_average=True)

    def __call__(self, x):
        return self.norm(self.encode(x))

    def encode(self, x):
        return jnp.tanh(self.encoder(x))


class Renames(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        return nn.Frozen(fnn.Dense(3), name='base')(x)


def renames() -> None:
    Renames().init(jax.random.key(0), X)


def writes() -> None:
    norm = fnn.BatchNorm(use_running_average=False)
    variables = norm.init(jax.random.key(0), X)
    with nn.read_only('mean'):
        norm.apply(variables, X, mutable=True)


MODEL = Model()
VARIABLES = MODEL.init(jax.random.key(0), X)


def run(block: Any) -> None:
    with block:
        MODEL.apply(VARIABLES, X)


def nothing_read() -> None:
    with nn.stop_gradient('encoder/nothing'):
        pass


def close_first() -> None:
    first, second = nn.stop_gradient('encoder/**'), nn.stop_gradient('norm/*')
    first.__enter__()
    second.__enter__()
    try:
        first.__exit__(None, None, None)
    finally:
        MODEL.apply(VARIABLES, X)
        second.__exit__(None, None, None)


def close_in_another_thread() -> None:
    block = nn.stop_gradient('encoder/**')
    with block, ThreadPoolExecutor(1) as pool:
        MODEL.apply(VARIABLES, X)
        pool.submit(block.__exit__, None, None, None).result()


def awaited() -> None:
    block = nn.stop_gradient('encoder/**')
    read_while_another_waits(block, lambda: MODEL.apply(VARIABLES, X))


def lacks_a_name() -> None:
    programs = {
        **required.PROGRAMS,
        'Module.sow has to call put_variable': lambda: False,
        'attributes of a scope': lambda: required._has(flax.core.Scope({}), '_none'),
    }
    versions.check(programs)


class Declared(NamedTuple):
    kernel: Any
    mean: Any


def returns_nothing(params: Any) -> Any:
    jnp.sum(params['w'])


def called_back(params: Any) -> Any:
    w = params['w'] * params['b']
    return jax.pure_callback(jnp.sin, w, w)


CASES: dict[str, tuple[Any, ...]] = {
    'unused=': (
        lambda: nn.stop_gradient('encoder/**', unused='warn'),
        "ArgumentValueError: 'warn'",
    ),
    'collections=': (
        lambda: nn.stop_gradient('encoder/**', collections=3),
        'FilterTypeError: flax.core.DenyList',
    ),
    'overwrite with gradient': (
        lambda: nn.stop_gradient(
            True, collections=['params', '_overwrite_with_gradient']
        ),
        "ArgumentValueError: 'params' | '_overwrite_with_gradient'",
    ),
    'unused at top level': (
        lambda: run(nn.stop_gradient('encodr/**')),
        "UnusedFilterError: 'encodr/**' | 'encoder/kernel' | 'encoder/**'",
    ),
    'unknown collection': (
        lambda: run(nn.stop_gradient('norm/mean', collections='batch_stat')),
        "UnusedFilterError: 'batch_stat' | 'params'",
    ),
    'nothing read': (
        nothing_read,
        "UnusedFilterError: 'encoder/nothing' | sg.stop_gradient(tree, where)",
    ),
    'methods without a class': (
        lambda: nn.stop_gradient('encoder/**', methods=['encode']),
        "ArgumentTypeError: 'encode' | nn.stop_gradient(Model, where, methods=[...])",
    ),
    'target': (
        lambda: nn.stop_gradient('kernel', 'encoder/**'),
        "ArgumentTypeError: 'kernel' | "
        "several globs as a list: nn.stop_gradient(['kernel', ...])",
    ),
    'no target': (
        lambda: nn.stop_gradient(3, 'encoder/**'),
        'ArgumentTypeError: 3 (int) | '
        'nn.stop_gradient(target, where) | jax.lax.stop_gradient(x)',
    ),
    'a value that does not fit': (
        lambda: run(nn.substitute({'encoder': {'bias': jnp.zeros(3, jnp.bfloat16)}})),
        "StructureError: 'encoder/bias' | 'params'",
    ),
    'a result that does not fit': (
        lambda: run(nn.substitute(lambda path, value: value[0], where='norm/bias')),
        "StructureError: 'norm/bias' | 'params'",
    ),
    'no value for a variable': (
        lambda: run(nn.substitute('ema', where='encoder/bias')),
        "StructureError: 'encoder/bias' | 'params' | 'ema' | sg.ABSENT",
    ),
    'written and read only': (
        lambda: writes(),
        'BlockError: collections=True | where=',
    ),
    'closed before an inner one': (
        close_first,
        "BlockError: test_errors.py:LINE | 'encoder/**' | 'norm/*'",
    ),
    'closed in another thread': (
        close_in_another_thread,
        "BlockError: test_errors.py:LINE | 'encoder/**'",
    ),
    'suspended task': (awaited, "BlockError: tasks.py:LINE | 'encoder/**'"),
    'overlapping parts': (
        lambda: sg.combine({'a': {'w': X}}, {'a': {'w': 1.0}}),
        "StructureError: 'a/w'",
    ),
    'parts of two trees': (
        lambda: sg.combine({'a': {'w': X}}, {'a': {'v': 1.0}}),
        "StructureError: 'a/w' | 'a/v'",
    ),
    'parts of two kinds': (
        lambda: sg.combine([1.0], (sg.ABSENT,)),
        'StructureError: part 1 and part 2 | a list in one may be a tuple',
    ),
    'a leaf with two labels': (
        lambda: sg.partition_n({'gln': 1.0}, {'gln': 'gln', 'all': True}),
        "StructureError: 'gln' | 'all'",
    ),
    'an integer by name': (
        lambda: sg.grad(lambda p: p['w'], wrt='step')({'w': 1.0, 'step': 3}),
        "ArgumentTypeError: 'step'",
    ),
    'absent=': (
        lambda: sg.grad(lambda p: p, absent='zero'),
        "ArgumentValueError: 'zero' | 'none'",
    ),
    'a changed value': (
        lambda: jax.tree.map(lambda x: 0.5 * x, sg.NonDifferentiable(3)).value,
        'ArgumentValueError: sg.freeze(tx)',
    ),
    'a field that is not there': (
        lambda: sg.grad(jnp.sum)(sg.trainable('kernal')(Declared)(X, X)),
        "ArgumentTypeError: 'kernal' | 'kernel' | 'mean'",
    ),
    'freezing no optimizer': (
        lambda: sg.freeze('adam', 'a'),
        "ArgumentTypeError: 'adam'",
        "sg.freeze(optax.adam(1e-3), 'backbone/**')",
    ),
    'an optimizer for values that are gradients': (
        lambda: sg.mask({'_overwrite_with_gradient': {'s': 1.0}}, frozen=True),
        "ArgumentValueError: 'params'",
    ),
    'wrapped class': (
        lambda: nn.Frozen(fnn.Dense),
        'ArgumentTypeError: nn.stop_gradient(target, where) | jax.lax.stop_gradient(x)',
    ),
    'wrapped None': (
        lambda: nn.mirror(None),
        'ArgumentTypeError: nn.stop_gradient(target, where) | jax.lax.stop_gradient(x)',
    ),
    'wrapper with a second name': (
        renames,
        "ArgumentValueError: nn.Frozen(Dense(...), name='base') | "
        "nn.Frozen(Dense(..., name='base'))",
    ),
    'state': (lambda: nn.Frozen(MODEL, state='frozen'), "ArgumentValueError: 'frozen'"),
    'output': (
        lambda: sg.gradient_flow(returns_nothing, {'w': X}),
        'ArgumentTypeError: test_errors.py:LINE',
    ),
    'callback': (
        lambda: sg.live(called_back, {'w': X, 'b': X}),
        'ArgumentTypeError: test_errors.py:LINE | jax.lax.stop_gradient',
    ),
    'another tree': (
        lambda: sg.mask({'v': X}, frozen=~sg.live(lambda p: p['w'], {'w': X})),
        "UnknownNameError: 'v' | 'w' | sg.mask(frozen=...)",
    ),
    'versions': (lacks_a_name, "UnsupportedVersionError: 'Scope' | '_none'"),
}


model, variables, where = MODEL, VARIABLES, 'encoder/**'


# The tables: programs; of what each raises the class, and names that stand in its text;
# and for some a program that does as is said.
HERE = types.SimpleNamespace(**{**globals(), 'CASES': dict(CASES)})
# flax_sg.nnx asks for flax 0.12.1.
HAS_NNX = hasattr(nnx.Variable, 'get_value')
TABLES = [
    HERE,
    ahead_errors,
    block_errors,
    cotangent_errors,
    filter_errors,
    *([importlib.import_module('tests.errors.graph_errors')] if HAS_NNX else []),
    report_errors,
    tree_errors,
]
HOME = {case: table for table in TABLES for case in table.CASES}
for table in TABLES:
    CASES.update(table.CASES)


@functools.cache
def raised(case: str) -> tuple[Exception, frozenset[str]]:
    """What a program raises, and the places in the library that have raised it."""
    program, filtering = CASES[case][0], jax.config.jax_traceback_filtering
    jax.config.update('jax_traceback_filtering', 'off')  # It leaves our files out.
    try:
        with pytest.raises(Exception) as caught:
            program()
    finally:
        jax.config.update('jax_traceback_filtering', filtering)
    error = caught.value
    sites = frozenset(_sites_of(error))
    return error.with_traceback(None), sites


def _sites_of(error: BaseException) -> Iterator[str]:
    """Where an exception, and those that it was raised from, come from."""
    frame = error.__traceback__
    found = ''
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if file.startswith(LIBRARY):
            found = f'{file.removeprefix(LIBRARY)}:{frame.tb_lineno}'
        frame = frame.tb_next
    yield found
    for other in (error.__cause__, error.__context__):
        if other is not None:
            yield from _sites_of(other)


def message(case: str) -> str:
    """What a program's error says, without numbers of lines."""
    text = str(raised(case)[0]).split('------------------')[0]
    return re.sub(r'((?:\w+_errors|tasks)\.py):\d+', r'\1:LINE', text)


@pytest.mark.every_case
@pytest.mark.parametrize('case', CASES)
def test_the_class_and_the_names(case):
    kind, _, names = CASES[case][1].partition(': ')
    assert type(raised(case)[0]).__name__ == kind
    text = message(case)
    assert [name for name in names.split(' | ') if name not in text] == []


FIXES = {case: row[2] for case, row in CASES.items() if len(row) > 2}


@pytest.mark.every_case
@pytest.mark.parametrize('case', FIXES)
def test_the_fix_of_the_message_works(case):
    """A snippet of the message, taken literally, or a program that does as it says."""
    fix = FIXES[case]
    if isinstance(fix, str):
        assert fix in message(case)
        _ = eval(fix, dict(vars(HOME[case])))
    else:
        fix()


NAMES = {
    'nn': nn,
    **({'nnx': importlib.import_module('flax_sg.nnx')} if HAS_NNX else {}),
    'sg': sg,
    'jax': jax,
    'optax': optax,
    'filters': sg.filters,
}


def test_messages_name_what_exists():
    names = '|'.join(NAMES)
    for case in CASES:
        text = message(case)
        for of, attributes in re.findall(rf'\b({names})((?:\.[a-zA-Z_]+)+)\(', text):
            found = NAMES[of]
            for name in attributes[1:].split('.'):
                assert hasattr(found, name), (case, of + attributes)
                found = getattr(found, name)


def test_every_row_has_its_name():
    assert sum(len(table.CASES) for table in TABLES) == len(CASES), 'a name twice'


# What is raised and is not among the rows: for each file, the source and the reason.
LIBRARY = str(Path(flax_sg.__file__).parent) + os.sep
ELSEWHERE = {
    (
        'engine/setup_values.py',
        'AttributeError(self._name)',
    ): 'what Python raises for such a module, see test_setup_classes.py',
    (
        'internals/__init__.py',
        'versions.unsupported([str(error)])',
    ): 'in other processes, see test_versions.py',
    (
        'internals/versions.py',
        "unsupported([f'{place} ({error})'], who)",
    ): 'as in the same file; each name in test_versions.py',
    (
        'nnx/__init__.py',
        '_errors.UnsupportedVersionError("flax_sg.nnx needs flax 0.12'
        '.1 or newer: Variables of this one have no get_value.\\nUpdat'
        "e it: pip install 'flax>=0.12.1'. flax_sg.linen works with t"
        'his one.")',
    ): 'in another process, see test_versions.py',
    ('engine/opening.py', 'NotImplementedError'): 'abstract: a subclass defines it',
    ('internals/required.py', '_Called'): 'ends a program, and is caught',
    ('filters/expressions.py', 'error'): 'of an atom, kept while it has other paths',
    ('engine/judgement.py', 'error'): 'made by the filter, see filters/expressions.py',
    ('trees/absent.py', 'AttributeError(name)'): 'what Python asks of any object',
    ('trees/nondifferentiable.py', 'AttributeError(name)'): 'as in the same room',
}


def _raises() -> Iterator[tuple[str, str, range]]:
    """Each place that raises or warns: file, what, and its lines."""
    for file in sorted(Path(LIBRARY).rglob('*.py')):
        name = file.relative_to(LIBRARY).as_posix()
        # What commands print is tested line by line with them.
        if name.startswith(('demo/', '__main__')):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            lines = range(node.lineno, node.end_lineno + 1) if _is_stmt(node) else None
            if isinstance(node, ast.Raise) and node.exc is not None:
                yield name, ast.unparse(node.exc), lines
            elif isinstance(node, ast.Expr) and 'warnings.warn' in ast.unparse(node):
                yield name, ast.unparse(node), lines


def _is_stmt(node: ast.AST) -> bool:
    return isinstance(node, ast.stmt)


@pytest.mark.skipif(not HAS_NNX, reason='flax 0.12.0 has no rows of nnx')
def test_every_place_that_raises_has_a_row():
    met = {site for case in CASES for site in raised(case)[1]}
    places = list(_raises())
    assert len(places) > 120
    excused = set()
    missing = []
    for file, what, lines in places:
        if (file, what) in ELSEWHERE:
            excused.add((file, what))
        elif not any(f'{file}:{line}' in met for line in lines):
            missing.append(f'{file}:{lines.start} {what}')
    assert missing == []
    assert excused == set(ELSEWHERE)


# The classes.

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.FlaxSGError) and cls is not errors.FlaxSGError
]
BUILTIN = {
    TypeError: 'FilterType ArgumentType Cotangent AbsentLeaf',
    ValueError: 'UnusedFilter ArgumentValue Structure',
    AttributeError: 'AbsentLeaf',
    RuntimeError: 'Block',
    ImportError: 'UnsupportedVersion',
    LookupError: 'UnknownName',
    AssertionError: 'Expectation',
    IndexError: 'Part',
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
    public = {
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if cls.__module__ == errors.__name__
    }
    assert public == classes | {errors.FlaxSGError}
    assert classes <= {type(raised(case)[0]) for case in CASES}


def test_errors_survive_copies_and_pickles():
    for case in CASES:
        error, _ = raised(case)
        if isinstance(error, errors.FlaxSGError):  # Python's own do as they do.
            for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
                assert type(twin) is type(error)
                assert (str(twin), twin.args) == (str(error), error.args)

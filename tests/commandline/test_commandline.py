"""`python -m flax_sg flow`."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import flax_sg
from flax_sg.__main__ import main

pytestmark = pytest.mark.every_case

PROGRAM = """\
import jax
import jax.numpy as jnp

import flax_sg as sg
from flax_sg import linen as nn

print('a program that prints')

class Model(nn.Module):
    def setup(self):
        self.gln_0 = nn.Dense(2)
        self.code = nn.Dense(2)

    def __call__(self, x):
        with nn.train_only('gln_*/**'):
            gln = jnp.sum(self.gln_0(self.code(x)))
        with nn.train_only('code/kernel'):
            code = jnp.sum(self.gln_0(self.code(x)))
        return {'gln': gln, 'code': code}

MODEL = Model()
X = jax.ShapeDtypeStruct((3, 2), jnp.float32)
ARGS = (X,)
PAIR = MODEL, X

def losses(params, x):
    return MODEL.apply({'params': params}, x)

def loss(params, x):
    return losses(params, x)['gln']

def example():
    key = jax.random.key(0)
    return jax.eval_shape(MODEL.init, key, jnp.ones((3, 2)))['params'], X

def check():
    return losses, *example()

def report(factor=1.0):
    fun = lambda x, params: (losses(params, x), 'aux')
    params, x = example()
    return sg.gradient_flow(fun, x, params, argnums=1, has_aux=True)

EXAMPLE = example()
CHECK = losses, *EXAMPLE
PARAMS = EXAMPLE[0]

class Holder:
    check = staticmethod(check)

def returns_a_number():
    return 3

def fails():
    raise ZeroDivisionError('of the program')

def no_gradient():
    return lambda p: jnp.argmax(p), X
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / 'project'
    package = folder / 'mine'
    package.mkdir(parents=True)
    (package / '__init__.py').touch()
    (package / 'train.py').write_text(PROGRAM)
    (package / 'broken.py').write_text('import no_such_package\n')
    (package / 'raises.py').write_text("raise RuntimeError('while imported')\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv('COLUMNS', '80')
    for name in [name for name in sys.modules if name.partition('.')[0] == 'mine']:
        monkeypatch.delitem(sys.modules, name)
    return folder


MATRIX = """\
            code      gln       uses stopped
 ───────────────────────────────────────────
 code       partly    stopped         3 of 4
   bias     stopped   stopped         2 of 2
   kernel   trains    stopped         1 of 2
 gln_0      stopped   trains          2 of 4"""


@pytest.mark.parametrize(
    'argv',
    [
        ['mine.train:losses', '--args', 'mine.train:example'],
        ['mine.train:losses', '--args', 'mine.train:EXAMPLE'],
        ['mine.train:check'],
        ['mine.train:CHECK'],
        ['mine.train:Holder.check'],
        ['mine.train:report'],
    ],
)
def test_the_matrix_of_a_program(argv, capsys):
    assert main(['flow', *argv]) == 0
    out, err = capsys.readouterr()
    lines = [line.rstrip() for line in out.splitlines()]
    assert err == ''
    head = next(n for n, line in enumerate(lines) if 'uses stopped' in line)
    assert lines[head : head + 6] == MATRIX.splitlines()


def test_expectations_that_hold(capsys):
    argv = [
        'mine.train:check',
        '--expect',
        'gln: gln_*/**',
        '--expect',
        'code: code/kernel',
    ]
    assert main(['flow', *argv, '--expect', 'gln_0/** code/kernel']) == 0
    assert capsys.readouterr().out.splitlines()[-5:] == [
        'ok      gln: gln_*/**',
        '',
        'ok      code: code/kernel',
        '',
        'ok      gln_0/** code/kernel',
    ]


def test_a_broken_expectation_is_a_table_and_a_status(capsys):
    argv = ['mine.train:check', '--expect', 'gln:', '--expect', '*: code/**']
    assert main(['flow', *argv]) == 1
    text = capsys.readouterr().out
    first, second = text.split('BROKEN')[1:]
    line = 1 + PROGRAM.splitlines().index(
        '            gln = jnp.sum(self.gln_0(self.code(x)))'
    )
    assert [row.split() for row in first.splitlines()] == [
        ['gln:'],
        ['output', 'parameter', 'expected', 'found', 'at'],
        [
            'gln',
            'gln_0/*',
            '(2)',
            'stopped',
            'trains',
            f'train.py:{line}',
            '(Model.__call__)',
        ],
        [],
    ]
    # Each output that the pattern names is judged alone.
    found = [row.split()[:5] for row in second.splitlines()[2:]]
    assert found == [
        ['code', 'code/bias', 'trains', 'stopped', f'train.py:{line}'],
        ['gln', 'code/*', '(2)', 'trains', 'stopped'],
        ['gln', 'gln_0/*', '(2)', 'stopped', 'trains'],
    ]


def test_json_is_all_that_is_printed(capsys):
    argv = ['mine.train:check', '--json', '--expect', 'gln: gln_0/kernel']
    assert main(['flow', *argv]) == 1
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert err == 'a program that prints\n'
    assert data['outputs'] == ['code', 'gln']
    by_path = {parameter['path']: parameter for parameter in data['parameters']}
    kernel = by_path['code/kernel']
    assert kernel['shape'] == [2, 2]
    assert kernel['dtype'] == 'float32'
    assert kernel['status'] == {'code': 'flows', 'gln': 'stopped'}
    assert sorted(use['stopped'] for use in kernel['uses']) == [False, True]
    assert all('train.py:' in use['source'] for use in kernel['uses'])
    assert data['expectations'] == [
        {
            'expect': 'gln: gln_0/kernel',
            'holds': False,
            'broken': [
                {
                    'output': 'gln',
                    'parameter': 'gln_0/bias',
                    'expected': 'stopped',
                    'found': 'flows',
                }
            ],
        }
    ]


def test_a_picture(tmp_path, capsys):
    argv = ['mine.train:check', '--depth', '1', '--plot', str(tmp_path / 'flow.svg')]
    assert main(['flow', *argv]) == 0
    assert '<svg' in (tmp_path / 'flow.svg').read_text()
    capsys.readouterr()


def said(argv: list[str], capsys, command: str = 'flow') -> str:
    """What is printed of a wrong command, in one line."""
    with pytest.raises(SystemExit) as info:
        main([command, *argv])
    assert info.value.code == 2
    usage, _, error = capsys.readouterr().err.partition(f'{command}: error: ')
    assert usage.startswith(f'usage: python -m flax_sg {command}')
    return ' '.join(error.split())


CHECK = 'mine.train:check'
WRONG = {
    'no place': ([], 'the following arguments are required: PLACE'),
    'a file': (
        ['mine/train.py'],
        "'mine/train.py' is no place: write package.module:name, such as "
        "'mine.train:loss'",
    ),
    'no name': (['mine.train'], "write package.module:name, such as 'mine.train:loss'"),
    'no module': (['mine.trian:loss'], "there is no module 'mine.trian' to import"),
    'no package': (['main.train:loss'], "there is no module 'main' to import"),
    'another name': (
        ['mine.train:losess'],
        "mine.train has no 'losess'; did you mean 'losses' or 'loss'?",
    ),
    'a loss without arguments': (
        ['mine.train:loss'],
        'mine.train:loss takes arguments (params, x): say where they are, --args '
        'package.module:name, or name a function without arguments that returns (loss, '
        '*args)',
    ),
    'no loss': (
        ['mine.train:returns_a_number'],
        'mine.train:returns_a_number returned 3, and should return (loss, *args)',
    ),
    'arguments that are none': (
        ['mine.train:loss', '--args', 'mine.train:X'],
        '--args mine.train:X is float32[3, 2]; expected a tuple of arguments',
    ),
    'arguments of arguments': (
        ['mine.train:loss', '--args', 'mine.train:loss'],
        'mine.train:loss takes arguments (params, x)',
    ),
    'a glob': (
        [CHECK, '--expect', 'gln: gln_0//kernel'],
        "--expect 'gln: gln_0//kernel': The glob 'gln_0//kernel' has '//' in it.",
    ),
    'an output': ([CHECK, '--expect', 'glm: gln_0/**'], 'there is no output '),
    'a parameter': (
        [CHECK, '--expect', 'gln: gln_1/**'],
        "Glob('gln_1/**') matches none of the 4 variables.",
    ),
    'a depth': ([CHECK, '--depth', 'all'], "expected a number from 0, got 'all'"),
    'a picture': ([CHECK, '--plot', 'flow.exe'], '--plot flow.exe: no picture; known'),
    'a folder': (
        [CHECK, '--plot', 'no/such/flow.png'],
        "--plot no/such/flow.png: there is no folder 'no/such'",
    ),
}


@pytest.mark.parametrize('case', WRONG)
def test_a_wrong_command_says_how_to_write_it(case, capsys):
    argv, text = WRONG[case]
    assert text in said(argv, capsys)


def test_without_matplotlib_nothing_is_run(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith('matplotlib')]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    assert "pip install 'flax_sg[plot]'" in said(
        ['mine.raises:check', '--plot', 'flow.png'], capsys
    )


@pytest.mark.parametrize(
    ('place', 'error', 'text'),
    [
        ('mine.broken:check', ModuleNotFoundError, "'no_such_package'"),
        ('mine.raises:check', RuntimeError, 'while imported'),
        ('mine.train:fails', ZeroDivisionError, 'of the program'),
        ('mine.train:no_gradient', TypeError, 'cannot be differentiated'),
    ],
)
def test_errors_of_the_program_come_as_they_are(place, error, text):
    with pytest.raises(error, match=text):
        main(['flow', place])


def test_help_says_all_there_is_to_know(capsys):
    with pytest.raises(SystemExit) as info:
        main(['flow', '--help'])
    assert info.value.code == 0
    text = capsys.readouterr().out
    for word in ('--args', '--expect', '--json', '--plot', '--depth', 'Status: 0'):
        assert word in text
    assert max(map(len, text.splitlines())) <= 80


PATHS = """\
selected   path           module   shape
─────────────────────────────────────────────
-          code/bias      Dense    float32[2]
yes        code/kernel    Dense    float32[2, 2]
yes        gln_0/bias     Dense    float32[2]
yes        gln_0/kernel   Dense    float32[2, 2]

The filter selects 3 of 4 variables.
"""


@pytest.mark.parametrize(
    'argv',
    [
        ['mine.train:MODEL', '--args', 'mine.train:ARGS'],
        ['mine.train:PAIR'],
    ],
)
def test_paths_of_a_model(argv, capsys):
    assert main(['paths', *argv, '--where', 'gln_*/**', 'code/kernel']) == 0
    out = capsys.readouterr().out.replace('a program that prints\n', '')
    assert [line.rstrip('─') for line in out.splitlines()] == [
        line.rstrip('─') for line in PATHS.splitlines()
    ]


def test_paths_of_a_tree_without_a_filter(capsys):
    assert main(['paths', 'mine.train:PARAMS']) == 0
    assert 'gln_0/kernel            float32[2, 2]' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('argv', 'text'),
    [
        (['mine.train:MODEL'], 'mine.train:MODEL is a module: say where its arguments'),
        (['mine.train:MODLE'], "did you mean 'MODEL'?"),
        (['mine.train:PAIR', '--where', 'gln/**'], "Glob('gln/**') matches none of"),
        (['mine.train:MODEL', '--args', 'mine.train:X'], 'expected a tuple'),
    ],
)
def test_paths_of_what_there_is_not(argv, text, capsys):
    assert text in said(argv, capsys, 'paths')


def test_a_report_for_bugs_has_versions_devices_and_changed_flags(capsys):
    import jax

    with jax.numpy_rank_promotion('warn'):
        assert main(['env']) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    found = dict(reversed(rows))
    assert found['flax_sg'] == flax_sg.__version__
    assert found['jax'] == jax.__version__
    assert found['Python'] == platform.python_version()
    assert 'Cpu' in found['devices'] or 'CPU' in found['devices'].upper()
    flags = [value for name, value in rows if name == 'flag']
    # What this process has set, and what the test suite has; no flag as it is made.
    changed = {name: value for name, value in (flag.split(' = ') for flag in flags)}
    assert 'warn' in changed['jax_numpy_rank_promotion']
    assert 'strict' in changed['jax_numpy_dtype_promotion']
    assert 'jax_enable_checks' not in changed


def test_as_a_process(program: Path):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, '-m', 'flax_sg', 'flow', CHECK, '--expect', 'gln: code/**'],
        cwd=program,  # Where the program is found.
        env={**os.environ, 'PYTHONPATH': str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert 'BROKEN  gln: code/**' in done.stdout
    assert '\x1b' not in done.stdout

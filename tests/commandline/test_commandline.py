"""`python -m flax_sg`: its commands, and how they say what is wrong."""

import json
import os
import platform
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import flax
import jax
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
    fun = lambda params, x: (losses(params, x), 'aux')
    return sg.gradient_flow(fun, *example(), has_aux=True)

EXAMPLE = example()
CHECK = losses, *EXAMPLE
PARAMS = EXAMPLE[0]

class Holder:
    check = staticmethod(check)

def returns_a_number():
    return 3

def fails():
    raise ZeroDivisionError('of the program')

losses_alone = (loss,)

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
    (package / 'asks.py').write_text('import mine\nmine.no_such_name\n')
    (package / 'raises.py').write_text("raise RuntimeError('while imported')\n")
    monkeypatch.syspath_prepend(str(folder))
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
    'place',
    [
        'mine.train:check',
        'mine.train:CHECK',
        'mine.train:Holder.check',
        'mine.train:report',
    ],
)
def test_the_matrix_of_a_program(place, capsys):
    assert main(['flow', place]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ''
    head = next(n for n, line in enumerate(lines) if 'uses stopped' in line)
    assert lines[head : head + 6] == MATRIX.splitlines()


def test_expectations_that_hold(capsys):
    hold = ['gln: gln_*/**', 'code: code/kernel', 'gln_0/** code/kernel']
    argv = [word for expected in hold for word in ('--expect', expected)]
    assert main(['flow', 'mine.train:check', *argv]) == 0
    assert capsys.readouterr().out.splitlines()[-5::2] == [
        f'ok  {expected}' for expected in hold
    ]


def test_a_broken_expectation_is_a_table_and_a_status(capsys):
    argv = ['mine.train:check', '--expect', 'gln:', '--expect', '*: code/**']
    assert main(['flow', *argv]) == 1
    text = capsys.readouterr().out
    first, second = text.split('BROKEN')[1:]
    line = 1 + PROGRAM.splitlines().index(
        '            gln = jnp.sum(self.gln_0(self.code(x)))'
    )
    place = f'train.py:{line} (Model.__call__).'
    assert first.split('\n')[1:3] == [
        "  Output 'gln' trains 2 of its parameters: gln_0/bias, gln_0/kernel.",
        f'  gln_0/bias is used at {place}',
    ]
    block = "stop_gradient(~Glob('gln_*/**'))"
    stopped = f'  It is stopped by {block} at train.py:{line - 1}.'
    # Each output that the pattern names is judged alone.
    assert second.split('\n')[1:] == [
        "  Output 'code' does not train 1 of its parameters: code/bias.",
        f'  code/bias is used at {place.replace(str(line), str(line + 2))}',
        f'  It is stopped by {block.replace("gln_*/**", "code/kernel")} '
        f'at train.py:{line + 1}.',
        "  Output 'gln' does not train 2 of its parameters: code/bias, code/kernel.",
        f'  code/bias is used at {place}',
        stopped,
        '  2 outputs are wrong.',
        '',
    ]


def test_json_is_all_that_is_printed(capsys):
    argv = ['mine.train:check', '--json', '--expect', 'gln: gln_0/kernel']
    assert main(['flow', *argv]) == 1
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert err == 'a program that prints\n'
    assert data['outputs'] == ['code', 'gln']
    by_path = {parameter['parameter']: parameter for parameter in data['parameters']}
    kernel = by_path['code/kernel']
    assert kernel['shape'] == [2, 2]
    assert kernel['dtype'] == 'float32'
    assert kernel['status'] == {'code': 'flows', 'gln': 'stopped'}
    assert sorted(use['stopped'] for use in kernel['uses']) == [False, True]
    assert all('train.py:' in use['source'] for use in kernel['uses'])
    [[expected, (said, place)]] = data['expectations'].items()
    assert expected == 'gln: gln_0/kernel'
    assert said == "Output 'gln' trains 1 other parameter: gln_0/bias."
    assert place.startswith('gln_0/bias is used at train.py:')


def test_a_picture(tmp_path, capsys):
    argv = ['mine.train:check', '--depth', '1', '--plot', str(tmp_path / 'flow.svg')]
    assert main(['flow', *argv]) == 0
    assert '<svg' in (tmp_path / 'flow.svg').read_text()
    capsys.readouterr()


def said(argv: list[str], capsys) -> str:
    """What is printed of a wrong command, in one line."""
    try:
        status = main(argv)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    command = f'python -m flax_sg {argv[0]}'
    usage, _, error = capsys.readouterr().err.rpartition(f'{command}: error: ')
    assert not usage or usage.startswith(f'usage: {command}')
    return ' '.join(error.split())


def test_a_picture_that_cannot_be_drawn_comes_after_the_table(tmp_path, capsys):
    for file in ('flow.xyz', 'nowhere/flow.svg'):
        argv = ['flow', 'mine.train:check', '--plot', str(tmp_path / file)]
        assert main(argv) == 2
        printed = capsys.readouterr()
        assert 'trains' in printed.out
        assert printed.err.startswith('python -m flax_sg flow: error: --plot ')


CHECK = 'mine.train:check'
WRONG = [
    ('flow', 'the following arguments are required: PLACE'),
    (
        'flow mine/train.py',
        "'mine/train.py' is not a place. Write package.module:name, such as "
        'train:check',
    ),
    ('flow mine.train', "'mine.train' is not a place"),
    ('flow mine.trian:loss', "mine.trian:loss: No module named 'mine.trian'"),
    ('paths nothing_here:loss', "nothing_here:loss: No module named 'nothing_here'"),
    (
        'flow mine.train:losess',
        "mine.train:losess: mine.train has no attribute 'losess'. Did you mean "
        "'losses'?",
    ),
    ('paths mine.train:MODEL.nothing', 'has no attribute'),
    ('paths mine.train:losses_alone', 'should be (module, *args) or parameters'),
    (
        'flow mine.train:loss',
        'mine.train:loss takes arguments (params, x): name a function without '
        'arguments that returns the tuple (loss, *args) or (module, *args)',
    ),
    ('flow mine.train:check --depth -1', '--depth -1: expected 0, 1, 2, ...'),
    (
        'flow mine.train:returns_a_number',
        'mine.train:returns_a_number is 3, and should be (loss, *args)',
    ),
    (
        f'flow {CHECK} --expect gln:gln_0//kernel',
        "--expect 'gln:gln_0//kernel': No path fits the glob 'gln_0//kernel'",
    ),
    (f'flow {CHECK} --expect glm:gln_0/**', "has no output 'glm'"),
    (
        f'flow {CHECK} --expect gln:gln_1/**',
        "Glob('gln_1/**') matches none of the 4 variables.",
    ),
    (f'flow {CHECK} --depth all', "invalid int value: 'all'"),
    ('paths mine.train:loss', 'takes arguments (params, x)'),
    ('paths mine.train:PAIR --where gln/**', "Glob('gln/**') matches none of"),
    ('demo --steps 3', 'unrecognized arguments: --steps 3'),
]


@pytest.mark.parametrize(('argv', 'text'), WRONG, ids=[argv for argv, _ in WRONG])
def test_a_wrong_command_says_how_to_write_it(argv, text, capsys):
    error = said(argv.split(), capsys)
    assert text in error
    assert 'unused=' not in error  # There is no such option here.


@pytest.mark.parametrize(
    ('place', 'error', 'text'),
    [
        ('mine.broken:check', ModuleNotFoundError, "'no_such_package'"),
        ('mine.asks:check', AttributeError, 'no_such_name'),
        ('mine.raises:check', RuntimeError, 'while imported'),
        ('mine.train:fails', ZeroDivisionError, 'of the program'),
        ('mine.train:no_gradient', TypeError, 'which has no gradient'),
    ],
)
def test_errors_of_the_program_come_as_they_are(place, error, text):
    with pytest.raises(error, match=text):
        main(['flow', place])


PATHS = """\
selected   path           module   shape           collection
─────────────────────────────────────────────────────────────
-          code/bias      Dense    float32[2]      params
yes        code/kernel    Dense    float32[2, 2]   params
yes        gln_0/bias     Dense    float32[2]      params
yes        gln_0/kernel   Dense    float32[2, 2]   params

The filter selects 3 of 4 variables.
"""


def test_paths_of_a_model(capsys):
    argv = ['paths', 'mine.train:PAIR', '--where', 'gln_*/**', 'code/kernel']
    assert main(argv) == 0
    assert capsys.readouterr().out == f'a program that prints\n{PATHS}'


def test_paths_of_the_parameters_of_a_function(capsys):
    assert main(['paths', 'mine.train:check']) == 0
    assert 'gln_0/kernel' in capsys.readouterr().out


def test_paths_of_a_tree_without_a_filter(capsys):
    assert main(['paths', 'mine.train:PARAMS']) == 0
    assert 'gln_0/kernel            float32[2, 2]' in capsys.readouterr().out


def test_a_report_for_bugs_has_versions_devices_and_flags(monkeypatch, capsys):
    monkeypatch.setenv('JAX_ENABLE_X64', '1')
    monkeypatch.setattr(metadata, 'version', versions := {'jax': '1.2.3'}.__getitem__)
    monkeypatch.setattr(metadata, 'PackageNotFoundError', KeyError)
    assert main(['env']) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ['flax_sg', flax_sg.__version__] in rows
    assert ['jax', versions('jax')] in rows and ['optax', 'not installed'] in rows
    assert ['Python', platform.python_version()] in rows
    assert 'CPU' in dict(rows)['devices'].upper()
    assert ['flag', 'JAX_ENABLE_X64 = 1'] in rows


def test_a_report_for_bugs_says_that_a_driver_fails(monkeypatch, capsys):
    def devices() -> Any:
        raise RuntimeError('no driver')

    monkeypatch.setattr(jax, 'devices', devices)
    assert main(['env']) == 0
    assert 'devices    none: no driver' in capsys.readouterr().out


# Without a command, and the demo.


@pytest.mark.parametrize('argv', [[], ['--help']])
def test_without_a_command_it_says_what_there_is(argv, capsys):
    assert main(argv) == 0
    out, err = capsys.readouterr()
    first, second, *_ = out.splitlines()
    assert first.startswith(f'flax_sg {flax_sg.__version__} on flax {flax.__version__}')
    assert f'jax {jax.__version__}, jaxlib ' in first
    assert second == flax_sg.__doc__.splitlines()[0]
    for command in ('demo', 'flow PLACE', 'paths PLACE', 'env'):
        assert f'python -m flax_sg {command} ' in out
    assert max(map(len, out.splitlines())) <= 88
    assert err == ''


def test_an_unknown_command_fails(capsys):
    assert main(['dmeo']) == 2
    assert capsys.readouterr().err == "Unknown command: 'dmeo'\n"


def test_the_demo_gets_the_other_arguments_and_its_status_is_ours(monkeypatch):
    calls: list[list[str]] = []
    demo = types.ModuleType('flax_sg.demo')
    demo.main = lambda argv: calls.append(argv) or 7
    monkeypatch.setitem(sys.modules, 'flax_sg.demo', demo)
    monkeypatch.setattr(flax_sg, 'demo', demo, raising=False)
    assert main(['demo', '--steps', '3']) == 7
    monkeypatch.setattr(sys, 'argv', ['flax_sg', 'demo', '--out', 'somewhere'])
    assert main() == 7
    assert calls == [['--steps', '3'], ['--out', 'somewhere']]


def test_a_package_of_the_demo_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    assert main(['demo']) == 1
    assert capsys.readouterr().err.splitlines() == [
        'The demo needs scikit-learn, which is not installed. '
        'Install it with: pip install scikit-learn'
    ]


@pytest.mark.slow
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

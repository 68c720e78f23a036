"""Which versions are supported, and what is said of others.

Each name that the library needs is broken on purpose. What gradients depend on stops
the import; any other name stops the one feature that needs it.
"""

import ast
import contextlib
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest
from flax.core import Scope, axes_scan, lift
from packaging.specifiers import SpecifierSet

from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.internals import (
    lifting,
    modules,
    partial_eval,
    patching,
    required,
    tracing,
    versions,
)
from tests.helpers import oracle

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())


def faults() -> list[str]:
    """The lines of the message that say what is missing."""
    with pytest.raises(errors.UnsupportedVersionError) as caught:
        versions.check(required.PROGRAMS)
    return str(caught.value).splitlines()[1:-2]


def test_all_that_is_needed_is_here():
    versions.check(required.PROGRAMS)


# What gradients depend on.


@pytest.mark.parametrize('name', required._READS)
def test_a_read_or_write_that_goes_another_way(name, monkeypatch):
    owner, attribute = name.split('.')
    cls = {'Scope': Scope, 'Module': fnn.Module, 'Variable': fnn.Variable}[owner]
    is_property = isinstance(vars(cls)[attribute], property)

    def other(self, *args, **kwargs):
        return None

    monkeypatch.setattr(cls, attribute, property(other) if is_property else other)
    method = required._READS[name][1]
    assert f'  {name} has to call {method}' in faults()


TRACES = 'traces have to tell their outer traces'
PACK = 'lifted transforms have to call flax.core.lift._partial_pack'


def nothing(*args: Any, **kwargs: Any) -> Any:
    return contextlib.nullcontext()


class Other:
    """What a name may come to mean."""


# Where a name is, what it is instead, and what is said of that.
OTHERWISE: list[tuple[Any, str, Any, str]] = [
    (fnn.Module, '__getattr__', nothing, 'Module.__getattr__ has to call _try_setup'),
    (required.Scope, 'rewound', lambda scope: Scope({}), 'hand on its flags'),
    (required.Scope, 'push', lambda scope, name: Scope({}), 'hand on its flags'),
    (required.flax_scope, 'apply', nothing, 'flax.core.apply has to call bind'),
    (modules.Module, 'bind', nothing, 'Module.bind has to call flax.core.bind'),
    (tracing, 'summary_context', nothing, 'jit has to trace anew'),
    (tracing.jax_core, 'set_current_trace', nothing, TRACES),
    (tracing.jax_core, 'trace_ctx', types.SimpleNamespace(trace=None), TRACES),
    (tracing.jax_core.Tracer, '_trace', None, TRACES),
    (tracing.tracers, 'current_trace', nothing, TRACES),
    (tracing.jax_ad, 'JVPTracer', Other, TRACES),
    (tracing.jax_ad, 'LinearizeTracer', Other, TRACES),
    (tracing.jax_ad.JVPTracer, 'primal', None, TRACES),
    (tracing.jax_ad.JVPTrace, 'parent_trace', None, TRACES),
    (tracing.partial_eval, 'DynamicJaxprTrace', Other, TRACES),
    (lift, 'pack', nothing, PACK),
    (lift, 'jit', lift.remat, PACK),
    (lift, 'scan', lift.jit, PACK),
]


@pytest.mark.parametrize(('owner', 'name', 'other', 'said'), OTHERWISE)
def test_a_name_that_means_something_else(owner, name, other, said):
    with pytest.MonkeyPatch.context() as patch:
        # Where objects have the attribute: nobody can set it or read it.
        patch.setattr(owner, name, other or property(), raising=False)
        assert any(said in fault for fault in faults())


# What splits an equation in two, and how it would be wrong.
def not_split(jaxpr: Any, *others: Any) -> Any:
    return jaxpr, jaxpr, [True], [True], 0


HALVES: list[tuple[str, Any, str]] = [
    ('partial_eval_jaxpr_custom', not_split, 'has to split a loop'),
    ('partial_eval_jaxpr_custom', not_split, 'has to leave custom rules whole'),
    ('dce_jaxpr', lambda jaxpr, asked: (jaxpr, asked), 'has to drop what'),
]


@pytest.mark.parametrize(('name', 'other', 'said'), HALVES)
def test_a_partial_evaluation_that_does_something_else(name, other, said, monkeypatch):
    versions.check(partial_eval.PROGRAMS)
    monkeypatch.setattr(partial_eval, name, other)
    with pytest.raises(errors.UnsupportedVersionError, match=said):
        versions.check(partial_eval.PROGRAMS, 'sg.precompute')


ATTRIBUTES = [
    (thing, name)
    for thing, (_, names) in required._ATTRIBUTES.items()
    for name in names.split()
]


@pytest.mark.parametrize(('thing', 'name'), ATTRIBUTES)
def test_an_attribute_that_is_gone(thing, name, monkeypatch):
    owner = required._ATTRIBUTES[thing][0]()
    first, _, rest = name.partition('.')
    if isinstance(owner, types.ModuleType):
        monkeypatch.delattr(owner, first)
    else:
        of_part = first in ('_state', 'trace_level')
        cls = type(getattr(owner, first) if of_part else owner)
        monkeypatch.setattr(cls, rest if of_part else first, property(), raising=False)
    assert any(fault.startswith(f'  attributes of {thing} (') for fault in faults())


def imported(code: str) -> subprocess.CompletedProcess[str]:
    code += '\nimport sys; before = set(sys.modules); import flax_sg'
    code += '\nprint({name.split(".")[0] for name in set(sys.modules) - before})'
    return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)


GONE = {
    'import flax.core.lift as lift; del lift._partial_pack': (
        "module 'flax.core.lift' has no attribute '_partial_pack'"
    ),
    'del flax.core.tracers; sys.modules["flax.core.tracers"] = None': (
        'import of flax.core.tracers halted'
    ),
    'import jax._src.core as c; del c.set_current_trace': f'{TRACES} (AttributeError: ',
}


@pytest.mark.parametrize('code', GONE)
def test_the_import_says_what_gradients_need(code):
    text, said = imported(f'import sys, flax.linen, optax; {code}').stderr, GONE[code]
    assert 'UnsupportedVersionError: flax_sg needs what this installation' in text
    assert said in text
    assert 'supported are flax' in text


# What only one feature needs.


class Model(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        return fnn.Dense(2)(x)


def scanned() -> Any:
    lifting._check_loop.cache_clear()
    return nn.scan(Model, frozen_layers=0, length=2, **oracle.STACKED)


ONE = jnp.float32(1)


def weakly_typed() -> Any:
    return tracing.as_weak(ONE).weak_type


FEATURES: list[tuple[Any, Any, str, str]] = [
    (weakly_typed, tracing.jax_lax, '_convert_element_type', 'NonDifferentiable'),
    (scanned, axes_scan, 'scan', 'scan(frozen_layers=)'),
]


@pytest.mark.parametrize(('use', 'owner', 'name', 'feature'), FEATURES)
def test_a_feature_without_its_name(use, owner, name, feature, monkeypatch):
    def other():
        raise NotImplementedError

    for change in (
        lambda patch: patch.delattr(owner, name),
        lambda patch: patch.setattr(owner, name, other),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            versions.check(required.PROGRAMS)  # The import goes on.
            with pytest.raises(errors.UnsupportedVersionError) as caught:
                use()
        first, second, *_ = str(caught.value).splitlines()
        assert first == f'{feature} needs what this installation does not have:'
        assert second.startswith(f'  {owner.__name__}.{name} (')
    use()


def test_variables_that_a_loop_gives_in_another_order(monkeypatch):
    monkeypatch.setattr(lifting, 'param_path', lambda keys, side: None)
    with pytest.raises(errors.UnsupportedVersionError, match=r'axes_scan\.scan'):
        scanned()
    monkeypatch.undo()
    scanned()


def test_the_import_brings_nothing_slow():
    code = 'import flax.linen, optax, numpy.typing, flax.training.train_state'
    done = imported(code)
    assert done.returncode == 0, done.stderr
    new = ast.literal_eval(done.stdout)
    assert new - set(sys.stdlib_module_names) <= {'flax_sg', 'flax', 'jax'}


def test_linen_imports_no_nnx_and_an_old_nnx_says_which_flax_is_needed():
    program = """
import sys, flax_sg
from flax_sg import linen
flax_sg.mask({'a': 1.0}, trained='a')
assert 'flax.nnx' not in sys.modules
from flax import nnx
if hasattr(nnx.Variable, 'get_value'):  # Not in flax 0.12.0.
    del nnx.Variable.get_value
linen.Dense, flax_sg.grad
try:
    from flax_sg import nnx
except ImportError as error:
    print(type(error).__name__, error)
"""
    out = subprocess.check_output([sys.executable, '-c', program], text=True)
    assert out == (
        'UnsupportedVersionError flax_sg.nnx needs flax 0.12.1 or newer: Variables of '
        'this one have no get_value.\n'
        "Update it: pip install 'flax>=0.12.1'. flax_sg.linen works with this one.\n"
    )


# Nothing private is used that is not checked.


def private_attributes(tree: ast.Module) -> set[str]:
    """The attributes that a file reads off private modules, and private ones."""
    modules = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        and (node.module or '').startswith('jax._src')
        for alias in node.names
    }
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        if re.match('_[a-z]', node.attr)
        or (isinstance(node.value, ast.Name) and node.value.id in modules)
    }


def test_every_private_name_is_checked():
    folder = Path(versions.__file__).parent
    trees = [ast.parse(path.read_text()) for path in folder.glob('*.py')]
    used = set().union(*map(private_attributes, trees))
    known = {name for _, name, *_ in OTHERWISE} | {name for _, _, name, _ in FEATURES}
    known |= set(re.findall(r'\w+', ' '.join(name for _, name in ATTRIBUTES)))
    known |= {name for _, name in patching.HOOKED.values()}
    known |= {name for name, *_ in HALVES}
    known |= {'_getframe', '_get_running_loop', '_user'}  # Python's, and our own.
    # Other classes of JAX, which are gone with an AttributeError.
    known |= {'BatchTrace', '_caches', '_submodule_adoption_cache'}
    known |= {'_executable', '_kept_var_idx'}
    assert used - known == set()


# What pyproject.toml states.


BOUNDS = dict(line.split('>=') for line in PYPROJECT['project']['dependencies'])


def test_the_message_says_what_pyproject_states():
    newest = PYPROJECT['tool']['flax_sg']['newest']
    for name, (oldest, latest) in versions.SUPPORTED.items():
        assert (oldest, latest) == (BOUNDS[name], newest[name])
    assert newest.keys() == {'python', *BOUNDS}


def test_the_pages_say_what_pyproject_states():
    pages = (
        'README.md',
        'docs/versions.md',
        'CHANGELOG.md',
        'flax_sg/internals/__init__.py',
    )
    readme, page, changes, wrapped = ((ROOT / name).read_text() for name in pages)
    assert f'{len(required.PROGRAMS)} short programs' in page
    newest = []
    for name, (oldest, latest) in versions.SUPPORTED.items():
        newest.append(f'{name} {latest}')
        assert f'{name} {oldest} to {latest}' in readme
        assert f'{name} {oldest} to {latest}' in changes
        [row] = re.findall(rf'^\| {name} \|(.*)\|(.*)\|$', page, re.M)
        assert [re.match(r' ([\d.]+\d)', cell)[1] for cell in row] == [oldest, latest]
    assert f'up to {" and ".join(newest)}.' in wrapped


def test_what_the_message_installs_is_what_runs_these_tests():
    # The fix, taken literally: the versions that the tests pass on are in it.
    text = str(versions.unsupported(['x']))
    [command] = [line for line in text.splitlines() if line.startswith('Fix: ')]
    pins = dict(re.findall(r"'(\w+)([^']*)'", command))
    for name, old, new in ((n, *ends) for n, ends in versions.SUPPORTED.items()):
        assert {old, new} <= set(SpecifierSet(pins[name]).filter([old, new, '0.1.0']))
    assert SpecifierSet(f'>={BOUNDS["jax"]}').contains(jax.__version__)

"""`flax_sg.linen` is flax.linen and more, and flax.linen stays what it was."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import flax.linen
import flax.nnx
import pytest

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.internals import patching

# What flax_sg adds. Of the same name in flax.linen there must be none.
OURS = {
    *('Frozen', 'mirror', 'read_only', 'stop_gradient', 'substitute', 'train_only'),
    *('map_cotangent', 'scale_gradient', 'reverse_gradient', 'clip_gradient'),
    *('replace_cotangent', 'copy_cotangent', 'print_cotangent'),
}

FLAX_NAMES = [name for name in dir(flax.linen) if not name.startswith('_')]


def run_python(code: str) -> str:
    command = [sys.executable, '-W', 'error', '-c', code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_is_the_same_object():
    different = [
        name
        for name in FLAX_NAMES
        if getattr(nn, name, None) is not getattr(flax.linen, name)
    ]
    # It takes one more option, see test_layers.py.
    assert different == ['scan']
    assert len(FLAX_NAMES) > 130
    assert {'Dense', 'recurrent', 'compact', 'Module'} <= set(FLAX_NAMES)


def test_dir_is_that_of_flax_and_ours():
    public = {name for name in dir(nn) if not name.startswith('_')}
    assert public == set(FLAX_NAMES) | OURS
    assert OURS & set(FLAX_NAMES) == set()


@pytest.mark.parametrize('name', sorted({*OURS, 'Dense'} - {*dir(sg)}))
def test_a_name_of_linen_is_told(name: str):
    with pytest.raises(AttributeError) as info:
        getattr(sg, name)
    told = f': write nn.{name}, from flax_sg import linen as nn'
    assert str(info.value) == f"module 'flax_sg' has no attribute {name!r}{told}"
    with pytest.raises(AttributeError, match=r"'Densse'$"):
        _ = sg.Densse


@pytest.mark.parametrize(
    ('module', 'name', 'write'),
    [
        (sg, 'as_filter', 'sg.where'),
        (nn, 'no_grad', 'nn.stop_gradient(True), from flax_sg import linen as nn'),
        (nn, 'of_type', 'sg.filters.of_type'),
        (sg, 'thaw', 'sg.adopt(tx, params, state), where tx freezes less'),
    ],
)
def test_a_name_of_others_is_told(module: Any, name: str, write: str):
    with pytest.raises(AttributeError) as info:
        getattr(module, name)
    assert str(info.value).endswith(f'has no attribute {name!r}: write {write}')


@pytest.mark.parametrize('page', ['README.md', 'docs/limits.md'])
def test_pages_say_how_many_methods_are_replaced(page: str):
    text = ' '.join((Path(__file__).parents[2] / page).read_text().split())
    methods = sum(isinstance(owner, type) for owner, _ in patching.HOOKED.values())
    assert len(patching.HOOKED) - methods == 2
    both = f'{methods} methods and two functions of Flax and JAX'
    sentence = rf'`flax_sg.core` (replace|patch) {both}'
    assert re.search(sentence, text)


def test_submodules_cannot_be_loaded_twice():
    # As `flax_sg.linen.linear` it would be a copy, with a Dense of its own.
    with pytest.raises(ModuleNotFoundError, match='not a package'):
        __import__('flax_sg.linen.linear')


# Collects what all modules and classes of Flax and JAX contain, to compare it later.
COMPARE = """
import sys, types
import flax.core, flax.linen, flax.nnx
import jax, jax.numpy, jax.custom_batching, jax.export

modules = [
    module for name, module in sorted(sys.modules.items())
    if name.split('.')[0] in ('flax', 'jax') and isinstance(module, types.ModuleType)
]
classes = {
    value for module in modules for value in vars(module).values()
    if isinstance(value, type) and value.__module__.startswith(('flax.', 'jax.'))
}
owners = [*modules, *classes]

def contents():
    return {id(owner): dict(vars(owner)) for owner in owners}

def compare(when):
    for owner in owners:
        old, now = before[id(owner)], dict(vars(owner))
        for name in {*now, *old}:
            same = name in now and name in old and now[name] is old[name]
            submodule = name not in old and isinstance(now[name], types.ModuleType)
            state = not callable(old.get(name)) and owner.__name__.startswith('jax.')
            if not (same or submodule or state):  # JAX notes what it has done.
                changed[when].add((owner, name))
    return changed[when]
"""


# The examples of all public functions, but of those whose examples have blocks.
EVERY_NAME = """
import doctest, inspect
import jax.numpy as jnp, optax
from flax import linen, nnx as flax_nnx
import flax.training.train_state
before, changed = contents(), {'sg': set()}
import flax_sg as sg
from flax_sg import nnx
from flax_sg.rules.cotangent_rewrites import scale_gradient

model, x = linen.Dense(2), jnp.ones((1, 3))
params = model.init(jax.random.key(0), x)['params']
where, graph = 'kernel', nnx.Linear(3, 2, rngs=nnx.Rngs(0))

def loss(params):
    return jnp.sum(model.apply({'params': params}, x))

uses = {
    'DECLARED': lambda: sg.grad(loss, wrt=sg.DECLARED)(params),
    'at': lambda: sg.partition(params, sg.at('kernel', 0)),
    'errors': lambda: sg.errors.FlaxSGError,
    'filters': lambda: sg.filters.of_type(linen.Dense, model, x),
    'paths': lambda: str(sg.paths(model, x)) + str(sg.paths(graph)),
    'rewrite': lambda: sg.rewrite(params, scale_gradient(where, 2.0)),
    'tabulate': lambda: sg.tabulate(model, x) + sg.tabulate(graph, x),
    'assert_same_program': lambda: sg.testing.assert_same_program(loss, loss, params),
    'optimized_hlo': lambda: sg.testing.optimized_hlo(loss, params),
}
for use in uses.values():
    use()
ours = {n for n in dir(nnx) if getattr(flax_nnx, n, None) is not getattr(nnx, n)}
ours = {n for n in ours if not n.startswith('_') and callable(getattr(nnx, n))}
names = {sg: {*sg.__all__} - {'core', 'linen', 'testing'}, nnx: ours}
names[sg.testing] = {*sg.testing.__all__}
flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
runner = doctest.DocTestRunner(optionflags=flags)
finder = doctest.DocTestFinder(recurse=False, exclude_empty=False)
not_run = []
for home, public in names.items():
    for name in public - {*uses}:
        [test] = finder.find(getattr(home, name), name, module=False, globs={})
        done = runner.run(test, out=lambda text: None)
        not_run += [name] * (done.attempted == 0 or done.failed > 0)
print('not used', not_run)
print('replaced', sorted(name for _, name in compare('sg')))
print('imported', [n for n in ('core', 'linen') if f'flax_sg.{n}' in sys.modules])
"""


@pytest.mark.skipif(
    not hasattr(flax.nnx.Variable, 'get_value'),
    reason='flax_sg.nnx needs flax 0.12.1',
)
def test_all_but_blocks_replaces_nothing():
    """Filters, gradients, optimizers, reports and views of NNX need no hooks."""
    assert run_python(COMPARE + EVERY_NAME).splitlines()[-3:] == [
        'not used []',
        'replaced []',
        'imported []',
    ]


def test_the_import_puts_hooks_into_flax_and_jax_and_blocks_change_nothing():
    out = run_python(
        COMPARE
        + """
before, changed = contents(), {'import': set(), 'blocks': set()}
import flax_sg
from flax_sg import linen as nn
from flax_sg.internals import patching
compare('import')
print('hooks alone', changed['import'] == set(patching.HOOKED.values()))
before = contents()

class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        with nn.stop_gradient('dense/*'):
            return nn.Frozen(nn.Dense(2))(nn.Dense(2, name='dense')(x))

with nn.read_only(True):
    jax.eval_shape(Model().init, jax.random.key(0), jax.numpy.ones((1, 2)))
compare('blocks')
print('changed by blocks', changed['blocks'])
print('compared', len(modules) > 100, len(classes) > 100)
"""
    )
    assert out.splitlines() == [
        'hooks alone True',
        'changed by blocks set()',
        'compared True True',
    ]


@pytest.mark.parametrize('run', ['compact', 'lifted', 'bound', 'around'])
def test_the_import_may_come_when_modules_are_bound_or_run(run):
    """Its checks make modules of their own, and the trees that run are told apart.

    What ``setup`` has kept is seen in a block, and rewound scopes share a tree.
    """
    out = run_python(
        """
import jax, jax.numpy as jnp, flax.linen as fnn

class Net(fnn.Module):
    def setup(self):
        self.a, self.b = fnn.Dense(3), fnn.Dense(2)
        self.w = self.param('w', fnn.initializers.ones, (3,))
        self.square = self.w**2

    def __call__(self, x):
        return jnp.sum(self.b(self.a(x) * self.square))

    def kept(self, x):
        from flax_sg import linen as nn
        with nn.stop_gradient(['a/**', 'w']):
            return self(x)

class Model(fnn.Module):
    def setup(self):
        self.net = Net()

    @fnn.compact
    def __call__(self, x, kept=False):
        y = self.net.kept(x) if kept else self.net(x)
        return y * jnp.sum(fnn.Dense(2, name='c')(x))

    def lifted(self, x):
        return fnn.remat(fnn.jit(Net.kept))(self.net, x)

def compact(params):
    return Model().apply({'params': params}, x, True)

def lifted(params):
    return Model().apply({'params': params}, x, method='lifted')

def bound(params, around=False):
    model = Model().bind({'params': params})
    model(x)  # Set up, and rewound, before the import.
    from flax_sg import linen as nn
    if not around:
        return model(x, True)
    with nn.stop_gradient(['net/a/**', 'net/w']):
        return model(x)

def around(params):
    return bound(params, True)

def dense(n, m):
    return {'kernel': jnp.full((n, m), 0.5), 'bias': jnp.ones(m)}

net = {'a': dense(2, 3), 'b': dense(3, 2), 'w': jnp.arange(3.0)}
params, x = {'net': net, 'c': dense(2, 2)}, jnp.ones((1, 2))
grad = jax.jit(jax.grad(RUN))
first = grad(params)
jax.clear_caches()
for ours, later in zip(*map(jax.tree.leaves, (first, grad(params))), strict=True):
    assert (ours == later).all()
parts = {**first['net'], 'c': first['c']}
print(*(name for name, g in parts.items() if any(x.any() for x in jax.tree.leaves(g))))
""".replace('RUN', run)
    )
    assert out.split() == ['b', 'c'][: 1 + (run != 'lifted')]


def test_the_import_leaves_the_lines_of_programs_as_they_are():
    """Hooks stand between a model and what it calls, open block or not."""
    program = """
import traceback
import jax, jax.numpy as jnp, flax.linen as fnn

class Net(fnn.Module):
    def setup(self):
        self.w = self.param('w', fnn.initializers.lecun_normal(), (3, 3))

    @fnn.compact
    def __call__(self, x):
        h = jax.nn.relu(fnn.remat(fnn.Dense)(3)(x @ self.w))
        return jax.nn.silu(h) + jax.nn.logsumexp(h)

def fails(key, shape):
    return jnp.zeros(shape) + jnp.ones(7)

class Fails(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        return self.param('w', fails, (3,))

x = jnp.ones((2, 3))
step = jax.jit(jax.grad(lambda v: Net().apply(v, x).sum()))
shapes = jax.eval_shape(Net().init, jax.random.key(0), x)
print(step.lower(shapes).as_text(debug_info=True))
try:
    jax.jit(Fails().init)(jax.random.key(0), x)
except TypeError as error:
    print([frame.name for frame in traceback.extract_tb(error.__traceback__)])
"""
    plain, ours = (run_python(first + program) for first in ('\n', 'import flax_sg\n'))
    assert ours == plain
    assert 'relu' in ours and "'fails'" in ours.splitlines()[-1]


def test_any_file_can_be_reloaded_or_says_that_it_cannot():
    """Whatever a file installs in Flax and JAX is there once, open block or not."""
    out = run_python(
        """
import importlib, sys
import flax.linen as fnn, flax.nnx, jax, jax.numpy as jnp
import flax_sg as sg
from flax_sg import core, errors, flow, linen as nn, summary, testing

if hasattr(flax.nnx.Variable, 'get_value'):
    from flax_sg import nnx

class Model(fnn.Module):
    def setup(self):
        self.a, self.w = fnn.Dense(2), 2 * self.param('w', fnn.initializers.ones, (2,))

    def __call__(self, x):
        with nn.stop_gradient('a/kernel'):
            return jnp.sum(jax.nn.relu(self.a(x)) * self.w)

x = jnp.ones((2, 3))
params = Model().init(jax.random.key(0), x)['params']
plain = lambda params: Model().apply({'params': params}, x)
cached = jax.jit(jax.grad(plain))

def trained(grad):
    leaves = jax.tree_util.tree_leaves_with_path(grad(params))
    return [jax.tree_util.keystr(path) for path, g in leaves if g.any()]

def check(name):
    for grad in (jax.grad(plain), cached):
        assert trained(grad) == ["['a']['bias']", "['w']"], name
        with nn.stop_gradient(lambda path: path.name == 'bias'):
            assert trained(grad) == ["['w']"], name
        with sg.linen.stop_gradient('w'):
            assert trained(grad) == ["['a']['bias']"], name

check('before')
refused = []
for name in sorted(name for name in sys.modules if name.split('.')[0] == 'flax_sg'):
    before = dict(vars(sys.modules[name]))
    with nn.stop_gradient('w'):
        try:
            importlib.reload(sys.modules[name])
        except errors.UnsupportedVersionError:
            refused.append(name)
            assert vars(sys.modules[name]) == before
        except ValueError:  # JAX knows the classes of a pytree.
            assert name.startswith('flax_sg.trees.')
        assert trained(cached) == ["['a']['bias']"], name
    check(name)
print(*refused)
"""
    )
    refused = [
        'engine.blocks',
        'engine.numbers',
        'internals.patching',
        'internals.tracing',
    ]
    assert out.split() == [f'flax_sg.{name}' for name in refused]


@pytest.mark.parametrize('key', patching.HOOKED)
def test_a_hook_looks_like_what_it_stands_for(key):
    (owner, name), original = patching.HOOKED[key], patching.originals[key]
    hook = getattr(owner, name)
    assert hook is not original
    assert inspect.signature(hook) == inspect.signature(original)
    assert (hook.__doc__, hook.__name__) == (original.__doc__, original.__name__)


def test_a_name_that_comes_later_is_there_too(monkeypatch):
    later = object()
    monkeypatch.setattr(flax.linen, 'later', later, raising=False)
    assert nn.later is later
    assert 'later' in dir(nn)

"""``sg.gradient_flow`` against gradients, and against what is written by hand."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import export, lax

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.flow.report import together
from tests.helpers import flows, oracle
from tests.helpers.described import uses
from tests.helpers.described.compared import assert_promise_kept

A, B = jnp.array([0.5, -1.5, 2.5]), jnp.array([1.25, 0.75, -2.0])
THREE = jax.ShapeDtypeStruct((3,), jnp.float32)
flow_of = sg.gradient_flow


def statuses(fn: Any, *args: Any) -> dict[str, str]:
    """For each parameter what holds of it for all outputs together."""
    report = flow_of(fn, *args)
    columns = zip(*report.status, strict=True)
    return {
        str(path): next(s for s in ('flows', 'stopped', 'unused') if s in column)
        for path, column in zip(report.parameters, columns, strict=True)
    }


def refused(match: str) -> Any:
    return pytest.raises(sg.errors.ArgumentTypeError, match=match)


# Each kind of equation


@pytest.mark.parametrize('name', flows.PROGRAMS)
def test_a_program_does_what_is_written_beside_it(name):
    fn, *expected = flows.PROGRAMS[name]

    def of_both(params):
        return fn(params['a'], params['b'])

    report = flow_of(of_both, {'a': THREE, 'b': THREE})
    assert list(report.status[0]) == expected
    for parameter, status in zip('ab', expected, strict=True):
        why = report.why('output', parameter)
        assert not (why.lines if status == 'unused' else why.by and status != 'stopped')

    of_a, of_b = oracle.grads(fn, A, B)[0]
    for derivative, status in zip((of_a, of_b), expected, strict=True):
        by_chance = derivative is of_a and name in flows.ZERO_BY_CHANCE
        assert oracle.is_zero(derivative) is (status != 'flows' or by_chance)


@pytest.mark.parametrize('name', flows.REFUSED)
def test_what_jax_refuses_is_refused(name):
    fn = flows.REFUSED[name]
    with refused('which JAX cannot differentiate'):
        flow_of(lambda p: fn(p['a'], p['b']), {'a': A, 'b': B})
    with pytest.raises(Exception, match=r'(?i)differentia|not supported|JVP'):
        oracle.grads(fn, A, B)
    # What is stopped before may go there.
    both = {'a': lax.stop_gradient(A), 'b': lax.stop_gradient(B)}
    assert statuses(lambda p: fn(**both) + p, A) == {'': 'flows'}


def test_a_refusal_names_the_line_of_a_call_of_jnp():
    def loss(p):
        return jnp.linalg.svd(p['w'])[0]

    here = r'gradient would pass through svd at test_flow.py:\d+ '
    with refused(here + r'\(.*loss\)'):
        flow_of(loss, {'w': jnp.ones((3, 2)), 'b': A})


def test_an_array_that_is_written():
    def loss(p):
        ref = jax.new_ref(jnp.zeros(3))
        ref[...] = lax.stop_gradient(p)
        return ref[...]

    if not hasattr(jax, 'new_ref'):
        return
    try:
        gradient = jax.grad(lambda p: loss(p).sum())(A)
    except AttributeError:  # JAX 0.10 cannot; nor can the report.
        with refused('which JAX cannot differentiate'):
            flow_of(loss, A)
    else:
        assert oracle.is_zero(gradient)
        assert flow_of(loss, A).status == (('stopped',),)


def test_names_that_differ_in_collection_or_slashes():
    twice = {'params': {'w': A}, 'ema': {'w': B}}
    report = flow_of(lambda v: v['ema']['w'], twice)
    assert report.names == ('ema/w', 'params/w')
    assert report.status_of('output', 'ema/w') == 'flows'
    assert report.status_of('output', report.parameters[1]) == 'unused'
    assert [row['parameter'] for row in report.rows()] == ['ema/w', 'params/w']
    assert report.by_module() == {'ema': ('flows',), 'params': ('unused',)}
    live = sg.live(lambda v: v['ema']['w'], twice)
    assert sg.mask(twice, trained=live) == {'params': {'w': False}, 'ema': {'w': True}}

    slashes = {'a': {'b': A}, 'a/b': B}
    report = flow_of(lambda p: {'x': {'y': p['a/b']}, 'x/y': 2.0 * p['a/b']}, slashes)
    assert report.names == ("['a']['b']", "['a/b']")
    assert report.outputs == ("['x']['y']", "['x/y']")
    assert report.status_of("['x/y']", "['a/b']") == 'flows'
    mask = sg.mask(slashes, trained=sg.live(lambda p: p['a/b'], slashes))
    assert mask == {'a': {'b': False}, 'a/b': True}


# What stops a gradient, and where


def by_argmax(p):
    scores = jnp.tanh(p['w'])
    best = jnp.argmax(scores)
    return jax.nn.one_hot(best, 3) * p['b']


@jax.custom_vjp
def without_first(a, b):
    return a * b


without_first.defvjp(lambda a, b: (a * b, a), lambda a, g: (0.0 * a, g * a))

STOPPED_BY = {
    'argmax': by_argmax,
    'stop_gradient': lambda p: lax.stop_gradient(jnp.sin(p['w'])) * p['b'],
    'a cast to int32': lambda p: p['w'].astype(jnp.int32).astype(jnp.float32) * p['b'],
    'round': lambda p: jnp.round(jnp.sin(p['w'])) * p['b'],
    'gt': lambda p: jnp.where(jnp.sin(p['w']) > 0.0, p['b'], 0.0),
    'the rule of without_first': lambda p: without_first(jnp.sin(p['w']), p['b']),
}


@pytest.mark.parametrize('jitted', [False, True])
@pytest.mark.parametrize('what', STOPPED_BY)
def test_what_stops_a_gradient_is_named(what, jitted):
    loss = STOPPED_BY[what]
    run = jax.jit(loss) if jitted else loss
    report = flow_of(run, {'w': A, 'b': B})
    by = report.why('output', 'w').by
    assert by.startswith(f'{what} at test_flow.py:'), by
    line = loss.__code__.co_firstlineno
    assert line <= int(by.split(':')[1].split()[0]) <= line + 4
    assert not report.why('output', 'b').by


def test_a_block_is_named_with_its_filter():
    """A weight that is frozen in one use and live in another (hazard 23)."""

    class Tied(nn.Module):
        def setup(self):
            self.embed = nn.Embed(4, 3)
            self.core = nn.Dense(3)

        def __call__(self, ids):
            with nn.stop_gradient('embed/**'):
                x = self.embed(ids)
            return {'frozen': x, 'tied': self.embed.attend(self.core(x))}

    model, ids = Tied(), jnp.array([1, 2])
    params = jax.eval_shape(model.init, jax.random.key(0), ids)['params']
    report = flow_of(jax.jit(lambda p: model.apply({'params': p}, ids)), params)
    frozen = report.why('frozen', 'embed/embedding')
    [line] = frozen.lines
    read = int(line.split(':')[1].split()[0])
    assert frozen.by == f"stop_gradient(Glob('embed/**')) at test_flow.py:{read - 1}"
    tied = report.why('tied', 'embed/embedding')
    assert (tied.status, tied.by) == ('flows', '')
    assert tied.lines[0].startswith(f'test_flow.py:{read + 1} (')


def test_a_rule_that_is_told_what_is_perturbed_flows():
    @jax.custom_vjp
    def fn(a, b):
        return a * b

    def forward(a, b):
        return a.value * b.value, (b.value, b.perturbed)

    # Nothing for a, unless it is alone.
    def backward(kept, g):
        other, perturbed = kept
        return (None if perturbed else g * other), jnp.zeros(3)

    fn.defvjp(forward, backward, symbolic_zeros=True)
    assert statuses(lambda p: fn(*p), (A, B)) == {'0': 'stopped', '1': 'stopped'}
    assert statuses(lambda a: fn(a, B), A) == {'': 'flows'}
    assert not oracle.is_zero(jax.grad(lambda a: fn(a, B).sum())(A))


@pytest.mark.usefixtures('standard_promotion')
def test_what_an_fp8_layer_makes_out_of_nothing_flows():
    # Its rules give the new scales as the gradients of the old ones, whatever comes in.
    layer = linen.Dense(2, dot_general_cls=linen.Fp8DirectDotGeneralOp)
    x = jnp.ones((2, 2))
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    report = flow_of(lambda v: layer.apply(v, x).sum(), variables)
    assert report.live == (True,) * 8
    assert not any(report.why('output', name).by for name in report.names)


def test_values_without_a_gradient_are_stopped():
    params = {'w': A, 'fixed': sg.NonDifferentiable(B), 'n': 3, 'ids': jnp.arange(3)}

    def fn(p):
        return p['w'] * p['fixed'] + (p['n'] * p['ids']).astype(jnp.float32)

    said = statuses(fn, params)
    assert said == {'w': 'flows', 'fixed': 'stopped', 'ids': 'stopped'}


def test_what_classes_declare_is_followed_and_a_filter_takes_its_place():
    @sg.trainable('kernel')
    @functools.partial(
        jax.tree_util.register_dataclass, data_fields=['kernel', 'mean'], meta_fields=[]
    )
    @dataclasses.dataclass
    class Layer:
        kernel: Any
        mean: Any

    def fn(layer):
        return layer.kernel - layer.mean

    assert statuses(fn, Layer(A, B)) == {'kernel': 'flows', 'mean': 'stopped'}
    report = flow_of(fn, Layer(A, B), wrt='mean')
    assert report.status == (('stopped', 'flows'),)
    assert report.why('output', 'kernel').by == 'wrt=, which leaves it out'


def test_argnums_are_those_of_jax():
    def fn(p, x, scale, q):
        return p['params']['w'] * x * lax.stop_gradient(q)

    p = {'params': {'w': A}, 'stats': {'m': 2.0}}
    report = flow_of(fn, p, A, 2, B, argnums=(0, -1))
    assert report.parameters == ('0/w', '0/m', '3')
    assert report.status == (('flows', 'unused', 'stopped'),)
    assert report.parameters[1].collection == 'stats'
    # With one argument, paths are those of its tree.
    report = flow_of(fn, p, {'x': A}['x'], 2, {'b': B}['b'], argnums=1)
    assert (report.parameters, report.status) == (('',), (('flows',),))
    # A filter is asked for the same paths, as in sg.grad.
    trees = {'w': A, 'v': A}, {'w': B, 'v': B}
    product = lambda a, b: a['w'] * b['w'] * b['v']  # noqa: E731
    report = flow_of(product, *trees, argnums=(1, 0), wrt='*/w')
    assert report.parameters == ('1/v', '1/w', '0/v', '0/w')
    assert report.status == (('stopped', 'flows', 'unused', 'flows'),)


def test_aux_is_that_of_jax():
    def fn(p, scale):
        return p['w'] * lax.stop_gradient(p['q']), (p['w'] * p['q'], 'text', scale)

    report = flow_of(fn, {'w': A, 'q': B}, 2, has_aux=True)
    assert report.parameters == ('q', 'w')
    assert report.outputs == ('output',)
    assert report.status == (('stopped', 'flows'),)


def test_a_module_in_place_of_a_function():
    model = nn.Sequential([nn.Frozen(nn.Dense(2)), nn.Dense(1)])
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 2)))
    report = flow_of(model, shapes, jax.ShapeDtypeStruct((1, 2), jnp.float32))
    assert report.by_module() == {'layers_0': ('stopped',), 'layers_1': ('flows',)}


# Models


def test_each_use_of_a_parameter_is_seen():
    class Uses(uses.Route):
        @nn.nowrap
        def parts(self):
            w = functools.partial(self.get_variable, 'params', 'w')
            return lambda: jnp.sin(w())

        @linen.compact
        def __call__(self, x):
            self.param('w', linen.initializers.ones, (3,))
            return uses.run(self.program, self.parts())

    program = uses.PROGRAMS['all']
    report = flow_of(lambda p: Uses(program).apply({'params': p}, None), {'w': A})

    def by_hand(p):
        return uses.by_hand(program, lambda seen: seen['w'], p)

    stops = [oracle.is_zero(gradient) for gradient in oracle.grads(by_hand, {'w': A})]
    assert [row[0] == 'stopped' for row in report.status] == stops
    for output, is_stopped in zip(report.outputs, stops, strict=True):
        why = report.why(output, 'w')
        assert 'test_flow.py' in why.lines[0] and 'parts' in why.lines[0]
        assert why.by.startswith('stop_gradient(') == is_stopped


# Bad input


def test_shapes_that_depend_on_values():
    for fn in (lambda p: p[jnp.nonzero(p)], lambda p: p if p[0] > 0 else -p):
        # The error names the function of the user.
        with pytest.raises(jax.errors.ConcretizationTypeError, match=r'test_flow\.py'):
            flow_of(fn, A)
    # The sizes of arrays may be symbols.
    symbols = export.symbolic_shape('n, 3')
    report = flow_of(lambda p: p * 2.0, jax.ShapeDtypeStruct(symbols, jnp.float32))
    assert report.live == (True,)


def test_host_callbacks():
    def called(p):
        return jax.pure_callback(np.sin, p['w'], p['w']) * p['b']

    with refused('would pass through pure_callback at test_flow.py'):
        flow_of(called, {'w': A, 'b': B})
    with refused('would pass through'):
        sg.live(jax.jit(called), {'w': A, 'b': B})

    def stopped_before(p):
        return called({**p, 'w': lax.stop_gradient(p['w'])})

    assert statuses(stopped_before, {'w': A, 'b': B}) == {'w': 'stopped', 'b': 'flows'}
    # What is not asked about may go there.
    report = flow_of(called, {'w': A, 'b': B}, wrt='b')
    assert report.status == (('flows', 'stopped'),)

    def effects(p):
        jax.debug.print('{}', p)
        jax.experimental.io_callback(lambda x: None, None, lax.stop_gradient(p))
        return p * 2.0

    assert flow_of(effects, A).live == (True,)


def test_primitives_without_a_derivative():
    # A number is an output that nothing trains.
    assert flow_of(lambda p: (p, 1.0), A).status == (('flows',), ('unused',))
    # A parameter that is an output itself.
    assert flow_of(lambda p: p, A).why('output', '').status == 'flows'
    assert flow_of(lax.stop_gradient, A).why('output', '').by.startswith('stop_grad')
    with refused('igamma_grad_a'):
        flow_of(lambda p: lax.igamma_grad_a(p, jnp.ones_like(p)), A)


def test_several_arguments_have_the_names_of_the_function():
    def losses(generator, noise, critic, *more):
        return {'adversarial': jnp.sum(generator['w'] * noise) * critic['w']}

    one = {'w': jnp.ones(()), 'b': {'c': jnp.ones(())}}
    line = 'In paths and filters, 0 is generator, 2 is critic.'
    report = sg.gradient_flow(losses, one, 1.0, one, argnums=(0, 2))
    assert report.names == ('0/b/c', '0/w', '2/b/c', '2/w')
    assert report.why('adversarial', '2/w').uses
    jitted = sg.gradient_flow(jax.jit(losses), one, 1.0, one, argnums=(0, 2))
    for table in report, jitted:
        lines = str(table).splitlines()
        assert line in lines
        for name in report.names:
            assert any(row.startswith(f'{name} ') for row in lines)
        assert 'No output uses 0/b/c, 2/b/c.' in lines
    assert [row.name for row in report.matrix(1).rows] == ['0', '2']
    # Alone, it has no number; and of some arguments there is no name.
    assert ' is ' not in str(sg.gradient_flow(losses, one, 1.0, one))
    report = sg.gradient_flow(losses, one, 1.0, one, one, argnums=(0, 3))
    assert 'In paths and filters, 0 is generator.' in str(report).splitlines()
    nameless = sg.gradient_flow(lambda *args: args[0]['w'], one, one, argnums=(0, 1))
    assert ' is ' not in str(nameless)
    assert hash(report) == hash(dataclasses.replace(report))


def first_user_of_a_cache(w):
    return jnp.take(w, jnp.array([[[0], [1]]]), axis=0)


def test_a_cell_of_a_notebook_is_called_as_its_tracebacks_call_it(monkeypatch):
    cell = '/tmp/ipykernel_7/4711.py'
    compiler = types.SimpleNamespace(format_code_name={cell: ('Cell', 'In[3]')}.get)
    shell = types.SimpleNamespace(compile=compiler)
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, 'IPython', ipython)
    program: dict[str, Any] = {'nn': nn, 'jnp': jnp}
    text = (
        '\ndef loss(p):\n    return 2.0 * p\n'
        'class Kept(nn.Module):\n    @nn.compact\n    def __call__(self, x):\n'
        "        with nn.stop_gradient('w'):\n"
        "            return x * self.param('w', nn.initializers.ones, ())\n"
    )
    exec(compile(text, cell, 'exec'), program)

    def source(fn):
        return flow_of(fn, THREE).why('output', '').lines[0]

    assert source(program['loss']) == 'In[3]:3 (loss)'
    kept = flow_of(program['Kept'](), {'params': {'w': 1.0}}, 2.0)
    assert kept.why('output', 'w').by == "stop_gradient(Glob('w')) at In[3]:7"
    # An imported file; and IPython without a notebook.
    assert source(first_user_of_a_cache).startswith('test_flow.py:')
    ipython.get_ipython = lambda: None
    assert source(program['loss']) == '4711.py:3 (loss)'


def test_primitives_of_a_user_have_a_rule_each():
    hijax = pytest.importorskip('jax.experimental.hijax', reason='from jax 0.8 on')
    base = getattr(hijax, 'HiPrim', None) or hijax.VJPHiPrimitive

    class Product(base):
        def __init__(self, rule):
            self.in_avals = (jax.typeof(A), jax.typeof(B))
            self.out_aval = jax.typeof(A)
            self.params = {'rule': rule}
            super().__init__()

        def expand(self, a, b):
            return a * b

        def vjp_fwd(self, nonzeros, /, a, b):
            return a * b, (a, b)

        def vjp_bwd_retval(self, kept, g):
            return self.rule(g, *kept)

    first = Product(lambda g, a, b: (g * b, jnp.zeros(3)))
    second = Product(lambda g, a, b: (jnp.zeros(3), g * a))
    nothing = Product(lambda g, a, b: (jnp.ones(3), g * a))

    def fn(p):
        one, other = first(p['a'], p['b']), second(p['c'], p['d'])
        return one + other + jnp.sign(nothing(p['e'], p['f']))

    params = dict(zip('abcdef', (A, B) * 3, strict=True))
    report = flow_of(fn, params)
    assert report.live == (True, False, False, True, False, False)
    assert_promise_kept(report, [oracle.grads(fn, params)[0][0]])


def test_code_that_is_run_as_a_text_has_lines():
    names: dict[str, Any] = {'jnp': jnp}
    text = "def loss(p):\n    return jnp.sum(jnp.sign(p['a']) * p['b'])\n"
    exec(compile(text, '<string>', 'exec'), names)
    report = flow_of(names['loss'], {'a': A, 'b': B})
    assert report.status == (('stopped', 'flows'),)
    assert '<string>:2' in report.why('output', 'a').lines[0]


def test_rows_are_named_without_a_look_at_all_the_others():
    class Rows(tuple):
        def __iter__(self):
            nonlocal looked
            looked += 1
            return super().__iter__()

    looked, params = 0, {f'p{n}': A for n in range(50)}
    report = sg.gradient_flow(lambda p: p['p1'] * 2.0, params)
    report = dataclasses.replace(report, parameters=Rows(report.parameters))
    looked = 0
    assert report.status_of('output', 'p1') == 'flows'
    assert looked < 10


@pytest.mark.parametrize('depth', [None, 1, 2])
def test_a_row_prints_the_filter_of_what_it_means(depth):
    """A module's own parameters, without those of its submodules, end in a star."""
    own = {'scale': THREE, 'shift': THREE}
    inner = {'w': THREE, 'b': THREE}
    params = {
        'llm': {f'{n}': {**own, 'attn': inner, 'mlp': inner} for n in range(3)},
        'head': {**own, 'out': inner},
        'alone': inner,
    }

    def loss(params):
        fixed = {n: stop_in(layer, 'attn') for n, layer in params['llm'].items()}
        leaves = jax.tree.leaves([fixed, stop_in(params['head'], 'out')])
        return sum(jnp.sum(leaf) for leaf in leaves) + jnp.sum(params['alone']['w'])

    def stop_in(module, name):
        return {**module, name: jax.tree.map(lax.stop_gradient, module[name])}

    report = flow_of(loss, params)
    rows = report.matrix(depth).rows
    if depth is None:
        assert sorted(row.name for row in rows) == [
            *('alone/b', 'alone/w', 'head/*', 'head/out'),
            *('llm/[0-2]/*', 'llm/[0-2]/attn', 'llm/[0-2]/mlp'),
        ]
    seen: list[str] = []
    for row in rows:
        is_module = row.name not in report.names and not row.name.endswith('/*')
        where = sg.where(row.name + '/**' * is_module)
        taken = [n for n, path in enumerate(report.parameters) if where(path)]
        assert together(report.status[0][n] for n in taken) == row.cells[0]
        seen += [report.names[n] for n in taken]
    assert sorted(seen) == sorted(report.names)

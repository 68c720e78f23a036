"""A cached trace never has the wrong stops, and JAX retraces only where it must.

Every expected gradient is that of the same program on weights that were stopped by
hand (``oracle``). Traces are counted by the Python that runs when there is one.
"""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import chex
import flax.linen as fnn
import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax

from flax_sg import filters
from flax_sg import linen as nn
from flax_sg.engine import blocks
from flax_sg.forms.block_decorator import BlockDecorator
from flax_sg.rules import rules
from tests.helpers import oracle, stepwise
from tests.helpers.described.modules import Do
from tests.helpers.left_over import forget_contexts
from tests.helpers.transforms import AROUND

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Encoder(fnn.Module):
    """Two parameters in a submodule, and a record of each time that Python runs."""

    @fnn.compact
    def __call__(self, x):
        if not self.is_initializing():
            TRACES.append(None)
        return jnp.tanh(fnn.Dense(3, name='dense')(x))


TRACES: list[Any] = []


@pytest.fixture(autouse=True)
def _no_traces_yet() -> Iterator[None]:
    TRACES.clear()
    yield
    TRACES.clear()


MODEL = Encoder()
PARAMS = oracle.init(MODEL, jax.random.key(0), X)['params']

# What each letter of an order means: the filter of the block around the call.
WHERE: dict[str, Any] = {'o': None, 'i': 'dense/kernel', 'j': 'dense/**'}
SELECTS: dict[str, Callable[[str], bool]] = {
    'o': lambda path: False,
    'i': lambda path: path == 'dense/kernel',
    'j': lambda path: path.startswith('dense/'),
}
# Outside first, and inside first: in naive versions the first call decides.
ORDERS = ['oijoi', 'ijoio']


def under(letter: str, fn: Callable[..., Any], *args: Any, module: str = '') -> Any:
    """Calls a function in the block that the letter stands for, of a module."""
    if WHERE[letter] is None:
        return fn(*args)
    with nn.stop_gradient(module + WHERE[letter]):
        return fn(*args)


def apply(params: Any, x: Any) -> Any:
    return MODEL.apply({'params': params}, x)


def summed(params: Any) -> Any:
    return jnp.sum(apply(params, X))


# Transforms of JAX, each of which traces and caches what is inside.
CACHED = [
    *('jit', 'scan_closed_over', 'custom_vjp', 'custom_jvp', 'custom_gradient'),
    *('checkpoint_names', 'checkpoint_of_jit', 'scan_over_params', 'cond'),
]


def cached(kind: str) -> Callable[..., Any]:
    """A function of (params, x), of which nothing is cached yet."""
    return AROUND[kind](lambda params, x: apply(params, x))


@pytest.mark.parametrize('kind', AROUND)
def test_a_transform_of_a_function_with_a_block_in_it(kind):
    def blocked(params, x):
        return under('i', apply, params, x)

    def by_hand(params, x):
        return apply(oracle.stopped(params, SELECTS['i']), x)

    def out(fn):
        return lambda params, x: {'out': AROUND[kind](fn)(params, x)}

    stepwise.assert_same_grads(out(blocked), out(by_hand), PARAMS, X)


@pytest.mark.parametrize('kind', CACHED)
def test_one_function_called_in_and_out_of_blocks(kind):
    # Traced in the block, where caches decide, and evaluated after it: under each
    # filter JAX would compile all anew.
    def traced(fn):
        def pulled(p, x):
            y, pull_back = jax.vjp(fn, p, x)
            return pull_back(jax.tree.map(jnp.ones_like, y))

        return stepwise.trace(pulled, PARAMS, X)

    by_hand = cached(kind)
    expected = {
        letter: traced(lambda p, x, s=selects: by_hand(oracle.stopped(p, s), x))()
        for letter, selects in SELECTS.items()
    }
    for order in ORDERS:
        fn = cached(kind)
        TRACES.clear()
        for letter in order:
            oracle.assert_same(under(letter, traced, fn)(), expected[letter])
        assert kind != 'jit' or len(TRACES) == 3


def frozen_by_hand(params):
    return apply(oracle.stopped(params, SELECTS['i']), X)


def in_a_block(params):
    return under('i', apply, params, X)


def test_while_loops_compiled_programs_exported_ones_and_no_jit():
    def loop(fn):
        def run(params):
            return lax.while_loop(
                lambda carry: carry[0] < 2,
                lambda carry: (carry[0] + 1, carry[1] * fn(params)),
                (0, X),
            )[1]

        return lambda params: jax.jvp(run, (params,), (jax.tree.map(jnp.cos, params),))

    def compiled(fn):
        grad = jax.grad(lambda p: jnp.sum(jnp.sin(fn(p))))
        return jax.jit(grad).lower(PARAMS).compile()

    def exported(fn):
        call = jax.export.export(jax.jit(fn))(PARAMS).call
        return jax.grad(lambda p: jnp.sum(jnp.sin(call(p))))

    for use in (loop, compiled, exported):
        expected = use(frozen_by_hand)(PARAMS)
        oracle.assert_same(use(in_a_block)(PARAMS), expected)
        around = under('i', use, lambda p: apply(p, X))
        if use is not loop:
            oracle.assert_same(around(PARAMS), expected)
    with nn.stop_gradient(True, unused='ignore'):  # A compiled program reads nothing.
        oracle.assert_same(
            compiled(frozen_by_hand)(PARAMS), compiled(in_a_block)(PARAMS)
        )
    with jax.disable_jit():
        grads = [
            jax.grad(lambda p, f=f: jnp.sum(f(p)))(PARAMS)
            for f in (in_a_block, frozen_by_hand)
        ]
    oracle.assert_same(*grads)


def test_the_rule_of_a_custom_vmap_runs_after_the_block_has_closed():
    fn = jax.custom_batching.custom_vmap(apply)

    @fn.def_vmap
    def _(size, batched, params, x):
        del size
        axes = tuple(0 if any(jax.tree.leaves(b)) else None for b in batched)
        return jax.vmap(apply, axes)(params, x), True

    def batched(fn):
        return jax.vmap(jax.jit(fn), (None, 0))

    def by_hand(params, x):
        return fn(oracle.stopped(params, SELECTS['i']), x)

    blocked, xs = functools.partial(under, 'i', fn), jnp.stack([X, 2 * X])
    oracle.assert_same_grads(batched(blocked), batched(by_hand), PARAMS, xs)


def ruled(x, weight):
    """Twice the input, with a rule that reads a weight after the call."""
    fn = jax.custom_vjp(lambda x: 2 * x)
    fn.defvjp(lambda x: (2 * x, x), lambda x, ct: (ct * jnp.sin(x @ weight()),))
    return fn(x)


class Compact(fnn.Module):
    """Opens a block around a function whose rule reads the module."""

    how: str

    @fnn.compact
    def __call__(self, x):
        self.param('w', fnn.initializers.ones, (3, 3))

        def weight():
            w = self.get_variable('params', 'w')
            return lax.stop_gradient(w) if self.how == 'hand' else w

        block = nn.stop_gradient('w', unused='ignore')
        with block if self.how == 'block' else contextlib.nullcontext():
            return ruled(x, weight)


def test_the_rule_of_a_custom_vjp_belongs_to_the_module_that_opened_the_block():
    def slope(how):
        def outer(self, x):
            return sum(Compact(how, name=name)(x) for name in ('part', 'other'))

        def fn(params, x):
            return jax.grad(lambda x: Do(outer).apply({'params': params}, x).sum())(x)

        return fn

    w = 0.1 * jnp.arange(9.0).reshape(3, 3)
    params = {'part': {'w': w}, 'other': {'w': jnp.cos(w)}}
    actual = oracle.grads(slope('block'), params, X)
    oracle.assert_same(actual, oracle.grads(slope('hand'), params, X))
    assert oracle.is_zero(actual[0][0])
    assert not oracle.is_zero(oracle.grads(slope('none'), params, X)[0][0])


# Modules that Flax traces and caches: a model that calls one of them several times.


class Calls(fnn.Module):
    """Calls one module once for each letter, in the block that it stands for."""

    order: str
    encoder: Any
    by: str = '__call__'

    def setup(self):
        self.enc = self.encoder()

    def __call__(self, x):
        call = getattr(self.enc, self.by)
        return [under(letter, call, x, module='enc/') for letter in self.order]


class Methods(fnn.Module):
    """A module with a compiled method."""

    def setup(self):
        self.dense = fnn.Dense(3)

    @fnn.jit
    def jitted(self, x):
        return jnp.tanh(self.dense(x))


LIFTED: dict[str, tuple[Callable[[], Any], str]] = {
    'jit': (lambda: fnn.jit(Encoder), '__call__'),
    'remat of jit': (lambda: fnn.remat(fnn.jit(Encoder)), '__call__'),
    'jitted method': (lambda: Methods, 'jitted'),
}


@pytest.mark.parametrize('kind', LIFTED)
def test_one_module_with_mutable_parameters_in_and_out_of_blocks(kind):
    make, by = LIFTED[kind]
    encoder = make()

    def in_blocks(params, x):
        model = Calls('ioi', encoder, by)
        return model.apply({'params': params}, x, mutable=['params'])

    def by_hand(params, x):
        def call(letter):
            stopped = oracle.stopped(params['enc'], SELECTS[letter])
            return encoder().apply({'params': stopped}, x, method=by)

        # What an apply gives back is what it was given, unless it was written.
        return [call(letter) for letter in 'ioi'], {'params': params}

    oracle.assert_same_grads(in_blocks, by_hand, {'enc': PARAMS}, X)


# How often things are traced.


def counting_tanh() -> Any:
    """A helper of which nothing is cached yet, with a record of its traces."""

    @jax.jit
    def tanh(x):
        TRACES.append(None)
        return jnp.tanh(x)

    return tanh


def test_a_jitted_class_in_a_scan_in_a_block_is_traced_once():
    """Scopes in the body carry what the block knows, and ``nn.jit`` compares them."""

    class Layer(fnn.Module):
        @fnn.compact
        def __call__(self, x, _):
            TRACES.append(None)
            return jnp.tanh(fnn.Dense(3)(x)), None

    layers = fnn.scan(fnn.jit(Layer), **oracle.STACKED, length=2)
    variables = oracle.init(layers(), jax.random.key(0), X, None)
    for traces in (True, False, False):
        TRACES.clear()
        with nn.stop_gradient('**/kernel'):
            layers().apply(variables, X, None)
        assert bool(TRACES) == traces


def test_a_variable_written_and_read_in_one_jitted_class_at_different_paths():
    # What the body writes is rewritten inside the trace, which Flax shares among
    # modules: it must not be shared by those that the filter tells apart.
    @fnn.jit
    class Writes(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            memory = self.variable('memory', 'last', jnp.zeros, (2, 3))
            memory.value = x * 2.0
            return memory.value + x

    def scale(where):
        def opens(self, x):
            with nn.stop_gradient(where, collections='memory', unused='ignore'):
                return Writes(name='w')(x)

        def model(self, x):
            return [Do(opens, name=name)(x) for name in 'ab']

        def fn(x):
            return Do(model).apply({}, x, mutable=['memory'])[0]

        return [float(y[0, 0]) for y in jax.jvp(fn, (X,), (jnp.ones_like(X),))[1]]

    cases: list[tuple[Any, list[float]]] = [
        (lambda path: path.absolute.startswith('a/'), [1.0, 3.0]),
        (lambda path: path.absolute.startswith('b/'), [3.0, 1.0]),
        (lambda path: True, [1.0, 1.0]),
        (lambda path: path == 'w/last', [1.0, 1.0]),
        (lambda path: path.module == 'none', [3.0, 3.0]),
    ]
    for where, expected in cases:
        assert scale(where) == expected


class Taps(fnn.Module):
    """Makes a parameter of what it is given, and reads it."""

    @fnn.compact
    def __call__(self, x):
        TRACES.append(None)
        return x + self.param('w', lambda key, x: 2.0 * x, x)


@pytest.mark.parametrize(
    ('where', 'traces', 'gradient'),
    [
        (None, 1, 27.0),
        (True, 1, 1.0),
        (False, 1, 27.0),
        (~filters.as_filter([]), 1, 1.0),
        # A filter of names may tell apart what is made at different paths.
        ('b/w', 3, 9.0),
    ],
)
def test_what_jitted_modules_make_shares_a_trace_unless_names_tell_it_apart(
    where: Any, traces: int, gradient: float
):
    jitted = fnn.jit(Taps)

    def model(self, x):
        for name in 'abc':
            x = jitted(name=name)(x)
        return jnp.sum(x)

    with contextlib.nullcontext() if where is None else nn.stop_gradient(where):
        made = jax.grad(Do(model).init_with_output, argnums=1, has_aux=True)
        found, _ = made(jax.random.key(0), X)
    assert len(TRACES) == traces
    oracle.assert_same(found, jnp.full_like(X, gradient))


@pytest.mark.parametrize('order', ['ab', 'ba'])
def test_one_jitted_closure_in_blocks_of_two_modules(order):
    # The filters are equal and mean another variable in each. What a raw closure reads
    # is read inside of its trace.
    class Part(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            return Encoder(name='enc')(x)

        def run(self, fn, x):
            with nn.stop_gradient('enc/dense/kernel', unused='ignore'):
                return fn(x)

    class Model(fnn.Module):
        wrap: Any

        def setup(self):
            self.a, self.b = Part(), Part()

        def __call__(self, x):
            fn = self.wrap(lambda x: self.a(x))
            return [getattr(self, name).run(fn, x) for name in order]

    params = {'a': {'enc': PARAMS}, 'b': {'enc': PARAMS}}
    for wrap in (jax.jit, scan_once):

        def expected(params, x, wrap=wrap):
            stopped = oracle.stopped(params['a']['enc'], SELECTS['i'])
            copies = {'a': stopped, 'b': params['a']['enc']}
            return [wrap(lambda x, k=k: apply(copies[k], x))(x) for k in order]

        oracle.assert_same_grads(
            lambda p, x, w=wrap: Model(w).apply({'params': p}, x), expected, params, X
        )


class Owned(fnn.Module):
    """A parameter, and a value that is derived from it."""

    def setup(self):
        self.w = self.param('w', fnn.initializers.normal(), (2, 3))
        self.w2 = jnp.tanh(self.w)

    def __call__(self, x):
        return x * self.get_variable('params', 'w')


class Owner(fnn.Module):
    """Opens a block in which another's function is called."""

    def setup(self):
        self.inner = Owned()

    def __call__(self, x):
        return self.inner(x)

    def run(self, block, fn, *args):
        with block:
            return fn(*args)


class Owners(fnn.Module):
    def setup(self):
        self.a, self.b = Owner(), Owner()

    def __call__(self, x):
        return self.a(x) + self.b(x)


def in_a_block_of_its_own(module, x):
    with nn.stop_gradient('none', unused='ignore'):
        return module(x)


# What a raw closure may read a parameter of a bound module by.
RAW_READS: dict[str, Callable[[Any, Any], Any]] = {
    'variable': lambda m, x: m(x),
    'variables': lambda m, x: x * m.variables['params']['w'],
    'kept': lambda m, x: x * m.w2,
    'lifted': lambda m, x: fnn.remat(lambda m, x: m(x))(m, x),
    'in a block of its own': in_a_block_of_its_own,
    # A block around changes what is stored, and not what is read in its place.
    'beside other values': lambda m, x: (
        m(x) + nn.mirror(m, False, variables={'params': {'w': x}})(x)
    ),
}


@pytest.mark.parametrize('read', RAW_READS)
def test_what_a_jitted_closure_reads_belongs_to_one_owner(read):
    """A block at top level is one more: 'inner/w' is nothing from there."""

    def calls(params, x, owners, where_of):
        model = Owners().bind({'params': params})
        fn = jax.jit(lambda x: RAW_READS[read](model.a.inner, x))
        _ = model.a.inner.w2  # Or Flax would leave it in the trace.

        def call(owner):
            block = nn.stop_gradient(where_of(owner), unused='ignore')
            if owner == 't':
                with block:
                    return fn(x)
            return getattr(model, owner).run(block, fn, x)

        return [call(owner) for owner in owners]

    params = oracle.init(Owners(), jax.random.key(0), X)['params']
    for owners in ('ab', 'ta', 'ba', 'at')[: None if read == 'variable' else 2]:

        def grads(where_of, owners=owners):
            forget_contexts()
            return oracle.grads(lambda p, x: calls(p, x, owners, where_of), params, X)

        found = grads(lambda owner: 'inner/w')
        oracle.assert_same(found, grads(lambda owner: owner == 'a'))
        with pytest.raises(AssertionError):
            oracle.assert_same(*found)


def scan_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    def body(x, _):
        return fn(x), None

    return lambda x: lax.scan(body, x, None, length=1)[0]


@dataclasses.dataclass(frozen=True)
class Zeros(rules.Rule):
    """Reads see zeros: a rule that shows in values."""

    name = 'zeros'

    def __call__(self, path, leaf):
        return jnp.zeros_like(leaf)


@pytest.mark.parametrize(
    ('first', 'opens'), [('a', 'before the trace'), ('b', 'in the trace')]
)
def test_two_threads_share_a_jitted_closure(first, opens):
    """The block of the second is open before anybody knows that owners matter."""
    params = oracle.init(Owners(), jax.random.key(0), X)['params']
    model = Owners().bind({'params': params})
    _ = model.a.inner.w, model.b.inner.w
    w = params['a']['inner']['w']
    expected = {'a': X * jnp.zeros_like(w), 'b': X * w}
    second = 'b' if first == 'a' else 'a'
    done = {name: threading.Event() for name in ('traces', 'opened', 'called')}

    def wait_until(name):
        assert done[name].wait(60), name

    @jax.jit
    def fn(x):
        if opens == 'in the trace' and not done['traces'].is_set():
            with blocks.thread.only(()):  # As while a filter is asked.
                done['traces'].set()
                wait_until('opened')
        return model.a.inner(x)

    def leads():
        if opens == 'before the trace':
            done['traces'].set()
            wait_until('opened')
        out = fn(X)
        done['called'].set()
        return out

    def follows():
        done['opened'].set()
        wait_until('called')
        return fn(X)

    def work(i):
        where = filters.as_filter('inner/w')
        block = BlockDecorator(where, Zeros(), unused='ignore')
        if i == 0:
            return getattr(model, first).run(block, leads)
        wait_until('traces')
        return getattr(model, second).run(block, follows)

    forget_contexts()
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip([first, second], pool.map(work, range(2)), strict=True))
    oracle.assert_same(found, expected)


def called(name: str) -> Any:
    return nn.stop_gradient(lambda path: path.name == name)


# Two blocks, and what each makes of the gradients of kernel and bias.
RIVALS: dict[str, list[tuple[Callable[[], Any], tuple[float, float]]]] = {
    'functions of one code': [
        (lambda: called('kernel'), (0.0, 1.0)),
        (lambda: called('bias'), (1.0, 0.0)),
    ],
    'two rules of one filter': [
        (lambda: nn.stop_gradient('dense/kernel'), (0.0, 1.0)),
        (lambda: nn.scale_gradient('dense/kernel', 2.0), (2.0, 1.0)),
    ],
}


@pytest.mark.parametrize('name', RIVALS)
@pytest.mark.parametrize('turned', [False, True])
def test_two_blocks_are_open_before_either_has_read_anything(name, turned):
    """In two threads: neither finds the other's trace."""
    forget_contexts()
    (mine, of_mine), (theirs, of_theirs) = RIVALS[name][:: -1 if turned else 1]
    plain, fn = jax.grad(summed)(PARAMS)['dense'], jax.jit(jax.grad(summed))

    def check(factors: tuple[float, float]) -> None:
        found = fn(PARAMS)['dense']
        for leaf, factor in zip(('kernel', 'bias'), factors, strict=True):
            assert jnp.allclose(found[leaf], factor * plain[leaf])

    with ThreadPoolExecutor(1) as pool, mine():
        block = theirs()
        pool.submit(block.__enter__).result()
        check(of_mine)
        pool.submit(check, of_theirs).result()
        check(of_mine)
        pool.submit(block.__exit__, None, None, None).result()


# Rules that run late, when others have the numbers of their blocks.


def late(reads: Callable[[Any], Any], both: bool = False) -> Callable[[Any], Any]:
    """A function of the parameters whose backward rule reads, alone or as it does."""

    @jax.custom_vjp
    def fn(params):
        return 0.0 * reads(params) if both else jnp.float32(0.0)

    fn.defvjp(
        lambda params: (jnp.float32(0.0), params),
        lambda params, ct: (jax.tree.map(lambda g: ct * g, jax.grad(reads)(params)),),
    )
    return fn


@pytest.mark.parametrize(('jitted', 'of_functions'), [(True, True), (False, False)])
def test_a_late_rule_does_not_use_the_number_of_another_block(jitted, of_functions):
    forget_contexts()

    def stops(name: str) -> Any:
        where = (lambda path: path.name == name) if of_functions else f'**/{name}'
        return nn.stop_gradient(where, unused='ignore')

    reads = jax.jit(summed) if jitted else summed
    rule, cached = late(reads), jax.jit(summed)

    def loss(params: Any) -> Any:
        with stops('other'):
            cached({'dense': {'kernel': jnp.ones((3, 3)), 'bias': jnp.ones(3)}})
        with stops('kernel'):
            one = rule(params)
        with stops('bias'):
            two = cached(params)
        with stops('bias'):
            three = rule(params)
        return one + 10.0 * two + 100.0 * three

    plain = jax.grad(summed)(PARAMS)['dense']
    found = jax.grad(loss)(PARAMS)['dense']
    assert jnp.allclose(found['bias'], plain['bias'])
    assert jnp.allclose(found['kernel'], 110.0 * plain['kernel'])


@pytest.mark.skipif(
    not hasattr(jax.custom_vjp, 'defremat'), reason='this JAX has no defremat'
)
@pytest.mark.parametrize('around', [lambda fn: fn, jax.remat])
def test_the_rules_of_a_rematerialization_run_late_too(around):
    def rule(reads: Any) -> Any:
        fn = jax.custom_vjp(reads)
        fn.defremat(
            lambda params: (reads(params), None),
            lambda kept, params: (reads(params), params),
            lambda params, ct: (
                jax.tree.map(lambda g: ct * g, jax.grad(reads)(params)),
            ),
        )
        return fn

    def loss(params: Any) -> Any:
        with nn.stop_gradient('**/kernel'):
            return around(rule(summed))(params)

    def by_hand(params: Any) -> Any:
        return summed(
            {'dense': {**params['dense'], 'kernel': stop(params['dense']['kernel'])}}
        )

    stop = lax.stop_gradient
    flags = 'jax_custom_vjp3', 'jax_remat3'
    before = [getattr(jax.config, flag) for flag in flags]
    try:
        for flag in flags:
            jax.config.update(flag, True)
        found = jax.jit(jax.grad(loss))(PARAMS)
    finally:
        for flag, value in zip(flags, before, strict=True):
            jax.config.update(flag, value)
    oracle.assert_same(found, jax.jit(jax.grad(by_hand))(PARAMS))


class Pair(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        x = jnp.tanh(fnn.Dense(3, name='body')(x))
        return jnp.tanh(fnn.Dense(3, name='head')(x))


OF_PAIR = oracle.init(Pair(), jax.random.key(0), X)['params']


def pair(params, x):
    return Pair().apply({'params': params}, x)


def applying(primal: Any) -> Any:
    """A function whose rule applies the model; it reads the parameters by hand."""
    out = jax.custom_vjp(primal)
    out.defvjp(
        lambda params, x: jax.vjp(pair, params, x), lambda pull_back, ct: pull_back(ct)
    )
    return out


def fused(params, x):
    body, head = params['body'], params['head']
    x = jnp.tanh(x @ body['kernel'] + body['bias'][None])
    return jnp.tanh(x @ head['kernel'] + head['bias'][None])


OF_NAME = {
    'globs': lambda name: f'{name}/kernel',
    'functions': lambda name: lambda path: path == f'{name}/kernel',
}


@pytest.mark.parametrize('wrap', [jax.jit, jax.checkpoint])
@pytest.mark.parametrize('kind', OF_NAME)
def test_a_rule_reads_what_its_function_does_not(wrap, kind):
    """JAX keeps the function with its rule, so it belongs to the block of the call."""
    fn = wrap(applying(fused))

    def grads(name: str) -> Any:
        @jax.jit
        def loss(params):
            with nn.stop_gradient(OF_NAME[kind](name), unused='ignore'):
                return fn(params, X).sum()

        return jax.grad(loss)(OF_PAIR)

    for name in ('body', 'head', 'body'):
        found = {key: bool(tree['kernel'].any()) for key, tree in grads(name).items()}
        assert found == {'body': name != 'body', 'head': name != 'head'}


def test_two_threads_that_differentiate_one_function():
    """Its rule reopens one block, so one of the threads waits."""
    running: list[int] = []
    most: list[int] = []
    module, x = fnn.Dense(2), jnp.ones((1, 2))
    params = oracle.init(module, jax.random.key(0), x)['params']

    def apply(params: Any) -> Any:
        return module.apply({'params': params}, x)

    def backward(params: Any, ct: Any) -> Any:
        running.append(1)
        time.sleep(0.05)
        most.append(len(running))
        _, pullback = jax.vjp(apply, params)
        running.pop()
        return pullback(ct)

    fn = jax.custom_vjp(apply)
    fn.defvjp(lambda params: (fn(params), params), backward)
    with nn.stop_gradient('kernel'):
        _, pullback = jax.vjp(fn, params)
    with ThreadPoolExecutor(4) as pool:
        for (found,) in pool.map(pullback, [jnp.ones((1, 2))] * 4):
            assert not found['kernel'].any()
            assert found['bias'].all()
    assert most == [1] * 4


# Blocks of several rules share a number until something is read.


@pytest.mark.parametrize('first', ['params', True])
def test_a_lifted_body_is_not_shared_by_blocks_of_other_collections(first):
    """Each block hands its own collections in, and has them written back."""
    forget_contexts()

    class Counts(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            self.variable('state', 'n', lambda: jnp.float32(1.0))
            return x

    jitted = fnn.jit(Counts)

    def model(self, x, collections):
        state = self.variable('state', 'scale', lambda: jnp.float32(2.0))
        with nn.stop_gradient(True, collections=collections):
            x = jitted(name='counts')(x)
        return x * state.value

    variables = oracle.init(Do(model), jax.random.key(0), jnp.ones(2), 'params')

    def loss(state: Any, names: Any) -> Any:
        given, x = {'state': state}, jnp.ones(2)
        y, out = Do(model).apply(given, x, names, mutable=['state'])
        return jnp.sum(y) + out['state']['counts']['n']

    for names in (first, 'params', True, 'params'):
        found = jax.grad(loss)(variables['state'], names)
        assert found == {'scale': 2.0, 'counts': {'n': 1.0}}


def test_blocks_of_several_rules_in_a_model_trace_its_helpers_once():
    forget_contexts()

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def drawn(key, shape, dtype):
        TRACES.append(None)
        return jax.random.normal(key, shape, dtype)

    counted = counting_tanh()

    def layer(self, x):
        return counted(fnn.Dense(3, kernel_init=drawn)(x))

    def model(self, x):
        a, b = Do(layer, name='a'), Do(layer, name='b')
        with nn.stop_gradient('a/**'):
            x = b(a(x))
        with nn.scale_gradient(lambda path: path.startswith('b/'), 2.0):
            x = b(a(x))
        with nn.clip_gradient('a/**', norm=1.0):
            x = b(a(x))
        with nn.stop_gradient('b/**'), nn.stop_gradient('a/**'):
            return jnp.sum(b(a(x)))

    variables = oracle.init(Do(model), jax.random.key(0), X)
    counted.clear_cache()
    # For the shape, Flax traces initializers again: those of ``init`` are in the cache.
    drawn.clear_cache()
    drawn(jax.random.key(0), (3, 3), jnp.float32)
    TRACES.clear()
    jax.jit(jax.grad(lambda v: Do(model).apply(v, X))).trace(variables)
    # A block in another one has a number of its own.
    assert len(TRACES) == 2


def test_an_initializer_that_reads_parameters_through_a_cached_trace():
    def model(self, x):
        self.param('w', fnn.initializers.ones, (3,))
        reads = jax.jit(lambda x: x * self.get_variable('params', 'w'))
        with nn.stop_gradient('w'):
            b = self.param('b', lambda key: reads(x))
            stopped = 2 * reads(x) * b
        return jnp.sum(stopped + reads(x))

    x, params = jnp.arange(1.0, 4), {'w': jnp.ones(3), 'b': jnp.ones(3)}
    grads = jax.grad(lambda p: Do(model).apply({'params': p}, x))(params)
    oracle.assert_same(grads, {'w': x, 'b': 2 * x})


# Bodies that may be handed arrays: a tracer of theirs cannot be read in a helper.
HANDED_ARRAYS: dict[str, Callable[[type], type]] = {
    'scan': lambda cls: fnn.scan(cls, **oracle.SHARED),
    'vmap': lambda cls: fnn.vmap(cls, in_axes=(0, None), **oracle.MAPPED),
    'map_variables': lambda cls: fnn.map_variables(
        cls, 'params', lambda tree: tree, init=True
    ),
}


@pytest.mark.parametrize('lift', HANDED_ARRAYS)
def test_a_helper_in_a_body_reads_what_a_block_brings(lift):
    """JAX keeps the helper, and what it reads is a constant to it."""
    scopes: list[Any] = []

    @jax.jit
    def helper(x):
        return x * scopes[-1].get_variable('params', 'w')

    class Cell(fnn.Module):
        @fnn.compact
        def __call__(self, carry, x):
            self.param('w', fnn.initializers.ones, ())
            scopes.append(self.scope)
            return helper(carry) + jnp.zeros_like(x), None

    model, inputs = HANDED_ARRAYS[lift](Cell)(), (jnp.ones(2), jnp.zeros(2))
    variables = oracle.init(model, jax.random.key(0), *inputs)

    def run() -> Any:
        return jnp.mean(model.apply(variables, *inputs)[0])

    times = 2 if lift == 'scan' else 1
    for w in (2.0, 3.0, 2.0):
        with nn.substitute({'w': jnp.float32(w)}):
            assert run() == w**times
    assert run() == 1.0


def test_a_late_rule_keeps_the_rule_of_its_block():
    """The same variables are meant by a stop, by a factor and by other values."""
    forget_contexts()
    fn = jax.jit(late(summed, both=True))
    plain = jax.grad(summed)(PARAMS)['dense']
    of_others = jax.grad(lambda p: summed(jax.tree.map(jnp.sin, p)))(PARAMS)

    def loss(params: Any, rewrite: Any) -> Any:
        with rewrite:
            return fn(params)

    stop = nn.stop_gradient('dense/kernel', unused='ignore')
    scale = nn.scale_gradient('dense/kernel', 2.0, unused='ignore')
    values = nn.substitute(lambda path, leaf: jnp.sin(leaf))
    for rewrite in (stop, scale, values):
        loss(PARAMS, rewrite)  # Traced, but not its backward rule.
    for rewrite, factor in ((scale, 2.0), (stop, 0.0), (scale, 2.0)):
        found = jax.grad(loss)(PARAMS, rewrite)['dense']
        assert jnp.allclose(found['kernel'], factor * plain['kernel'])
        assert jnp.allclose(found['bias'], plain['bias'])
    chex.assert_trees_all_close(jax.grad(loss)(PARAMS, values), of_others)


def test_a_rule_in_the_body_of_a_scan_reads_what_the_body_was_handed():
    class Cell(fnn.Module):
        @fnn.compact
        def __call__(self, carry, x):
            for name in ('v', 'w'):
                self.param(name, fnn.initializers.constant(2.0), ())

            @jax.custom_vjp
            def scaled(y):
                return y * self.get_variable('params', 'w')

            def backward(_, ct):
                # The function has not read ``v``.
                return (ct * self.get_variable('params', 'v'),)

            scaled.defvjp(lambda y: (scaled(y), None), backward)
            return scaled(carry) + x, None

    lifted = fnn.scan(Cell, **oracle.SHARED)

    def model(self, x):
        cell = lifted(name='cell')
        for name in ('v', 'w', 'v'):
            with nn.stop_gradient(lambda path, name=name: path.name == name):
                x, _ = cell(x, jnp.zeros(2))
        return x

    variables = Do(model).init(jax.random.key(0), jnp.float32(1.0))
    for _ in range(2):
        grad = jax.grad(lambda x: Do(model).apply(variables, x))(jnp.float32(1.0))
        assert grad == 2.0**6


def test_equal_filters_of_two_modules_share_what_is_traced():
    """Or every jitted helper would be traced again for each module of a large model."""
    helper = counting_tanh()

    def opener(self, x):
        with nn.stop_gradient('dense/kernel'):
            return helper(fnn.Dense(3, name='dense')(x))

    def model(self, x):
        return Do(opener, name='b')(Do(opener, name='a')(x))

    Do(model).init(jax.random.key(0), X)
    assert len(TRACES) == 1

"""What a block leaves behind: real writes, with their gradient, and nothing else.

Each program is written once with reads that may be stopped by hand (``see``), and run
with a block and no stops, or with the stops and no block.
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.described.modules import Do
from tests.helpers.oracle import SHARED, assert_same, is_zero
from tests.helpers.stepwise import assert_same_grads, evaluate

X = jnp.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
W = 0.1 * jnp.arange(9.0).reshape(3, 3)
KEY = jax.random.key(3)
stop = jax.lax.stop_gradient


def block(where: Any, on: bool = True, **kwargs: Any) -> Any:
    return nn.stop_gradient(where, **kwargs) if on else contextlib.nullcontext()


def named(out: Any, written: Any) -> dict[str, Any]:
    """What ``apply`` gives, as trees that are differentiated one by one."""
    return {'written': written, **{str(i): y for i, y in enumerate(out)}}


def check(
    make: Callable[[str], nn.Module], variables: Any, mutable: Any = True, **kwargs: Any
) -> None:
    """`make('block')` and `make('hand')` have the same outputs, writes and gradients.

    Keyword arguments are those of `apply`.
    """

    def run(how):
        apply = functools.partial(make(how).apply, mutable=mutable, **kwargs)
        return lambda variables, x: named(*apply(variables, x))

    assert_same_grads(run('block'), run('hand'), variables, X)


# A layer that writes what it has read, in every transform.


class Writer(nn.Module):
    """Reads and writes a memory; reads of `halted` are stopped by hand."""

    pair: bool = False
    all_written: bool = False
    state_stopped: bool = True

    @nn.compact
    def both(self, x, see_w):
        w = self.param('w', nn.initializers.lecun_normal(), (3, 3))
        see = see_w if self.state_stopped else lambda v: v
        memory = self.variable('cache', 'memory', jnp.ones, (2, 3))
        seen = see(memory.value)
        y = seen + x @ see_w(w)
        if not self.all_written:
            y *= see(self.variable('cache', 'other', jnp.ones, (2, 3)).value)
        y = jnp.tanh(y)
        memory.value = 0.5 * seen + y
        again = see(memory.value)
        return (y * again, y + again) if self.pair else y * again

    def __call__(self, x, i):
        return self.both(x, lambda v: v)

    def halted(self, x, i):
        return self.both(x, stop)


METHODS = ('__call__', 'halted')


def lifts(transform: Callable[..., Any], **kwargs: Any) -> Callable[[Any], Any]:
    return lambda writer: transform(writer, methods=METHODS, **kwargs)


def scans(**kwargs: Any) -> Callable[[Any], Any]:
    kwargs = {'split_rngs': {'params': False}, 'methods': METHODS, **kwargs}
    return lambda writer: nn.scan(functools.partial(writer, pair=True), **kwargs)


def shares(collection: str) -> dict[str, Any]:
    """Options of a scan: steps share parameters, and each has a part of the rest."""
    return {**SHARED, 'variable_axes': {collection: 0}}


def calls(fn: Callable[..., Any], **fields: Any) -> Callable[[Any], Any]:
    """A module that calls ``fn(method, writer, x, i)``."""

    def make(writer: Any) -> Any:
        class Calls(nn.Module):
            def setup(self):
                self.writer = writer(**fields)

            def __call__(self, x, i):
                return fn(type(self.writer).__call__, self.writer, x, i)

            def halted(self, x, i):
                return fn(type(self.writer).halted, self.writer, x, i)

        return Calls

    return make


def cond(method, writer, x, i):
    """Branches must not create variables."""
    if writer.is_initializing():
        return method(writer, x, i)

    def twice(writer, x, i):
        return 2 * method(writer, 2 * x, i)

    return nn.cond(jnp.sum(x) > 0, method, twice, writer, x, i)


def custom_vjp(method, writer, x, i):
    def fn(writer, x):
        return method(writer, x, i)

    def forward(writer, x):
        return nn.vjp(fn, writer, x, vjp_variables=both)

    def backward(pull_back, ct):
        variables, x = pull_back(ct)
        return jax.tree.map(jnp.sin, variables), x

    both = ['params', 'cache']
    return nn.custom_vjp(fn, forward, backward, grad_vars=both)(writer, x)


LIFTS: dict[str, Callable[[Any], Any]] = {
    'none': lambda writer: writer,
    'jit': lifts(nn.jit),
    'remat': lifts(nn.remat),
    'scan_stacked': scans(variable_axes={'params': 0, 'cache': 0}),
    'scan_shared': scans(**shares('cache')),
    'scan_carried': scans(variable_broadcast='params', variable_carry='cache'),
    'vmap': lifts(
        nn.vmap,
        variable_axes={'params': None, 'cache': 0},
        split_rngs={'params': False},
        in_axes=(None, 0),
    ),
    'cond': calls(cond),
    'map_variables': lifts(
        nn.map_variables,
        mapped_collections='params',
        trans_in_fn=lambda t: jax.tree.map(jnp.sin, t),
    ),
    'map_cache': lifts(
        nn.map_variables, mapped_collections='cache', init=False, mutable=True
    ),
    # Flax cuts the gradient of variables that pass unchanged through a custom_vjp.
    'custom_vjp': calls(custom_vjp, all_written=True),
}


class Model(nn.Module):
    """Uses a writer before, twice inside and after a block."""

    lift: str
    how: str
    collections: Any = True

    @nn.compact
    def __call__(self, x):
        i = jnp.arange(2) if self.lift.startswith(('scan', 'vmap')) else 0
        writer = functools.partial(Writer, state_stopped=self.collections is True)
        part = LIFTS[self.lift](writer)(name='part')
        halted = part if self.how == 'block' else part.halted

        def see(collection, tree):
            by_hand = self.how == 'hand' and self.collections in (True, collection)
            return jax.tree.map(stop, tree) if by_hand else tree

        before = part(x, i)
        with block('**', self.how == 'block', collections=self.collections):
            one = halted(x, i)
            between = see('cache', self.variables['cache']['part'])
            two = halted(x, i)
            inside = {c: see(c, tree) for c, tree in part.variables.items()}
        stored = part.variables
        return before, one, between, two, inside, dict(stored), part(x, i)


@functools.cache
def variables_of(lift: str) -> Any:
    if lift in ('scan_carried', 'map_variables'):  # Which must not create variables.
        return variables_of('none')
    variables = evaluate(Model(lift, 'block', 'params').init, KEY, X)
    assert_same(variables, evaluate(Model(lift, 'hand', 'params').init, KEY, X))
    # Different values in each, so that the tests can tell them apart.
    return jax.tree.map(
        lambda v: v + 0.1 * jnp.arange(float(v.size)).reshape(v.shape), variables
    )


@pytest.mark.parametrize(
    ('lift', 'mutable'),
    [
        # Flax itself refuses a custom_vjp of parameters that may be written.
        *((lift, lift != 'custom_vjp' or ['cache']) for lift in LIFTS),
        ('scan_stacked', ['cache']),
    ],
    ids=str,
)
def test_real_writes_in_a_lifted_body(lift, mutable):
    """Of what a block around selects they raise; what it leaves out is written."""
    make, variables = functools.partial(Model, lift), variables_of(lift)
    if lift == 'none':
        check(make, variables, mutable=mutable)
    else:
        with pytest.raises(errors.BlockError, match="'memory'"):
            make('block').apply(variables, X, mutable=mutable)
    check(functools.partial(make, collections='params'), variables, mutable=mutable)


# One program for each way of writing: with `see` where a read is in the block, and with
# `self.inside()` where the block is.


class Program(nn.Module):
    how: str

    def see(self, value):
        return value if self.how == 'block' else jax.tree.map(stop, value)

    def inside(self, where='**', collections=True):
        return block(
            where, self.how == 'block', collections=collections, unused='ignore'
        )


CACHE = {
    'a': X,
    'b': jnp.cos(X),
    'pair': (X + 1, jnp.sin(X)),
    'tree': {'k': 2 * X, 'l': 3 * X},
}


def cache(module: nn.Module, name: str) -> Any:
    return module.get_variable('cache', name)


class Sower(nn.Module):
    see: Any = staticmethod(lambda v: v)

    @nn.compact
    def __call__(self, x, *unused):
        w = self.see(self.param('w', nn.initializers.ones, (3, 3)))
        y = jnp.tanh(x @ w)
        self.sow('seen', 'y', y)
        self.sow('seen', 'z', 2 * y)
        return y, y


def sow_in(lift: Callable[[Any], Any]) -> Any:
    class Sows(Program):
        """Appends to what was sown before; what was sown keeps its gradient."""

        @nn.compact
        def __call__(self, x):
            part = lift(functools.partial(Sower, lambda v: v))(name='part')
            halted = part
            if self.how == 'hand':
                # The same scope, so that one appends to what the other has sown.
                again = part.scope.rewound()
                halted = lift(functools.partial(Sower, stop))(parent=again)
            y, _ = part(x, jnp.zeros(2))
            with self.inside():
                halted(x, jnp.zeros(2))
                z, _ = halted(y, jnp.zeros(2))
                inside = self.see(part.variables['seen'])
            part(z, jnp.zeros(2))
            return y, z, inside, part.variables['seen']

    return Sows


class Nested(Program):
    """A write in the inner of two blocks; the outer one sees it with its own rule."""

    @nn.compact
    def __call__(self, x):
        a = self.variable('cache', 'a', jnp.zeros, ())
        b = self.variable('cache', 'b', jnp.zeros, ())
        with self.inside('b'):
            with self.inside('a'):
                a.value = x * self.see(a.value) * self.see(b.value)
                b.value = b.value  # What was read is stored as it was.
                y = self.see(a.value) * self.see(b.value) * x
            b.value = a.value * self.see(b.value)
            z = a.value * self.see(b.value)
        with self.inside(['a', 'b']):
            with self.inside('a'):
                a.value = jnp.sin(x)
            u = self.see(a.value) * self.see(b.value) * x
        return y, z, u, a.value, b.value


PROGRAMS = {
    'sow': sow_in(lambda cls: cls),
    'sow in jit': sow_in(nn.jit),
    'sow in scan': sow_in(lambda cls: nn.scan(cls, **shares('seen'))),
    'nested': Nested,
}


@pytest.mark.parametrize('name', PROGRAMS)
def test_writes(name):
    params = {'dense': {'kernel': W, 'bias': W[0]}, 'part': {'w': W}}
    variables = {'cache': CACHE, 'params': params}
    check(PROGRAMS[name], variables, rngs={'params': KEY})


@pytest.mark.parametrize('lift', [nn.jit, nn.remat])
def test_what_was_sown_before_keeps_its_gradient_where_nothing_is_traced(lift):
    """Then what comes out of a compiled body are new arrays, read or not."""

    def model(self, x):
        part = lift(Sower)(name='part')
        part(x)
        with nn.stop_gradient('**', collections=True):
            part(2 * x)
        return jnp.sum(part.variables['seen']['y'][0])

    def sown(w):
        return Do(model).apply({'params': {'part': {'w': w}}}, X, mutable=['seen'])[0]

    assert_same(jax.grad(sown)(W), jax.grad(lambda w: jnp.sum(jnp.tanh(X @ w)))(W))


@pytest.mark.parametrize('lift', [lambda cls: cls, nn.jit, nn.remat])
def test_what_is_sown_beside_what_was_handed_in_is_stopped_too(lift):
    class Reads(Sower):
        @nn.compact
        def __call__(self, x):
            super().__call__(x)
            *_, last = self.get_variable('seen', 'y')
            return jnp.sum(last)

    def read(w):
        variables = {'params': {'w': w}, 'seen': {'y': (X,)}}
        with nn.stop_gradient('y', collections='seen'):
            return lift(Reads)().apply(variables, X, mutable=['seen'])[0]

    assert is_zero(jax.grad(read)(W))


# Writes of what was read are none, nor are those in another order within one variable.


def swap(module, x):
    module.put_variable('cache', 'a', cache(module, 'a'))
    one, two = cache(module, 'pair')
    module.put_variable('cache', 'pair', (two, one))


def stores_again(module, x):
    """Through two blocks that have both made something of it."""
    with module.inside('a'):
        module.put_variable('cache', 'a', cache(module, 'a'))


def copy_over(module, x):
    """Is a write, of what a reader sees in the block."""
    module.put_variable('cache', 'b', module.see(cache(module, 'a')))
    module.put_variable('other', 'a', module.see(cache(module, 'a')))
    _, two = cache(module, 'pair')
    module.put_variable('cache', 'pair', (module.see(cache(module, 'b')), two))


def grow(module, x):
    module.put_variable('cache', 'pair', (x, *cache(module, 'pair'), jnp.sin(x)))


class Rewriting(Program):
    body: Any

    @nn.compact
    def __call__(self, x):
        with self.inside():
            self.body(self, x)
            y = x * self.see(cache(self, 'a')) * self.see(cache(self, 'pair')[0])
            z = x * self.see(cache(self, 'b')) * self.see(cache(self, 'pair')[0])
        return y, z, cache(self, 'pair'), self.variables


@pytest.mark.parametrize(
    'body', [swap, stores_again, copy_over, grow], ids=lambda fn: fn.__name__
)
def test_writes_of_what_was_read(body):
    check(lambda how: Rewriting(how, body), {'cache': CACHE})


# What a rule must not touch: the new value of these is their gradient.


class Maker(nn.Module):
    """Makes what it is differentiated by, reads it, writes it and reads it again."""

    see: Any

    @nn.compact
    def __call__(self, x, *unused):
        m = self.variable('new', 'm', jnp.sin, x)
        w = self.param('w', lambda key: 0.1 * jnp.ones((3, 3)))
        y = self.see(m.value) * x @ self.see(w)
        m.value = y + self.see(m.value)
        return y * self.see(m.value), self.see(m.value)


MAKERS = {
    'none': lambda cls: cls,
    'vmap': lambda cls: nn.vmap(
        cls,
        variable_axes={'params': 0, 'new': 1},
        split_rngs={'params': True},
        in_axes=(None, 0),
    ),
    'scan': lambda cls: nn.scan(cls, **shares('new')),
    'map_variables': lambda cls: nn.map_variables(cls, 'new', mutable=True),
}


class Making(Program):
    lift: str
    calls: int = 2

    @nn.compact
    def __call__(self, x):
        see = stop if self.how == 'hand' else lambda value: value
        with self.inside():
            part = MAKERS[self.lift](functools.partial(Maker, see))(name='part')
            found = [part(n * x, jnp.zeros(2)) for n in range(1, 1 + self.calls)]
        return *found, self.variables


@pytest.mark.parametrize('lift', MAKERS)
def test_variables_that_are_made_in_a_lifted_body(lift):
    """The first call makes and writes them, the second one finds them."""
    if lift == 'none':
        check(lambda how: Making(how, lift), {}, rngs={'params': KEY})
    else:
        with pytest.raises(errors.BlockError, match="'m' of the collection 'new'"):
            Making('block', lift).apply({}, X, mutable=True, rngs={'params': KEY})
    check(lambda how: Making(how, lift, 1), {}, rngs={'params': KEY})


class Fp8(nn.Module):
    where: Any

    @nn.compact
    def __call__(self, x):
        part = nn.Dense(16, dot_general_cls=nn.Fp8DirectDotGeneralOp, name='part')
        with block(self.where, self.where is not None, collections=True):
            return part(x)


def test_fp8_layers_get_the_new_values_of_their_scales():
    x = jnp.linspace(-1.0, 1.0, 16 * 16).reshape(16, 16)
    variables = oracle.init(Fp8(None), KEY, x)

    def grad(where):
        def loss(variables):
            return jnp.sum(Fp8(where).apply(variables, x) ** 2)

        return jax.jit(jax.grad(loss))(variables)

    plain, blocked = grad(None), grad('**')
    assert is_zero(blocked['params']) and not is_zero(plain['params'])
    assert not is_zero(plain['_overwrite_with_gradient'])
    assert_same(blocked['_overwrite_with_gradient'], plain['_overwrite_with_gradient'])


def test_map_variables_writes_in_init_what_flax_writes():
    """Also where a body has run before, and runs again in a block."""

    class Twice(nn.Module):
        block: Any = contextlib.nullcontext()

        def setup(self):
            self.dense = nn.Dense(2)

        def __call__(self, x):
            mapped = nn.map_variables(
                lambda module, x: module.dense(x),
                'params',
                trans_in_fn=lambda p: jax.tree.map(lambda leaf: leaf * 2.0, p),
                trans_out_fn=lambda p: jax.tree.map(lambda leaf: leaf / 2.0 + 1.0, p),
                init=True,
            )
            y = mapped(self, x)
            with self.block:
                return y + mapped(self, x)

    x, key = jnp.ones((1, 2)), jax.random.key(0)
    for init in (lambda model: model.init, lambda model: jax.jit(model.init)):
        made = init(Twice(nn.stop_gradient('dense/**')))(key, x)
        assert_same(made, init(Twice())(key, x))


def test_what_nobody_selected_comes_out_of_a_transform_as_it_does_without_a_block():
    both = ['base', 'cache']  # Transforms sort them: what may not be written is first.

    def part(module, x):
        return module.get_variable('cache', 'a') + x * module.get_variable('base', 'w')

    def uses(self, x):
        # What this one gives out has no gradient, whatever went in.
        call = nn.custom_vjp(
            part,
            lambda *args: nn.vjp(part, *args, vjp_variables=both),
            lambda pull_back, ct: pull_back(ct),
            grad_vars=both,
        )
        with nn.stop_gradient(['a', 'w'], collections=both):
            y = call(self, x)
        return [y, self.get_variable('cache', 'a'), self.get_variable('cache', 'b')]

    def applied(base, cache, x):
        variables = {'base': base, 'cache': cache}
        return Do(uses).apply(variables, x, mutable=['cache'])[0]

    def by_hand(base, cache, x):
        w, a, b = stop((base['w'], cache['a'], cache['b']))
        return [a + x * w, cache['a'], b]

    def run(fn):
        y, pull_back = jax.vjp(fn, {'w': W}, {'a': W + 1, 'b': W + 2}, 2 * W)
        return y, pull_back([W, 3 * W, 5 * W])

    assert_same(run(applied), run(by_hand))


@pytest.mark.parametrize('spelling', ['hold', 'collections', 'block'])
def test_what_modules_at_two_paths_sow_in_one_jitted_class(spelling):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.Dense(3)(x)
            self.sow('stats', 'y', jnp.sum(y))
            return y

    class Net(nn.Module):
        lift: Any

        @nn.compact
        def __call__(self, x):
            lifted = self.lift(Layer)
            for name in ('a', 'b'):
                layer = lifted(name=name)
                if spelling == 'hold':
                    layer = nn.Frozen(layer, state='hold')
                if spelling == 'collections':
                    layer = nn.Frozen(layer, collections=True)
                x = layer(x)
            return x

    block = nn.stop_gradient(True, collections=True)
    variables = oracle.init(Net(lambda layer: layer), KEY, X)
    out = []
    for lift in (lambda layer: layer, nn.jit):
        with block if spelling == 'block' else contextlib.nullcontext():
            out.append(Net(lift).apply(variables, X, mutable='stats')[1])
    assert_same(*out)
    assert [len(out[1]['stats'][name]['y']) for name in ('a', 'b')] == [2, 2]


def test_a_rule_that_runs_in_another_thread_forgets_no_block_of_this_one():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))

    def net(self, x):
        state = self.variable('state', 's', lambda: x)
        with nn.stop_gradient('s', collections='state'):
            value = state.value
            _, back = jax.vjp(double, x)
            thread = threading.Thread(target=back, args=(x,))
            thread.start()
            thread.join()
            state.value = value  # What was read is what is stored.
        return jnp.sum(state.value * x)

    def loss(state):
        return Do(net).apply({'state': state}, X, mutable='state')[0]

    assert_same(jax.jit(jax.grad(loss))({'s': X}), {'s': X})

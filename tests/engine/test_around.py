"""JAX's transforms and Flax's tools around a block, and a block around them.

Compared with the same transform of plain Flax on copies of the weights that were
stopped by hand.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from flax_sg import linen as nn
from oracle import assert_same, stopped
from stepwise import assert_same_grads, evaluate, flat

X = jnp.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
W = 0.1 * jnp.arange(9.0).reshape(3, 3)
PARAMS = {
    'body': {'kernel': W, 'bias': W[0]},
    'head': {'kernel': jnp.cos(W), 'bias': jnp.sin(W[1])},
}
KEY = jax.random.key(5)
WHERE = ['body/**', 'head/bias']


def selected(path: str) -> bool:
    return path.startswith('body/') or path == 'head/bias'


class Net(nn.Module):
    """Uses its layers one after the other; 'block' opens a block around them."""

    where: Any = None

    @nn.compact
    def __call__(self, x):
        with nn.stop_gradient(self.where) if self.where else contextlib.nullcontext():
            x = jnp.tanh(nn.Dense(3, name='body')(x))
            x = checkpoint_name(x, 'hidden')
            return jnp.tanh(nn.Dense(3, name='head')(x))


def plain(params, x):
    return Net().apply({'params': params}, x)


def by_hand(params, x):
    return plain(stopped(params, selected), x)


def block_around(params, x):
    with nn.stop_gradient(WHERE):
        return plain(params, x)


def block_within(params, x):
    return Net(tuple(WHERE)).apply({'params': params}, x)


# A transform of a function of params and x, to another one, or to a tree of outputs.


def tangents(*primals: Any) -> Any:
    return jax.lax.stop_gradient(jax.tree.map(jnp.cos, primals))


def custom_vjp(fn: Any) -> Any:
    wrapped = jax.custom_vjp(fn)
    wrapped.defvjp(
        lambda *args: jax.vjp(fn, *args), lambda pull_back, ct: pull_back(ct)
    )
    return wrapped


def custom_jvp(fn: Any) -> Any:
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return wrapped


def scan_over_params(fn: Any) -> Any:
    def step(x, params):
        return fn(params, x), x

    def wrapped(params, x):
        stack = jax.tree.map(lambda p: jnp.stack([p, jnp.sin(p)]), params)
        return jax.lax.scan(step, x, stack)

    return wrapped


def scan_closed_over(fn: Any) -> Any:
    return lambda params, x: jax.lax.scan(
        lambda x, _: (fn(params, x), None), x, None, length=2
    )[0]


def hessian(fn: Any) -> Any:
    def scalar(kernel, params, x):
        params = {**params, 'body': {**params['body'], 'kernel': kernel}}
        return jnp.sum(fn(params, x) ** 2)

    return lambda params, x: jax.hessian(scalar)(params['body']['kernel'], params, x)


def grad_penalty(fn: Any) -> Any:
    """The gradient of a loss with the gradient of x in it."""

    def penalty(params, x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(fn(params, x)))(x) ** 2)

    return jax.grad(penalty, argnums=(0, 1))


def checkpoints(policy: Any = None, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda fn: jax.checkpoint(fn, policy=policy, **kwargs)


def shard_mapped(fn: Any) -> Any:
    mesh = jax.make_mesh((1,), ('i',))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=(spec, spec), out_specs=spec)


policies = jax.checkpoint_policies
AROUND: dict[str, Callable[[Any], Any]] = {
    'jit': jax.jit,
    'checkpoint': checkpoints(),
    'checkpoint_names': checkpoints(policies.save_only_these_names('hidden')),
    'vmap_params': lambda fn: (
        lambda params, x: jax.vmap(fn, (0, None))(
            jax.tree.map(lambda p: jnp.stack([p, jnp.sin(p)]), params), x
        )
    ),
    'vmap_of_jit': lambda fn: jax.vmap(jax.jit(fn), (None, 0)),
    'scan_over_params': scan_over_params,
    'scan_closed_over': scan_closed_over,
    'cond': lambda fn: (
        lambda params, x: jax.lax.cond(
            jnp.sum(x) > 0, fn, lambda params, x: 2 * fn(params, x), params, x
        )
    ),
    'fori_loop': lambda fn: (
        lambda params, x: jax.lax.fori_loop(0, 2, lambda i, x: fn(params, x), x)
    ),
    'jvp': lambda fn: lambda *args: jax.jvp(fn, args, tangents(*args)),
    'hessian': hessian,
    'grad_penalty': grad_penalty,
    'custom_vjp': custom_vjp,
    'custom_jvp': custom_jvp,
    'shard_map': shard_mapped,
    'jit_of_grad_of_scan': lambda fn: jax.jit(
        jax.grad(lambda *args: jnp.sum(scan_closed_over(fn)(*args)), argnums=(0, 1))
    ),
}


# Those that ``test_caches`` does not call in and out of blocks.
@pytest.mark.parametrize(
    'name',
    [
        *('checkpoint_names', 'vmap_params', 'scan_over_params', 'cond', 'jvp'),
        *('hessian', 'custom_jvp', 'shard_map', 'jit_of_grad_of_scan'),
    ],
)
def test_a_block_around_a_transform(name):
    transform = AROUND[name]
    # Made once, so that what is traced outside may be kept for inside, and so on.
    transformed = transform(plain)

    def actual(params, x):
        before = transformed(params, x)
        with nn.stop_gradient(WHERE):
            inside = transformed(params, x)
        return {'before': before, 'inside': inside, 'after': transformed(params, x)}

    def expected(params, x):
        live = transform(plain)
        return {
            'before': live(params, x),
            'inside': transform(by_hand)(params, x),
            'after': live(params, x),
        }

    assert_same_grads(actual, expected, PARAMS, X)


@pytest.mark.parametrize('name', AROUND)
def test_a_transform_around_a_block(name):
    def out(fn):
        return lambda params, x: {'out': AROUND[name](fn)(params, x)}

    assert_same_grads(out(block_within), out(by_hand), PARAMS, X)


def test_while_loop():
    def loop(fn):
        def wrapped(params, x):
            return jax.lax.while_loop(
                lambda carry: carry[0] < 2,
                lambda carry: (carry[0] + 1, fn(params, carry[1])),
                (0, x),
            )

        return lambda *args: jax.jvp(wrapped, args, tangents(*args))

    def inside(params, x):
        with nn.stop_gradient(WHERE):
            return loop(plain)(params, x)

    expected = evaluate(loop(by_hand), PARAMS, X)
    for actual in (inside, loop(block_around), loop(block_within)):
        assert_same(evaluate(actual, PARAMS, X), expected)


# Derivatives that were taken in a block and are used after it.


# Compiling ahead of time.


def scalar(fn):
    return lambda params, x: jnp.sum(jnp.sin(fn(params, x)))


@pytest.mark.parametrize('fn', [block_around, block_within])
def test_lowered_and_compiled(fn):
    compiled = jax.jit(jax.grad(scalar(fn))).lower(PARAMS, X).compile()
    expected = jax.jit(jax.grad(scalar(by_hand))).lower(PARAMS, X).compile()
    assert_same(compiled(PARAMS, X), expected(PARAMS, X))
    with nn.stop_gradient(True):  # A compiled program reads nothing any more.
        assert_same(compiled(PARAMS, X), expected(PARAMS, X))


def test_export():
    def exported(fn):
        return jax.export.export(jax.jit(fn))(PARAMS, X).call

    def grad(fn):
        return jax.grad(scalar(fn), argnums=(0, 1))(PARAMS, X)

    assert_same(grad(exported(block_within)), grad(exported(by_hand)))
    with nn.stop_gradient(WHERE):
        in_a_block = exported(plain)
    assert_same(grad(in_a_block), grad(exported(by_hand)))


@pytest.mark.parametrize('fn', [block_around, block_within])
def test_with_jit_disabled(fn):
    with jax.disable_jit():
        actual = jax.grad(scalar(fn), argnums=(0, 1))(PARAMS, X)
        assert_same(actual, jax.grad(scalar(by_hand), argnums=(0, 1))(PARAMS, X))


# Looking at a model.


class Perturbed(nn.Module):
    how: str

    @nn.compact
    def __call__(self, x):
        part = nn.Dense(3, name='body')
        with (
            nn.stop_gradient(True) if self.how == 'block' else contextlib.nullcontext()
        ):
            y = self.perturb('y', jnp.tanh(part(x)))
            return self.perturb('z', y * x)


def test_perturb():
    def fn(how):
        def perturbed(variables, x):
            params = variables['params']
            params = stopped(params) if how == 'hand' else params
            return {'out': Perturbed(how).apply({**variables, 'params': params}, x)}

        return perturbed

    variables = Perturbed('block').init(KEY, X)
    assert_same(variables, Perturbed('hand').init(KEY, X))
    assert_same_grads(fn('block'), fn('hand'), variables, X)


def test_intercept_methods():
    """Interceptors may open blocks themselves."""

    def halt(next_fun, args, kwargs, context):
        if context.method_name != '__call__' or context.module.path != ('body',):
            return next_fun(*args, **kwargs)
        with nn.stop_gradient('**'):
            return next_fun(*args, **kwargs)

    def halted(params, x):
        with nn.intercept_methods(halt):
            return {'out': plain(params, x)}

    def expected(params, x):
        return {'out': plain(stopped(params, lambda path: path.startswith('body/')), x)}

    assert_same_grads(halted, expected, PARAMS, X)


# Raw transforms of JAX in a method: their functions close over the module.


class Raw(nn.Module):
    """Reads a weight inside a closure and outside of it, in a given order."""

    raw: Any
    read: str
    first: str
    how: str

    def setup(self):
        self.kept = self.param('w', nn.initializers.ones, (3, 3))
        self.held = self.variable('params', 'v', jnp.ones, (3, 3))

    def see(self, value):
        return jax.lax.stop_gradient(value) if self.how == 'hand' else value

    def weight(self):
        if self.read == 'get_variable':
            return self.see(self.get_variable('params', 'w'))
        if self.read == 'variables':
            return self.see(self.variables['params']['w'])
        if self.read == 'Variable':
            return self.see(self.held.value)
        return self.see(self.kept)

    def __call__(self, x):
        def closure(x):
            return jnp.tanh(x @ self.weight())

        with nn.stop_gradient('*') if self.how == 'block' else contextlib.nullcontext():
            outside = closure(x) if self.first == 'outside' else None
            inside = self.raw(closure, x)
            if outside is None:
                outside = closure(x)
            again = self.raw(closure, 2 * x)
        after = self.get_variable('params', 'w'), self.held.value, self.kept
        return {'outside': outside, 'inside': inside, 'again': again, 'after': after}


RAW = {
    'scan': lambda fn, x: jax.lax.scan(lambda x, _: (fn(x), x), x, None, length=2),
    'checkpoint': lambda fn, x: jax.checkpoint(fn)(x),
    'jit': lambda fn, x: jax.jit(fn)(x),
    'vmap': lambda fn, x: jax.vmap(fn)(x),
    'cond': lambda fn, x: jax.lax.cond(jnp.sum(x) > 0, fn, jnp.sin, x),
    'fori_loop': lambda fn, x: jax.lax.fori_loop(0, 2, lambda i, x: fn(x), x),
    'grad': lambda fn, x: jax.grad(lambda x: jnp.sum(fn(x)))(x),
    'jit_of_grad_of_scan': lambda fn, x: jax.jit(
        jax.grad(
            lambda x: jnp.sum(
                jax.lax.scan(lambda x, _: (fn(x), None), x, None, length=2)[0]
            )
        )
    )(x),
    'shard_map': lambda fn, x: shard_mapped(lambda _, x: fn(x))(x, x),
}
READS = ['get_variable', 'variables', 'Variable', 'attribute']


@pytest.mark.parametrize(
    ('raw', 'read', 'first'),
    [
        *((raw, 'get_variable', 'inside') for raw in RAW),
        *((raw, 'get_variable', 'outside') for raw in ('scan', 'jit')),
        *(('scan', read, 'inside') for read in READS[1:]),
        *(('grad', read, 'outside') for read in READS[1:]),
    ],
)
def test_a_raw_transform_that_closes_over_the_module(raw, read, first):
    def fn(how):
        model = Raw(RAW[raw], read, first, how)
        return lambda params, x: model.apply({'params': params}, x)

    assert_same_grads(fn('block'), fn('hand'), {'w': W, 'v': jnp.cos(W)}, X)


@pytest.mark.usefixtures('leaks')
@pytest.mark.parametrize(('raw', 'read'), [('scan', 'Variable'), ('grad', 'attribute')])
def test_no_tracer_of_a_raw_transform_escapes(raw, read):
    model = Raw(RAW[raw], read, 'inside', 'block')

    def loss(params, x):
        return jnp.sum(flat(model.apply({'params': params}, x)))

    jax.eval_shape(jax.grad(loss), {'w': W, 'v': W}, X)


@pytest.mark.usefixtures('leaks')
def test_no_tracer_is_kept():
    transformed = AROUND['vmap_of_jit'](block_within)

    def loss(params, x):
        with nn.stop_gradient(True):
            return jnp.sum(flat(transformed(params, x)))

    jax.eval_shape(jax.grad(loss), PARAMS, X)

"""JAX's transforms and Flax's tools around a block, and a block around them.

Compared with the same transform of plain Flax on copies of the weights that were
stopped by hand.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.linen as fnn
import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from flax_sg import linen as nn
from oracle import assert_same, stopped
from stepwise import assert_same_grads, evaluate

X = jnp.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.75]])
W = 0.1 * jnp.arange(9.0).reshape(3, 3)
PARAMS = {
    'body': {'kernel': W, 'bias': W[0]},
    'head': {'kernel': jnp.cos(W), 'bias': jnp.sin(W[1])},
}
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


def shard_mapped(fn: Any) -> Any:
    mesh = jax.make_mesh((1,), ('i',))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=(spec, spec), out_specs=spec)


NAMED = jax.checkpoint_policies.save_only_these_names('hidden')
AROUND: dict[str, Callable[[Any], Any]] = {
    'jit': jax.jit,
    'checkpoint_names': functools.partial(jax.checkpoint, policy=NAMED),
    'checkpoint_of_jit': lambda fn: jax.checkpoint(jax.jit(fn)),
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
    'custom_gradient': lambda fn: jax.custom_gradient(functools.partial(jax.vjp, fn)),
    'shard_map': shard_mapped,
    'jit_of_grad_of_scan': lambda fn: jax.jit(
        jax.grad(lambda *args: jnp.sum(scan_closed_over(fn)(*args)), argnums=(0, 1))
    ),
}


# ``test_caches`` calls these in and out of blocks.


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

        return AROUND['jvp'](wrapped)

    def inside(params, x):
        with nn.stop_gradient(WHERE):
            return loop(plain)(params, x)

    expected = evaluate(loop(by_hand), PARAMS, X)
    for actual in (inside, loop(block_around), loop(block_within)):
        assert_same(evaluate(actual, PARAMS, X), expected)


# Compiling ahead of time.


def scalar(fn):
    return lambda params, x: jnp.sum(jnp.sin(fn(params, x)))


def grad(fn):
    return jax.grad(scalar(fn), argnums=(0, 1))(PARAMS, X)


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

    assert_same(grad(exported(block_within)), grad(exported(by_hand)))
    with nn.stop_gradient(WHERE):
        in_a_block = exported(plain)
    assert_same(grad(in_a_block), grad(exported(by_hand)))


def test_with_jit_disabled():
    with jax.disable_jit():
        assert_same(grad(block_within), grad(by_hand))


def test_two_threads_that_differentiate_one_function():
    """Its rule reopens one block, so one of the threads waits."""
    running: list[int] = []
    most: list[int] = []
    module, x = fnn.Dense(2), jnp.ones((1, 2))
    params = module.init(jax.random.key(0), x)['params']

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


# Rules that run late.


def ruled(primal: Any) -> Any:
    """A function whose rule applies the model; it reads the parameters by hand."""
    out = jax.custom_vjp(primal)
    out.defvjp(
        lambda params, x: jax.vjp(plain, params, x), lambda pull_back, ct: pull_back(ct)
    )
    return out


def fused(params, x):
    body, head = params['body'], params['head']
    x = jnp.tanh(x @ body['kernel'] + body['bias'][None])
    return jnp.tanh(x @ head['kernel'] + head['bias'][None])


FILTERS = {
    'globs': lambda name: f'{name}/kernel',
    'functions': lambda name: lambda path: path == f'{name}/kernel',
}


@pytest.mark.parametrize('wrap', [jax.jit, jax.checkpoint])
@pytest.mark.parametrize('kind', FILTERS)
def test_a_rule_reads_what_its_function_does_not(wrap, kind):
    """JAX keeps the function with its rule, so it belongs to the block of the call."""
    fn = wrap(ruled(fused))

    def grads(name: str) -> Any:
        @jax.jit
        def loss(params):
            with nn.stop_gradient(FILTERS[kind](name), unused='ignore'):
                return fn(params, X).sum()

        return jax.grad(loss)(PARAMS)

    for name in ('body', 'head', 'body'):
        found = {key: bool(tree['kernel'].any()) for key, tree in grads(name).items()}
        assert found == {'body': name != 'body', 'head': name != 'head'}


def test_a_rule_of_the_user_for_a_function_of_jax():
    dense = nn.Dense(3, use_bias=False)

    def by_flax(x, kernel):
        return dense.apply({'params': {'kernel': kernel}}, x)

    fn = jax.custom_vjp(jnp.matmul)
    fn.defvjp(
        lambda *args: jax.vjp(by_flax, *args), lambda pull_back, ct: pull_back(ct)
    )

    def loss(kernel):
        with nn.stop_gradient('kernel', unused='ignore'):
            return fn(X, kernel).sum()

    assert not jax.grad(jax.jit(loss))(W).any()

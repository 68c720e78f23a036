"""Variables that a module reads and applies again, as a function, under another root.

The first answer holds: what passed a block once passes it again. Where JAX gives other
objects to the function, and the second answer would matter, the block says so.
"""

import contextlib
import types
from collections.abc import Callable
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

import oracle
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.engine import rereads

pytestmark = pytest.mark.every_case

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)
AGAIN = fnn.Dense(2, parent=None)
PARAMS = {'a': AGAIN.init(jax.random.key(0), X)['params']}


def apply(variables: Any, x: jax.Array) -> jax.Array:
    return AGAIN.apply(variables, x)  # type: ignore[return-value]


def _unbound(dense: Any, x: jax.Array) -> Any:
    module, variables = dense.unbind()
    return module.apply(variables, x)


def _bound(dense: Any, x: jax.Array) -> Any:
    module, variables = dense.unbind()
    return module.bind(variables)(x)


# The objects are those that the module read.
KNOWN: dict[str, Callable[[Any, jax.Array], Any]] = {
    'apply': lambda d, x: apply(d.variables, x),
    'unbind': _unbound,
    'bind': _bound,
    'vmap': lambda d, x: jax.vmap(lambda row: apply(d.variables, row))(x),
    'scan of a constant': lambda d, x: jax.lax.scan(
        lambda c, _: (apply(d.variables, c), None), x, None, length=2
    )[0],
    'jit of a constant': lambda d, x: jax.jit(lambda x: apply(d.variables, x))(x),
}
# JAX hands other objects to the function.
TRACED: dict[str, Callable[[Any, jax.Array], Any]] = {
    'jit': lambda d, x: jax.jit(apply)(d.variables, x),
    'checkpoint': lambda d, x: jax.checkpoint(apply)(d.variables, x),
    'cond': lambda d, x: jax.lax.cond(True, apply, lambda _, x: x, d.variables, x),
    'shard_map': lambda d, x: jax.shard_map(
        apply,
        mesh=jax.make_mesh((1,), ('data',)),
        in_specs=jax.sharding.PartitionSpec(),
        out_specs=jax.sharding.PartitionSpec(),
    )(d.variables, x),
    'carry of a scan': lambda d, x: jax.lax.scan(
        lambda c, _: ((c[0], apply(*c)), None), (d.variables, x), None, length=2
    )[0][1],
}


NO_BLOCK = contextlib.nullcontext()


class Outer(fnn.Module):
    form: Callable[[Any, jax.Array], Any]
    block: Any = NO_BLOCK

    @fnn.compact
    def __call__(self, x):
        dense = fnn.Dense(2, name='a')
        y = dense(x)
        with self.block:
            return self.form(dense, y) + y


def loss(form: Any, params: Any, block: Any = NO_BLOCK) -> Any:
    return jnp.sum(Outer(form, block).apply({'params': params}, X) ** 2)


def grad(form: Any, block: Any = NO_BLOCK, around: Any = NO_BLOCK) -> Any:
    """The gradient with a block in the module, or with one around it."""
    with around:
        return jax.grad(lambda p: loss(form, p, block))(PARAMS)


def by_hand(form: Any, scale: float, first: float) -> Any:
    """The gradient with the kernel scaled: in the first use, and in the second."""

    def scaled(kernel: Any, factor: float) -> Any:
        return factor * kernel + jax.lax.stop_gradient((1 - factor) * kernel)

    class ByHand(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            kernel = self.get_variable('params', 'a')['kernel']
            bias = self.get_variable('params', 'a')['bias']
            one = {'kernel': scaled(kernel, first), 'bias': bias}
            y = apply({'params': one}, x)

            other = {'params': {'kernel': scaled(kernel, scale), 'bias': bias}}
            read = types.SimpleNamespace(variables=other, unbind=lambda: (AGAIN, other))
            return form(read, y) + y

    return jax.grad(lambda p: jnp.sum(ByHand().apply({'params': p}, X) ** 2))(PARAMS)


def close(found: Any, expected: Any) -> None:
    """Equal but for the rounding of ``scaled``, with the same zeros."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert bool(jnp.allclose(a, b, rtol=1e-5))
        assert bool(jnp.all((a == 0) == (b == 0)))


@pytest.mark.parametrize('form', KNOWN)
def test_the_first_answer_holds(form):
    fn = KNOWN[form]
    plain = grad(fn)
    for block in (nn.train_only('a/**'), nn.stop_gradient('b', unused='ignore')):
        oracle.assert_same(grad(fn, around=block), plain)  # Nothing of it is stopped.
    with pytest.warns(errors.NothingStoppedWarning):
        oracle.assert_same(grad(fn, around=nn.stop_gradient('kernel')), plain)
    close(grad(fn, around=nn.stop_gradient('a/kernel')), by_hand(fn, 0.0, 0.0))
    for where in ('a/kernel', ['a/kernel', 'kernel'], '**/kernel'):
        found = grad(fn, around=nn.reverse_gradient(where, 1.0))
        close(found, by_hand(fn, -1.0, -1.0))
    # A block of the module.
    found = grad(fn, nn.reverse_gradient('**/kernel', 1.0))
    close(found, by_hand(fn, -1.0, 1.0))
    oracle.assert_same(grad(fn, nn.train_only('a/**')), plain)


@pytest.mark.parametrize('form', ['apply', 'jit of a constant'])
def test_arrays(form, monkeypatch):
    monkeypatch.setattr(rereads, '_MANY', 2)  # Few are remembered without a look.
    with nn.stop_gradient('a/kernel'):
        oracle.assert_same(loss(KNOWN[form], PARAMS), loss(KNOWN[form], PARAMS))
    with nn.substitute(lambda path, value: 2 * value, where='a/**'):
        doubled = loss(KNOWN[form], PARAMS)
    twice = jax.tree.map(lambda w: 2 * w, PARAMS)
    oracle.assert_same(doubled, loss(KNOWN[form], twice))


@pytest.mark.parametrize('form', TRACED)
def test_in_a_trace_the_block_says_so(form):
    fn = TRACED[form]
    for block in (
        nn.train_only('a/**'),
        nn.stop_gradient('kernel'),
        nn.reverse_gradient('**/kernel', 1.0),
        nn.substitute(lambda path, value: 2 * value),
    ):
        with pytest.raises(errors.BlockError, match="may be 'a/"):
            grad(fn, around=block)
    # Both answers are the same, or nothing is left to stop.
    for where in ('a/kernel', ['a/kernel', 'kernel']):
        close(grad(fn, around=nn.stop_gradient(where)), by_hand(fn, 0.0, 0.0))


def test_a_part_of_the_tree_in_a_trace():
    class Deep(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            fnn.Dense(2, name='a')(x)
            part = {'params': self.variables['params']['a']}
            return jax.jit(apply)(part, x)

    with pytest.raises(errors.BlockError), nn.train_only('a/**'):
        jax.grad(lambda p: jnp.sum(Deep().apply({'params': p}, X)))(PARAMS)


def test_other_values_of_the_same_names_are_other_variables():
    other = {'params': {name: 2 * value for name, value in PARAMS['a'].items()}}

    class Two(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            return fnn.Dense(2, name='a')(x) + jax.jit(apply)(other, x)

    with nn.train_only('a/**'):
        found = jax.grad(lambda p: jnp.sum(Two().apply({'params': p}, X)))(PARAMS)
    plain = jax.grad(lambda p: jnp.sum(apply({'params': p['a']}, X)))(PARAMS)
    oracle.assert_same(found, plain)


def test_two_calls_at_top_level_with_one_array_are_two_trees():
    def both(params: Any) -> Any:
        class Sub(fnn.Module):
            @fnn.compact
            def __call__(self, x):
                y = fnn.Dense(2, name='a')(x)
                return y + sum(map(jnp.sum, jax.tree.leaves(self.variables))) * 0.0

        y = Sub().apply({'params': params}, X)
        return jnp.sum(y) + jnp.sum(apply({'params': params['a']}, X))

    with nn.stop_gradient('kernel'):
        found = jax.grad(both)(PARAMS)
    once = jax.grad(lambda p: jnp.sum(apply({'params': p['a']}, X)))(PARAMS)
    oracle.assert_same(found['a']['kernel'], once['a']['kernel'])

"""``nn.copy_cotangent`` from a parameter that is stopped, or not differentiated.

By hand: each use of a parameter in the block is an argument of its own. A target gets
the derivative with respect to the uses of its source, whatever the source is.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import chex
import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.turns import in_turn

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


class Net(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        hidden = jnp.tanh(fnn.Dense(3, name='a')(x))
        return jnp.sum(fnn.Dense(3, name='b')(hidden) ** 2 * x)


PARAMS = oracle.init(Net(), jax.random.key(0), X)['params']
A, B = PARAMS['a'], PARAMS['b']


def plain(a: Any, b: Any) -> Any:
    return Net().apply({'params': {'a': a, 'b': b}}, X)


def assert_close(actual: Any, expected: Any) -> None:
    # Compiled programs are fused otherwise.
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


def copied(add: bool = False) -> Any:
    return nn.copy_cotangent({'a/bias': 'b/bias'}, add=add)


def in_blocks(*blocks: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    def run(a: Any, b: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for block in blocks:
                stack.enter_context(block())
            return plain(a, b)

    return run


def on_tree(a: Any, b: Any) -> Any:
    tree = sg.rewrite({'a': a, 'b': jax.lax.stop_gradient(b)}, copied())
    return plain(**tree)


def in_wrapper(a: Any, b: Any) -> Any:
    frozen = nn.Frozen(Net(), 'b/**')
    with copied():
        return frozen.apply({'params': {'a': a, 'b': b}}, X)


def in_remat(a: Any, b: Any) -> Any:
    with copied():
        return fnn.remat(Net)().apply(
            {'params': {'a': a, 'b': jax.lax.stop_gradient(b)}}, X
        )


def stopped(rule: Callable[[], Any]) -> dict[str, Callable[[Any, Any], Any]]:
    """Ways in which something else is stopped outside of the block of a rule."""
    return {
        'a block around': in_blocks(lambda: nn.stop_gradient('b/**'), rule),
        'train_only around': in_blocks(lambda: nn.train_only('a/**'), rule),
        'in the tree': lambda a, b: in_blocks(rule)(a, jax.lax.stop_gradient(b)),
    }


# How the source is stopped, or nothing.
WAYS: dict[str, Callable[[Any, Any], Any]] = {
    'differentiated': in_blocks(copied),
    **stopped(copied),
    'the same values around': in_blocks(
        lambda: nn.substitute(lambda path, value: value, where='b/**'), copied
    ),
    'other values around': in_blocks(
        lambda: nn.substitute({'b': jax.tree.map(jnp.asarray, B)}), copied
    ),
    'of a tree': on_tree,
    'remat': in_remat,
}


def gradient(fn: Any) -> Any:
    """Of the target alone: the source is a constant."""
    return jax.grad(fn)


def of_both(fn: Any) -> Any:
    return lambda a, b: jax.grad(fn, (0, 1))(a, b)[0]


RUNS: dict[str, Callable[[Any], Callable[[Any, Any], Any]]] = {
    'eager, both': of_both,
    'eager': gradient,
    'jit': lambda fn: jax.jit(gradient(fn)),
    'jit, both': lambda fn: jax.jit(of_both(fn)),
    'jit, closed over': lambda fn: (
        lambda a, b: jax.jit(jax.grad(lambda a: fn(a, b)))(a)
    ),
    'jit inside': lambda fn: gradient(jax.jit(fn)),
    'checkpoint': lambda fn: gradient(jax.checkpoint(fn)),
}


def by_hand(a: Any, b: Any) -> Any:
    """The gradients of both, with the bias of the one in the place of the other's."""
    of_a, of_b = jax.grad(plain, (0, 1))(a, b)
    return {**of_a, 'bias': of_b['bias']}


@pytest.mark.parametrize(('way', 'run'), in_turn(WAYS, RUNS, times=3))
def test_the_copy_is_of_what_the_uses_of_the_source_get(way, run):
    assert_close(RUNS[run](WAYS[way])(A, B), by_hand(A, B))


@pytest.mark.parametrize(('way', 'around'), in_turn(WAYS, [lambda f: f, jax.jit]))
def test_second_derivatives_are_those_of_what_was_copied(way, around):
    found = around(jax.jacfwd(jax.grad(WAYS[way])))(A, B)
    expected = jax.jacfwd(by_hand)(A, B)
    assert_close(found, expected)


@pytest.mark.parametrize('around', [lambda f: f, jax.jit])
def test_a_stop_inside_leaves_nothing_to_copy(around):
    """The rules of inner blocks come first."""
    for inner in (lambda: nn.stop_gradient('b/**'), lambda: nn.stop_gradient(True)):
        found = around(gradient(in_blocks(copied, inner)))(A, B)
        assert oracle.is_zero(found['bias'])
    found = around(gradient(in_wrapper))(A, B)
    assert oracle.is_zero(found['bias'])


@pytest.mark.parametrize('around', [lambda f: f, jax.jit])
def test_a_swap_and_a_sum_with_what_is_not_differentiated(around):
    of_a, of_b = jax.grad(plain, (0, 1))(A, B)
    swap = lambda: nn.copy_cotangent({'a/bias': 'b/bias', 'b/bias': 'a/bias'})  # noqa: E731
    assert_close(
        around(gradient(in_blocks(swap)))(A, B), {**of_a, 'bias': of_b['bias']}
    )
    added = around(gradient(in_blocks(lambda: copied(add=True))))(A, B)
    assert_close(added, {**of_a, 'bias': of_a['bias'] + of_b['bias']})


def test_where_nothing_is_differentiated_the_values_stay_what_they_are():
    """In forward mode, too, of something else."""
    assert in_blocks(copied)(A, B) == plain(A, B)
    stored = {'a': {'bias': jnp.ones(2)}, 'b': {'bias': jnp.ones(2)}}
    assert sg.rewrite(stored, copied())['a']['bias'] is stored['a']['bias']
    shapes = jax.eval_shape(lambda: stored)
    assert sg.rewrite(shapes, copied()) == shapes

    def of_input(fn: Any) -> Any:
        def run(x: Any) -> Any:
            with fn():
                return Net().apply({'params': PARAMS}, x)

        return jax.jvp(run, (X,), (X,))

    oracle.assert_same(of_input(copied), of_input(contextlib.nullcontext))
    assert_close(
        jax.jit(of_input, static_argnums=0)(copied), of_input(contextlib.nullcontext)
    )


class InABody(fnn.Module):
    @fnn.compact
    def __call__(self):
        with nn.copy_cotangent({'a': 'b'}):
            read = [self.param(n, fnn.initializers.ones, (1,)) for n in ('a', 'b')]
            return jnp.sum(read[0] * read[1])


@pytest.mark.parametrize(('run', 'way'), in_turn(RUNS, stopped(copied)))
def test_a_norm_is_that_of_what_is_differentiated(way, run):
    """The other rule that takes parameters together."""
    clip = stopped(lambda: nn.clip_gradient(True, global_norm=0.5))[way]
    of_a = jax.grad(plain)(A, B)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(of_a)))
    expected = jax.tree.map(lambda g: g * 0.5 / norm, of_a)
    assert_close(RUNS[run](clip)(A, B), expected)


def test_a_body_of_a_transform_may_be_evaluated():
    class Model(fnn.Module):
        @fnn.compact
        def __call__(self):
            same = lambda tree: tree  # noqa: E731
            return fnn.map_variables(InABody, 'params', same, same)(name='body')()

    params = {'body': {'a': jnp.ones(1), 'b': jnp.ones(1)}}
    evaluate = lambda params: Model().apply({'params': params})  # noqa: E731
    assert evaluate(params) == 1.0
    with pytest.raises(errors.BlockError, match='Open the block around'):
        jax.grad(evaluate)(params)


def test_a_number_as_a_source():
    def loss(w: Any) -> Any:
        tree = sg.rewrite({'w': w, 'v': 3.0}, nn.copy_cotangent({'w': 'v'}))
        return tree['w'] * tree['v']

    assert jax.grad(loss)(2.0) == jax.jit(jax.grad(loss))(2.0) == 2.0

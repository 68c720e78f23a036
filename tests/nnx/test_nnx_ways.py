"""Blocks around and inside whatever runs an NNX model, against stopped copies.

Values, gradients, batch statistics and random streams are equal to the last bit.
"""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import by_hand
import oracle
from by_hand import X, loss_of, pure
from flax_sg import nnx

# Gives the model that some lines read: in a block, as it is, or a stopped copy.
View = Callable[[Any], Any]

# Each runs a model, and returns what is compared beside the model's state.
WAYS: dict[str, Callable[[Any, View], Any]] = {}


def way(fn: Callable[[Any, View], Any]) -> Callable[[Any, View], Any]:
    WAYS[fn.__name__] = fn
    return fn


def viewed(view: View, fn: Callable[..., Any] = loss_of) -> Callable[..., Any]:
    """A function of a model that reads it through a view."""

    def of_model(model: Any, *args: Any) -> Any:
        with view(model) as seen:
            return fn(seen, *args)

    return of_model


def features(model: Any, x: Any = X) -> Any:
    return model.features(x)


def total(model: Any, x: Any = X) -> Any:
    return model.features(x).sum()


@way
def grad(model, view):
    return pure(nnx.grad(viewed(view))(model))


@way
def value_and_grad(model, view):
    value, grads = nnx.value_and_grad(viewed(view))(model)
    return value, pure(grads)


@way
def jit_of_grad(model, view):
    step = nnx.jit(nnx.grad(viewed(view)))
    return [pure(step(model)) for _ in range(2)]


@way
def grad_of_jit(model, view):
    return pure(nnx.grad(nnx.jit(viewed(view)))(model))


@way
def of_some(model, view):
    some = nnx.Any(nnx.PathContains('head'), nnx.PathContains('kernel'))
    return pure(nnx.grad(viewed(view), argnums=nnx.DiffState(0, some))(model))


@way
def remat(model, view):
    return pure(nnx.grad(nnx.remat(viewed(view)))(model))


def floats(tree: Any) -> list[Any]:
    """The leaves that have a gradient."""
    return [g for g in jax.tree.leaves(tree) if g.dtype != jax.dtypes.float0]


@way
def pytree(model, view):
    return floats(jax.grad(viewed(view), allow_int=True)(model))


@way
def jitted_pytree(model, view):
    return jax.jit(viewed(view))(model)


@way
def functional(model, view):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def run(params, rest):
        copy = nnx.merge(graph, params, rest)
        return viewed(view)(copy), pure(nnx.state(copy, nnx.BatchStat))

    (_, stats), grads = jax.value_and_grad(run, has_aux=True)(params, rest)
    return stats, pure(grads)


@way
def train(model, view):
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(viewed(view))(model)
        optimizer.update(model, grads)
        return value

    return [step(model, optimizer) for _ in range(3)]


@way
def train_eagerly(model, view):
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(model, nnx.grad(viewed(view))(model))


@way
def cloned(model, view):
    of_clone = viewed(view, lambda model: loss_of(nnx.clone(model)))
    return pure(nnx.grad(of_clone)(model))


@way
def merged_again(model, view):
    of_merged = viewed(view, lambda model: loss_of(nnx.merge(*nnx.split(model))))
    return pure(nnx.grad(of_merged)(model))


@way
def vmap(model, view):
    of_each = nnx.vmap(viewed(view, features), in_axes=(None, 0))
    return pure(nnx.grad(lambda model: of_each(model, X).sum())(model))


@way
def cond(model, view):
    def run(model):
        other = viewed(view, lambda model: model.body[0].bias.sum())
        return nnx.cond(True, viewed(view), other, model)

    return pure(nnx.grad(run)(model))


@way
def switch(model, view):
    other = viewed(view, lambda model: model.body[0].bias.sum())

    def run(model, n):
        return nnx.switch(n, [viewed(view, total), other], model)

    return [pure(nnx.grad(run)(model, n)) for n in range(2)]


@way
def fori_loop(model, view):
    def body(_, carry):
        model, x = carry
        return model, viewed(view, features)(model, x)

    return nnx.fori_loop(0, 3, body, (model, X))[1]


@way
def while_loop(model, view):
    def body(carry):
        model, x, n = carry
        return model, viewed(view, features)(model, x), n + 1

    return nnx.while_loop(lambda carry: carry[2] < 3, body, (model, X, 0))[1]


@way
def pmap(model, view):
    def grads(model, x):
        return nnx.grad(viewed(view, total))(model, x)

    of_each = nnx.pmap(grads, in_axes=(None, 0), out_axes=0)
    return pure(of_each(model, jnp.stack([X, -X])))


@way
def scan(model, view):
    @nnx.scan(in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=3)
    def repeated(model, x):
        return viewed(view, features)(model, x)

    return pure(nnx.grad(lambda body: repeated(body, X).sum())(model))


@way
def closed_over(model, view):
    """A compiled function, a checkpoint and the body of a scan that close over it."""

    def run(model):
        of = viewed(view, features)
        x = jax.jit(lambda x: of(model, x))(X)
        x = jax.checkpoint(lambda x: of(model, x))(x)
        x = jax.vmap(lambda x: of(model, x))(x)
        x, _ = jax.lax.scan(lambda x, _: (of(model, x), None), x, None, length=2)
        return x.sum()

    return pure(nnx.grad(run)(model))


@way
def second_order(model, view):
    def norm(model):
        grads = nnx.grad(viewed(view))(model)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))

    return pure(nnx.grad(norm)(model))


@way
def shapes(model, view):
    return nnx.eval_shape(viewed(view), model).shape


@way
def interpreted(model, view):
    with jax.disable_jit():
        return pure(nnx.jit(nnx.grad(viewed(view)))(model))


if 'graph' in inspect.signature(nnx.jit).parameters:

    @way
    def as_trees(model, view):
        grads = nnx.jit(jax.grad(viewed(view, total), allow_int=True), graph=False)
        return nnx.jit(viewed(view), graph=False)(model), floats(grads(model))

    @way
    def without_updates(model, view):
        return pure(nnx.jit(nnx.grad(viewed(view, total)), graph_updates=False)(model))


def by_copies(model: Any) -> Any:
    return contextlib.nullcontext(by_hand.stopped(model, 'body'))


@contextlib.contextmanager
def in_a_block(model: Any) -> Any:
    with nnx.stop_gradient(model, 'body/**'):
        yield model


def run(name: str, view: View, around: View = contextlib.nullcontext) -> Any:
    """What comes out of a way to run a model, and the state of the model then."""
    model = by_hand.Net()
    with around(model):
        out = WAYS[name](model, view)
    assert by_hand.is_plain((model, out))
    return out, pure(model)


@pytest.mark.parametrize('name', WAYS)
def test_a_block_inside(name: str):
    oracle.assert_same(run(name, in_a_block), run(name, by_copies))


@pytest.mark.parametrize('name', WAYS)
def test_a_block_around(name: str):
    actual = run(name, contextlib.nullcontext, around=in_a_block)
    oracle.assert_same(actual, run(name, by_copies))


@pytest.mark.parametrize('name', ['grad', 'jit_of_grad', 'closed_over', 'merged_again'])
@pytest.mark.usefixtures('leaks')
def test_no_tracer_outlives_its_trace(name: str):
    run(name, in_a_block)
    run(name, contextlib.nullcontext, around=in_a_block)

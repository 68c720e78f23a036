"""Views in whatever runs an NNX model, against stopped copies.

Values, gradients, batch statistics and random streams are equal to the last bit.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

import by_hand
import oracle
from by_hand import X, loss_of, pure, total
from flax_sg import nnx

# Gives the model that some lines read: a view, or a stopped copy.
View = Callable[[Any], Any]

# Each runs a model, and returns what is compared beside the model's state.
WAYS: dict[str, Callable[[Any, View], Any]] = {}


def way(fn: Callable[[Any, View], Any]) -> Callable[[Any, View], Any]:
    WAYS[fn.__name__] = fn
    return fn


def viewed(view: View, fn: Callable[..., Any] = loss_of) -> Callable[..., Any]:
    """A function of a model that reads it through a view."""
    return lambda model, *args: fn(view(model), *args)


def features(model: Any, x: Any = X) -> Any:
    return model.features(x)


def floats(tree: Any) -> list[Any]:
    """The leaves that have a gradient."""
    return [g for g in jax.tree.leaves(tree) if g.dtype != jax.dtypes.float0]


@way
def grad(model, view):
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
def jit_of_a_view(model, view):
    """The view is made outside of the compiled function."""
    run = nnx.jit(loss_of)
    return pure(nnx.grad(lambda model: run(view(model)) + loss_of(model))(model))


@way
def views_of_views(model, view):
    return pure(nnx.grad(lambda model: loss_of(view(view(model))))(model))


@way
def of_some(model, view):
    some = nnx.Any(nnx.PathContains('head'), nnx.PathContains('kernel'))
    return pure(nnx.grad(viewed(view), argnums=nnx.DiffState(0, some))(model))


@way
def remat(model, view):
    return pure(nnx.grad(nnx.remat(viewed(view)))(model))


@way
def pytree(model, view):
    value = jax.jit(viewed(view))(model)
    return value, floats(jax.grad(viewed(view), allow_int=True)(model))


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

    def step(model, optimizer):
        value, grads = nnx.value_and_grad(viewed(view))(model)
        optimizer.update(model, grads)
        return value

    return [fn(model, optimizer) for fn in (nnx.jit(step), step, nnx.jit(step))]


@way
def cloned_and_merged(model, view):
    def of_copies(model):
        return loss_of(nnx.clone(model)) + loss_of(nnx.merge(*nnx.split(model)))

    return pure(nnx.grad(viewed(view, of_copies))(model))


@way
def vmap(model, view):
    of_each = nnx.vmap(viewed(view, features), in_axes=(None, 0))
    return pure(nnx.grad(lambda model: of_each(model, X).sum())(model))


@way
def cond_and_switch(model, view):
    other = viewed(view, lambda model: model.body[0].bias.sum())

    def run(model, n):
        first = nnx.cond(True, viewed(view), other, model)
        return first + nnx.switch(n, [viewed(view, total), other], model)

    return [pure(nnx.grad(run)(model, n)) for n in range(2)]


@way
def loops(model, view):
    def body(_, carry):
        model, x = carry
        return model, viewed(view, features)(model, x)

    def of_while(carry):
        model, x, n = carry
        return model, viewed(view, features)(model, x), n + 1

    x = nnx.fori_loop(0, 3, body, (model, X))[1]
    return nnx.while_loop(lambda carry: carry[2] < 3, of_while, (model, x, 0))[1]


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
def forward_mode(model, view):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def run(params):
        return viewed(view, total)(nnx.merge(graph, params, rest))

    return jax.jvp(run, (params,), (params,))


@way
def shard_map(model, view):
    mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    whole = PartitionSpec()
    graph, state = nnx.split(model)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(whole, PartitionSpec('data')),
        out_specs=PartitionSpec('data'),
        check_vma=False,
    )
    def run(state, x):
        return viewed(view, features)(nnx.merge(graph, state), x)

    return floats(jax.grad(lambda s: run(s, X).sum(), allow_int=True)(state))


@way
def a_derivative_of_its_own(model, view):
    """``jax.custom_vjp`` and ``nnx.custom_vjp``, which are given a view."""

    @jax.custom_vjp
    def tripled(model):
        return total(model)

    def back(model, ct):
        return (jax.tree.map(lambda leaf: 3.0 * ct * jnp.ones_like(leaf), model),)

    tripled.defvjp(lambda model: (total(model), model), back)
    of_nnx = nnx.custom_vjp(total)
    of_nnx.defvjp(
        lambda model: (total(model), None),
        lambda _, g: (jax.tree.map(jnp.ones_like, g[0][0]),),
    )

    def run(model):
        body = Body(view(model))
        return tripled(body) + of_nnx(body)

    return pure(nnx.grad(run)(model))


class Body(nnx.Module):
    """The layers of a ``Net`` alone."""

    def __init__(self, model):
        self.body = model.body

    features = by_hand.Net.features


@way
def shapes_and_no_jit(model, view):
    with jax.disable_jit():
        grads = pure(nnx.jit(nnx.grad(viewed(view)))(model))
    return nnx.eval_shape(viewed(view), model).shape, grads


if 'graph' in inspect.signature(nnx.jit).parameters:

    @way
    def as_trees(model, view):
        grads = nnx.jit(jax.grad(viewed(view, total), allow_int=True), graph=False)
        return nnx.jit(viewed(view), graph=False)(model), floats(grads(model))


def run(name: str, view: View) -> Any:
    """What comes out of a way to run a model, and the state of the model then."""
    model = by_hand.Net()
    return WAYS[name](model, view), pure(model)


def of_body(model: Any) -> Any:
    return nnx.stop_gradient(model, 'body/**')


@pytest.mark.every_case
@pytest.mark.parametrize('name', WAYS)
def test_a_view(name: str):
    by_copy = functools.partial(by_hand.stopped, selects='body')
    oracle.assert_same(run(name, of_body), run(name, by_copy))


@pytest.mark.parametrize('name', ['grad', 'jit_of_grad', 'closed_over'])
@pytest.mark.usefixtures('leaks')
def test_no_tracer_outlives_its_trace(name: str):
    run(name, of_body)

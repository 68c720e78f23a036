"""Views in whatever runs an NNX model, against stopped copies.

Values, gradients, batch statistics, caches and random streams are equal to the last
bit.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec

from flax_sg import nnx
from tests.helpers import nnx_by_hand as by_hand
from tests.helpers import oracle
from tests.helpers.nnx_by_hand import (
    Layer,
    Net,
    X,
    loss_of,
    pure,
    stacked,
    through,
    total,
)

# Each runs a model, and returns what is compared beside the model's state. Some lines
# read ``hold(model)``: a view, or a copy that is stopped by hand. Beside it, the model.
WAYS: dict[str, tuple[Any, Any]] = {}


def way(fn: Any) -> None:
    WAYS[fn.__name__] = Net, fn


def grad_of(make: Any = Net) -> Any:
    """A loss of a model, whose gradients are compared in two steps."""

    def add(loss):
        def grads(model, hold):
            step = nnx.jit(nnx.grad(functools.partial(loss, hold=hold)))
            return [pure(step(model)) for _ in range(2)]

        WAYS[loss.__name__] = make, grads
        return loss

    return add


def held(hold: Any, fn: Any = loss_of) -> Any:
    return lambda model, *args: fn(hold(model), *args)


def features(model: Any, x: Any = X) -> Any:
    return model.features(x)


def floats(tree: Any) -> list[Any]:
    """The leaves that have a gradient."""
    return [g for g in jax.tree.leaves(tree) if g.dtype != jax.dtypes.float0]


def grads(fn: Any, model: Any, *args: Any) -> Any:
    return pure(nnx.grad(fn)(model, *args))


# What is done to a view, and to a loss that makes one.
OF_VIEWS = {
    'grad': loss_of,
    'jit_of_a_view': nnx.jit(loss_of),
    'clone': lambda model: loss_of(nnx.clone(model)),
    'merge': lambda model: loss_of(nnx.merge(*nnx.split(model))),
}
KERNELS = nnx.DiffState(0, nnx.PathContains('kernel'))
OF_LOSSES = {
    'grad_of_jit': lambda loss, model: grads(nnx.jit(loss), model),
    'remat': lambda loss, model: grads(nnx.remat(loss), model),
    'of_some': lambda loss, model: pure(nnx.grad(loss, argnums=KERNELS)(model)),
    'pytree': lambda loss, model: floats(
        jax.jit(jax.value_and_grad(loss, allow_int=True))(model)
    ),
    'shapes': lambda loss, model: nnx.eval_shape(loss, model).shape,
}
if 'graph' in inspect.signature(nnx.jit).parameters:
    OF_LOSSES['as_tree'] = lambda loss, model: nnx.jit(loss, graph=False)(model)
WAYS |= {
    name: (Net, lambda model, hold, fn=fn: grads(held(hold, fn), model))
    for name, fn in OF_VIEWS.items()
}
WAYS |= {
    name: (Net, lambda model, hold, fn=fn: fn(held(hold), model))
    for name, fn in OF_LOSSES.items()
}


@way
def functional(model, hold):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def value(params):
        return held(hold, total)(nnx.merge(graph, params, rest))

    return jax.jvp(value, (params,), (params,)), pure(jax.jit(jax.grad(value))(params))


@way
def train(model, hold):
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(model, optimizer):
        value, grads = nnx.value_and_grad(held(hold))(model)
        optimizer.update(model, grads)
        return value

    return [fn(model, optimizer) for fn in (nnx.jit(step), step, nnx.jit(step))]


@way
def vmap_cond_switch(model, hold):
    def run(model, n):
        x = nnx.vmap(held(hold, features), in_axes=(None, 0))(model, X)
        first = nnx.cond(True, held(hold, features), features, model, x)
        return nnx.switch(n, [held(hold, total), held(hold)], model, first)

    return [grads(run, model, n) for n in range(2)]


@way
def loops(model, hold):
    def body(_, carry):
        model, x = carry
        return model, held(hold, features)(model, x)

    def of_while(carry):
        model, x, n = carry
        return model, held(hold, features)(model, x), n + 1

    x = nnx.fori_loop(0, 3, body, (model, X))[1]
    return nnx.while_loop(lambda carry: carry[2] < 3, of_while, (model, x, 0))[1]


@way
def closed_over(model, hold):
    """A compiled function, a checkpoint and the body of a scan that close over it."""

    def run(model):
        of = held(hold, features)
        x = jax.jit(lambda x: of(model, x))(X)
        x = jax.checkpoint(lambda x: of(model, x))(x)
        x, _ = jax.lax.scan(lambda x, _: (of(model, x), None), x, None, length=2)
        return x.sum()

    return grads(run, model)


@way
def second_order(model, hold):
    def norm(model):
        grads = nnx.grad(held(hold))(model)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads))

    return grads(norm, model)


@way
def shard_map(model, hold):
    mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    graph, state = nnx.split(model)

    def run(state, x):
        return held(hold, features)(nnx.merge(graph, state), x)

    each, every = PartitionSpec('data'), PartitionSpec()
    of_each = jax.shard_map(run, mesh=mesh, in_specs=(every, each), out_specs=each)
    return floats(jax.grad(lambda s: of_each(s, X).sum(), allow_int=True)(state))


@way
def a_derivative_of_its_own(model, hold):
    """``jax.custom_vjp`` and ``nnx.custom_vjp``, which are given a view."""

    def run(layers):
        return layers[1](layers[0](X)).sum()

    ones = functools.partial(jax.tree.map, jnp.ones_like)
    own, of_nnx = jax.custom_vjp(run), nnx.custom_vjp(run)
    own.defvjp(lambda layers: (run(layers), layers), lambda kept, _: (ones(kept),))
    of_nnx.defvjp(lambda layers: (run(layers), None), lambda _, g: (ones(g[0][0]),))

    def both(model):
        seen = hold(model, 'body/0/**').body
        return own(seen) + of_nnx(seen)

    return grads(both, model)


# Losses, some lines of which read a view.


@grad_of()
def three_losses(model, hold):
    """Statistics and random keys go on through all views; one is of a part."""
    first = jnp.sum(hold(model, 'body/**')(X) + hold(model, 'head/**')(X) ** 2)
    return first + jnp.sum(hold(model.body[0], '**')(X) + 2.0 * model.body[0](X))


@grad_of()
def in_evaluation(model, hold):
    frozen = hold(model, '**')
    frozen.eval()
    assert not (model.drop.deterministic or model.norm.use_running_average)
    return jnp.sum(frozen(X) * model(X))


@grad_of(lambda: nnx.Dict(layers=stacked(nnx.Rngs(0)), beside=Layer(nnx.Rngs(1))))
def stacked_layers(model, hold):
    @nnx.scan(in_axes=(0, None, nnx.Carry), out_axes=nnx.Carry)
    def inside(layer, beside, x):
        return hold(layer, 'kernel')(x) + hold(beside, 'bias')(x)

    outside = through(hold(model, 'layers/bias').layers, X)
    out = inside(model.layers, model.beside, outside)
    return jnp.sum(out + through(model.layers, X))


class Fast(nnx.Module):
    """A model that differentiates in its forward pass, in three ways."""

    def __init__(self):
        self.layer, self.rate = Layer(nnx.Rngs(0)), nnx.Param(jnp.ones(()))

    def __call__(self, x):
        inner = nnx.grad(lambda layer: layer(x).sum())(self.layer)
        graph, state = nnx.split(self.layer)
        parts = jax.grad(lambda s: nnx.merge(graph, s)(x).sum())(state)
        kernel = self.layer.kernel[...]
        _, tangent = jax.jvp(lambda w: jnp.tanh(x @ w), (kernel,), (kernel,))
        moved = kernel - self.rate * inner['kernel'][...]
        return x @ moved + jnp.broadcast_to(parts['bias'], x.shape) + tangent


@grad_of(Fast)
def inner_derivatives(model, hold):
    return jnp.sum(hold(model, 'layer/**')(X))


def attention():
    layer = nnx.MultiHeadAttention(2, 4, decode=True, rngs=nnx.Rngs(0))
    layer.init_cache((3, 9, 4))
    return layer


# Layers of Flax. Caches of attention are written through the view.
R = nnx.Rngs
LAYERS = {
    'rnn': (lambda: nnx.RNN(nnx.GRUCell(4, 4, rngs=R(0))), 'cell/dense_h/**', X[None]),
    'lora': (lambda: nnx.LoRALinear(4, 2, lora_rank=2, rngs=R(0)), 'kernel', X),
    'sequential': (lambda: nnx.Sequential(Layer(R(0)), Layer(R(1))), 'layers/0/**', X),
    'caches': (attention, 'value/**', X[:, None]),
}
for name, (make, where, x) in LAYERS.items():

    def loss(model, hold, where=where, x=x):
        return jnp.sum((hold(model, where)(x) + model(x)) ** 2)

    loss.__name__ = name
    grad_of(make)(loss)


def run(name: str, hold: Any) -> Any:
    """What comes out of a way to run a model, and the state of the model then."""
    make, fn = WAYS[name]
    model = make()
    return fn(model, hold), pure(model)


def view(model: Any, where: Any = 'body/**') -> Any:
    return nnx.stop_gradient(model, where)


@pytest.mark.parametrize('name', WAYS)
def test_a_view(name: str, standard_promotion):
    oracle.assert_same(run(name, view), run(name, by_hand.stopped))


@pytest.mark.parametrize('name', ['grad', 'three_losses', 'closed_over'])
@pytest.mark.usefixtures('leaks')
def test_no_tracer_outlives_its_trace(name: str):
    run(name, view)


def test_outputs_of_a_model_that_differentiates_stay_the_same():
    model = Fast()
    for seen in view(model, True), nnx.scale_gradient(model, True, 0.5):
        oracle.assert_same(seen(X), model(X))

"""Assertions, reports and parts of arrays that fail; see test_errors."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing

PARAMS = {'head': jnp.ones(3), 'body': jnp.ones((4, 3))}
KEY = jax.random.key(0)
SHAPES = jax.ShapeDtypeStruct((3,), jnp.float32)
DENSE, TWO = fnn.Dense(2), jnp.ones(2)


class Layer(fnn.Module):
    @fnn.compact
    def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
        return fnn.Dense(2)(x), None


def loss(params: Any) -> jax.Array:
    return jnp.sum(params['head']) * jnp.sum(jax.lax.stop_gradient(params['body']))


def descends(params: Any) -> Any:
    """Trains the head."""
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


MODEL = nnx.Linear(2, 2, rngs=nnx.Rngs(0))


def rows_that_depend_on_data(params: Any, count: Any) -> jax.Array:
    rows = jnp.arange(4)[:, None] < count
    body = params['body']
    return jnp.sum(jnp.where(rows, jax.lax.stop_gradient(body), body) ** 2)


def frozen_but_what_is_live() -> None:
    live = sg.live(rows_that_depend_on_data, PARAMS, 2)
    sg.freeze(optax.sgd(0.1), ~live).init(PARAMS)


def in_block(index: Any) -> None:
    with nn.stop_gradient(sg.at('Dense_0/bias', index)):
        params = {
            'params': {'Dense_0': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}}
        }
        jax.grad(lambda p: jnp.sum(Layer().apply(p, jnp.ones(2), None)[0]))(params)


def returns_nothing(params: Any) -> Any:
    jnp.sum(params['head'])


def called_back(params: Any) -> Any:
    product = params['head'] * params['body'][0]
    return jax.pure_callback(jnp.sin, product, product)


def of_layers(params: Any, depth: int, x: jax.Array) -> jax.Array:
    for _ in range(depth):
        x = jnp.tanh(params['body'] @ x)[:3]
    return x @ params['head']


def of_frozen_layers(layers: Any) -> None:
    axes: Any = {'params': 0}
    options = {'variable_axes': axes, 'split_rngs': {'params': True}, 'length': 3}
    Stack = nn.scan(Layer, frozen_layers=layers, **options)  # noqa: N806
    shapes = jax.eval_shape(fnn.scan(Layer, **options)().init, KEY, jnp.ones(2), None)
    jax.eval_shape(Stack().apply, shapes, jnp.ones(2), None)


CASES: dict[str, Any] = {
    'a number whose value is asked for': (
        lambda: sg.live(of_layers, PARAMS, 2, jnp.ones(3)),
        lambda: sg.live(functools.partial(of_layers, depth=2), PARAMS, x=jnp.ones(3)),
    ),
    'parameters of a module in the place of its variables': (
        lambda: sg.live(DENSE.apply, {'Dense_0': {'kernel': 1.0}}, TWO),
        lambda: sg.live(DENSE.apply, DENSE.init(KEY, TWO), TWO),
    ),
    'a dict of losses': (
        lambda: sg.gradient_flow({'one': loss}, PARAMS),
        lambda: sg.gradient_flow(lambda params: {'one': loss(params)}, PARAMS),
    ),
    'losses in two programs': lambda: sg.precompute({'one': loss}, PARAMS),
    'no program to compare': lambda: testing.assert_same_program(loss, PARAMS, loss),
    'a state before the parameters': (
        lambda: sg.adopt(optax.adam(0.1), optax.adam(0.1).init(PARAMS), PARAMS),
        lambda: sg.adopt(optax.adam(0.1), PARAMS, optax.adam(0.1).init(PARAMS)),
    ),
    'a filter in the place of layers': (
        lambda: of_frozen_layers('**/kernel'),
        lambda: of_frozen_layers({'**/kernel': slice(0, 1)}),
    ),
    'a depth of a table': lambda: sg.tabulate(Layer(), jnp.ones(2), depth='all'),
    'two programs': lambda: testing.assert_same_program(jnp.sin, jnp.negative, SHAPES),
    'a program of another argument': lambda: testing.assert_same_program(
        lambda x, y: x, lambda x, y: y, SHAPES, SHAPES
    ),
    'a program that prints something else': lambda: testing.assert_same_program(
        lambda x: jax.debug.print('a'), lambda x: jax.debug.print('b'), SHAPES
    ),
    'another part trained': lambda: testing.assert_trains_only(loss, 'body', PARAMS),
    'the other part of one that depends on data': frozen_but_what_is_live,
    'no parameters': lambda: sg.gradient_flow(loss, None),
    'a depth below the top': lambda: sg.gradient_flow(loss, PARAMS).table(depth=-1),
    'a module before and after': (
        lambda: testing.moves(nnx.state(MODEL), MODEL),
        lambda: testing.moves(jax.tree.map(jnp.copy, nnx.state(MODEL)), MODEL),
    ),
    'moves of another model': lambda: testing.moves(PARAMS, {'head': PARAMS['head']}),
    'moves of another shape': lambda: testing.moves(
        PARAMS, {**PARAMS, 'head': jnp.ones(1)}
    ),
    'gradients of another tree': lambda: testing.moves(
        PARAMS, descends(PARAMS), {'tail': jnp.ones(3)}
    ),
    'another part that moved': lambda: testing.assert_moves_only(
        PARAMS, descends(PARAMS), 'body'
    ),
    'a report with arguments': lambda: testing.assert_flows(
        sg.gradient_flow(loss, PARAMS), 'head', PARAMS
    ),
    'a class as a table': lambda: sg.tabulate(fnn.Dense, jnp.ones(2)),
    'keys as in Flax': lambda: sg.tabulate(fnn.Dense(2), jax.random.key(0)),
    'variables as in apply': (
        lambda: sg.tabulate(fnn.Dense(2), {'params': {'kernel': 1.0}}, jnp.ones(2)),
        lambda: sg.tabulate(fnn.Dense(2), jnp.ones(2)),
    ),
    'a model without its variables': (
        lambda: sg.live(DENSE, TWO),
        lambda: sg.live(DENSE, DENSE.init(KEY, TWO), TWO),
    ),
    'a model of NNX in the place of a loss': (
        lambda: sg.live(MODEL, jnp.ones(2)),
        lambda: sg.live(lambda model, x: jnp.sum(model(x)), MODEL, jnp.ones(2)),
    ),
    'a glob in the place of inputs': (
        lambda: sg.paths(DENSE, 'ker*'),
        lambda: sg.paths(DENSE, TWO, where='ker*'),
    ),
    'a model of linen without inputs': (
        lambda: sg.paths(DENSE),
        lambda: sg.paths(DENSE, TWO),
    ),
    'a part that there is not': lambda: in_block(np.s_[5:]),
    'a part of a leaf': lambda: sg.labels(PARAMS, {'slow': sg.at('body', np.s_[:2])}),
    'output': lambda: sg.gradient_flow(returns_nothing, PARAMS),
    'callback': lambda: sg.live(called_back, PARAMS),
    'another tree': lambda: sg.mask({'tail': 1.0}, frozen=~sg.live(loss, PARAMS)),
}

"""Assertions, reports and parts of arrays that fail; see test_errors."""

from __future__ import annotations

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
from tests.errors import block_errors

PARAMS = {'head': jnp.ones(3), 'body': jnp.ones((4, 3))}
KEY = jax.random.key(0)
SHAPES = jax.ShapeDtypeStruct((3,), jnp.float32)


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


CASES: dict[str, tuple[Any, ...]] = {
    'a depth of a table': (
        lambda: sg.tabulate(Layer(), jnp.ones(2), depth='all'),
        "ArgumentValueError: 'all'",
    ),
    'another program': (
        lambda: testing.assert_same_program(jnp.sin, jnp.negative, SHAPES),
        'ExpectationError: testing.optimized_hlo',
    ),
    'a program of another argument': (
        lambda: testing.assert_same_program(
            lambda x, y: x, lambda x, y: y, SHAPES, SHAPES
        ),
        'ExpectationError: testing.optimized_hlo',
    ),
    'a program that prints something else': (
        lambda: testing.assert_same_program(
            lambda x: jax.debug.print('a'), lambda x: jax.debug.print('b'), SHAPES
        ),
        'ExpectationError: testing.optimized_hlo',
    ),
    'another part trained': (
        lambda: testing.assert_trains_only(loss, 'body', PARAMS),
        "ExpectationError: report_errors.py:LINE | 'body'",
    ),
    'the other part of one that depends on data': (
        frozen_but_what_is_live,
        'PartError: report_errors.py:LINE | '
        "nn.stop_gradient(sg.at('embed/embedding', np.s_[:100])) | "
        "sg.freeze(tx, sg.at('embed/embedding', np.s_[:100]))",
    ),
    'no parameters': (
        lambda: sg.gradient_flow(loss, None),
        'ArgumentTypeError: report_errors.py:LINE',
    ),
    'a depth below the top': (
        lambda: sg.gradient_flow(loss, PARAMS).table(depth=-1),
        'ArgumentValueError: depth=',
    ),
    'a module before and after': (
        lambda: testing.moves(nnx.state(MODEL), MODEL),
        'ArgumentValueError: jax.tree.map(jnp.copy, nnx.state(model))',
        lambda: testing.moves(jax.tree.map(jnp.copy, nnx.state(MODEL)), MODEL),
    ),
    'parameters of another model': (
        lambda: testing.moves(PARAMS, {'head': PARAMS['head']}),
        "StructureError: 'body' | 'head'",
    ),
    'parameters of another shape': (
        lambda: testing.moves(PARAMS, {**PARAMS, 'head': jnp.ones(1)}),
        "StructureError: 'head'",
    ),
    'gradients of another tree': (
        lambda: testing.moves(PARAMS, descends(PARAMS), {'tail': jnp.ones(3)}),
        'ArgumentValueError: gradients=',
    ),
    'another part moved': (
        lambda: testing.assert_moves_only(PARAMS, descends(PARAMS), 'body'),
        "ExpectationError: 'body' | sg.freeze(tx, where)",
    ),
    'a report with arguments': (
        lambda: testing.assert_flows(sg.gradient_flow(loss, PARAMS), 'head', PARAMS),
        'TypeError: A report was',
    ),
    'a class as a table': (
        lambda: sg.tabulate(fnn.Dense, jnp.ones(2)),
        'ArgumentTypeError: sg.tabulate(Model(...), x)',
    ),
    'keys as in flax.linen.tabulate': (
        lambda: sg.tabulate(fnn.Dense(2), jax.random.key(0)),
        'ArgumentTypeError: a random key | rngs=rngs',
    ),
    'variables as in apply': (
        lambda: sg.tabulate(fnn.Dense(2), {'params': {'kernel': 1.0}}, jnp.ones(2)),
        'ArgumentTypeError: gave Dense variables as | sg.tabulate(model, x)',
        lambda: sg.tabulate(fnn.Dense(2), jnp.ones(2)),
    ),
    'parameters as in a step': (
        lambda: sg.tabulate(fnn.Dense(2), {'body': {'kernel': 1.0}}, jnp.ones(2)),
        'ArgumentTypeError: gave Dense variables as | sg.tabulate(model, x)',
    ),
    'a model without its variables': (
        lambda: sg.live(fnn.Dense(2), jnp.ones(2)),
        'ArgumentTypeError: Dense was given an array (float32[2]) as its variables | '
        'sg.live(model, variables, x)',
        lambda: sg.live(fnn.Dense(2), fnn.Dense(2).init(KEY, jnp.ones(2)), jnp.ones(2)),
    ),
    'a model of NNX in the place of a loss': (
        lambda: sg.live(MODEL, jnp.ones(2)),
        'ArgumentTypeError: Linear is a model | float32[2] | sg.live(loss, model, x)',
        lambda: sg.live(lambda model, x: jnp.sum(model(x)), MODEL, jnp.ones(2)),
    ),
    'a glob in the place of inputs': (
        lambda: sg.paths(fnn.Dense(2), 'ker*'),
        "ArgumentTypeError: paths() gave Dense 'ker*' as an input | "
        "sg.paths(model, x, where='ker*')",
        lambda: sg.paths(fnn.Dense(2), jnp.ones(2), where='ker*'),
    ),
    'a filter in a table of modules': (
        lambda: sg.tabulate(fnn.Dense(2), jnp.ones(2), where=sg.where('ker*')),
        "ArgumentTypeError: tabulate() gave Dense Glob('ker*') as an input | "
        'sg.paths(model, x, where=where)',
        lambda: sg.paths(fnn.Dense(2), jnp.ones(2), where=sg.where('ker*')),
    ),
    'a filter in a table of a model of NNX': (
        lambda: sg.tabulate(MODEL, 'ker*'),
        "ArgumentTypeError: 'ker*' as an input | sg.paths(model, where='ker*')",
        lambda: sg.paths(MODEL, where='ker*'),
    ),
    'paths of a model of NNX, the filter without its name': (
        lambda: sg.paths(MODEL, 'ker*'),
        "ArgumentTypeError: this model takes none | sg.paths(model, where='ker*')",
        lambda: sg.paths(MODEL, where='ker*'),
    ),
    'a model of NNX without inputs': (
        lambda: sg.tabulate(MODEL),
        'ArgumentTypeError: gave Linear no inputs | sg.tabulate(model, x)',
        lambda: sg.tabulate(MODEL, jnp.ones(2)),
    ),
    'a model of linen without inputs': (
        lambda: sg.paths(fnn.Dense(2)),
        'ArgumentTypeError: gave Dense no inputs | sg.paths(model, x)',
        lambda: sg.paths(fnn.Dense(2), jnp.ones(2)),
    ),
    'the value of a loss': (
        lambda: sg.live(jnp.ones(2), {'w': 1.0}),
        'ArgumentTypeError: an array (float32[2]) is no function | '
        'sg.live(loss, params)',
    ),
    'a part that there is not': (
        lambda: in_block(np.s_[5:]),
        "PartError: 'Dense_0/bias' | sg.at",
    ),
    'a part of a leaf': (
        lambda: sg.labels(PARAMS, {'slow': sg.at('body', np.s_[:2])}),
        "PartError: 'body' | sg.labels",
    ),
    'layers that there are not': (
        lambda: block_errors.stacked(slice(9, None)),
        'PartError: frozen_layers=slice',
    ),
}

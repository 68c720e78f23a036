"""Assertions, reports and parts of arrays that fail; see test_errors."""

from __future__ import annotations

from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import block_errors
import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing

PARAMS = {'head': jnp.ones(3), 'body': jnp.ones((4, 3))}
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
        lambda: sg.tabulate(Layer(), jax.random.key(0), depth='all'),
        "ArgumentValueError: depth='all': expected 'fit' or 1 or 2 or None.",
    ),
    'a depth of a table below its top': (
        lambda: sg.tabulate(Layer(), jax.random.key(0), depth=-1),
        "ArgumentValueError: depth=-1: expected 'fit' or 1 or 2 or None.",
    ),
    'another program': (
        lambda: testing.assert_same_program(jnp.sin, jnp.negative, SHAPES),
        'ExpectationError: The two functions compile to different programs.\n'
        'To see more, compare what testing.optimized_hlo returns for each.',
    ),
    'a program of another argument': (
        lambda: testing.assert_same_program(
            lambda x, y: x, lambda x, y: y, SHAPES, SHAPES
        ),
        'ExpectationError: The two functions use different arguments: leaves [0] and '
        '[1].\n'
        'To see more, compare what testing.optimized_hlo returns for each.',
    ),
    'a program that prints something else': (
        lambda: testing.assert_same_program(
            lambda x: jax.debug.print('a'), lambda x: jax.debug.print('b'), SHAPES
        ),
        'ExpectationError: The two functions call back different functions, or print '
        'other texts.\n'
        'To see more, compare what testing.optimized_hlo returns for each.',
    ),
    'another part trained': (
        lambda: testing.assert_trains_only(loss, 'body', PARAMS),
        "ExpectationError: Expected a gradient to 'body' and to nothing else.\n"
        'The loss does not train body.\n'
        'body is used at report_errors.py:LINE (loss).\n'
        'It is stopped by stop_gradient at report_errors.py:LINE (loss).\n'
        'The loss trains head.\n'
        'head is used at report_errors.py:LINE (loss).',
    ),
    'the other part of one that depends on data': (
        frozen_but_what_is_live,
        'PartError: sg.freeze: A part of a variable is stopped at '
        'report_errors.py:LINE (rows_that_depend_on_data), and sg.live cannot '
        'tell which part.\n'
        'Frozen as a whole, or not at all, the variable would train otherwise.\n'
        "Name the part: nn.stop_gradient(sg.at('embed/embedding', np.s_[:100])), or "
        "sg.freeze(tx, sg.at('embed/embedding', np.s_[:100])).",
    ),
    'no parameters': (
        lambda: sg.gradient_flow(loss, None),
        'ArgumentTypeError: loss at report_errors.py:LINE has no parameters: argument '
        '0 holds no arrays.\n'
        'Give arrays or their shapes, and say which argument holds them: argnums=1.',
    ),
    'a depth below the top': (
        lambda: sg.gradient_flow(loss, PARAMS).table(depth=-1),
        'ArgumentValueError: depth=-1: expected 0 or 1 or 2 or None.',
    ),
    'a depth below the top of a step': (
        lambda: testing.moves(PARAMS, descends(PARAMS)).table(depth=-1),
        'ArgumentValueError: depth=-1: expected 0 or 1 or 2 or None.',
    ),
    'a module before and after': (
        lambda: testing.moves(nnx.state(MODEL), MODEL),
        'ArgumentValueError: Both trees have the same Variables, which the step '
        'changes in place.\n'
        'Copy before it: before = jax.tree.map(jnp.copy, nnx.state(model)).',
        lambda: testing.moves(jax.tree.map(jnp.copy, nnx.state(MODEL)), MODEL),
    ),
    'parameters of another model': (
        lambda: testing.moves(PARAMS, {'head': PARAMS['head']}),
        'StructureError: the tree before the step and the tree after it have different '
        'structures.\n'
        "  'body': in the tree before the step, not in the tree after it; nearest "
        "there: 'head'",
    ),
    'parameters of another shape': (
        lambda: testing.moves(PARAMS, {**PARAMS, 'head': jnp.ones(1)}),
        "StructureError: the tree after the step at 'head' has another shape than the "
        'parameter.\n'
        'Expected: float32[3]\nFound:    float32[1]',
    ),
    'gradients of another tree': (
        lambda: testing.moves(PARAMS, descends(PARAMS), {'tail': jnp.ones(3)}),
        'ArgumentValueError: gradients= has none of body, head.\n'
        'Give the gradients of the same tree, or the same part of both trees.',
    ),
    'another part moved': (
        lambda: testing.assert_moves_only(PARAMS, descends(PARAMS), 'body'),
        "ExpectationError: Expected the step to move 'body' and nothing else.\n"
        'It does not move body.\n'
        'body: its value does not change.\n'
        'It moves head.\n'
        'head: its value changes.\n'
        'To keep some as they are: sg.freeze(tx, where).',
    ),
    'a report with arguments': (
        lambda: testing.assert_flows(sg.gradient_flow(loss, PARAMS), 'head', PARAMS),
        'TypeError: A report was made with its own arguments: give none with it.',
    ),
    'a class as a table': (
        lambda: sg.tabulate(fnn.Dense, jax.random.key(0)),
        'ArgumentTypeError: tabulate() takes a Module instance, and was given the '
        'class Dense.\n'
        'Make the module: sg.tabulate(Model(...), rngs)(x).',
    ),
    'a part that there is not': (
        lambda: in_block(np.s_[5:]),
        "PartError: Index(np.s_[5:]) does not fit 'Dense_0/bias', an array of shape "
        '(2,): it takes nothing.\n'
        'Name elements that the array has, or other variables in sg.at.',
    ),
    'a part of a leaf': (
        lambda: sg.labels(PARAMS, {'slow': sg.at('body', np.s_[:2])}),
        "PartError: sg.labels: The filter means a part of 'body', and a label takes "
        'whole leaves.\n'
        'Blocks, gradient calls and sg.freeze take parts; here name whole leaves.',
    ),
    'layers that there are not': (
        lambda: block_errors.stacked([]),
        'PartError: frozen_layers=[] does not fit a scan of 4 layers: '
        'it selects no layer.\n'
        'Write indices from 0 to 3, such as frozen_layers=slice(0, 2), or a bool for '
        'each layer.',
    ),
}

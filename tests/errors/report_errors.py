"""Assertions, reports and parts of arrays that fail; see test_errors."""

from __future__ import annotations

from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np

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


def in_block(index: Any) -> None:
    with nn.stop_gradient(sg.at('Dense_0/bias', index)):
        params = {
            'params': {'Dense_0': {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}}
        }
        jax.grad(lambda p: jnp.sum(Layer().apply(p, jnp.ones(2), None)[0]))(params)


def traced_twice() -> None:
    step = jax.jit(testing.assert_traces_once(jnp.sum))
    step(jnp.ones(2))
    step(jnp.ones(3))


CASES: dict[str, tuple[Any, ...]] = {
    'a depth of a table': (
        lambda: sg.tabulate(Layer(), jax.random.key(0), depth='all'),
        "ArgumentValueError: depth='all': expected 'fit' or 1 or 2 or None.",
    ),
    'another program': (
        lambda: testing.assert_same_program(jnp.sin, jnp.negative, SHAPES),
        'ExpectationError: The two functions compile to different programs: negate 0 '
        'and 1, sine 1 and 0.\n'
        'To see more, compare what testing.optimized_hlo returns for each.',
    ),
    'traced again': (
        traced_twice,
        'ExpectationError: sum is traced a second time.\n'
        '          first trace   this trace\n'
        '──────────────────────────────────\n'
        'args[0]   float32[2]    float32[3]',
    ),
    'another part trained': (
        lambda: testing.assert_trains_only(loss, 'body', PARAMS),
        "ExpectationError: Expected a gradient to 'body' and to nothing else, but the "
        'loss does not train 1 of its parameters: body.\n'
        'body is stopped at report_errors.py:LINE (loss).\n'
        'The loss trains 1 other parameter: head.\n'
        'head is used at report_errors.py:LINE (loss).',
    ),
    'a report with arguments': (
        lambda: testing.assert_flows(sg.gradient_flow(loss, PARAMS), 'head', PARAMS),
        'ArgumentTypeError: A report was given with 1 argument, but it was made with '
        'its own.\n'
        'Leave the arguments out, or give the function instead of the report.',
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
        lambda: sg.partition(PARAMS, sg.at('body', np.s_[:2])),
        "PartError: The filter means a part of 'body', and partition takes whole "
        'leaves.\n'
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

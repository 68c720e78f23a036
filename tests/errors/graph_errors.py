"""NNX models: views and filters that cannot be, linen forms; see test_errors."""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import nnx


def hijax() -> Any:
    """A model with a Variable of JAX's own new kind of mutable values."""
    names = inspect.signature(nnx.Variable.__init__).parameters
    options: Any = {'hijax' if 'hijax' in names else 'is_hijax': True}
    return nnx.Dict(w=nnx.Param(jnp.ones(2), **options))


model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
x = jnp.ones((1, 2))
SEVERAL = nnx.Dict(w=nnx.Param({'a': jnp.ones((2, 2)), 'b': jnp.ones(2)}))
# In a wrong place.
STATE: Any = nnx.state(model)
NAME: Any = 'ema'


def loss(model: Any) -> Any:
    return model(x).sum()


def in_a_block_of_linen(where: Any) -> Any:
    with nn.stop_gradient(where):
        return nnx.grad(loss)(model)


def through_a_view() -> None:
    grads = nnx.grad(lambda model: loss(nnx.stop_gradient(model, True)))(model)
    assert not grads['kernel'][...].any()


def stopped_state() -> None:
    assert sg.stop_gradient(nnx.state(model, nnx.Param), 'kernel')


CASES: dict[str, Any] = {
    'a pattern that no Variable of a model has': (
        lambda: nnx.stop_gradient(model, 'kernle'),
        "UnusedFilterError: 'kernle' | 'kernel' | nnx.stop_gradient",
    ),
    'a state in place of a model': (
        lambda: nnx.stop_gradient(STATE, 'kernel'),
        'ArgumentTypeError',
        'nnx.stop_gradient(model, where)',
    ),
    'the filter first': (
        lambda: nnx.where(NAME, model),
        "ArgumentTypeError: 'ema'",
        'nnx.where(model, where)',
    ),
    'some leaves of a Variable': (
        lambda: nnx.where(SEVERAL, sg.arrays(lambda a: a.ndim > 1)),
        "PartError: The filter means a part of 'w', and an NNX filter takes whole "
        'leaves.\n'
        'Blocks, gradient calls and sg.freeze take parts; here name whole leaves.',
    ),
    'a hijax Variable': (
        lambda: nnx.stop_gradient(hijax(), 'w'),
        "ArgumentTypeError: 'w' | nnx.grad",
    ),
    'a collection of linen': (
        lambda: nnx.stop_gradient(model, 'kernel', collections='batch_stats'),
        'TypeError: nnx.stop_gradient',
    ),
    'a name in place of values': (
        lambda: nnx.substitute(model, NAME),
        "ArgumentTypeError: 'ema' | nnx.substitute(model, target)",
    ),
    'a filter of another model': (
        lambda: nnx.state([model], nnx.where(model, 'kernel')),
        "UnknownNameError: 'kernel' | nnx.where",
    ),
    'a copy of a module': (
        lambda: sg.stop_gradient(model, 'kernel'),
        'ArgumentTypeError: sg.stop_gradient(tree, where) | '
        'nnx.stop_gradient(model, where)',
        stopped_state,
    ),
    'a block of linen around a model of NNX': (
        lambda: in_a_block_of_linen('kernel'),
        'UnusedFilterError: nnx.stop_gradient(model, where)',
        through_a_view,
    ),
    'a wrapper of linen around a model of NNX': (
        lambda: nn.Frozen(model),
        'ArgumentTypeError: nnx.stop_gradient(model, where)',
    ),
    'a rule of linen on a model of NNX': (
        lambda: nn.stop_gradient(model, 'kernel'),
        'ArgumentTypeError: nnx.stop_gradient(model, where)',
    ),
    'a model of NNX in place of a filter': (
        lambda: nn.stop_gradient(model),
        'FilterTypeError: nn.stop_gradient(nn.Dense, where) | nn.Frozen(module, where)',
    ),
}
where = 'kernel'

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


class Decorated(nnx.Linear):
    @nn.stop_gradient(True)
    def __call__(self, x: Any) -> Any:
        return super().__call__(x)


def through_a_view() -> None:
    grads = nnx.grad(lambda model: loss(nnx.stop_gradient(model, True)))(model)
    assert not grads['kernel'][...].any()


def stopped_state() -> None:
    assert sg.stop_gradient(nnx.state(model, nnx.Param), 'kernel')


WRITE = (
    'Write nnx.stop_gradient(model, where), from flax_sg import nnx, and call what it '
    'returns.'
)


CASES: dict[str, Any] = {
    'a pattern that no Variable of a model has': (
        lambda: nnx.stop_gradient(model, 'kernle'),
        "UnusedFilterError: nnx.stop_gradient: Glob('kernle') matches none of the 2 "
        'variables.\n'
        "Nearest: 'kernel', 'bias'.\n"
        "Did you mean 'kernel'?\n"
        "If nothing has to match, pass unused='ignore'.",
    ),
    'a state in place of a model': (
        lambda: nnx.stop_gradient(STATE, 'kernel'),
        'ArgumentTypeError: a State is no NNX module.\n'
        'Write nnx.stop_gradient(model, where).',
        'nnx.stop_gradient(model, where)',
    ),
    'the filter first': (
        lambda: nnx.where(NAME, model),
        "ArgumentTypeError: 'ema' (str) is no NNX module.\n"
        'Write nnx.where(model, where).',
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
        "ArgumentTypeError: 'w' is a mutable array of JAX, which nnx.grad does not "
        'differentiate.\n'
        'Make the Variable without hijax=True and ref=True.',
    ),
    'a collection of linen': (
        lambda: nnx.stop_gradient(model, 'kernel', collections='batch_stats'),
        'TypeError: nnx.stop_gradient: collections= is for linen; see kind=',
    ),
    'a name in place of values': (
        lambda: nnx.substitute(model, NAME),
        "ArgumentTypeError: 'ema' (str) is no model or tree.\n"
        'Write nnx.substitute(model, target).',
    ),
    'a filter of another model': (
        lambda: nnx.state([model], nnx.where(model, 'kernel')),
        "UnknownNameError: There was no '0/bias' in the parameters that nnx.where "
        'derived this filter from.\n'
        "Nearest: 'bias', 'kernel'.\n"
        'Derive the filter again, from the tree that it is used for.',
    ),
    'a copy of a module': (
        lambda: sg.stop_gradient(model, 'kernel'),
        'ArgumentTypeError: sg.stop_gradient(tree, where) would copy a Linear: what '
        'the copy writes, such as batch statistics, is lost.\n'
        'Write nnx.stop_gradient(model, where), from flax_sg import nnx. Or give the '
        'state: nnx.state(model, nnx.Param).',
        stopped_state,
    ),
    'a block of linen around a model of NNX': (
        lambda: in_a_block_of_linen(True),
        'NothingStoppedWarning: The block of stop_gradient(Constant(True)), opened at '
        'graph_errors.py:LINE, met no variable of linen. Linear is a model of NNX, '
        f'which it does not see.\n{WRITE}',
        through_a_view,
    ),
    'a block of linen around a method of NNX': (
        lambda: Decorated(2, 3, rngs=nnx.Rngs(0))(x),
        'NothingStoppedWarning: The block of stop_gradient(Constant(True)), opened at '
        'graph_errors.py:LINE, met no variable of linen. Decorated is a model of NNX, '
        f'which it does not see.\n{WRITE}',
    ),
    'a wrapper of linen around a model of NNX': (
        lambda: nn.Frozen(model),
        'ArgumentTypeError: nn.Frozen wraps a Module instance, and was given a '
        'Linear.\n'
        f'For a model of NNX w{WRITE[1:]}',
    ),
    'a rule of linen on a model of NNX': (
        lambda: nn.stop_gradient(model, 'kernel'),
        'ArgumentTypeError: nn.stop_gradient decorates a function, a method, a Module '
        'class or a module, and was given a Linear.\n'
        f'For a model of NNX w{WRITE[1:]}',
    ),
    'a model of NNX in place of a filter': (
        lambda: nn.stop_gradient(model),
        'FilterTypeError: a Linear is no filter.\n'
        'A filter is a glob, a compiled regular expression, a function of the path, a '
        'bool, a tree of bools, or a list of these.\n'
        'To lift a class, write nn.stop_gradient(nn.Dense, where); for a module, '
        'nn.Frozen(module, where); for a model of NNX (from flax_sg import nnx), '
        'nnx.stop_gradient(model, where); for an array, jax.lax.stop_gradient(x).',
    ),
}
where = 'kernel'

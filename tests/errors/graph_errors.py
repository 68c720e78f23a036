"""NNX models: blocks and filters that cannot be, and fixes; see test_errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import by_hand
import flax_sg as sg
from flax_sg import nnx
from tasks import read_while_another_waits


class Hijax(nnx.Module):
    def __init__(self) -> None:
        self.w = by_hand.hijax_param()


class Stack(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((2, 3)))

    def __call__(self) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer: Any, x: Any) -> Any:
            return x * layer.w

        return run(self, jnp.ones(3))


model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
stack = Stack()
# In a wrong place.
STATE: Any = nnx.state(model)
NAME: Any = 'ema'


def opened(block: Any) -> None:
    with block:
        pass


def writes() -> None:
    with nnx.read_only(norm, 'mean'):
        norm(jnp.ones((4, 2)))


def rows_in_a_scan() -> None:
    with nnx.stop_gradient(stack, sg.at('w', np.s_[:1])):
        stack()


@jax.custom_vjp
def doubled(linear: Any) -> Any:
    return linear(jnp.ones((1, 2))).sum() * 2


doubled.defvjp(lambda linear: (doubled(linear), linear), lambda linear, ct: (linear,))


@jax.custom_vjp
def doubled_array(kernel: Any) -> Any:
    return kernel.sum() * 2


doubled_array.defvjp(lambda w: (w.sum() * 2, w), lambda w, ct: (2 * ct * w,))


def own_derivative(fn: Any = doubled) -> None:
    with nnx.scale_gradient(model, 'kernel', 0.5):
        jax.grad(lambda model: fn(model))(model)


def close_first() -> None:
    first, second = nnx.stop_gradient(model, 'bias'), nnx.stop_gradient(model, 'kernel')
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)


def awaited() -> None:
    block = nnx.stop_gradient(model, 'kernel')
    read_while_another_waits(block, lambda: model(jnp.ones((1, 2))))


def stopped_state() -> None:
    assert sg.stop_gradient(nnx.state(model, nnx.Param), 'kernel')


CASES: dict[str, Any] = {
    'a pattern that no Variable of a model has': (
        lambda: opened(nnx.stop_gradient(model, 'kernle')),
        "UnusedFilterError: nnx.stop_gradient: Glob('kernle') matches none of the 2 "
        'variables.\n'
        "Nearest: 'kernel', 'bias'.\n"
        "Did you mean 'kernel'?\n"
        "If nothing has to match, pass unused='ignore'.",
    ),
    'a state in place of a model': (
        lambda: opened(nnx.stop_gradient(STATE, 'kernel')),
        'ArgumentTypeError: a State is no NNX module.\n'
        'Write nnx.stop_gradient(model, where).',
        'nnx.stop_gradient(model, where)',
    ),
    'the filter first': (
        lambda: nnx.where(NAME, model),
        "ArgumentTypeError: 'ema' (str) is no NNX module.\n"
        "Write nnx.where(model, 'head/**').",
    ),
    'a hijax Variable': (
        lambda: opened(nnx.stop_gradient(Hijax(), 'w')),
        "ArgumentTypeError: 'w' is a hijax Variable, which has no type of its own.\n"
        'Make it without hijax=True, or stop what you read: '
        'jax.lax.stop_gradient(variable[...]).',
        lambda: jax.lax.stop_gradient(Hijax().w[...]),
    ),
    'rules together': (
        lambda: nnx.clip_gradient(model, True, global_norm=1.0),
        'ArgumentTypeError: nnx.clip_gradient: a block on an NNX model sees each '
        'Variable for itself, and this rule takes them together.\n'
        'Apply it to the state: sg.rewrite(nnx.state(model, nnx.Param), '
        'nn.clip_gradient(where, global_norm=1.0)).',
        lambda: sg.rewrite(
            nnx.state(model, nnx.Param),
            sg.linen.clip_gradient('kernel', global_norm=1.0),
        ),
    ),
    'a collection of linen': (
        lambda: nnx.stop_gradient(model, 'kernel', collections='params'),
        'TypeError: nnx.stop_gradient: collections= is for linen; see kind=',
    ),
    'a name in place of values': (
        lambda: nnx.substitute(model, NAME),
        "ArgumentTypeError: 'ema' (str) is no model, state, tree or function.\n"
        'Write nnx.substitute(model, target_model).',
    ),
    'a write to a Variable': (
        writes,
        "BlockError: The Variable 'mean' is written, which is read only under "
        "read_only(Glob('mean'), collections=True).\n"
        'Fix: leave the block for the write, or leave the Variable out.',
    ),
    'rows of stacked layers': (
        rows_in_a_scan,
        "PartError: stop_gradient(Glob('w') & Index(np.s_[:1])) means a part of 'w', "
        'which has another shape here: a transform has taken it apart.\n'
        'Select all of it, or open the block in the body of the transform.',
    ),
    'a derivative of its own': (
        own_derivative,
        "BlockError: scale_gradient(Glob('kernel'), 0.5) selects the Variable "
        "'kernel', and a function with a derivative of its own (jax.custom_vjp) takes "
        'its model apart.\n'
        'Give the function what it reads: fn(model.kernel[...]).',
        lambda: own_derivative(lambda model: doubled_array(model.kernel[...])),
    ),
    'blocks on a model in the wrong order': (
        close_first,
        "BlockError: the block Linear: stop_gradient(Glob('bias')) cannot be closed: "
        "Linear: stop_gradient(Glob('kernel')) is still open in this thread.\n"
        'Blocks close in the thread that opened them, the last one first: use a with '
        'statement around the code that it is for.',
    ),
    'a read in another task than the block of a model': (
        awaited,
        "BlockError: the block of Linear: stop_gradient(Glob('kernel')), opened at "
        'tasks.py:LINE, belongs to another asyncio task, which was suspended '
        'inside it.\n'
        'Leave the block before await.',
    ),
    'a block on a model without effect': (
        lambda: opened(nnx.stop_gradient(nnx.Linear(1, 2, rngs=nnx.Rngs(0)), 'bias')),
        "NothingStoppedWarning: Linear: stop_gradient(Glob('bias')) has no effect: "
        'none of its 1 Variables was read in the block.\n'
        'Open it around the code that reads the model itself: nnx.cached_partial and '
        'nnx.split before it have made a copy.',
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
        'Open a block of flax_sg.nnx: with nnx.stop_gradient(model, where). Or give '
        'the state: nnx.state(model, nnx.Param).',
        stopped_state,
    ),
}
where = 'kernel'

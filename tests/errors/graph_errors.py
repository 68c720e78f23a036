"""NNX models: views and filters that cannot be, linen forms; see test_errors."""

from __future__ import annotations

import inspect
from typing import Any

import jax.numpy as jnp
import optax

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


class Closed(nnx.Module):
    """Keeps a function that reads a layer of its own."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        layer = self.layer
        self.run = lambda x: layer(x)


def pair(tied: bool) -> Any:
    out = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Param(jnp.zeros(2)))
    if tied:
        out.b = out.a
    return out


def asked_in_levels(depth: int) -> Any:
    """Of a model with two to the power of the depth paths for each weight."""
    shared: Any = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    for _ in range(depth):
        shared = nnx.Dict(one=shared, two=shared)
    return nnx.stop_gradient(shared, '**/kernel')


CASES: dict[str, Any] = {
    'a model whose weights have too many paths': (
        lambda: asked_in_levels(40),
        'FilterTypeError: share modules so often that there are over 10,000 more paths '
        'than places. | A filter is asked for each path of a weight. | Give the part',
        lambda: asked_in_levels(5),
    ),
    'an optimizer of what is frozen': (
        lambda: nnx.Optimizer(model, optax.sgd(0.1), wrt=~sg.live(loss, model)),
        'FilterTypeError: nnx.Optimizer(model, tx, wrt=live)',
    ),
    'a view that stops what is trained': (
        lambda: nnx.stop_gradient(model, sg.live(loss, model)),
        'FilterTypeError: nnx.stop_gradient(model, ~live)',
    ),
    'a view that trains what is frozen': (
        lambda: nnx.train_only(model, ~sg.live(loss, model)),
        'FilterTypeError: nnx.train_only(model, live)',
    ),
    'a gradient of what is frozen': (
        lambda: nnx.DiffState(0, ['head/**', ~sg.live(loss, model)]),
        'FilterTypeError: nnx.DiffState(0, live)',
    ),
    'a name of linen': (
        lambda: nnx.Frozen,
        "AttributeError: 'Frozen' | nnx.stop_gradient(layer, True)",
    ),
    'a name that there is not': (lambda: nnx.Linaer, "AttributeError: 'Linaer'"),
    'a kind that no Variable has': (
        lambda: nnx.stop_gradient(model, True, kind='params'),
        "UnusedFilterError: kind='params' | There are: nnx.Param | kind=nnx.Param",
        lambda: nnx.stop_gradient(model, True, kind=nnx.Param),
    ),
    'a pattern for Variables of another kind': (
        lambda: nnx.stop_gradient(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), 'mean'),
        "UnusedFilterError: 'mean' | It takes others: write kind=nnx.BatchStat.",
        lambda: nnx.stop_gradient(
            nnx.BatchNorm(2, rngs=nnx.Rngs(0)), 'mean', kind=nnx.BatchStat
        ),
    ),
    'two values for one Variable': (
        lambda: nnx.substitute(pair(True), pair(False)),
        "StructureError: 'a' and 'b' are one Variable of the model, with one value. "
        'Of the values they differ. | Tie them in the values',
        lambda: nnx.substitute(pair(True), {'a': jnp.zeros(2)}),
    ),
    'a state of a target that ties weights': (
        lambda: nnx.substitute(pair(False), nnx.state(pair(True))),
        "StructureError: the state has no value for 'b' | Give the target itself, or "
        'name what is replaced: where=.',
        lambda: nnx.substitute(pair(False), pair(True)),
    ),
    'a function that holds layers': (
        lambda: nnx.stop_gradient(Closed(), 'layer/**'),
        'ArgumentTypeError: Closed.run holds modules of the model in a function | '
        'Write a method in place of a function',
    ),
    'a glob in a filter of NNX': (
        lambda: nnx.DiffState(0, nnx.All(nnx.Param, 'kern*')),
        "FilterTypeError: 'kern*' | nnx.All(nnx.Param, nnx.where(model, 'kern*'))",
        lambda: nnx.DiffState(0, nnx.All(nnx.Param, nnx.where(model, 'kern*'))),
    ),
    'a view in an attribute': (
        lambda: nnx.Optimizer(
            nnx.Dict(a=model, b=nnx.stop_gradient(model, True)),
            optax.sgd(0.1),
            wrt=nnx.Param,
        ),
        'UserWarning: nnx.Optimizer is given a view: nnx.stop_gradient made this '
        'Linear. | make the view where you call it',
        lambda: nnx.Optimizer(nnx.Dict(a=model), optax.sgd(0.1), wrt=nnx.Param),
    ),
    'a path that an optimizer cannot find': (
        lambda: nnx.Optimizer(model, optax.sgd(0.1), wrt='haed'),
        "UnusedFilterError: nnx.where: Glob('haed') | 'kernel'",
    ),
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
    'some leaves of a Variable, where Flax asks': (
        lambda: nnx.state(SEVERAL, sg.arrays(lambda a: a.ndim > 1)),
        "PartError: 'w' | an NNX filter takes whole leaves",
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
    'a tree without values': (
        lambda: nnx.substitute(model, {'layer': {}}),
        'ArgumentTypeError: a tree without a value cannot be read in place of',
    ),
    'a filter of another model': (
        lambda: nnx.state([model], nnx.where(model, 'kernel')),
        "UnknownNameError: 'kernel' | nnx.where",
    ),
    'what is trained, to a freeze': (
        lambda: sg.freeze(optax.sgd(1.0), nnx.where(model, 'kernel')),
        "FilterTypeError: <nnx.where: 'kernel'> names what is trained | "
        'sg.freeze(tx, ~live)',
    ),
    'what is trained, to a view that stops': (
        lambda: nnx.stop_gradient(model, nnx.where(model, 'kernel')),
        'FilterTypeError: nnx.stop_gradient(model, where) names what is frozen | '
        'nnx.stop_gradient(model, ~live)',
    ),
    'a copy of a module': (
        lambda: sg.stop_gradient(model, 'kernel'),
        'ArgumentTypeError: sg.stop_gradient(tree, where) | '
        'nnx.stop_gradient(model, where)',
        stopped_state,
    ),
    'a block of linen around a model of NNX': (
        lambda: in_a_block_of_linen('ker*el'),  # No other test names this one.
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

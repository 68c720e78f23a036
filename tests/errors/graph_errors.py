"""NNX models: views and filters that cannot be, linen forms; see test_errors."""

from __future__ import annotations

import inspect
from typing import Any

import jax
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
NORM = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
OF_ALL_KINDS = jax.tree.map(lambda value: value is None, nnx.state(NORM))
# In a wrong place.
STATE: Any = nnx.state(model)
NAME: Any = 'ema'
TYPE: Any = nnx.Param


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
        lambda: asked_in_levels(5),
    ),
    'an optimizer before the model': (
        lambda: nnx.Optimizer(optax.adam(0.1), model, wrt='kernel'),
        lambda: nnx.Optimizer(model, optax.adam(0.1), wrt='kernel'),
    ),
    'an optimizer of what is frozen': lambda: nnx.Optimizer(
        model, optax.sgd(0.1), wrt=~sg.live(loss, model)
    ),
    'a view of what is trained': lambda: nnx.stop_gradient(model, sg.live(loss, model)),
    'a name of linen': lambda: nnx.Frozen,
    'a name that there is not': lambda: nnx.Linaer,
    'a kind that no Variable has': (
        lambda: nnx.stop_gradient(model, True, kind='params'),
        lambda: nnx.stop_gradient(model, True, kind=nnx.Param),
    ),
    'a pattern for Variables of another kind': (
        lambda: nnx.stop_gradient(NORM, 'mean'),
        lambda: nnx.stop_gradient(NORM, 'mean', kind=nnx.BatchStat),
    ),
    'a tree of bools for Variables of all kinds': (
        lambda: nnx.stop_gradient(NORM, OF_ALL_KINDS),
        lambda: nnx.stop_gradient(NORM, OF_ALL_KINDS, kind=...),
    ),
    'two values for one Variable': (
        lambda: nnx.substitute(pair(True), pair(False)),
        lambda: nnx.substitute(pair(True), {'a': jnp.zeros(2)}),
    ),
    'a state of a target that ties weights': (
        lambda: nnx.substitute(pair(False), nnx.state(pair(True))),
        lambda: nnx.substitute(pair(False), pair(True)),
    ),
    'a function that holds layers': lambda: nnx.stop_gradient(Closed(), 'layer/**'),
    'a glob in a filter of NNX': (
        lambda: nnx.DiffState(0, nnx.All(nnx.Param, 'kern*')),
        lambda: nnx.DiffState(0, nnx.All(nnx.Param, nnx.where(model, 'kern*'))),
    ),
    'a view in an attribute': (
        lambda: nnx.Optimizer(
            nnx.Dict(a=model, b=nnx.stop_gradient(model, True)),
            optax.sgd(0.1),
            wrt=nnx.Param,
        ),
        lambda: nnx.Optimizer(nnx.Dict(a=model), optax.sgd(0.1), wrt=nnx.Param),
    ),
    'a path of no Variable': lambda: nnx.Optimizer(model, optax.sgd(0.1), wrt='haed'),
    'a typo in a view': lambda: nnx.stop_gradient(model, 'kernle'),
    'a state in place of a model': (
        lambda: nnx.stop_gradient(STATE, 'kernel'),
        'nnx.stop_gradient(model, where)',
    ),
    'rows for an optimizer': (
        lambda: nnx.Optimizer(model, tx, wrt=live),
        'nnx.Optimizer(model, sg.freeze(tx, ~live), wrt=nnx.Param)',
    ),
    'some leaves of a Variable, where Flax asks': lambda: nnx.state(
        SEVERAL, sg.arrays(lambda a: a.ndim > 1)
    ),
    'a hijax Variable': lambda: nnx.stop_gradient(hijax(), 'w'),
    'a name in place of values': lambda: nnx.substitute(model, NAME),
    'a tree without values': lambda: nnx.substitute(model, {'layer': {}}),
    'a filter of another model': lambda: nnx.state([model], nnx.where(model, 'kernel')),
    'a copy of a module': (lambda: sg.stop_gradient(model, 'kernel'), stopped_state),
    'a block of linen around a model of NNX': (
        lambda: in_a_block_of_linen('ker*el'),
        through_a_view,
    ),
    'a wrapper of linen around a model of NNX': lambda: nn.Frozen(model),
    'a rule of linen on a model of NNX': lambda: nn.stop_gradient(model, 'kernel'),
    'a type of Variables in place of a filter': (
        lambda: nn.stop_gradient(TYPE),
        lambda: nnx.stop_gradient(model, True, kind=TYPE),
    ),
    'a model of NNX in place of a filter': lambda: nn.stop_gradient(model),
    'a filter in a table of a model of NNX': (
        lambda: sg.tabulate(model, 'ker*'),
        lambda: sg.paths(model, where='ker*'),
    ),
    'paths of a model of NNX, the filter without its name': (
        lambda: sg.paths(model, 'ker*'),
        lambda: sg.paths(model, where='ker*'),
    ),
    'a model of NNX without inputs': (
        lambda: sg.tabulate(model),
        lambda: sg.tabulate(model, x),
    ),
}
where, tx, live = 'kernel', optax.sgd(0.1), sg.at('kernel', 0)

"""NNX models for tests, and programs by hand: stopped copies and explicit stops.

This file does not import flax_sg.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tests.helpers.oracle import by_path, names_of

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Layer(nnx.Module):
    """A linear layer whose parameters are read in two ways."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))
        self.bias = nnx.Param(jax.random.normal(rngs.params(), (4,)))

    def __call__(self, x):
        return jnp.tanh(x @ self.kernel[...] + jnp.broadcast_to(self.bias, x.shape))


class Net(nnx.Module):
    """Layers of several kinds; ``body`` comes before ``head``."""

    def __init__(self, seed: int = 0, dropout: float = 0.5):
        rngs = nnx.Rngs(seed)
        self.body = nnx.List([Layer(rngs), Layer(rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def features(self, x):
        return self.body[1](self.body[0](x))

    def __call__(self, x):
        return self.head(self.drop(self.norm(self.features(x))))


@nnx.split_rngs(splits=3)
@nnx.vmap(in_axes=0, out_axes=0)
def stacked(rngs: nnx.Rngs) -> Layer:
    return Layer(rngs)


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
def through(layer: Layer, x: jax.Array) -> jax.Array:
    return layer(x)


def loss_of(model: Any, x: Any = X) -> Any:
    return jnp.mean((model(x) - 1.0) ** 2)


def total(model: Any, x: Any = X) -> Any:
    return model.features(x).sum()


def stopped(model: Any, where: Any = 'body/**') -> Any:
    """A copy of a model with stopped parameters; other Variables are the model's own.

    So batch statistics and random streams of the model go on.

    Args:
        model: an NNX model.
        where: what the paths of these parameters begin with, before the asterisks, or a
            function of a path.
    """
    chosen = (
        where if callable(where) else lambda path: path.startswith(where.strip('*'))
    )

    def stop(keys: Any, variable: Any) -> Any:
        if not (isinstance(variable, nnx.Param) and chosen(names_of(keys))):
            return variable
        value = jax.tree.map(jax.lax.stop_gradient, variable.get_raw_value())
        return type(variable)(value)

    return jax.tree_util.tree_map_with_path(
        stop, model, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )


def pure(state: Any) -> Any:
    """A state, or the whole state of a model, as nested dicts of arrays."""
    state = nnx.to_pure_dict(
        state if isinstance(state, nnx.State) else nnx.state(state)
    )
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, state)


def zeros(loss: Any, model: Any) -> list[str]:
    """The parameters of a model whose gradient is zero."""
    grads = by_path(pure(nnx.grad(loss)(model)))
    return [name for name, leaf in grads.items() if not leaf.any()]

"""A typed user program, which pyright and mypy check and nobody runs.

An `ignore` expects an error on its line, from mypy (`type:`) or from pyright. An unused
`ignore` is an error too. Both tools must see the names and types of Flax and flax_sg.
"""

from typing import Any, assert_type

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

import flax_sg as sg
from flax_sg import filters, nnx, testing
from flax_sg import linen as nn
from flax_sg.flow import GradientFlow
from flax_sg.forms.block_decorator import BlockDecorator
from flax_sg.nnx import choosing
from flax_sg.summary import ModuleTable, Paths

# Names of Flax: classes with their fields, functions, submodules.

assert_type(nn.Dense(3), flax.linen.Dense)
assert_type(nn.Dense(features=3, use_bias=False).features, int)
assert_type(nn.relu(jnp.ones(3)), jax.Array)
assert_type(nn.recurrent.GRUCell(3), flax.linen.GRUCell)
_ = nn.Densse  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
nn.Dense(3, use_bais=False)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


class Model(nn.Module):
    """A module written as with flax.linen."""

    width: int

    def setup(self) -> None:
        """With a frozen part."""
        init = nn.initializers.zeros
        self.dense = nn.Frozen(nn.Dense(self.width, kernel_init=init), 'kernel')

    @nn.stop_gradient('dense/**')
    def __call__(self, x: jax.Array) -> jax.Array:
        """In an extent of each kind."""
        with nn.train_only('dense/**'), nn.read_only(True):
            return nn.relu(x)


assert_type(Model(3).width, int)
assert_type(Model(3)(jnp.ones(3)), jax.Array)
Model(widht=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
Model('3')  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

# flax_sg: one argument gives a value; a target gives the same kind of target.

assert_type(nn.stop_gradient('dense/**'), BlockDecorator)
assert_type(nn.stop_gradient(lambda path: path.startswith('a')), BlockDecorator)
assert_type(nn.stop_gradient(nn.Dense, 'kernel'), type[nn.Dense])
assert_type(nn.train_only(nn.Dense, 'kernel')(3), nn.Dense)
assert_type(nn.substitute('ema_params', where='dense/**'), BlockDecorator)
assert_type(nn.substitute(nn.Dense, lambda path, value: value), type[nn.Dense])
assert_type(nn.read_only('dense/**'), BlockDecorator)
nn.substitute(3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
nn.stop_gradient(3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]

half = nn.scale_gradient('dense/**', 0.5)
assert_type(half, BlockDecorator)
assert_type(half(nn.Dense(3)), flax.linen.Dense)
assert_type(half(nn.Dense), type[flax.linen.Dense])
assert_type(nn.scale_gradient(nn.Dense, 'kernel', 0.5), type[flax.linen.Dense])
Attends = nn.scale_gradient(nn.Embed, 'embedding', 0.5, methods=['attend'])
assert_type(Attends, type[flax.linen.Embed])
nn.stop_gradient(nn.Dense, 'kernel', methods=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
with (
    half,
    nn.map_cotangent(True, lambda path, ct: ct),
    nn.stop_gradient(True, levels=1),
):
    pass
assert_type(nn.Frozen(nn.Dense(3), 'kernel', state='eval'), nn.Frozen)
assert_type(nn.mirror(nn.Dense(3), state='eval'), Any)
assert_type(nn.replace_cotangent(nn.Dense, 'kernel', {}), type[nn.Dense])
assert_type(nn.copy_cotangent({'a': 'b'}), BlockDecorator)
assert_type(nn.print_cotangent('a'), BlockDecorator)
assert_type(nn.clip_gradient('a', norm=1.0), BlockDecorator)
assert_type(nn.reverse_gradient(nn.Dense, 'a'), type[nn.Dense])
nn.scan(nn.Dense, variable_axes={'params': 0}, length=3, frozen_layers=[0])
nn.copy_cotangent(['a'])  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
nn.clip_gradient('a', norms=1.0)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]

# Filters and trees.

Tree = dict[str, jax.Array]
params: Tree = {'a': jnp.ones(3), 'b': jnp.ones(3)}


def loss(params: Tree, x: jax.Array) -> jax.Array:
    """A loss."""
    return jnp.sum(params['a'] * params['b'] * x)


x = jnp.ones(3)
either: filters.Where = ['a', lambda path: path.name == 'b', sg.where('a')]
assert_type(sg.where(either) & ~sg.where('b', True), filters.Filter)
assert_type(sg.arrays(lambda a: a.ndim < 2) | sg.at('a', np.s_[:2]), filters.Filter)
assert_type(filters.of_type(nn.Dense, nn.Dense(3), x), filters.Filter)
assert_type(filters.Collection('params'), filters.Collection)
assert_type(sg.Path('a/b').parts, tuple[str, ...])
assert_type(sg.mask(params, trained='a'), Any)
assert_type(sg.labels(params, {'slow': 'a', 'fast': True}), Any)
assert_type(sg.partition(params, 'a'), tuple[Any, Any])
parts = sg.partition_n(params, {'head': 'a', 'rest': True})
assert_type(sg.combine(parts['head'], parts['rest']), Any)
assert_type(sg.stop_gradient(params, 'a'), Any)
assert_type(sg.substitute(params, {'a': x}), Any)
assert_type(sg.rewrite(params, nn.scale_gradient('a', 0.5)), Any)
assert_type(bool(sg.ABSENT), bool)
assert_type(sg.NonDifferentiable(x).value, Any)


@sg.trainable('kernel')
class Whitened(flax.nnx.Pytree):
    """A class that declares what is trained."""


assert_type(Whitened(), Whitened)

# Derivatives, optimizers, reports.

sg.value_and_grad(loss, wrt=sg.DECLARED)(params, x)
assert_type(sg.grad(loss, wrt='a', absent='zeros')(params, x), Any)
sg.vjp(loss, params, x, wrt='a')
tx = sg.freeze(optax.adam(1e-3), 'a')
assert_type(tx, optax.GradientTransformationExtraArgs)
assert_type(sg.adopt(tx, params, tx.init(params)), Any)
assert_type(sg.live(loss, params, x), filters.Filter)
flow = sg.gradient_flow(loss, params, x)
assert_type(flow, GradientFlow)
assert_type(sg.paths(nn.Dense(3), x), Paths)
assert_type(sg.tabulate(nn.Dense(3), x), ModuleTable)
ahead = sg.precompute(loss, params, x, wrt='a')
ahead.late(params, ahead.early(params, x))
assert_type(sg.store(lambda x: x, x, 'folder', batch_size=2), sg.Rows)
assert_type(len(sg.Rows('folder')), int)
testing.assert_stopped(flow, 'a')
testing.assert_flows(loss, 'a', params, x, output='output')
testing.assert_trains_only(loss, ['a', 'b'], params, x)
testing.assert_moves_only(params, params, 'a', gradients=params)
assert_type(testing.moves(params, params).status_of('a'), str)
testing.assert_same_program(loss, loss, params, x)
assert_type(testing.optimized_hlo(loss, params, x), str)
sg.grad(lambda params: params, wrf='a')  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
_ = sg.gradd  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

# NNX: classes of our own in the place of Flax's.

model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
assert_type(nnx.stop_gradient(model, 'kernel'), flax.nnx.Linear)
assert_type(nnx.train_only(model, 'kernel'), flax.nnx.Linear)
assert_type(nnx.substitute(model, {'kernel': x}), flax.nnx.Linear)
assert_type(nnx.scale_gradient(model, 'kernel', 0.5), flax.nnx.Linear)
assert_type(nnx.reverse_gradient(model, 'kernel'), flax.nnx.Linear)
assert_type(nnx.clip_gradient(model, 'kernel', norm=1.0), flax.nnx.Linear)
assert_type(nnx.map_cotangent(model, True, lambda path, ct: ct), flax.nnx.Linear)
assert_type(nnx.replace_cotangent(model, 'kernel', {}), flax.nnx.Linear)
assert_type(nnx.print_cotangent(model, 'kernel'), flax.nnx.Linear)
assert_type(nnx.Optimizer(model, tx, wrt='kernel'), choosing.Optimizer[flax.nnx.Linear])
nnx.ModelAndOptimizer(model, tx, wrt='kernel')
assert_type(nnx.DiffState(0, 'kernel'), choosing.DiffState)
assert_type(nnx.where(model, 'kernel'), choosing.Chosen)

"""Trainers that freeze with other libraries: Haiku, equinox and Flax's NNX.

All train the linen model of the workload, so only the freezing differs. Each library
holds the parameters in its own way: Haiku creates them by ``hk.get_parameter``, for
equinox the tree of parameters is the model, and NNX has a bridge.
"""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks import spellings
from benchmarks.selections import Selection, path_of
from benchmarks.trainers import ADAM, Data, Trainer, UnableError, labelled, optimized
from benchmarks.workloads import Workload, objective

TOP = '~'  # Haiku's name for parameters that are in no module.


def custom_getter(module: Any, selection: Selection) -> spellings.Apply:
    """Spells a stop with ``hk.custom_getter``, around all parameter reads."""

    def stop(read: Any, leaf: jax.Array, context: Any) -> jax.Array:
        leaf = read(leaf)
        if not selection.takes(context.full_name.removeprefix(f'{TOP}/')):
            return leaf
        return spellings.stopped(leaf, selection.rows)

    def apply(variables: Any, *args: Any, **options: Any) -> Any:
        def read(keys: Any, leaf: Any) -> jax.Array:
            return hk.get_parameter(path_of(keys), leaf.shape, leaf.dtype, jnp.zeros)

        with hk.custom_getter(stop):
            params = jax.tree_util.tree_map_with_path(read, variables['params'])
        return module.apply({**variables, 'params': params}, *args, **options)

    return apply


def held(params: Any) -> dict[str, dict[str, Any]]:
    """Returns parameters in the form in which Haiku holds them."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {TOP: {path_of(keys): leaf for keys, leaf in leaves}}


def haiku(work: Workload, data: Data) -> Trainer:
    """A trainer with ``hk.custom_getter``."""
    loss = work.loss(custom_getter)
    shapes = jax.eval_shape(lambda: data.params)
    transformed = hk.without_apply_rng(
        hk.transform(lambda state, *inputs: loss(shapes, state, *inputs))
    )
    tx = labelled(held(work.frozen.mask(data.params)))
    gradient = jax.value_and_grad(transformed.apply, has_aux=True)
    return optimized(tx, gradient, data, held(data.params))


def stopped_part(module: Any, selection: Selection) -> spellings.Apply:
    """Spells a stop on the frozen part of ``eqx.partition``."""

    def apply(variables: Any, *args: Any, **options: Any) -> Any:
        mask = selection.mask(variables['params'])
        frozen, live = eqx.partition(variables['params'], mask)
        params = eqx.combine(live, jax.lax.stop_gradient(frozen))
        return module.apply({**variables, 'params': params}, *args, **options)

    return apply


def equinox(work: Workload, data: Data) -> Trainer:
    """A trainer with ``eqx.partition`` and ``eqx.filter_value_and_grad``."""
    if work.frozen.rows is not None:
        raise UnableError('a partition takes a whole array, not some layers of a stack')
    loss = work.loss(stopped_part) if work.per_use else work.loss_of(work.module)
    live_mask = jax.tree.map(lambda leaf: not leaf, work.frozen.mask(data.params))

    def gradient(params: Any, state: Any, *inputs: jax.Array) -> Any:
        live, frozen = eqx.partition(params, live_mask)

        @eqx.filter_value_and_grad(has_aux=True)
        def of_live(live: Any) -> Any:
            return loss(eqx.combine(live, frozen), state, *inputs)

        return of_live(live)

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        live = eqx.filter(params, live_mask)
        updates, opt_state = ADAM.update(grads, opt_state, live)
        return eqx.apply_updates(params, updates), opt_state

    def init(params: Any) -> Any:
        return ADAM.init(eqx.filter(params, live_mask))

    return Trainer(gradient, update, init, data.params, data.state)


def diff_state(work: Workload, data: Data) -> Trainer:
    """A trainer with ``nnx.DiffState``."""
    if work.per_use:
        raise UnableError('a DiffState holds for a whole gradient call')
    if work.frozen.rows is not None:
        raise UnableError('a filter takes a whole Variable, not some layers of a stack')
    model = nnx.bridge.ToNNX(work.module)
    variables = {'params': data.params, **data.state}
    attributes = nnx.bridge.variables.linen_vars_to_nnx_attrs(variables)
    for name, value in attributes.items():
        setattr(model, name, nnx.data(value))
    graph, params, state = nnx.split(model, nnx.Param, ...)

    def is_live(path: tuple[str, ...], _: Any) -> bool:
        return not work.frozen.takes('/'.join(path))

    live_filter = nnx.All(nnx.Param, is_live)

    def loss(model: Any, *inputs: jax.Array) -> jax.Array:
        work.traced()
        return objective(model(*inputs, mutable=list(data.state) or False))

    def gradient(params: Any, state: Any, *inputs: jax.Array) -> Any:
        model = nnx.merge(graph, params, state)
        of_live = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, live_filter))
        value, grads = of_live(model, *inputs)
        return (value, nnx.split(model, nnx.Param, ...)[2]), grads

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        live, frozen = params.split(is_live, ...)
        updates, opt_state = ADAM.update(grads, opt_state, live)
        return nnx.merge_state(frozen, optax.apply_updates(live, updates)), opt_state

    def init(params: Any) -> Any:
        return ADAM.init(params.split(is_live, ...)[0])

    return Trainer(gradient, update, init, params, state)

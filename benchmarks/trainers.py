"""Training steps that freeze a part of a model, one for each way to freeze.

All train the same linen model with Adam. A trainer defines what each ``jax.jit``
computes; ``measure.py`` finds its time and cost.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen

import flax_sg as sg
from benchmarks import spellings
from benchmarks.selections import Selection, path_of
from benchmarks.workloads import Workload

ADAM = optax.adam(1e-3)
CLIP = optax.clip_by_global_norm(1.0)


class UnableError(Exception):
    """A way to freeze cannot express a workload; the text says why."""


@dataclasses.dataclass(frozen=True)
class Data:
    """The initial data of a trainer: parameters, other variables, a batch."""

    params: Any
    state: Any
    inputs: list[jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
    """A training step.

    Attributes:
        gradient: maps parameters, other variables and inputs to the loss, with new
            variables, and the gradient.
        update: maps gradient, optimizer state and parameters to new parameters and a
            new optimizer state.
        init: maps parameters to the first optimizer state.
        params: the parameters, in the form that this trainer needs.
        state: the other variables.
        one_jit: whether one program computes gradient and update, and returns no
            gradient.
    """

    gradient: Callable[..., Any]
    update: Callable[..., Any]
    init: Callable[[Any], Any]
    params: Any
    state: Any
    one_jit: bool = False


def optimized(
    tx: Any, gradient: Any, data: Data, params: Any = None, one_jit: bool = False
) -> Trainer:
    """Makes a trainer that applies the updates of an optimizer."""

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = data.params if params is None else params
    return Trainer(gradient, update, tx.init, params, data.state, one_jit)


def labelled(frozen: Any) -> Any:
    """Makes Adam with zero updates where the mask of frozen parameters is True."""
    labels = jax.tree.map(lambda leaf: 'frozen' if leaf else 'live', frozen)
    return optax.multi_transform({'live': ADAM, 'frozen': optax.set_to_zero()}, labels)


def stops(
    work: Workload,
    data: Data,
    spelling: Any = spellings.by_hand,
    one_jit: bool = False,
    clip: bool = False,
) -> Trainer:
    """Stops gradients in the loss; the gradient is a full tree with zeros."""
    gradient = jax.value_and_grad(work.loss(spelling), has_aux=True)
    tx = labelled(work.frozen.mask(data.params))
    tx = optax.chain(CLIP, tx) if clip else tx
    return optimized(tx, gradient, data, one_jit=one_jit)


def partition(
    work: Workload, data: Data, tx: Any = ADAM, one_jit: bool = False
) -> Trainer:
    """Splits the parameters; the loss is a function of the live ones."""
    if work.per_use:
        raise UnableError('no parameter is frozen in all of its uses')
    loss = work.loss_of(work.module)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(data.params)
    live: dict[str, jax.Array] = {}
    frozen: dict[str, jax.Array] = {}
    for keys, leaf in leaves:
        path = path_of(keys)
        if not work.frozen.takes(path):
            live[path] = leaf
        elif work.frozen.rows is None:
            frozen[path] = leaf
        else:
            before, inside, after = jnp.split(leaf, work.frozen.rows)
            frozen[f'{path} frozen'] = inside
            live[path] = jnp.concatenate([before, after])

    def whole(path: str, params: Mapping[str, jax.Array]) -> jax.Array:
        if f'{path} frozen' not in params or work.frozen.rows is None:
            return params[path]
        before, after = jnp.split(params[path], work.frozen.rows[:1])
        return jnp.concatenate([before, params[f'{path} frozen'], after])

    def gradient(params: Any, state: Any, *inputs: jax.Array) -> Any:
        def of_live(live: Any) -> Any:
            joined = {**params, **live}
            tree = treedef.unflatten(whole(path_of(keys), joined) for keys, _ in leaves)
            return loss(tree, state, *inputs)

        return jax.value_and_grad(of_live, has_aux=True)(live_part(params))

    def live_part(params: Any) -> Any:
        return {path: params[path] for path in live}

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = tx.update(grads, opt_state, live_part(params))
        new = optax.apply_updates(live_part(params), updates)
        return {**params, **new}, opt_state

    def init(params: Any) -> Any:
        return tx.init(live_part(params))

    return Trainer(gradient, update, init, {**live, **frozen}, data.state, one_jit)


def masks(
    work: Workload, data: Data, one_jit: bool = False, clip: bool = False
) -> Trainer:
    """Computes all gradients; masks in the optimizer choose among them."""
    if work.per_use:
        raise UnableError('an optimizer sees the sum of the gradients of all uses')
    if work.frozen.rows is not None:
        raise UnableError('a mask takes a whole array, not some layers of a stack')
    gradient = jax.value_and_grad(work.loss_of(work.module), has_aux=True)
    frozen = work.frozen.mask(data.params)
    tx = optax.chain(
        CLIP if clip else optax.identity(),
        optax.masked(ADAM, jax.tree.map(lambda leaf: not leaf, frozen)),
        optax.masked(optax.set_to_zero(), frozen),
    )
    return optimized(tx, gradient, data, one_jit=one_jit)


def live(
    work: Workload,
    data: Data,
    tx: Any = ADAM,
    spelling: spellings.Spelling | None = None,
    one_jit: bool = False,
) -> Trainer:
    """Freezes in the model; ``sg.live`` finds what to train."""
    loss = work.loss(spelling)
    live = sg.live(loss, data.params, data.state, *data.inputs, has_aux=True)
    frozen_tx = sg.freeze(tx, ~live)

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        updates, opt_state = frozen_tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    gradient = sg.value_and_grad(loss, has_aux=True, wrt=live)
    return Trainer(gradient, update, frozen_tx.init, data.params, data.state, one_jit)


def frozen_layers(work: Workload, data: Data) -> Trainer:
    """Scans with ``frozen_layers=``: frozen layers run in a separate loop."""
    if work.split is None:
        raise UnableError('for layers of a scan')
    gradient = jax.value_and_grad(work.loss_of(work.split), has_aux=True)
    return optimized(labelled(work.frozen.mask(data.params)), gradient, data)


def map_variables(module: Any, selection: Selection) -> spellings.Apply:
    """Spells a stop with ``nn.map_variables`` around a method of the module."""

    def stop(variables: Any) -> Any:
        params = selection.map(
            lambda leaf: spellings.stopped(leaf, selection.rows), variables['params']
        )
        return {**variables, 'params': params}

    def apply(variables: Any, *args: Any, method: str = '__call__', **rest: Any) -> Any:
        def call(module: Any, *args: Any) -> Any:
            return getattr(module, method)(*args)

        lifted = linen.map_variables(call, 'params', trans_in_fn=stop)
        return module.apply(variables, *args, method=lifted, **rest)

    return apply

"""On many devices, programs, collectives and shardings equal those by hand."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flax_sg as sg
from flax_sg import errors, testing
from flax_sg import linen as nn
from tests.helpers import oracle, programs

AXIS = 'data'
RULES = (('embed', AXIS), ('mlp', None))
FROZEN = 'backbone/**'


def boxed(init: Any) -> Any:
    return linen.with_logical_partitioning(init, ('embed', 'mlp'))


class Backbone(linen.Module):
    layers: int
    width: int
    boxes: bool

    @linen.compact
    def __call__(self, x):
        init = linen.initializers.lecun_normal()
        init = boxed(init) if self.boxes else init
        for _ in range(self.layers):
            wide = linen.Dense(4 * self.width, use_bias=False, kernel_init=init)(x)
            narrow = linen.Dense(self.width, use_bias=False, kernel_init=init)
            x = x + narrow(linen.gelu(wide))
        return x


class Net(linen.Module):
    """A backbone, frozen in one of several ways, and a head."""

    layers: int = 1
    width: int = 16
    features: int = 8
    boxes: bool = False
    spelling: str = ''

    @linen.compact
    def __call__(self, x):
        fields = (self.layers, self.width, self.boxes)
        block = contextlib.nullcontext()
        if self.spelling == 'lifted class':
            backbone = nn.stop_gradient(Backbone, True)(*fields, name='backbone')
        elif self.spelling == 'Frozen':
            backbone = nn.Frozen(Backbone(*fields, name='backbone'))
        else:
            backbone = Backbone(*fields, name='backbone')
        if self.spelling == 'block inside':
            block = nn.stop_gradient(FROZEN)
        with block:
            x = backbone(x)
        return linen.Dense(self.features, name='head')(x)


Loss = Callable[[Any, Any], jax.Array]
Programs = tuple[Loss, Loss]


def loss_of(net: linen.Module, params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return jnp.mean((net.apply({'params': params}, x) - y) ** 2)


def in_backbone(path: str) -> bool:
    return path.startswith('backbone/')


def frozen(net: Net) -> Programs:
    """A loss of a net with a frozen backbone, and the same with stops by hand."""
    bare = net.clone(spelling='')

    def ours(params, batch):
        if net.spelling == 'block at top':
            with nn.stop_gradient(FROZEN):
                return loss_of(bare, params, batch)
        return loss_of(net, params, batch)

    def hand(params, batch):
        return loss_of(bare, oracle.stopped(params, in_backbone), batch)

    return ours, hand


@dataclasses.dataclass(frozen=True)
class Layout:
    """How parameters are placed on the devices.

    Attributes:
        boxes: whether the parameters of the backbone say it.
        sharded: whether each parameter is sharded; otherwise it is replicated.
        mapped: whether the step is under ``jax.shard_map``.
    """

    boxes: bool = False
    sharded: bool = False
    mapped: bool = False

    def place(self, params: Any) -> Any:
        """The parameters, on the devices."""
        if self.boxes:
            specs = linen.logical_to_mesh(linen.get_partition_spec(params), RULES)
        else:
            cut = PartitionSpec(AXIS) if self.sharded else PartitionSpec()
            specs = jax.tree.map(lambda _: cut, params)
        return jax.tree.map(at, specs, params)

    def program(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step on all devices. Each device has a part of the batch."""
        if not self.mapped:
            return jax.jit(step)
        every, cut = PartitionSpec(), PartitionSpec(AXIS)
        return jax.jit(
            jax.shard_map(
                step, mesh=mesh(), in_specs=(every, every, cut), out_specs=every
            )
        )

    def loss(self, loss: Loss) -> Loss:
        """The mean of the loss over all devices."""
        if not self.mapped:
            return loss
        return lambda params, batch: jax.lax.pmean(loss(params, batch), AXIS)


LAYOUTS = {
    'data parallel': Layout(),
    'fully sharded': Layout(sharded=True),
    'boxes': Layout(boxes=True),
    'shard_map': Layout(mapped=True),
}
SPELLINGS = ('block at top', 'block inside', 'lifted class', 'Frozen')
TX = optax.sgd(0.1, momentum=0.9)


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), (AXIS,))


def at(spec: PartitionSpec, tree: Any) -> Any:
    return jax.device_put(tree, NamedSharding(mesh(), spec))


def batch_for(net: Net) -> Any:
    x, y = (
        jax.random.normal(jax.random.key(i), (64, features))
        for i, features in enumerate((net.width, net.features))
    )
    return x, y


def params_of(net: Net) -> Any:
    return net.init(jax.random.key(2), batch_for(net)[0])['params']


def train_step(loss: Loss) -> Callable[..., Any]:
    """One step with all gradients."""

    def step(params, state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads, value

    return step


def live_step(loss: Loss) -> Callable[..., Any]:
    """One step with the gradients of the head alone."""
    tx = sg.freeze(TX, FROZEN)

    def step(params, state, batch):
        value, grads = sg.value_and_grad(loss, wrt='head/**')(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads, value

    return step


def compiled(layout: Layout, step: Any, params: Any, state: Any, batch: Any) -> Any:
    with jax.set_mesh(mesh()), linen.logical_axis_rules(RULES):
        args = (params, state, at(PartitionSpec(AXIS), batch))
        return layout.program(step).lower(*args).compile()


def assert_same_program(ours: Any, hand: Any) -> None:
    testing.assert_same_program(ours, hand)
    out = jax.tree.leaves(ours.output_shardings)
    assert out == jax.tree.leaves(hand.output_shardings)


@pytest.mark.parametrize('name', LAYOUTS)
def test_the_program_is_that_of_stops_by_hand(name):
    layout = LAYOUTS[name]
    net = Net(boxes=layout.boxes)
    params, batch = layout.place(params_of(net)), batch_for(net)
    args = (params, TX.init(params), batch)

    hand = compiled(layout, train_step(layout.loss(frozen(net)[1])), *args)
    for spelling in SPELLINGS if name == 'data parallel' else ('Frozen',):
        ours, _ = frozen(net.clone(spelling=spelling))
        program = compiled(layout, train_step(layout.loss(ours)), *args)
        assert_same_program(program, hand)
    bare = train_step(layout.loss(functools.partial(loss_of, net)))
    with pytest.raises(errors.ExpectationError):
        assert_same_program(compiled(layout, bare, *args), hand)


def test_no_gradient_of_what_is_frozen_is_reduced():
    # Hazard 34: 13 MB of frozen backbone, half a megabyte of head.
    net = Net(layers=6, width=256, features=488)
    params, batch = params_of(net), batch_for(net)
    size = {name: bytes_of(params[name]) for name in params}
    assert 12.5e6 < size['backbone'] < 12.6e6
    assert 0.5e6 < size['head'] < 0.51e6
    layout = LAYOUTS['data parallel']
    params = layout.place(params)
    state = TX.init(params)

    def reduced(step, state=state):
        moved = programs.collectives(compiled(layout, step, params, state, batch))
        assert moved.keys() == {'all-reduce'}
        return moved['all-reduce']

    loss = 4
    for spelling in ('block at top', 'Frozen'):
        ours, hand = map(train_step, frozen(net.clone(spelling=spelling)))
        assert reduced(ours) == reduced(hand) == size['head'] + loss
    bare = functools.partial(loss_of, net)
    assert reduced(train_step(bare)) == size['head'] + size['backbone'] + loss
    live = sg.freeze(TX, FROZEN).init(params)
    assert reduced(live_step(bare), live) == size['head'] + loss


def bytes_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

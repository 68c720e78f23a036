"""A training step on several devices: where its arrays are, and what it moves."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import linen
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks import spellings, trainers
from benchmarks.accelerators import compilers
from benchmarks.accelerators.models import BACKBONE, Decoder
from benchmarks.accelerators.rows import Row, measured
from benchmarks.selections import path_of
from benchmarks.trainers import ADAM, CLIP, Data, Trainer
from benchmarks.workloads import Workload

CLIPPED = optax.chain(CLIP, ADAM)
STEP = {'one_jit': True, 'clip': True}
# All but two have one jit, and a clip before Adam.
WAYS: dict[str, Callable[[Workload, Data], Trainer]] = {
    'stops by hand': functools.partial(trainers.stops, **STEP),
    'partition by hand': functools.partial(
        trainers.partition, tx=CLIPPED, one_jit=True
    ),
    'flax_sg block': functools.partial(
        trainers.stops, spelling=spellings.block_around, **STEP
    ),
    'flax_sg Frozen': functools.partial(
        trainers.stops, spelling=spellings.frozen, **STEP
    ),
    'flax_sg live': functools.partial(trainers.live, tx=CLIPPED, one_jit=True),
    'optax mask, no clip': functools.partial(trainers.masks, one_jit=True),
    'optax mask': functools.partial(trainers.masks, **STEP),
    'optax mask, gradient in another jit': functools.partial(trainers.masks, clip=True),
}
Maker = Callable[[], Trainer]
MODEL = Decoder(4, 256, 8)
# With explicit shardings, a product does not gather its weight.
WHOLE = functools.partial(jax.sharding.reshard, out_shardings=PartitionSpec())


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where arrays are: on axes 'data' and 'model' of a mesh.

    Attributes:
        model: the number of devices on the axis 'model', and the least on 'data'.
        sharded: whether weights are sharded over 'data'; otherwise they are copied.
        boxes: whether weights are in boxes that name the axes.
        explicit: whether types of arrays have shardings.
    """

    model: int = 1
    sharded: bool = False
    boxes: bool = False
    explicit: bool = False

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """The mesh of all devices."""
        model = len(devices) if self.model == 0 else self.model
        kinds = (AxisType.Explicit if self.explicit else AxisType.Auto,) * 2
        return Mesh(np.array(devices).reshape(-1, model), ('data', 'model'), kinds)

    def specs(self, mesh: Mesh, params: Any) -> dict[str, PartitionSpec]:
        """The sharding of each parameter, by its path."""
        if self.boxes:
            leaves = jax.tree_util.tree_leaves_with_path(
                linen.get_partition_spec(params),
                is_leaf=lambda x: isinstance(x, PartitionSpec),
            )
            return {path_of(keys): spec for keys, spec in leaves}
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return {path_of(keys): self._spec(mesh, path_of(keys), x) for keys, x in leaves}

    def _spec(self, mesh: Mesh, path: str, leaf: Any) -> PartitionSpec:
        axes: list[str | None] = [None] * leaf.ndim
        if mesh.shape['model'] > 1 and path.endswith('kernel'):
            # Queries, keys, values and the wide layer by columns, the others by rows.
            axes[-2 if 'out' in path else -1] = 'model'
        elif mesh.shape['model'] > 1 and path.endswith('embedding'):
            axes[0] = 'model'
        # With explicit shardings, ``RMSNorm`` takes no part of its scale.
        if self.sharded and not (self.explicit and path.endswith('scale')):
            free = [
                axis
                for axis, name in enumerate(axes)
                if name is None and leaf.shape[axis] % mesh.shape['data'] == 0
            ]
            if free:
                axes[max(free, key=lambda axis: leaf.shape[axis])] = 'data'
        return PartitionSpec(*axes)


PLACEMENTS = {
    'data parallel': Placement(),
    'fully sharded': Placement(sharded=True),
    'tensor parallel': Placement(model=0),
    'fully sharded, tensor parallel': Placement(model=2, sharded=True),
    'the same, in boxes': Placement(model=2, boxes=True),
    'data parallel, explicit': Placement(explicit=True),
    'fully sharded, explicit': Placement(sharded=True, explicit=True),
}


def placed(mesh: Mesh, specs: Mapping[str, PartitionSpec], tree: Any) -> Any:
    """Makes shapes of arrays, on a mesh.

    Args:
        mesh: the mesh.
        specs: shardings by paths of parameters, with which paths in the tree end.
        tree: parameters, the state of an optimizer, or a batch of tokens, of which each
            device on the axis 'data' has a part.
    """

    def place(keys: Any, leaf: Any) -> Any:
        path = path_of(keys)
        ends = (spec for name, spec in specs.items() if f'/{path}'.endswith(f'/{name}'))
        is_batch = leaf.dtype == np.int32 and leaf.ndim == 2
        spec = next(ends, PartitionSpec('data') if is_batch else PartitionSpec())
        spec = spec if len(spec) <= leaf.ndim else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, tree)


def constrained(make: Maker, place: Callable[[Any], Any]) -> Maker:
    """Makes a step whose gradients are where their parameters are.

    Without, XLA keeps gradients whole on each device if only a norm reads them.
    """

    def made() -> Trainer:
        trainer = make()

        def gradient(*args: Any) -> Any:
            value, grads = trainer.gradient(*args)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, place(grads))
            return value, jax.lax.with_sharding_constraint(grads, shardings)

        return dataclasses.replace(trainer, gradient=gradient)

    return made


def data_of(module: linen.Module, batch: int, tokens: int) -> Data:
    """Shapes of parameters and tokens; no array is made."""
    text = jax.ShapeDtypeStruct((batch, tokens), np.int32)
    init = jax.eval_shape(lambda text: module.init(jax.random.key(0), text), text)
    return Data(init['params'], {}, [text])


def rows(
    platform: str,
    named: Sequence[str],
    only: str,
    model: Decoder = MODEL,
    tokens: int = 128,
) -> Iterator[Row]:
    """Compiles a step with a frozen backbone, in each placement.

    Args:
        platform: the platform.
        named: topologies.
        only: a regular expression for names of placements.
        model: the model.
        tokens: tokens of an example; there are four examples for each device.
    """
    for topology in named:
        devices = compilers.devices(platform, topology)
        for case, placement in PLACEMENTS.items():
            if not re.search(only, case):
                continue
            module = model.clone(boxes=placement.boxes)
            if placement.explicit:
                module = module.clone(lookup=False, fetch=WHOLE)
            mesh = placement.mesh(devices)
            with jax.set_mesh(mesh):
                data = data_of(module, 4 * len(devices), tokens)
                place = functools.partial(
                    placed, mesh, placement.specs(mesh, data.params)
                )
                work = Workload(case, module, [], BACKBONE)
                makers = {
                    way: functools.partial(make, work, data)
                    for way, make in WAYS.items()
                }
                if not placement.explicit:
                    sharded = constrained(makers['optax mask'], place)
                    makers['optax mask, gradient constrained'] = sharded
                yield from measured(topology, case, makers, data.inputs, place)

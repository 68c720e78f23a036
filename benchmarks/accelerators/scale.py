"""Models of a billion parameters and of eight, on hundreds of chips: shapes alone.

Compiled in bfloat16, with float32 parameters and a float32 optimizer, fully sharded,
one example for each chip.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import flax_sg as sg
from benchmarks import spellings, trainers
from benchmarks.accelerators import compilers
from benchmarks.accelerators.models import ADAPTED, BACKBONE, RANK, Decoder
from benchmarks.accelerators.rows import Row, measured
from benchmarks.accelerators.sharded import (
    CLIPPED,
    WAYS,
    Maker,
    Placement,
    constrained,
    data_of,
    placed,
)
from benchmarks.selections import Selection
from benchmarks.trainers import CLIP, Data, Trainer, optimized
from benchmarks.workloads import Workload
from flax_sg import linen as nn

MODELS = {
    '1 billion': Decoder(20, 2048, 16, 32_768),
    '8 billion': Decoder(40, 4096, 32, 32_768),
}
TOPOLOGIES = 'v5e:16x16', 'v5p:8x8x16'
TOKENS = 2048
LATE = 'mask behind a clip'
Makers = Mapping[str, Maker]
CaseOf = Callable[[Decoder, int, int], tuple[Makers, Data]]


def backbone(model: Decoder, batch: int, tokens: int) -> tuple[Makers, Data]:
    """The head alone is trained."""
    data = data_of(model, batch, tokens)
    return _ways(model, data, BACKBONE), data


def adapters(model: Decoder, batch: int, tokens: int) -> tuple[Makers, Data]:
    """Adapters on a frozen backbone are trained, and the head."""
    model = model.clone(rank=RANK)
    data = data_of(model, batch, tokens)
    return _ways(model, data, ADAPTED), data


def few_bits(model: Decoder, batch: int, tokens: int) -> tuple[Makers, Data]:
    """The same on weights of int8; only ways that split the parameters take these."""
    makers, data = adapters(model.clone(bits=8), batch, tokens)
    work = Workload('', model.clone(bits=8, rank=RANK), [], ADAPTED)
    wrapped = functools.partial(
        trainers.live, tx=CLIPPED, one_jit=True, spelling=spellings.frozen
    )
    return {**makers, 'flax_sg Frozen, live': lambda: wrapped(work, data)}, data


def layers(model: Decoder, batch: int, tokens: int) -> tuple[Makers, Data]:
    """The last fourth of the layers is trained, and the head."""
    first = 3 * model.depth // 4
    data = data_of(model, batch, tokens)
    embed, stack = Selection.of('embed/.*'), Selection.of('layers/.*', (0, first))
    where = ['embed/**', sg.at('layers/**', np.s_[:first])]
    adam = trainers.labelled(embed.mask(data.params))

    def no_embedding(params: Any) -> Any:
        return embed.map(jax.lax.stop_gradient, params)

    def masked(params: Any) -> Any:
        stop = functools.partial(spellings.stopped, rows=stack.rows)
        return no_embedding(stack.map(stop, params))

    def zeroed(grads: Any, _: Any = None) -> Any:
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        grads = stack.map(lambda leaf: leaf.at[:first].set(0.0), grads)
        return embed.map(zeros, grads)

    clipped = optax.chain(CLIP, adam)
    late = optax.chain(CLIP, optax.stateless(zeroed), adam)

    def make(
        module: Decoder, stop: Any = _same, mask: Any = _same, tx: Any = clipped
    ) -> Trainer:
        def loss(params: Any, state: Any, x: Any) -> Any:
            return module.apply({'params': stop(params)}, x), state

        def gradient(*args: Any) -> Any:
            value, grads = jax.value_and_grad(loss, has_aux=True)(*args)
            return value, mask(grads)

        return optimized(tx, gradient, data, one_jit=True)

    split = functools.partial(nn.scan, frozen_layers=slice(0, first))
    ours = model.clone(stop=nn.stop_gradient, frozen='embed/**', scan=split)
    at = model.clone(stop=nn.stop_gradient, frozen=where)
    return {
        'stops by hand': lambda: make(model.clone(by_hand=first), no_embedding),
        'flax_sg frozen_layers': lambda: make(ours),
        'flax_sg frozen_layers, sg.freeze': lambda: make(
            ours, tx=sg.freeze(CLIPPED, where)
        ),
        'mask on the weights': lambda: make(model, masked),
        'flax_sg block, sg.at': lambda: make(at),
        'mask on the gradient': lambda: make(model, mask=zeroed),
        LATE: lambda: make(model, tx=late),
        f'{LATE}, gradient in another jit': lambda: dataclasses.replace(
            make(model, tx=late), one_jit=False
        ),
    }, data


def _same(tree: Any) -> Any:
    return tree


def _ways(model: Decoder, data: Data, frozen: Selection) -> Makers:
    work = Workload('', model, [], frozen)
    return {n: functools.partial(make, work, data) for n, make in WAYS.items()}


CASES: dict[str, CaseOf] = {
    'backbone frozen': backbone,
    'three of four layers frozen': layers,
    'LoRA': adapters,
    'LoRA on int8': few_bits,
}


def rows(
    platform: str,
    topologies: Sequence[str],
    only: str,
    models: Mapping[str, Decoder] = MODELS,
    tokens: int = TOKENS,
) -> Iterator[Row]:
    """Compiles a step of each model, in each case.

    Args:
        platform: the platform.
        topologies: the topologies.
        only: a regular expression for names, such as ``'8 billion, LoRA'``.
        models: the models, by their names.
        tokens: tokens of an example; there is one for each device.
    """
    for topology in topologies:
        devices = compilers.devices(platform, topology)
        mesh = (placement := Placement(sharded=True)).mesh(devices)
        for name, model in models.items():
            for what, case_of in CASES.items():
                case = f'{name}, {what}'
                if re.search(only, case):
                    # Else weights would stay, and activations be gathered.
                    spread = functools.partial(
                        jax.lax.with_sharding_constraint,
                        shardings=NamedSharding(mesh, PartitionSpec('data')),
                    )
                    module = model.clone(spread=spread)
                    makers, data = case_of(module, len(devices), tokens)
                    specs = placement.specs(mesh, data.params)
                    place = functools.partial(placed, mesh, specs)
                    behind_clip = 'optax mask' if 'optax mask' in makers else LATE
                    if len(devices) > 1:
                        late = constrained(makers[behind_clip], place)
                        makers = {
                            **makers,
                            f'{behind_clip}, gradient constrained': late,
                        }
                    timed = platform == compilers.HERE
                    yield from measured(
                        *(topology, case, makers, data.inputs, place),
                        rounds=3,
                        timed=timed,
                    )

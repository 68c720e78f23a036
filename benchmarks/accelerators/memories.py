"""Frozen weights in the memory of the host, which each layer fetches."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import optax
from jax.sharding import SingleDeviceSharding

import flax_sg as sg
from benchmarks import spellings
from benchmarks.accelerators import compilers, times
from benchmarks.accelerators.models import ADAPTED, BACKBONE, RANK, Decoder
from benchmarks.accelerators.rows import Row, row_of
from benchmarks.accelerators.sharded import data_of
from benchmarks.selections import Selection, path_of
from benchmarks.trainers import ADAM
from benchmarks.workloads import Workload
from flax_sg.testing import optimized_hlo

WEIGHTS = Selection.of('layers/.*base/kernel')
# Each layer fetches its weights.
FETCH = functools.partial(jax.device_put, device=jax.memory.Space.Device)
NO_MEMORIES = 'without a GPU JAX knows no memories of it, and drops `pinned_host`'
CASES = {
    'backbone frozen': (Decoder(4, 512, 4, fetch=FETCH), BACKBONE),
    'LoRA': (Decoder(4, 512, 4, rank=RANK, fetch=FETCH), ADAPTED),
}


def rows(platform: str, chips: Mapping[str, str], only: str) -> Iterator[Row]:
    """Compiles steps whose optimizer sees the trained parameters alone.

    Args:
        platform: the platform.
        chips: topologies, by the names of their chips.
        only: a regular expression for names of cases.
    """
    for chip, topology in chips.items():
        device = compilers.devices(platform, topology)[0]
        for case, (module, frozen) in CASES.items():
            if not re.search(only, case):
                continue
            if device.addressable_memories():
                timed = platform == compilers.HERE
                yield from _case(chip, case, device, module, frozen, timed)
            else:
                yield Row(chip, case, 'every way', note=NO_MEMORIES)


def _case(
    chip: str,
    case: str,
    device: Any,
    module: Decoder,
    frozen: Selection,
    timed: bool,
) -> Iterator[Row]:
    data = data_of(module, 4, 128)
    place = functools.partial(placed, device)
    params, inputs = place(data.params), place(data.inputs)
    rest, trained = sg.partition(params, frozen.pattern)
    state = place(jax.eval_shape(ADAM.init, trained))
    texts: dict[str, str] = {}
    for way, step in _steps(Workload(case, module, [], frozen)).items():
        jitted = jax.jit(step, donate_argnums=(0, 1))
        compiled = jitted.lower(trained, state, rest, *inputs).compile()
        texts[way] = optimized_hlo(compiled)
        kind = 'stops' if texts[way] == texts['stops by hand'] else 'other'
        row = dataclasses.replace(row_of(chip, case, way, [compiled]), program=kind)
        if timed:
            carried = times.arrays(trained), times.arrays(state, zeros=True)
            fixed = times.arrays((rest, *inputs))
            row = dataclasses.replace(row, step=times.of_loop(compiled, carried, fixed))
        yield row


def _steps(work: Workload) -> dict[str, Callable[..., Any]]:
    """Training steps of the trained part: by hand, and with each form of flax_sg."""

    def step_of(gradient: Callable[..., Any]) -> Callable[..., Any]:
        def step(trained: Any, state: Any, rest: Any, x: jax.Array) -> Any:
            grads = gradient(trained, rest, x)
            updates, state = ADAM.update(grads, state, trained)
            return optax.apply_updates(trained, updates), state

        return step

    def of_part(spelling: spellings.Spelling) -> Callable[..., Any]:
        def loss(trained: Any, rest: Any, x: jax.Array) -> jax.Array:
            return work.loss(spelling)(sg.combine(trained, rest), {}, x)[0]

        return step_of(jax.grad(loss))

    def live(trained: Any, rest: Any, x: jax.Array) -> Any:
        loss = work.loss(spellings.bare)
        where = ~sg.filters.as_filter(work.frozen.pattern)
        gradient = sg.grad(loss, wrt=where, has_aux=True, absent='drop')
        return gradient(sg.combine(trained, rest), {}, x)[0]

    return {
        'stops by hand': of_part(spellings.by_hand),
        'flax_sg block': of_part(spellings.block_around),
        'flax_sg Frozen': of_part(spellings.frozen),
        'flax_sg grad, wrt=': step_of(live),
    }


def placed(device: Any, tree: Any) -> Any:
    """Makes shapes of arrays: the weights of layers in the host, others on a device."""

    def place(keys: Any, leaf: Any) -> Any:
        kind = 'pinned_host' if WEIGHTS.takes(path_of(keys)) else 'device'
        sharding = SingleDeviceSharding(device, memory_kind=kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(place, tree)

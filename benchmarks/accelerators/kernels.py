"""A model with a kernel of Pallas: flash attention, as JAX has it."""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from benchmarks.accelerators import compilers
from benchmarks.accelerators.models import ADAPTED, BACKBONE, RANK, Decoder
from benchmarks.accelerators.rows import Row, measured
from benchmarks.accelerators.sharded import WAYS, data_of
from benchmarks.workloads import Workload

CASES = {
    'flash attention, backbone frozen': (0, BACKBONE),
    'flash attention, LoRA': (RANK, ADAPTED),
}


def flash(platform: str) -> Any:
    """Flash attention in Pallas: by Mosaic for a TPU, by Triton for a GPU."""
    if platform == compilers.HERE:
        platform = jax.default_backend()
    if platform == 'tpu':
        from jax.experimental.pallas.ops.tpu import flash_attention

        def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            heads_first = (x.swapaxes(1, 2) for x in (q, k, v))
            out = flash_attention.flash_attention(*heads_first, causal=True)
            return out.swapaxes(1, 2)

        return attention
    from jax.experimental.pallas.ops.gpu import attention as gpu

    return functools.partial(gpu.mha, segment_ids=None, causal=True)


def rows(
    platform: str, chips: Mapping[str, str], only: str, tokens: int = 512
) -> Iterator[Row]:
    """Compiles a step that calls a kernel in each layer.

    Args:
        platform: the platform.
        chips: topologies, by the names of their chips.
        only: a regular expression for names of cases.
        tokens: tokens of an example.
    """
    for case, (rank, frozen) in CASES.items():
        if not re.search(only, case):
            continue
        module = Decoder(4, 512, 4, rank=rank, attention=flash(platform))
        data = data_of(module, 4, tokens)
        work = Workload(case, module, [], frozen)
        makers = {
            way: functools.cache(functools.partial(make, work, data))
            for way, make in WAYS.items()
        }
        for chip, topology in chips.items():
            device = compilers.devices(platform, topology)[0]
            place = functools.partial(compilers.on, device)
            timed = platform == compilers.HERE
            yield from measured(chip, case, makers, data.inputs, place, timed=timed)

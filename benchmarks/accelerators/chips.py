"""Every workload, with every way to freeze, on one chip of each kind."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence

from benchmarks import spellings, trainers
from benchmarks.accelerators import compilers
from benchmarks.accelerators.rows import Row, measured
from benchmarks.rivals import RIVALS
from benchmarks.trainers import Data
from benchmarks.workloads import Workload

# Wrappers are compiled too, beside the ways that are timed on a CPU.
WAYS = {name: rival.make for name, rival in RIVALS.items()} | {
    'flax_sg Frozen': functools.partial(trainers.stops, spelling=spellings.frozen)
}


def rows(
    platform: str, chips: Mapping[str, str], only: str, works: Sequence[Workload]
) -> Iterator[Row]:
    """Compiles workloads for the first device of some topologies.

    Args:
        platform: the platform.
        chips: topologies, by the names of their chips.
        only: a regular expression for names of workloads.
        works: the workloads.
    """
    for work in works:
        if not re.search(only, work.name):
            continue
        data = Data(*work.arrays())
        makers = {
            way: functools.cache(functools.partial(make, work, data))
            for way, make in WAYS.items()
        }
        for chip, topology in chips.items():
            device = compilers.devices(platform, topology)[0]
            place = functools.partial(compilers.on, device)
            yield from measured(chip, work.name, makers, data.inputs, place)

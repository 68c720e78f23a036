"""The studies of frozen weights in a scan, on one chip."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks import few_bits, frozen, layers
from benchmarks.accelerators import compilers
from benchmarks.accelerators.rows import Row, row_of
from flax_sg.testing import optimized_hlo

WIDTH = 512  # Of ``few_bits``, as on a CPU.
Place = Callable[[Any], Any]


def rows(platform: str, chips: Mapping[str, str], only: str) -> Iterator[Row]:
    """Compiles what ``benchmarks.frozen``, ``layers`` and ``few_bits`` compile.

    Args:
        platform: the platform.
        chips: topologies, by the names of their chips.
        only: a regular expression for names, such as ``'layers, remat'``.
    """
    for chip, topology in chips.items():
        place = functools.partial(
            compilers.on, compilers.devices(platform, topology)[0]
        )
        for case, programs in CASES.items():
            if re.search(only, case):
                yield from _case(chip, case, programs(place))


def _case(chip: str, case: str, programs: Mapping[str, Any]) -> Iterator[Row]:
    texts = {way: optimized_hlo(program) for way, program in programs.items()}
    hand = texts.get('by_hand')
    for way, program in programs.items():
        kind = '' if hand is None else 'stops' if texts[way] == hand else 'other'
        yield dataclasses.replace(row_of(chip, case, way, [program]), program=kind)


def _layers(stack: layers.Stack, place: Place) -> dict[str, Any]:
    params = stack.params()
    return {
        name: layers.compiled(loss, params, place)
        for name, loss in stack.programs().items()
    }


CASES: dict[str, Callable[[Place], Mapping[str, Any]]] = {
    'frozen': frozen.programs,
    'few bits': functools.partial(few_bits.programs, WIDTH),
}
for _name, _stack in {
    'layers': layers.Stack(below=False, remat=False),
    'layers, under remat': layers.Stack(below=False, remat=True),
    'layers, below': layers.Stack(below=True, remat=False),
    'layers, below, under remat': layers.Stack(below=True, remat=True),
}.items():
    # A loop counts as one turn, so write all turns out, too.
    _whole = dataclasses.replace(_stack, unroll=layers.DEPTH)
    CASES[_name] = functools.partial(_layers, _stack)
    CASES[f'{_name}, unrolled'] = functools.partial(_layers, _whole)

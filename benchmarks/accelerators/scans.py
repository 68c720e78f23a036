"""The studies of frozen weights in a scan, on one chip."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import few_bits, frozen, layers
from benchmarks.accelerators import compilers
from benchmarks.accelerators.chips import on
from benchmarks.accelerators.rows import Row, row_of
from flax_sg.testing import optimized_hlo

WIDTH = 512  # Of ``few_bits``, as on a CPU.


def rows(platform: str, chips: Mapping[str, str], only: str) -> Iterator[Row]:
    """Compiles what ``benchmarks.frozen``, ``layers`` and ``few_bits`` compile.

    Args:
        platform: the platform.
        chips: topologies, by the names of their chips.
        only: a regular expression for names, such as ``'layers, remat'``.
    """
    for chip, topology in chips.items():
        place = functools.partial(on, compilers.devices(platform, topology)[0])

        def all_of(case: str, programs: Mapping[str, Any], chip: str = chip) -> Any:
            texts = {way: optimized_hlo(program) for way, program in programs.items()}
            hand = texts.get('by_hand')
            for way, program in programs.items():
                kind = (
                    '' if hand is None else 'stops' if texts[way] == hand else 'other'
                )
                row = row_of(chip, case, way, [program])
                yield dataclasses.replace(row, program=kind)

        if re.search(only, 'frozen'):
            yield from all_of('frozen', frozen.programs(place))
        if re.search(only, 'few bits'):
            yield from all_of('few bits', few_bits.programs(WIDTH, place))
        for below in (False, True):
            for remat in (False, True):
                case = ', '.join(
                    ['layers', *['below'] * below, *['under remat'] * remat]
                )
                stack = layers.Stack(below, remat)
                if re.search(only, case):
                    yield from all_of(case, _layers(stack, place))
                if re.search(only, f'{case}, unrolled'):
                    # A loop counts as one turn, so write all turns out.
                    whole = dataclasses.replace(stack, unroll=layers.DEPTH)
                    yield from all_of(f'{case}, unrolled', _layers(whole, place))


def _layers(stack: layers.Stack, place: Any) -> dict[str, Any]:
    params = stack.params()
    return {
        name: layers.compiled(loss, params, place)
        for name, loss in stack.programs().items()
    }

"""Checks results of any size, on any device."""

import json
from pathlib import Path

from benchmarks.measure import Figures
from benchmarks.report import Results
from benchmarks.rivals import BY_HAND, RIVALS

# These ways compile to the program of stops by hand.
STOPS = ('nn.map_variables', 'hk.custom_getter', 'flax_sg block')


def check(results: Results, file: Path) -> None:
    """Fails if a way to freeze is missing, or has an unexpected program.

    Args:
        results: the measurements.
        file: the path of the written files, without suffix.
    """
    for work, ways in results.workloads.items():
        assert list(ways) == list(RIVALS), work
        found = {way: it for way, it in ways.items() if isinstance(it, Figures)}
        for way in STOPS:
            assert found[way].program == 'stops', (work, way)
        for way, figures in found.items():
            # ``sg.live`` traces the loss once more, before the first step.
            traces = 2 if 'flax_sg live' in way else 1
            assert figures.traces == traces, (work, way)
            assert figures.dots and figures.flops, (work, way)
        if 'equinox partition' in found and 'partition by hand' in found:
            # Parameters frozen as a whole have neither gradient nor optimizer state.
            hand = found['partition by hand']
            for way in ('flax_sg live', 'equinox partition', 'nnx DiffState'):
                assert found[way].program == 'partition', (work, way)
                assert found[way].gradient_bytes == hand.gradient_bytes, (work, way)
                assert found[way].optimizer_bytes == hand.optimizer_bytes, (work, way)
            assert hand.gradient_bytes < found[BY_HAND].gradient_bytes, work
    text = file.with_suffix('.md').read_text()
    assert all(f'## {work}\n' in text for work in results.workloads)
    read = json.loads(file.with_suffix('.json').read_text())
    assert read['workloads'].keys() == results.workloads.keys()
    assert '<svg' in file.with_suffix('.svg').read_text()

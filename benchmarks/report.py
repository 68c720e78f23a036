"""Writes results as JSON, and as a page: a picture, three conclusions, the tables."""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.checkout import commit
from benchmarks.measure import Figures
from benchmarks.rivals import BY_HAND
from benchmarks.timing import Ratio

HEAD = (
    'way to freeze',
    'program',
    'MFLOP',
    'MB accessed',
    'MB temporary',
    'MB peak',
    'dots',
    'MB gradient',
    'MB optimizer',
    'traces',
    'trace + lower',
    'step',
)


@dataclasses.dataclass(frozen=True)
class Results:
    """All measurements on one device.

    Attributes:
        device: the name of the device.
        versions: the versions of Python packages.
        workloads: figures by workload and way to freeze, or why they are missing.
        modules: times to trace and lower, by number of modules and way to freeze.
    """

    device: str
    versions: Mapping[str, str]
    workloads: Mapping[str, Mapping[str, Figures | str]]
    modules: Mapping[int, Mapping[str, Ratio]]

    def json(self) -> str:
        """The text of a JSON file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + '\n'

    def markdown(self, picture: str) -> str:
        """The text of a Markdown file.

        Args:
            picture: the name of the bar chart, in the same folder.
        """
        versions = ', '.join(f'{name} {v}' for name, v in self.versions.items())
        lines = [
            f'# {self.device}',
            '',
            f'![Time of a training step, by way to freeze]({picture})',
            '',
            *self.conclusions(),
            '',
            f'{versions}. The columns are explained in [the README](../README.md).',
            '',
        ]
        for name, ways in self.workloads.items():
            lines += [f'## {name}', '', *_table(HEAD, _rows(ways)), '']
            reasons: dict[str, list[str]] = {}
            for way, found in ways.items():
                if isinstance(found, str):
                    reasons.setdefault(found, []).append(way)
            lines += [f'- {", ".join(who)}: {why}' for why, who in reasons.items()]
            lines += [''] if reasons else []
        numbers = [f'{number:,}' for number in self.modules]
        lines += ['## Many small modules, time to trace and lower', '']
        lines += [*_table(['way to freeze', *numbers], self._growth()), '']
        hand = [ways[BY_HAND].seconds for ways in self.modules.values()]
        each = [
            f'{1000 * seconds / number:.2f}'
            for number, seconds in zip(self.modules, hand, strict=True)
        ]
        lines += [f'Stops by hand take {", ".join(each)} ms for each module.']
        return '\n'.join(lines) + '\n'

    def conclusions(self) -> list[str]:
        """Compares blocks, ``sg.live`` and masks with stops by hand, in three lines."""
        blocks, live = 'flax_sg block', 'flax_sg live'
        masks = 'optax mask', 'optax mask, one jit, clip'
        return [
            '- **Blocks** (`nn.stop_gradient`) compile to the program of stops by hand '
            f'in {self._same(blocks, "stops")}. A step takes {self._range(blocks)} of '
            'its time.',
            '- **`sg.live`** drops the gradients of frozen parameters. It compiles to '
            f'the partition by hand in {self._same(live, "partition")}, and to stops '
            f'by hand in {self._same(live, "stops")}. A step takes '
            f'{self._range(live)} of the time of stops by hand.',
            '- **Masks in the optimizer** compute the frozen gradients too, if another '
            'program or a clip reads them. A step takes '
            f'{self._range(*masks)} of the time of stops by hand.',
        ]

    def _found(self, *ways: str) -> list[Figures]:
        every = (found.get(way) for found in self.workloads.values() for way in ways)
        return [one for one in every if isinstance(one, Figures)]

    def _same(self, way: str, program: str) -> str:
        found = self._found(way)
        same = sum(one.program == program for one in found)
        return f'{same} of {len(found)} workloads'

    def _range(self, *ways: str) -> str:
        times = [one.step.median for one in self._found(*ways)]
        if not times:  # With --only.
            return 'a part that was not measured'
        return f'{min(times):.2f} to {max(times):.2f} (median {median(times):.2f})'

    def _growth(self) -> list[list[str]]:
        names = list(
            dict.fromkeys(way for ways in self.modules.values() for way in ways)
        )
        return [
            [way, *(_ratio(ways.get(way)) for ways in self.modules.values())]
            for way in names
        ]


def read(path: Path) -> Results:
    """Reads the results in a JSON file."""
    data = json.loads(path.read_text())

    def figures(found: Any) -> Figures | str:
        if isinstance(found, str):
            return found
        lowering = found['lowering'] and Ratio(**found['lowering'])
        ratios = {'lowering': lowering, 'step': Ratio(**found['step'])}
        return Figures(**{**found, **ratios})

    workloads = {
        name: {way: figures(found) for way, found in ways.items()}
        for name, ways in data['workloads'].items()
    }
    modules = {
        int(number): {way: Ratio(**ratio) for way, ratio in ways.items()}
        for number, ways in data['modules'].items()
    }
    return Results(data['device'], data['versions'], workloads, modules)


def device_name() -> str:
    """Returns the name of the device; for a CPU, the name of the processor."""
    kind = jax.devices()[0].device_kind
    if kind != 'cpu':
        return kind
    info = Path('/proc/cpuinfo')
    found = re.search(r'model name\s*: (.*)', info.read_text() if info.exists() else '')
    return f'{found.group(1) if found else "CPU"}, {os.cpu_count()} cores'


def file_of(device: str) -> str:
    """The name of the files of a device, without a suffix."""
    return re.sub(r'\W+', '_', device).strip('_')


def versions() -> dict[str, str]:
    """Returns the versions of the measured packages, and the commit of this one."""
    import equinox
    import flax
    import haiku
    import optax

    packages = (jax, flax, optax, haiku, equinox)
    return {'flax_sg': commit(), **{p.__name__: p.__version__ for p in packages}}


def _rows(ways: Mapping[str, Figures | str]) -> list[list[str]]:
    return [
        [
            name,
            found.program,
            f'{found.flops / 1e6:,.5g}',
            _megabytes(found.accessed_bytes),
            _megabytes(found.temporary_bytes),
            _megabytes(found.peak_bytes),
            str(found.dots),
            _megabytes(found.gradient_bytes),
            _megabytes(found.optimizer_bytes),
            str(found.traces),
            _ratio(found.lowering),
            _ratio(found.step),
        ]
        for name, found in ways.items()
        if not isinstance(found, str)
    ]


def _table(head: Any, rows: list[list[str]]) -> list[str]:
    lines = [list(head), ['---'] * len(head), *rows]
    return [f'| {" | ".join(line)} |' for line in lines]


def _megabytes(size: float) -> str:
    return f'{size / 1e6:,.3g}'


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ''
    return f'{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})'

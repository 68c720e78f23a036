"""``python -m benchmarks.accelerators`` compiles for devices that are not there.

With ``here``, the largest programs are compiled for the device that is there, and run.
"""

import argparse
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from benchmarks import workloads
from benchmarks.accelerators import (
    chips,
    compilers,
    kernels,
    memories,
    picture,
    results,
    scale,
    scans,
    sharded,
    smoke,
    stored,
    tables,
)
from benchmarks.accelerators.models import Decoder
from benchmarks.accelerators.rows import Row
from benchmarks.checkout import RESULTS

# Every workload is compiled at the smallest size, and these two as they are timed on a
# CPU, but for the layers: more than two of them only take longer to compile.
SIZES = workloads.Sizes(depth=2)
LARGE = 'three losses', 'transformer, frozen backbone'
FEW = {'tpu': ('v5e:2x2', 'v5e:4x4'), 'cuda': ('1x1x4', '1x1x8')}
Study = Callable[[], Iterator[Row]]


def studies(
    platform: str, topology: str | None, only: str, small: bool
) -> dict[str, Study]:
    """Returns the studies of a platform, by their names.

    Args:
        platform: ``'tpu'``, ``'cuda'`` or ``'here'``.
        topology: the one topology to compile for; None for all.
        only: a regular expression for names of cases.
        small: whether to take small models on few devices.
    """
    if platform == compilers.HERE:
        device = compilers.compiler(platform)
        one = {device: device}
        if small:
            tiny = {'tiny': Decoder(4, 64)}
            return {'scale': lambda: scale.rows(platform, [*one], only, tiny, 16)}
        return {
            'kernels': lambda: kernels.rows(platform, one, only),
            'memories': lambda: memories.rows(platform, one, only),
            'scale': lambda: scale.rows(platform, [*one], only),
        }
    every = {topology: topology} if topology else compilers.CHIPS[platform]
    one = dict([next(iter(every.items()))])
    several = [topology] if topology else FEW[platform]
    smallest = workloads.workloads(workloads.SMALL)
    if small:
        tiny = Decoder(4, 64)
        return {
            'programs': lambda: chips.rows(platform, one, only, smallest),
            'sharded': lambda: sharded.rows(platform, several[:1], only, tiny, 16),
            'scale': lambda: scale.rows(
                platform, several[:1], only, {'tiny': tiny}, 16
            ),
            'stored': lambda: stored.rows(
                platform, several[:1], only, {'tiny': tiny}, 16
            ),
            'memories': lambda: memories.rows(platform, one, only),
            'kernels': lambda: kernels.rows(platform, one, only),
        }
    works = [w for w in workloads.workloads(SIZES) if w.name in LARGE]
    found: dict[str, Study] = {
        'programs': lambda: chips.rows(platform, every, only, smallest),
        'chips': lambda: chips.rows(platform, every, only, works),
        'sharded': lambda: sharded.rows(platform, several, only),
        'memories': lambda: memories.rows(platform, one, only),
        'kernels': lambda: kernels.rows(platform, one, only),
        'scans': lambda: scans.rows(platform, one, only),
    }
    if platform == 'tpu':
        named = [topology] if topology else scale.TOPOLOGIES
        found['scale'] = lambda: scale.rows(platform, named, only)
        found['stored'] = lambda: stored.rows(platform, named[:1], only)
    return found


def wanted(platform: str) -> dict[str, list[tuple[str, str]]]:
    """Returns the devices and cases of the studies, to say what was not run."""
    if platform == compilers.HERE:
        return {}
    works = [work.name for work in workloads.workloads(workloads.SMALL)]
    every = [*compilers.CHIPS[platform]]
    found: dict[str, tuple[Iterable[str], Iterable[str]]] = {
        'programs': (every, works),
        'chips': (every, LARGE),
        'sharded': (FEW[platform], sharded.PLACEMENTS),
        'memories': (every[:1], memories.CASES),
        'kernels': (every[:1], kernels.CASES),
        'scans': (every[:1], scans.CASES),
    }
    if platform == 'tpu':
        cases = [f'{model}, {case}' for model in scale.MODELS for case in scale.CASES]
        found['scale'] = scale.TOPOLOGIES, cases
        stored_at = [f'{model}, {stored.CASE}' for model in scale.MODELS]
        found['stored'] = scale.TOPOLOGIES[:1], stored_at
    return {name: [*itertools.product(*both)] for name, both in found.items()}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.accelerators', description=__doc__
    )
    parser.add_argument('platform', choices=[*compilers.PACKAGES, compilers.HERE])
    parser.add_argument(
        '--study', metavar='REGEX', default='', help='studies with such a name'
    )
    parser.add_argument(
        '--only', metavar='REGEX', default='', help='cases with such a name'
    )
    parser.add_argument('--topology', help='such as v5e:2x2, or 1x1x4 for four H100s')
    parser.add_argument('--smoke', action='store_true', help=smoke.__doc__)
    parser.add_argument('--out', metavar='DIR', type=Path, default=RESULTS)
    options = parser.parse_args()
    try:
        compiler = compilers.compiler(options.platform)
        named = studies(options.platform, options.topology, options.only, options.smoke)
        named = {n: rows for n, rows in named.items() if re.search(options.study, n)}
        if options.smoke:
            with tempfile.TemporaryDirectory() as folder:
                smoke.check(run(named, results.folder(compiler, Path(folder))))
        else:
            folder = results.folder(compiler, options.out)
            folder.mkdir(parents=True, exist_ok=True)  # Where no row is kept, too.
            run(named, folder)
            tables.write(folder, compiler, wanted(options.platform))
            if rows := results.read(folder / 'scale.json'):
                picture.save(folder / 'scale.svg', rows)
    except compilers.NoCompilerError as error:
        sys.exit(str(error))


def run(named: Mapping[str, Study], folder: Path) -> dict[str, list[Row]]:
    """Compiles, prints and keeps the rows of studies."""
    found: dict[str, list[Row]] = {}
    for name, rows in named.items():
        for row in rows():
            print(name, tables.line(row), flush=True)
            results.keep(folder / f'{name}.json', [row])
            found.setdefault(name, []).append(row)
    return found


if __name__ == '__main__':
    main()

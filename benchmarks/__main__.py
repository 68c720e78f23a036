"""``python -m benchmarks`` measures every way to freeze, in every workload."""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.quick_compile import FLAGS

if '--smoke' in sys.argv:  # Small programs spend their time in compiling.
    os.environ.setdefault('XLA_FLAGS', FLAGS)

import jax

from benchmarks import measure, modules, picture, report, smoke, workloads

RESULTS = Path(__file__).parent / 'results'


def device_name() -> str:
    """Returns the name of the device; for a CPU, the name of the processor."""
    kind = jax.devices()[0].device_kind
    if kind != 'cpu':
        return kind
    info = Path('/proc/cpuinfo')
    found = re.search(r'model name\s*: (.*)', info.read_text() if info.exists() else '')
    return f'{found.group(1) if found else "CPU"}, {os.cpu_count()} cores'


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog='python -m benchmarks', description=__doc__)
    parser.add_argument(
        '--smoke',
        action='store_true',
        help='at tiny sizes, into a folder that goes away; fails if something is amiss',
    )
    parser.add_argument(
        '--only', metavar='REGEX', default='', help='workloads with such a name'
    )
    parser.add_argument('--out', metavar='DIR', type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.smoke:
        run(
            workloads.Sizes(),
            measure.Effort(),
            options.only,
            modules.NUMBERS,
            options.out,
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        sizes, numbers = workloads.SMALL, modules.FEW
        smoke.check(*run(sizes, measure.QUICK, options.only, numbers, Path(folder)))


def run(
    sizes: workloads.Sizes,
    effort: measure.Effort,
    only: str,
    numbers: Sequence[int],
    folder: Path,
) -> tuple[report.Results, Path]:
    """Measures, prints and writes the tables; returns the results and their path."""
    found = {}
    for work in workloads.workloads(sizes):
        if re.search(only, work.name):
            print(work.name, file=sys.stderr, flush=True)
            found[work.name] = measure.measured(work, effort)
    print('small modules', file=sys.stderr, flush=True)
    growth = modules.measured(numbers, max(1, effort.lowerings))
    results = report.Results(device_name(), report.versions(), found, growth)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / re.sub(r'\W+', '_', results.device).strip('_')
    file.with_suffix('.json').write_text(results.json())
    picture.write(file, results)
    print(file.with_suffix('.md').read_text())
    return results, file


if __name__ == '__main__':
    main()

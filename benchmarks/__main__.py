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

from benchmarks import (
    ahead,
    measure,
    modules,
    picture,
    report,
    smoke,
    stored,
    workloads,
)
from benchmarks.checkout import RESULTS


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog='python -m benchmarks', description=__doc__)
    parser.add_argument(
        '--smoke',
        action='store_true',
        help='at tiny sizes, into a folder that goes away; fails if something is amiss',
    )
    parser.add_argument(
        '--only', metavar='REGEX', default='', help='workloads and losses of such names'
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
        ahead.run(stored.Sizes(), ahead.Effort(), options.out, options.only)
        return
    with tempfile.TemporaryDirectory() as folder:
        sizes, numbers = workloads.SMALL, modules.FEW
        smoke.check(*run(sizes, measure.QUICK, options.only, numbers, Path(folder)))
        found = ahead.run(stored.SMALL, ahead.QUICK, Path(folder), options.only)
        ahead.check(found)


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
    results = report.Results(report.device_name(), report.versions(), found, growth)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / report.file_of(results.device)
    file.with_suffix('.json').write_text(results.json())
    picture.write(file, results)
    print(file.with_suffix('.md').read_text())
    return results, file


if __name__ == '__main__':
    main()

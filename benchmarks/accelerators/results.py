"""Keeps rows in files, under the name and version of the compiler."""

import dataclasses
import json
import re
from collections.abc import Iterable
from pathlib import Path

from benchmarks.accelerators.rows import Row
from benchmarks.checkout import RESULTS, commit


def folder(compiler: str, within: Path = RESULTS) -> Path:
    """The folder of a compiler, such as ``'libtpu 0.0.42'``."""
    return within / re.sub(r'[^\w.-]+', '_', compiler)


def read(file: Path) -> list[Row]:
    """Returns the rows in a file; none if there is no file."""
    rows = json.loads(file.read_text()) if file.exists() else []
    return [
        Row(**{**row, 'collectives': {k: (*v,) for k, v in row['collectives'].items()}})
        for row in rows
    ]


def keep(file: Path, new: Iterable[Row]) -> None:
    """Writes rows into a file, in place of those of the same devices, case and way."""
    found = commit()
    new = [dataclasses.replace(row, commit=found) for row in new]
    rows = {(r.topology, r.case, r.way): r for r in [*read(file), *new]}
    lines = [json.dumps(dataclasses.asdict(row)) for row in rows.values()]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('[\n' + ',\n'.join(lines) + '\n]\n')

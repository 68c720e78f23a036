"""Writes rows as a page: a line for each workload on one chip, or for each way."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.accelerators import results
from benchmarks.accelerators.rows import Row

# What each file holds, and the sizes it was made at.
STUDIES = {
    'programs': 'Every workload on one chip, at the smallest size: two layers, 8 wide',
    'chips': 'Two workloads on one chip: a transformer of two layers, 256 wide',
    'sharded': 'On several devices: four layers, 256 wide, four examples a device',
    'scale': 'At scale: fully sharded, one example of 2,048 tokens a chip',
    'stored': 'At scale, without the frozen weights: a head on stored features',
    'memories': 'Frozen weights in the memory of the host: four layers, 512 wide',
    'kernels': 'Flash attention of Pallas: four layers, 512 wide',
    'scans': 'Frozen weights in a scan: the studies `frozen`, `few_bits`, `layers`',
}
HAND, MASK = 'stops by hand, one jit', 'optax mask, one jit, clip'
HEAD = 'way to freeze|program|MFLOP|MB accessed|MB arguments|MB temporary|MB peak'
HEAD += '|MB in the host|collectives (MB)|seconds to trace|ms a step'
NOTES = """\
Flops and bytes are of one device, and of one turn of each loop. For a GPU XLA counts
the flops of its optimized program. *stops* and *partition* are the programs by hand.
The [README](../../README.md) says what the ways to freeze are."""
ABSENT = """\
No device was there: the programs are those of its compiler, and no step was timed. The
estimate is that of the TPU's compiler, for programs without loops."""
THERE = """\
The steps ran: a time is the median of fifteen. While XLA compiles for a GPU, it tries
kernels and takes the fastest, so equal programs may differ in kernels (*other*)."""
NOT_RUN = (
    'For want of time: one program at scale takes minutes to compile on two cores.'
)

Groups = list[tuple[Any, list[Row]]]


def write(
    folder: Path, compiler: str, wanted: Mapping[str, Sequence[tuple[str, str]]]
) -> None:
    """Writes the page of a compiler, from the files in its folder.

    Args:
        folder: the folder.
        compiler: its name and version.
        wanted: devices and cases by study. Those without rows are named at the end.
    """
    told = ABSENT if wanted else THERE
    lines = [f'# {compiler}', '', f'jax {jax.__version__}. {told} {NOTES}', '']
    for study, title in STUDIES.items():
        rows = results.read(folder / f'{study}.json')
        if rows:
            commits = ', '.join(dict.fromkeys(row.commit for row in rows if row.commit))
            lines += [f'## {title}', '', f'flax_sg {commits}.', '']
            if study == 'scale':
                lines += ['![A training step of 8 billion parameters](scale.svg)', '']
            lines += _chips(rows) if study in ('programs', 'chips') else _cases(rows)
    lines += _not_run(folder, wanted)
    (folder / 'README.md').write_text('\n'.join(lines).rstrip() + '\n')


def _not_run(
    folder: Path, wanted: Mapping[str, Sequence[tuple[str, str]]]
) -> list[str]:
    lines = []
    for study, pairs in wanted.items():
        rows = results.read(folder / f'{study}.json')
        found = {(row.topology, row.case) for row in rows}
        missing: dict[str, list[str]] = {}
        for topology, case in pairs:
            if (topology, case) not in found:
                missing.setdefault(topology, []).append(case)
        for topology, cases in missing.items():
            lines.append(f'- {study}, {topology}: {"; ".join(cases)}')
    return ['## Not run', '', NOT_RUN, '', *lines] if lines else []


def line(row: Row) -> str:
    """A row in one line of text."""
    found = row.note or ', '.join(
        f'{name} {cell}'
        for name, cell in zip(HEAD.split('|')[1:], _cells(row)[1:], strict=True)
        if cell
    )
    return f'{row.topology} {row.case} | {row.way}: {found}'


def _chips(rows: Sequence[Row]) -> list[str]:
    head = ['workload', 'as by hand', 'otherwise']
    head += [
        'MFLOP: stops, mask behind a clip',
        'MB accessed',
        'MB peak',
        'estimate, us',
    ]
    lines = []
    for chip, of_chip in _groups(rows, lambda row: row.topology):
        body = []
        for case, of_case in _groups(of_chip, lambda row: row.case):
            ways = {row.way: row for row in of_case if not row.note}
            same = [w for w, row in ways.items() if row.program != 'other']
            others = [w for w in ways if w not in same and not w.startswith('optax')]
            pair = [ways[way] for way in (HAND, MASK) if way in ways]
            columns = (
                [f'{row.flops / 1e6:,.0f}' for row in pair],
                [f'{row.accessed / 1e6:,.0f}' for row in pair],
                [f'{row.peak / 1e6:,.1f}' for row in pair],
                [f'{row.estimate * 1e6:,.0f}' for row in pair if row.estimate],
            )
            mine = f'{len(same)} of {len(ways)}'
            body.append([case, mine, ', '.join(others), *map(', '.join, columns)])
        lines += [f'### {chip}', '', *_table(head, body), '']
    return lines


def _cases(rows: Sequence[Row]) -> list[str]:
    lines = []
    names = HEAD.split('|')
    for (topology, case), ways in _groups(rows, lambda row: (row.topology, row.case)):
        lines += [f'### {topology}: {case}', '']
        if found := [_cells(row) for row in ways if not row.note]:
            columns = [n for n in range(len(names)) if any(row[n] for row in found)]
            body = [[row[n] for n in columns] for row in found]
            lines += [*_table([names[n] for n in columns], body), '']
        for why, noted in _groups([row for row in ways if row.note], _note):
            lines.append(f'- {", ".join(row.way for row in noted)}: {why}')
        lines += [''] * bool(lines[-1])
    return lines


def _note(row: Row) -> str:
    return row.note


def _groups(rows: Sequence[Row], key: Callable[[Row], Any]) -> Groups:
    ordered = list(dict.fromkeys(map(key, rows)))
    return [(k, [row for row in rows if key(row) == k]) for k in ordered]


def _cells(row: Row) -> list[str]:
    moved = [
        f'{count} {kind} ({size / 1e6:,.3g})'
        for kind, (count, size) in sorted(row.collectives.items())
    ]
    return [
        row.way,
        row.program,
        f'{row.flops / 1e6:,.4g}',
        f'{row.accessed / 1e6:,.4g}',
        f'{row.arguments / 1e6:,.4g}',
        f'{row.temporary / 1e6:,.4g}',
        f'{row.peak / 1e6:,.4g}',
        f'{row.host / 1e6:,.4g}' if row.host else '',
        ', '.join(moved),
        f'{row.trace:.2f}' if row.trace else '',
        f'{1000 * row.step:,.1f}' if row.step else '',
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ['---'] * len(head), *rows]
    return [f'| {" | ".join(line)} |' for line in lines]

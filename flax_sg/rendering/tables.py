"""The matrix of a gradient flow as text: modules down, outputs across."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# For each status of a report what a reader is told, and how it looks. The words say it
# all: colours only help the eye.
WORDS = {'flows': 'trains', 'partly': 'partly', 'stopped': 'stopped', 'unused': '-'}
STYLES = {'flows': 'bold green', 'partly': 'yellow', 'stopped': '', 'unused': 'dim'}
LEGEND = {
    'flows': 'the output depends differentiably on every parameter there',
    'partly': 'on some of the parameters there, or of their elements',
    'stopped': 'it uses them, and their gradient is exactly zero',
    'unused': 'it does not use them',
}


NO_MODULE = '(no module)'


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the matrix.

    Attributes:
        name: of a module, or of a parameter in one.
        parameter: whether it is that of a parameter.
        status: for each output.
        stopped: in how many of its uses it is stopped.
        uses: how many there are.
    """

    name: str
    parameter: bool
    status: tuple[str, ...]
    stopped: int
    uses: int


class FlowTable:
    """What rich prints for a gradient flow.

    Where the outputs do not fit beside each other, each has a paragraph of its own.

    Args:
        flow: the report.
        depth: how many names of a module's path count; all of them by default.
    """

    def __init__(self, flow: Any, depth: int | None = None) -> None:
        self.outputs = output_names(flow)
        self.rows = rows(flow, depth)
        self.notes = hidden(flow, depth)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Any]:
        """Yields the matrix, or a list for each output, and what the words mean."""
        table = self._matrix()
        unlimited = options.update(width=10_000)
        wanted = Measurement.get(console, unlimited, table).maximum
        if wanted <= options.max_width:
            yield table
        else:
            yield from self._paragraphs()
        legend = Table.grid(padding=(0, 2))
        for status, meaning in LEGEND.items():
            if any(status in row.status for row in self.rows):
                legend.add_row(_word(status), meaning)
        yield legend
        yield from map(Text, self.notes)

    def _matrix(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ('', *self.outputs):
            table.add_column(Text(name), no_wrap=True)
        table.add_column('uses stopped', justify='right', no_wrap=True)
        for row in self.rows:
            table.add_row(
                Text('  ' * row.parameter + row.name),
                *map(_word, row.status),
                f'{row.stopped} of {row.uses}',
            )
        return table

    def _paragraphs(self) -> Iterator[Any]:
        for number, output in enumerate(self.outputs):
            yield Text(output, 'bold')
            grid = Table.grid(padding=(0, 2))
            grid.add_column()
            grid.add_column(overflow='fold')
            for status in WORDS:
                if names := self._names(number, status):
                    grid.add_row(_word(status), Text(', '.join(names)))
            yield grid
            yield Text()

    def _names(self, number: int, status: str) -> list[str]:
        """Modules with a status for one output, and which parameters it is true of."""
        names: list[str] = []
        rows = iter([*self.rows, None])
        row = next(rows)
        while row is not None:
            module, members = row, list[Row]()
            while (row := next(rows)) is not None and row.parameter:
                members.append(row)
            if module.status[number] == status:
                inside = [m for m in members if m.status[number] in _INSIDE[status]]
                some = inside and (status == 'partly' or len(inside) < len(members))
                said = f' ({", ".join(m.name for m in inside)})' if some else ''
                names.append(module.name + said)
        return names


# Of which parameters the word for a module is true.
_INSIDE = {
    'flows': ('flows',),
    'partly': ('flows', 'partly'),
    'stopped': ('stopped',),
    'unused': ('unused',),
}


def text(flow: Any, depth: int | None = None, width: int | None = None) -> str:
    """What ``GradientFlow.table`` returns: no colours."""
    file = io.StringIO()
    # Without a colour system there are no styles either: the kernel of a notebook asks
    # all programs for them (FORCE_COLOR).
    console = Console(file=file, width=width, color_system=None, force_jupyter=False)
    console.print(FlowTable(flow, depth))
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return '\n'.join(lines).strip('\n')


def output_names(flow: Any) -> list[str]:
    """What the outputs are called in a heading: a single one has no name."""
    return [name or 'output' for name in flow.outputs]


def rows(flow: Any, depth: int | None = None) -> list[Row]:
    """A row for each module; below it, where they differ, one for each parameter.

    Args:
        flow: the report.
        depth: how many names of a module's path count; parameters are shown for None.
    """
    found: list[Row] = []
    groups = zip(flow.by_module(depth), flow.members(depth).values(), strict=True)
    for group, members in groups:
        uses = [use for n in members for use in flow.uses[n]]
        found.append(_row(group.module or NO_MODULE, False, group.status, uses))
        statuses = [tuple(flow.shown(row, n) for row in flow.status) for n in members]
        differ = 'partly' in group.status or len(set(statuses)) > 1
        if depth is None and differ:
            for n, status in zip(members, statuses, strict=True):
                name = flow.parameters[n].rpartition('/')[2]
                found.append(_row(name, True, status, flow.uses[n]))
    return found


def hidden(flow: Any, depth: int | None) -> list[str]:
    """Says of which parameters the word 'stopped' of their row is not true."""
    if depth is None:  # They have rows of their own.
        return []
    found: list[str] = []
    for module, members in flow.members(depth).items():
        unused = {
            n
            for row in flow.status
            if 'stopped' in (of_row := {row[n] for n in members})
            and 'flows' not in of_row
            for n in members
            if row[n] == 'unused'
        }
        if unused:
            count = f'{len(unused)} parameter{"s" * (len(unused) > 1)}'
            found.append(f'{count} of {module or NO_MODULE}')
    said = f'Not used in rows with the word {WORDS["stopped"]}: {", ".join(found)}.'
    return [said] if found else []


def _row(
    name: str, parameter: bool, status: tuple[str, ...], uses: Sequence[Any]
) -> Row:
    stopped = sum(use.stopped for use in uses)
    return Row(name, parameter, status, stopped, len(uses))


def _word(status: str) -> Text:
    return Text(WORDS[status], STYLES[status])

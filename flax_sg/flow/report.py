"""The report of ``gradient_flow``: plain data and questions about it."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from flax_sg import errors
from flax_sg.filters import paths
from flax_sg.rendering import pictures, text
from flax_sg.rendering.matrix import Matrix, Row, Word

FLOWS, PARTLY, STOPPED, UNUSED = 'flows', 'partly', 'stopped', 'unused'

# Told apart by colour-blind people and in grey: from the palette of Okabe and Ito, and
# their lightness goes one way from what is trained to what is not used.
WORDS = {
    FLOWS: Word(
        'trains',
        'the output depends differentiably on every parameter there',
        'bold green',
        ('#0072b2', '#ffffff'),
        ('#7cc4f4', '#000000'),
    ),
    PARTLY: Word(
        'partly',
        'on some of the parameters there, or of their elements',
        'yellow',
        ('#56b4e9', '#000000'),
        ('#0072b2', '#ffffff'),
    ),
    STOPPED: Word(
        'stopped',
        'it uses them, and their gradient is exactly zero',
        '',
        ('#e8e8e8', '#333333'),
        ('#30363d', '#e6edf3'),
    ),
    UNUSED: Word(
        '-',
        'it does not use them',
        'dim',
        None,
        None,
    ),
}

NO_MODULE = '(no module)'
# What the rows and the columns of a picture are.
_NAMES = 'parameters', 'outputs'


@dataclasses.dataclass(frozen=True)
class Use:
    """One place where a program uses a parameter.

    Attributes:
        place: JAX's name stack, such as ``'jit(step)/Net/gln_0/dense'``, or
            ``'unknown'``.
        source: the line of the user, ``'model.py:31 (Net.__call__)'``, in a notebook
            with the cell, ``'In[3]:31 (...)'``. ``'unknown'`` if JAX has no line.
        stopped: whether the gradient through this use is zero for every output.
        part: whether only a part of the elements is stopped here, see ``sg.at``.
    """

    place: str
    source: str
    stopped: bool
    part: bool = False


@dataclasses.dataclass(frozen=True)
class ModuleFlow:
    """Which outputs train the parameters of one module.

    Attributes:
        module: the path of the module, ``''`` for parameters outside of a module.
        parameters: the number of parameters.
        status: for each output ``'flows'`` (to all parameters), ``'partly'`` (to some,
            or to a part of their elements), ``'stopped'`` (to none, but it uses some)
            or ``'unused'``.
    """

    module: str
    parameters: int
    status: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class GradientFlow:
    """Which output trains which parameter, as returned by ``sg.gradient_flow``.

    Printing it shows a table: modules down, outputs across. A parameter that is stopped
    or unused has a gradient of exactly zero. One that flows may still have a gradient
    of zero, as in ``x - x``.

    Attributes:
        outputs: the name of each output leaf, ``''`` for a single output.
        parameters: the path of each leaf of the differentiated arguments.
        shapes: the shape and dtype of each parameter.
        status: for each output, and in it for each parameter, ``'flows'``,
            ``'stopped'`` or ``'unused'``.
        uses: for each parameter the places where the function uses it.
    """

    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    status: tuple[tuple[str, ...], ...]
    uses: tuple[tuple[Use, ...], ...]

    def status_of(self, output: str, parameter: str) -> str:
        """Whether a parameter ``'flows'``, is ``'stopped'`` or ``'unused'``.

        Raises:
            UnknownNameError: if there is no such output or parameter.
        """
        row = self.status[_index('output', output, self.outputs)]
        return row[_index('parameter', parameter, self.parameters)]

    def uses_of(self, parameter: str) -> tuple[Use, ...]:
        """The places where a parameter is used.

        Raises:
            UnknownNameError: if there is no such parameter.
        """
        return self.uses[_index('parameter', parameter, self.parameters)]

    def stopped_in(self, parameter: str) -> tuple[int, int]:
        """The number of uses in which a parameter is stopped, and of all its uses."""
        uses = self.uses_of(parameter)
        return sum(use.stopped for use in uses), len(uses)

    def is_partly(self, number: int) -> bool:
        """Whether only a part of the elements of a parameter flows."""
        flowing = [use for use in self.uses[number] if not use.stopped]
        return bool(flowing) and all(use.part for use in flowing)

    @property
    def output_names(self) -> tuple[str, ...]:
        """The outputs as a heading calls them: a single one is ``'output'``."""
        return tuple(name or 'output' for name in self.outputs)

    @property
    def live(self) -> tuple[bool, ...]:
        """For each parameter whether it flows to some output."""
        columns = zip(*self.status, strict=True)
        return tuple(FLOWS in column for column in columns)

    def by_module(self, depth: int | None = None) -> tuple[ModuleFlow, ...]:
        """The status of each module, in natural order: ``layer_2``, ``layer_10``.

        Args:
            depth: the number of names of a module's path to group by. Default all.
        """
        return tuple(
            ModuleFlow(
                module,
                len(members),
                tuple(
                    together(self.shown(row, n) for n in members) for row in self.status
                ),
            )
            for module, members in self.members(depth).items()
        )

    def shown(self, row: Sequence[str], number: int) -> str:
        """The status of a parameter in a row of ``status``, or ``'partly'``."""
        partly = row[number] == FLOWS and self.is_partly(number)
        return PARTLY if partly else row[number]

    def members(self, depth: int | None = None) -> dict[str, list[int]]:
        """The numbers of the parameters of each group of ``by_module``, by its path."""
        groups: dict[str, list[int]] = {}
        for number in paths.in_natural_order(self.parameters):
            module = '/'.join(self.parameters[number].split('/')[:-1][:depth])
            groups.setdefault(module, []).append(number)
        return groups

    def rows(self) -> list[dict[str, Any]]:
        """A plain dict for each output and parameter, for ``pandas.DataFrame``."""
        return [
            {
                'output': output,
                'parameter': str(path),
                'shape': shape.shape,
                'dtype': str(shape.dtype),
                'status': status,
                'uses': len(uses),
                'stopped_uses': sum(use.stopped for use in uses),
            }
            for output, statuses in zip(self.outputs, self.status, strict=True)
            for path, shape, status, uses in zip(
                self.parameters, self.shapes, statuses, self.uses, strict=True
            )
        ]

    def matrix(self, depth: int | None = None) -> Matrix:
        """The report as rows of words: modules down, outputs across.

        Repeated modules with the same words are one row, ``layers_0..11``. Where the
        parameters of a module differ, a row for each follows that of the module.

        Args:
            depth: the number of names of a module's path to group by. Default all.
                With a number, no parameter has a row of its own.
        """
        modules = list(self.by_module(depth))
        members = list(self.members(depth).values())
        parts = [self._parts(numbers) if depth is None else {} for numbers in members]
        joined = text.repeated(
            [tuple(filter(None, module.module.split('/'))) for module in modules],
            [
                (module.status, tuple((key, None) for key in part))
                for module, part in zip(modules, parts, strict=True)
            ],
        )
        rows: list[Row] = []
        for names, same in joined:
            inside = [n for group in same for n in members[group]]
            name = '/'.join(names) or NO_MODULE
            rows.append(Row(name, modules[same[0]].status, self._stopped_of(inside)))
            for name, status in parts[same[0]]:
                numbers = [n for group in same for n in parts[group][name, status]]
                rows.append(Row(name, status, self._stopped_of(numbers), is_part=True))
        return Matrix(self.output_names, tuple(rows), WORDS, 'uses stopped')

    def _parts(self, members: Sequence[int]) -> dict[tuple[str, Any], list[int]]:
        """The parameters of a module by name and status, if their statuses differ."""
        parts: dict[tuple[str, Any], list[int]] = {}
        for n in members:
            status = tuple(self.shown(row, n) for row in self.status)
            name = self.parameters[n].rpartition('/')[2]
            parts.setdefault((name, status), []).append(n)
        statuses = {status for _, status in parts}
        differ = len(statuses) > 1 or any(PARTLY in status for status in statuses)
        return parts if differ else {}

    def _stopped_of(self, members: Sequence[int]) -> str:
        uses = [use for n in members for use in self.uses[n]]
        return f'{sum(use.stopped for use in uses)} of {len(uses)}'

    def table(self, depth: int | None = None, width: int | None = None) -> str:
        """The report as text: modules down, outputs across; ``str`` gives the same.

        Args:
            depth: the number of names of a module's path to group by. Default all.
            width: in characters. Default that of the terminal.
        """
        return text.plain(self.matrix(depth), width)

    def plot(
        self,
        path: str | os.PathLike[str],
        depth: int | None = None,
        title: str = 'Which output trains which part',
        dark: bool = False,
    ) -> None:
        """Draws the table as a picture into a file; needs the extra ``plot``.

        Outputs are sorted by the first modules that they train.

        Args:
            path: the file; its name says of which kind (png, svg, pdf, ...).
            depth: the number of names of a module's path to group by. Default all.
            title: stands above it.
            dark: whether it is drawn for pages in dark mode.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
            ValueError: if matplotlib does not know the kind of file.
        """
        pictures.save(self.matrix(depth), path, title, _NAMES, dark)

    def draw(self, axes: Any, depth: int | None = None) -> None:
        """Draws the table into axes of matplotlib, beside other plots; no legend.

        Outputs keep their order, so that several reports can be compared.

        Args:
            axes: the axes, with nothing in them. A cell is one unit wide and high.
            depth: the number of names of a module's path to group by. Default all.

        Raises:
            ModuleNotFoundError: if matplotlib is not installed.
        """
        pictures.draw(axes, self.matrix(depth), _NAMES)

    def __str__(self) -> str:
        return self.table()

    def __rich__(self) -> Matrix:
        return self.matrix()

    def _repr_html_(self) -> str:
        return self.matrix().html()

    def __repr__(self) -> str:
        return (
            f'GradientFlow({len(self.outputs)} outputs, '
            f'{len(self.parameters)} parameters, {sum(self.live)} live)'
        )


def together(statuses: Iterable[str]) -> str:
    """The status of several parameters together."""
    found = set(statuses)
    if found & {FLOWS, PARTLY}:
        return FLOWS if found == {FLOWS} else PARTLY
    return STOPPED if STOPPED in found else UNUSED


def _index(kind: str, name: str, names: Sequence[str]) -> int:
    try:
        return names.index(name)
    except ValueError:
        raise unknown_name(kind, name, names) from None


def unknown_name(kind: str, name: str, names: Sequence[str]) -> errors.UnknownNameError:
    """A report is asked for an output or a parameter that is not in it."""
    near = difflib.get_close_matches(name, list(map(str, names)), 3, cutoff=0.0)
    meant = f'Did you mean {" or ".join(map(repr, near))}?' if near else 'It has none.'
    return errors.UnknownNameError(f'The report has no {kind} {name!r}. {meant}')

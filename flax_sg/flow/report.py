"""The report of ``gradient_flow``: plain data and questions about it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from flax_sg import filters
from flax_sg.errors.texts import listed
from flax_sg.filters import paths
from flax_sg.flow.uses import Use
from flax_sg.flow.way import Way
from flax_sg.rendering import text
from flax_sg.rendering.matrix import Matrix, Row, Word
from flax_sg.rendering.rows import (
    alike,
    grouped,
    index,
    repeated,
    unique,
)
from flax_sg.rendering.shown import Shown

FLOWS, PARTLY, STOPPED, UNUSED = 'flows', 'partly', 'stopped', 'unused'

# From what is trained to what is not used: the strength of their colour.
WORDS = {
    FLOWS: Word('trains', 'a gradient reaches every parameter there'),
    PARTLY: Word(
        'partly',
        'a gradient reaches some of the parameters there, or some of their elements',
    ),
    STOPPED: Word(
        'stopped',
        'the output uses the parameters there; their gradient is exactly zero',
    ),
    UNUSED: Word('-', 'the output does not use the parameters there'),
}


@dataclasses.dataclass(frozen=True)
class Why:
    """Why an output trains a parameter, or does not, as ``GradientFlow.why`` tells.

    Attributes:
        output, parameter: their names.
        status: ``'flows'``, ``'partly'``, ``'stopped'`` or ``'unused'``.
        lines: the lines of the user between them, such as
            ``'model.py:31 (Net.__call__)'``, in a notebook ``'In[3]:31 (...)'``.
        by: what stops the gradient, and its line: ``'argmax at model.py:33 (...)'``. A
            block is named with its filter. ``''`` if nothing does.
        uses: each use of the parameter for this output: its line, and whether a
            gradient comes back from there. A tied embedding has two.
        condition: the line that stops it while a condition holds. ``''`` if none does.
    """

    output: str
    parameter: str
    status: str
    lines: tuple[str, ...] = ()
    by: str = ''
    uses: tuple[Use, ...] = ()
    condition: str = ''

    def __str__(self) -> str:
        headline = _HEADLINES[self.status].format(self.parameter, self.output)
        lines = [headline, *(f'  {line}' for line in self.lines)]
        if self.by:
            lines.append(f'It is stopped by {self.by}.')
        if self.condition:
            lines.append(f'While a condition holds, {self.condition} stops it.')
        elif len({use.trains for use in self.uses}) > 1:
            live = sum(use.trains for use in self.uses)
            lines.append(f'It is trained by {live} of {len(self.uses)} uses:')
            verbs = 'is stopped', 'trains it'
            lines += [f'  {use.line} {verbs[use.trains]}' for use in self.uses]
        return text.encodable('\n'.join(lines))


_HEADLINES = {
    FLOWS: 'A gradient flows to {!r} from {!r}:',
    PARTLY: 'A gradient flows to a part of {!r} from {!r}:',
    STOPPED: 'No gradient flows to {!r} from {!r}:',
    UNUSED: '{!r} is not used by {!r}.',
}


def _no_way(parameter: int, output: int) -> Way:
    return Way()


@dataclasses.dataclass(frozen=True)
class GradientFlow(Shown):
    """Which output trains which parameter, as returned by ``sg.gradient_flow``.

    Printing it shows a table: modules down, outputs across. A parameter that is stopped
    or unused has a gradient of exactly zero. One that flows may still have a gradient
    of zero, as in ``x - x``.

    Attributes:
        outputs: the name of each output leaf; that of a single output is ``'output'``.
        parameters: the path of each leaf of the differentiated arguments.
        shapes: the shape and dtype of each parameter.
        status: for each output, and in it for each parameter, ``'flows'``,
            ``'partly'``, ``'stopped'`` or ``'unused'``.
        parts: for each output, and in it for each parameter that is ``'partly'``
            trained, the part; None for the others.
        explain: for the numbers of a parameter and an output the way between them.
        arguments: the numbers in the paths of several arguments, with their names.
        conditions: for each output, and in it for each parameter, the line that stops
            it by a condition, ``where & (step < k)``; ``''`` if none does. Such a
            parameter ``'flows'``.
    """

    title = 'Which output trains which part'

    outputs: tuple[str, ...]
    parameters: tuple[paths.Path, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    status: tuple[tuple[str, ...], ...]
    parts: tuple[tuple[filters.Part | None, ...], ...] = ()
    explain: Callable[[int, int], Way] = dataclasses.field(
        default=_no_way, repr=False, compare=False
    )
    arguments: tuple[tuple[int, str], ...] = ()
    conditions: tuple[tuple[str, ...], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # Programs cannot be pickled.
        return {**self.__dict__, 'explain': _no_way}

    def status_of(self, output: str, parameter: str) -> str:
        """One of ``'flows'``, ``'partly'``, ``'stopped'`` and ``'unused'``.

        Raises:
            UnknownNameError: if there is no such output or parameter.
        """
        row = self.status[index('output', output, self.outputs)]
        return row[self._number(parameter)]

    def why(self, output: str, parameter: str) -> Why:
        """Why an output trains a parameter, or does not: the lines between them.

        >>> import jax, jax.numpy as jnp, flax_sg as sg
        >>> def loss(params):
        ...     code = jnp.round(params['code'])
        ...     return code * params['head']
        >>> flow = sg.gradient_flow(loss, {'code': 1.5, 'head': 2.0})
        >>> print(flow.why('output', 'code'))  # doctest: +ELLIPSIS
        No gradient flows to 'code' from 'output':
          ...:2 (loss)
          ...:3 (loss)
        It is stopped by round at ...:2 (loss).

        The program is walked when somebody asks, not before. A report that was pickled
        knows no lines.

        Args:
            output: the name of an output, one of ``outputs``.
            parameter: the name of a parameter: its path, below the collection if there
                are several; or a ``Path``.

        Returns:
            A ``Why``: ``print`` it, or read ``by``, ``lines``, ``uses``, ``status``.
            For a parameter that is not used it has no lines.

        Raises:
            UnknownNameError: if there is no such output or parameter.
        """
        n, k = self._number(parameter), index('output', output, self.outputs)
        status = self.status[k][n]
        way = self.explain(n, k) if status != UNUSED else Way()
        return Why(
            output=output,
            parameter=parameter,
            status=status,
            lines=way.lines,
            # A parameter that flows may pass a stop, which is not named.
            by=way.by if status == STOPPED else '',
            uses=way.uses,
            condition=self.conditions[k][n] if self.conditions else '',
        )

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters, each with a name of its own.

        It is the path, below the collection if there are several: ``'params/w'``.
        """
        return tuple(unique(self.parameters))

    def _number(self, parameter: str) -> int:
        if isinstance(parameter, paths.Path):
            places = [path.place for path in self.parameters]
            if parameter.place in places:
                return places.index(parameter.place)
        return index('parameter', parameter, self.names)

    def count(self, number: int, outputs: Iterable[int] | None = None) -> int:
        """How many elements of a parameter some outputs train, see ``trained``."""
        mask = self.mask(number, self.trained(number, outputs))
        return math.prod(self.shapes[number].shape) * int(mask.sum()) // mask.size

    @property
    def live(self) -> tuple[bool, ...]:
        """For each parameter whether it flows to some output, or a part of it."""
        every = range(len(self.parameters))
        return tuple(filters.is_meant(self.trained(n)) for n in every)

    def trained(
        self, number: int, outputs: Iterable[int] | None = None
    ) -> bool | filters.Part:
        """What some outputs train of a parameter: all, nothing or a part.

        Args:
            number: the number of the parameter.
            outputs: the numbers of the outputs. By default all of them together.
        """
        trained: bool | filters.Part = False
        for output in range(len(self.outputs)) if outputs is None else outputs:
            status = self.status[output][number]
            if status == PARTLY:
                part = self.parts[output][number]
                trained = True if part is None else part | trained
            elif status == FLOWS:
                return True
        return trained

    def by_module(self, depth: int | None = None) -> dict[str, tuple[str, ...]]:
        """The status of each module for each output, by the module's path.

        It is ``'flows'`` (to all parameters), ``'partly'`` (to some, or to a part of
        their elements), ``'stopped'`` (to none, but the output uses some) or
        ``'unused'``. Modules are in natural order: ``layer_2``, ``layer_10``. The path
        of parameters outside of a module is ``''``.

        Args:
            depth: the number of names of a module's path to group by. Default all.
        """
        return {
            '/'.join(module): tuple(
                together(row[n] for n in indices) for row in self.status
            )
            for module, indices in grouped(self.parameters, depth).items()
        }

    def mask(self, number: int, decision: bool | filters.Part) -> Any:
        """The elements of a parameter that a decision means, as an array of bools."""
        if not isinstance(decision, filters.Part):
            return np.array(decision)
        return decision.mask(self.shapes[number].shape, self.parameters[number])

    def rows(self) -> list[dict[str, Any]]:
        """A plain dict for each parameter, for JSON and ``pandas.DataFrame``."""
        statuses = zip(*self.status, strict=True)
        columns = zip(self.names, self.shapes, statuses, strict=True)
        return [
            {
                'parameter': name,
                'collection': getattr(self.parameters[n], 'collection', ''),
                'shape': shape.shape,
                'dtype': str(shape.dtype),
                'status': dict(zip(self.outputs, status, strict=True)),
                'trained': self.count(n),
            }
            for n, (name, shape, status) in enumerate(columns)
        ]

    def matrix(self, depth: int | None = None) -> Matrix:
        """The report as rows of words: modules down, outputs across.

        A module whose parameters have the same words is one row, and so are repeated
        modules with the same words, ``layers_*``.

        Args:
            depth: the number of names of a module's path to group by. Default all.
                With a number, no parameter has a row of its own.
        """
        names = [(name,) for name in self.outputs]
        parts = self.parts or ((),) * len(names)
        shown = text.repeated(names, list(zip(self.status, parts, strict=True)))
        columns = [(name, same[0]) for (name,), same in shown]
        if depth is None:
            statuses = alike(self.parameters, [*zip(*self.status, strict=True)])
        else:
            modules = self.by_module(depth).items()
            statuses = {
                tuple(filter(None, name.split('/'))): row for name, row in modules
            }
        return Matrix(
            tuple(name for name, _ in columns),
            tuple(
                Row(name, tuple(status[number] for _, number in columns))
                for name, status in repeated(statuses)
            ),
            WORDS,
            totals=self._totals(columns),
        )

    def _totals(self, columns: Sequence[tuple[str, int]]) -> tuple[str, ...]:
        """A line for each output, and what no output trains, by cause."""
        every = range(len(self.parameters))
        dtypes = [shape.dtype for shape in self.shapes]
        all_of = sum(math.prod(shape.shape) for shape in self.shapes)
        lines = [
            f'{name} trains '
            + text.amount([(self.count(n, [k]), dtypes[n]) for n in every])
            + f' of {all_of:,} values'
            for name, k in columns
        ]
        if self.arguments:
            pairs = (f'{n} is {name}' for n, name in self.arguments)
            lines.append(f'In paths and filters, {", ".join(pairs)}.')
        lines += by_condition(self.conditions, self.names)
        idle: dict[bool, list[str]] = {}
        for n in every:
            if self.trained(n) is False:
                is_used = any(row[n] != UNUSED for row in self.status)
                idle.setdefault(is_used, []).append(self.names[n])
        for is_used, names in idle.items():
            verb = 'trains' if is_used else 'uses'
            lines.append(f'No output {verb} {listed(names)}.')
        return tuple(lines)

    def __repr__(self) -> str:
        return (
            f'GradientFlow({len(self.outputs)} outputs, '
            f'{len(self.parameters)} parameters, {sum(self.live)} live)'
        )


def by_condition(
    conditions: Iterable[Sequence[str]], names: Sequence[str]
) -> list[str]:
    """What conditions stop for a while: a sentence for each line that does so."""
    stopped: dict[str, dict[str, None]] = {}
    for row in conditions:
        for name, line in zip(names, row, strict=True):
            stopped.setdefault(line, {})[name] = None
    return [
        f'While a condition holds, {line} stops {listed([*stopped_names])}.'
        for line, stopped_names in stopped.items()
        if line
    ]


def together(statuses: Iterable[str]) -> str:
    """The status of several parameters together."""
    distinct = set(statuses)
    if distinct & {FLOWS, PARTLY}:
        return FLOWS if distinct == {FLOWS} else PARTLY
    return STOPPED if STOPPED in distinct else UNUSED

"""What a gradient flow is expected to be, and where it is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from flax_sg import errors, filters
from flax_sg.errors import texts
from flax_sg.filters.paths import Path
from flax_sg.flow import GradientFlow, Use
from flax_sg.flow.report import unknown_name
from flax_sg.flow.statuses import UNUSED, WORDS
from flax_sg.trees import leaves
from flax_sg.trees.trainable import not_differentiable


@dataclasses.dataclass(frozen=True)
class Broken:
    """One parameter for which it is otherwise.

    Attributes:
        output: the name of the output.
        parameter: the path of the parameter.
        expected: ``'flows'`` or ``'stopped'``.
        found: the status in the report.
        uses: the uses in the report.
    """

    output: str
    parameter: str
    expected: str
    found: str
    uses: tuple[Use, ...]


@dataclasses.dataclass(frozen=True)
class Expectation:
    """A statement about a report; leaves that have no gradient by their type are free.

    Attributes:
        where: the parameters that it names.
        trained: whether these have to be trained, or must not be.
        only: whether all others have to be the opposite.
        output: which outputs this holds for, each alone; None for what all of them
            train together.
    """

    where: filters.Filter
    trained: bool = True
    only: bool = False
    output: filters.Filter | None = None

    def __str__(self) -> str:
        who = 'The function' if self.output is None else f'The output {self.output!r}'
        if not self.trained:
            return f'{who} trains nothing of {self.where!r}'
        return f'{who} trains {self.where!r}{" and nothing else" * self.only}'

    def broken(self, flow: GradientFlow) -> list[Broken]:
        """Where a report is not as it is expected.

        Raises:
            UnusedFilterError: if a part of the filter selects no parameter.
            UnknownNameError: if there is no output that a part of ``output`` names.
            NotDifferentiableError: if all that has to be trained is integers, keys and
                the like.
        """
        [named] = leaves.selected([_paths(flow.parameters)], self.where)
        free = [not leaves.is_differentiable(shape) for shape in flow.shapes]
        trainable = [n for n, takes in enumerate(named) if takes and not free[n]]
        if self.trained and any(named) and not trainable:
            pairs = zip(flow.parameters, flow.shapes, named, strict=True)
            raise not_differentiable(
                self.where, {path: shape for path, shape, takes in pairs if takes}
            )
        found: list[Broken] = []
        for output, statuses in self._columns(flow):
            for n, status in enumerate(statuses):
                if free[n] or not (named[n] or self.only):
                    continue
                expected = self.trained if named[n] else not self.trained
                if expected != (status == 'flows'):
                    word = 'flows' if expected else 'stopped'
                    path, uses = flow.parameters[n], flow.uses[n]
                    found.append(Broken(output, path, word, status, uses))
        return found

    def check(self, flow: GradientFlow) -> None:
        """Raises ``ExpectationError`` where a report is not as it is expected."""
        if broken := self.broken(flow):
            raise _not_as_expected(str(self), table(broken))

    def _columns(self, flow: GradientFlow) -> Sequence[tuple[str, Sequence[str]]]:
        """The outputs to judge: a name, and a status for each parameter."""
        names = flow.output_names
        if self.output is None:
            together = [_together(column) for column in zip(*flow.status, strict=True)]
            return [(names[0] if len(names) == 1 else 'together', together)]
        paths = _paths(names)
        for part in (*self.output.atoms, self.output):
            if not any(map(part, paths)):
                said = part.pattern if isinstance(part, filters.Glob) else repr(part)
                raise unknown_name('output', said, names)
        rows = zip(names, flow.status, map(self.output, paths), strict=True)
        return [(name, row) for name, row, takes in rows if takes]


def _together(statuses: Sequence[str]) -> str:
    return next(s for s in ('flows', 'stopped', 'unused') if s in statuses)


def _paths(names: Sequence[str]) -> list[Path]:
    return [
        name if isinstance(name, Path) else Path.of('outputs', tuple(name.split('/')))
        for name in names
    ]


def table(broken: Sequence[Broken]) -> str:
    """Where it is otherwise, as a table; only the first rows of a long one."""
    head = ['output', 'parameter', 'expected', 'found', 'at']
    return texts.table(head, _rows(broken))


def _rows(broken: Sequence[Broken]) -> Iterator[tuple[str, ...]]:
    """Rows for a message, with one for parameters of a module that are broken alike."""
    alike: dict[tuple[str, ...], list[Broken]] = {}
    for one in broken:
        module = one.parameter.rpartition('/')[0]
        key = one.output, module, one.expected, one.found
        alike.setdefault(key, []).append(one)
    for (output, module, expected, found), group in alike.items():
        name = group[0].parameter
        if len(group) > 1:
            name = f'{module}/* ({len(group)})' if module else f'* ({len(group)})'
        yield output, name, _word(expected), _word(found), _place(group[0])


def _place(one: Broken) -> str:
    """Lines of the program: of live uses where there should be none, or of stops."""
    flows = one.found == 'flows'
    places = list(dict.fromkeys(u.source for u in one.uses if u.stopped != flows))
    more = f' and {len(places) - 1} more' if len(places) > 1 else ''
    return f'{places[0]}{more}' if places else ''


def _word(status: str) -> str:
    return 'not used' if status == UNUSED else WORDS[status].text


def _not_as_expected(expected: str, broken: str) -> errors.ExpectationError:
    """A function trains something else than it is expected to."""
    return errors.ExpectationError(f'{expected}: this does not hold.\n{broken}')

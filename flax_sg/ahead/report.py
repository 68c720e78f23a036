"""What is kept, what it saves, and why a frozen module is computed at each step."""

from __future__ import annotations

import functools

from jax.extend.core import Literal

from flax_sg import errors, filters
from flax_sg.ahead.costs import bytes_of, flops_of
from flax_sg.ahead.examples import Batch
from flax_sg.ahead.obstacles import Obstacle, Root, obstacles
from flax_sg.ahead.split import Split, of_the_batch
from flax_sg.ahead.traced import Trace
from flax_sg.internals import jaxprs
from flax_sg.internals.program import makers_of
from flax_sg.rendering import text
from flax_sg.trees.trainable import Declared

# How many obstacles a report shows.
_SHOWN = 8
# Much is kept if it is some kilobytes, and some times the data. It is worth that from
# this share of the flops on.
_KILOBYTES, _TIMES, _WORTH = 4096, 4, 0.2


class Report:
    """The report on a split: its table and its warnings."""

    def __init__(self, trace: Trace, split: Split, batch: Batch | None) -> None:
        self._trace, self._split, self._batch = trace, split, batch
        early, late = (
            flops_of(step.eqn for step in steps) for steps in (split.early, split.late)
        )
        self._share = early / (early + late) if early + late else 0.0
        self._kept = sum(bytes_of(split.avals[n]) for n in split.kept)
        self._data = sum(bytes_of(aval) for _, aval in trace.data.values())

    def __str__(self) -> str:
        makers, lines = makers_of(self._split.steps), list[str]()
        cells: list[list[str]] = []
        for number in self._split.kept:
            aval, step = self._split.avals[number], makers.get(number)
            maker = (
                f'{jaxprs.operation(step.eqn)} at {step.source}' if step else 'an input'
            )
            cells.append([aval.str_short(), f'{bytes_of(aval):,}', maker])
        if cells:
            lines += [text.table(['kept', 'bytes', 'made by'], cells, ['bytes']), '']
        of_data = f', for {self._data:,} bytes of data' if self._data else ''
        lines.append(
            f'{self._share:.1%} of the flops are done once; {self._kept:,} bytes are '
            f'kept{of_data}.'
        )
        rows = self._obstacles
        lines += map(str, rows[:_SHOWN])
        if len(rows) > _SHOWN:
            lines.append(f'So are {len(rows) - _SHOWN} others.')
        lines += dict.fromkeys(_without_dropout(row) for row in rows if row.is_dropout)
        written = self._written()
        lines += [
            f'{name} is written by the function. What is computed once reads the value '
            'that early gets.'
            for name in written
        ]
        if written:
            lines.append(
                'To go on from step to step, it needs an argument of its own in each=.'
            )
        if self._batch is None and (
            note := of_the_batch(self._split, self._trace.data)
        ):
            lines.append(note)
        return '\n'.join(lines)

    def check_apart(self) -> None:
        """Raises if a frozen module is not of single examples."""
        row = next((x for x in self._obstacles if x.reason.kind == 'mix'), None)
        if row is None:
            return
        where, aval = next(iter(self._trace.data.values()))
        operation = row.reason.name.partition(' at ')[0]
        advice = 'Split the loss of one example, and map it by jax.vmap.'
        if operation in ('concatenate', 'slice', 'split', 'stack', 'reshape'):
            advice = f'Are two views joined, such as chosen beside rejected? {advice}'
        if operation.startswith('reduce'):
            advice = (
                "Write nn.Frozen(module, state='eval') for a module that normalizes "
                f'over the batch. {advice}'
            )
        raise errors.ArgumentTypeError(
            f'{row}\n'
            'With examples=True, what is frozen is computed for each example by '
            'itself, and the first axis of all data is that of the examples: '
            f'{where} is {aval.str_short()}. If they are along another axis, move it '
            'to the front in the data, and back in the loss.\n'
            f'{advice}'
        )

    def lost(self, function: str) -> str:
        """Warns of what neither part writes."""
        if not self._trace.lost:
            return ''
        argument = self._trace.arguments[self._trace.lost[0]]
        return (
            f'{function} writes to {argument.title}, a model of NNX, and early and '
            'late do not.\n'
            'Name the argument in argnums=, so that late writes to it, or call its '
            'eval().'
        )

    def worth(self, wrt: filters.Where | Declared) -> str:
        """Warns if nothing is computed once, or if much is kept for little."""
        if not self._split.early:
            hint = (
                'Without wrt=, all parameters count as trained: write '
                'wrt=sg.live(loss, params, ...).\n'
            )
            return (
                'Nothing is computed once: all that costs something reads what changes'
                f'{", or no example" * (self._batch is not None)}.\n'
                f'{hint * isinstance(wrt, Declared)}{self}'
            )
        much = max(_KILOBYTES, _TIMES * self._data)
        if self._data and self._share < _WORTH and self._kept > much:
            return (
                f'Much is kept for little: {self._kept:,} bytes for {self._data:,} '
                f'bytes of data, and {self._share:.1%} of the flops are done once.\n'
                f'{self}'
            )
        return ''

    @functools.cached_property
    def _roots(self) -> dict[int, Root]:
        """What the inputs are, and the values in which examples are mixed."""
        mixed = self._batch.mixed if self._batch else {}
        roots = {number: Root(str(op), 'mix') for number, op in mixed.items()}
        written = {slot for write in self._trace.writes for slot in write.slots}
        for name, argument in self._trace.arguments.items():
            for path, slots in zip(argument.paths, argument.slots, strict=True):
                is_own = name in self._trace.own
                kind = 'parameter' if is_own else 'argument'
                root = Root((is_own and path) or argument.title, kind, path)
                roots.update(dict.fromkeys(slots, root))
                state = Root(path, 'written', path)
                roots.update(dict.fromkeys(written & {*slots}, state))
        for step in self._split.late:
            if jaxprs.has_effect(step.eqn):
                root = Root(f'{jaxprs.operation(step.eqn)} at {step.source}', 'effect')
                roots.update(dict.fromkeys(step.outs, root))
        return roots

    @functools.cached_property
    def _obstacles(self) -> list[Obstacle]:
        return obstacles(self._split, self._roots)

    def _written(self) -> list[str]:
        """The parameters and running averages that early reads and a step writes.

        A step writes a value if an output has the same path and shape.
        """
        split, paths = self._split, list[str]()
        read = {*split.kept, *(n for step in split.early for n in step.read())}
        for number, root in self._roots.items():
            if not root.path or number not in read:
                continue
            for path, output in zip(self._trace.outputs, split.outputs, strict=True):
                if isinstance(output, Literal) or output == number:
                    continue
                is_same = f'/{path}'.endswith(f'/{root.path}')
                if is_same and split.avals[output].shape == split.avals[number].shape:
                    paths.append(root.path)
        return [*dict.fromkeys(paths)]


def _without_dropout(row: Obstacle) -> str:
    """What to write, so that dropout does not stand in the way."""
    if row.reason.kind == 'written':
        return 'To turn dropout off there, call eval() of the frozen module.'
    return (
        "To turn dropout off there, write nn.Frozen(module, state='eval'). To draw "
        f'once for a batch, leave {row.reason.name} out of each=.'
    )

"""What is kept, what it saves, and why a frozen module is computed at each step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp

from flax_sg import errors
from flax_sg.ahead.costs import bytes_of, flops_of, has_while, is_cheap
from flax_sg.ahead.examples import Batch, Examples
from flax_sg.ahead.obstacles import Obstacle, Root, obstacles
from flax_sg.ahead.split import Split, split
from flax_sg.ahead.traced import Trace
from flax_sg.internals import jaxprs
from flax_sg.internals.types import Aval
from flax_sg.programs.steps import Step, made_by, makers_of, numbers_in
from flax_sg.rendering import text

# How many obstacles a report shows.
_SHOWN = 8
# Much is kept if it is some kilobytes, and some times the data, or some times what
# could be kept. It is worth that from this share of the flops on.
_KILOBYTES, _TIMES, _WORTH = 4096, 4, 0.2
# Below this share of the flops, hardly anything is done once.
_LITTLE = 0.02


class Report:
    """The report on a split: its table and its warnings."""

    def __init__(
        self, trace: Trace, split: Split, batch: Batch | None, names_trained: bool
    ) -> None:
        """Counts flops and bytes.

        Args:
            trace: the function.
            split: the two parts of it.
            batch: with ``examples=True`` where the examples are.
            names_trained: whether ``wrt=`` was given.
        """
        self._trace, self._split, self._batch = trace, split, batch
        self._names_trained = names_trained
        self._share = _share_of(split)
        self._kept = _bytes_kept(split)
        self._data = sum(bytes_of(aval) for _, aval in trace.data.values())
        self._may_be_more = has_while(step.eqn for step in split.early)
        self._may_be_less = has_while(step.eqn for step in split.late)

    def __str__(self) -> str:
        makers, cells = makers_of(self._split.steps), list[list[str]]()
        for number in self._split.kept:
            aval, step = self._split.avals[number], makers.get(number)
            maker = step.described if step else 'an input'
            cells.append([aval.str_short(), f'{bytes_of(aval):,}', maker])
        head = ['kept', 'bytes', 'made by']
        table = [text.table(head, cells, ['bytes']), ''] if cells else []
        lines = (line for part in self._said() for line in part.splitlines())
        return '\n'.join([*table, *map(text.wrapped, lines)])

    def _said(self) -> Iterator[str]:
        """What stands below the table."""
        bound, counted = '', ''
        if self._may_be_more or self._may_be_less:
            counted = ' A while loop counts one turn.'
        if self._may_be_more != self._may_be_less:
            bound = ' at least' if self._may_be_more else ' at most'
        of_data = f', for {self._data:,} bytes of data' if self._data else ''
        yield (
            f'{self._share:.1%} of the flops{bound} are done once; '
            f'{self._kept:,} bytes are kept{of_data}.{counted}'
        )
        yield self._larger()
        yield '' if self._names_trained else _ALL_TRAINED
        yield from map(str, self._obstacles[:_SHOWN])
        if len(self._obstacles) > _SHOWN:
            yield f'So are {len(self._obstacles) - _SHOWN} others.'
        reasons = (row.reason for row in self._obstacles)
        yield from dict.fromkeys(
            _ADVICE[x.kind].format(x.name) for x in reasons if x.kind in _ADVICE
        )
        yield self._of_no_example()
        said = 'is written by the function. What is computed once reads the value that'
        written = [f'{name} {said} early gets.' for name in self._written()]
        yield from written
        if written:
            yield (
                'To go on from step to step, it needs an argument of its own in each=.'
            )
        yield self._of_the_batch()

    def check_apart(self) -> None:
        """Raises if a frozen module is not of single examples."""
        mix = next((x for x in self._obstacles if x.reason.kind == 'mix'), None)
        if mix is None:
            return
        where, aval = next(iter(self._trace.data.values()))
        operation = mix.reason.name.partition(' at ')[0]
        advice = 'Split the loss of one example, and map it by jax.vmap.'
        if operation in ('concatenate', 'slice', 'split', 'stack', 'reshape'):
            advice = f'Are two views joined, such as chosen beside rejected? {advice}'
        if operation.startswith('reduce'):
            advice = (
                "Write nn.Frozen(module, state='eval') for a module that normalizes "
                f'over the batch. {advice}'
            )
        raise errors.ArgumentTypeError(
            f'{mix}\n'
            'With examples=True, what is frozen is computed for each example by '
            'itself, and the first axis of all data is that of the examples: '
            f'{where} is {aval.str_short()}. If they are along another axis, move it '
            'to the front in the data, and back in the loss.\n'
            f'{advice}'
        )

    def lost(self, function: str) -> str:
        """Warns of what neither part writes; empty if there is nothing."""
        if not self._trace.lost:
            return ''
        argument = self._trace.arguments[self._trace.lost[0]]
        return (
            f'{function} writes to {argument.title}, a model of NNX, and early and '
            'late do not.\n'
            'Name the argument in argnums=, so that late writes to it, or call its '
            'eval().'
        )

    def worth(self) -> str:
        """Warns if hardly anything is computed once, or if much is kept for little."""
        if not self._split.early:
            no_example = ', or no example' if self._batch is not None else ''
            return (
                'Nothing is computed once: all that costs something reads what changes'
                f'{no_example}.\n{self}'
            )
        if self._may_be_more:
            return ''
        done = f'{self._share:.1%} of the flops are done once'
        much = max(_KILOBYTES, _TIMES * self._data)
        if self._data and self._share < _WORTH and self._kept > much:
            return (
                f'Much is kept for little: {self._kept:,} bytes for {self._data:,} '
                f'bytes of data, and {done}.\n{self}'
            )
        if self._share < _LITTLE:
            return f'Hardly anything is computed once: {done}.\n{self}'
        return ''

    @functools.cached_property
    def _roots(self) -> dict[int, Root]:
        """What the inputs are, and the values in which examples are mixed."""
        mixed = self._batch.mixed if self._batch else {}
        roots = {number: Root(str(op), 'mix') for number, op in mixed.items()}
        written = {slot for write in self._trace.writes for slot in write.slots}
        own = self._trace.own
        for name, argument in self._trace.arguments.items():
            for path, slots in zip(argument.paths, argument.slots, strict=True):
                root = Root((name in own and path) or argument.title, 'argument')
                for slot in slots:
                    kind = 'key' if _may_be_key(self._split.avals[slot]) else root.kind
                    kind = 'parameter' if name in own else kind
                    roots[slot] = root._replace(kind=kind)
                roots.update(dict.fromkeys(written & {*slots}, Root(path, 'written')))
        for step in self._split.late:
            if jaxprs.has_effect(step.eqn):
                roots.update(dict.fromkeys(step.outs, Root(step.described, 'effect')))
        return roots

    @functools.cached_property
    def _obstacles(self) -> list[Obstacle]:
        return obstacles(self._split, self._roots)

    def _larger(self) -> str:
        """Names weights that multiply the bytes that are kept, such as an output head.

        Late would run them on what is kept beside, if ``wrt=`` named them.
        """
        split, is_data = self._split, self._trace.is_data
        fewer, weights = self._kept, set[int]()
        for large in split.kept:
            others = {*split.kept} - {large}
            read = _read_by(made_by(split.early, [large], known=others))
            own = read - others - split.constants.keys()
            are_weights = all(n < len(is_data) and not is_data[n] for n in own)
            # Late has no use for what it would have to run the others for, too.
            is_shared = not own.isdisjoint(_read_by(made_by(split.early, others)))
            size = bytes_of(split.avals[large])
            of_kept = sum(bytes_of(split.avals[n]) for n in read & others)
            if own and are_weights and not is_shared and 0 < of_kept * _TIMES <= size:
                fewer, weights = fewer - size, weights | own
        if not weights or fewer * _TIMES > self._kept:
            return ''
        names = ', '.join(sorted({repr(self._roots[n].name) for n in weights}))
        return (
            f'{fewer:,} bytes would be kept if late read {names}: name this in wrt= of '
            'sg.precompute, and not in that of sg.grad.'
        )

    def _written(self) -> list[str]:
        """The parameters and running averages that early reads and a step writes.

        A step writes an argument, or a collection of parameters, if all its leaves come
        back: each in an output of its path and shape. Others have the same name.
        """
        split, found = self._split, list[str]()
        read = {*split.kept, *_read_by(split.early)}
        for argument in self._trace.arguments.values():
            paths = self._trace.own.get(argument.name, [])
            states = [path.collection for path in paths] or [''] * len(argument.paths)
            of_leaves = zip(states, argument.paths, argument.slots, strict=True)
            leaves = [
                (state, path, slot, self._output_for(slot, path))
                for state, path, slots in of_leaves
                for slot in slots
            ]
            stay = {state for state, _, _, output in leaves if output is None}
            found += [
                path
                for state, path, slot, output in leaves
                if state not in stay and slot in read and output != slot
            ]
        return [*dict.fromkeys(found)]

    def _output_for(self, slot: int, path: str) -> int | None:
        """The output with the path and the shape of an input; None if there is none."""
        pairs = zip(self._trace.outputs, self._split.outputs, strict=True)
        avals = self._split.avals
        same = (x for name, x in pairs if path and f'/{name}'.endswith(f'/{path}'))
        of_shape = (x for x in numbers_in(same) if avals[x].shape == avals[slot].shape)
        return next(of_shape, None)

    def _of_the_batch(self) -> str:
        """Says that what is kept are not single examples; empty if they are.

        They are if ``examples=True`` keeps the same.
        """
        trace, kept = self._trace, {*self._split.kept} & self._split.data
        data = {n: named for n, named in trace.data.items() if named[1].shape}
        if self._batch is not None or not data:
            return ''
        with contextlib.suppress(errors.ArgumentTypeError):
            batch = Batch(data)
            other = split(trace.program, trace.changes, trace.is_data, batch)
            examples = {
                n
                for n in other.kept
                if batch.places.get(n) == Examples()
                and other.avals[n].shape[0] == batch.count
            }
            if examples == kept:
                return ''
        return (
            'If the data are a batch, what is kept belongs to all of it. To keep '
            'single examples, write examples=True.'
        )

    def _of_no_example(self) -> str:
        """Names what late makes of parameters alone; empty if there is nothing."""
        split = self._split
        for step in split.late if self._batch is not None else ():
            varies = split.changing | split.only_early
            if not is_cheap(step.eqn) and varies.isdisjoint((*step.read(), *step.outs)):
                return (
                    f'{step.described} reads no example, and what is kept are '
                    'examples: it is computed at each step. Compute it before, and '
                    'give its value in its place.'
                )
        return ''


_ALL_TRAINED = (
    'Without wrt=, all parameters count as trained: wrt=sg.live(loss, params, ...).'
)


def _share_of(split: Split) -> float:
    """The share of the flops that is done once."""
    early, late = (flops_of(step.eqn for step in x) for x in (split.early, split.late))
    return early / (early + late) if early + late else 0.0


def _read_by(steps: Iterable[Step]) -> set[int]:
    """What some steps read that none of them makes."""
    steps = [*steps]
    return {n for x in steps for n in x.read()} - {n for x in steps for n in x.outs}


def _bytes_kept(split: Split) -> int:
    return sum(bytes_of(split.avals[n]) for n in split.kept)


# How what enters is kept out.
_ADVICE = {
    'key': "If {} is for dropout there, write nn.Frozen(module, state='eval'). To draw "
    'once for a batch, leave it out of each=.',
    'written': 'For dropout and running averages there, call eval() of the module.',
}


def _may_be_key(aval: Aval) -> bool:
    """Whether an array may be a random key, of the new type or the old one."""
    is_new = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return is_new or aval.dtype == jnp.uint32

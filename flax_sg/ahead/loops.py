"""A loop of which a part does not change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from flax_sg.ahead import runs
from flax_sg.ahead.costs import is_cheap
from flax_sg.ahead.steps import Split, Step, Value, is_in, numbers_in
from flax_sg.ahead.walk import Walk
from flax_sg.flow.flat import Site
from flax_sg.internals import jaxprs


def in_parts(
    split: Callable[..., Split], walk: Walk, eqn: Any, read: Sequence[Value], site: Site
) -> Sequence[Value] | None:
    """A loop becomes the turns that read frozen layers alone, and the others."""
    fixed, first = runs.known_turns(walk, eqn, read)
    if first == eqn.params['length']:
        read = fixed
        if walk.changing.isdisjoint(numbers_in(read)):
            return walk.whole(eqn, read, site)
    elif first and not _varies(eqn):
        begin = len(walk.steps)
        outs = walk.traced(runs.in_two_runs(eqn, first), read, Site(eqn, site))
        known = (step for step in walk.steps[begin:] if walk.is_of_data(step))
        if not all(is_cheap(step.eqn) for step in known):
            return outs
        del walk.steps[begin:]
    return _in_two(split, walk, eqn, read, site)


def _varies(eqn: Any) -> bool:
    """Whether the type of what a loop stacks would have to say where it differs."""
    return any(jaxprs.varying_axes(var.aval) for var in eqn.outvars)


def _in_two(
    split: Callable[..., Split], walk: Walk, eqn: Any, read: Sequence[Value], site: Site
) -> Sequence[Value] | None:
    """A loop becomes two: the second one reads what the first one has stacked."""
    body, carry = eqn.params['jaxpr'], jaxprs.carried_by(eqn)
    if _varies(eqn):
        return None
    changes = [
        walk.change(x) if n < carry.start else is_in(x, walk.changing)
        for n, x in enumerate(read)
    ]
    # What differs from turn to turn is data for the body.
    is_data = [n >= carry.start or is_in(x, walk.data) for n, x in enumerate(read)]
    while True:
        parts = split(body, changes, is_data)
        found = [is_in(x, parts.changing) for x in parts.outputs]
        more = [k for k in range(len(carry)) if found[k] and not changes[carry[k]]]
        if not more:
            break
        for k in more:
            changes[carry[k]] = True
    is_late = [changes[carry[k]] if k < len(carry) else x for k, x in enumerate(found)]
    parts = split(body, changes, is_data, is_late)
    read = (*read, *walk.twins(read, parts))
    if all(is_cheap(step.eqn) for step in parts.early):
        return None
    inputs = range(len(read))
    stacked = [n for n in parts.kept if n not in inputs or n in carry]

    def loop(is_of_late: bool, steps: list[Step], arrays: list[int]) -> _Loop:
        outputs = [k for k, late in enumerate(is_late) if late == is_of_late]
        used = set(numbers_in(parts.outputs[k] for k in outputs))
        used.update(*(step.read() for step in steps))
        used.update(carry[k] for k in outputs if k < len(carry))
        used.difference_update(arrays)
        return _Loop(eqn, [n for n in inputs if n in used], outputs, arrays)

    length = eqn.params['length']
    outs = tuple(walk.new(var.aval) for var in eqn.outvars)
    stacks = tuple(walk.new(jaxprs.stacked(parts.avals[n], length)) for n in stacked)

    def add(part: _Loop, steps: list[Step], into: Any, out_of: Any) -> None:
        reads = (*(read[n] for n in part.inputs), *into)
        makes = (*(outs[k] for k in part.outputs), *out_of)
        kept = stacked if out_of else []
        call = functools.partial(part.run, parts, steps, kept)
        walk.add(Step(eqn, site, reads, makes, call, tuple(steps), length))

    add(loop(False, parts.early, []), parts.early, (), stacks)
    add(loop(True, parts.late, stacked), parts.late, stacks, ())
    return outs


class _Loop(NamedTuple):
    """A part of a scan.

    Attributes:
        eqn: the scan.
        inputs: which of its inputs the part reads.
        outputs: which of its outputs the part makes.
        stacked: the values of the body that come in stacked, behind the inputs.
    """

    eqn: Any
    inputs: list[int]
    outputs: list[int]
    stacked: list[int]

    def run(
        self, parts: Split, steps: list[Step], kept: list[int], *values: Any
    ) -> list[Any]:
        """Runs the part, with steps of the body; stacks the values in ``kept``."""
        carry, params = jaxprs.carried_by(self.eqn), self.eqn.params
        given = dict(zip((*self.inputs, *self.stacked), values, strict=True))
        fixed = {*range(carry.start), *(rows.twin for rows in parts.rows.values())}
        consts = {n: x for n, x in given.items() if n in fixed}
        carried = [carry[k] for k in self.outputs if k < len(carry)]
        along = [n for n in given if n not in consts and n not in carried]
        next_ones = [parts.outputs[k] for k in self.outputs if k < len(carry)]
        rows = [parts.outputs[k] for k in self.outputs if k >= len(carry)]

        def body(before: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            known = {
                **consts,
                **dict(zip((*carried, *along), before + row, strict=True)),
            }
            out = parts.run(steps, known, [*next_ones, *rows, *kept])
            return out[: len(carried)], out[len(carried) :]

        after, stacks = jax.lax.scan(
            body,
            [given[n] for n in carried],
            [given[n] for n in along],
            params['length'],
            params['reverse'],
            params['unroll'],
        )
        return [*after, *stacks]

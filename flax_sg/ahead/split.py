"""Splits a program: what does not change is computed once."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from flax_sg import errors
from flax_sg.ahead import branches, checkpoints, jits, loops, shards, whiles
from flax_sg.ahead.costs import is_cheap
from flax_sg.ahead.cut import cheapest_cut
from flax_sg.ahead.rows import Mask, Rows
from flax_sg.ahead.steps import Split, Step, made_by, numbers_in
from flax_sg.ahead.walk import Mixes, Rule, Walk
from flax_sg.flow.flat import Site
from flax_sg.internals import jaxprs

# Bytes that no cut of a program has.
_HUGE = 1 << 60


def split(
    program: Any,
    changes: Sequence[bool | Mask],
    is_data: Sequence[bool],
    is_late: Sequence[bool] | None = None,
    mixes: Mixes | None = None,
    asked: Sequence[int] | None = None,
) -> Split:
    """Splits a closed jaxpr.

    Args:
        program: the closed jaxpr. Its inputs have the first numbers.
        changes: for each input whether it changes from step to step, or which rows do.
        is_data: for each input whether it comes with a batch. The others are
            parameters: what depends on them alone is not kept.
        is_late: for each output whether the late part makes it, rather than the early
            part. By default it makes all.
        mixes: tells steps that mix examples. They run at each step.
        asked: which outputs are asked for. By default all are.
    """
    walk = Walk(_RULES, mixes)
    inputs = [walk.new(var.aval) for var in program.jaxpr.invars]
    for n in inputs:
        if isinstance(mask := changes[n], np.ndarray):
            walk.rows[n] = Rows(mask, walk.new(walk.avals[n]))
    rows = {**walk.rows}
    walk.changing = {n for n in inputs if n in walk.rows or changes[n]}
    is_of_data = {n for n in inputs if is_data[n]}
    walk.data = is_of_data - walk.changing
    walk.data.update(rows[n].twin for n in is_of_data & rows.keys())
    outputs = walk.walk(program, inputs, Site())
    outputs = outputs if asked is None else [outputs[n] for n in asked]
    steps, avals, changing, data = walk.steps, walk.avals, walk.changing, walk.data
    is_late = is_late or [True] * len(outputs)
    makers: dict[int, list[int]] = {}
    maker: dict[int, Step] = {}
    at_each_step: list[Step] = []
    for step in steps:
        maker.update(dict.fromkeys(step.outs, step))
        read = step.read()
        has_effect = jaxprs.has_effect(step.eqn)
        is_new = not changing.isdisjoint((*read, *step.outs))
        if is_new or (has_effect and data.isdisjoint(read)):
            at_each_step.append(step)
        elif has_effect:
            raise errors.ArgumentTypeError(
                f'{jaxprs.operation(step.eqn)} has an effect, and stands in the part '
                f'that is computed once: {step.source}.\n'
                'Computed ahead, it would not run at each step.\n'
                'Take it out of the loss, or name an argument that it reads in each=.'
            )
        elif not data.isdisjoint(read) and is_cheap(step.eqn):
            of_data = [x for x in dict.fromkeys(read) if x in data]
            makers.update(dict.fromkeys(step.outs, of_data))
    late_outputs = [x for x, late in zip(outputs, is_late, strict=True) if late]
    live = _needed(at_each_step, late_outputs)
    ends = numbers_in(late_outputs)
    for step in live:
        ends += step.read()
    # What is read of the parameters alone is made in the late part.
    sizes = {n: avals[n].size * avals[n].dtype.itemsize for n in data}
    # A twin holds rows that change, so it would not be the same after a step.
    sizes.update((some.twin, _HUGE) for some in walk.rows.values())
    kept = sorted(cheapest_cut(sizes, makers, [x for x in ends if x in data]))
    wanted = [step for step in at_each_step if jaxprs.has_effect(step.eqn)]
    late = made_by(steps, maker, ends, wanted + live, set(kept))
    others = [x for x, late in zip(outputs, is_late, strict=True) if not late]
    early = made_by(steps, maker, kept + numbers_in(others), [], set())
    return Split(
        *(early, late, kept, outputs, avals, walk.constants, steps, changing, data),
        rows,
    )


def _needed(at_each_step: Sequence[Step], outputs: Iterable[Any]) -> list[Step]:
    """Of the steps that read what changes those that an output needs."""
    needed = set(numbers_in(outputs))
    live: list[Step] = []
    for step in reversed(at_each_step):
        if jaxprs.has_effect(step.eqn) or not needed.isdisjoint(step.outs):
            live.append(step)
            needed.update(step.read())
    return live[::-1]


# How equations of which a part changes are taken apart.
_RULES: dict[str, Rule] = {
    'scan': functools.partial(loops.in_parts, split),
    'cond': functools.partial(branches.in_parts, split),
    'while': functools.partial(whiles.in_parts, split),
    'shard_map': functools.partial(shards.in_parts, split),
    **dict.fromkeys(jaxprs.CHECKPOINTS, checkpoints.in_parts),
    **dict.fromkeys(jaxprs.JITTED, jits.in_parts),
}

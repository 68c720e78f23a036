"""A ``cond`` or ``switch`` of which a part does not change."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from flax_sg.ahead.costs import is_cheap
from flax_sg.ahead.flops import flops_of_steps
from flax_sg.ahead.steps import Split, Step, Value, is_in, numbers_in
from flax_sg.ahead.walk import Walk
from flax_sg.flow.flat import Site
from flax_sg.internals import tracing


def in_parts(
    split: Callable[..., Split], walk: Walk, eqn: Any, read: Sequence[Value], site: Site
) -> Sequence[Value] | None:
    """Branches become two: the second ones read what the first ones have kept.

    If the index changes, it is not known which branch runs, and all stay whole.
    """
    index, *operands = read
    if is_in(index, walk.changing) or eqn.params.get('branches_platforms'):
        return None
    bodies = eqn.params['branches']
    changes = [*map(walk.change, operands)]
    is_data = [is_in(x, walk.data) for x in operands]
    parts = [split(body, changes, is_data) for body in bodies]
    found = [[is_in(x, one.changing) for x in one.outputs] for one in parts]
    # An output is made late if it changes in any branch.
    is_late = [any(row) for row in zip(*found, strict=True)]
    parts = [split(body, changes, is_data, is_late) for body in bodies]
    if all(is_cheap(step.eqn) for one in parts for step in one.early):
        return None
    operands += walk.twins(operands, parts[0])
    inputs = range(len(operands))
    kept = [[n for n in one.kept if n not in inputs] for one in parts]
    places = _places(parts, kept)
    is_filled = all(len(row) == len(places.avals) for row in places.numbers)
    if not is_filled and any(map(_is_key, places.avals)):
        return None
    outs = tuple(walk.new(var.aval) for var in eqn.outvars)
    made = tuple(map(walk.new, places.avals))

    def add(is_of_late: bool, steps: list[list[Step]]) -> None:
        outputs = [k for k, late in enumerate(is_late) if late == is_of_late]
        used = {
            *(n for one in parts for n in numbers_in(one.outputs[k] for k in outputs)),
            *(n for branch in steps for step in branch for n in step.read()),
        }
        arrays = [n for n in inputs if n in used]
        call = functools.partial(
            _run, parts, steps, arrays, outputs, places, is_of_late
        )
        reads = (index, *(operands[n] for n in arrays), *made * is_of_late)
        makes = (*(outs[k] for k in outputs), *made * (not is_of_late))
        if makes:
            inner = tuple(max(steps, key=flops_of_steps))
            walk.add(Step(eqn, site, reads, makes, call, inner))

    add(False, [one.early for one in parts])
    add(True, [one.late for one in parts])
    return outs


def _is_key(aval: Any) -> bool:
    """Whether a type has no zeros."""
    return jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended)


class _Places(NamedTuple):
    """What comes out of the early branches besides outputs, and goes into the late.

    Attributes:
        avals: the type of each place.
        numbers: for each branch the value in each place that it fills.
    """

    avals: list[Any]
    numbers: list[dict[int, int]]


def _places(parts: Sequence[Split], kept: Sequence[Sequence[int]]) -> _Places:
    """Values of one type in different branches share a place."""
    avals, numbers = list[Any](), list[dict[int, int]]()
    for one, values in zip(parts, kept, strict=True):
        counts = Counter[Any]()
        numbers.append({})
        for n in values:
            aval = one.avals[n]
            counts[aval] += 1
            same = [place for place, other in enumerate(avals) if other == aval]
            if len(same) < counts[aval]:
                same.append(len(avals))
                avals.append(aval)
            numbers[-1][same[counts[aval] - 1]] = n
    return _Places(avals, numbers)


def _run(
    parts: Sequence[Split],
    steps: Sequence[list[Step]],
    arrays: Sequence[int],
    outputs: Sequence[int],
    places: _Places,
    is_of_late: bool,
    index: Any,
    *values: Any,
) -> list[Any]:
    """Runs some steps of each branch, on the inputs with the numbers in ``arrays``."""

    def branch(number: int, *values: Any) -> list[Any]:
        one, filled = parts[number], places.numbers[number]
        known = dict(zip(arrays, values, strict=False))
        asked = [one.outputs[k] for k in outputs]
        if is_of_late:
            row = values[len(arrays) :]
            known.update((n, row[place]) for place, n in filled.items())
            return one.run(steps[number], known, asked)
        out = one.run(steps[number], known, [*asked, *filled.values()])
        row = dict(zip(filled, out[len(asked) :], strict=True))
        return out[: len(asked)] + [
            row[place] if place in row else tracing.zeros_of(aval)
            for place, aval in enumerate(places.avals)
        ]

    branches = [functools.partial(branch, number) for number in range(len(parts))]
    return jax.lax.switch(index, branches, *values)

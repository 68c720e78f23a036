"""What an operation does with a parameter itself, to find choices made by data.

``jnp.where(mask, stop_gradient(table), table)`` stops a part of the table. If data
makes the mask, no proof can tell which part. The naive attempt looks for such a choice
by its gradient, and takes each ``relu`` of a bias for one.

The same walk finds the uses that ``why`` lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from flax_sg.flow.flat import Flat, Join
from flax_sg.flow.pullback import has_tangent
from flax_sg.programs import primitives, sources
from flax_sg.programs.primitives import Kind
from flax_sg.programs.steps import Step, Value


class Use(NamedTuple):
    """A line that reads a parameter, and whether a gradient comes back from there."""

    line: str
    trains: bool


_SAME_VALUE = primitives.names_of(Kind.SAME) | primitives.names_of(Kind.FORM)
_PARTS = primitives.names_of(Kind.PARTS)
_OVERWRITE = primitives.names_of(Kind.OVERWRITES)


class Choice(NamedTuple):
    """A line that chooses between a parameter that is stopped and one that is not.

    Attributes:
        line: the line.
        is_condition: whether one bool chooses for all elements: ``where & (step < k)``.
    """

    line: str
    is_condition: bool


def unclear(flat: Flat, slots: Iterable[int], is_known: bool) -> Choice | None:
    """The use of which nobody can tell which part it trains, if all uses are such.

    Args:
        flat: the program.
        slots: the inputs of the program that are the parameter.
        is_known: whether the proof tells what is stopped from what is not read.
    """
    inputs = [flat.inputs[slot] for slot in slots]
    # To ask what is stopped takes as long as the proof.
    if is_known and not any(chooses for *_, chooses in _uses(flat, inputs)):
        return None
    uses = list(_uses(flat, inputs, flat.is_stopped))
    live = [(step, chooses) for step, stopped, chooses in uses if not stopped]
    if len(live) == len(uses) or (is_known and not all(x for _, x in live)):
        return None
    steps = [step for step, _ in live if step]
    conditions = [step for step in steps if _by_condition(flat, step)]
    for step in (*conditions, *steps):
        return Choice(step.source, step in conditions)
    return None


def _by_condition(flat: Flat, step: Step) -> bool:
    """Whether one bool decides for all elements which input a step takes."""
    masks = _forms_of(flat, step.ins[0]) if step.name == 'select_n' else ()
    sizes = (flat.avals[x].shape for x in masks if isinstance(x, int))
    return any(math.prod(shape) == 1 for shape in sizes)


def _forms_of(flat: Flat, mask: Value) -> Iterator[Value]:
    """Yields a mask, and what it was before it was spread or negated."""
    yield mask
    maker = flat.makers.get(mask) if isinstance(mask, int) else None
    if maker is not None and maker.name in _SAME_VALUE | {'not'}:
        yield from _forms_of(flat, maker.ins[0])


def uses(flat: Flat, slots: Iterable[int], output: int) -> tuple[Use, ...]:
    """The uses of a parameter for an output, in the order of the program.

    Args:
        flat: the program.
        slots: the inputs of the program that are the parameter.
        output: the number of the output.
    """

    def is_stopped(step: Step, index: int) -> bool:
        live = [n for n, x in enumerate(step.outs) if flat.live[x] >> output & 1]
        return not any(flat.flows(step)[index] >> n & 1 for n in live)

    order = {step: n for n, step in enumerate(flat.steps)}
    inputs = [flat.inputs[slot] for slot in slots]
    ordered = [
        (order[step], Use(step.source, not stopped))
        for step, stopped, _ in _uses(flat, inputs, is_stopped)
        if step and any(_is_met(flat, x, output) for x in step.outs)
    ]
    return tuple(use for _, use in sorted(ordered))


def _is_met(flat: Flat, value: int, output: int) -> bool:
    """Whether an output reads a value that may have a gradient, as no index has."""
    return bool(flat.read[value] >> output & 1) and has_tangent(flat.avals[value])


class _Read(NamedTuple):
    """A step that takes the parameter in, or a part of it.

    Attributes:
        step: the step; None for an output of the program.
        position: which of the inputs of the step it is.
        stopped: whether no gradient comes back from there.
        is_part: whether it is a part of the parameter alone.
    """

    step: Step | None
    position: int
    stopped: bool
    is_part: bool


def _uses(
    flat: Flat,
    inputs: Iterable[int],
    is_stopped: Callable[[Step, int], bool] | None = None,
) -> Iterator[tuple[Step | None, bool, bool]]:
    """The steps that take a parameter in, and do not return it in another form.

    Args:
        flat: the program.
        inputs: the values that are the parameter.
        is_stopped: whether no gradient comes back through an input of a step. By
            default nobody knows.

    Returns:
        Each step, or None for an output of the program; whether no gradient comes back;
        and whether the step chooses between the parameter and itself, of which one is
        stopped and the other is not. If nobody knows, it may.
    """
    reads_of: dict[Step | None, list[_Read]] = {}
    for read in _reads(flat, inputs, is_stopped):
        reads_of.setdefault(read.step, []).append(read)
    for step, reads in reads_of.items():
        for read in reads:
            rivals = [other for other in reads if other is not read]
            if is_stopped:
                rivals = [other for other in rivals if other.stopped != read.stopped]
            if not read.is_part:
                yield step, read.stopped, _chooses(flat, read, rivals)


def _reads(
    flat: Flat,
    inputs: Iterable[int],
    is_stopped: Callable[[Step, int], bool] | None,
) -> Iterator[_Read]:
    """Follows a parameter, and its parts, to the steps that take them in."""
    # A value; whether it is stopped; whether it is a part of the parameter alone.
    waiting = [(value, False, False) for value in inputs]
    seen: set[tuple[int, bool, bool]] = set()
    while waiting:
        value, stopped, is_part = state = waiting.pop()
        if state in seen:
            continue
        seen.add(state)
        if value in flat.outputs and not is_part:
            yield _Read(None, 0, stopped, is_part)
        for step, index in flat.readers[value]:
            if _is_of_vmapped_cond(step):
                branches = [step.outs[0]] if index else []
                waiting += [(out, stopped, is_part) for out in branches]
                continue
            if isinstance(step, Join) and step.name == 'cond' and index < step.count:
                waiting.append((step.outs[0], stopped, is_part))
                continue
            ends = stopped or bool(is_stopped and is_stopped(step, index))
            if step.name in _SAME_VALUE:
                waiting.append((step.outs[index], ends, is_part))
                continue
            if step.name in _PARTS and not index:
                waiting += [(out, ends, True) for out in step.outs]
            yield _Read(step, index, ends, is_part)


def _is_of_vmapped_cond(step: Step) -> bool:
    """Whether ``vmap`` made a step of a ``cond`` whose branch differs by example.

    It runs all branches, each with its inputs stopped for the examples that do not take
    it, and chooses among the results.
    """
    return step.name in ('stop_gradient', 'select_n') and sources.is_of_cond(step.eqn)


def _chooses(flat: Flat, read: _Read, rivals: list[_Read]) -> bool:
    """Whether a step chooses, element by element, what it returns of some inputs."""
    step = read.step
    if step is not None and step.name == 'select_n':
        # Of a constant mask the proof knows which elements it takes.
        known = not all(isinstance(x, int) for x in _forms_of(flat, step.ins[0]))
        return not known and any(not rival.is_part for rival in rivals)
    # Zeros in some rows are no choice: no part of the parameter is there.
    overwrites = step is not None and step.name in _OVERWRITE
    return overwrites and not read.position and bool(rivals)

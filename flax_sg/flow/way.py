"""The way from a parameter to an output, and what stops it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from flax_sg.flow.flat import Flat, reaches
from flax_sg.flow.pullback import has_tangent
from flax_sg.flow.uses import Use
from flax_sg.internals import jaxprs
from flax_sg.programs import sources
from flax_sg.programs.bodies import Bodies
from flax_sg.programs.steps import UNKNOWN, Step


class Way(NamedTuple):
    """The way from a parameter to an output.

    Attributes:
        lines: each line of the user on the shortest way, once.
        by: what stops the gradient, and its line: ``'argmax at model.py:33 (...)'``,
            or the block that does. ``''`` if nothing does.
        uses: each use of the parameter.
    """

    lines: tuple[str, ...] = ()
    by: str = ''
    uses: tuple[Use, ...] = ()


class _Walked(NamedTuple):
    """A step on a way, and the way to it.

    Attributes:
        step: the step.
        cuts: whether it reads a value with a derivative, and no gradient comes back.
        before: the step before.
    """

    step: Step
    cuts: bool
    before: _Walked | None


def way(flat: Flat, slots: Iterable[int], output: int) -> Way:
    """The shortest way from a parameter to an output.

    If a gradient comes back to a value, the way goes on where it comes from. So the
    last step that stops it is one that cuts, and not a later one beside the gradient,
    such as the maximum in a cross entropy.

    Args:
        flat: the program.
        slots: the inputs of the program that are the parameter.
        output: the number of the output.
    """

    def is_live(value: int) -> bool:
        return bool(flat.live[value] >> output & 1)

    # If a parameter has several arrays, one that is live comes first.
    inputs = sorted((flat.inputs[slot] for slot in slots), key=is_live, reverse=True)
    # A value, and the way to it.
    waiting: deque[tuple[int, _Walked | None]]
    waiting = deque((value, None) for value in inputs)
    seen: set[int] = set()
    while waiting:
        value, walked = waiting.popleft()
        if value in seen:
            continue
        seen.add(value)
        if value == flat.outputs[output]:
            return _described(walked)
        bits_of, reached = reaches, flat.read
        if is_live(value):
            bits_of, reached = flat.flows, flat.live
        cuts = not is_live(value) and has_tangent(flat.avals[value])
        for step, index in flat.readers[value]:
            bits, last = bits_of(step)[index], walked
            # What hands a value on between two bodies is no line of its own.
            if not Bodies.of(step.eqn).jaxprs:
                last = _Walked(step, cuts, walked)
            for n, out in enumerate(step.outs):
                if bits >> n & 1 and reached[out] >> output & 1:
                    waiting.append((out, last))
    return Way()


def _described_stop(stop: Step) -> str:
    """A step that stops a gradient, or the block that made it, in words."""
    _, block, text = jaxprs.name_stack_of(stop.eqn).rpartition(jaxprs.BLOCK)
    return text if block else f'{sources.operation(stop.eqn)} at {stop.source}'


def _described(last: _Walked | None) -> Way:
    walked: list[_Walked] = []
    while last is not None:
        walked.append(last)
        last = last.before
    lines: dict[str, None] = {}
    by = ''
    for step, cuts, _ in reversed(walked):
        lines[step.source] = None
        by = _described_stop(step) if cuts else by
    return Way(tuple(line for line in lines if line != UNKNOWN), by)

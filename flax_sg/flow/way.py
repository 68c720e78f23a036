"""The way from a parameter to an output, and the line on which it leaves a block."""

from __future__ import annotations

import ast
import functools
import linecache
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn

from flax_sg.flow.facts import UNKNOWN, UNREAD, Bodies, Fact, Table
from flax_sg.flow.pullback import has_tangent
from flax_sg.flow.report import Use
from flax_sg.internals import jaxprs


class _Step(NamedTuple):
    """An equation on a way, and the way to it.

    Attributes:
        table: the table of its body.
        eqn: the equation.
        stopped: whether no gradient comes back through it.
        stops: whether one could have come, to what it reads.
        before: the step before.
    """

    table: Table
    eqn: JaxprEqn
    stopped: bool
    stops: bool
    before: _Step | None


class _Call(NamedTuple):
    """A call that a body is in.

    Attributes:
        names: tells calls apart: the ids of its equation and of those around it.
        table: the table of the body around the call.
        eqn: the equation that calls.
        around: the call that this body is in.
    """

    names: tuple[int, ...]
    table: Table
    eqn: JaxprEqn
    around: _Call | None


def way(table: Table, slots: Iterable[int], output: int) -> tuple[Use, ...]:
    """The lines on the shortest way from a parameter to an output.

    Args:
        table: the facts of the program.
        slots: the inputs of the program that are the parameter.
        output: the number of the output.
    """
    inputs = [table.jaxpr.invars[slot] for slot in slots]
    facts = [table.facts.get(var, UNREAD) for var in inputs]
    is_live = any(fact.live >> output & 1 for fact in facts)

    def reaches(fact: Fact) -> bool:
        return bool((fact.live if is_live else fact.read) >> output & 1)

    # A value, the bodies that it is in, with their equations, and the way to it.
    waiting: deque[tuple[Table, Any, _Call | None, _Step | None]]
    waiting = deque((table, var, None, None) for var in inputs)
    seen: set[Hashable] = set()
    while waiting:
        body, var, around, steps = waiting.popleft()
        # One function may be called in several places: JAX has one body of it.
        key = around and around.names, id(body), var
        if key in seen or not reaches(body.facts.get(var, UNREAD)):
            continue
        seen.add(key)
        for eqn, operand, fact in reversed(body.reads[var]):
            if not reaches(fact):
                continue
            if eqn is None:
                if around is None:
                    return tuple(_lines(steps))
                call = around.eqn
                waiting.append(
                    (around.table, call.outvars[operand], around.around, steps)
                )
                bodies = Bodies.of(call)
                if operand < len(bodies.carry):  # The next turn of a loop.
                    again = body.jaxpr.invars[bodies.carry[operand] - bodies.first]
                    waiting.append((body, again, around, steps))
                continue
            first = Bodies.of(eqn).first
            inner = body.inner.get(id(eqn), []) if operand >= first else []
            names = (*(around.names if around else ()), id(eqn))
            entering = _Call(names, body, eqn, around)
            for within in inner:
                entered = within.jaxpr.invars[operand - first]
                waiting.append((within, entered, entering, steps))
            if not inner:
                stopped = not fact.live >> output & 1
                stops = stopped and has_tangent(var.aval)
                step = _Step(body, eqn, stopped, stops, steps)
                waiting.extend((body, out, around, step) for out in eqn.outvars)
    return ()


def _lines(last: _Step | None) -> Iterator[Use]:
    """Each line of a way once, from the parameter to the output."""
    steps: list[_Step] = []
    while last is not None:
        steps.append(last)
        last = last.before
    steps.reverse()
    # Behind the last equation that stops, the gradient is still there.
    ends = [step.table.place.stop(step.eqn) for step in steps if step.stops]
    block, before = None, ''
    for number, (table, eqn, stopped, *_) in enumerate(steps):
        lines = list(jaxprs.frames_of(eqn))
        if not number:
            block = next(filter(None, map(_block_of, lines)), None)
        leaves = block is not None and not any(_is_in(line, block) for line in lines)
        source = table.place.at(eqn).source
        if leaves or source != before:
            stack = jaxprs.name_stack_of(eqn) or UNKNOWN
            by = ends[-1] if stopped and ends else ''
            yield Use(stack, source, stopped, by=by, leaves=leaves)
        block, before = None if leaves else block, source


# A file, a function in it, and the lines of a ``with`` statement.
_Block: TypeAlias = tuple[str, str, range]


def _is_in(frame: jaxprs.Frame, block: _Block) -> bool:
    return frame[:2] == block[:2] and frame.line in block[2]


def _block_of(frame: jaxprs.Frame) -> _Block | None:
    """The innermost ``with`` statement around a line of a function."""
    around = [lines for lines in _withs(frame.file) if frame.line in lines]
    return (frame.file, frame.function, min(around, key=len)) if around else None


@functools.lru_cache(64)
def _withs(file: str) -> list[range]:
    """The lines of each ``with`` statement of a file."""
    try:
        tree = ast.parse(''.join(linecache.getlines(file)))
    except SyntaxError:  # A cell of a notebook with commands of IPython.
        return []
    return [
        range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
    ]

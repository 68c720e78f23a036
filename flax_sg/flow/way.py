"""The way from a parameter to an output, and the line on which it leaves a block."""

from __future__ import annotations

import ast
import dataclasses
import functools
import linecache
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn

from flax_sg.flow.facts import Fact, Table
from flax_sg.flow.pullback import has_tangent
from flax_sg.flow.report import Use
from flax_sg.flow.uses import Scope
from flax_sg.internals import jaxprs


class _Step(NamedTuple):
    """An equation on a way, and the way to it.

    Attributes:
        scope: the call of the body that it is in.
        eqn: the equation.
        stopped: whether no gradient comes back through it.
        stops: whether one could have come, to what it reads.
        before: the step before.
    """

    scope: Scope
    eqn: JaxprEqn
    stopped: bool
    stops: bool
    before: _Step | None


def way(table: Table, slots: Iterable[int], output: int) -> tuple[Use, ...]:
    """The lines on the shortest way from a parameter to an output.

    Args:
        table: the facts of the program.
        slots: the inputs of the program that are the parameter.
        output: the number of the output.
    """
    inputs = [table.jaxpr.invars[slot] for slot in slots]
    is_live = any(table.of(var).live >> output & 1 for var in inputs)

    def reaches(fact: Fact) -> bool:
        return bool((fact.live if is_live else fact.read) >> output & 1)

    # A value, and the way to it.
    waiting: deque[tuple[Scope, Any, _Step | None]]
    waiting = deque((Scope(table), var, None) for var in inputs)
    seen: set[tuple[Scope, Any]] = set()
    while waiting:
        scope, var, steps = waiting.popleft()
        if (scope, var) in seen or not reaches(scope.table.of(var)):
            continue
        seen.add((scope, var))
        for read in reversed(scope.table.reads[var]):
            if not reaches(read.fact):
                continue
            onward, last = scope.passed(read), steps
            if read.eqn is None and not onward:
                return tuple(_lines(last))
            if read.eqn is not None and not onward:
                stopped = not read.fact.live >> output & 1
                stops = stopped and has_tangent(var.aval)
                last = _Step(scope, read.eqn, stopped, stops, steps)
                onward = [(scope, out) for out in read.eqn.outvars]
            waiting.extend((*there, last) for there in onward)
    return ()


def _lines(last: _Step | None) -> Iterator[Use]:
    """Each line of a way once, from the parameter to the output."""
    steps: list[_Step] = []
    while last is not None:
        steps.append(last)
        last = last.before
    steps.reverse()
    # Behind the last equation that stops, the gradient is still there.
    ends = [step.scope.table.place.stop(step.eqn) for step in steps if step.stops]
    block, before = None, ''
    for number, (scope, eqn, stopped, *_) in enumerate(steps):
        lines = list(jaxprs.frames_of(eqn))
        if not number:
            block = next(filter(None, map(_block_of, lines)), None)
        leaves = block is not None and not any(_is_in(line, block) for line in lines)
        use = scope.use(eqn, ends[-1] if stopped and ends else '')
        if leaves or use.source != before:
            yield dataclasses.replace(use, stopped=stopped, leaves=leaves)
        block, before = None if leaves else block, use.source


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

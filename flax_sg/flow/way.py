"""The way from a parameter to an output: what stops it, and where it leaves a block."""

from __future__ import annotations

import ast
import functools
import linecache
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn

from flax_sg.flow.facts import Scope, Table
from flax_sg.flow.pullback import has_tangent
from flax_sg.internals import jaxprs


class Way(NamedTuple):
    """The way from a parameter to an output.

    Attributes:
        lines: each line of the user on the shortest way, once.
        by: what stops the gradient, and its line: ``'argmax at model.py:33 (...)'``,
            or the block that does. ``''`` if nothing does.
        leaves: the first line outside of the ``with`` block that reads the parameter:
            the place for ``jax.lax.stop_gradient``. ``''`` if there is none.
    """

    lines: tuple[str, ...] = ()
    by: str = ''
    leaves: str = ''


class _Step(NamedTuple):
    """An equation on a way, and the way to it.

    Attributes:
        scope: the call of the body that it is in.
        eqn: the equation.
        stops: whether it reads a value with a derivative, and no gradient comes back.
        before: the step before.
    """

    scope: Scope
    eqn: JaxprEqn
    stops: bool
    before: _Step | None


def way(table: Table, slots: Iterable[int], output: int) -> Way:
    """The shortest way from a parameter to an output.

    If a gradient comes back to a value, the way goes on where it comes from. So the
    last step that stops it is one that cuts, and not a later one beside the gradient,
    such as the maximum in a cross entropy.

    Args:
        table: the facts of the program.
        slots: the inputs of the program that are the parameter.
        output: the number of the output.
    """
    # A value, and the way to it.
    waiting: deque[tuple[Scope, Any, _Step | None]]
    # If a parameter has several arrays, one that is live comes first.
    inputs = [table.jaxpr.invars[slot] for slot in slots]
    inputs.sort(key=lambda var: not table.of(var).live >> output & 1)
    waiting = deque((Scope(table), var, None) for var in inputs)
    seen: set[tuple[Scope, Any]] = set()
    while waiting:
        scope, var, steps = waiting.popleft()
        is_live = scope.table.of(var).live >> output & 1
        if (scope, var) in seen:
            continue
        seen.add((scope, var))
        for read in reversed(scope.table.reads.get(var, ())):
            if not (read.fact.live if is_live else read.fact.read) >> output & 1:
                continue
            onward, last = scope.passed(read), steps
            if read.eqn is None and not onward:
                return _described(last)
            if read.eqn is not None and not onward:
                stops = not is_live and has_tangent(var.aval)
                last = _Step(scope, read.eqn, stops, steps)
                # What is written to a mutable array is read from there.
                refs = filter(jaxprs.is_ref, read.eqn.invars)
                onward = [(scope, out) for out in (*read.eqn.outvars, *refs)]
            for inner, out in onward:
                fact = inner.table.of(out)
                if (fact.live if is_live else fact.read) >> output & 1:
                    waiting.append((inner, out, last))
    return Way()


def _described(last: _Step | None) -> Way:
    steps: list[_Step] = []
    while last is not None:
        steps.append(last)
        last = last.before
    lines: dict[str, None] = {}
    block, by, leaves = None, '', ''
    for number, (scope, eqn, stops, _) in enumerate(reversed(steps)):
        frames = list(jaxprs.frames_of(eqn))
        if not number:
            block = next(filter(None, map(_block_of, frames)), None)
        lines[scope.table.place.at(eqn)] = None
        if block and not leaves and not any(_is_in(frame, block) for frame in frames):
            # Of another package, the line that calls it is to be mended.
            own = (f for f in frames if '-packages' not in f.file)
            leaves = next(map(jaxprs.described, own), scope.table.place.at(eqn))
            lines[leaves] = None
        by = scope.table.place.stop(eqn) if stops else by
    return Way(tuple(lines), by, leaves)


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

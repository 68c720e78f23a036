"""Stops in the bodies of scans, and what they keep for the way back.

For the backward pass of a scan JAX keeps what the derivative of a step reads, unless it
is an input of the scan. The slice of a stack of weights is one, the slice behind a stop
is not: it becomes a second copy of the stack. With the stop around the scan it is an
input again. JAX is asked what it keeps of one step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var, jaxpr_as_fun

from flax_sg.flow.dependence import BEYOND, Dependence
from flax_sg.flow.derivatives import has_tangent, shape_of
from flax_sg.flow.report import StackCopy
from flax_sg.flow.uses import HANDS_ON, UNKNOWN
from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import CALLS, JITTED, body_of, opened


def stack_copies(
    jaxpr: Any, moved: Collection[int], asked: Collection[int], flow: Dependence
) -> tuple[StackCopy, ...]:
    """The stops in bodies of scans that keep a copy of a stack.

    Args:
        jaxpr: a program.
        moved: the numbers of the inputs that are trained.
        asked: the numbers of the outputs that are differentiated.
        flow: differentiable dependence.
    """
    copies = _Copies(flow)
    copies.walk(
        jaxpr,
        [number in moved for number in range(len(jaxpr.invars))],
        [number in asked for number in range(len(jaxpr.outvars))],
    )
    return tuple(copies.found)


class _Copies:
    """The walk through a program.

    Attributes:
        found: the copies so far.
    """

    def __init__(self, flow: Dependence) -> None:
        self.flow = flow
        self.found: list[StackCopy] = []

    def walk(
        self,
        jaxpr: Any,
        moved: Sequence[bool],
        asked: Sequence[bool],
        turns: int = 1,
        within: str = '',
    ) -> None:
        """Looks at all scans in a program.

        Args:
            jaxpr: the program, or what one of its equations runs.
            moved: for each input whether it depends differentiably on what is trained.
            asked: for each output whether it is differentiated.
            turns: how often it is run in scans around it.
            within: the jitted function that it is, see ``jaxprs.source_of``.
        """
        jaxpr = opened(jaxpr)
        live = self.flow.within(jaxpr, [*map(int, asked), *[0] * BEYOND])
        moving = {v for v, yes in zip(jaxpr.invars, moved, strict=True) if yes}
        for eqn in jaxpr.eqns:
            ins = [isinstance(v, Var) and v in moving for v in eqn.invars]
            outs = [bool(live.get(v)) for v in eqn.outvars]
            reached = 0
            for yes, row in zip(ins, self.flow.rows(eqn), strict=True):
                reached |= row if yes else 0
            out_moves = [bool(reached >> n & 1) for n in range(len(eqn.outvars))]
            moving.update(
                v for v, yes in zip(eqn.outvars, out_moves, strict=True) if yes
            )
            if not (any(ins) and any(outs)):
                continue
            name = eqn.primitive.name
            if name == 'scan':
                self._scan(eqn, ins, outs, out_moves, turns, within)
            # A checkpoint is run again on the way back, whatever is stopped in there.
            elif name in CALLS - jaxprs.CHECKPOINTS:
                inside = jaxprs.function_in(eqn) if name in JITTED else within
                self.walk(body_of(eqn), ins, outs, turns, inside)
            elif name == 'cond':
                for branch in eqn.params['branches']:
                    self.walk(branch, ins[1:], outs, turns, within)

    def _scan(
        self,
        eqn: JaxprEqn,
        ins: Sequence[bool],
        outs: Sequence[bool],
        out_moves: Sequence[bool],
        turns: int,
        within: str,
    ) -> None:
        body, turns = eqn.params['jaxpr'], turns * eqn.params['length']
        turning = jaxprs.carried_by(eqn)
        carries = len(turning)
        moved = list(ins)
        for number, moves in zip(turning, out_moves, strict=False):
            moved[number] |= moves  # What one turn gives, the next one takes.
        for stop, size in _kept(body, moved, range(turning.stop, len(ins))):
            source = jaxprs.source_of(stop, within) or UNKNOWN
            place = jaxprs.name_stack_of(eqn) or UNKNOWN
            self.found.append(StackCopy(place, source, turns * size))
        self.walk(body, moved, [any(outs)] * carries + list(outs[carries:]), turns)


def _kept(
    body: Any, moved: Sequence[bool], stacked: range
) -> Iterator[tuple[JaxprEqn, int]]:
    """The stops of slices of stacks of which JAX keeps the result, with its bytes."""
    moving = [
        n for n, v in enumerate(body.jaxpr.invars) if moved[n] and has_tangent(v.aval)
    ]

    def step(*args: Any) -> Any:
        def moves(*values: Any) -> list[Any]:
            full = list(args)
            for number, value in zip(moving, values, strict=True):
                full[number] = value
            outs = jaxpr_as_fun(body)(*full)
            return [out for out in outs if has_tangent(jax.typeof(out))]

        return jax.tree.leaves(jax.vjp(moves, *(args[n] for n in moving))[1])

    try:
        jaxpr = jax.make_jaxpr(step)(*map(shape_of, body.jaxpr.invars)).jaxpr
    except Exception:  # What cannot be differentiated, or not alone, keeps nothing.
        return
    made = _Made(jaxpr)
    stacks = {jaxpr.invars[number] for number in stacked}
    for var in dict.fromkeys(jaxpr.outvars):
        stops: list[JaxprEqn] = []
        if made.origin(var, stops) in stacks and stops:
            yield stops[0], var.aval.size * var.aval.dtype.itemsize


class _Made:
    """By which equation each variable of a program is made.

    Args:
        jaxpr: the program, or what an equation of another one runs.
        call: this equation.
        around: the other program.
    """

    def __init__(
        self, jaxpr: Any, call: JaxprEqn | None = None, around: _Made | None = None
    ) -> None:
        self._jaxpr, self._call, self._around = jaxpr, call, around
        self._by = {v: (e, n) for e in jaxpr.eqns for n, v in enumerate(e.outvars)}

    def origin(self, var: Any, stops: list[JaxprEqn]) -> Any:
        """What a value is but for stops, which are noted, casts and other shapes."""
        if not isinstance(var, Var):
            return None
        if var in self._by:
            eqn, number = self._by[var]
            if eqn.primitive.name in CALLS:
                body = body_of(eqn)
                return _Made(body, eqn, self).origin(body.outvars[number], stops)
            if eqn.primitive.name not in HANDS_ON:
                return var
            if eqn.primitive.name == 'stop_gradient':
                stops.append(eqn)
            return self.origin(eqn.invars[0], stops)
        if self._call is None or self._around is None:
            return var
        place = self._jaxpr.invars.index(var)
        return self._around.origin(self._call.invars[place], stops)

"""Which outputs of a jaxpr depend on which of its inputs.

The answer for one input is a *row*: an int with a bit for each output that depends on
the input. Rows are computed backwards, each equation once, through all control flow.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn, Var

from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import CALLS, body_of, opened

Rows: TypeAlias = list[int]
# Primitives of many operands that do not meet.
EACH_FOR_ITSELF = frozenset(('device_put', 'optimization_barrier', 'psum', 'psum2'))


def bit(output: int) -> int:
    """The bit of an output in a row."""
    return 1 << output


def bits(outputs: Iterable[int]) -> int:
    """The row of an input on which these outputs depend."""
    return sum(map(bit, outputs))


class Bodies(NamedTuple):
    """The jaxprs that an equation runs.

    Their inputs are those of the equation from ``first`` on. Their outputs are all of
    the equation's.

    Attributes:
        jaxprs: the open jaxprs: the branches of a ``cond``, otherwise one or none.
        first: the number of the first input of the equation that goes into them.
        carry: the inputs that a loop carries from turn to turn. The first outputs of
            the body are their next values.
    """

    jaxprs: tuple[Any, ...]
    first: int
    carry: range = range(0)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Bodies:
        """The jaxprs in an equation."""
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            return cls((body_of(eqn),), 0)
        if name == 'cond':
            return cls(tuple(map(opened, params['branches'])), 1)
        if name == 'scan':
            return cls((opened(params['jaxpr']),), 0, jaxprs.carried_by(eqn))
        if name == 'while':
            first = params['cond_nconsts']
            carry = range(first + params['body_nconsts'], len(eqn.invars))
            return cls((opened(params['body_jaxpr']),), first, carry)
        return cls((), len(eqn.invars))


class Dependence:
    """Dependence on values, with or without a derivative.

    It holds in a loop if it holds after any number of turns, and in a conditional if it
    holds in any branch.

    Attributes:
        visits: the number of equations that were looked at.
    """

    def __init__(self) -> None:
        self.visits = 0
        # By id, with the object: a function that is called twice has one jaxpr.
        self._known: dict[int, tuple[Any, Rows]] = {}

    def leaf(self, eqn: JaxprEqn) -> Rows:
        """The rows of an equation that runs no jaxpr."""
        if eqn.primitive.name in EACH_FOR_ITSELF:
            return list(map(bit, range(len(eqn.outvars))))
        return [bits(range(len(eqn.outvars)))] * len(eqn.invars)

    def carries(self, aval: Any) -> bool:
        """Whether a value of a type can carry the dependence at all."""
        return True

    def of(self, jaxpr: Any) -> Rows:
        """The rows of the inputs of a jaxpr."""
        jaxpr = opened(jaxpr)
        if id(jaxpr) not in self._known:
            masks = self.within(jaxpr, map(bit, range(len(jaxpr.outvars))))
            rows = [masks.get(var, 0) for var in jaxpr.invars]
            self._known[id(jaxpr)] = jaxpr, rows
        return self._known[id(jaxpr)][1]

    def rows(self, eqn: JaxprEqn) -> Rows:
        """The rows of the inputs of an equation."""
        if id(eqn) not in self._known:
            self.visits += 1
            bodies = Bodies.of(eqn)
            rows = self._through(eqn, bodies) if bodies.jaxprs else self.leaf(eqn)
            self._known[id(eqn)] = eqn, rows
        return self._known[id(eqn)][1]

    def within(self, jaxpr: Any, ends: Iterable[int]) -> dict[Any, int]:
        """A mask for each variable of a jaxpr: those of all outputs that depend on it.

        Args:
            jaxpr: an open jaxpr.
            ends: the mask of each output.
        """
        masks: dict[Any, int] = {}

        def add(var: Any, mask: int) -> None:
            if mask and isinstance(var, Var) and self.carries(var.aval):
                masks[var] = masks.get(var, 0) | mask

        for var, end in zip(jaxpr.outvars, ends, strict=True):
            add(var, end)
        for eqn in reversed(jaxpr.eqns):
            below = [masks.get(var, 0) for var in eqn.outvars]
            for var, row in zip(eqn.invars, self.rows(eqn), strict=True):
                add(var, _union(row, below))
            # What is written to a mutable array is read from there later.
            written = [masks.get(var, 0) for var in eqn.invars if jaxprs.is_ref(var)]
            for var in eqn.invars if any(written) else ():
                add(var, functools.reduce(operator.or_, written))
        return masks

    def _through(self, eqn: JaxprEqn, bodies: Bodies) -> Rows:
        """The rows of an equation that runs jaxprs."""
        rows = [0] * len(eqn.invars)
        for jaxpr in bodies.jaxprs:
            for number, row in enumerate(self.of(jaxpr), bodies.first):
                rows[number] |= row
        for number in self._decides(eqn, bodies):
            rows[number] |= bits(range(len(eqn.outvars)))
        return _after_turns(rows, bodies.carry)

    def _decides(self, eqn: JaxprEqn, bodies: Bodies) -> list[int]:
        """The inputs that decide which branch runs, or how often a loop turns."""
        if eqn.primitive.name == 'cond':
            return [0] if self.carries(eqn.invars[0].aval) else []
        if eqn.primitive.name == 'while':
            asked = self.of(eqn.params['cond_jaxpr'])
            inputs = [*range(bodies.first), *bodies.carry]
            return [n for n, row in zip(inputs, asked, strict=True) if row & bit(0)]
        return []


def _union(row: int, masks: Sequence[int]) -> int:
    """The union of the masks whose bits are set in a row."""
    out = 0
    while row:
        lowest = row & -row
        out |= masks[lowest.bit_length() - 1]
        row ^= lowest
    return out


def _after_turns(rows: Rows, carry: range) -> Rows:
    """The rows of a loop after any number of turns, from those of one turn.

    Args:
        rows: of one turn. The first outputs are carried to the next turn.
        carry: the numbers of the inputs that are carried.
    """
    # After no turn at all, the values that came in go out.
    for output, number in enumerate(carry):
        rows[number] |= bit(output)
    # Warshall's algorithm for reachability.
    for output, number in enumerate(carry):
        through = rows[number]
        rows = [row | through if row & bit(output) else row for row in rows]
    return rows

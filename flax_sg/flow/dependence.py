"""Which outputs of a jaxpr depend on which of its inputs: bits, handed backwards.

A *row* is an int with a bit for each output that depends on an input. Two bits after
the last one say where else the input goes, or its derivative comes from: something that
JAX cannot differentiate, and a rule that makes a cotangent out of nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Var

from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import CALLS, body_of, opened

Rows: TypeAlias = list[int]

# What comes after the outputs in a row.
REFUSED, FROM_NOTHING = range(2)
BEYOND = 2


def gathered(row: int, masks: Sequence[int]) -> int:
    """The union of the masks whose bits are set."""
    out = 0
    while row:
        lowest = row & -row
        out |= masks[lowest.bit_length() - 1]
        row ^= lowest
    return out


class Dependence:
    """One kind of dependence, through all control flow.

    What holds in a loop holds after any number of turns; in a conditional, in any of
    its branches.

    Attributes:
        leaf: the rows of an equation that is none of the control flow known here.
        carries: whether a value of some type can carry the dependence at all.
        control: whether what decides, as the predicate of a conditional, counts.
        visits: how many equations were looked at.
    """

    def __init__(
        self,
        leaf: Callable[[JaxprEqn], Rows],
        carries: Callable[[Any], bool],
        control: bool,
    ) -> None:
        self.leaf = leaf
        self.carries = carries
        self.control = control
        self.visits = 0
        # By id, held: the jaxpr of a function that is called twice is one object.
        self._of_jaxprs: dict[int, tuple[Any, Rows]] = {}
        self._of_equations: dict[int, tuple[JaxprEqn, Rows]] = {}

    def of(self, jaxpr: Any) -> Rows:
        """The rows of the inputs of a jaxpr."""
        jaxpr = opened(jaxpr)
        known = self._of_jaxprs.get(id(jaxpr))
        if known is None:
            ends = [1 << number for number in range(len(jaxpr.outvars) + BEYOND)]
            masks = self.within(jaxpr, ends)
            known = jaxpr, [masks.get(var, 0) for var in jaxpr.invars]
            self._of_jaxprs[id(jaxpr)] = known
        return known[1]

    def within(self, jaxpr: Any, ends: Sequence[int]) -> dict[Any, int]:
        """A mask for each variable of a jaxpr.

        Args:
            jaxpr: an open jaxpr.
            ends: the mask of each output, and those of what comes after them in a row.
        """
        masks: dict[Any, int] = {}
        for var, end in zip(jaxpr.outvars, ends, strict=False):
            if isinstance(var, Var) and self.carries(var.aval):
                masks[var] = masks.get(var, 0) | end
        for eqn in reversed(jaxpr.eqns):
            below = [masks.get(var, 0) for var in eqn.outvars]
            if self.control and not any(below):
                continue  # A derivative may be refused, or made, all the same.
            below.extend(ends[-BEYOND:])
            for var, row in zip(eqn.invars, self.rows(eqn), strict=True):
                if row and isinstance(var, Var) and self.carries(var.aval):
                    masks[var] = masks.get(var, 0) | gathered(row, below)
        return masks

    def rows(self, eqn: JaxprEqn) -> Rows:
        """The rows of the inputs of an equation."""
        known = self._of_equations.get(id(eqn))
        if known is None:
            self.visits += 1
            known = self._of_equations[id(eqn)] = eqn, self._rows(eqn)
        return known[1]

    def _rows(self, eqn: JaxprEqn) -> Rows:
        name = eqn.primitive.name
        if name in CALLS:
            return list(self.of(body_of(eqn)))
        rule = _RULES.get(name)
        return self.leaf(eqn) if rule is None else rule(self, eqn)


def bit_of(eqn: JaxprEqn, beyond: int) -> int:
    """The bit of ``REFUSED`` or ``FROM_NOTHING`` in the rows of an equation."""
    return 1 << len(eqn.outvars) + beyond


def every(eqn: JaxprEqn) -> Rows:
    """The rows of an equation in which all depends on all."""
    return [(1 << len(eqn.outvars)) - 1] * len(eqn.invars)


def _scan(kind: Dependence, eqn: JaxprEqn) -> Rows:
    return _around(kind.of(eqn.params['jaxpr']), jaxprs.carried_by(eqn))


def _while(kind: Dependence, eqn: JaxprEqn) -> Rows:
    tested, consts = eqn.params['cond_nconsts'], eqn.params['body_nconsts']
    carries = len(eqn.outvars)
    asked = kind.of(eqn.params['cond_jaxpr'])
    rows = _around(kind.of(eqn.params['body_jaxpr']), range(consts, consts + carries))
    if not kind.control:
        return [0] * tested + rows
    # How often the loop turns decides on all that it carries.
    everything = (1 << carries) - 1
    decides = sum(1 << k for k, row in enumerate(asked[tested:]) if row)
    return [everything if row else 0 for row in asked[:tested]] + [
        row | everything if row & decides else row for row in rows
    ]


def _cond(kind: Dependence, eqn: JaxprEqn) -> Rows:
    branches = [kind.of(branch) for branch in eqn.params['branches']]
    rows = [0] * (len(eqn.invars) - 1)
    for branch in branches:
        rows = [row | other for row, other in zip(rows, branch, strict=True)]
    return [(1 << len(eqn.outvars)) - 1 if kind.control else 0, *rows]


_RULES: dict[str, Callable[[Dependence, JaxprEqn], Rows]] = {
    'scan': _scan,
    'while': _while,
    'cond': _cond,
}


def _around(rows: Rows, turning: range) -> Rows:
    """The rows of a loop, from those of its body.

    Args:
        rows: of the body; its first outputs are carried to the next turn.
        turning: the numbers of the inputs that are carried.
    """
    count = len(turning)
    carried = (1 << count) - 1
    turns = [rows[number] & carried for number in turning]
    beyond = [rows[number] >> count for number in turning]
    reached = [row | 1 << k for k, row in enumerate(turns)]
    for k, through in enumerate(reached):
        for i, row in enumerate(reached):
            if row >> k & 1:
                reached[i] = row | through
        # ``through`` is what it was: a step through k adds nothing to k itself.
    out: Rows = []
    for number, row in enumerate(rows):
        if number in turning:
            ends = reached[number - turning.start]
        else:
            ends = gathered(row & carried, reached)
        out.append(ends | (row >> count | gathered(ends, beyond)) << count)
    return out

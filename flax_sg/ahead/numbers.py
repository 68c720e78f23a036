"""Whether a function does the same for a traced number as for the number itself.

``isinstance(n, int)`` and ``f'layer_{n}'`` do not, and ``n * n`` of 60,000 is too large
for the 32 bits of a tracer. Nothing raises there. So a function is traced with numbers
as inputs and with numbers as constants, and both programs are compared: what is made of
numbers alone is computed, and has to be the constants of the other program.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import type_of
from flax_sg.internals.types import Array, Atom, Scalar


def agrees(
    traced: ClosedJaxpr, fixed: ClosedJaxpr, numbers: Mapping[int, Scalar]
) -> bool:
    """Whether two programs are the same, one with numbers and one with constants.

    Args:
        traced: the closed jaxpr with numbers among its inputs.
        fixed: the closed jaxpr with these numbers as constants.
        numbers: the numbers, by the index of their input.
    """
    one, other = traced.jaxpr, fixed.jaxpr
    known: dict[Atom, Array] = {
        one.invars[n]: np.asarray(number, type_of(one.invars[n]).dtype)
        for n, number in numbers.items()
    }
    inputs = [var for var in one.invars if var not in known]
    pairs: dict[Atom, Atom] = dict(zip(inputs, other.invars, strict=True))
    if len(one.constvars) != len(other.constvars):
        return False
    pairs |= zip(one.constvars, other.constvars, strict=True)
    return _same(one, other, known, pairs)


def _same(
    one: Jaxpr, other: Jaxpr, known: dict[Atom, Array], pairs: dict[Atom, Atom]
) -> bool:
    """Whether two open jaxprs are the same.

    Args:
        one: the jaxpr with numbers.
        other: the jaxpr with constants.
        known: what is known of values of the first: the numbers, to begin with.
        pairs: for values of the first those of the other.
    """

    def value_of(x: Atom) -> Array | None:
        return x.val if isinstance(x, Literal) else known.get(x)

    def alike(a: Atom, b: Atom) -> bool:
        value = value_of(a)
        if value is not None:
            return isinstance(b, Literal) and _equal(value, b.val)
        return not isinstance(b, Literal) and pairs.get(a) is b

    equations = iter(other.eqns)
    for eqn in one.eqns:
        values = [*map(value_of, eqn.invars)]
        reads_number = any(not isinstance(x, Literal) for x in eqn.invars)
        is_known = reads_number and all(value is not None for value in values)
        if is_known and not jaxprs.has_effect(eqn):
            known.update(zip(eqn.outvars, jaxprs.bind(eqn, values), strict=True))
            continue
        same = next(equations, None)
        if same is None or not _are_of_one_kind(eqn, same):
            return False
        if not all(map(alike, eqn.invars, same.invars)):
            return False
        pairs.update(zip(eqn.outvars, same.outvars, strict=True))
    return next(equations, None) is None and all(map(alike, one.outvars, other.outvars))


def _are_of_one_kind(eqn: JaxprEqn, other: JaxprEqn) -> bool:
    """Whether two equations run the same primitive, and the same bodies."""
    bodies, bodies_of_other = jaxprs.within(eqn), jaxprs.within(other)
    if eqn.primitive is not other.primitive or len(bodies) != len(bodies_of_other):
        return False
    if len(eqn.invars) != len(other.invars) or len(eqn.outvars) != len(other.outvars):
        return False
    for body, same in zip(
        map(jaxprs.opened, bodies), map(jaxprs.opened, bodies_of_other), strict=True
    ):
        if len(body.invars) != len(same.invars):
            return False
        pairs: dict[Atom, Atom] = dict(zip(body.invars, same.invars, strict=True))
        pairs |= zip(body.constvars, same.constvars, strict=False)
        if not _same(body, same, {}, pairs):
            return False
    return True


def _equal(one: Scalar, other: Scalar) -> bool:
    """Whether two numbers are equal, in the precision of the first."""
    one, other = np.asarray(one), np.asarray(other)
    exact = one.dtype.kind in 'iub' and other.dtype.kind in 'iub'
    return np.array_equal(one, other) if exact else np.allclose(one, other, 1e-6, 0.0)

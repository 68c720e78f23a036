"""Whether a function does the same for a traced number as for the number itself.

``isinstance(n, int)`` and ``f'layer_{n}'`` do not, and ``n * n`` of 60,000 is too large
for the 32 bits of a tracer. Nothing raises there. So a function is traced with numbers
as inputs and with numbers as constants, and both programs are compared: what is made of
numbers alone is computed in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from flax_sg.internals import jaxprs
from flax_sg.internals.types import AnyJaxpr, Array, Atom, Scalar


def agrees(
    traced: ClosedJaxpr, fixed: ClosedJaxpr, numbers: Mapping[int, Scalar]
) -> bool:
    """Whether two programs are the same, one with numbers and one with constants.

    Args:
        traced: the closed jaxpr with numbers among its inputs.
        fixed: the closed jaxpr with these numbers as constants.
        numbers: the numbers, by the index of their input.
    """
    known: dict[Atom, Array] = {
        traced.jaxpr.invars[n]: np.asarray(number, traced.in_avals[n].dtype)
        for n, number in numbers.items()
    }
    return _same(traced, fixed, known)


def _same(traced: AnyJaxpr, fixed: AnyJaxpr, known: dict[Atom, Array]) -> bool:
    """Whether two jaxprs are the same.

    Args:
        traced: the jaxpr with numbers.
        fixed: the jaxpr with constants.
        known: what is known of values: the numbers, to begin with.
    """
    one, other = jaxprs.opened(traced), jaxprs.opened(fixed)
    inputs = [var for var in one.invars if var not in known]
    consts = (getattr(jaxpr, 'consts', ()) for jaxpr in (traced, fixed))
    if len(inputs) != len(other.invars) or not _are_equal(*consts):
        return False
    # For values of the first those of the other.
    pairs: dict[Atom, Atom] = dict(zip(inputs, other.invars, strict=True))
    pairs |= zip(one.constvars, other.constvars, strict=True)

    def alike(a: Atom, b: Atom) -> bool:
        if (value := _value_of(a, known)) is not None:
            return _equal(value, _value_of(b, known))
        return pairs.get(a) is b

    equations = _not_computed(other, known)
    for eqn in _not_computed(one, known):
        same = next(equations, None)
        if same is None or not _are_of_one_kind(eqn, same):
            return False
        if not all(map(alike, eqn.invars, same.invars)):
            return False
        pairs.update(zip(eqn.outvars, same.outvars, strict=True))
    return next(equations, None) is None and all(map(alike, one.outvars, other.outvars))


def _value_of(atom: Atom, known: Mapping[Atom, Array]) -> Array | None:
    return atom.val if isinstance(atom, Literal) else known.get(atom)


def _not_computed(jaxpr: Jaxpr, known: dict[Atom, Array]) -> Iterator[JaxprEqn]:
    """Yields the equations but for those that make numbers of numbers.

    What these make is noted.
    """
    for eqn in jaxpr.eqns:
        values = [_value_of(x, known) for x in eqn.invars]
        types = map(jaxprs.type_of, (*eqn.invars, *eqn.outvars))
        are_numbers = all(
            x.shape == () and isinstance(x.dtype, np.dtype) for x in types
        )
        is_known = eqn.invars and all(value is not None for value in values)
        if is_known and are_numbers and not jaxprs.has_effect(eqn):
            known.update(zip(eqn.outvars, jaxprs.bind(eqn, values), strict=True))
        else:
            yield eqn


def _are_of_one_kind(eqn: JaxprEqn, other: JaxprEqn) -> bool:
    """Whether two equations run the same primitive, and the same bodies."""
    if eqn.primitive is not other.primitive:
        return False
    if len(eqn.invars) != len(other.invars) or len(eqn.outvars) != len(other.outvars):
        return False
    if eqn.primitive.name in jaxprs.CUSTOM_CALLS:  # Their rules are made at each trace.
        return _are_equal(jaxprs.closed_body_of(eqn), jaxprs.closed_body_of(other))
    # A constant has no weak type. The policy of a checkpoint changes no value.
    names = eqn.params.keys() - {'weak_type', 'policy'}
    return all(_are_equal(eqn.params[x], other.params[x]) for x in names)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two parameters of equations, or constants of jaxprs, are equal.

    A callback that is a new function in each trace is none that is known to be.
    """
    if hasattr(jaxprs.opened(one), 'eqns'):
        return _same(one, other, {})
    if type(one) in (tuple, list):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if one is other:
        return True
    is_traced = isinstance(one, Tracer) or isinstance(other, Tracer)
    return not is_traced and bool(np.all(one == other))


def _equal(one: Array, other: Array | None) -> bool:
    """Whether two numbers are equal, in the precision of the first."""
    if other is None:
        return False
    one, other = np.asarray(one), np.asarray(other)
    exact = one.dtype.kind in 'iub' and other.dtype.kind in 'iub'
    return np.array_equal(one, other) if exact else np.allclose(one, other, 1e-6, 0.0)

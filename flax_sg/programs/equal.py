"""Tells which equations make the same of the same values."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from flax_sg.internals.jaxprs import CUSTOM_CALLS, body_of, has_effect, opened
from flax_sg.internals.types import Atom


def identity_of(eqn: JaxprEqn, read: Sequence[Hashable]) -> Hashable:
    """What two equations have in common that make the same; None if it is not known.

    Args:
        eqn: the equation.
        read: what stands for the variables that it reads, and its literals.
    """
    identity = None if has_effect(eqn) else _equation(eqn, read)
    try:
        hash(identity)
    except TypeError:
        return None
    return identity


def _equation(eqn: JaxprEqn, read: Iterable[Hashable]) -> Hashable:
    # Nobody differentiates what does not change: rules of derivatives do not count.
    is_custom = eqn.primitive.name in CUSTOM_CALLS
    params = {'': body_of(eqn)} if is_custom else eqn.params
    context = [getattr(eqn.ctx, name, None) for name in sorted(eqn.ctx.__slots__)]
    return (
        eqn.primitive,
        tuple((name, _value(params[name])) for name in sorted(params)),
        tuple(map(_value, read)),
        tuple(var.aval for var in eqn.outvars),
        repr([x for x in context if not callable(x)]),
    )


def _value(value: Any) -> Hashable:
    """A value that is equal for equal programs: a jaxpr by what it does."""
    if isinstance(value, Literal):
        return value.aval, np.asarray(value.val).tobytes()
    if hasattr(opened(value), 'eqns'):
        consts = tuple(map(id, getattr(value, 'consts', ())))
        return _program(opened(value)), consts
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(map(_value, value))
    # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
    return type(value).__name__, repr(value) if isinstance(value, float) else value


def _program(jaxpr: Jaxpr) -> Hashable:
    """The equations of a jaxpr, with a number for each variable."""
    numbers: dict[Var, Literal | int] = {}
    unused = itertools.count()

    def at(atom: Atom) -> Literal | int:
        if isinstance(atom, Literal):
            return atom
        if atom not in numbers:
            numbers[atom] = next(unused)
        return numbers[atom]

    ins = tuple((at(var), var.aval) for var in (*jaxpr.constvars, *jaxpr.invars))
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == 'stop_gradient':  # Another rule alone, as above.
            numbers[eqn.outvars[0]] = at(eqn.invars[0])
        else:
            eqns.append((_equation(eqn, map(at, eqn.invars)), *map(at, eqn.outvars)))
    return ins, tuple(eqns), tuple(_value(at(atom)) for atom in jaxpr.outvars)

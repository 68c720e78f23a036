"""What an equation costs: whether it is made again rather than kept, and its flops."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jax.extend.core import JaxprEqn

from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import type_of
from flax_sg.internals.types import Aval
from flax_sg.programs import primitives
from flax_sg.programs.bodies import Bodies
from flax_sg.programs.primitives import Kind

# What is made again rather than kept.
_CHEAP = primitives.names_of(Kind.CHEAP)


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether the outputs of an equation are made again, rather than kept."""
    if eqn.primitive.name in jaxprs.CUSTOM_CALLS or jaxprs.is_plain_jit(eqn):
        return all(map(is_cheap, jaxprs.body_of(eqn).eqns))
    return eqn.primitive.name in _CHEAP


def is_cheap_within(eqn: JaxprEqn) -> bool:
    """Like ``is_cheap``; a loop or a call is as cheap as what is in it."""
    inner = [one for body in jaxprs.within(eqn) for one in jaxprs.opened(body).eqns]
    return all(map(is_cheap_within, inner)) if inner else is_cheap(eqn)


def bytes_of(aval: Aval) -> int:
    """The bytes of an array of a type."""
    return aval.size * aval.dtype.itemsize


def flops_of(eqns: Iterable[JaxprEqn]) -> float:
    """The flops of some equations. Of a branch the longest, of a loop all turns.

    A ``while`` has no known number of turns, and counts once.
    """
    return sum(map(_flops, eqns))


def has_while(eqns: Iterable[JaxprEqn]) -> bool:
    """Whether a ``while`` is among some equations, or in what they run."""
    return any(
        eqn.primitive.name == 'while'
        or any(has_while(jaxprs.opened(body).eqns) for body in jaxprs.within(eqn))
        for eqn in eqns
    )


def _flops(eqn: JaxprEqn) -> float:
    name, params = eqn.primitive.name, eqn.params
    size = sum(math.prod(type_of(var).shape) for var in eqn.outvars)
    if name == 'dot_general':
        (contracted, _), _ = params['dimension_numbers']
        shape = type_of(eqn.invars[0]).shape
        return 2.0 * size * math.prod(shape[axis] for axis in contracted)
    if name == 'conv_general_dilated':
        kernel, numbers = type_of(eqn.invars[1]).shape, params['dimension_numbers']
        return 2.0 * size * math.prod(kernel) / kernel[numbers.rhs_spec[0]]
    if (body := jaxprs.called_by(eqn)) is not None:
        return flops_of(jaxprs.opened(body).eqns)
    if bodies := Bodies.of(eqn).jaxprs:
        longest = max(flops_of(jaxprs.opened(body).eqns) for body in bodies)
        return params.get('length', 1) * longest
    return float(size)

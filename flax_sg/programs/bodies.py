"""The jaxprs that an equation runs, and how their inputs and outputs are its own."""

from __future__ import annotations

from typing import NamedTuple

from jax.extend.core import JaxprEqn

from flax_sg.internals.jaxprs import CALLS, carried_by, closed_body_of
from flax_sg.internals.types import AnyJaxpr


class Bodies(NamedTuple):
    """The jaxprs that an equation runs, but for custom derivative rules.

    Their inputs are those of the equation from ``first`` on. Their outputs are all of
    the equation's.

    Attributes:
        jaxprs: open or closed: the branches of a ``cond``, otherwise one or none.
        first: the index of the first input of the equation that goes into them.
        carry: the inputs that a loop carries from turn to turn. The first outputs of
            the body are their next values.
    """

    jaxprs: tuple[AnyJaxpr, ...]
    first: int = 0
    carry: range = range(0)

    @classmethod
    def of(cls, eqn: JaxprEqn) -> Bodies:
        """The jaxprs in an equation."""
        name, params = eqn.primitive.name, eqn.params
        if name in CALLS:
            return cls((closed_body_of(eqn),))
        if name == 'cond':
            return cls(tuple(params['branches']), 1)
        if name == 'scan':
            return cls((params['jaxpr'],), 0, carried_by(eqn))
        if name == 'while':
            first = params['cond_nconsts']
            carry = range(first + params['body_nconsts'], len(eqn.invars))
            return cls((params['body_jaxpr'],), first, carry)
        return cls(())

"""How many operations on numbers a program does."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from flax_sg.ahead.steps import Step
from flax_sg.internals import jaxprs


def flops_of(eqns: Iterable[Any]) -> float:
    """The flops of some equations. Of a branch the longest, of a loop all turns.

    A ``while`` has no known number of turns, and counts once.
    """
    return sum(map(_flops, eqns))


def flops_of_steps(steps: Iterable[Step]) -> float:
    """The flops of some steps."""
    return sum(
        step.times * flops_of_steps(step.inner) if step.call else _flops(step.eqn)
        for step in steps
    )


def _flops(eqn: Any) -> float:
    name, params = eqn.primitive.name, eqn.params
    size = sum(math.prod(var.aval.shape) for var in eqn.outvars)
    if name == 'dot_general':
        (contracted, _), _ = params['dimension_numbers']
        shape = eqn.invars[0].aval.shape
        return 2.0 * size * math.prod(shape[axis] for axis in contracted)
    if name == 'conv_general_dilated':
        kernel = eqn.invars[1].aval.shape
        return (
            2.0
            * size
            * math.prod(kernel)
            / kernel[params['dimension_numbers'].rhs_spec[0]]
        )
    if name in jaxprs.CUSTOM_CALLS:
        return flops_of(jaxprs.body_of(eqn).eqns)
    if bodies := jaxprs.Bodies.of(eqn).jaxprs:
        return params.get('length', 1) * max(
            flops_of(jaxprs.opened(body).eqns) for body in bodies
        )
    return float(size)

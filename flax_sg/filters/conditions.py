"""Conditions: one bool for a whole filter, which may be known when a program runs.

A filter of variables and a condition say together *what is meant while something
holds*: ``sg.where('last/**') & (step < k)``. A bool that is known is a ``Constant``. A
traced one is a mask of one element, which stands for all elements of each variable.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import numpy as np

from flax_sg.filters.expressions import Constant, Filter, Need
from flax_sg.filters.indices import Mask
from flax_sg.internals import tracing


class Condition(Mask):
    """Every variable, or none: a traced bool, whose value a program computes.

    Both may happen in one program. So nothing is left out of it: a gradient is a
    ``jnp.where`` of the condition, and an optimizer keeps a state for all variables.

    Attributes:
        array: the traced bool. JAX may not find a program again by its value: another
            tracer is another filter.
    """

    own_needs: ClassVar[frozenset[Need]] = frozenset({'part', 'mask', 'condition'})

    def __repr__(self) -> str:
        return '<a traced condition>'


def is_condition(value: object) -> bool:
    """Whether something is one bool: of Python, of numpy, of JAX, traced or not.

    >>> is_condition(True), is_condition(np.array(True)), is_condition(np.ones(2, bool))
    (True, True, False)
    """
    if isinstance(value, (np.ndarray, jax.Array)):
        return value.dtype == np.bool_ and value.ndim == 0
    return isinstance(value, (bool, np.bool_))


def condition(value: object) -> Filter:
    """The filter of one bool.

    >>> condition(np.array(True))
    Constant(True)
    """
    if isinstance(value, tracing.Tracer):
        return Condition(value)
    return Constant(bool(value))

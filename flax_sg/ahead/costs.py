"""What is made again rather than kept."""

from __future__ import annotations

from typing import Any

from flax_sg.internals import jaxprs

# What is made again rather than kept: it costs as much as to read it.
_CHEAP = frozenset(
    (
        *('abs', 'add', 'add_any', 'and', 'broadcast_in_dim', 'ceil', 'clamp', 'copy'),
        *('concatenate', 'convert_element_type', 'cos', 'div', 'eq', 'erf'),
        *('exp', 'exp2', 'expand_dims', 'expm1', 'floor', 'ge', 'gt', 'integer_pow'),
        *('iota', 'is_finite', 'le', 'log', 'log1p', 'logistic', 'lt', 'max', 'min'),
        *('mul', 'ne', 'neg', 'not', 'or', 'pad', 'pow', 'reshape', 'rev', 'round'),
        *('pcast', 'pvary'),
        *('rsqrt', 'select_n', 'sign', 'sin', 'slice', 'split', 'sqrt', 'square'),
        *('squeeze', 'stop_gradient', 'sub', 'tanh', 'transpose', 'xor'),
    )
)


def is_cheap(eqn: Any) -> bool:
    """Whether the outputs of an equation are made again, rather than kept."""
    if eqn.primitive.name in jaxprs.CUSTOM_CALLS or jaxprs.is_plain_jit(eqn):
        return all(map(is_cheap, jaxprs.body_of(eqn).eqns))
    return eqn.primitive.name in _CHEAP

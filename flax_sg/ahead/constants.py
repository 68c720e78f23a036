"""Values of a program that are known without its inputs, such as indices and masks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg.ahead.costs import is_cheap
from flax_sg.ahead.steps import Step
from flax_sg.internals import jaxprs

# Larger ones are not computed, unless it takes no memory.
_LARGEST = 1 << 20


def constant(value: Any) -> Any:
    """A constant as an array of NumPy; None if it is traced, or has no such form."""
    # Tracers, keys, arrays of other processes.
    with contextlib.suppress(TypeError, RuntimeError):
        return np.asarray(value)
    return None


def folded(step: Step, ins: Sequence[Any], number: int) -> Any:
    """An output of a step, computed of constants; None if it takes long.

    Args:
        step: the step.
        ins: what it reads.
        number: which of its outputs.
    """
    eqn, var = step.eqn, step.eqn.outvars[number]
    if step.call is not None or any(x is None for x in ins):
        return None
    # jax 0.7 begins with an index so. The others are types in a shard_map.
    if eqn.primitive.name in ('device_put', 'pcast', 'pvary'):
        return ins[number]
    if not is_cheap(eqn):
        return None
    if eqn.primitive.name == 'broadcast_in_dim':  # The mask of a stack: a view will do.
        return _broadcast(ins[0], **eqn.params)
    if var.aval.size > _LARGEST:
        return None
    with jax.ensure_compile_time_eval():
        return constant(jaxprs.bind(eqn, ins)[number])


def _broadcast(array: Any, shape: Any, broadcast_dimensions: Any, **_: Any) -> Any:
    sizes = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, array.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(array.reshape(sizes), shape)


def has_zeros(aval: Any) -> bool:
    """Whether zeros may stand for values of a type: not for keys, nor for shards."""
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return not is_key and not jaxprs.varying_axes(aval)

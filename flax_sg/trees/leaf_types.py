"""What a leaf of a tree may be: an array, a number, what can be differentiated."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from flax_sg.internals import tracing
from flax_sg.internals.types import Leaf
from flax_sg.trees.absent import Absent
from flax_sg.trees.nondifferentiable import NonDifferentiable
from flax_sg.trees.rows import Rest


def is_differentiable(leaf: Leaf) -> bool:
    """Whether a leaf can be differentiated: real or complex, and not marked.

    Arrays, tracers, Python's numbers and ``jax.ShapeDtypeStruct`` can; integers, bools,
    keys, strings, other objects and ``NonDifferentiable`` cannot.
    """
    if is_array(leaf):
        return _is_inexact(leaf.dtype)
    return isinstance(leaf, (float, complex))


def is_number(leaf: Leaf) -> bool:
    """Whether a leaf is a number, or an array of numbers or bools: it has a zero."""
    if is_array(leaf):
        return jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_
    return isinstance(leaf, (bool, int, float, complex))


_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_array_classes: set[type] = set()


def is_array(leaf: Leaf) -> bool:
    """Whether a leaf is an array or a tracer, or stands for one."""
    # Classes are remembered: ``isinstance`` takes long for a jax.Array.
    if type(leaf) in _array_classes:
        return True
    is_instance = isinstance(leaf, _ARRAYS)
    if is_instance and not isinstance(leaf, tracing.Tracer):
        _array_classes.add(type(leaf))
    return is_instance


@functools.lru_cache(256)
def _is_inexact(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def is_whole(node: object) -> bool:
    """Whether a node counts as one leaf, whatever is in it."""
    return isinstance(node, (Absent, NonDifferentiable, Rest))


def is_variable(node: object) -> bool:
    """Whether a node is a Variable of NNX."""
    return isinstance(node, getattr(sys.modules.get('flax.nnx'), 'Variable', ()))


def is_module(node: object) -> bool:
    """Whether a node is a module of NNX, or another object with Variables in it."""
    return isinstance(node, getattr(sys.modules.get('flax.nnx'), 'Pytree', ()))


def holds_arrays(leaf: Leaf) -> bool:
    """Whether a leaf is an array for JAX; ``NonDifferentiable`` has arrays in it."""
    arrays = jax.tree.leaves(leaf)
    return bool(arrays) and all(
        x.dtype.kind in 'biufcV'
        if isinstance(x, (np.ndarray, np.generic))
        else isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
        for x in arrays
    )

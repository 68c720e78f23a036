"""Names for types that Python cannot check, for readers of a signature.

Each of them is ``Any``: what is in a tree, or whether a filter means a part of an
array, is known when a program runs.
"""

from __future__ import annotations

from typing import Any, TypeAlias

# An array of JAX or NumPy, a tracer, or a number of Python.
Array: TypeAlias = Any
# One number, traced or not.
Scalar: TypeAlias = Any
# A node of a tree that has no children for JAX: most often an array.
Leaf: TypeAlias = Any
# Any nesting of containers that JAX knows: parameters, gradients, states.
PyTree: TypeAlias = Any
# What a filter says of an array: True, False, or the ``filters.Part`` that it means.
Decision: TypeAlias = Any
# A transformation of optax, or one written like them.
Transformation: TypeAlias = Any
# A filter of NNX: a type, a tag, a function of path and value, or several.
Kind: TypeAlias = Any


def is_meant(decision: Decision) -> bool:
    """Whether a filter means an array, or a part of it.

    >>> is_meant(True), is_meant(False)
    (True, False)
    """
    return decision is not False

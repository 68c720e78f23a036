"""Names for types, for readers of a signature.

Most of them are ``Any``, which Python cannot check: what is in a tree, or
whether a filter means a part of an array, is known when a program runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

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
# The arguments of a call: those by position, those by name.
Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = Mapping[str, Any]
# A module of linen or a model of NNX.
Model: TypeAlias = Any
# A module of linen that is bound: it has a scope, which Flax declares as optional.
BoundModule: TypeAlias = Any
# What NumPy takes between brackets: an int, a slice, an array, a tuple of them.
ArrayIndex: TypeAlias = Any
# Which of JAX's traces code runs in, see ``internals.tracing.current_trace``.
Level: TypeAlias = Any
# The structure of a tree, as ``jax.tree.structure`` returns it.
TreeDef: TypeAlias = Any
# A jaxpr, open, or closed over its constants.
AnyJaxpr: TypeAlias = ClosedJaxpr | Jaxpr
# What an equation of a jaxpr reads: a variable, or a constant as it is.
Atom: TypeAlias = Literal | Var
# The type of a value in a jaxpr: shape, dtype and sharding. JAX declares none of these.
Aval: TypeAlias = Any


def is_meant(decision: Decision) -> bool:
    """Whether a filter means an array, or a part of it.

    >>> is_meant(True), is_meant(False)
    (True, False)
    """
    return decision is not False

"""Traces a function on shapes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen

from flax_sg import errors
from flax_sg.filters import predicates
from flax_sg.trees.leaves import is_differentiable

# What JAX raises where a program asks for a value that has only a shape.
_ASKED_FOR_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The trace of a function.

    Attributes:
        jaxpr: from the arrays in the arguments to the arrays in the result.
        name: the name of the function, and where it stands.
        inputs: for each input of the jaxpr its number among the leaves of all
            arguments.
        output: the result, with shapes in place of arrays.
    """

    jaxpr: Any
    name: str
    inputs: tuple[int, ...]
    output: Any

    @classmethod
    def of(
        cls, fun: Callable[..., Any], args: Sequence[Any], numbers: Sequence[int]
    ) -> Program:
        """Traces a function once.

        Args:
            fun: a function of pytrees, or an unbound module for its ``apply``.
            args: its arguments, or their shapes.
            numbers: which arguments are differentiated. Python numbers in them are
                traced. In the other arguments they are constants.

        Raises:
            ArgumentTypeError: if the function needs values where there are shapes.
        """
        run = fun.apply if isinstance(fun, linen.Module) else fun
        leaves, treedef = jax.tree.flatten(tuple(args))
        ranges = leaf_numbers(args)
        numeric = {n for number in numbers for n in ranges[number]}
        inputs = tuple(
            n
            for n, leaf in enumerate(leaves)
            if _is_array(leaf) or (n in numeric and is_differentiable(leaf))
        )
        results: list[Any] = []

        def fun_of_arrays(*arrays: Any) -> list[Any]:
            given = dict(zip(inputs, arrays, strict=True))
            full = [given.get(n, leaf) for n, leaf in enumerate(leaves)]
            out = run(*treedef.unflatten(full))
            results.append(jax.tree.map(_shape_of, out))
            return [leaf for leaf in jax.tree.leaves(out) if _is_array(leaf)]

        name = predicates.describe(run)
        try:
            closed = jax.make_jaxpr(fun_of_arrays)(*(leaves[n] for n in inputs))
        except _ASKED_FOR_A_VALUE as error:
            raise _value_needed(name) from error
        return cls(closed.jaxpr, name, inputs, results[0])


def leaf_numbers(args: Sequence[Any]) -> list[range]:
    """For each argument the numbers of its leaves among those of all arguments."""
    ends = [0, *itertools.accumulate(len(jax.tree.leaves(arg)) for arg in args)]
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def _shape_of(leaf: Any) -> Any:
    if not _is_array(leaf):
        return leaf
    return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype)


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind in 'biufcV'
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))


def _value_needed(name: str) -> errors.ArgumentTypeError:
    """A function needs values to run, and the analysis has shapes alone."""
    return errors.ArgumentTypeError(
        f'{name} needs the values of its arguments, but it is traced on their shapes. '
        "JAX's error above says where.\n"
        'Bind such an argument, as a number or a NumPy array: '
        'functools.partial(fun, ...).'
    )

"""A function that was run once, on shapes, and what came of it: its program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen

from flax_sg import errors
from flax_sg.filters import predicates
from flax_sg.trees.leaves import is_differentiable

# What JAX raises where a program asks for a value that it does not know yet.
_ASKED_FOR_A_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """What a function does with arguments of some form.

    Attributes:
        closed: the jaxpr, of the arrays in the arguments to the arrays in the result.
        fun: the function.
        inputs: the number of each traced leaf among all leaves of the arguments.
        output: the result, with the shapes of arrays in their places.
    """

    closed: Any
    fun: Callable[..., Any]
    inputs: tuple[int, ...]
    output: Any

    @classmethod
    def of(
        cls, fun: Callable[..., Any], args: Sequence[Any], numbers: Sequence[int]
    ) -> Program:
        """Runs a function once.

        Args:
            fun: a function of pytrees, or an unbound module in place of its ``apply``.
            args: its arguments; arrays may be shapes.
            numbers: which arguments are differentiated: Python's numbers in them are
                traced, in the others they are what they are.

        Raises:
            ArgumentTypeError: if the function needs values where there are shapes.
        """
        run = fun.apply if isinstance(fun, linen.Module) else fun
        leaves, treedef = jax.tree.flatten(tuple(args))
        numeric = _leaves_in(args, numbers)
        inputs = tuple(
            n
            for n, leaf in enumerate(leaves)
            if _is_array(leaf) or (n in numeric and is_differentiable(leaf))
        )
        results: list[Any] = []

        def fun_of_arrays(*arrays: Any) -> list[Any]:
            full = list(leaves)
            for number, array in zip(inputs, arrays, strict=True):
                full[number] = array
            out, out_treedef = jax.tree.flatten(run(*treedef.unflatten(full)))
            traced = [_is_array(leaf) for leaf in out]
            shown = [
                jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype) if take else leaf
                for leaf, take in zip(out, traced, strict=True)
            ]
            results.append(out_treedef.unflatten(shown))
            return [leaf for leaf, take in zip(out, traced, strict=True) if take]

        try:
            closed = jax.make_jaxpr(fun_of_arrays)(*(leaves[n] for n in inputs))
        except _ASKED_FOR_A_VALUE as error:
            raise _value_needed(predicates.describe(run)) from error
        return cls(closed, run, inputs, results[0])


def _leaves_in(args: Sequence[Any], numbers: Sequence[int]) -> set[int]:
    """The numbers of the leaves of some arguments among those of all."""
    out: set[int] = set()
    start = 0
    for number, arg in enumerate(args):
        stop = start + len(jax.tree.leaves(arg))
        if number in numbers:
            out.update(range(start, stop))
        start = stop
    return out


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind in 'biufcV'
    return isinstance(leaf, jax.Array) or _is_shape(leaf)


def _value_needed(name: str) -> errors.ArgumentTypeError:
    """A function needs values to run, and the analysis has shapes alone."""
    return errors.ArgumentTypeError(
        f'{name} needs the values of its arguments, and is run on their shapes.\n'
        'What JAX says of it stands above. Numbers in arguments that are not '
        'differentiated stay what they are; or bind the value, as a number or an '
        'array of numpy: functools.partial(fun, ...).'
    )

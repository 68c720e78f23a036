"""A function that was run once, on shapes, and what came of it: its program."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen
from jax.extend.core import jaxpr_as_fun

from flax_sg import _private, errors, functions
from flax_sg.leaves import is_differentiable

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
    _treedef: Any
    _static: Mapping[int, Any]
    _key: Hashable
    _context: Hashable

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
            ValueNeededError: if the function needs values where there are shapes.
        """
        run = fun.apply if isinstance(fun, linen.Module) else fun
        leaves, treedef = jax.tree.flatten(tuple(args))
        numeric = _leaves_in(args, numbers)
        inputs = tuple(
            n
            for n, leaf in enumerate(leaves)
            if _is_array(leaf) or (n in numeric and is_differentiable(leaf))
        )
        static = {n: leaf for n, leaf in enumerate(leaves) if n not in set(inputs)}
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
            raise errors.ValueNeededError(functions.describe(run)) from error
        # What a function counts while it runs is counted.
        key, context = functions.reads_key(run), _private.trace_context()
        return cls(closed, run, inputs, results[0], treedef, static, key, context)

    def is_of(self, fun: Callable[..., Any], args: Sequence[Any]) -> bool:
        """Whether a function, called with some arguments, is this program.

        It has to be the same object, and what it reads as it was: variables, numbers
        and containers by value, arrays, tracers, modules and all that cannot be looked
        into by identity. The settings of JAX and the open blocks count.
        """
        if not _is_object(fun, self.fun):
            return False
        if _private.trace_context() != self._context:
            return False
        leaves, treedef = jax.tree.flatten(tuple(args))
        if treedef != self._treedef or functions.reads_key(fun) != self._key:
            return False
        pairs = zip(self.inputs, self.closed.in_avals, strict=True)
        return all(_has_type(leaves[n], aval) for n, aval in pairs) and all(
            _is_same(leaves[n], leaf) for n, leaf in self._static.items()
        )

    def __call__(self, *args: Any) -> Any:
        """What the function returns for arguments of this form."""
        leaves = jax.tree.leaves(args)
        arrays = iter(jaxpr_as_fun(self.closed)(*(leaves[n] for n in self.inputs)))
        return jax.tree.map(
            lambda leaf: next(arrays) if _is_shape(leaf) else leaf, self.output
        )


def _is_object(a: Any, b: Any) -> bool:
    """Whether two functions are one object, or methods of one, bound anew each time."""
    return a is b or (isinstance(a, types.MethodType) and bool(a == b))


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


def _has_type(leaf: Any, aval: Any) -> bool:
    try:
        return jax.typeof(leaf) == aval
    except TypeError:
        return False


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, (int, float, complex, str)) and a == b

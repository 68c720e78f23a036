"""The trace of a function: its program, and the parameters and outputs of that."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from flax_sg import errors, filters
from flax_sg.filters.paths import Path
from flax_sg.flow.function import Function, names_of_arguments
from flax_sg.internals.jaxprs import BLOCK
from flax_sg.internals.types import Array, Kwargs, Leaf
from flax_sg.trees.leaves import arguments_of, is_differentiable, leaves_of
from flax_sg.trees.trainable import Declared, chosen, states


class Parameter(NamedTuple):
    """A leaf of the differentiated arguments.

    Attributes:
        path: its path.
        slots: the indices of its arrays among the inputs of the program.
        wanted: whether ``wrt`` means it, or which part of it.
    """

    path: Path
    slots: tuple[int, ...]
    wanted: bool | filters.Part


class Traced(NamedTuple):
    """A function that was traced on shapes.

    Attributes:
        program: from the arrays in the arguments to those that are returned, without
            ``aux``. Parameters that nobody asks about are stopped where they come in.
        outputs: the name of each array that is returned.
        parameters: the leaves of the differentiated arguments.
        arguments: if several arguments hold parameters, the position of each, and the
            name that the function gives it.
        name: what the user calls the function.
        numbers: the numbers of Python whose values the function asks for, by their
            names. The program has been traced for these values.
        may_have_aux: whether the function returns a tuple that begins with one number,
            as ``(loss, new_statistics)``.
        takes_numbers: whether a number of Python is an input of the program.
    """

    program: ClosedJaxpr
    outputs: tuple[str, ...]
    parameters: list[Parameter]
    arguments: tuple[tuple[int, str], ...]
    name: str
    numbers: dict[str, Any]
    may_have_aux: bool
    takes_numbers: bool


def traced(
    fun: Callable[..., Any],
    args: Sequence[Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    wrt: filters.Where | Declared,
    kwargs: Kwargs,
    is_fixed: bool = False,
) -> Traced:
    """Traces a function and finds its parameters; see ``gradient_flow``.

    With ``is_fixed`` all numbers of Python are constants.
    """
    function = Function(fun, args, has_aux, kwargs)
    if not isinstance(wrt, Declared):
        wrt = filters.named(filters.as_filter(wrt), 'trained', 'wrt={}')
    arguments = _Arguments(args, kwargs, argnums, wrt)
    if not arguments.hold_parameters():
        raise errors.ArgumentTypeError(
            f'{function.name} has no parameters: argument '
            f'{", ".join(map(str, arguments.own))} holds no arrays.\n'
            'Give arrays or their shapes, and say which argument holds them: argnums=1.'
        )
    outputs: list[str] = []

    # JAX's errors name the function of the user.
    @functools.wraps(function.run, updated=())
    def of_arrays(arrays: dict[_Key, Array]) -> list[Array]:
        outputs[:], leaves = function.outputs(*arguments.restored(arrays))
        return leaves

    program = _program(jax.make_jaxpr(of_arrays), arguments, is_fixed)
    if not outputs:
        raise errors.ArgumentTypeError(
            f'{function.name} returns nothing: no gradient can come from there.\n'
            'Return the loss, or several in a dict.'
        )
    names = names_of_arguments(function.run)
    own = () if isinstance(argnums, int) else arguments.own
    return Traced(
        program,
        tuple(outputs),
        arguments.parameters(),
        tuple((n, names[n]) for n in own if n in names),
        function.name,
        arguments.constant_numbers(names),
        function.may_have_aux,
        not arguments.numbers.keys().isdisjoint(arguments.inputs),
    )


def _program(
    trace: Callable[..., ClosedJaxpr], arguments: _Arguments, is_fixed: bool
) -> ClosedJaxpr:
    """The program; numbers whose values the function asks for are constants in it."""
    every = arguments.inputs

    def of(numbers: Collection[_Key]) -> tuple[ClosedJaxpr, dict[_Key, Any]]:
        constants = arguments.numbers.keys() - {*numbers}
        inputs = {key: every[key] for key in every if key not in constants}
        return trace(inputs), inputs

    numbers = () if is_fixed else [*arguments.numbers]
    program, arguments.inputs = with_numbers(numbers, of) or of(())
    return program


_K = TypeVar('_K')
_T = TypeVar('_T')


def with_numbers(
    numbers: Sequence[_K], trace: Callable[[Collection[_K]], _T | None]
) -> _T | None:
    """A trace in which numbers are inputs, but for those whose values are asked for.

    Args:
        numbers: the numbers.
        trace: traces a function, of which some of them are inputs and the others are
            constants. It raises, or returns None, if one of them has to be a constant.

    Returns:
        What ``trace`` has returned; None if all numbers have to be constants.
    """
    inputs, last = list[_K](), list[_T]()

    def take(group: Sequence[_K]) -> None:
        with contextlib.suppress(Exception):  # Whatever a function raises that asks.
            if (result := trace([*inputs, *group])) is not None:
                inputs.extend(group)
                last[:] = [result]
                return
        if half := len(group) // 2:
            take(group[:half])
            take(group[half:])

    if numbers:
        take(numbers)
    return last[0] if last else None


# A number of Python may be another one at the next step. A bool is a flag.
_NUMBERS = int, float, complex
# A leaf of the arguments: the position of its argument, and its index in that.
_Key: TypeAlias = tuple[int, int]


class _Arguments:
    """The arguments of a function, of which some hold its parameters.

    Attributes:
        own: the arguments that hold parameters, by their position.
        inputs: the leaves that are traced. All others are constants of the program.
        numbers: those of the leaves that are numbers of Python, and no parameters. The
            weight of a loss, or a step, may be 0 now, and another number later.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Kwargs,
        argnums: int | Sequence[int],
        wrt: filters.Filter | Declared,
    ) -> None:
        self.own = arguments_of(args, argnums)
        everything = enumerate((*args, kwargs))
        self._trees = [self.own.get(n) or leaves_of(arg) for n, arg in everything]
        decisions = dict(zip(self.own, chosen([*self.own.values()], wrt), strict=True))
        # For each leaf of ``own``: its path, and whether ``wrt`` means it, or a part.
        self._decisions: dict[_Key, tuple[Path, bool | filters.Part]] = {
            (n, k): (path, decision)
            for n, tree in self.own.items()
            for k, (path, decision) in enumerate(
                zip(tree.paths, decisions[n], strict=True)
            )
        }
        self.inputs: dict[_Key, Any] = {
            (n, k): leaf
            for n, tree in enumerate(self._trees)
            for k, leaf in enumerate(tree.values)
            if holds_arrays(leaf) or type(leaf) in _NUMBERS
        }
        self.numbers = {
            (n, k): leaf
            for (n, k), leaf in self.inputs.items()
            if _is_number(leaf) and not (n in self.own and is_differentiable(leaf))
        }

    def hold_parameters(self) -> bool:
        """Whether there is anything to differentiate."""
        return any(n in self.own for n, _ in {*self.inputs} - {*self.numbers})

    def constant_numbers(self, names: Mapping[int, str]) -> dict[str, Any]:
        """The numbers that are no inputs, by their names.

        Args:
            names: the names of the arguments, by their position.
        """
        return {
            self._name_of((n, k), names): number
            for (n, k), number in self.numbers.items()
            if (n, k) not in self.inputs
        }

    def _name_of(self, key: _Key, names: Mapping[int, str]) -> str:
        """What a user calls a leaf of the arguments: ``'step'``, ``'config/steps'``."""
        n, k = key
        keys = self._trees[n].key_paths[k]
        path = jax.tree_util.keystr(keys, simple=True, separator='/')
        if n == len(self._trees) - 1:  # A keyword argument.
            return path
        return '/'.join(filter(None, (names.get(n, f'argument {n}'), path)))

    def restored(self, arrays: Mapping[_Key, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments and keyword arguments, with tracers in place of ``inputs``."""
        *args, kwargs = (
            tree.restore(
                self._selected((n, k), arrays[n, k]) if (n, k) in arrays else leaf
                for k, leaf in enumerate(tree.values)
            )
            for n, tree in enumerate(self._trees)
        )
        return args, kwargs

    def _selected(self, key: _Key, array: Array) -> Array:
        """An input, stopped where ``wrt`` does not mean it.

        An argument that is not differentiated needs no stop.
        """
        if key not in self._decisions:
            return array
        path, decision = self._decisions[key]
        return array if decision is True else _stopped(array, decision, path)

    def parameters(self) -> list[Parameter]:
        """The parameters, without what is no array."""
        of_state = itertools.chain(*(states(tree.tree) for tree in self.own.values()))
        slots = self._slots()
        return [
            Parameter(path, slots[key], decision)
            for (key, (path, decision)), is_state in zip(
                self._decisions.items(), of_state, strict=True
            )
            if key in slots
            and key not in self.numbers
            and not _is_left_out(decision, is_state)
        ]

    def _slots(self) -> dict[_Key, tuple[int, ...]]:
        """The indices of the arrays of each input; a random key holds one, too."""
        indices = itertools.count()
        return {
            key: tuple(itertools.islice(indices, len(jax.tree.leaves(leaf))))
            for key, leaf in self.inputs.items()
        }


def _is_left_out(decision: bool | filters.Part, is_state: bool) -> bool:
    """Whether a report does not name a leaf.

    Batch statistics of an NNX model stand beside its parameters. They would be rows of
    the report that nobody asked for, unless ``wrt`` names them.
    """
    return is_state and decision is False


def _is_number(leaf: Leaf) -> bool:
    """Whether a leaf is one number, and no array of JAX, whose value has no answer."""
    is_scalar = isinstance(leaf, np.generic) and leaf.dtype.kind in 'iufc'
    return is_scalar or type(leaf) in _NUMBERS


def _stopped(array: Array, decision: bool | filters.Part, path: Path) -> Array:
    """A parameter that ``wrt`` does not mean, or of which it means a part alone."""
    with jax.named_scope(f'{BLOCK}wrt=, which leaves it out'):
        fixed = jax.tree.map(lax.stop_gradient, array)
        return filters.merged(decision, array, fixed, path)


def holds_arrays(leaf: Leaf) -> bool:
    """Whether a leaf is an array for JAX; ``NonDifferentiable`` has arrays in it."""
    arrays = jax.tree.leaves(leaf)
    return bool(arrays) and all(
        x.dtype.kind in 'biufcV'
        if isinstance(x, (np.ndarray, np.generic))
        else isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
        for x in arrays
    )

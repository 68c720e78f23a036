"""The trace of a function: its program, and the parameters and outputs of that."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from flax_sg import errors, filters
from flax_sg.errors.texts import listed
from flax_sg.filters.paths import Path
from flax_sg.flow.function import Function, outputs_of
from flax_sg.internals.jaxprs import BLOCK
from flax_sg.internals.types import Array, Kwargs, Leaf, PyTree
from flax_sg.programs import sources
from flax_sg.trees.leaf_types import holds_arrays
from flax_sg.trees.leaves import arguments_of, is_differentiable, leaves_of, shape_of
from flax_sg.trees.trainable import Declared, chosen, states


class Parameter(NamedTuple):
    """A leaf of the differentiated arguments.

    Attributes:
        path: its path.
        slots: the indices of its arrays among the inputs of the program.
    """

    path: Path
    slots: tuple[int, ...]


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
        may_have_aux: whether the function returns a tuple that begins with one number,
            as ``(loss, new_statistics)``.
        returns_parameters: whether it returns a tree like its parameters, as
            ``jax.grad`` does.
        constant: what to write for the first int that never changes; ``''`` if there is
            no int.
    """

    program: ClosedJaxpr
    outputs: tuple[str, ...]
    parameters: list[Parameter]
    arguments: tuple[tuple[int, str], ...]
    name: str
    may_have_aux: bool
    returns_parameters: bool
    constant: str


def trace_of(
    call: str,
    fun: Callable[..., Any],
    args: Sequence[Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    wrt: filters.Where | Declared,
    kwargs: Kwargs,
) -> Traced:
    """Traces a function and finds its parameters; see ``gradient_flow``.

    Before its arguments comes what the user calls: ``'sg.live(loss, params)'``.
    """
    function = Function(call, fun, has_aux, kwargs)
    if not isinstance(wrt, Declared):
        wrt = filters.named(filters.as_filter(wrt), 'trained', 'wrt={}')
    inputs = _Inputs(function, args, kwargs, argnums, wrt)
    if not inputs.of_parameters:
        raise errors.ArgumentTypeError(
            f'{function.name} has no parameters: argument '
            f'{", ".join(map(str, inputs.own))} holds no arrays.\n'
            f'Write {call}, with arrays or their shapes; argnums=1 says which argument '
            'holds them.'
        )
    outputs: list[str] = []
    returns_parameters: list[bool] = []

    # JAX's errors name the function of the user.
    @functools.wraps(function.run, updated=())
    def of_arrays(arrays: dict[_Key, Array]) -> list[Array]:
        out = function.returned(*inputs.restored(arrays))
        returns_parameters.append(inputs.are_like(out))
        outputs[:], leaves = outputs_of(out)
        return leaves

    try:
        program = jax.make_jaxpr(of_arrays)(inputs.leaves)
    except Exception as error:
        if numbers := inputs.asked_for(str(error)):
            raise inputs.are_traced(numbers) from error
        raise
    if not outputs:
        raise errors.ArgumentTypeError(
            f'{function.name} returns nothing: no gradient can come from there.\n'
            f'Return the loss, or several in a dict, and write {call}.'
        )
    own = () if isinstance(argnums, int) else inputs.own
    return Traced(
        program=program,
        outputs=tuple(outputs),
        parameters=inputs.parameters(),
        arguments=tuple((n, inputs.names[n]) for n in own if n in inputs.names),
        name=function.name,
        may_have_aux=function.may_have_aux,
        returns_parameters=returns_parameters == [True],
        constant=next(map(inputs.constant, inputs.ints), ''),
    )


# A number of Python may be another one at the next step. A bool is a flag.
_NUMBERS = int, float, complex
# A leaf of the arguments: the position of its argument, and its index in that.
_Key: TypeAlias = tuple[int, int]


class _Inputs:
    """The arguments of a function, as the inputs of its program.

    Attributes:
        own: the arguments that hold parameters, by their position.
        leaves: the leaves that are traced. All others are constants of the program.
        numbers: those that are one number of Python or NumPy. The weight of a loss, or
            a step, may be 0 now, and another number later.
        ints: the ints among these, such as a step beside the parameters.
        of_parameters: the leaves that hold parameters.
        names: the names of the arguments, by their position; those that are given by
            name stand behind.
    """

    def __init__(
        self,
        function: Function,
        args: Sequence[Any],
        kwargs: Kwargs,
        argnums: int | Sequence[int],
        wrt: filters.Filter | Declared,
    ) -> None:
        self.own = arguments_of(args, argnums)
        self.names = sources.names_of_arguments(function.run)
        self.names |= enumerate(kwargs, len(args))
        self._function, self._keywords = function, list(kwargs)
        everything = enumerate((*args, *kwargs.values()))
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
        self.leaves: dict[_Key, Any] = {
            (n, k): leaf
            for n, tree in enumerate(self._trees)
            for k, leaf in enumerate(tree.values)
            if holds_arrays(leaf) or type(leaf) in _NUMBERS
        }
        self.numbers = {k: leaf for k, leaf in self.leaves.items() if _is_number(leaf)}
        self.ints = [k for k, x in self.numbers.items() if not is_differentiable(x)]
        of_own = {key for key in self.leaves if key[0] in self.own}
        self.of_parameters = of_own.difference(self.ints)

    def asked_for(self, error: str) -> list[_Key]:
        """The numbers whose values a function asks for, as the text of an error tells.

        JAX names all inputs that a value depends on: ``args[0][(1, 0)]``. Others, such
        as a dict without this key, tell that it is a tracer: of an int, in most cases.
        """
        if not re.search('trace[rd]', error, re.IGNORECASE):
            return []
        found = re.findall(r'\[\((\d+), (\d+)\)\]', error)
        keys = [(int(n), int(k)) for n, k in found] or self.ints or [*self.numbers]
        return keys if all(key in self.numbers for key in keys) else []

    def are_traced(self, numbers: Sequence[_Key]) -> errors.ArgumentTypeError:
        """The error for a function that asks for the values of numbers."""
        names = listed([self._name_of(key) for key in numbers])
        return errors.ArgumentTypeError(
            f'{self._function.name} asks for the value of {names}.\n'
            'A number of Python is traced, as under jax.jit: it may be another one at '
            'the next step.\n'
            f'If it never changes, {self.constant(numbers[0])}.'
        )

    def constant(self, number: _Key) -> str:
        """What to write for a number that never changes."""
        n, fun = number[0], self._function.called
        argument, _, inside = self._name_of(number).partition('/')
        has_arrays = any(x == n for x, _ in self.leaves.keys() - self.numbers)
        if n in self.own or has_arrays or n not in self.names:
            return f'leave it out of the arguments, and let {fun} close over it'
        value = argument if inside else repr(self.numbers[number])
        by_position = range(n + 1, len(self._trees) - len(self._keywords))
        after = [self.names[k] for k in by_position if k in self.names]
        by_name = f', and give {listed(after)} by name' if after else ''
        return f'write functools.partial({fun}, {argument}={value}){by_name}'

    def are_like(self, out: PyTree) -> bool:
        """Whether what a function returns has the names and shapes of its parameters.

        One array may be like another by chance. ``jax.value_and_grad`` returns a pair.
        """
        parts = [out, *out[1:2]] if type(out) is tuple else [out]
        own = {
            path: shape_of(self.leaves[key])
            for key, (path, is_meant) in self._decisions.items()
            if is_meant is not False
        }
        found = [
            {path: shape_of(x) for path, x in leaves_of(part) if is_differentiable(x)}
            for part in parts
        ]
        return bool(own) and '' not in own and own in found

    def _name_of(self, key: _Key) -> str:
        """What a user calls a leaf of the arguments: ``'step'``, ``'config/steps'``."""
        n, k = key
        keys = self._trees[n].key_paths[k]
        path = jax.tree_util.keystr(keys, simple=True, separator='/')
        return '/'.join(filter(None, (self.names.get(n, f'argument {n}'), path)))

    def restored(self, arrays: Mapping[_Key, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments and keyword arguments, with tracers in place of ``leaves``."""
        trees = [
            tree.restore(
                self._selected((n, k), arrays[n, k]) if (n, k) in arrays else leaf
                for k, leaf in enumerate(tree.values)
            )
            for n, tree in enumerate(self._trees)
        ]
        first = len(trees) - len(self._keywords)
        return trees[:first], dict(zip(self._keywords, trees[first:], strict=True))

    def _selected(self, key: _Key, array: Array) -> Array:
        """An input, stopped where ``wrt`` does not mean it.

        An argument that is not differentiated needs no stop. A float of Python that
        is left out is what it is: the field of a model, whose value a method may ask.
        """
        if key not in self._decisions:
            return array
        path, decision = self._decisions[key]
        if decision is False and type(self.leaves[key]) is float:
            return self.leaves[key]
        return array if decision is True else _stopped(array, decision, path)

    def parameters(self) -> list[Parameter]:
        """The parameters, without what is no array."""
        of_state = itertools.chain(*(states(tree.tree) for tree in self.own.values()))
        slots = self._slots()
        return [
            Parameter(path, slots[key])
            for (key, (path, decision)), is_state in zip(
                self._decisions.items(), of_state, strict=True
            )
            if key in self.of_parameters and not _is_left_out(decision, is_state)
        ]

    def _slots(self) -> dict[_Key, tuple[int, ...]]:
        """The indices of the arrays of each input; a random key holds one, too."""
        indices = itertools.count()
        return {
            key: tuple(itertools.islice(indices, len(jax.tree.leaves(leaf))))
            for key, leaf in self.leaves.items()
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

"""The trace of a function: its program, and the parameters and outputs of that."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen
from jax import lax
from jax.extend.core import ClosedJaxpr

from flax_sg import errors, filters
from flax_sg.errors.texts import brief, shown, wrong_argument
from flax_sg.filters import predicates
from flax_sg.filters.paths import Path, natural_key
from flax_sg.flow.rows import unique
from flax_sg.internals.jaxprs import BLOCK
from flax_sg.trees.leaves import arguments_of, is_differentiable, leaves_of, path_of
from flax_sg.trees.trainable import Declared, chosen, states

# The name of an output that is not in a tree.
ALONE = 'output'


class Traced(NamedTuple):
    """A function that was traced on shapes.

    Attributes:
        program: from the arrays in the arguments to those that are returned, without
            ``aux``. Parameters that nobody asks about are stopped where they come in.
        outputs: the name of each array that is returned.
        parameters: the path of each leaf of the differentiated arguments, and the
            numbers of its arrays among the inputs of the program.
        arguments: if several arguments hold parameters, the number of each, and the
            name that the function gives it.
    """

    program: ClosedJaxpr
    outputs: tuple[str, ...]
    parameters: list[tuple[Path, tuple[int, ...]]]
    arguments: tuple[tuple[int, str], ...]


def traced(
    fun: Callable[..., Any],
    args: Sequence[Any],
    argnums: int | Sequence[int],
    has_aux: bool,
    wrt: filters.Where | Declared,
    kwargs: Mapping[str, Any],
) -> Traced:
    """Traces a function once and finds its parameters; see ``gradient_flow``.

    Python numbers in the differentiated arguments are traced. In the other arguments
    they are constants.
    """
    function = _Function(fun, args, has_aux, kwargs)
    if not isinstance(wrt, Declared):
        wrt = filters.named(filters.as_filter(wrt), 'trained', 'wrt={}')
    own = arguments_of(args, argnums)
    takes = dict(zip(own, chosen([*own.values()], wrt), strict=True))
    trees = {n: own.get(n) or leaves_of(arg) for n, arg in enumerate((*args, kwargs))}
    inputs = {
        (n, k): leaf
        for n, tree in trees.items()
        for k, leaf in enumerate(tree.values)
        if holds_arrays(leaf) or (n in own and is_differentiable(leaf))
    }
    if not any(n in own for n, _ in inputs):
        raise errors.ArgumentTypeError(
            f'{function.name} has no parameters: argument '
            f'{", ".join(map(str, own))} holds no arrays.\n'
            'Give arrays or their shapes, and say which argument holds them: argnums=1.'
        )
    # Of each leaf of the differentiated arguments the path, and what ``wrt`` says.
    asked = {
        (n, k): (path, said)
        for n, tree in own.items()
        for k, (path, said) in enumerate(zip(tree.paths, takes[n], strict=True))
    }
    names: list[str] = []

    # JAX's errors name the function of the user.
    @functools.wraps(function.run, updated=())
    def of_arrays(arrays: dict[Any, Any]) -> list[Any]:
        for key in asked.keys() & arrays.keys():
            path, said = asked[key]
            if said is not True:
                arrays[key] = _stopped(arrays[key], said, path)
        *values, options = (
            tree.restore(arrays.get((n, k), leaf) for k, leaf in enumerate(tree.values))
            for n, tree in trees.items()
        )
        names[:], leaves = function.outputs(values, options)
        return leaves

    program = jax.make_jaxpr(of_arrays)(inputs)
    if not names:
        raise errors.ArgumentTypeError(
            f'{function.name} returns nothing: no gradient can come from there.\n'
            'Return the loss, or several in a dict.'
        )
    numbers = itertools.count()
    slots = {
        key: tuple(itertools.islice(numbers, len(jax.tree.leaves(leaf))))
        for key, leaf in inputs.items()
    }
    # The state of an NNX model, such as batch statistics, is left out.
    of_state = itertools.chain(*(states(tree.tree) for tree in own.values()))
    parameters = [
        (path, slots[key])
        for (key, (path, said)), is_state in zip(asked.items(), of_state, strict=True)
        if key in slots and (said or not is_state)
    ]
    arguments = {} if isinstance(argnums, int) else _names_of(function.run)
    named = tuple((n, arguments[n]) for n in own if n in arguments)
    return Traced(program, tuple(names), parameters, named)


class _Function:
    """What is called: a function, or a module of linen.

    Attributes:
        run: the function.
        name: what the user calls it.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: Sequence[Any],
        has_aux: bool,
        kwargs: Mapping[str, Any],
    ) -> None:
        is_module = isinstance(fun, linen.Module)
        if not callable(fun) and not is_module:
            write = 'the function itself, then its arguments: sg.live(loss, params)'
            raise wrong_argument(fun, 'function', write)
        if is_module and args and not isinstance(args[0], Mapping):
            raise errors.ArgumentTypeError(
                f'{type(fun).__name__} was given {brief(args[0])} as its variables.\n'
                'A module of linen has none in itself: give them before its inputs.\n'
                'Write sg.live(model, variables, x), with variables = '
                'model.init(key, x); the same for sg.gradient_flow.'
            )
        self.run: Any = fun.apply if isinstance(fun, linen.Module) else fun
        self.name = type(fun).__name__ if is_module else predicates.describe(fun)
        self._has_aux = has_aux
        # What a module writes comes back beside its output.
        self._writes = is_module and kwargs.get('mutable', False) is not False

    def outputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[str], list[Any]]:
        """Calls it; the names of what it returns without ``aux``, and the arrays."""
        out = self.run(*args, **kwargs)
        out = out[0] if self._writes else out
        if self._has_aux:
            if not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(
                    'With has_aux=True the function has to return a pair (outputs, '
                    f'aux), but {self.name} returned {shown(out)}.'
                )
            out = out[0]
        pairs = jax.tree_util.tree_leaves_with_path(out)
        # JAX sorts the keys of dicts as text. People count: loss_2, loss_10.
        keys_of = itertools.chain(*(keys for keys, _ in pairs))
        if all(isinstance(key, jax.tree_util.DictKey) for key in keys_of):
            pairs.sort(key=lambda pair: natural_key(path_of(pair[0])))
        names = unique([path_of(keys) for keys, _ in pairs])
        return [name or ALONE for name in names], [leaf for _, leaf in pairs]


def _names_of(fun: Callable[..., Any]) -> dict[int, str]:
    """The names that a function gives its arguments, by their position."""
    try:
        several = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):  # Written in C.
        return {}
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return {n: one.name for n, one in enumerate(several) if one.kind in kinds}


def _stopped(leaf: Any, said: bool | filters.Part, path: Path) -> Any:
    """A leaf of which nobody asks for the gradient, or for that of a part alone."""
    with jax.named_scope(f'{BLOCK}wrt=, which leaves it out'):
        fixed = jax.tree.map(lax.stop_gradient, leaf)
        return filters.merged(said, leaf, fixed, path) if said else fixed


def holds_arrays(leaf: Any) -> bool:
    """Whether a leaf is an array for JAX; ``NonDifferentiable`` has arrays in it."""
    arrays = jax.tree.leaves(leaf)
    return bool(arrays) and all(
        x.dtype.kind in 'biufcV'
        if isinstance(x, (np.ndarray, np.generic))
        else isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
        for x in arrays
    )

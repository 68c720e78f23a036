"""``precompute``: what is not trained is computed once, and not at every step."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from flax_sg import errors, filters
from flax_sg.ahead.split import Split, split
from flax_sg.trees.leaves import Leaves, arguments_of, is_absent, leaves_of
from flax_sg.trees.trainable import DECLARED, Declared, chosen


@dataclasses.dataclass(frozen=True, eq=False)
class Precomputed:
    """A function in two, see ``precompute``."""

    _split: Split
    _trees: dict[int, Leaves]
    _first: dict[tuple[int, int], tuple[int, ...]]
    _params: tuple[int, ...]
    _each: tuple[int, ...]
    _out: Any

    @property
    def kept(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of what is kept."""
        avals = (self._split.avals[n] for n in self._split.kept)
        return tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)

    def early(self, *args: Any) -> list[Any]:
        """Computes once what is kept, of the arguments but for those in ``each=``."""
        numbers = [n for n in self._trees if n not in self._each]
        values = self._values(numbers, args, 'early')
        return self._split.run(self._split.early, values, self._split.kept)

    def late(self, *args: Any) -> Any:
        """The function, of its parameters, what is kept, and what is in ``each=``."""
        first = len(self._params)
        numbers = [*self._params, *self._each]
        if len(args) != len(numbers) + 1:
            raise TypeError(self._miscounted('late', len(numbers) + 1, len(args)))
        values = self._values(numbers, (*args[:first], *args[first + 1 :]), 'late')
        kept = jax.tree.leaves(args[first])
        if [(x.shape, x.dtype) for x in kept] != [
            (x.shape, x.dtype) for x in self.kept
        ]:
            raise errors.ArgumentTypeError(
                'What is kept has other shapes than precompute was traced with.\n'
                'Give what early returned for arguments of these shapes, or call '
                'sg.precompute again with the new shapes.'
            )
        values.update(zip(self._split.kept, kept, strict=True))
        out = self._split.run(self._split.late, values, self._split.outputs)
        return jax.tree.unflatten(self._out, out)

    def _miscounted(self, name: str, right: int, given: int) -> str:
        return f'{name} takes {right} arguments, and was given {given}.'

    def _values(
        self, numbers: Sequence[int], args: Sequence[Any], name: str
    ) -> dict[int, Any]:
        """The inputs of the program that some arguments hold."""
        if len(args) != len(numbers):
            raise TypeError(self._miscounted(name, len(numbers), len(args)))
        values: dict[int, Any] = {}
        for n, arg in zip(numbers, args, strict=True):
            traced, given = self._trees[n], leaves_of(arg)
            if given.treedef != traced.treedef:
                raise errors.ArgumentTypeError(
                    f'Argument {n} has another structure than precompute was traced '
                    f'with.\nIt was {traced.treedef}, and is {given.treedef}.\n'
                    'Give such a tree, with sg.ABSENT where a leaf is not read.'
                )
            for k, leaf in enumerate(given.values):
                slots = self._first.get((n, k), ())
                if is_absent(leaf):
                    continue
                for slot, array in zip(slots, jax.tree.leaves(leaf), strict=True):
                    aval = self._split.avals[slot]
                    if jax.typeof(array).shape != aval.shape or (
                        jax.typeof(array).dtype != aval.dtype
                    ):
                        raise errors.ArgumentTypeError(
                            f'{traced.paths[k] or "An array"} in argument {n} is '
                            f'{jax.typeof(array)}, and was traced as {aval}.\n'
                            'Call sg.precompute again with the new shapes.'
                        )
                    values[slot] = array
        return values


def precompute(
    fun: Callable[..., Any],
    params: Any,
    *args: Any,
    argnums: int | Sequence[int] = 0,
    wrt: filters.Where | Declared = DECLARED,
    each: int | Sequence[int] = (),
) -> Precomputed:
    """Splits a function: what depends on nothing that changes is computed once.

    >>> import jax, jax.numpy as jnp, flax_sg as sg
    >>> from flax_sg.ahead import precompute
    >>> def loss(params, x):
    ...     return jnp.sum(x @ params['body'] @ params['head'])
    >>> params, x = {'body': jnp.ones((4, 2)), 'head': jnp.ones(2)}, jnp.ones((3, 4))
    >>> ahead = precompute(loss, params, x, wrt='head')
    >>> ahead.kept
    (ShapeDtypeStruct(shape=(3, 2), dtype=float32),)
    >>> kept = ahead.early(params, x)
    >>> sg.grad(ahead.late, wrt='head')(params, kept)
    {'body': ABSENT, 'head': Array([12., 12.], dtype=float32)}

    Args:
        fun: a function of arrays, without effects in what is computed once.
        params: its first argument, or the shapes.
        *args: its other arguments, or their shapes. Those not in ``each`` are data.
        argnums: which arguments hold the parameters.
        wrt: the parameters that are trained: those that change from step to step. A
            leaf of which some rows are trained changes as a whole.
        each: the numbers of other arguments that change: keys, a step, a state.

    Returns:
        An object with two functions. ``early`` takes the arguments but for those in
        ``each``, and returns what is kept. ``late`` takes the arguments of
        ``argnums``, then what is kept, then those in ``each``.

    Raises:
        ArgumentTypeError: when ``each`` names parameters, when an effect would be
            computed once, or for arguments of another structure or shape than traced.
    """
    args = (params, *args)
    own = arguments_of(args, argnums)
    count = len(args)
    each = [each] if isinstance(each, int) else each
    changing = tuple(range(count)[n] for n in each)
    if own.keys() & set(changing):
        raise errors.ArgumentTypeError(
            f'each={tuple(each)} names argument {min(own.keys() & set(changing))}, '
            'which holds the parameters.\nWhich of them change, wrt= says.\n'
            'Leave it out of each=.'
        )
    trained = dict(zip(own, chosen([*own.values()], wrt), strict=True))
    trees = {n: leaves_of(arg) for n, arg in enumerate(args)}
    inputs = {
        (n, k): leaf
        for n, tree in trees.items()
        for k, leaf in enumerate(tree.values)
        if hasattr(leaf, 'shape') or (isinstance(leaf, (int, float, complex)))
    }
    form: list[Any] = []

    def of_leaves(leaves: dict[tuple[int, int], Any]) -> list[Any]:
        out = fun(
            *(
                tree.restore(leaves.get((n, k), x) for k, x in enumerate(tree.values))
                for n, tree in trees.items()
            )
        )
        values, treedef = jax.tree.flatten(out)
        form.append(treedef)
        return values

    program = jax.make_jaxpr(of_leaves)(inputs)
    first: dict[tuple[int, int], tuple[int, ...]] = {}
    changes, is_data = list[bool](), list[bool]()
    for n, k in sorted(inputs):
        some = range(len(changes), len(changes) + len(jax.tree.leaves(inputs[n, k])))
        first[n, k] = tuple(some)
        is_changing = n in changing or (n in own and bool(trained[n][k]))
        changes += [is_changing] * len(some)
        is_data += [n not in own] * len(some)
    parts = split(program, changes, is_data)
    if not parts.kept:
        warnings.warn(
            'Nothing is kept: all that fun computes from data reads what changes.',
            stacklevel=2,
        )
    return Precomputed(parts, trees, first, tuple(own), changing, form[0])

"""The arguments of a function that was traced, and what is given in their places."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from flax_sg import errors, filters
from flax_sg.errors.texts import shown
from flax_sg.internals import jaxprs
from flax_sg.internals.types import Array, Aval, Kwargs, Leaf, PyTree, TreeDef
from flax_sg.trees.leaf_types import holds_arrays, is_variable
from flax_sg.trees.leaves import ABSENT, Leaves, is_absent, is_whole, leaves_of

# A position, or the name of an argument that is given by name.
Name: TypeAlias = int | str


class Run(NamedTuple):
    """Rows of a leaf, all of them trained or none."""

    start: int
    stop: int
    is_trained: bool


class Argument(NamedTuple):
    """An argument: its structure, and what stands for its leaves. It keeps no array.

    Attributes:
        name: its position, or its name if it is given by name.
        word: its name in the signature; empty if it has none.
        treedef: its structure.
        paths: the path of each leaf.
        slots: for each leaf the inputs of the program that hold its arrays; empty for a
            leaf that is a constant of the trace.
        constants: these leaves by their number. Others in their place are refused.
        runs: for leaves of which some rows are trained the runs of rows.
    """

    name: Name
    word: str
    treedef: TreeDef
    paths: list[str]
    slots: list[tuple[int, ...]]
    constants: dict[int, Leaf]
    runs: Mapping[int, Sequence[Run]]

    @classmethod
    def of(
        cls,
        name: Name,
        word: str,
        tree: Leaves,
        takes: Sequence[Any],
        inputs: dict[str, Array],
    ) -> Argument:
        """Takes an argument apart, and adds its arrays to the inputs of a program.

        Args:
            name: its position or its name.
            word: its name in the signature.
            tree: its leaves.
            takes: for each leaf whether it changes, or which part of it. Of numbers of
                Python these are traced, and those in a Variable of NNX, which the
                function may write. Others are constants.
            inputs: the inputs so far, by what an error of JAX calls them.
        """
        paths, runs = [*map(str, tree.paths)], _runs_in(tree, takes)
        argument = cls(name, word, tree.treedef, paths, [], {}, runs)
        holders = argument.holders(tree.tree)
        for number, leaf in enumerate(tree.values):
            arrays = jax.tree.leaves(leaf)
            if number in runs:
                shape, dtype = leaf.shape[1:], leaf.dtype
                sizes = [run.stop - run.start for run in runs[number]]
                arrays = [jax.ShapeDtypeStruct((n, *shape), dtype) for n in sizes]
            first, where = len(inputs), argument.at(number)
            is_new = takes[number] is not False or is_variable(holders[number])
            if holds_arrays(leaf) or (is_number(leaf) and is_new):
                for array in arrays:  # Two paths may have the same text.
                    inputs[f'{where}, {len(inputs)}' if where in inputs else where] = (
                        array
                    )
            elif not is_absent(leaf):
                argument.constants[number] = leaf
            argument.slots.append(tuple(range(first, len(inputs))))
        return argument

    @property
    def title(self) -> str:
        """What the argument is called in a report or an error."""
        if isinstance(self.name, str):
            return f'{self.name}='
        return f'argument {self.name}' + (f' ({self.word})' if self.word else '')

    @property
    def as_written(self) -> str:
        """How the argument is given in a call."""
        if isinstance(self.name, str):
            return f'{self.name}={self.name}'
        return self.word or f'args[{self.name}]'

    def new(self, takes: Sequence[Any]) -> Iterator[int]:
        """Yields the inputs of the program that hold what changes, runs of rows apart.

        Args:
            takes: as for ``of``.
        """
        for n, (slots, take) in enumerate(zip(self.slots, takes, strict=True)):
            are_trained = [run.is_trained for run in self.runs.get(n, ())]
            are_new = are_trained or [take is not False] * len(slots)
            yield from itertools.compress(slots, are_new)

    def restored(self, tree: Leaves, inputs: Sequence[Array]) -> PyTree:
        """The argument with the inputs of a program for its arrays."""
        leaves: list[Any] = []
        for number, leaf in enumerate(tree.values):
            arrays = [inputs[n] for n in self.slots[number]]
            if number in self.runs:
                leaf = jnp.concatenate(arrays)
            elif arrays:
                leaf = jax.tree.unflatten(jax.tree.structure(leaf), arrays)
            leaves.append(leaf)
        return tree.restore(leaves)

    def values(
        self, argument: PyTree, avals: Sequence[Aval]
    ) -> Iterator[tuple[int, Array]]:
        """Yields the inputs of the program that an argument holds, with their numbers.

        A leaf, or a whole subtree, may be ``ABSENT``.

        Args:
            argument: the argument.
            avals: the type of each input.

        Raises:
            ArgumentTypeError: if it is of another structure or type than was traced.
        """
        for number, leaf in enumerate(self._leaves(argument)):
            if is_absent(leaf):
                continue
            if number in self.constants:
                self._check_constant(number, leaf)
            arrays = jax.tree.leaves(leaf) if self.slots[number] else []
            if number in self.runs:
                arrays = [leaf[run.start : run.stop] for run in self.runs[number]]
            for slot, array in zip(self.slots[number], arrays, strict=True):
                dtype = avals[slot].dtype
                if type(array) is int and jnp.issubdtype(dtype, jnp.inexact):
                    array = float(array)  # min(1, step / k)
                check(self.at(number), array, avals[slot])
                is_array = hasattr(array, 'dtype')
                yield slot, array if is_array else jnp.asarray(array, dtype)

    def _leaves(self, argument: PyTree) -> list[Any]:
        tree = leaves_of(argument)
        if tree.treedef == self.treedef:
            return tree.values
        skeleton = jax.tree.unflatten(self.treedef, range(len(self.paths)))

        def spread(leaf: Leaf, below: PyTree) -> PyTree:
            return jax.tree.map(lambda _: ABSENT, below) if is_absent(leaf) else leaf

        try:
            whole = jax.tree.map(spread, tree.tree, skeleton, is_leaf=is_whole)
        except (ValueError, TypeError):
            whole = None
        values, treedef = jax.tree.flatten(whole, is_leaf=is_whole)
        if treedef == self.treedef:
            return values
        lacking = {*self.paths} - {*tree.paths}
        more = {*tree.paths} - {*self.paths}
        who = f'The tree in {self.title} is not the one that precompute was traced with'
        if not lacking and not more:
            raise errors.ArgumentTypeError(
                f'{who}: its paths are the same, and something else differs, such as '
                'a class, or a flag that eval() sets.\n'
                'Call sg.precompute again.'
            )
        raise errors.ArgumentTypeError(
            f'{who}: it lacks {min(lacking, default="nothing") or "one array"}, and '
            f'has {min(more, default="nothing") or "one array"} besides.\n'
            'Give such a tree, with sg.ABSENT for a leaf or a subtree that is not read.'
        )

    def holders(self, argument: PyTree) -> list[Any]:
        """For each leaf the Variable of NNX that holds it, or something else."""
        holders: list[Any] = []

        def note(holder: object, below: PyTree) -> None:
            holders.extend([holder] * len(jax.tree.leaves(below)))

        skeleton = jax.tree.unflatten(self.treedef, range(len(self.paths)))
        is_leaf = lambda x: is_variable(x) or is_whole(x)  # noqa: E731
        jax.tree.map(note, leaves_of(argument).tree, skeleton, is_leaf=is_leaf)
        return holders

    def _check_constant(self, number: int, leaf: Leaf) -> None:
        traced = self.constants[number]
        try:
            is_same = leaf is traced or bool(leaf == traced)
        except Exception:  # A class of the user may compare in any way.
            is_same = False
        if not is_same:
            advice = 'Give an array. Numbers of arguments in each= may change, too.'
            raise errors.ArgumentTypeError(
                f'{self.at(number)} is {shown(leaf)}, and was {shown(traced)} when '
                'precompute traced the function: it is a constant of the split.\n'
                f'{advice if is_number(traced) else "Call sg.precompute again."}'
            )

    def at(self, number: int) -> str:
        """Where a leaf is, for an error."""
        path = self.paths[number]
        if path:
            return f'{path} in {self.title}'
        return self.title.replace('argument', 'Argument')


def _runs_in(tree: Leaves, takes: Sequence[Any]) -> dict[int, list[Run]]:
    """For each leaf of which some rows are trained the runs of its rows."""
    runs_of: dict[int, list[Run]] = {}
    for n, (take, (path, leaf)) in enumerate(zip(takes, tree, strict=True)):
        shape = jnp.shape(leaf) if isinstance(take, filters.Part) else ()
        mask = None
        with contextlib.suppress(errors.PartError):  # Where a program tells which.
            mask = take.mask(shape, path) if shape else None
        if mask is None:
            continue
        trained = np.asarray(mask.any(tuple(range(1, len(shape)))))
        ends = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
        if len(ends) > 2:
            pairs = itertools.pairwise(ends)
            runs_of[n] = [Run(*pair, bool(trained[pair[0]])) for pair in pairs]
    return runs_of


def is_number(leaf: Leaf) -> bool:
    """Whether a leaf is a number of Python. A bool is a flag."""
    return type(leaf) in (int, float, complex)


def check(where: str, array: Array, aval: Aval) -> None:
    """Raises if an array is not of the type that was traced.

    Args:
        where: what the array is called in the error.
        array: the array.
        aval: the type that was traced.

    Raises:
        ArgumentTypeError: if it is of another shape or dtype, is split otherwise on a
            mesh of explicit axes, or only one of the two is a shard in
            ``jax.shard_map``.
    """
    type_ = jax.typeof(array)
    is_alike = (type_.shape, type_.dtype) == (aval.shape, aval.dtype)
    if not is_alike or jaxprs.explicit_spec(type_) != jaxprs.explicit_spec(aval):
        again = 'the new shapes'
        if is_number(array):
            again = 'a float: 0.0 in place of 0'
        elif is_alike:
            again = 'such arrays, or with shapes that have their sharding='
        raise errors.ArgumentTypeError(
            f'{where} is {type_.str_short()}, and was traced as {aval.str_short()}.\n'
            f'Call sg.precompute again with {again}.'
        )
    if jaxprs.varying_axes(type_) != jaxprs.varying_axes(aval):
        raise errors.ArgumentTypeError(
            f'{where} is a shard here, and was none when precompute traced the '
            'function.\n'
            'jax.shard_map adds collectives while it traces a function, and early and '
            'late are traced already.\n'
            'Write jax.shard_map(..., check_vma=False), or call sg.precompute in the '
            'mapped function.'
        )


def named_in(
    each: Name | Sequence[Name],
    count: int,
    kwargs: Kwargs,
    own: Collection[Name],
    words: Mapping[int, str],
) -> tuple[Name, ...]:
    """The arguments that ``each=`` names, in the order in which it does.

    Args:
        each: positions and names.
        count: how many arguments are given by position.
        kwargs: those that are given by name.
        own: those that hold the parameters.
        words: the names in the signature, by position.
    """
    names = [each] if isinstance(each, (int, str)) else [*each]
    positions = {word: n for n, word in words.items() if n < count}
    named: list[Name] = []
    for name in names:
        if isinstance(name, str):
            name = positions.get(name, name)
        if name not in (*range(-count, count), *kwargs):
            raise errors.ArgumentTypeError(
                f'each={each!r} names {name!r}, and fun gets {count} arguments'
                f'{" and " + ", ".join(kwargs) if kwargs else ""}.\n'
                'Give positions, counted from 0, or names of arguments.'
            )
        named.append(name % count if isinstance(name, int) else name)
        if named[-1] in own:
            raise errors.ArgumentTypeError(
                f'each={each!r} names argument {name}, which holds the parameters.\n'
                'Which of them change, wrt= says.\n'
                'Leave it out of each=.'
            )
    return tuple(dict.fromkeys(named))

"""Arguments, split into leaves that are differentiated and leaves that are not."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_sg import errors, filters
from flax_sg.errors.texts import raised_by, wrong_argument
from flax_sg.filters.paths import Path
from flax_sg.internals import tracing
from flax_sg.trees.beside import beside, missing_leaf
from flax_sg.trees.leaves import (
    ABSENT,
    Leaves,
    check_unused,
    is_absent,
    is_whole,
    leaves_of,
)
from flax_sg.trees.nondifferentiable import NonDifferentiable
from flax_sg.trees.trainable import Declared, chosen

Shape: TypeAlias = tuple[int, ...]
_STAND_INS: dict[str, Any] = {
    'drop': ABSENT,
    'none': None,
    'masked': optax.MaskedNode(),
}


def _stand_in(absent: str, leaf: Any) -> tuple[Any, tuple[Any, ...]]:
    """What stands in a result for a leaf that is not differentiated.

    Returns:
        The structure of the stand-in, and the types of the zeros in it, if any.
    """
    has_zeros = isinstance(leaf, NonDifferentiable) or _is_number(leaf)
    other = _STAND_INS.get(absent, leaf if has_zeros else ABSENT)
    arrays, treedef = jax.tree.flatten(other)
    return treedef, tuple(map(jax.typeof, arrays))


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_
    return isinstance(leaf, (bool, int, float, complex))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Form:
    """What results and tangents look like: static, and hashable.

    Attributes:
        treedef: the structure of the tuple of arguments.
        live: for each leaf whether it is differentiated, or which part of it.
        paths: the path of each leaf, within its argument.
        stand_ins: what stands for each leaf that is not differentiated: a structure,
            and the types of the zeros in it.
    """

    treedef: Any
    live: tuple[Any, ...]
    paths: tuple[Path, ...]
    stand_ins: tuple[Any, ...]

    def fill(self, values: Iterable[Any], prefix: Shape = ()) -> tuple[Any, ...]:
        """A tree for each argument, with these values at the live leaves.

        Args:
            values: a value for each live leaf.
            prefix: dimensions that zeros have in front of the leaf's own.
        """
        rest = iter(values)
        return self.treedef.unflatten(
            next(rest)
            if live
            else treedef.unflatten(tracing.zeros_of(array, prefix) for array in arrays)
            for live, (treedef, arrays) in zip(self.live, self.stand_ins, strict=True)
        )

    def pick(self, trees: Sequence[Any], what: str) -> list[Any]:
        """The values of trees, one for each argument, at the live leaves.

        Args:
            trees: the trees.
            what: what the trees are, for errors.

        Raises:
            TypeError: if there are more or fewer trees than arguments.
            StructureError: if a tree has another structure than its argument, or
                nothing at a live leaf.
        """
        arguments = self.treedef.children()
        if len(trees) != len(arguments):
            raise TypeError(
                f'{what}: expected {len(arguments)}, one tree for each argument, got '
                f'{len(trees)}'
            )
        found: list[Any] = []
        for argument, tree in zip(arguments, trees, strict=True):
            leaves = leaves_of(argument.unflatten([ABSENT] * argument.num_leaves))
            needed = self.live[len(found) :]
            found += beside(leaves, tree, what, needed=needed, pruned=False).values
        live = self.of_live(found)
        for path, leaf in zip(self.of_live(self.paths), live, strict=True):
            if is_absent(leaf):
                raise missing_leaf(
                    what,
                    path,
                    'is differentiated',
                    'Give an array there, or leave the path out of wrt=.',
                )
        return live

    def of_live(self, values: Iterable[Any]) -> list[Any]:
        """Those of some values, one for each leaf, that belong to live leaves."""
        return list(itertools.compress(values, self.live))


@dataclasses.dataclass(frozen=True)
class Split:
    """The leaves of some arguments, and which of them are differentiated.

    Attributes:
        leaves: all leaves.
        form: what the arguments look like.
        where: the filter that has to select something; None if it may be without one.
    """

    leaves: list[Any]
    form: Form
    where: filters.Filter | None = None

    @property
    def live(self) -> list[Any]:
        """The leaves that are differentiated."""
        return self.form.of_live(self.leaves)

    def join(self, live: Iterable[Any]) -> tuple[Any, ...]:
        """The arguments, with other values for the leaves that are differentiated."""
        rest, form = iter(live), self.form
        return form.treedef.unflatten(
            filters.merged(takes, next(rest), leaf, path) if takes else leaf
            for takes, path, leaf in zip(
                form.live, form.paths, self.leaves, strict=True
            )
        )


def splitter(
    call: str, fun: Any, wrt: filters.Where | Declared, absent: str, unused: str
) -> Callable[[Iterable[Leaves]], Split]:
    """A function that splits arguments as the options of a gradient call say.

    >>> split = splitter('sg.grad', abs, 'w', 'none', 'raise')
    >>> parts = split([leaves_of({'b': 1.0, 'w': 2.0})])
    >>> parts.live, parts.join([5.0]), parts.form.fill([7.0])
    ([2.0], ({'b': 1.0, 'w': 5.0},), ({'b': None, 'w': 7.0},))

    Args:
        call: the name of the gradient call, for errors.
        fun: the function that it is given.
        wrt: the filter of the leaves that are differentiated.
        absent: what stands in results for the other leaves.
        unused: ``'raise'`` or ``'ignore'`` if a part of ``wrt`` matches nothing.

    Raises:
        ArgumentTypeError: if ``fun`` is no function.
        FilterTypeError: if ``wrt`` is no filter.
        FilterValueError: if ``absent`` is none of its choices.
        UnusedFilterError: if ``wrt`` is False or empty.
    """
    if not callable(fun):
        write = "sg.grad(loss, wrt='head/**')(params)"
        raise wrong_argument(fun, 'function to differentiate', write)
    if absent not in (*_STAND_INS, 'zeros'):
        raise errors.FilterValueError(
            f"absent={absent!r}: expected 'drop', 'none', 'zeros' or 'masked'."
        )
    check_unused(unused)
    where = wrt if isinstance(wrt, Declared) else filters.as_filter(wrt)
    # A filter that a program makes may well come to nothing, a plain [] may not.
    plain = not isinstance(wrt, filters.Filter)
    if plain and where == filters.Constant(False) and unused != 'ignore':
        raise errors.UnusedFilterError(
            f'{call}(wrt={wrt!r}) differentiates nothing: wrt= selects what has a '
            'gradient.\n'
            "Name the trained leaves, such as wrt='head/**', or pass unused='ignore'."
        )

    def split(arguments: Iterable[Leaves]) -> Split:
        trees = list(arguments)
        with raised_by(f'{call}(wrt=...)'):
            live = [takes for tree in chosen(trees, where, unused) for takes in tree]
        leaves = [leaf for tree in trees for leaf in tree.values]
        form = Form(
            jax.tree.structure(tuple(tree.tree for tree in trees), is_leaf=is_whole),
            tuple(live),
            tuple(path for tree in trees for path in tree.paths),
            tuple(_stand_in(absent, leaf) for leaf in leaves),
        )
        if unused == 'ignore' or isinstance(where, Declared):
            return Split(leaves, form)
        return Split(leaves, form, where)

    return split

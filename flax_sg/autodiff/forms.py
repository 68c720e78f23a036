"""Arguments, of which some leaves are differentiated, and results of their shape."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flax_sg import errors, filters
from flax_sg.filters.paths import Path
from flax_sg.trees.absent import ABSENT, is_absent, missing_leaf
from flax_sg.trees.leaves import Leaves, different_structures, leaves_of
from flax_sg.trees.nondifferentiable import NonDifferentiable
from flax_sg.trees.trainable import chosen

Shape: TypeAlias = tuple[int, ...]
_ABSENT: dict[str, Callable[[], Any]] = {
    'drop': lambda: ABSENT,
    'none': lambda: None,
    'masked': optax.MaskedNode,
}


def check_absent(absent: str) -> None:
    """Raises for a value of ``absent=`` that means nothing."""
    if absent not in (*_ABSENT, 'zeros'):
        raise errors.FilterValueError(
            f"absent={absent!r}: expected 'drop', 'none', 'zeros' or 'masked'."
        )


def stands_for_nothing(leaf: Any) -> bool:
    """Whether one of the things that ``absent=`` puts in place of a leaf."""
    return leaf is None or is_absent(leaf) or isinstance(leaf, optax.MaskedNode)


@dataclasses.dataclass(frozen=True)
class Tree:
    """What a result for one argument looks like: static, and hashable.

    Attributes:
        treedef: the structure.
        live: for each leaf whether it is differentiated, or which part of it.
        paths: the path of each leaf.
        zeros: the shapes and types of what ``absent='zeros'`` puts there; None where
            nothing can be put.
    """

    treedef: Any
    live: tuple[Any, ...]
    paths: tuple[Path, ...]
    zeros: tuple[Any, ...]

    @classmethod
    def of(cls, leaves: Leaves, live: Sequence[Any]) -> Tree:
        """The form of an argument."""
        zeros = tuple(map(_zeros_of, leaves.values))
        return cls(leaves.treedef, tuple(live), tuple(leaves.paths), zeros)

    def fill(self, values: Iterator[Any], absent: str, prefix: Shape = ()) -> Any:
        """A tree with the next values at its live leaves."""
        out: list[Any] = []
        for live, zeros in zip(self.live, self.zeros, strict=True):
            if live:
                out.append(next(values))
            elif absent == 'zeros':
                out.append(self.zero(zeros, prefix))
            else:
                out.append(_ABSENT[absent]())
        return self.treedef.unflatten(out)

    @staticmethod
    def zero(zeros: Any, prefix: Shape) -> Any:
        """What ``absent='zeros'`` puts in place of a leaf."""
        if zeros is None:
            return ABSENT
        (shapes, treedef) = zeros
        return treedef.unflatten([jnp.zeros((*prefix, *s), t) for s, t in shapes])

    def pick(self, tree: Any, what: str) -> list[Any]:
        """The values of a tree at the live leaves.

        Raises:
            StructureError: if it is no tree of this form.
            StructureError: if something is absent that is differentiated.
        """
        try:
            found = self.treedef.flatten_up_to(tree)
        except (ValueError, TypeError):
            given = leaves_of(tree)
            named = dict(zip(self.paths, self.paths, strict=True))
            raise different_structures(
                'the argument',
                what,
                named,
                given.by_path(),
                str(self.treedef),
                str(given.treedef),
            ) from None
        picked: list[Any] = []
        for live, path, leaf in zip(self.live, self.paths, found, strict=True):
            if live and stands_for_nothing(leaf):
                raise missing_leaf(
                    what,
                    path,
                    'is differentiated',
                    'Give an array there, or leave the path out of wrt=.',
                )
            if live:
                picked.append(leaf)
        return picked


def _zeros_of(leaf: Any) -> Any:
    """The shapes, types and structure of the zeros for a leaf."""
    if not isinstance(leaf, NonDifferentiable) and not _is_number(leaf):
        return None
    arrays, treedef = jax.tree.flatten(leaf)
    return tuple((np.shape(x), jnp.result_type(x)) for x in arrays), treedef


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, (bool, int, float, complex)):
        return True
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return False
    return jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_


@dataclasses.dataclass(frozen=True)
class Form:
    """What the results for some arguments look like: static, and hashable."""

    trees: tuple[Tree, ...]
    absent: str

    def fill(self, values: Sequence[Any], prefix: Shape = ()) -> tuple[Any, ...]:
        """A tree for each argument, with these values at the live leaves."""
        rest = iter(values)
        return tuple(tree.fill(rest, self.absent, prefix) for tree in self.trees)

    def pick(self, trees: Sequence[Any], what: str) -> list[Any]:
        """The values of trees, one for each argument, at the live leaves."""
        if len(trees) != len(self.trees):
            raise TypeError(
                f'{what}: expected {len(self.trees)}, one tree for each argument, got '
                f'{len(trees)}'
            )
        pairs = zip(self.trees, trees, strict=True)
        return [leaf for form, tree in pairs for leaf in form.pick(tree, what)]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of a gradient call, beside the function."""

    wrt: filters.Filter | None
    absent: str
    unused: str

    @classmethod
    def of(cls, wrt: filters.Where | None, absent: str, unused: str) -> Request:
        """The request in the words of a user."""
        check_absent(absent)
        return cls(None if wrt is None else filters.as_filter(wrt), absent, unused)

    def split(self, args: Sequence[Any]) -> Split:
        """Takes arguments apart."""
        leaves = [leaves_of(arg) for arg in args]
        masks = chosen(leaves, self.wrt, self.unused)
        pairs = list(zip(leaves, masks, strict=True))
        form = Form(tuple(Tree.of(tree, live) for tree, live in pairs), self.absent)
        return Split(tuple(args), tuple(leaves), form)


@dataclasses.dataclass(frozen=True)
class Split:
    """Some arguments, taken apart into leaves that are differentiated and others.

    Attributes:
        args: the arguments.
        leaves: the same, taken apart.
        form: what results for them look like.
    """

    args: tuple[Any, ...]
    leaves: tuple[Leaves, ...]
    form: Form

    @property
    def live(self) -> list[Any]:
        """The leaves that are differentiated."""
        pairs = zip(self.form.trees, self.leaves, strict=True)
        return [
            leaf
            for form, tree in pairs
            for live, leaf in zip(form.live, tree.values, strict=True)
            if live
        ]

    def join(self, live: Sequence[Any]) -> list[Any]:
        """The arguments with other values for the leaves that are differentiated."""
        rest = iter(live)
        return [
            tree.restore(
                filters.merged(take, next(rest), leaf, path) if take else leaf
                for take, path, leaf in zip(
                    form.live, tree.paths, tree.values, strict=True
                )
            )
            for form, tree in zip(self.form.trees, self.leaves, strict=True)
        ]

    def bind(self, fun: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
        """The function of the leaves that are differentiated, named as ``fun`` is."""

        @functools.wraps(fun, updated=())
        def fun_of_live(live: Sequence[Any]) -> Any:
            return fun(*self.join(live))

        return fun_of_live

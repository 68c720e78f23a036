"""Arguments, of which some leaves are differentiated, and results of their form."""

from __future__ import annotations

import dataclasses
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
_STAND_INS: dict[str, Any] = {
    'drop': ABSENT,
    'none': None,
    'masked': optax.MaskedNode(),
}


@dataclasses.dataclass(frozen=True)
class _Zeros:
    """Zeros for a leaf: the shapes and types of its arrays, and what holds these."""

    arrays: tuple[tuple[Shape, Any], ...]
    treedef: Any

    def fill(self, prefix: Shape) -> Any:
        zeros = [jnp.zeros((*prefix, *shape), dtype) for shape, dtype in self.arrays]
        return self.treedef.unflatten(zeros)


def _stand_in(absent: str, leaf: Any) -> Any:
    """What stands for a leaf in a result, as ``absent=`` says."""
    if absent != 'zeros':
        return _STAND_INS[absent]
    if not (isinstance(leaf, NonDifferentiable) or _is_number(leaf)):
        return ABSENT
    arrays, treedef = jax.tree.flatten(leaf)
    return _Zeros(tuple((np.shape(x), jnp.result_type(x)) for x in arrays), treedef)


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, (bool, int, float, complex)):
        return True
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return False
    return jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_


@dataclasses.dataclass(frozen=True)
class Form:
    """What a result for one argument looks like: static, and hashable.

    Attributes:
        treedef: the structure.
        live: for each leaf whether it is differentiated, or which part of it.
        paths: the path of each leaf.
        stand_ins: what stands for each leaf that is not differentiated.
    """

    treedef: Any
    live: tuple[Any, ...]
    paths: tuple[Path, ...]
    stand_ins: tuple[Any, ...]

    def fill(self, values: Iterator[Any], prefix: Shape = ()) -> Any:
        """A tree with the next values at its live leaves."""
        return self.treedef.unflatten(
            next(values)
            if live
            else other.fill(prefix)
            if isinstance(other, _Zeros)
            else other
            for live, other in zip(self.live, self.stand_ins, strict=True)
        )

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
            raise different_structures(
                'the argument',
                what,
                dict.fromkeys(self.paths),
                given.by_path(),
                str(self.treedef),
                str(given.treedef),
            ) from None
        leaves = zip(self.live, self.paths, found, strict=True)
        picked = [(path, leaf) for live, path, leaf in leaves if live]
        for path, leaf in picked:
            if leaf is None or is_absent(leaf) or isinstance(leaf, optax.MaskedNode):
                raise missing_leaf(
                    what,
                    path,
                    'is differentiated',
                    'Give an array there, or leave the path out of wrt=.',
                )
        return [leaf for _, leaf in picked]


def fill(
    forms: Sequence[Form], values: Sequence[Any], prefix: Shape = ()
) -> tuple[Any, ...]:
    """A tree for each argument, with these values at the live leaves."""
    rest = iter(values)
    return tuple(form.fill(rest, prefix) for form in forms)


def pick(forms: Sequence[Form], trees: Sequence[Any], what: str) -> list[Any]:
    """The values of trees, one for each argument, at the live leaves."""
    if len(trees) != len(forms):
        raise TypeError(
            f'{what}: expected {len(forms)}, one tree for each argument, got '
            f'{len(trees)}'
        )
    pairs = zip(forms, trees, strict=True)
    return [leaf for form, tree in pairs for leaf in form.pick(tree, what)]


@dataclasses.dataclass(frozen=True)
class Split:
    """Some arguments, taken apart into leaves that are differentiated and others.

    Attributes:
        leaves: the arguments, taken apart.
        forms: what results for them look like.
    """

    leaves: tuple[Leaves, ...]
    forms: tuple[Form, ...]

    @property
    def live(self) -> list[Any]:
        """The leaves that are differentiated."""
        return [
            leaf
            for form, tree in zip(self.forms, self.leaves, strict=True)
            for live, leaf in zip(form.live, tree.values, strict=True)
            if live
        ]

    def join(self, live: Sequence[Any]) -> list[Any]:
        """The arguments with other values for the leaves that are differentiated."""
        rest = iter(live)
        return [
            tree.restore(
                filters.merged(take, next(rest), leaf, path) if take else leaf
                for take, (path, leaf) in zip(form.live, tree, strict=True)
            )
            for form, tree in zip(self.forms, self.leaves, strict=True)
        ]


def splitter(
    wrt: filters.Where | None, absent: str, unused: str
) -> Callable[[Sequence[Any]], Split]:
    """What takes arguments apart, as the options of a gradient call say.

    Raises:
        FilterTypeError: if ``wrt`` is no filter.
        FilterValueError: if ``absent`` means nothing.
        UnusedFilterError: if ``wrt`` is False.
    """
    if absent not in (*_STAND_INS, 'zeros'):
        raise errors.FilterValueError(
            f"absent={absent!r}: expected 'drop', 'none', 'zeros' or 'masked'."
        )
    where = None if wrt is None else filters.as_filter(wrt)
    # A filter that a program makes may well come to nothing.
    if isinstance(wrt, (bool, np.bool_)) and not wrt and unused == 'raise':
        raise _nothing()

    def split(args: Sequence[Any]) -> Split:
        trees = tuple(map(leaves_of, args))
        forms = tuple(
            Form(
                tree.treedef,
                tuple(live),
                tuple(tree.paths),
                tuple(_stand_in(absent, leaf) for leaf in tree.values),
            )
            for tree, live in zip(trees, chosen(trees, where, unused), strict=True)
        )
        return Split(trees, forms)

    return split


def _nothing() -> errors.UnusedFilterError:
    """A gradient was asked for with respect to nothing."""
    return errors.UnusedFilterError(
        'wrt=False differentiates nothing: wrt= names what has a gradient.\n'
        'Name the trained leaves, such as wrt=~where for those that '
        "sg.freeze(tx, where) leaves, or pass unused='ignore'."
    )

"""Arguments, split into leaves that are differentiated and leaves that are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax

from flax_sg import errors, filters
from flax_sg.errors.texts import raised_by, unknown_choice, wrong_argument
from flax_sg.filters.paths import Path
from flax_sg.internals import tracing
from flax_sg.trees.leaves import (
    ABSENT,
    Leaves,
    check_unused,
    is_number,
    leaves_of,
)
from flax_sg.trees.nondifferentiable import NonDifferentiable
from flax_sg.trees.trainable import Declared, chosen


@dataclasses.dataclass(frozen=True)
class Split:
    """Some arguments, and which of their leaves are differentiated.

    Attributes:
        trees: the arguments.
        said: for each leaf of each whether it is differentiated, or which part of it.
        where: the filter that has to select something; None if it may be without one.
    """

    trees: list[Leaves]
    said: list[list[Any]]
    where: filters.Filter | None = None

    def _rows(self) -> Iterable[tuple[Any, Path, Any]]:
        for tree, said in zip(self.trees, self.said, strict=True):
            for takes, (path, leaf) in zip(said, tree, strict=True):
                yield takes, path, leaf

    @property
    def live(self) -> list[Any]:
        """The leaves that are differentiated."""
        return [leaf for takes, _, leaf in self._rows() if takes]

    @property
    def paths(self) -> list[Path]:
        """Their paths."""
        return [path for takes, path, _ in self._rows() if takes]

    def join(self, live: Iterable[Any]) -> list[Any]:
        """The arguments, with other values for the leaves that are differentiated."""
        new = iter(live)
        return [
            tree.restore(
                filters.merged(takes, next(new), leaf, path) if takes else leaf
                for takes, (path, leaf) in zip(said, tree, strict=True)
            )
            for tree, said in zip(self.trees, self.said, strict=True)
        ]

    def form(self, absent: str) -> Callable[[Iterable[Any]], tuple[Any, ...]]:
        """A function that puts gradients into trees; it keeps none of the leaves.

        Args:
            absent: what stands in the trees for the other leaves.
        """
        forms = [
            (
                leaves_of(tree.restore([ABSENT] * len(said))),
                [
                    _LIVE if takes else _other(absent, leaf)
                    for takes, leaf in zip(said, tree.values, strict=True)
                ],
            )
            for tree, said in zip(self.trees, self.said, strict=True)
        ]

        def filled(gradients: Iterable[Any]) -> tuple[Any, ...]:
            new = iter(gradients)
            return tuple(
                tree.restore(
                    next(new) if other is _LIVE else jax.tree.map(_zeros, other)
                    for other in others
                )
                for tree, others in forms
            )

        return filled


_LIVE = object()
_zeros = tracing.zeros_of


def _other(absent: str, leaf: Any) -> Any:
    """What stands for a leaf that is not differentiated, with types for its zeros."""
    if absent == 'zeros' and (is_number(leaf) or isinstance(leaf, NonDifferentiable)):
        return jax.tree.map(jax.typeof, leaf)
    return None if absent == 'none' else ABSENT


def split_by(
    fun: Any, wrt: filters.Where | Declared, absent: str, unused: str
) -> Callable[[Iterable[Leaves]], Split]:
    """A function that splits arguments as the options of a gradient call say.

    >>> split = split_by(abs, 'w', 'none', 'raise')
    >>> parts = split([leaves_of({'b': 1.0, 'w': 2.0})])
    >>> parts.live, parts.join([5.0]), parts.form('none')([7.0])
    ([2.0], [{'b': 1.0, 'w': 5.0}], ({'b': None, 'w': 7.0},))

    Args:
        fun: the function that it is given.
        wrt: the filter of the leaves that are differentiated.
        absent: what stands in results for the other leaves.
        unused: ``'raise'`` or ``'ignore'`` if a part of ``wrt`` matches nothing.

    Raises:
        ArgumentTypeError: if ``fun`` is no function.
        FilterTypeError: if ``wrt`` is no filter.
        ArgumentValueError: if ``absent`` is none of its choices.
        UnusedFilterError: if ``wrt`` is False or empty.
    """
    if not callable(fun):
        write = "sg.grad(loss, wrt='head/**')(params)"
        raise wrong_argument(fun, 'function to differentiate', write)
    if absent not in ('drop', 'zeros', 'none'):
        raise unknown_choice('absent', absent, ('drop', 'zeros', 'none'))
    check_unused(unused)
    where = wrt if isinstance(wrt, Declared) else filters.as_filter(wrt)
    # A filter that a program makes may well come to nothing, a plain [] may not.
    plain = not isinstance(wrt, filters.Filter)
    if plain and where == filters.Constant(False) and unused != 'ignore':
        raise errors.UnusedFilterError(
            f'wrt={wrt!r} differentiates nothing: wrt= selects what has a '
            'gradient.\n'
            "Name the trained leaves, such as wrt='head/**', or pass unused='ignore'."
        )

    def split(arguments: Iterable[Leaves]) -> Split:
        trees = list(arguments)
        with raised_by('wrt=...'):
            said = chosen(trees, where, unused)
        if unused == 'ignore' or isinstance(where, Declared):
            return Split(trees, said)
        return Split(trees, said, where)

    return split

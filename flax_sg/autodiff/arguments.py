"""Arguments, split into leaves that are differentiated and leaves that are not."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax

from flax_sg import errors, filters
from flax_sg.errors.texts import raised_by, unknown_choice, wrong_argument
from flax_sg.filters.paths import Path
from flax_sg.internals import tracing
from flax_sg.internals.types import Decision, Leaf
from flax_sg.trees.leaves import ABSENT, Leaves, check_unused, is_number
from flax_sg.trees.nondifferentiable import NonDifferentiable
from flax_sg.trees.trainable import Declared, chosen

Where: TypeAlias = filters.Where | Declared


class Split(NamedTuple):
    """Some arguments, and which of their leaves are differentiated.

    >>> from flax_sg.trees.leaves import leaves_of
    >>> split = Split.of([leaves_of({'b': 1.0, 'w': 2.0})], 'w', 'raise')
    >>> split.live, split.join([5.0]), split.form('none')([7.0])
    ([('w', 2.0)], [{'b': 1.0, 'w': 5.0}], ({'b': None, 'w': 7.0},))

    Attributes:
        trees: the arguments.
        decisions: for each leaf of each whether it is differentiated, or which part.
    """

    trees: list[Leaves]
    decisions: list[list[Any]]

    @classmethod
    def of(cls, arguments: Iterable[Leaves], wrt: Where, unused: str) -> Split:
        """Splits arguments as a filter says."""
        trees = list(arguments)
        with raised_by('wrt=...'):
            return cls(trees, chosen(trees, wrt, unused))

    @property
    def live(self) -> list[tuple[Path, Any]]:
        """The leaves that are differentiated, with their paths."""
        pairs = zip(self.trees, self.decisions, strict=True)
        return [
            leaf
            for tree, decisions in pairs
            for leaf in itertools.compress(tree, map(filters.is_meant, decisions))
        ]

    def join(self, live: Iterable[Any]) -> list[Any]:
        """The arguments, with other values for the leaves that are differentiated."""
        new = iter(live)
        return [
            tree.restore(
                leaf
                if decision is False
                else filters.merged(decision, next(new), leaf, path)
                for decision, (path, leaf) in zip(decisions, tree, strict=True)
            )
            for tree, decisions in zip(self.trees, self.decisions, strict=True)
        ]

    def form(self, absent: str) -> Callable[[Iterable[Any]], tuple[Any, ...]]:
        """A function that puts gradients into trees; it keeps none of the leaves.

        Args:
            absent: what stands in the trees for the other leaves.
        """
        of_trees = [
            (
                tree.form,
                [*map(functools.partial(_other, absent), decisions, tree.values)],
            )
            for tree, decisions in zip(self.trees, self.decisions, strict=True)
        ]

        def filled(gradients: Iterable[Any]) -> tuple[Any, ...]:
            new = iter(gradients)
            return tuple(
                form(next(new) if other is None else other() for other in of_tree)
                for form, of_tree in of_trees
            )

        return filled


def _other(absent: str, decision: Decision, leaf: Leaf) -> Callable[[], Any] | None:
    """Makes what stands for a leaf; None if it is differentiated."""
    if filters.is_meant(decision):
        return None
    if absent == 'zeros' and (is_number(leaf) or isinstance(leaf, NonDifferentiable)):
        types = jax.tree.map(jax.typeof, leaf)
        return lambda: jax.tree.map(tracing.zeros_of, types)
    return lambda: None if absent == 'none' else ABSENT


def check(
    call: str, fun: object, wrt: Where, absent: str, unused: str
) -> filters.Filter | Declared:
    """Raises if the options of a gradient call mean nothing; returns the filter.

    Args:
        call: what to write.
        fun: the function that it is given.
        wrt: the filter of the leaves that are differentiated.
        absent: what stands in results for the other leaves.
        unused: ``'raise'`` or ``'ignore'`` if a part of ``wrt`` matches nothing.

    Raises:
        ArgumentTypeError: if ``fun`` is no function.
        FilterTypeError: if ``wrt`` is no filter, or one of what is frozen.
        ArgumentValueError: if ``absent`` is none of its choices.
        UnusedFilterError: if ``wrt`` is False or empty.
    """
    if not callable(fun):
        raise wrong_argument(fun, 'function to differentiate', call)
    if absent not in ('drop', 'zeros', 'none'):
        raise unknown_choice('absent', absent, ('drop', 'zeros', 'none'))
    check_unused(unused)
    if isinstance(wrt, Declared):
        return wrt
    where = filters.named(filters.as_filter(wrt), 'trained', 'wrt={}')
    is_made = isinstance(wrt, filters.Filter)  # It may well come to nothing.
    if where == filters.Constant(False) and not is_made and unused != 'ignore':
        raise errors.UnusedFilterError(
            f'wrt={wrt!r} differentiates nothing: wrt= selects what has a '
            'gradient.\n'
            "Name the trained leaves, such as wrt='head/**', or pass unused='ignore'."
        )
    return where


def no_others(keywords: Mapping[str, Any]) -> None:
    """Raises for keywords that ``sg.grad`` does not take, with what to write instead.

    Raises:
        ArgumentTypeError: if there is one.
    """
    instead = {
        'of': 'For a bound module, write bare, variables = bound.unbind(), and '
        "sg.grad(lambda variables: bare.apply(variables, x), wrt='head/**')(variables)",
        'allow_int': 'Integers need no option: they have no gradient, and are ABSENT '
        'in the result.',
    }
    for name in keywords:
        raise errors.ArgumentTypeError(
            f'sg.grad takes no {name}=.\n'
            f'{instead.get(name, "It takes wrt=, absent= and unused=.")}'
        )

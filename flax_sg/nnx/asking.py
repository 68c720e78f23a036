"""Asks a filter for the Variables and arrays of an NNX model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from flax_sg import errors, filters
from flax_sg.errors.texts import raised_by, wrong_argument
from flax_sg.filters.paths import Path, all_paths, is_parameter
from flax_sg.filters.predicates import describe
from flax_sg.internals.types import Decision, Kind
from flax_sg.trees.leaves import is_whole, selected
from flax_sg.trees.nnx_paths import Keys
from flax_sg.trees.nnx_walks import Leaf, Walk


class Asked(NamedTuple):
    """What a filter decides about a leaf of a model: about each array in it.

    Attributes:
        leaf: the leaf.
        paths: one for each array, or one if there is none. A Variable is a box: its
            arrays share its path, and differ in their shapes.
        decisions: what the filter decides, for each path.
    """

    leaf: Leaf
    paths: list[Path]
    decisions: list[Decision]

    @property
    def is_meant(self) -> bool:
        """Whether the filter means any of it."""
        return any(map(filters.is_meant, self.decisions))

    @property
    def decided(self) -> list[tuple[Path, Any, Any]]:
        """For each array the path, the decision, and the array."""
        return [*zip(self.paths, self.decisions, self.leaf.arrays, strict=False)]


def parameters(path: Keys, value: object) -> bool:
    """The kind that views take by default: ``nnx.Param``, and arrays in no Variable."""
    del path
    return is_parameter(value) and not is_whole(value)


# The kind that ``nnx.grad`` and ``nnx.Optimizer`` take.
IN_VARIABLES = nnx.OfType(nnx.Param)


def ask(call: str, walk: Walk, where: Any, kind: Kind, unused: str) -> list[Asked]:
    """Asks a filter for each leaf of a kind, by all of its paths together.

    Args:
        call: the function that the user calls, for errors.
        walk: the model.
        where: the filter.
        kind: an NNX filter of what ``where`` is asked for.
        unused: ``'raise'`` or ``'ignore'`` if ``kind`` or a part of ``where`` matches
            nothing.

    Raises:
        ArgumentTypeError: if there is no module.
        UnusedFilterError: if ``kind`` or a part of ``where`` matches nothing.
    """
    if not walk.modules:
        raise wrong_argument(walk.tree, 'NNX module', f'{call}(model, where)')
    where, is_kind = filters.as_filter(where), nnx.filterlib.to_predicate(kind)
    every = [*walk.leaves.values()]
    of_kind = [leaf for leaf in every if is_kind(leaf.keys, leaf.value)]
    if kind not in (parameters, IN_VARIABLES):
        call = f'{call}(kind={_shown(kind)})'
        if not of_kind and unused == 'raise':
            raise errors.UnusedFilterError(
                f'{call}: the kind matches nothing in the model.\n'
                f'There are: {_kinds_in(every) or "no Variables"}.\n'
                'Write a type, such as kind=nnx.Param, or leave kind= out.'
            )
    with raised_by(call):
        try:
            return _asked(walk, of_kind, where, unused)
        except errors.UnusedFilterError as error:
            with contextlib.suppress(errors.FlaxSGError):
                asked = _asked(walk, every, where, unused)
                kinds = _kinds_in([x.leaf for x in asked if x.is_meant], of_kind)
                advice = f'It matches values of another kind: write kind={kinds}.'
                if not kinds:  # Such as a tree of bools that is False for these.
                    advice = (
                        'It has values for other kinds: write kind=... in the call.'
                    )
                problem, _, otherwise = error.args
                error.args = problem, advice, otherwise
            raise


def _asked(
    walk: Walk, leaves: Sequence[Leaf], where: filters.Filter, unused: str
) -> list[Asked]:
    paths = [walk.paths_of(leaf) for leaf in leaves]
    decisions = selected(paths, where, unused)
    if not walk.is_tree:
        paths = [[_matched(where, path) for path in of_leaf] for of_leaf in paths]
    return [*map(Asked, leaves, paths, decisions)]


def _matched(where: filters.Filter, path: Path) -> Path:
    """The path of a leaf that a filter matches: rules are called with this one."""
    for atom in where.atoms:
        for candidate in all_paths(path):
            with contextlib.suppress(errors.FlaxSGError):
                if filters.is_meant(atom.matches(candidate)):
                    return candidate
    return path


def _shown(kind: Kind) -> str:
    if not isinstance(kind, type):
        return describe(kind) if callable(kind) else repr(kind)
    if issubclass(kind, jax.Array):
        return 'jax.Array'
    is_of_flax = getattr(nnx, kind.__name__, None) is kind
    return f'nnx.{kind.__name__}' if is_of_flax else kind.__name__


def _kinds_in(leaves: Sequence[Leaf], but: Sequence[Leaf] = ()) -> str:
    """The kinds of some leaves, but for some of them, as they are written."""
    names = dict.fromkeys(_shown(type(x.value)) for x in leaves if x not in but)
    return ', '.join(names) if len(names) < 2 else f'({", ".join(names)})'

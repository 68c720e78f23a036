"""Rules that look at the cotangents of all selected parameters at once."""

from __future__ import annotations

import graphlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from flax_sg import errors
from flax_sg.filters.paths import Path
from flax_sg.rules import cotangents, rules
from flax_sg.rules.cotangents import wrong_cotangent


class Joint(cotangents.OnCotangents):
    """The cotangents of all selected leaves go through one function."""

    jointly: ClassVar[bool] = True

    def __call__(self, path: Path, leaf: Any) -> Any:
        """Not asked for one leaf of several."""
        raise NotImplementedError


class ClipGlobalNorm(Joint):
    """All leaves are scaled down to a norm that they have together."""

    name: ClassVar[str] = 'clip_gradient'
    asks_path: ClassVar[bool] = False

    def together(self, selected: rules.Selected, read: rules.Read) -> list[list[Any]]:
        """Returns the leaves behind one identity."""
        del read

        def fn(given_back: Sequence[Any], given: Any, bound: Any) -> list[Any]:
            # What is not differentiated, as a frozen part, throttles nothing.
            counted = [ct for ct, there in zip(given_back, given, strict=True) if there]
            return cotangents.scaled_down(given_back, counted, bound)

        leaves = [leaf for _, leaves in selected for leaf in leaves]
        paths = [path for path, _ in selected]
        brought = list(map(jnp.asarray, self.brought))
        new = iter(cotangents.mapped_by(fn, self, paths, leaves, brought))
        return [[next(new) for _ in leaves] for _, leaves in selected]


class Copy(Joint):
    """Cotangents are handed on from one leaf to another.

    Args:
        sources: for each target the source.
        add: whether a target keeps its own cotangent as well.
    """

    name: ClassVar[str] = 'copy_cotangent'

    def __init__(self, sources: Mapping[str, str], add: bool) -> None:
        super().__init__(parts=(tuple(sources.items()), add))
        self._sources, self._add = dict(sources), add
        order = graphlib.TopologicalSorter({t: [s] for t, s in sources.items()})
        try:
            in_order = tuple(order.static_order())
        except graphlib.CycleError as error:
            raise _cycle(error.args[1][:0:-1]) from None
        self._targets = [path for path in in_order if path in sources]

    def together(self, selected: rules.Selected, read: rules.Read) -> list[list[Any]]:
        """Returns the leaves behind one identity."""
        del read
        places: dict[tuple[str, str], list[int]] = {}
        leaves: list[Any] = []
        for path, of_path in selected:
            numbers = range(len(leaves), len(leaves) + len(of_path))
            # A name is that of a variable, or of a leaf within one.
            for name in {str(path), str(path.variable)}:
                places.setdefault((path.collection, name), []).extend(numbers)
            leaves += of_path
        pairs: list[tuple[int, int]] = []
        for target in self._targets:
            for collection in dict.fromkeys(collection for collection, _ in places):
                source = self._sources[target]
                to = places.get((collection, target), [])
                of = places.get((collection, source), [])
                if to and of:  # At initialization one may come later than the other.
                    _check_fits(target, source, leaves, to, of)
                    pairs += zip(to, of, strict=True)

        def fn(given_back: Sequence[Any], _: Any) -> list[Any]:
            out = list(given_back)
            for to, of in pairs:
                out[to] = out[to] + out[of] if self._add else out[of]
            return out

        paths = [path for path, _ in selected]
        new = iter(cotangents.mapped_by(fn, self, paths, leaves, ()))
        return [[next(new) for _ in of_path] for _, of_path in selected]


class Replace(Joint):
    """The value of another variable takes the place of the cotangent.

    Args:
        variable: the path of the variable; None for the one of the same path.
        collection: the collection that it is in.
    """

    name: ClassVar[str] = 'replace_cotangent'

    def __init__(self, variable: str | None, collection: str) -> None:
        super().__init__(parts=(variable, collection))
        self._variable, self._collection = variable, collection

    def together(self, selected: rules.Selected, read: rules.Read) -> list[list[Any]]:
        """Returns each leaf behind an identity of its own."""
        return [
            [
                self._behind(path, leaf, number, read)
                for number, leaf in enumerate(leaves)
            ]
            for path, leaves in selected
        ]

    def _behind(self, path: Path, leaf: Any, index: int, read: rules.Read) -> Any:
        variable = str(path) if self._variable is None else self._variable
        try:
            values = self._values(variable, path, read)
        except errors.UnknownNameError as error:
            # At initialization it may come later, and nobody differentiates that.
            missing, brought = error, []
        else:
            missing, brought = None, list(values[index : index + 1])
            what = f'the value of {variable!r}'
            cotangents.checked(path, what, leaf, brought[0] if brought else None)

        def fn(_given_back: Any, _: Any, *brought: Any) -> list[Any]:
            if missing is not None:
                raise missing
            return list(brought)

        return cotangents.mapped_by(fn, self, [path], [leaf], brought)[0]

    def _values(self, variable: str, path: Path, read: rules.Read) -> Sequence[Any]:
        try:
            return read(variable, self._collection)
        except errors.UnknownNameError:
            if self._variable is None or not path.is_inner:
                raise
        # A tuple for a tuple, leaf by leaf.
        return read(variable + path[len(path.variable) :], self._collection)


def _check_fits(
    target: str,
    source: str,
    leaves: Sequence[Any],
    to: Sequence[int],
    of: Sequence[int],
) -> None:
    what = f'that of {source!r}'
    if len(to) != len(of):
        boxes = [leaves[i] for i in to], [leaves[i] for i in of]
        raise wrong_cotangent(target, what, *boxes)
    for one, other in zip(to, of, strict=True):
        cotangents.checked(target, what, leaves[one], leaves[other])


def _cycle(cycle: Sequence[str]) -> errors.ArgumentValueError:
    """Cotangents are to be copied in a circle."""
    return errors.ArgumentValueError(
        'cotangents are copied in a circle: '
        f'{" <- ".join(map(repr, [*cycle, cycle[0]]))}.\n'
        'Each target is given with its source, {target: source}; leave one out.'
    )

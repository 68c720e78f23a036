"""Where the examples of a batch are in each value, and what mixes them.

A batch holds examples along the first axis of each of its arrays. Followed through a
program, this axis moves, or it ends where an operation mixes examples, or where the
result depends on their positions: a mean over the batch. Shapes cannot tell: the
question is asked of each operation, and an operation that is not known mixes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from flax_sg import errors
from flax_sg.ahead.axes import EACH_BY_ITSELF, Axes, axes_of
from flax_sg.ahead.steps import Split, Step
from flax_sg.flow.flat import Site
from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import opened


class Examples(NamedTuple):
    """Where the examples are in an array.

    Element ``i`` of the axis is of example ``i // inner % count``: other axes may be
    merged with that of the examples.

    Attributes:
        axis: the axis.
        inner: how many elements of the axis follow each other for one example.
    """

    axis: int = 0
    inner: int = 1

    def in_front(self, array: Any, count: int) -> Any:
        """The array with an axis of that many examples in front."""
        shape = array.shape
        if shape[0] == count and self.axis == 0:
            return array
        before, after = shape[: self.axis], shape[self.axis + 1 :]
        others = shape[self.axis] // count
        outer = others // self.inner
        apart = array.reshape(*before, outer, count, self.inner, *after)
        moved = jnp.moveaxis(apart, self.axis + 1, 0)
        return moved.reshape(count, *before, *[others] * (others > 1), *after)

    def back(self, array: Any, shape: Sequence[int]) -> Any:
        """The array of this shape, of what ``in_front`` has made of it."""
        if array.shape == shape and self.axis == 0:
            return array
        before, after = shape[: self.axis], shape[self.axis + 1 :]
        outer = shape[self.axis] // len(array) // self.inner
        apart = array.reshape(len(array), *before, outer, self.inner, *after)
        return jnp.moveaxis(apart, 0, self.axis + 1).reshape(shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """No place: an equation mixes examples, or is not known, and it stands here."""

    eqn: Any
    site: Site


# What does not depend on examples: the axes along which all its rows are alike.
Alike: TypeAlias = frozenset[int]
Place: TypeAlias = Examples | Alike | Mixed


class Batch:
    """Follows the examples of a batch through the steps of a program.

    Attributes:
        count: how many examples there are.
        places: where they are in each value.
        mixed: for the values in which they are mixed the operation and the line.
    """

    def __init__(self, inputs: Mapping[int, tuple[str, Any]]) -> None:
        """Looks at the axis in front of each array.

        Args:
            inputs: for each array of the batch, by its number, what it is called and
                its type.

        Raises:
            ArgumentTypeError: if one of them has no such axis, or has it of another
                length.
        """
        counts = [aval.shape[0] if aval.shape else 0 for _, aval in inputs.values()]
        self.count = counts[0] if counts else 0
        for count, (where, aval) in zip(counts, inputs.values(), strict=True):
            if count != self.count or count < 2:
                many = self.count if self.count > 1 else 'two or more'
                raise errors.ArgumentTypeError(
                    f'{where} is {aval.str_short()}, and has no axis of {many} '
                    'examples in front.\n'
                    'Name an argument that is the same for all batches in argnums=: '
                    'late takes it, too. Name a key in each=.'
                )
        self.places: dict[int, Place] = dict.fromkeys(inputs, Examples())
        self.mixed: dict[int, str] = {}

    def mixes(self, step: Step, avals: Sequence[Any]) -> bool:
        """Whether a step mixes examples. If not, it is noted where they are."""
        ins = [
            frozenset() if isinstance(x, Literal) else self.places.get(x, frozenset())
            for x in step.ins
        ]
        if step.call:
            operands = [
                x.val if isinstance(x, Literal) else jaxprs.shape_of(avals[x])
                for x in step.ins
            ]
            program = jax.make_jaxpr(step.call)(*operands)
            outs = followed(program, ins, self.count, step.site)
        else:
            outs = _Walk(self.count).equation(step.eqn, ins, step.site)
        found = _mixed_in(outs)
        if found is None:
            self.places.update(zip(step.outs, outs, strict=True))
            return False
        line = step.source if step.call else found.site.source(found.eqn)
        what = f'{jaxprs.operation(found.eqn)} at {line}'
        self.mixed.update(dict.fromkeys(step.outs, what))
        return True

    def in_front(self, numbers: Sequence[int], arrays: Sequence[Any]) -> list[Any]:
        """The arrays of some values, with the axis of the examples in front."""
        places = map(self._place, numbers)
        rows = zip(places, arrays, strict=True)
        return [place.in_front(array, self.count) for place, array in rows]

    def back(
        self, numbers: Sequence[int], arrays: Sequence[Any], avals: Sequence[Any]
    ) -> list[Any]:
        """Some values as they are in the program, of what ``in_front`` returned."""
        rows = zip(numbers, arrays, strict=True)
        return [self._place(n).back(array, avals[n].shape) for n, array in rows]

    def is_of_examples(self, number: int) -> bool:
        """Whether a value has an axis of examples."""
        return isinstance(self.places[number], Examples)

    def _place(self, number: int) -> Examples:
        place = self.places[number]
        assert isinstance(place, Examples)
        return place


def of_the_batch(split: Split, inputs: Mapping[int, tuple[str, Any]]) -> str:
    """Says that rows of what is kept are not single examples; empty if they are.

    Args:
        split: a program that was split without looking at examples.
        inputs: the data of a batch, as for ``Batch``.
    """
    whole = 'What is kept belongs to this batch as a whole'
    unclear = f'{whole}. For rows of single examples, write examples=True.'
    arrays = {n: named for n, named in inputs.items() if named[1].shape}
    try:
        batch = Batch(arrays)
    except errors.ArgumentTypeError:
        return unclear
    for step in split.early:
        if batch.mixes(step, split.avals):
            return f'{whole}: {batch.mixed[step.outs[0]]} may mix its examples.'
    rows = [
        batch.places.get(n) == Examples() and split.avals[n].shape[0] == batch.count
        for n in split.kept
    ]
    return '' if all(rows) else unclear


def followed(
    program: Any, ins: Sequence[Place], count: int, site: Site | None = None
) -> list[Place]:
    """Where so many examples are in the outputs of a program."""
    return _Walk(count).body(program, ins, site or Site())


class _Walk:
    """Follows so many examples through equations, bodies and loops."""

    def __init__(self, count: int) -> None:
        self.count = count

    def body(self, closed: Any, ins: Sequence[Place], site: Site) -> list[Place]:
        """Where the examples are in the outputs of a jaxpr."""
        jaxpr = opened(closed)
        places: dict[Any, Place] = dict(zip(jaxpr.invars, ins, strict=True))

        def at(atom: Any) -> Place:
            is_constant = isinstance(atom, Literal)
            return frozenset() if is_constant else places.get(atom, frozenset())

        for eqn in jaxpr.eqns:
            outs = self.equation(eqn, [*map(at, eqn.invars)], site)
            places.update(zip(eqn.outvars, outs, strict=True))
        return [*map(at, jaxpr.outvars)]

    def equation(self, eqn: Any, ins: Sequence[Place], site: Site) -> list[Place]:
        """Where the examples are in the outputs of an equation."""
        name, mixed = eqn.primitive.name, _mixed_in(ins)
        is_call = name in (*jaxprs.JITTED, *jaxprs.CHECKPOINTS, *jaxprs.CUSTOM_CALLS)
        if is_call:
            return self.body(jaxprs.closed_body_of(eqn), ins, Site(eqn, site))
        if name in EACH_BY_ITSELF:
            return [*ins]
        if name in ('cond', 'while', 'scan'):
            return getattr(self, f'_{name}')(eqn, ins, site)
        if mixed is not None:
            return [mixed] * len(eqn.outvars)
        has_examples = any(isinstance(place, Examples) for place in ins)
        if name == 'reshape' and isinstance(ins[0], Examples):
            return [self._reshape(eqn, ins[0], site)]
        known = axes_of(eqn)
        if known is None:
            unknown = Mixed(eqn, site) if has_examples else frozenset[int]()
            return [unknown] * len(eqn.outvars)
        return [self._from(axes, ins, eqn, site) for axes in known]

    def _from(self, axes: Axes, ins: Sequence[Place], eqn: Any, site: Site) -> Place:
        """The place in an output, by what its axes come from."""
        own = {(n, place.axis) for n, place in enumerate(ins) if _has_examples(place)}
        if not own:
            return frozenset(j for j, found in enumerate(axes) if _is_alike(found, ins))
        inners = {place.inner for place in ins if _has_examples(place)}
        for j, found in enumerate(axes):
            if found is None or not own <= {*found} or len(inners) > 1:
                continue
            if _is_alike([source for source in found if source not in own], ins):
                return Examples(j, *inners)
        return Mixed(eqn, site)

    def _reshape(self, eqn: Any, place: Examples, site: Site) -> Place:
        """The axis with the same stride from an example to the next."""
        shape, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        stride = place.inner * math.prod(shape[place.axis + 1 :])
        period = stride * self.count
        for j, size in enumerate(out) if period else ():
            after = math.prod(out[j + 1 :])
            if stride % after == 0 and size * after % period == 0:
                return Examples(j, stride // after)
        return Mixed(eqn, site)

    def _cond(self, eqn: Any, ins: Sequence[Place], site: Site) -> list[Place]:
        if isinstance(ins[0], Mixed):
            return [ins[0]] * len(eqn.outvars)
        bodies = eqn.params['branches']
        outs = [self.body(body, ins[1:], Site(eqn, site)) for body in bodies]
        return [self._either(both, eqn, site) for both in zip(*outs, strict=True)]

    def _while(self, eqn: Any, ins: Sequence[Place], site: Site) -> list[Place]:
        params, inside = eqn.params, Site(eqn, site)
        first = params['cond_nconsts']
        start = first + params['body_nconsts']

        def turn(carry: list[Place]) -> list[Place]:
            [again] = self.body(params['cond_jaxpr'], [*ins[:first], *carry], inside)
            if isinstance(again, Mixed):
                return [again] * len(carry)
            return self.body(params['body_jaxpr'], [*ins[first:start], *carry], inside)

        return self._settled(turn, [*ins[start:]], eqn, site)

    def _scan(self, eqn: Any, ins: Sequence[Place], site: Site) -> list[Place]:
        carry, body = jaxprs.carried_by(eqn), eqn.params['jaxpr']
        rows, consts = ins[carry.stop :], [*ins[: carry.start]]
        if any(isinstance(place, Examples) and place.axis == 0 for place in rows):
            # Each turn is for one example, if no turn reads what another one has made.
            found: Axes = [tuple((n, 0) for n in range(carry.stop, len(ins)))]
            if len(carry) or not all(isinstance(x, frozenset) for x in consts):
                return [Mixed(eqn, site)] * len(eqn.outvars)
            return [self._from(found, ins, eqn, site) for _ in eqn.outvars]
        within = [_shifted(place, -1) for place in rows]
        made: list[Place] = []

        def turn(before: list[Place]) -> list[Place]:
            outs = self.body(body, [*consts, *before, *within], Site(eqn, site))
            made[:] = outs[len(carry) :]
            return outs[: len(carry)]

        after = self._settled(turn, [*ins[carry.start : carry.stop]], eqn, site)
        return [*after, *(_shifted(place, 1) for place in made)]

    def _settled(
        self, turn: Callable[..., Any], carry: list[Place], eqn: Any, site: Site
    ) -> list[Place]:
        """Where the examples are in what a loop carries, whatever turn it is."""
        while True:
            both = zip(carry, turn(carry), strict=True)
            joined = [self._either(pair, eqn, site) for pair in both]
            if joined == carry:
                return carry
            carry = joined

    def _either(self, places: Sequence[Place], eqn: Any, site: Site) -> Place:
        """The place of examples in a value that is one of several."""
        if mixed := _mixed_in(places):
            return mixed
        known = {place for place in places if isinstance(place, Examples)}
        alike = [place for place in places if isinstance(place, frozenset)]
        if not known:
            return frozenset.intersection(*alike)
        [place, *others] = known
        if others or any(place.axis not in axes for axes in alike):
            return Mixed(eqn, site)
        return place


def _has_examples(place: Place) -> TypeGuard[Examples]:
    return isinstance(place, Examples)


def _mixed_in(places: Iterable[Place]) -> Mixed | None:
    return next((place for place in places if isinstance(place, Mixed)), None)


def _is_alike(found: Iterable[tuple[int, int]] | None, ins: Sequence[Place]) -> bool:
    """Whether all rows along an axis are alike, if it comes from these."""
    return found is not None and all(
        isinstance(place := ins[n], frozenset) and axis in place for n, axis in found
    )


def _shifted(place: Place, by: int) -> Place:
    """The place with one axis more or less in front."""
    if isinstance(place, Mixed):
        return place
    if isinstance(place, Examples):
        return place._replace(axis=place.axis + by)
    return frozenset(axis + by for axis in place if axis + by >= 0)

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
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Literal
from numpy.typing import NDArray

from flax_sg import errors
from flax_sg.ahead.axes import Axes, Source, axes_of
from flax_sg.ahead.costs import is_cheap
from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import opened, type_of
from flax_sg.internals.types import AnyJaxpr, Array, Atom, Aval
from flax_sg.programs import primitives, sources
from flax_sg.programs.primitives import Kind
from flax_sg.programs.steps import Site, Step, Value


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

    def in_front(self, array: Array, count: int) -> Array:
        """The array with an axis of that many examples in front."""
        shape = array.shape
        if shape[0] == count and self.axis == 0:
            return array
        before, after = shape[: self.axis], shape[self.axis + 1 :]
        size = shape[self.axis] // count
        # Axes of one element are left out: on a mesh of explicit axes, JAX merges an
        # axis that is split over devices only with those behind it.
        outer, inner = ([n] * (n > 1) for n in (size // self.inner, self.inner))
        apart = array.reshape(*before, *outer, count, *inner, *after)
        moved = jnp.moveaxis(apart, self.axis + (size > self.inner), 0)
        return moved.reshape(count, *before, *[size] * (size > 1), *after)

    def back(self, array: Array, shape: Sequence[int]) -> Array:
        """The array of this shape, of what ``in_front`` has made of it."""
        if array.shape == shape and self.axis == 0:
            return array
        before, after = shape[: self.axis], shape[self.axis + 1 :]
        size = shape[self.axis] // len(array)
        within = [n for n in (size // self.inner, self.inner) if n > 1]
        apart = array.reshape(len(array), *before, *within, *after)
        axis = self.axis + (size > self.inner)
        return jnp.moveaxis(apart, 0, axis).reshape(shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed:
    """No place: an equation mixes examples, or is not known, and it stands here."""

    eqn: JaxprEqn
    site: Site

    def __str__(self) -> str:
        return f'{sources.operation(self.eqn)} at {self.site.source(self.eqn)}'


class Known(NamedTuple):
    """An array of integers or bools that is a constant, such as positions."""

    value: NDArray[Any]


class Joined(NamedTuple):
    """Indices of several axes, of which one is a constant: what their columns are.

    As an array it is mixed. To read a part of each example it is not.
    """

    columns: tuple[Place, ...]
    mixed: Mixed


# What does not depend on examples: the axes along which it is the same everywhere.
Alike: TypeAlias = frozenset[int]
Place: TypeAlias = Examples | Alike | Known | Joined | Mixed

# Nothing depends on examples, and no axis is known to be alike.
_NOT_KNOWN: Alike = frozenset()
# Of several operands each output is one. A cast is elementwise, too.
_SAME = primitives.names_of(Kind.SAME) - primitives.names_of(Kind.ELEMENTWISE)
# Larger constants are not looked at.
_LARGE = 1 << 16


class Batch:
    """Follows the examples of a batch through the steps of a program.

    Attributes:
        count: how many examples there are.
        places: where they are in each value.
        mixed: for the values in which they are mixed the operation and the line.
    """

    def __init__(self, inputs: Mapping[int, tuple[str, Aval]]) -> None:
        """Looks at the axis in front of each array.

        Args:
            inputs: for each array of the batch, by its number, what it is called and
                its type.

        Raises:
            ArgumentTypeError: if they have no such axis of one length.
        """
        counts = [aval.shape[0] if aval.shape else 0 for _, aval in inputs.values()]
        # A table may stand before the batch: what most of them have is a batch.
        self.count = max(counts, key=counts.count, default=0)
        for count, (where, aval) in zip(counts, inputs.values(), strict=True):
            if count != self.count or count < 2:
                raise _no_axis(where, aval, self.count, inputs.values())
        self.places: dict[int, Place] = dict.fromkeys(inputs, Examples())
        self.mixed: dict[int, Mixed] = {}
        self._follower = _Follower(self.count)

    def mixed_in(self, step: Step) -> list[int]:
        """The outputs of a step in which examples are mixed; notes where they are."""
        outs = self._follower.equation(step.eqn, self._read(step.ins), step.site)
        self.places.update(zip(step.outs, outs, strict=True))
        pairs = zip(step.outs, outs, strict=True)
        mixed = {n: place for n, place in pairs if isinstance(place, Mixed)}
        self.mixed.update(mixed)
        return [*mixed]

    def mixed_by(
        self, eqn: JaxprEqn, read: Sequence[Value], site: Site
    ) -> tuple[list[bool], frozenset[int]]:
        """For each output whether it is mixed, and the ids of what mixes in bodies."""
        follower = _Follower(self.count)
        outs = follower.equation(eqn, self._read(read), site)
        return [isinstance(x, Mixed) for x in outs], frozenset(follower.mixing)

    def can_be_kept(self, number: int) -> bool:
        """Whether a value can be kept for each example."""
        return not isinstance(self.places.get(number), Joined)

    def note(self, number: int, constant: Array) -> None:
        """Notes a constant of the program."""
        self.places[number] = _of_constant(constant)

    def _read(self, values: Iterable[Value]) -> list[Place]:
        return [_place_of(x, self.places) for x in values]

    def in_front(self, numbers: Sequence[int], arrays: Sequence[Array]) -> list[Array]:
        """The arrays of some values, with the axis of the examples in front.

        What is the same for all examples is repeated for each.
        """
        return [
            place.in_front(x, self.count)
            if isinstance(place := self.places[n], Examples)
            else jnp.broadcast_to(x, (self.count, *x.shape))
            for n, x in zip(numbers, arrays, strict=True)
        ]

    def back(
        self, numbers: Sequence[int], arrays: Sequence[Array], avals: Sequence[Aval]
    ) -> list[Array]:
        """Some values as they are in the program, of what ``in_front`` returned."""
        return [
            place.back(x, avals[n].shape)
            if isinstance(place := self.places[n], Examples)
            else x[0]
            for n, x in zip(numbers, arrays, strict=True)
        ]


def _no_axis(
    where: str, aval: Aval, count: int, data: Iterable[tuple[str, Aval]]
) -> errors.ArgumentTypeError:
    """The error for data without an axis of that many examples."""
    of, beside = 'two or more examples', ''
    if count > 1:
        name, first = next(x for x in data if x[1].shape[:1] == (count,))
        of, beside = f'{count} examples', f', as {name} is {first.str_short()}'
    advice = (
        '\nWith examples=True, the first axis of each array of data is that of the '
        'examples. If they are along another axis, move it to the front.'
    )
    return errors.ArgumentTypeError(
        f'{where} is {aval.str_short()}, and has no axis of {of} in front{beside}.\n'
        'Name an argument that is the same for all batches in argnums=: late takes it, '
        'too. Name a key in each=.'
        f'{advice if aval.shape else ""}'
    )


class _Follower:
    """Follows so many examples through equations, bodies and loops.

    Attributes:
        mixing: the ids of the equations that were seen to mix them, bodies apart.
    """

    def __init__(self, count: int) -> None:
        self.count, self.mixing = count, set[int]()

    def body(self, closed: AnyJaxpr, ins: Sequence[Place], site: Site) -> list[Place]:
        """Where the examples are in the outputs of a jaxpr."""
        jaxpr = opened(closed)
        places: dict[Any, Place] = dict(zip(jaxpr.invars, ins, strict=True))
        for var, value in zip(
            jaxpr.constvars, getattr(closed, 'consts', ()), strict=False
        ):
            places[var] = _of_constant(value)
        for eqn in jaxpr.eqns:
            ins = [_place_of(var, places) for var in eqn.invars]
            outs = self.equation(eqn, ins, site)
            places.update(zip(eqn.outvars, outs, strict=True))
        return [_place_of(var, places) for var in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, ins: Sequence[Place], site: Site) -> list[Place]:
        """Where the examples are in the outputs of an equation."""
        outs = self._equation(eqn, ins, site)
        is_one = eqn.primitive.name in jaxprs.CUSTOM_CALLS or not jaxprs.within(eqn)
        if is_one and _mixed_in(outs):
            self.mixing.add(id(eqn))
        return outs

    def _equation(self, eqn: JaxprEqn, ins: Sequence[Place], site: Site) -> list[Place]:
        loops = {'cond': self._cond, 'while': self._while, 'scan': self._scan}
        if (body := jaxprs.called_by(eqn)) is not None:
            return self.body(body, ins, Site(eqn, site))
        if (loop := loops.get(eqn.primitive.name)) is not None:
            return loop(eqn, [*map(_plain, ins)], site)
        if all(isinstance(place, Known) for place in ins) and _is_of_positions(eqn):
            return _computed(eqn, ins)
        return self._operation(eqn, ins, site)

    def _operation(
        self, eqn: JaxprEqn, ins: Sequence[Place], site: Site
    ) -> list[Place]:
        """Where the examples are in what an operation makes, and what is known of it.

        All operations but these take what they read as arrays.
        """
        name = eqn.primitive.name
        if name in _SAME:
            return [*ins]
        if name == 'gather' and (part := self._part_of_each(eqn, ins)):
            return [part]
        outs = self._of_arrays(eqn, [*map(_plain, ins)], site)
        if name == 'concatenate' and isinstance(outs[0], Mixed):
            is_last = eqn.params['dimension'] == type_of(eqn.outvars[0]).ndim - 1
            if is_last and any(isinstance(place, Known) for place in ins):
                return [Joined((*ins,), outs[0])]
        return outs

    def _of_arrays(
        self, eqn: JaxprEqn, ins: Sequence[Place], site: Site
    ) -> list[Place]:
        """Where the examples are in what an operation makes of arrays."""
        count, known = len(eqn.outvars), axes_of(eqn)
        if mixed := _mixed_in(ins):
            return [mixed] * count
        if eqn.primitive.name == 'reshape' and isinstance(ins[0], Examples):
            return [self._reshape(eqn, ins[0], site)]
        if known is not None:
            return [self._from(axes, ins, eqn, site) for axes in known]
        return [Mixed(eqn, site) if _examples_in(ins) else _NOT_KNOWN] * count

    def _part_of_each(self, eqn: JaxprEqn, ins: Sequence[Place]) -> Examples | None:
        """The place in ``x[arange(n), index]``: each example reads its own part."""
        place, indices, numbers = ins[0], ins[1], eqn.params['dimension_numbers']
        if not (isinstance(place, Examples) and isinstance(indices, Joined)):
            return None
        columns = dict(zip(numbers.start_index_map, indices.columns, strict=False))
        positions = columns.get(place.axis)
        is_one = place.axis in numbers.collapsed_slice_dims
        if not (is_one and place.inner == 1 and isinstance(positions, Known)):
            return None
        if len(columns) != len(indices.columns):
            return None
        index = positions.value[..., 0]
        for axis, length in enumerate(index.shape):
            example = np.arange(length).reshape([-1] + [1] * (index.ndim - axis - 1))
            if length != self.count or (index != example).any():
                continue
            places = [_plain(x) for x in columns.values() if x is not positions]
            if all(x == Examples(axis) or _is_alike([(0, axis)], [x]) for x in places):
                outs = range(type_of(eqn.outvars[0]).ndim)
                return Examples([j for j in outs if j not in numbers.offset_dims][axis])
        return None

    def _from(
        self, axes: Axes, ins: Sequence[Place], eqn: JaxprEqn, site: Site
    ) -> Place:
        """The place in an output, by what its axes come from."""
        places = _examples_in(ins)
        if not places:
            return frozenset(j for j, x in enumerate(axes) if _is_alike(x, ins))
        examples = {(n, place.axis) for n, place in places.items()}
        inners = {place.inner for place in places.values()}
        for j, origins in enumerate(axes):
            if origins is None or not examples <= {*origins} or len(inners) > 1:
                continue
            if _is_alike([x for x in origins if x not in examples], ins):
                return Examples(j, *inners)
        return Mixed(eqn, site)

    def _reshape(self, eqn: JaxprEqn, place: Examples, site: Site) -> Place:
        """The axis with the same stride from an example to the next."""
        shape, out = type_of(eqn.invars[0]).shape, type_of(eqn.outvars[0]).shape
        stride = place.inner * math.prod(shape[place.axis + 1 :])
        period = stride * self.count
        for j, size in enumerate(out) if period else ():
            after = math.prod(out[j + 1 :])
            if stride % after == 0 and size * after % period == 0:
                return Examples(j, stride // after)
        return Mixed(eqn, site)

    def _cond(self, eqn: JaxprEqn, ins: Sequence[Place], site: Site) -> list[Place]:
        if isinstance(ins[0], Mixed):
            return [ins[0]] * len(eqn.outvars)
        bodies = eqn.params['branches']
        outs = [self.body(body, ins[1:], Site(eqn, site)) for body in bodies]
        return [self._either(both, eqn, site) for both in zip(*outs, strict=True)]

    def _while(self, eqn: JaxprEqn, ins: Sequence[Place], site: Site) -> list[Place]:
        params, inside = eqn.params, Site(eqn, site)
        first = params['cond_nconsts']
        start = first + params['body_nconsts']

        def turn(carry: list[Place]) -> list[Place]:
            [again] = self.body(params['cond_jaxpr'], [*ins[:first], *carry], inside)
            if isinstance(again, Mixed):
                return [again] * len(carry)
            outs = self.body(params['body_jaxpr'], [*ins[first:start], *carry], inside)
            if not isinstance(again, Examples):
                return outs
            # Mapped: each example has turns of its own.
            return [self._either((again, place), eqn, site) for place in outs]

        return self._settled(turn, [*ins[start:]], eqn, site)

    def _scan(self, eqn: JaxprEqn, ins: Sequence[Place], site: Site) -> list[Place]:
        carry, body = jaxprs.carried_by(eqn), eqn.params['jaxpr']
        scanned, consts = ins[carry.stop :], [*ins[: carry.start]]
        if any(isinstance(place, Examples) and place.axis == 0 for place in scanned):
            # Each turn is for one example, if no turn reads what another one has made.
            of_turns: Axes = [tuple((n, 0) for n in range(carry.stop, len(ins)))]
            if len(carry) or not all(isinstance(x, frozenset) for x in consts):
                return [Mixed(eqn, site)] * len(eqn.outvars)
            return [self._from(of_turns, ins, eqn, site) for _ in eqn.outvars]
        within = [_shifted(place, -1) for place in scanned]
        stacked: list[Place] = []

        def turn(before: list[Place]) -> list[Place]:
            outs = self.body(body, [*consts, *before, *within], Site(eqn, site))
            stacked[:] = outs[len(carry) :]
            return outs[: len(carry)]

        after = self._settled(turn, [*ins[carry.start : carry.stop]], eqn, site)
        return [*after, *(_shifted(place, 1) for place in stacked)]

    def _settled(
        self,
        turn: Callable[[list[Place]], list[Place]],
        carry: list[Place],
        eqn: JaxprEqn,
        site: Site,
    ) -> list[Place]:
        """Where the examples are in what a loop carries, whatever turn it is."""
        while True:
            both = zip(carry, turn(carry), strict=True)
            joined = [self._either(pair, eqn, site) for pair in both]
            if joined == carry:
                return carry
            carry = joined

    def _either(self, places: Sequence[Place], eqn: JaxprEqn, site: Site) -> Place:
        """The place of examples in a value that is one of several."""
        places = [*map(_plain, places)]
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


def _examples_in(ins: Sequence[Place]) -> dict[int, Examples]:
    """The operands that have an axis of examples."""
    return {n: place for n, place in enumerate(ins) if isinstance(place, Examples)}


def _is_small(value: object) -> bool:
    """Whether an array may hold positions: integers or bools, and not too many."""
    # jax 0.7.2 has a class of its own for the arrays of literals.
    is_whole = hasattr(value, 'dtype') or np.isscalar(value)
    is_whole = is_whole and not isinstance(value, Tracer)
    return is_whole and _may_be_positions(jax.typeof(value))


def _may_be_positions(aval: Aval) -> bool:
    if hasattr(aval, 'inner_aval'):  # A mutable array.
        return False
    return getattr(aval.dtype, 'kind', '') in ('i', 'u', 'b') and aval.size <= _LARGE


def _place_of(value: Value | Atom, places: Mapping[Any, Place]) -> Place:
    """The place of a value, or of a variable of a jaxpr; or what a constant is."""
    if isinstance(value, Literal):
        return _of_constant(value.val)
    return places.get(value, _NOT_KNOWN)


def _of_constant(value: Array) -> Place:
    return Known(np.asarray(value)) if _is_small(value) else _NOT_KNOWN


def _is_of_positions(eqn: JaxprEqn) -> bool:
    return is_cheap(eqn) and all(_may_be_positions(var.aval) for var in eqn.outvars)


def _computed(eqn: JaxprEqn, ins: Sequence[Any]) -> list[Place]:
    """The outputs of an equation that reads known values alone."""
    with jax.ensure_compile_time_eval():
        outs = jaxprs.bind(eqn, [jnp.asarray(x.value) for x in ins])
    return [Known(np.asarray(x)) for x in outs]


def _plain(place: Place) -> Examples | Alike | Mixed:
    """The place of an array of which nothing else is known.

    Of a constant these are the axes along which it is the same everywhere.
    """
    if isinstance(place, Joined):
        return place.mixed
    if not isinstance(place, Known):
        return place
    x = place.value
    axes = range(x.ndim)
    return frozenset(n for n in axes if not x.size or (x == x.take([0], n)).all())


def _mixed_in(places: Iterable[Place]) -> Mixed | None:
    return next((place for place in places if isinstance(place, Mixed)), None)


def _is_alike(sources: Iterable[Source] | None, ins: Sequence[Place]) -> bool:
    """Whether an array is the same along an axis, if the axis comes from these."""
    return sources is not None and all(
        isinstance(place := ins[n], frozenset) and axis in place for n, axis in sources
    )


def _shifted(place: Place, by: int) -> Place:
    """The place with one axis more or less in front."""
    plain: Examples | Alike | Mixed = _plain(place)
    if isinstance(plain, Mixed):
        return plain
    if isinstance(plain, Examples):
        return plain._replace(axis=plain.axis + by)
    return frozenset(axis + by for axis in plain if axis + by >= 0)

"""A program as one list of steps, with the bodies of calls, loops and branches.

Two questions are followed back through it from its outputs: which outputs read a value,
and from which outputs a gradient may come back to it. This explains; ``pullback.py``
proves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from flax_sg.flow.pullback import Reach, has_tangent
from flax_sg.internals import jaxprs, primitives
from flax_sg.internals.jaxprs import Bodies, opened
from flax_sg.internals.primitives import Kind

UNKNOWN = 'unknown'
_BY_ITSELF = primitives.names_of(Kind.BY_ITSELF)


class Site(NamedTuple):
    """Where a body stands: JAX has one body of a function that is called twice.

    Attributes:
        call: the equation that runs it; None for the program.
        outer: the site of that equation.
    """

    call: JaxprEqn | None = None
    outer: Site | None = None

    def frames(self, eqn: JaxprEqn) -> Iterator[jaxprs.Frame]:
        """The lines of the user that made an equation of the body, innermost first."""
        yield from jaxprs.frames_of(eqn, self.function())
        if self.call is not None and self.outer is not None:
            yield from self.outer.frames(self.call)

    def source(self, eqn: JaxprEqn) -> str:
        """The innermost of these lines, in words."""
        return next(map(jaxprs.described, self.frames(eqn)), UNKNOWN)

    def function(self) -> str:
        """The innermost jitted function that has the body in it, see ``frames_of``."""
        if self.call is None or self.outer is None:
            return ''
        if self.call.primitive.name in jaxprs.JITTED:
            return jaxprs.function_in(self.call)
        return self.outer.function()


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An equation, or what a loop or a branch hands on to the next.

    Attributes:
        eqn: the equation.
        place: the site of its body.
        ins: the indices of the values that it reads; None for constants.
        outs: the indices of the values that it makes.
        joins: how many of the first values it hands on, one of them at a time. The
            others decide which. None for an equation.
    """

    eqn: JaxprEqn
    place: Site
    ins: list[int | None]
    outs: list[int]
    joins: int | None = None

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.eqn.primitive.name

    @property
    def source(self) -> str:
        """The line of the user."""
        return self.place.source(self.eqn)

    def reaches(self) -> list[int]:
        """For each input a bit for each output that depends on it."""
        if self.name in _BY_ITSELF:
            return [1 << n for n in range(len(self.ins))]
        return [(1 << len(self.outs)) - 1] * len(self.ins)


class Flat:
    """A program, written out.

    Attributes:
        avals: the type of each value.
        steps: the steps, in order, but for those that close a loop.
        inputs: the indices of the values that come in.
        outputs: the indices of those that go out; None for constants.
        flows: for each input of a step a bit for each output that a gradient comes back
            from.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.avals, self.steps = list[Any](), list[Step]()
        self._has_loops = False
        self._reach = Reach()
        self.flows = functools.cache(self._flows)
        self.inputs = list(map(self._new, jaxpr.invars))
        self.outputs = self._written_out(jaxpr, self.inputs, Site())

    @functools.cached_property
    def readers(self) -> list[list[tuple[Step, int]]]:
        """For each value the steps that read it, each with the index of the input."""
        readers: list[list[tuple[Step, int]]] = [[] for _ in self.avals]
        for step in self.steps:
            for n, value in enumerate(step.ins):
                if value is not None:
                    readers[value].append((step, n))
        return readers

    @functools.cached_property
    def makers(self) -> dict[int, Step]:
        """The equation of each value that one equation alone makes."""
        made = (step for step in self.steps if step.joins is None)
        return {value: step for step in made for value in step.outs}

    @functools.cached_property
    def read(self) -> list[int]:
        """For each value the outputs of the program that depend on it, as bits."""
        return self._reaching(Step.reaches, lambda aval: True)

    @functools.cached_property
    def live(self) -> list[int]:
        """For each value the outputs from which a gradient may come back, as bits.

        This asks JAX about each kind of equation, and takes as long as the proof.
        """
        return self._reaching(self.flows, has_tangent)

    def _flows(self, step: Step) -> list[int]:
        if step.joins is None:
            return self._reach.rows(step.eqn)
        # What decides is a bool or an integer: it has no derivative.
        return [
            value is not None and has_tangent(self.avals[value]) for value in step.ins
        ]

    def is_stopped(self, step: Step, index: int) -> bool:
        """Whether no gradient comes back through an input of a step."""
        bits = self.flows(step)[index]
        return not any(bits >> n & 1 and self.live[x] for n, x in enumerate(step.outs))

    def _reaching(
        self, rows: Callable[[Step], list[int]], is_end: Callable[[Any], bool]
    ) -> list[int]:
        """For each value the outputs of the program that it reaches.

        Args:
            rows: which outputs of a step each of its inputs reaches.
            is_end: whether an output of this type is reached at all.
        """
        reached = [0] * len(self.avals)
        for n, value in enumerate(self.outputs):
            if value is not None:
                reached[value] |= is_end(self.avals[value]) << n
        before: list[int] = []
        while reached != before:
            # Without a loop, one walk finds all.
            before = list(reached) if self._has_loops else reached
            for step in reversed(self.steps):
                outs = [reached[out] for out in step.outs]
                if not any(outs):
                    continue
                for value, bits in zip(step.ins, rows(step), strict=True):
                    for n, out in enumerate(outs if value is not None else ()):
                        reached[value or 0] |= out * (bits >> n & 1)
        return reached

    def _new(self, var: Any) -> int:
        self.avals.append(var.aval)
        return len(self.avals) - 1

    def _written_out(
        self, jaxpr: Any, inputs: Sequence[int | None], place: Site
    ) -> list[int | None]:
        """Adds the steps of a body; returns its outputs."""
        value_of = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(var: Any) -> int | None:
            return None if isinstance(var, Literal) else value_of.get(var)

        for eqn in jaxpr.eqns:
            ins = list(map(read, eqn.invars))
            outs = self._through_bodies(eqn, ins, place)
            if outs is None:
                outs = list(map(self._new, eqn.outvars))
                self.steps.append(Step(eqn, place, ins, outs))
            value_of.update(zip(eqn.outvars, outs, strict=True))
            # A value that is written to a mutable array is read from the array later.
            for var, value in zip(eqn.invars, ins, strict=True):
                if value is not None and jaxprs.is_ref(var):
                    self.steps.append(Step(eqn, place, ins, [value], len(ins)))
        return list(map(read, jaxpr.outvars))

    def _through_bodies(
        self, eqn: JaxprEqn, ins: Sequence[int | None], place: Site
    ) -> list[int | None] | None:
        """The outputs of an equation that runs bodies; None for all others."""
        bodies, inside = Bodies.of(eqn), Site(eqn, place)
        if not bodies.jaxprs:
            return None
        given, carry = list(ins), [self._new(eqn.invars[n]) for n in bodies.carry]
        given[bodies.carry.start : bodies.carry.stop] = carry
        outs_of_bodies = [
            self._written_out(opened(body), given[bodies.first :], inside)
            for body in bodies.jaxprs
        ]
        if eqn.primitive.name == 'cond':
            outs: list[int | None] = []
            for var, branches in zip(
                eqn.outvars, zip(*outs_of_bodies, strict=True), strict=True
            ):
                out, taken = self._new(var), [*branches, ins[0]]
                self.steps.append(Step(eqn, place, taken, [out], len(branches)))
                outs.append(out)
            return outs
        decide: list[int | None] = []
        if is_while := eqn.primitive.name == 'while':
            asked = [*ins[: bodies.first], *carry]
            decide = self._written_out(opened(eqn.params['cond_jaxpr']), asked, inside)
        # A turn reads what came in, or what the turn before has made.
        for index, value, after in zip(
            bodies.carry, carry, outs_of_bodies[0], strict=False
        ):
            taken = [ins[index], after, *decide]
            self.steps.append(Step(eqn, place, taken, [value], 2))
            self._has_loops = True
        return [*carry] if is_while else outs_of_bodies[0]

"""A program as one list of steps, with the bodies of calls, loops and branches.

Two questions are followed back through it from its outputs: which outputs read a value,
and from which outputs a gradient may come back to it. This explains; ``pullback.py``
proves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from flax_sg.flow.pullback import Reach, has_tangent
from flax_sg.internals import jaxprs
from flax_sg.programs import primitives
from flax_sg.programs.bodies import Bodies
from flax_sg.programs.primitives import Kind
from flax_sg.programs.steps import Program, Site, Step, Value, makers_of

_BY_ITSELF = primitives.names_of(Kind.BY_ITSELF)


@dataclasses.dataclass(frozen=True, eq=False)
class Join(Step):
    """What a loop or a branch hands on to the next.

    Attributes:
        count: how many of the first values it hands on, one of them at a time. The
            others decide which.
    """

    count: int


def reaches(step: Step) -> list[int]:
    """For each input of a step a bit for each output that depends on it."""
    if step.name in _BY_ITSELF:
        return [1 << n for n in range(len(step.ins))]
    return [(1 << len(step.outs)) - 1] * len(step.ins)


class Flat(Program):
    """A program, written out: the steps are in order, but for those that close a loop.

    Attributes:
        inputs: the numbers of the values that come in.
        outputs: the values that go out.
        flows: for each input of a step a bit for each output that a gradient comes back
            from.
    """

    def __init__(self, closed: ClosedJaxpr) -> None:
        super().__init__()
        self._has_loops = False
        self._reach = Reach()
        self.flows = functools.cache(self._flows)
        self.inputs = [self.new(var.aval) for var in closed.jaxpr.invars]
        self.outputs = self.walk(closed, self.inputs, Site())

    @functools.cached_property
    def readers(self) -> list[list[tuple[Step, int]]]:
        """For each value the steps that read it, each with the index of the input."""
        readers: list[list[tuple[Step, int]]] = [[] for _ in self.avals]
        for step in self.steps:
            for n, value in enumerate(step.ins):
                if isinstance(value, int):
                    readers[value].append((step, n))
        return readers

    @functools.cached_property
    def makers(self) -> dict[int, Step]:
        """The equation of each value that one equation alone makes."""
        return makers_of(x for x in self.steps if not isinstance(x, Join))

    @functools.cached_property
    def read(self) -> list[int]:
        """For each value the outputs of the program that depend on it, as bits."""
        return self._reaching(reaches, lambda aval: True)

    @functools.cached_property
    def live(self) -> list[int]:
        """For each value the outputs from which a gradient may come back, as bits.

        This asks JAX about each kind of equation, and takes as long as the proof.
        """
        return self._reaching(self.flows, has_tangent)

    def _flows(self, step: Step) -> list[int]:
        if not isinstance(step, Join):
            return self._reach.sources(step.eqn)
        # What decides is a bool or an integer: it has no derivative.
        return [isinstance(x, int) and has_tangent(self.avals[x]) for x in step.ins]

    def is_stopped(self, step: Step, index: int) -> bool:
        """Whether no gradient comes back through an input of a step."""
        bits = self.flows(step)[index]
        return not any(bits >> n & 1 and self.live[x] for n, x in enumerate(step.outs))

    def _reaching(
        self, to: Callable[[Step], list[int]], is_end: Callable[[Any], bool]
    ) -> list[int]:
        """For each value the outputs of the program that it reaches.

        Args:
            to: which outputs of a step each of its inputs reaches, as bits.
            is_end: whether an output of this type is reached at all.
        """
        reached = [0] * len(self.avals)
        for n, value in enumerate(self.outputs):
            if isinstance(value, int):
                reached[value] |= is_end(self.avals[value]) << n
        before: list[int] = []
        while reached != before:
            # Without a loop, one walk finds all.
            before = list(reached) if self._has_loops else reached
            for step in reversed(self.steps):
                outs = [reached[out] for out in step.outs]
                if not any(outs):
                    continue
                for value, bits in zip(step.ins, to(step), strict=True):
                    if isinstance(value, int):
                        for n, out in enumerate(outs):
                            reached[value] |= out * (bits >> n & 1)
        return reached

    def add(self, eqn: JaxprEqn, read: Sequence[Value], site: Site) -> Sequence[Value]:
        """Adds an equation, or the bodies that it runs; returns its outputs."""
        outs = self._through_bodies(eqn, read, site)
        if outs is None:
            outs = self.whole(eqn, read, site)
        # A value that is written to a mutable array is read from the array later.
        for var, value in zip(eqn.invars, read, strict=True):
            if isinstance(value, int) and jaxprs.is_ref(var):
                self.steps.append(Join(eqn, site, read, [value], len(read)))
        return outs

    def _through_bodies(
        self, eqn: JaxprEqn, ins: Sequence[Value], site: Site
    ) -> Sequence[Value] | None:
        """The outputs of an equation that runs bodies; None for all others."""
        bodies, inside = Bodies.of(eqn), Site(eqn, site)
        if not bodies.jaxprs:
            return None
        into, carry = list(ins), [self.new(eqn.invars[n].aval) for n in bodies.carry]
        into[bodies.carry.start : bodies.carry.stop] = carry
        outs_of_bodies = [
            self.walk(body, into[bodies.first :], inside) for body in bodies.jaxprs
        ]
        if eqn.primitive.name == 'cond':
            outs: list[Value] = []
            for var, branches in zip(
                eqn.outvars, zip(*outs_of_bodies, strict=True), strict=True
            ):
                out, ways = self.new(var.aval), [*branches, ins[0]]
                self.steps.append(Join(eqn, site, ways, [out], len(branches)))
                outs.append(out)
            return outs
        decide: list[Value] = []
        if is_while := eqn.primitive.name == 'while':
            asked = [*ins[: bodies.first], *carry]
            decide = self.walk(eqn.params['cond_jaxpr'], asked, inside)
        # A turn reads what came in, or what the turn before has made.
        for index, value, after in zip(
            bodies.carry, carry, outs_of_bodies[0], strict=False
        ):
            ways = [ins[index], after, *decide]
            self.steps.append(Join(eqn, site, ways, [value], 2))
            self._has_loops = True
        return carry if is_while else outs_of_bodies[0]

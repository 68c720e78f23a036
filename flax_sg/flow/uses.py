"""Where a program uses its parameters, and which of these uses are stopped.

A parameter is followed through casts, changes of shape and stops, and into the bodies
of ``jit``, ``scan`` and the like. The equation that reads it then is a use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn, Var

from flax_sg.flow.dependence import (
    FROM_NOTHING,
    REFUSED,
    Bodies,
    Dependence,
    bit,
    bits,
)
from flax_sg.flow.report import Use
from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import JITTED

# For each variable the parameters that it is: their numbers, and whether each has been
# stopped on its way.
Aliases: TypeAlias = dict[Any, set[tuple[int, bool]]]

UNKNOWN = 'unknown'
# Primitives that return their first input in another form.
SAME_VALUE = frozenset(
    (
        *('stop_gradient', 'convert_element_type', 'reduce_precision', 'copy', 'name'),
        *('reshape', 'broadcast_in_dim', 'transpose', 'squeeze', 'copy_p'),
        *('sharding_constraint', 'reshard', 'pvary', 'pcast', 'device_put'),
    )
)


class _Wanted(NamedTuple):
    """The outputs of a jaxpr on which any output of the program depends, as bits.

    Attributes:
        live: differentiably.
        read: in any way.
    """

    live: int
    read: int


class _Place(NamedTuple):
    """A place in the program.

    Attributes:
        stack: JAX's names of the scopes there.
        source: the line of the user.
        function: the jitted function that the place is in, see ``source_of``.
    """

    stack: str = ''
    source: str = UNKNOWN
    function: str = ''

    def at(self, eqn: JaxprEqn) -> _Place:
        """The place of an equation in a body that stands here."""
        source = jaxprs.source_of(eqn, self.function) or self.source
        return self._below(jaxprs.name_stack_of(eqn))._replace(source=source)

    def inside(self, eqn: JaxprEqn) -> _Place:
        """The place of the bodies of an equation that stands here."""
        name = eqn.primitive.name
        if name in JITTED:
            place = self._below(f'jit({eqn.params.get("name", "")})')
            return place._replace(function=jaxprs.function_in(eqn))
        return self._below('checkpoint' if jaxprs.checkpoint_of(eqn) else name)

    def _below(self, name: str) -> _Place:
        return self._replace(stack='/'.join(filter(None, (self.stack, name))))

    def use(self, stopped: bool, part: bool = False) -> Use:
        """A use of a parameter here."""
        return Use(self.stack or UNKNOWN, self.source, stopped, part)


class Uses:
    """The walk through a program.

    Attributes:
        found: for each parameter the uses so far.
    """

    def __init__(self, flow: Dependence, values: Dependence, count: int) -> None:
        self.flow = flow
        self.values = values
        self.found: list[list[Use]] = [[] for _ in range(count)]

    def of(self, jaxpr: Any, aliases: Aliases) -> list[list[Use]]:
        """The uses of each parameter.

        Args:
            jaxpr: the program.
            aliases: the inputs that are parameters.
        """
        every = bits(range(len(jaxpr.outvars)))
        self._walk(jaxpr, _Wanted(every, every), aliases, _Place())
        self._end(jaxpr.outvars, _Wanted(every, every), aliases, _Place())
        return self.found

    def _walk(
        self, jaxpr: Any, wanted: _Wanted, aliases: Aliases, place: _Place
    ) -> None:
        live = _wanted_in(self.flow, jaxpr, wanted.live)
        # A rule may give a derivative to what its function does not read.
        read = _wanted_in(self.values, jaxpr, wanted.read) | live
        for eqn in jaxpr.eqns:
            outs = _Wanted(
                bits(n for n, var in enumerate(eqn.outvars) if var in live),
                bits(n for n, var in enumerate(eqn.outvars) if var in read),
            )
            if not outs.read or not any(_of(aliases, var) for var in eqn.invars):
                continue
            here, bodies = place.at(eqn), Bodies.of(eqn)
            wants = outs.live | FROM_NOTHING
            flows = [bool(row & wants) for row in self.flow.rows(eqn)]
            reads = [bool(row & outs.read) for row in self.values.rows(eqn)]
            if eqn.primitive.name in SAME_VALUE:
                aliases.setdefault(eqn.outvars[0], set()).update(
                    (number, was or not flows[0])
                    for number, was in _of(aliases, eqn.invars[0])
                )
                continue
            for body in bodies.jaxprs:
                # The next turn of a loop reads what is carried.
                inner = _Wanted(
                    _of_body(bodies.carry, flows, outs.live),
                    _of_body(bodies.carry, reads, outs.read),
                )
                self._enter(body, bodies, eqn, inner, aliases, here.inside(eqn))
            used: dict[int, set[bool]] = {}
            for number in (*range(bodies.first), *bodies.carry):
                if flows[number] or reads[number]:
                    for parameter, was in _of(aliases, eqn.invars[number]):
                        stopped = was or not flows[number]
                        used.setdefault(parameter, set()).add(stopped)
            for parameter, said in used.items():
                # ``jnp.where`` of a parameter and the same one stopped: see ``sg.at``.
                part = eqn.primitive.name == 'select_n' and len(said) == 2
                self.found[parameter].append(here.use(said == {True}, part))

    def _enter(
        self,
        body: Any,
        bodies: Bodies,
        eqn: JaxprEqn,
        wanted: _Wanted,
        aliases: Aliases,
        place: _Place,
    ) -> None:
        """Follows parameters through one of the bodies of an equation."""
        inner: Aliases = {
            var: set(_of(aliases, eqn.invars[number]))
            for number, var in enumerate(body.invars, bodies.first)
            if number not in bodies.carry
        }
        if not any(inner.values()):
            return
        self._walk(body, wanted, inner, place)
        carried = len(bodies.carry)
        self._end(body.outvars[:carried], wanted, inner, place)
        for out, var in list(zip(eqn.outvars, body.outvars, strict=True))[carried:]:
            aliases.setdefault(out, set()).update(_of(inner, var))

    def _end(
        self, outs: Iterable[Any], wanted: _Wanted, aliases: Aliases, place: _Place
    ) -> None:
        """Notes the parameters that are outputs themselves as used there."""
        for output, var in enumerate(outs):
            if wanted.read & bit(output):
                for number, was in sorted(_of(aliases, var)):
                    stopped = was or not wanted.live & bit(output)
                    self.found[number].append(place.use(stopped))


def _of(aliases: Aliases, var: Any) -> set[tuple[int, bool]]:
    return aliases.get(var, set()) if isinstance(var, Var) else set()


def _wanted_in(kind: Dependence, jaxpr: Any, outputs: int) -> set[Any]:
    """The variables of a jaxpr on which some of its outputs depend."""
    ends = [outputs & bit(number) for number in range(len(jaxpr.outvars))]
    masks = kind.within(jaxpr, ends)
    return {var for var, mask in masks.items() if mask & ~REFUSED}


def _of_body(carry: range, inputs: Sequence[bool], outputs: int) -> int:
    """The outputs of a body that are wanted, as bits.

    Args:
        carry: the inputs of the equation that a loop carries.
        inputs: for each input of the equation whether it is wanted.
        outputs: the outputs of the equation that are wanted.
    """
    carried = bits(n for n, number in enumerate(carry) if inputs[number])
    return outputs & ~bits(range(len(carry))) | carried

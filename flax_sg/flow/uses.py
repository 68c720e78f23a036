"""Where a program uses its parameters, and which of these uses are stopped.

A parameter is followed through casts, changes of shape and stops, and into the bodies
of ``jit``, ``scan`` and the like. The equation that reads it then is a use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn, Var

from flax_sg.flow.dependence import Bodies, Dependence, bit, bits
from flax_sg.flow.report import Use
from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import JITTED

# The parameters that a variable is: their numbers, and what stopped each on its way, or
# the empty string.
Alias: TypeAlias = frozenset[tuple[int, str]]
Aliases: TypeAlias = dict[Any, Alias]
NO_PARAMETER: Alias = frozenset()

UNKNOWN = 'unknown'
# Primitives that return their inputs in another form.
SAME_VALUE = frozenset(
    (
        *('stop_gradient', 'convert_element_type', 'reduce_precision', 'copy', 'name'),
        *('reshape', 'broadcast_in_dim', 'transpose', 'squeeze', 'copy_p'),
        *('sharding_constraint', 'reshard', 'pvary', 'pcast', 'device_put'),
        'optimization_barrier',
    )
)
# Primitives that return their first input, with other elements in some places.
_OVERWRITE = frozenset(('scatter', 'dynamic_update_slice'))


class _Wanted(NamedTuple):
    """The outputs of a jaxpr on which any output of the program depends, as bits.

    Attributes:
        live: differentiably.
        read: in any way.
    """

    live: int
    read: int


class _Place(NamedTuple):
    """A place in the program, as a body knows it.

    Attributes:
        source: the line of the user.
        function: the jitted function that the place is in, see ``source_of``.
    """

    source: str = UNKNOWN
    function: str = ''

    def at(self, eqn: JaxprEqn) -> _Place:
        """The place of an equation in a body that stands here."""
        source = jaxprs.source_of(eqn, self.function) or self.source
        return self._replace(source=source)

    def inside(self, eqn: JaxprEqn) -> _Place:
        """The place of the bodies of an equation that stands here."""
        if eqn.primitive.name not in JITTED:
            return self
        return self._replace(function=jaxprs.function_in(eqn))


class _Body(NamedTuple):
    """A jaxpr in a certain place.

    Attributes:
        jaxpr: the open jaxpr.
        wanted: its outputs that matter.
        place: where it stands.
        ends: for each output what stops the gradient that does not come back to it.
    """

    jaxpr: Any
    wanted: _Wanted
    place: _Place
    ends: tuple[str, ...]

    @property
    def key(self) -> Hashable:
        """Equal for bodies that are walked alike."""
        return id(self.jaxpr), *self[1:]


# For each parameter its uses, each with how often it is met.
Found: TypeAlias = dict[int, dict[Use, int]]


class Uses:
    """The walk through a program."""

    def __init__(self, reach: Dependence, values: Dependence) -> None:
        self.reach = reach
        self.values = values
        # By body and inputs: a function that is called twice is walked once.
        self._walked: dict[Hashable, tuple[Any, Found, list[Alias]]] = {}
        self._stops: dict[Hashable, tuple[Any, dict[Any, str]]] = {}

    def of(self, jaxpr: Any, aliases: Aliases) -> Found:
        """The uses of each parameter.

        Args:
            jaxpr: the program.
            aliases: the inputs that are parameters.
        """
        every = bits(range(len(jaxpr.outvars)))
        ends = ('',) * len(jaxpr.outvars)
        body = _Body(jaxpr, _Wanted(every, every), _Place(), ends)
        found, outs = self._walk(body, [_of(aliases, var) for var in jaxpr.invars])
        self._end(body, outs, found)
        return found

    def _walk(self, body: _Body, inputs: Sequence[Alias]) -> tuple[Found, list[Alias]]:
        """The uses in a body, and what its outputs are.

        Args:
            body: the body.
            inputs: the parameters that each of its inputs is.
        """
        key = body.key, tuple(inputs)
        if key not in self._walked:
            self._walked[key] = body.jaxpr, *self._walk_anew(body, inputs)
        return self._walked[key][1:]

    def _walk_anew(
        self, body: _Body, inputs: Sequence[Alias]
    ) -> tuple[Found, list[Alias]]:
        jaxpr, wanted, place, _ = body
        aliases: Aliases = dict(zip(jaxpr.invars, inputs, strict=True))
        found: Found = {}
        live = _wanted_in(self.reach, jaxpr, wanted.live)
        # A rule may give a derivative to what its function does not read.
        read = _wanted_in(self.values, jaxpr, wanted.read) | live
        stops = self._stops_in(body, live)
        for eqn in jaxpr.eqns:
            outs = _Wanted(
                bits(n for n, var in enumerate(eqn.outvars) if var in live),
                bits(n for n, var in enumerate(eqn.outvars) if var in read),
            )
            is_written = any(var in read for var in eqn.invars if jaxprs.is_ref(var))
            if not (outs.read or is_written):
                continue
            if not any(_of(aliases, var) for var in eqn.invars):
                continue
            here, bodies = place.at(eqn), Bodies.of(eqn)
            flows = [bool(row & outs.live) for row in self.reach.rows(eqn)]
            reads = [bool(row & outs.read) for row in self.values.rows(eqn)]
            stack = jaxprs.name_stack_of(eqn)
            if eqn.primitive.name in SAME_VALUE:
                for number, out in enumerate(eqn.outvars):
                    by = '' if flows[number] else self._stop(stops, here, eqn, number)
                    alias = _of(aliases, eqn.invars[number])
                    aliases[out] = frozenset((one, was or by) for one, was in alias)
                continue
            for inner in self._bodies(eqn, bodies, outs, flows, reads, here, stops):
                self._enter(inner, bodies, eqn, aliases, found, stack)
            used: dict[int, dict[str, None]] = {}
            for number in (*range(bodies.first), *bodies.carry):
                if flows[number] or reads[number] or is_written:
                    for parameter, was in _of(aliases, eqn.invars[number]):
                        stop = was
                        if not (was or flows[number]):
                            stop = self._stop(stops, here, eqn, number)
                        used.setdefault(parameter, {})[stop] = None
            for parameter, said in used.items():
                # ``jnp.where`` of a parameter and the same one stopped: see ``sg.at``.
                part = eqn.primitive.name == 'select_n' and len(said) == 2
                if '' in said and eqn.primitive.name in _OVERWRITE:
                    part = any(parameter == n for n, _ in _of(aliases, eqn.invars[0]))
                stopped = '' not in said
                by = max(said) if part or stopped else ''
                use = Use(stack or UNKNOWN, here.source, stopped, part, by)
                _add(found, parameter, use, 1)
        return found, [_of(aliases, var) for var in jaxpr.outvars]

    def _bodies(
        self,
        eqn: JaxprEqn,
        bodies: Bodies,
        outs: _Wanted,
        flows: Sequence[bool],
        reads: Sequence[bool],
        here: _Place,
        stops: Mapping[Any, str],
    ) -> list[_Body]:
        # The next turn of a loop reads what is carried.
        wanted = _Wanted(
            _of_body(bodies.carry, flows, outs.live),
            _of_body(bodies.carry, reads, outs.read),
        )
        ends = tuple(stops.get(var, '') for var in eqn.outvars)
        place = here.inside(eqn)
        return [_Body(jaxpr, wanted, place, ends) for jaxpr in bodies.jaxprs]

    def _enter(
        self,
        body: _Body,
        bodies: Bodies,
        eqn: JaxprEqn,
        aliases: Aliases,
        found: Found,
        stack: str,
    ) -> None:
        """Follows parameters through one of the bodies of an equation."""
        inputs = [
            NO_PARAMETER if number in bodies.carry else _of(aliases, eqn.invars[number])
            for number in range(bodies.first, bodies.first + len(body.jaxpr.invars))
        ]
        if not any(inputs):
            return
        within, outs = self._walk(body, inputs)
        carried, ends = len(bodies.carry), {}
        self._end(body, outs[:carried], ends)
        below = _below(stack, _name_of(eqn))
        for parameter, uses in (*within.items(), *ends.items()):
            for use, times in uses.items():
                place = _below(below, use.place if use.place != UNKNOWN else '')
                _add(found, parameter, dataclasses.replace(use, place=place), times)
        for out, alias in list(zip(eqn.outvars, outs, strict=True))[carried:]:
            aliases[out] = _of(aliases, out) | alias

    def _end(self, body: _Body, outs: Iterable[Alias], found: Found) -> None:
        """Notes the parameters that are outputs themselves as used there."""
        for output, alias in enumerate(outs):
            if body.wanted.read & bit(output):
                is_live = body.wanted.live & bit(output)
                for number, was in sorted(alias):
                    by = was or ('' if is_live else body.ends[output] or UNKNOWN)
                    use = Use(UNKNOWN, body.place.source, bool(by), by=by)
                    _add(found, number, use, 1)

    # What stops a gradient.

    def _stops_in(self, body: _Body, live: Set[Any]) -> dict[Any, str]:
        """For the variables to which no gradient comes back, what stops it.

        It is the last equation on the way of the value that a gradient could have
        reached, had it come from the loss.
        """
        if body.key not in self._stops:
            self._stops[body.key] = body.jaxpr, self._stops_anew(body, live)
        return self._stops[body.key][1]

    def _stops_anew(self, body: _Body, live: Set[Any]) -> dict[Any, str]:
        found = {
            var: end
            for var, end in zip(body.jaxpr.outvars, body.ends, strict=True)
            if isinstance(var, Var) and end
        }
        for eqn in reversed(body.jaxpr.eqns):
            here = body.place.at(eqn)
            for number, var in enumerate(eqn.invars):
                dead = isinstance(var, Var) and var not in live and var not in found
                if dead and self.reach.carries(var.aval):
                    found[var] = self._stop(found, here, eqn, number)
        return found

    def _stop(
        self, stops: Mapping[Any, str], here: _Place, eqn: JaxprEqn, number: int
    ) -> str:
        """What stops the gradient of an input of an equation."""
        row = self.reach.rows(eqn)[number]
        outs = [var for n, var in enumerate(eqn.outvars) if row & bit(n)]
        later = [stops[var] for var in outs if var in stops]
        if later:
            return later[0]
        bodies = Bodies.of(eqn)
        ends = tuple(stops.get(var, '') for var in eqn.outvars)
        for jaxpr in bodies.jaxprs if not outs and number >= bodies.first else ():
            inner = _Body(jaxpr, _Wanted(0, 0), here.inside(eqn), ends)
            inside = self._stops_in(inner, set())
            by = inside.get(jaxpr.invars[number - bodies.first])
            if by:
                return by
        return f'{jaxprs.operation(eqn)} at {here.source}'


def _add(found: Found, parameter: int, use: Use, times: int) -> None:
    uses = found.setdefault(parameter, {})
    uses[use] = uses.get(use, 0) + times


def _below(stack: str, name: str) -> str:
    return '/'.join(filter(None, (stack, name)))


def _name_of(eqn: JaxprEqn) -> str:
    """How the bodies of an equation are called in a stack of names."""
    name = eqn.primitive.name
    if name in JITTED:
        return f'jit({eqn.params.get("name", "")})'
    return 'checkpoint' if jaxprs.checkpoint_of(eqn) else name


def _of(aliases: Aliases, var: Any) -> Alias:
    return aliases.get(var, NO_PARAMETER) if isinstance(var, Var) else NO_PARAMETER


def _wanted_in(kind: Dependence, jaxpr: Any, outputs: int) -> set[Any]:
    """The variables of a jaxpr on which some of its outputs depend."""
    ends = [outputs & bit(number) for number in range(len(jaxpr.outvars))]
    masks = kind.within(jaxpr, ends)
    return {var for var, mask in masks.items() if mask}


def _of_body(carry: range, inputs: Sequence[bool], outputs: int) -> int:
    """The outputs of a body that are wanted, as bits.

    Args:
        carry: the inputs of the equation that a loop carries.
        inputs: for each input of the equation whether it is wanted.
        outputs: the outputs of the equation that are wanted.
    """
    carried = bits(n for n, number in enumerate(carry) if inputs[number])
    return outputs & ~bits(range(len(carry))) | carried

"""Where a program uses its parameters, and which of these uses are stopped.

A parameter is followed under the names that it has on its way: into the bodies of
``jit``, ``scan`` and the like, through stops, casts and changes of shape. What takes it
then is a use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Var

from flax_sg.flow.dependence import BEYOND, Dependence, gathered
from flax_sg.flow.report import Use
from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import CALLS, JITTED, body_of, opened

# A parameter by its number, and whether it is stopped already.
Alias: TypeAlias = tuple[int, bool]
Aliases: TypeAlias = dict[Any, set[Alias]]

UNKNOWN = 'unknown'
# What makes no use of a value, but hands it on.
HANDS_ON = frozenset(
    (
        *('stop_gradient', 'convert_element_type', 'reduce_precision', 'copy', 'name'),
        *('reshape', 'broadcast_in_dim', 'transpose', 'squeeze', 'copy_p'),
        *('sharding_constraint', 'reshard', 'pvary', 'pcast', 'device_put'),
    )
)


@dataclasses.dataclass(frozen=True)
class _Body:
    """A jaxpr that an equation runs, and how it hangs together with the equation.

    Attributes:
        jaxpr: the open jaxpr.
        inputs: the number of its input for each input of the equation that goes into
            it as it is.
        outputs: the number of the output of the equation for each of its outputs that
            comes out as it is.
        live: for each of its outputs, which outputs of the program depend on it
            differentiably.
        needed: the same, differentiably or not.
    """

    jaxpr: Any
    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    live: Sequence[int]
    needed: Sequence[int]


class Uses:
    """The walk through a program.

    Attributes:
        found: for each parameter the uses so far.
    """

    def __init__(self, flow: Dependence, values: Dependence, count: int) -> None:
        self.flow = flow
        self.values = values
        self.found: list[list[Use]] = [[] for _ in range(count)]
        # What stands for a cotangent out of nothing; of what is refused all is said.
        self._beyond: list[int] = []

    def of(
        self, jaxpr: Any, owners: Sequence[int | None], asked: Sequence[int]
    ) -> list[list[Use]]:
        """The uses of each parameter.

        Args:
            jaxpr: the program.
            owners: for each input the number of the parameter that it belongs to.
            asked: the numbers of the outputs that count.
        """
        jaxpr = opened(jaxpr)
        aliases: Aliases = {}
        for var, number in zip(jaxpr.invars, owners, strict=True):
            if number is not None:
                aliases[var] = {(number, False)}
        ends = [0] * len(jaxpr.outvars)
        for number in asked:
            ends[number] = 1 << number
        self._beyond = [0, 1 << len(ends)]
        self._walk(jaxpr, ends, ends, aliases, '', UNKNOWN)
        for number in asked:
            var = jaxpr.outvars[number]
            stops = not self.flow.carries(var.aval)
            self._note(_of(aliases, var), stops, UNKNOWN, UNKNOWN)
        return self.found

    def _walk(
        self,
        jaxpr: Any,
        live_ends: Sequence[int],
        needed_ends: Sequence[int],
        aliases: Aliases,
        prefix: str,
        source: str,
        within: str = '',
    ) -> None:
        live = self.flow.within(jaxpr, [*live_ends, *self._beyond])
        needed = self.values.within(jaxpr, [*needed_ends, *self._beyond])
        for eqn in jaxpr.eqns:
            met = [n for n, var in enumerate(eqn.invars) if _of(aliases, var)]
            below = [live.get(var, 0) for var in eqn.outvars]
            # A rule may give a derivative to what its function does not read.
            below_needed = [
                needed.get(var, 0) | mask
                for var, mask in zip(eqn.outvars, below, strict=True)
            ]
            if not met or not any(below_needed):
                continue
            place = '/'.join(filter(None, (prefix, jaxprs.name_stack_of(eqn))))
            here = jaxprs.source_of(eqn, within) or source
            rest = self._into_bodies(
                self._bodies(
                    eqn, [*below, *self._beyond], [*below_needed, *self._beyond]
                ),
                eqn,
                met,
                aliases,
                '/'.join(filter(None, (place, _label(eqn)))),
                here,
                within,
            )
            flows, reads = self.flow.rows(eqn), self.values.rows(eqn)
            if eqn.primitive.name in HANDS_ON:
                taken = _of(aliases, eqn.invars[0])
                stops = not flows[0]
                given = {(number, was or stops) for number, was in taken}
                aliases.setdefault(eqn.outvars[0], set()).update(given)
                continue
            used: dict[int, set[bool]] = {}
            for number in rest:
                stops = not gathered(flows[number], [*below, *self._beyond])
                if stops and not gathered(
                    reads[number], [*below_needed, *self._beyond]
                ):
                    continue
                for parameter, was in _of(aliases, eqn.invars[number]):
                    used.setdefault(parameter, set()).add(was or stops)
            for number, said in sorted(used.items()):
                # ``jnp.where`` of a parameter and the same one stopped: see ``sg.at``.
                part = eqn.primitive.name == 'select_n' and len(said) == 2
                use = Use(place or UNKNOWN, here, said == {True}, part)
                self.found[number].append(use)

    def _into_bodies(
        self,
        bodies: Sequence[_Body],
        eqn: JaxprEqn,
        met: Sequence[int],
        aliases: Aliases,
        place: str,
        source: str,
        within: str,
    ) -> list[int]:
        """Follows parameters into the bodies of an equation.

        Returns:
            The inputs that go into none.
        """
        rest = set(met)
        if eqn.primitive.name in JITTED:
            within = jaxprs.function_in(eqn)
        for body in bodies:
            inner: Aliases = {}
            for number in met:
                if number in body.inputs:
                    var = body.jaxpr.invars[body.inputs[number]]
                    inner.setdefault(var, set()).update(
                        _of(aliases, eqn.invars[number])
                    )
                    rest.discard(number)
            if not inner:
                continue
            self._walk(body.jaxpr, body.live, body.needed, inner, place, source, within)
            for number, var in enumerate(body.jaxpr.outvars):
                handed = _of(inner, var)
                if number in body.outputs:
                    out = eqn.outvars[body.outputs[number]]
                    aliases.setdefault(out, set()).update(handed)
                elif body.needed[number]:
                    self._note(handed, not body.live[number], place, source)
        return sorted(rest)

    def _bodies(
        self, eqn: JaxprEqn, live: Sequence[int], needed: Sequence[int]
    ) -> list[_Body]:
        """The jaxprs in an equation.

        Args:
            eqn: the equation.
            live: for each of its outputs, which outputs of the program depend on it.
            needed: the same, differentiably or not.
        """
        name, outs = eqn.primitive.name, range(len(eqn.outvars))
        if name in CALLS:
            ins = range(len(eqn.invars))
            jaxpr = body_of(eqn)
            return [
                _Body(jaxpr, _same(ins), _same(outs), live[:-BEYOND], needed[:-BEYOND])
            ]
        if name == 'cond':
            ins = {number: number - 1 for number in range(1, len(eqn.invars))}
            return [
                _Body(
                    opened(branch), ins, _same(outs), live[:-BEYOND], needed[:-BEYOND]
                )
                for branch in eqn.params['branches']
            ]
        if name not in ('scan', 'while'):
            return []
        if name == 'scan':
            before, jaxpr = 0, opened(eqn.params['jaxpr'])
            turning = jaxprs.carried_by(eqn)
        else:
            before, jaxpr = eqn.params['cond_nconsts'], opened(eqn.params['body_jaxpr'])
            first = before + eqn.params['body_nconsts']
            turning = range(first, len(eqn.invars))
        carries = len(turning)
        ins = {n: n - before for n in range(before, len(eqn.invars))}
        return [
            _Body(
                jaxpr,
                {n: inner for n, inner in ins.items() if n not in turning},
                {n: n for n in outs if n >= carries},
                # What is carried out of a turn goes into the next one.
                [gathered(self.flow.rows(eqn)[n], live) for n in turning]
                + list(live[carries:-BEYOND]),
                [gathered(self.values.rows(eqn)[n], needed) for n in turning]
                + list(needed[carries:-BEYOND]),
            )
        ]

    def _note(
        self, aliases: Iterable[Alias], stops: bool, place: str, source: str
    ) -> None:
        for number, was in sorted(aliases):
            self.found[number].append(Use(place or UNKNOWN, source, was or stops))


def _same(numbers: range) -> dict[int, int]:
    return {number: number for number in numbers}


def _of(aliases: Aliases, var: Any) -> set[Alias]:
    return aliases.get(var, set()) if isinstance(var, Var) else set()


def _label(eqn: JaxprEqn) -> str:
    """What a body adds to the names of the places in it."""
    name = eqn.primitive.name
    if name in JITTED:
        return f'jit({eqn.params.get("name", "")})'
    return 'checkpoint' if jaxprs.checkpoint_of(eqn) else name

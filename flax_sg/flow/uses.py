"""Where a parameter goes: into calls and out of them, and which equations use it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Var

from flax_sg.flow.facts import UNKNOWN, Read, Table
from flax_sg.flow.report import Use
from flax_sg.internals import jaxprs
from flax_sg.internals.jaxprs import Bodies

# Primitives that return their inputs in another form.
_SAME_VALUE = frozenset(
    (
        *('stop_gradient', 'convert_element_type', 'reduce_precision', 'copy', 'name'),
        *('reshape', 'broadcast_in_dim', 'transpose', 'squeeze', 'copy_p'),
        *('sharding_constraint', 'reshard', 'pvary', 'pcast', 'device_put'),
        'optimization_barrier',
    )
)
# Primitives that return their first input, with other elements in some places.
_OVERWRITE = frozenset(('scatter', 'dynamic_update_slice'))


class Scope(NamedTuple):
    """A body in one of its calls: JAX has one body of a function that is called twice.

    Attributes:
        table: the facts of the body.
        call: the equation that runs it; None for the program.
        around: the scope of that equation.
    """

    table: Table
    call: JaxprEqn | None = None
    around: Scope | None = None

    def names(self) -> str:
        """The name stack that the equations of the body begin with."""
        if self.call is None or self.around is None:
            return ''
        name = self.call.primitive.name
        if name in jaxprs.JITTED:
            name = f'jit({self.call.params.get("name", "")})'
        elif jaxprs.checkpoint_of(self.call):
            name = 'checkpoint'
        return _joined(self.around.names(), jaxprs.name_stack_of(self.call), name)

    def use(self, eqn: JaxprEqn | None, by: str) -> Use:
        """The use of a value by an equation, or by the loop that runs the body."""
        if eqn is None:
            return Use(
                self.names() or UNKNOWN, self.table.place.source, bool(by), by=by
            )
        place = _joined(self.names(), jaxprs.name_stack_of(eqn)) or UNKNOWN
        return Use(place, self.table.place.at(eqn).source, bool(by), by=by)

    def is_carried(self, read: Read) -> bool:
        """Whether a loop takes the value as its carry, or a turn returns it so."""
        if read.eqn is not None:
            return read.operand in Bodies.of(read.eqn).carry
        return self.call is not None and read.operand < len(Bodies.of(self.call).carry)

    def passed(self, read: Read) -> list[tuple[Scope, Var]]:
        """The same value in the bodies that take it in, or where a body returns it."""
        if read.eqn is not None:
            first = Bodies.of(read.eqn).first
            inner = self.table.inner.get(read.eqn, ()) if read.operand >= first else ()
            return [
                (Scope(body, read.eqn, self), body.jaxpr.invars[read.operand - first])
                for body in inner
            ]
        if self.call is None or self.around is None:
            return []
        found = [(self.around, self.call.outvars[read.operand])]
        if self.is_carried(read):
            bodies = Bodies.of(self.call)
            again = bodies.carry[read.operand] - bodies.first
            found.append((self, self.table.jaxpr.invars[again]))
        return found


def uses(table: Table, slots: Iterable[int]) -> Counter[Use]:
    """How often each use of a parameter is met.

    Args:
        table: the facts of the program.
        slots: the inputs of the program that are the parameter.
    """
    # By equation, call and value. An equation that reads a value twice, as ``x * x``
    # does, is one use.
    found: dict[tuple[Scope, JaxprEqn | int, Any], dict[Use, None]] = {}
    seen: set[tuple[Scope, Var, str]] = set()
    waiting: list[tuple[Scope, Var, Read, str]] = []

    def follow(scope: Scope, var: Var, stop: str) -> None:
        if (scope, var, stop) not in seen:
            seen.add((scope, var, stop))
            reads = scope.table.reads.get(var, ())
            waiting.extend((scope, var, read, stop) for read in reads)

    for slot in reversed([*slots]):
        follow(Scope(table), table.jaxpr.invars[slot], '')
    while waiting:
        scope, var, read, stop = waiting.pop()
        eqn, operand, _ = read
        name = eqn.primitive.name if eqn else ''
        by = stop or scope.table.stopped_by(read)
        onward = [] if scope.is_carried(read) else scope.passed(read)
        # ``vmap`` runs all branches of a ``cond``, each with its inputs stopped for the
        # examples that do not take it, and chooses among the results.
        if eqn and operand and name == 'select_n' and jaxprs.is_of_cond(eqn):
            onward.append((scope, eqn.outvars[0]))
        elif eqn and name == 'stop_gradient' and jaxprs.is_of_cond(eqn):
            continue
        if eqn and name in _SAME_VALUE:
            out = eqn.outvars[operand]
            onward.append((scope, out))
            if not scope.table.of(out).by:
                stop = by
        for there in reversed(onward):
            follow(*there, stop)
        if not onward:
            use = scope.use(eqn, by)
            if name in _OVERWRITE and not operand and not by:
                use = dataclasses.replace(use, part=True)
            site = scope, eqn or operand, name == 'select_n' or var
            found.setdefault(site, {})[use] = None
    counts: Counter[Use] = Counter()
    for (_, _, is_choice), beside in found.items():
        stops = [use.by for use in beside if use.by]
        # ``jnp.where`` of a parameter and the same one stopped: see ``sg.at``.
        if is_choice is True and 0 < len(stops) < len(beside):
            live = (use for use in beside if not use.by)
            counts.update(
                dataclasses.replace(x, part=True, by=max(stops)) for x in live
            )
        else:
            counts.update([*beside])
    return counts


def _joined(*names: str) -> str:
    return '/'.join(filter(None, names))

"""What an operation does with a parameter itself, to find choices made by data.

``jnp.where(mask, stop_gradient(table), table)`` stops a part of the table. If data
makes the mask, no proof can tell which part. The naive attempt looks for such a choice
by its gradient, and takes each ``relu`` of a bias for one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from jax.extend.core import Var

from flax_sg.flow.facts import Read, Scope, Table
from flax_sg.internals import jaxprs

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


class Use(NamedTuple):
    """What an operation does with a parameter.

    Attributes:
        source: the line of the user.
        stopped: whether no gradient comes back.
        chooses: whether it may keep a part of the parameter, and take another value for
            the rest.
    """

    source: str
    stopped: bool
    chooses: bool


def uses(table: Table, slots: Iterable[int]) -> list[Use]:
    """The operations that take a parameter in, and do not return it in another form.

    Args:
        table: the facts of the program.
        slots: the inputs of the program that are the parameter.
    """
    # By equation and call: how the parameter comes in.
    found: dict[Any, list[tuple[Read, bool]]] = {}
    waiting = [(Scope(table), table.jaxpr.invars[slot], False) for slot in slots]
    seen: set[tuple[Scope, Var, bool]] = set()
    while waiting:
        scope, var, stopped = there = waiting.pop()
        if there in seen:
            continue
        seen.add(there)
        for read in scope.table.reads.get(var, ()):
            eqn, operand, fact = read
            name = eqn.primitive.name if eqn else ''
            onward = [] if scope.is_carried(read) else scope.passed(read)
            # ``vmap`` runs all branches of a ``cond``, each with its inputs stopped for
            # the examples that do not take it, and chooses among the results.
            if eqn and name in ('stop_gradient', 'select_n') and jaxprs.is_of_cond(eqn):
                if not operand:
                    continue
                onward = [(scope, eqn.outvars[0])]
            elif eqn and name in _SAME_VALUE:
                onward = [(scope, eqn.outvars[operand])]
            ends = stopped or not fact.live
            waiting += [
                (*to, ends if name in _SAME_VALUE else stopped) for to in onward
            ]
            if not onward:
                found.setdefault((scope, eqn or operand), []).append((read, ends))
    out: list[Use] = []
    for (scope, _), several in found.items():
        for (eqn, operand, _), ends in several:
            name = eqn.primitive.name if eqn else ''
            chooses = name in _OVERWRITE and not operand
            chooses |= name == 'select_n' and len(several) > 1
            place = scope.table.place
            out.append(Use(place.at(eqn) if eqn else place.source, ends, chooses))
    return out

"""An equation with a body of which a part does not change, split by JAX's rules."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Primitive

from flax_sg.ahead.costs import is_cheap, is_cheap_within
from flax_sg.ahead.walk import Walk
from flax_sg.internals import jaxprs
from flax_sg.internals.types import Aval
from flax_sg.programs.halves import halves_of
from flax_sg.programs.steps import Site, Value, is_in, numbers_in

# What JAX has rules for. It takes no account of examples in a ``shard_map``.
_SPLIT = frozenset(
    (*('scan', 'cond', 'while', 'shard_map'), *jaxprs.CHECKPOINTS, *jaxprs.JITTED)
)


def in_halves(
    walk: Walk, eqn: JaxprEqn, read: Sequence[Value], site: Site
) -> Sequence[Value] | None:
    """The known half, and the late half, which reads what the known half has made.

    None if there is no such half, or if it costs nothing.
    """
    name, batch = eqn.primitive.name, walk.batch
    if name not in _SPLIT or (batch is not None and name == 'shard_map'):
        return None
    is_late, again = batch.mixed_by(eqn, read, site) if batch else ((), frozenset())
    changes = [is_in(x, walk.changing) for x in read]
    fixed = [x for x in numbers_in(read) if x not in walk.changing]
    if not fixed or not (any(changes) or again):
        return None
    halves = halves_of(eqn, changes, _is_kept, again, is_late)
    if all(map(is_cheap_within, halves.known.eqns)):
        return None
    values = walk.walk(halves.known, [read[n] for n in halves.known_reads], site)
    count = len(values) - halves.kept
    outs, kept = values[:count], values[count:]
    inputs = [*kept, *(read[n] for n in halves.late_reads)]
    early, late = iter(outs), iter(walk.walk(halves.late, inputs, site, walk.whole))
    return [
        walk.new(var.aval) if is_new is None else next(late if is_new else early)
        for var, is_new in zip(eqn.outvars, halves.changes, strict=True)
    ]


def _is_kept(primitive: Primitive, *avals: Aval, **params: Any) -> bool:
    """Whether what an equation in a body makes is kept, rather than made again.

    What is made of two arrays is kept: one of them may be a frozen weight.
    """
    eqn: Any = types.SimpleNamespace(primitive=primitive, params=params)
    return sum(bool(aval.shape) for aval in avals) > 1 or not is_cheap(eqn)

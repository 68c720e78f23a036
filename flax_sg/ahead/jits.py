"""A ``jax.jit`` with shardings, of which a part does not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from flax_sg.ahead.costs import is_cheap
from flax_sg.ahead.steps import Value
from flax_sg.ahead.walk import Walk
from flax_sg.flow.flat import Site
from flax_sg.internals import jaxprs


def in_parts(
    walk: Walk, eqn: Any, read: Sequence[Value], site: Site
) -> Sequence[Value] | None:
    """The body, with constraints in place of the shardings."""
    shardings = jaxprs.constraints_of(eqn)
    if shardings is None:
        return None
    begin, inside = len(walk.steps), Site(eqn, site)

    def constrained(values: Sequence[Value], shardings: Sequence[Any]) -> list[Value]:
        return [
            x
            if sharding is None or isinstance(x, Literal)
            else walk.traced(
                lambda x, s=sharding: [jax.lax.with_sharding_constraint(x, s)],
                [x],
                inside,
            )[0]
            for x, sharding in zip(values, shardings, strict=True)
        ]

    outs = walk.walk(eqn.params['jaxpr'], constrained(read, shardings[0]), inside)
    outs = constrained(outs, shardings[1])
    known = [step.eqn for step in walk.steps[begin:] if walk.is_of_data(step)]
    costly = (x for x in known if x.primitive.name != 'sharding_constraint')
    if all(map(is_cheap, costly)):
        del walk.steps[begin:]
        return None
    return outs

"""A ``jax.checkpoint`` of which a part does not change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from flax_sg.ahead.costs import is_cheap
from flax_sg.ahead.steps import Step, Value, made_by, numbers_in, run
from flax_sg.ahead.walk import Walk
from flax_sg.flow.flat import Site
from flax_sg.internals import jaxprs


def in_parts(
    walk: Walk, eqn: Any, read: Sequence[Value], site: Site
) -> Sequence[Value] | None:
    """What depends on data leaves a checkpoint, and the rest is one again.

    What is made of parameters alone stays in it: outside, it would be saved for the
    backward pass.
    """
    checkpoint: Any = jaxprs.checkpoint_of(eqn)
    begin = len(walk.steps)
    outs = walk.walk(checkpoint.jaxpr, read, Site(eqn, site))
    body = walk.steps[begin:]
    del walk.steps[begin:]
    fixed = [step for step in body if walk.changing.isdisjoint(step.outs)]
    of_data = [step for step in fixed if not walk.data.isdisjoint(step.outs)]
    if all(is_cheap(step.eqn) for step in of_data):
        return None
    taken = {id(step) for step in of_data}
    others = [step for step in body if id(step) not in taken]
    maker = {n: step for step in others for n in step.outs}
    made_here = [x for x in numbers_in(outs) if x in maker and x in walk.changing]
    asked = [*dict.fromkeys(made_here)]
    rest = made_by(others, maker, asked, [], set())
    made = {n for step in rest for n in step.outs}
    ins = [n for step in rest for n in step.read() if n not in made]
    ins = tuple(dict.fromkeys(ins))

    def run_rest(*values: Any) -> list[Any]:
        return run(rest, dict(zip(ins, values, strict=True)), asked)

    call = jax.checkpoint(
        run_rest, policy=checkpoint.policy, prevent_cse=checkpoint.prevent_cse
    )
    walk.steps += fixed
    walk.add(Step(eqn, site, ins, tuple(asked), call, tuple(rest)))
    return outs

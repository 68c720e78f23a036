"""Splits a program: what depends on nothing that changes is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from jax.extend.core import ClosedJaxpr, JaxprEqn

from flax_sg.ahead import bodies, runs
from flax_sg.ahead.costs import bytes_of, is_cheap
from flax_sg.ahead.cut import cheapest_cut
from flax_sg.ahead.examples import Batch
from flax_sg.ahead.walk import Walk
from flax_sg.internals import jaxprs
from flax_sg.internals.types import Array, Aval
from flax_sg.programs.steps import Site, Step, Value, made_by, numbers_in

# More bytes than anything has.
_NEVER = 1 << 60


# For values that late can make of parameters and constants, the parameters.
_OfParameters: TypeAlias = dict[int, frozenset[int]]


class Split(NamedTuple):
    """A program in two.

    Attributes:
        early: the steps that make what is kept.
        late: the steps that make the outputs, of what is kept and of other inputs.
        kept: the values that are kept.
        outputs: the values that the program returns, or constants.
        avals: the type of each value.
        constants: the values that are constants of the program.
        steps: all steps.
        changing: the values that change from step to step.
        only_early: the values that do not change and that late cannot make of
            parameters.
        data: the values that depend on the data of a batch.
    """

    early: list[Step]
    late: list[Step]
    kept: list[int]
    outputs: list[Value]
    avals: list[Aval]
    constants: dict[int, Array]
    steps: list[Step]
    changing: set[int]
    only_early: set[int]
    data: set[int]


def split(
    program: ClosedJaxpr,
    changes: Sequence[bool],
    is_data: Sequence[bool],
    batch: Batch | None = None,
) -> Split:
    """Splits a closed jaxpr.

    Args:
        program: the closed jaxpr. Its inputs have the first numbers.
        changes: for each input whether it changes from step to step.
        is_data: for each input whether it comes with a batch. The others are
            parameters: late has them.
        batch: with ``examples=True`` where the examples are. Steps that mix them run at
            each step. So does what reads no data: it is of no example.
    """
    walk = Walk((runs.in_runs, bodies.in_halves), batch)
    inputs = [walk.new(var.aval) for var in program.jaxpr.invars]
    walk.changing = {n for n in inputs if changes[n]}
    walk.data = {n for n in inputs if is_data[n]} - walk.changing
    outputs = walk.walk(program, inputs, Site())
    fixed = [step for step in walk.steps if _is_fixed(step, walk)]
    live = _needed_at_each_step(walk, outputs)
    read = [*numbers_in(outputs), *(x for step in live for x in step.read())]
    made = _made_of_parameters(walk, fixed, {*inputs} - walk.changing - walk.data)
    only_early = {*range(len(walk.avals))} - made.keys() - walk.changing
    sizes = {
        n: bytes_of(walk.avals[n]) if batch is None or batch.can_be_kept(n) else _NEVER
        for n in only_early
    }
    needed = [x for x in read if x in only_early]
    kept = sorted(cheapest_cut(sizes, _makers(fixed, made, read), needed))
    return Split(
        early=made_by(walk.steps, kept),
        late=made_by(walk.steps, read, live, kept),
        kept=kept,
        outputs=outputs,
        avals=walk.avals,
        constants=walk.constants,
        steps=walk.steps,
        changing=walk.changing,
        only_early=only_early,
        data=walk.data,
    )


def _is_fixed(step: Step, walk: Walk) -> bool:
    """Whether a step makes the same each time, and does no more than that."""
    values = *step.read(), *step.outs
    return walk.changing.isdisjoint(values) and not jaxprs.has_effect(step.eqn)


def _needed_at_each_step(walk: Walk, outputs: Iterable[Value]) -> list[Step]:
    """Of the steps that run at each step those that an output needs, and effects."""
    needed, live = set(numbers_in(outputs)), list[Step]()
    for step in reversed(walk.steps):
        if _is_fixed(step, walk):
            continue
        if jaxprs.has_effect(step.eqn) or not needed.isdisjoint(step.outs):
            live.append(step)
            needed.update(step.read())
    return live[::-1]


def _made_of_parameters(
    walk: Walk, fixed: Iterable[Step], parameters: Iterable[int]
) -> _OfParameters:
    """What late makes of parameters and constants: what is cheap, or of no example."""
    made: _OfParameters = dict.fromkeys(walk.constants, frozenset())
    made.update({n: frozenset((n,)) for n in parameters})
    for step in fixed:
        read = step.read()
        is_made = is_cheap(step.eqn) or _is_unpacked(step, made)
        is_made = is_made or (walk.batch is not None and walk.data.isdisjoint(read))
        if is_made and all(x in made for x in read):
            made.update(dict.fromkeys(step.outs, _union(made, read)))
    return made


def _makers(
    fixed: Iterable[Step], made: _OfParameters, read: Iterable[int]
) -> dict[int, list[int]]:
    """What late can make again, if no other parameter is read for it: and of what."""
    makers, read_anyway = dict[int, list[int]](), _union(made, read)
    for step in fixed:
        read = step.read()
        is_free = all(made.get(x, read_anyway) <= read_anyway for x in read)
        if is_free and (is_cheap(step.eqn) or _is_looked_up(step.eqn)):
            of_kept = [x for x in dict.fromkeys(read) if x not in made]
            makers.update(dict.fromkeys(step.outs, of_kept))
    return makers


def _union(made: _OfParameters, values: Iterable[int]) -> frozenset[int]:
    return frozenset[int]().union(*(made.get(x, ()) for x in values))


def _is_looked_up(eqn: JaxprEqn) -> bool:
    """Whether rows of a table are larger than the indices that name them."""
    if eqn.primitive.name != 'gather':
        return False
    return bytes_of(eqn.invars[1].aval) < bytes_of(eqn.outvars[0].aval)


def _is_unpacked(step: Step, made: _OfParameters) -> bool:
    """Whether a table is read by parameters: weights are made of their codes."""
    if step.name != 'gather':
        return False
    return any(made.get(n) for n in numbers_in(step.ins[1:2]))

"""Splits a program: what depends on nothing that changes is computed once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import ClosedJaxpr, JaxprEqn

from flax_sg import errors
from flax_sg.ahead import bodies, runs
from flax_sg.ahead.costs import bytes_of, is_cheap
from flax_sg.ahead.cut import cheapest_cut
from flax_sg.ahead.examples import Batch, Examples
from flax_sg.ahead.walk import Walk
from flax_sg.internals import jaxprs
from flax_sg.internals.program import Site, Step, Value, made_by, numbers_in
from flax_sg.internals.types import Array, Aval

# More bytes than anything has.
_NEVER = 1 << 60


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
        once: the values that do not change and that late cannot make of parameters.
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
    once: set[int]
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
            each step. So does what reads no data: it is no row.
    """
    walk = Walk((runs.in_runs, bodies.in_halves), batch)
    inputs = [walk.new(var.aval) for var in program.jaxpr.invars]
    walk.changing = {n for n in inputs if changes[n]}
    walk.data = {n for n in inputs if is_data[n]} - walk.changing
    outputs = walk.walk(program, inputs, Site())
    changing, data = walk.changing, walk.data
    at_each_step, fixed = list[Step](), list[Step]()
    for step in walk.steps:
        is_fixed = changing.isdisjoint((*step.read(), *step.outs))
        is_fixed = is_fixed and not jaxprs.has_effect(step.eqn)
        (fixed if is_fixed else at_each_step).append(step)
    live = _needed(at_each_step, outputs)
    ends = [*numbers_in(outputs), *(x for step in live for x in step.read())]
    # What late makes of parameters and constants: for each value the parameters.
    roots: dict[int, frozenset[int]] = dict.fromkeys(walk.constants, frozenset())
    roots.update({n: frozenset((n,)) for n in inputs if n not in changing | data})
    for step in fixed:
        read = step.read()
        is_made = is_cheap(step.eqn) or _is_unpacked(step, roots)
        is_made = is_made or (batch is not None and data.isdisjoint(read))
        if is_made and all(x in roots for x in read):
            of_read = frozenset[int]().union(*(roots[x] for x in read))
            roots.update(dict.fromkeys(step.outs, of_read))
    read_anyway = frozenset[int]().union(*(roots[x] for x in ends if x in roots))
    # What late can make again, if no other parameter is read for it: and of what.
    makers: dict[int, list[int]] = {}
    for step in fixed:
        read = step.read()
        is_free = all(roots.get(x, read_anyway) <= read_anyway for x in read)
        if is_free and (is_cheap(step.eqn) or _is_looked_up(step.eqn)):
            of_kept = [x for x in dict.fromkeys(read) if x not in roots]
            makers.update(dict.fromkeys(step.outs, of_kept))
    once = {n for n in range(len(walk.avals)) if n not in roots and n not in changing}
    sizes = {
        n: bytes_of(walk.avals[n]) if batch is None or batch.can_be_kept(n) else _NEVER
        for n in once
    }
    kept = sorted(cheapest_cut(sizes, makers, [x for x in ends if x in once]))
    late = made_by(walk.steps, ends, live, kept)
    early = made_by(walk.steps, kept)
    parts = early, late, kept, outputs, walk.avals, walk.constants, walk.steps
    return Split(*parts, changing, once, data)


def _needed(at_each_step: Sequence[Step], outputs: Iterable[Value]) -> list[Step]:
    """Of the steps that run at each step those that an output needs, and effects."""
    needed, live = set(numbers_in(outputs)), list[Step]()
    for step in reversed(at_each_step):
        if jaxprs.has_effect(step.eqn) or not needed.isdisjoint(step.outs):
            live.append(step)
            needed.update(step.read())
    return live[::-1]


def _is_looked_up(eqn: JaxprEqn) -> bool:
    """Whether rows of a table are larger than the indices that name them."""
    if eqn.primitive.name != 'gather':
        return False
    return bytes_of(eqn.invars[1].aval) < bytes_of(eqn.outvars[0].aval)


def _is_unpacked(step: Step, roots: dict[int, frozenset[int]]) -> bool:
    """Whether a table is read by parameters: weights are made of their codes."""
    if step.name != 'gather':
        return False
    return any(roots.get(n) for n in numbers_in(step.ins[1:2]))


def of_the_batch(parts: Split, inputs: Mapping[int, tuple[str, Aval]]) -> str:
    """Says that rows of what is kept are not single examples; empty if they may be.

    Args:
        parts: a program that was split without looking at examples.
        inputs: the data of a batch, as for ``Batch``.
    """
    whole = 'If the data are a batch, what is kept belongs to all of it'
    advice = 'For rows of single examples, write examples=True.'
    arrays = {n: named for n, named in inputs.items() if named[1].shape}
    if not arrays:
        return ''
    try:
        batch = Batch(arrays)
    except errors.ArgumentTypeError:
        return f'{whole}. {advice}'
    mixed = next(filter(None, map(batch.mixed_in, parts.early)), [])
    if mixed:
        return f'{whole}: {batch.mixed[mixed[0]]} may mix its examples. {advice}'
    rows = [
        batch.places.get(n) == Examples() and parts.avals[n].shape[0] == batch.count
        for n in parts.kept
        if n in parts.data
    ]
    return '' if all(rows) else f'{whole}. {advice}'

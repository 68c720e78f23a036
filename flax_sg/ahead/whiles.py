"""A ``while`` of which a part does not change.

The number of turns is not known, so nothing is stacked. What is the same in all turns
leaves the loop. What a loop carries, and does not change, goes through a loop of its
own: it is known how that ends. The rest is a loop again, with all that it reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from flax_sg.ahead.costs import is_cheap
from flax_sg.ahead.steps import Split, Step, Value, is_in, made_by, numbers_in
from flax_sg.ahead.walk import Walk
from flax_sg.flow.flat import Site
from flax_sg.internals.jaxprs import Bodies


def in_parts(
    split: Callable[..., Split], walk: Walk, eqn: Any, read: Sequence[Value], site: Site
) -> Sequence[Value] | None:
    """A loop becomes what is the same in all turns, the known loop, and the rest."""
    bodies, body = Bodies.of(eqn), eqn.params['body_jaxpr']
    if eqn.params['cond_jaxpr'].out_avals[0].shape:
        return None  # Mapped: each row of the map has a number of turns of its own.
    asks, consts = read[: bodies.first], read[bodies.first : bodies.carry.start]
    start = [read[n] for n in bodies.carry]
    rows, fixed = [*map(walk.change, consts)], [is_in(x, walk.changing) for x in asks]
    is_data = [is_in(x, walk.data) for x in consts]
    changes, before = [is_in(x, walk.changing) for x in start], list[bool]()
    while True:
        before = changes
        nothing = [False] * (len(asks) + len(start))
        condition = split(eqn.params['cond_jaxpr'], fixed + changes, nothing)
        if is_in(condition.outputs[0], condition.changing):
            changes = [True] * len(start)
        # What does not change differs from turn to turn: it is data.
        of_turn = [not x for x in changes]
        known = split(body, rows + changes, is_data + of_turn, changes)
        found = zip(changes, known.outputs, strict=True)
        changes = [old or is_in(x, known.changing) for old, x in found]
        if changes == before:
            break
    whole = split(body, rows + [True] * len(start), is_data + [False] * len(start))
    firsts = len(asks), len(consts)
    apart = _Loop.of(firsts, condition, known, known.early, [not x for x in changes])
    is_apart = not all(changes) and not all(is_cheap(x.eqn) for x in apart.turn)
    is_hoisted = not all(is_cheap(step.eqn) for step in whole.early)
    if not is_apart and not is_hoisted:
        return None
    values: dict[int, Value] = dict(enumerate([*consts, *start]))
    values.update(enumerate(walk.twins(consts, whole), len(values)))
    outs = tuple(walk.new(var.aval) for var in eqn.outvars)

    def add(loop: _Loop, asked: Collection[int]) -> None:
        operands = [asks[n] for n in loop.asks] + [values[n] for n in loop.reads]
        operands += [start[k] for k in loop.carried]
        makes = (
            outs[k] if k in asked else walk.new(walk.avals[outs[k]])
            for k in loop.carried
        )
        step = Step(eqn, site, tuple(operands), tuple(makes), loop.run, loop.turn)
        walk.add(step)

    if is_hoisted:
        kept = [n for n in whole.kept if n not in values]
        arrays = sorted({n for x in whole.early for n in x.read()} & values.keys())
        same = tuple(walk.new(whole.avals[n]) for n in kept)
        call = functools.partial(_run, whole, arrays, kept)
        operands = tuple(values[n] for n in arrays)
        walk.add(Step(eqn, site, operands, same, call, tuple(whole.early)))
        values.update(zip(kept, same, strict=True))
    late = [x or not is_apart for x in changes]
    if is_apart:
        add(apart, apart.carried)
    if any(late):
        steps = whole.late if is_hoisted else whole.steps
        loop = _Loop.of(firsts, condition, whole, steps, late)
        add(loop, [k for k, x in enumerate(late) if x])
    return outs


def _run(
    parts: Split, arrays: Sequence[int], kept: Sequence[int], *values: Any
) -> list[Any]:
    """Makes what is the same in all turns."""
    return parts.run(parts.early, dict(zip(arrays, values, strict=True)), kept)


class _Loop(NamedTuple):
    """A part of a loop.

    Attributes:
        condition: the condition, as a program.
        decides: the steps of it.
        asks: the constants that these read.
        body: the body, as a program.
        turn: the steps of it that belong to the part.
        reads: the values that these read, but for those that are carried.
        carried: the positions of what is carried.
        firsts: the numbers of the first carry in the condition, and in the body.
    """

    condition: Split
    decides: tuple[Step, ...]
    asks: list[int]
    body: Split
    turn: tuple[Step, ...]
    reads: list[int]
    carried: list[int]
    firsts: tuple[int, int]

    @classmethod
    def of(
        cls,
        firsts: tuple[int, int],
        condition: Split,
        body: Split,
        steps: Sequence[Step],
        is_asked: Sequence[bool],
    ) -> _Loop:
        """The part that makes some of what is carried, and what the condition reads."""
        count = len(is_asked)
        decides, read = _made(condition, condition.steps, condition.outputs)
        carried = {k for k, is_one in enumerate(is_asked) if is_one}
        carried |= {n - firsts[0] for n in read if n >= firsts[0]}
        asks, before = [n for n in read if n < firsts[0]], set[int]()
        turn, reads = list[Step](), list[int]()
        while carried != before:
            before = carried
            turn, reads = _made(body, steps, [body.outputs[k] for k in sorted(carried)])
            carried = carried | {
                n - firsts[1] for n in reads if 0 <= n - firsts[1] < count
            }
        reads = [n for n in reads if n - firsts[1] not in carried]
        return cls(
            *(condition, tuple(decides), asks, body, tuple(turn), reads),
            *(sorted(carried), firsts),
        )

    def run(self, *values: Any) -> Any:
        """Runs the part."""
        first = len(self.asks)
        last = first + len(self.reads)
        asks = dict(zip(self.asks, values[:first], strict=True))
        reads = dict(zip(self.reads, values[first:last], strict=True))
        outputs = [self.body.outputs[k] for k in self.carried]

        def carry(first: int, now: Sequence[Any]) -> dict[int, Any]:
            numbers = (first + k for k in self.carried)
            return dict(zip(numbers, now, strict=True))

        def goes_on(now: Sequence[Any]) -> Any:
            known = {**asks, **carry(self.firsts[0], now)}
            return self.condition.run(self.decides, known, self.condition.outputs)[0]

        def turn(now: Sequence[Any]) -> Any:
            known = {**reads, **carry(self.firsts[1], now)}
            return self.body.run(self.turn, known, outputs)

        return jax.lax.while_loop(goes_on, turn, [*values[last:]])


def _made(
    parts: Split, steps: Sequence[Step], asked: Sequence[Value]
) -> tuple[list[Step], list[int]]:
    """The steps that make some values, and the inputs that they read."""
    maker = {n: step for step in steps for n in step.outs}
    needed = made_by(steps, maker, numbers_in(asked), [], set())
    read = {*numbers_in(asked), *(n for step in needed for n in step.read())}
    made = {n for step in needed for n in step.outs} | parts.constants.keys()
    return needed, sorted(read - made)

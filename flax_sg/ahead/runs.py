"""The first turns of a loop, which read only frozen layers of its stacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from flax_sg.ahead.rows import Mask
from flax_sg.ahead.steps import Step, Value, made_by, numbers_in, run
from flax_sg.ahead.walk import Walk
from flax_sg.flow.flat import Site
from flax_sg.internals import jaxprs


def known_turns(walk: Walk, eqn: Any, read: Sequence[Value]) -> tuple[list[Value], int]:
    """How many of the first turns of a scan read no rows that change.

    Returns:
        What the scan reads in these turns, and how many they are.
    """
    length, carry = eqn.params['length'], jaxprs.carried_by(eqn)
    fixed, changes = [*read], np.zeros(length, bool)
    for n, value in enumerate(read):
        rows = walk.rows.get(value) if isinstance(value, int) else None
        if rows is None or n in carry:
            continue
        turns = rows.changes
        if n < carry.start:
            turns = _turns_reading(walk, eqn, read, n, rows.changes)
        if turns is not None:
            fixed[n], changes = rows.twin, changes | turns
    if eqn.params['reverse']:
        changes = changes[::-1]
    is_steady = fixed == [*read]
    first = int(changes.argmax()) if changes.any() else length
    return fixed, 0 if is_steady else first


def _turns_reading(
    walk: Walk, eqn: Any, read: Sequence[Value], number: int, rows: Mask
) -> Mask | None:
    """In which turns a scan reads some rows of a constant, by an index that is known.

    None, if it reads the constant otherwise.
    """
    body, carry = eqn.params['jaxpr'], jaxprs.carried_by(eqn)
    inner = Walk(dict.fromkeys(jaxprs.CHECKPOINTS, _inlined))
    inputs = [inner.new(var.aval) for var in body.jaxpr.invars]
    # Only what reads the constant is taken apart.
    inner.changing, inner.data = {number}, {*inputs} - {number}
    outputs = inner.walk(body, inputs, Site())
    turns = np.zeros(eqn.params['length'], bool)
    readers = [step for step in inner.steps if number in step.read()]
    if number in numbers_in(outputs):
        return None
    for step in readers:
        is_slice = step.eqn.primitive.name == 'dynamic_slice'
        if not is_slice or number in numbers_in(step.ins[1:]):
            return None
        start = step.ins[1]
        needed = made_by(inner.steps, inner.makers, numbers_in([start]), [], set())
        given = {*inputs} & {
            *numbers_in([start]),
            *(n for s in needed for n in s.read()),
        }
        known = {n: walk.constant(read[n]) for n in given if n >= carry.stop}
        if len(known) < len(given) or any(x is None for x in known.values()):
            return None
        starts = _in_each_turn(inner, needed, known, start)
        size = step.eqn.params['slice_sizes'][0]
        starts = np.clip(starts, 0, len(rows) - size).reshape(-1, 1)
        turns |= rows[starts + np.arange(size)].any(1)
    return turns


def _in_each_turn(
    walk: Walk, steps: list[Step], given: dict[int, Any], asked: Value
) -> Any:
    """A value in each turn, of values that are scanned."""

    def turn(given: dict[int, Any]) -> Any:
        return run(steps, {**walk.constants, **given}, [asked])[0]

    with jax.ensure_compile_time_eval():
        return np.asarray(jax.vmap(turn)(given) if given else turn(given))


def _inlined(walk: Walk, eqn: Any, read: Sequence[Value], site: Site) -> Any:
    return walk.walk(jaxprs.body_of(eqn), read, Site(eqn, site))


def in_two_runs(eqn: Any, first: int) -> Callable[..., list[Any]]:
    """A function that runs the first turns of a scan, and then the others."""
    params, carried = eqn.params, jaxprs.carried_by(eqn)
    body, reverse, length = params['jaxpr'], params['reverse'], params['length']
    bounds = [(0, first), (first, length)]
    if reverse:
        bounds = [(length - stop, length - start) for start, stop in bounds]

    def run_both(*operands: Any) -> list[Any]:
        consts, xs = operands[: carried.start], operands[carried.stop :]
        carry = operands[carried.start : carried.stop]

        def turn(carry: Sequence[Any], row: Sequence[Any]) -> Any:
            out = jaxpr_as_fun(body)(*consts, *carry, *row)
            return out[: len(carry)], out[len(carry) :]

        parts: list[Any] = []
        for start, stop in bounds:
            rows = [jax.lax.slice_in_dim(x, start, stop) for x in xs]
            carry, made = jax.lax.scan(
                turn, [*carry], rows, stop - start, reverse, params['unroll']
            )
            parts.append(made)
        rows = zip(*(parts[::-1] if reverse else parts), strict=True)
        return [*carry, *map(jnp.concatenate, rows)]

    return run_both

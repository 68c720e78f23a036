"""Random programs in several threads: a cached trace never has the wrong stops.

Each gradient is what the open blocks say, compared exactly with weights that were
stopped by hand. A function is traced where it never was for these answers, and not
traced again in the same blocks, nor in equal ones while one thread opens any. In the
end each loop over the same blocks settles: it traces nothing more.
"""

import dataclasses
from typing import Any

import hypothesis
import jax
from flax.core.scope import Scope
from hypothesis import strategies as st

from flax_sg import errors
from tests.helpers.described.language import Block, Leave, Program
from tests.helpers.described.nets import CHILDREN, KINDS, RAW
from tests.helpers.described.sequences import (
    SPELLINGS,
    Call,
    Child,
    Pair,
    Part,
    Raw,
    Runner,
    Session,
    Switch,
    Thread,
)
from tests.helpers.profile import LONG

# Those that mean other variables for each owner count twice.
CHOICE = [*SPELLINGS, *(row for row in SPELLINGS if not row[0].where.everywhere)]
DEEPEST = 5
parts = st.sampled_from('ab')


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Few filters and functions in one program, so that the same come again."""
    palette = draw(st.lists(st.sampled_from(CHOICE), min_size=2, max_size=4))
    kinds = draw(st.lists(st.sampled_from(list(KINDS)), min_size=2, max_size=3))
    calls = {'top': ['step', 'step', *kinds], 'session': kinds, 'pair': kinds}

    def body(place: str, depth: int) -> Program:
        return tuple(item(place, depth) for _ in range(draw(st.integers(1, 3))))

    def item(place: str, depth: int) -> Any:
        choice = draw(st.integers(0, 9)) if depth else 9
        if choice < 4:
            block = draw(st.sampled_from(draw(st.sampled_from(palette))))
            inside, judged = body(place, depth - 1), draw(st.booleans())
            judged = judged and block.where.everywhere
            return dataclasses.replace(block, body=inside, judged=judged)
        if choice < 6:
            if place == 'pair':
                return Part(draw(parts), body(place, depth - 1))
            if place == 'session':
                return Pair(body('pair', depth - 1), draw(st.booleans()))
            if choice == 4:
                return Thread(body('top', depth - 1))
            return Session((Pair(body('pair', depth - 1)), *body('session', 1)))
        if choice == 6 and place != 'pair' and depth < DEEPEST:
            return Leave(draw(st.integers(0, 2)))
        if place == 'pair' and choice < 9:
            part, wrap = draw(parts), draw(st.sampled_from(list(RAW)))
            child = draw(st.sampled_from(list(CHILDREN)))
            kept = Child(part, 'use_kept')
            return (Child(part, child), Raw(part, wrap), kept)[choice - 6]
        return Call(draw(st.sampled_from(calls[place])))

    out: list[Any] = []
    for _ in range(draw(st.integers(2, 5))):
        out += [Switch(draw(st.sampled_from(['enc', 'head']))), item('top', DEEPEST)]
    return tuple(out)


def steps_of(program: Program) -> Program:
    """The compiled steps of a program, in their blocks."""
    out: list[Any] = []
    for item in program:
        if item in (Call('step'), Switch('enc'), Switch('head')):
            out.append(item)
        elif isinstance(item, Block) and (body := steps_of(item.body)):
            out.append(dataclasses.replace(item, body=body, judged=False))
    return tuple(out)


@hypothesis.given(program=programs())
@hypothesis.settings(
    max_examples=1000 if LONG else 8, suppress_health_check=list(hypothesis.HealthCheck)
)
def test_random_programs(program):
    if LONG:  # Or it would fill the memory.
        jax.clear_caches()
    flax = dict(vars(Scope))
    runner = Runner()
    for item in program:
        try:
            runner.check((item,))
        except errors.BlockError as error:  # Of a module's block in a trace.
            assert 'after the block has closed' in str(error)
            hypothesis.reject()
    steps = steps_of(program)
    for _ in range(3):
        runner.check(steps)
    before = runner.runs['step']
    runner.check(steps)
    assert runner.runs['step'] == before, 'traced: the loop did not settle'
    assert dict(vars(Scope)) == flax, 'hooks are left'

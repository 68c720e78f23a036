"""Random programs in several threads: a cached trace never has the wrong stops.

Each result is compared with weights that were stopped by hand. A function is not traced
again in the same blocks. In the end each loop over the same blocks settles: it traces
nothing more.
"""

import dataclasses

import hypothesis
import jax
from flax.core.scope import Scope
from hypothesis import strategies as st

from flax_sg import errors
from tests.helpers.described import drawn
from tests.helpers.described.compared import Compared
from tests.helpers.described.language import Block, Call, Program
from tests.helpers.profile import LONG

MODELS = st.lists(drawn.models(0, drawn.KEPT), min_size=1, max_size=2)


def steps_of(program: Program) -> Program:
    """The compiled steps of a program, in their blocks."""
    out = []
    for item in program:
        if isinstance(item, Call) and item.how == 'step':
            out.append(item)
        elif isinstance(item, Block) and (body := steps_of(item.body)):
            out.append(dataclasses.replace(item, body=body, judged=False))
    return tuple(out)


@hypothesis.given(models=MODELS, data=st.data())
@hypothesis.settings(
    max_examples=1000 if LONG else 8,
    phases=[hypothesis.Phase.generate],  # Shrinking takes many minutes.
    suppress_health_check=list(hypothesis.HealthCheck),
)
@jax.numpy_rank_promotion('allow')
def test_random_programs(models, data):
    if LONG:  # Or it would fill the memory.
        jax.clear_caches()
    program = data.draw(drawn.programs(models))
    flax = dict(vars(Scope))
    compared = Compared(models)
    for item in program:
        try:
            compared.check(item)
        except errors.BlockError as error:  # Of a module's block in a trace.
            assert 'after the block has closed' in str(error)
            hypothesis.reject()
    steps = steps_of(program)
    for _ in range(3):
        compared.real.start(steps)
    before = compared.real.traces.copy()
    compared.check(*steps)
    assert compared.real.traces == before, 'traced: the loop did not settle'
    assert dict(vars(Scope)) == flax, 'hooks are left'

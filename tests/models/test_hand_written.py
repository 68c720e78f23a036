"""In every workload and spelling, the program equals that with stops by hand (G6)."""

from typing import Any

import jax
import pytest

from benchmarks import models, spellings, workloads
from flax_sg import linen as nn
from flax_sg.testing import optimized_hlo

WORKLOADS = {work.name: work for work in workloads.workloads(workloads.SMALL)}
SPELLINGS: dict[str, spellings.Spelling | None] = {
    'block around apply': spellings.block_around,
    'blocks in the model': None,
    'lifted class': spellings.lifted_class,
    'decorated method': spellings.decorated_method,
    'Frozen': spellings.frozen,
    'mirror': spellings.mirror,
}


def lowered(work: workloads.Workload, loss: workloads.Loss) -> Any:
    """A step: loss, new state, gradients of parameters and of the first input."""
    step = jax.value_and_grad(loss, argnums=(0, 2), has_aux=True)
    params, state, inputs = work.arrays()
    return jax.jit(step).lower(params, state, *inputs)


# One workload of each kind. The frozen part of a model makes no new kind.
IN_CI = {*('three losses', 'ResNet, frozen stem', 'LoRA')}


@pytest.mark.parametrize(
    'name',
    [pytest.param(n, marks=[] if n in IN_CI else pytest.mark.long) for n in WORKLOADS],
)
def test_the_program_is_the_one_written_by_hand(name: str) -> None:
    work = WORKLOADS[name]
    programs: dict[str, str] = {}

    def program(loss: workloads.Loss) -> str:
        before = lowered(work, loss)
        text = before.as_text()
        # Programs that are equal before XLA optimizes them are equal afterwards.
        if text not in programs:
            programs[text] = optimized_hlo(before.compile())
        return programs[text]

    expected = program(work.loss(spellings.by_hand))
    for spelling, how in SPELLINGS.items():
        # A view leaves batch statistics alone, which the bare model updates.
        if how is not spellings.mirror or not work.arrays()[1]:
            assert program(work.loss(how)) == expected, spelling
    assert lowered(work, work.loss_of(work.module)).as_text() not in programs


def test_a_target_network_that_is_a_view_of_the_online_one() -> None:
    work = WORKLOADS['BYOL pair']
    module = models.Byol(
        workloads.SMALL.width,
        view=lambda online, target: nn.mirror(online, variables=target),
    )
    ours = lowered(work, work.loss_of(module))
    hand = lowered(work, work.loss(spellings.by_hand))
    assert optimized_hlo(ours.compile()) == optimized_hlo(hand.compile())

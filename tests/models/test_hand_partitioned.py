"""A freeze declared in the model costs no more than a partition by hand.

Stops by hand return full trees of zeros. Here the model declares the frozen part, and
`live` is derived from the model. Gradient, update and state cover the live part alone.
"""

from typing import Any

import jax
import optax
import pytest

from benchmarks import spellings, trainers, workloads
from flax_sg.testing import assert_same_program

WORK = next(
    work
    for work in workloads.workloads(workloads.SMALL)
    if work.name == 'transformer, frozen backbone'
)
DATA = trainers.Data(*WORK.arrays())
HEAD = sum(leaf.nbytes for leaf in jax.tree.leaves(DATA.params['head']))
ALL = sum(leaf.nbytes for leaf in jax.tree.leaves(DATA.params))


def size(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def gradient(trainer: trainers.Trainer) -> Any:
    args = trainer.params, trainer.state, *DATA.inputs
    return jax.jit(trainer.gradient).lower(*args).compile()


def shapes(trainer: trainers.Trainer) -> tuple[Any, Any]:
    """Shapes of the gradient and of the optimizer state."""
    args = trainer.params, trainer.state, *DATA.inputs
    _, grads = jax.eval_shape(trainer.gradient, *args)
    return grads, jax.eval_shape(trainer.init, trainer.params)


def update(trainer: trainers.Trainer) -> Any:
    donating = jax.jit(trainer.update, donate_argnums=(1, 2))
    return donating.lower(*shapes(trainer), trainer.params).compile()


def step(trainer: trainers.Trainer) -> Any:
    """Both in one program, as a training step is usually jitted."""

    def both(opt_state: Any, params: Any) -> Any:
        value, grads = trainer.gradient(params, trainer.state, *DATA.inputs)
        return value, *trainer.update(grads, opt_state, params)

    opt_state = shapes(trainer)[1]
    donating = jax.jit(both, donate_argnums=(0, 1))
    return donating.lower(opt_state, trainer.params).compile()


@pytest.mark.parametrize('declared', [None, spellings.frozen], ids=['block', 'Frozen'])
def test_the_gradient_is_that_of_the_live_part(declared: Any) -> None:
    ours = trainers.live(WORK, DATA, spelling=declared)
    hand = trainers.partition(WORK, DATA)
    compiled = gradient(ours)
    assert_same_program(compiled, gradient(hand))
    assert size(shapes(ours)[0]) == HEAD
    # The loss is one more output.
    assert compiled.memory_analysis().output_size_in_bytes <= HEAD + 4 + 3 * 8
    stops = trainers.stops(WORK, DATA)
    assert size(shapes(stops)[0]) == ALL


@pytest.mark.usefixtures('standard_promotion')
def test_the_update_and_the_step_are_those_of_the_live_part() -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    copies, counters = 2, 4  # Of the live parameters; bytes.
    ours, hand = trainers.live(WORK, DATA, tx), trainers.partition(WORK, DATA, tx)
    assert size(shapes(ours)[1]) == size(shapes(hand)[1]) == copies * HEAD + counters
    assert_same_program(update(ours), update(hand))
    assert_same_program(step(ours), step(hand))

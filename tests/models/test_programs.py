"""The compiled program equals one with the stop by hand at the same place (G6)."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen

from benchmarks import models, spellings, trainers, workloads
from flax_sg import linen as nn
from flax_sg.testing import assert_same_program, optimized_hlo
from tests.helpers import oracle, programs

X = jnp.linspace(-1.0, 1.0, 2 * 4 * 16).reshape(2, 4, 16)


def shapes_of(model: linen.Module, x: Any) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0), x)['params']


def step_of(model: linen.Module) -> Callable[..., Any]:
    """A function that returns the loss, and gradients of parameters and input."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(model.apply({'params': params}, x))

    return jax.value_and_grad(loss, argnums=(0, 1))


def by_hand(model: linen.Module, pattern: str) -> Callable[..., Any]:
    """The same on a copy of the weights in which those selected are stopped."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        selects = lambda path: re.fullmatch(pattern, path) is not None  # noqa: E731
        return jnp.sum(model.apply({'params': oracle.stopped(params, selects)}, x))

    return jax.value_and_grad(loss, argnums=(0, 1))


class Cell(linen.Module):
    """A scanned layer: plain, rematerialized as a method, or around another scan."""

    kind: str = 'plain'
    width: int = 32

    @linen.compact
    def plain(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return x + jnp.tanh(linen.Dense(self.width)(x)), None

    @linen.remat
    @linen.compact
    def remat(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return x + jnp.tanh(linen.Dense(self.width)(x)), None

    @linen.compact
    def nested(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return scanned(Cell, 3)(width=self.width)(x, None)

    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return getattr(self, self.kind)(x, _)


def scanned(cell: Any, length: int) -> Any:
    return linen.scan(cell, length=length, **oracle.STACKED)


class MadeBefore(linen.Module):
    """A scanned layer that was made before the block opens."""

    kind: str = 'plain'
    stop: models.Stop = models.no_stop

    def setup(self) -> None:
        self.embed = linen.Dense(32)
        self.layers = scanned(Cell, 8)(kind=self.kind)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.embed(x)
        with self.stop('layers/**'):
            x, _ = self.layers(x, None)
        return x


@pytest.mark.parametrize('kind', ['plain', 'remat', 'nested'])
def test_a_stop_around_a_scan_costs_no_copy_of_the_stack(kind: str) -> None:
    """Inside the body the stopped stack would become a residual of every step."""
    bare = MadeBefore(kind)
    args = shapes_of(bare, X), X
    blocked = programs.compiled(step_of(MadeBefore(kind, nn.stop_gradient)), *args)
    hand = programs.compiled(by_hand(bare, 'layers/.*'), *args)
    assert_same_program(blocked, hand)
    temporary = blocked.memory_analysis().temp_size_in_bytes
    assert temporary == hand.memory_analysis().temp_size_in_bytes


# Every workload and spelling.

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


# A freeze that the model declares costs no more than a partition by hand: gradient,
# update and state cover the live part alone.

WORK = WORKLOADS['transformer, frozen backbone']
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

"""G6: the compiled program is the one written by hand, the stop at the same place."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import models
import oracle
import programs
from flax_sg import linen as nn
from flax_sg.testing import assert_same_program, optimized_hlo

X = jnp.linspace(-1.0, 1.0, 2 * 4 * 16).reshape(2, 4, 16)

FROZEN = {
    'backbone': (r'layer_\d+/.*', re.compile(r'layer_\d+/.*')),
    'first half': (r'layer_[0-5]/.*', 'layer_[0-5]/**'),
    'second half': (
        r'layer_([6-9]|1\d)/.*',
        [f'layer_{number}/**' for number in range(6, 12)],
    ),
}


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


@pytest.mark.parametrize('name', FROZEN)
def test_transformer(name: str) -> None:
    pattern, where = FROZEN[name]
    args = shapes_of(models.Transformer(), X), X
    blocked = models.Transformer(stop=nn.stop_gradient, frozen=where)
    assert_same_program(step_of(blocked), by_hand(models.Transformer(), pattern), *args)


def test_the_comparison_can_fail() -> None:
    args = shapes_of(models.Transformer(depth=2), X), X
    bare = models.Transformer(depth=2)
    with pytest.raises(AssertionError, match='different programs'):
        assert_same_program(step_of(bare), by_hand(bare, r'layer_1/.*'), *args)


def block_around(model: linen.Module) -> Callable[..., Any]:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        with nn.stop_gradient('layers/**'):
            return jnp.sum(model.apply({'params': params}, x))

    return jax.value_and_grad(loss, argnums=(0, 1))


def block_inside(model: linen.Module) -> Callable[..., Any]:
    return step_of(model.clone(stop=nn.stop_gradient, frozen='layers/**'))


def lifted_class(model: linen.Module) -> Callable[..., Any]:
    cls = nn.stop_gradient(type(model), 'layers/**')
    return step_of(cls(remat=model.remat))


def decorated_method(model: linen.Module) -> Callable[..., Any]:
    class Decorated(models.ScannedTransformer):
        @nn.stop_gradient('layers/**')
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return models.ScannedTransformer.__call__.__wrapped__(self, x)

    return step_of(Decorated(remat=model.remat))


SPELLINGS = [block_around, block_inside, lifted_class, decorated_method]


@pytest.mark.parametrize('remat', [False, True], ids=['scan', 'scan of remat'])
def test_scanned_transformer_in_every_spelling(remat: bool) -> None:
    model = models.ScannedTransformer(remat=remat)
    args = shapes_of(model, X), X
    hand = programs.compiled(by_hand(model, 'layers/.*'), *args)
    expected = optimized_hlo(hand)
    for spelling in SPELLINGS:
        actual = programs.compiled(spelling(model), *args)
        assert optimized_hlo(actual) == expected, spelling
        assert actual.cost_analysis()['flops'] == hand.cost_analysis()['flops']
        temporary = actual.memory_analysis().temp_size_in_bytes
        assert temporary == hand.memory_analysis().temp_size_in_bytes


def test_three_losses() -> None:
    """Four copies of the weights, each handed to the passes that it is for."""
    bare = models.ThreeLosses()
    x = X[0, :, :6]
    params = bare.init(jax.random.key(0), x)['params']

    def by_hand(params: Any, x: jax.Array) -> jax.Array:
        def only(part: str) -> Any:
            return {'params': oracle.stopped(params, lambda p: not p.startswith(part))}

        def call(weights: Any, method: str, *args: Any) -> Any:
            return bare.apply(weights, *args, method=method)

        stopped = only('nothing')
        code = call(stopped, 'infer', x)

        def refine(code: jax.Array, _: None) -> tuple[jax.Array, None]:
            return code + 0.1 * jnp.tanh(call(stopped, 'score', code)), None

        sample, _ = jax.lax.scan(refine, code, None, length=4)
        g, c, e = only('gln'), only('code'), only('explanation')
        gln = jnp.mean(call(g, 'score', call(g, 'infer', x)) ** 2)
        coding = jnp.mean((call(c, 'infer', x) - sample) ** 2) + jnp.mean(
            call(c, 'score', call(c, 'infer', x))
        )
        explain = lambda code: bare.apply(  # noqa: E731
            e, code, method=lambda model, code: model.explanation(code)
        )
        explained = explain(sample) + explain(call(e, 'infer', x))
        return gln + coding + jnp.mean((explained - x) ** 2)

    step = step_of(models.ThreeLosses(stop=nn.stop_gradient))
    expected = jax.value_and_grad(by_hand, argnums=(0, 1))
    oracle.assert_same(jax.jit(step)(params, x), jax.jit(expected)(params, x))
    assert_same_program(step, expected, params, x)


def test_siamese_pair() -> None:
    bare = models.Siamese()
    x = X[0]

    def by_hand(params: Any, x: jax.Array) -> jax.Array:
        predicted = bare.apply({'params': params}, x, method='predict')
        stopped = {'params': oracle.stopped(params)}
        target = bare.apply(stopped, x[:, ::-1], method='encode')
        return jnp.mean((predicted - target) ** 2)

    blocked = step_of(models.Siamese(stop=nn.stop_gradient))
    expected = jax.value_and_grad(by_hand, argnums=(0, 1))
    assert_same_program(blocked, expected, shapes_of(bare, x), x)


def test_lora() -> None:
    bare = models.LoRANet()
    x = X[0]
    args = shapes_of(bare, x), x
    blocked = step_of(models.LoRANet(stop=nn.stop_gradient))
    assert_same_program(blocked, by_hand(bare, r'.*base/.*'), *args)


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
    return linen.scan(
        cell,
        variable_axes={'params': 0},
        split_rngs={'params': True},
        length=length,
    )


class MadeBefore(linen.Module):
    """A scanned layer that exists before the block opens."""

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

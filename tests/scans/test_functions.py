"""What a function makes of frozen weights in a scan is made again, not saved."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

from benchmarks import few_bits
from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers import oracle, programs

DEPTH, RANK = 8, 2
SCALE = 1 / 127


def dequantize(path: str, w: Any) -> Any:
    return w.astype(jnp.float32) * SCALE


def whole_numbers(key: Any, shape: Any, dtype: Any) -> Any:
    return jax.random.randint(key, shape, -127, 128).astype(dtype)


class Stored(linen.Module):
    """A layer whose weight is stored in fewer bits."""

    dtype: Any = jnp.int8

    @linen.compact
    def __call__(self, x):
        shape = (x.shape[-1], x.shape[-1])
        w = self.param('w_in_bits', whole_numbers, shape, self.dtype)
        return x @ w.astype(x.dtype)  # For ``init``, where nothing is substituted.


class StoredWithCast(Stored):
    """The same; it makes what it multiplies with by itself."""

    @linen.compact
    def __call__(self, x):
        shape = (x.shape[-1], x.shape[-1])
        w = self.param('w_in_bits', whole_numbers, shape, self.dtype)
        return x @ dequantize('', w)


class Adapted(linen.Module):
    base: Any

    @linen.compact
    def __call__(self, x, _):
        normal = linen.initializers.normal()
        a = self.param('A', normal, (x.shape[-1], RANK))
        b = self.param('B', normal, (RANK, x.shape[-1]))
        return jnp.tanh(self.base(name='base')(x) + x @ a @ b), None


def scan_of(cls: Any, length: int = DEPTH) -> Any:
    return linen.scan(cls, length=length, **oracle.STACKED)


def stack(base: Any, lift: Any = lambda cls: cls) -> Any:
    return scan_of(lift(Adapted))(base)


substitute = functools.partial(nn.substitute, where='w_in_bits')


def wrapped(dtype: Any = jnp.int8, name: str | None = None) -> Any:
    return substitute(Stored(dtype, name=name), dequantize)


def of_stopped(path: str, w: Any) -> Any:
    return dequantize(path, jax.lax.stop_gradient(w))


FORMS = {
    'class': substitute(Stored, dequantize),
    'wrapper': wrapped,
    'frozen, with a cast of its own': lambda name: nn.Frozen(StoredWithCast(name=name)),
    'bfloat16, stopped by the function': substitute(
        functools.partial(Stored, dtype=jnp.bfloat16), of_stopped
    ),
    'bfloat16, a frozen wrapper': lambda name: nn.Frozen(wrapped(jnp.bfloat16, name)),
}


def split(model: Any, width: int) -> tuple[Any, Any, Any]:
    """Adapters, weights and an input."""
    x = jnp.linspace(-1.0, 1.0, 4 * width).reshape(4, width)
    params = oracle.init(model, jax.random.key(0), x, None)['params']
    return {name: params[name] for name in 'AB'}, {'base': params['base']}, x


def apply(model: Any, adapters: Any, weights: Any, x: Any) -> Any:
    return model.apply({'params': {**adapters, **weights}}, x, None)[0]


def saves_products(cls: Any) -> Any:
    policy = jax.checkpoint_policies.dots_saveable
    return linen.remat(cls, prevent_cse=False, policy=policy)


def loss_of(model: Any, stops: Any = lambda weights: weights) -> Any:
    def loss(adapters: Any, weights: Any, x: Any) -> Any:
        return jnp.sum(apply(model, adapters, stops(weights), x) ** 2)

    return loss


def temporary(model: Any, width: int) -> int:
    args = jax.eval_shape(functools.partial(split, model, width))
    return programs.temporary_bytes(jax.value_and_grad(loss_of(model), (0, 2)), *args)


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('width', (32, 128))
def test_what_a_function_makes_is_not_saved(form: str, width: int) -> None:
    """The weights of all layers, dequantized, are more than all temporary memory."""
    found = temporary(stack(FORMS[form]), width)
    # On the CPU, XLA copies bfloat16 stacks, whatever the program.
    dtype = jnp.bfloat16 if 'bfloat16' in form else jnp.int8
    naive = functools.partial(StoredWithCast, dtype)
    again = temporary(stack(naive, saves_products), width)
    naive = temporary(stack(naive), width)
    size = DEPTH * width * width * 4
    assert found <= 1.1 * again, (found, again)
    assert naive - found > 0.9 * size, (naive, found, size)


@pytest.mark.parametrize('form', FORMS)
def test_gradients_are_those_of_a_loop_by_hand(form: str) -> None:
    model = stack(FORMS[form])
    adapters, weights, x = split(model, 8)

    def by_hand(adapters: Any, x: Any) -> Any:
        w = jax.lax.stop_gradient(weights['base']['w_in_bits'])

        def layer(x: Any, of: Any) -> Any:
            y = x @ dequantize('', of['w']) + x @ of['A'] @ of['B']
            return jnp.tanh(y), None

        return jax.lax.scan(layer, x, {**adapters, 'w': w})[0]

    actual = oracle.grads(lambda a, x: apply(model, a, weights, x), adapters, x)
    oracle.assert_same(actual, oracle.grads(by_hand, adapters, x))
    assert any(map(np.any, jax.tree.leaves(actual)))


def test_a_product_of_frozen_weights_is_computed_once() -> None:
    class Merged(linen.Module):
        @linen.compact
        def __call__(self, x):
            normal, shape = linen.initializers.normal(), (x.shape[-1], x.shape[-1])
            one = self.param('one', normal, shape)
            return x @ (one @ self.param('two', normal, shape))

    def flops(base: Any, stops: Any) -> float:
        model = stack(base)
        args = jax.eval_shape(functools.partial(split, model, 32))
        return programs.flops(jax.grad(loss_of(model, stops), (0, 2)), *args)

    frozen = flops(lambda name: nn.Frozen(Merged(name=name)), lambda w: w)
    assert frozen == flops(Merged, jax.lax.stop_gradient)


def test_a_block_around_the_scan_makes_all_layers_at_once() -> None:
    model = stack(Stored)
    adapters, weights, x = split(model, 8)
    block = nn.substitute(dequantize, where='base/w_in_bits')
    said = '3,072 bytes of 1,536'
    with pytest.warns(errors.ScanMemoryWarning, match=said) as caught, block:
        apply(model, adapters, weights, x)
    assert caught.pop().filename == __file__  # Matched whole in tests/errors.


def test_the_benchmark_at_a_small_size() -> None:
    found = few_bits.rows(64)
    temporary = {name: size for name, (_, size) in found.items()}
    block = temporary.pop('int8, a block around the scan')
    assert len(set(temporary.values())) == 1 and block > temporary['float32'], found

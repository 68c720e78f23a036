"""Frozen weights in the body of a scan cost what they cost when stopped outside of it.

What a function makes of them is made again, not saved.
"""

import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax.experimental import io_callback

from benchmarks import few_bits
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.internals import lifting
from tests.helpers import oracle, programs

WIDTH, DEPTH, RANK = 64, 8, 2


def bare(module: Any) -> Any:
    return module


class Adapted(linen.Module):
    base: Any = functools.partial(linen.Dense, WIDTH)
    wrap: Any = bare

    @linen.compact
    def __call__(self, x, _):
        normal = linen.initializers.normal()
        a = self.param('A', normal, (x.shape[-1], RANK))
        b = self.param('B', normal, (RANK, x.shape[-1]))
        return jnp.tanh(self.wrap(self.base(name='base'))(x) + x @ a @ b), None


def scan_of(cls: Any, length: int = DEPTH) -> Any:
    return linen.scan(cls, length=length, **oracle.STACKED)


def stack(*fields: Any, lift: Any = bare) -> Any:
    return scan_of(lift(Adapted))(*fields)


def split(model: Any, width: int = WIDTH) -> tuple[Any, Any, Any]:
    """Adapters, weights and an input."""
    x = jnp.linspace(-1.0, 1.0, 4 * width).reshape(4, width)
    params = oracle.init(model, jax.random.key(0), x, None)['params']
    return {name: params[name] for name in 'AB'}, {'base': params['base']}, x


def apply(model: Any, adapters: Any, weights: Any, x: Any) -> Any:
    return model.apply({'params': {**adapters, **weights}}, x, None)[0]


def step(model: Any, stop: Any = bare, by: Any = (0, 2)) -> Any:
    """Value and gradients of a loss; weights may be stopped outside of the scan."""

    def loss(adapters: Any, weights: Any, x: Any) -> Any:
        return jnp.sum(apply(model, adapters, stop(weights), x) ** 2)

    return jax.value_and_grad(loss, by)


def temporary(model: Any, width: int = WIDTH, **how: Any) -> int:
    args = jax.eval_shape(functools.partial(split, model, width))
    return programs.temporary_bytes(step(model, **how), *args)


# A wrapper in the body, beside a stop outside of the scan, and no stop.


def costs(*base: Any, lift: Any = bare) -> tuple[int, int, int]:
    every: Any = {'by': (0, 1, 2)}
    plain = stack(*base, lift=lift)
    frozen = stack(*(base or (Adapted.base,)), nn.Frozen, lift=lift)
    hoisted = temporary(plain, stop=jax.lax.stop_gradient, **every)
    return temporary(frozen, **every), hoisted, temporary(plain, **every)


def test_a_frozen_layer_in_a_scan_costs_no_copy_of_the_stack() -> None:
    frozen, hoisted, plain = costs()
    assert frozen <= hoisted and frozen < plain


class Jitted(linen.Module):
    """Frozen weights of small compiled helpers: a cheap one, and a product."""

    @linen.compact
    def __call__(self, x):
        w = self.param('w', linen.initializers.normal(), (WIDTH, WIDTH))
        return x @ jax.jit(lambda w: jax.nn.relu(w) @ w)(jax.nn.silu(w))


def test_what_helpers_make_of_frozen_weights() -> None:
    frozen, hoisted, _ = costs(Jitted)
    assert frozen <= hoisted
    plain, args = stack(Jitted), split(stack(Jitted))
    actual = step(stack(Jitted, nn.Frozen), by=(0, 1, 2))(*args)
    expected = step(plain, jax.lax.stop_gradient, (0, 1, 2))(*args)
    oracle.assert_same(actual, expected)


def test_under_remat_it_is_harmless_and_left_alone() -> None:
    remat = functools.partial(linen.remat, prevent_cse=False)
    frozen, hoisted, _ = costs(lift=remat)
    assert frozen == hoisted


def test_a_call_that_uses_modules_of_the_body() -> None:
    """They belong to the trace of the body: the call has to stay in it."""

    class Layer(linen.Module):
        wrap: Any

        @linen.compact
        def __call__(self, x, _):
            other = linen.Dense(WIDTH, name='other')
            base = linen.Sequential([linen.Dense(WIDTH), lambda x: other(x)])
            return jnp.tanh(self.wrap(base)(x)), None

    model, x = scan_of(Layer, 2), jnp.linspace(-1.0, 1.0, 4 * WIDTH).reshape(4, WIDTH)
    params = oracle.init(model(bare), jax.random.key(0), x, None)['params']
    model(nn.Frozen).init(jax.random.key(0), x, None)  # That costs nothing.

    def grads(model: Any, stop: Any = bare) -> Any:
        return oracle.grads(lambda p, x: apply(model, stop(p), {}, x), params, x)

    with pytest.warns(errors.ScanMemoryWarning) as caught:
        actual = grads(model(nn.Frozen))
    assert caught.pop().filename == __file__  # Matched whole in tests/errors.
    oracle.assert_same(actual, grads(model(bare), oracle.stopped))


def test_where_a_scope_lies() -> None:
    for path, inside in (
        (('a', 'b'), False),
        (('scan(a)', 'b'), True),
        (('remat(scan(a))', 'b'), False),
        (('scan(a)', 'remat(b)', 'c'), False),
        (('scan(remat(a))', 'b'), True),
        (('remat(a)', 'scan(b)'), True),
        (('vmap(jit(scan(a)))', 'b'), True),
        (('vmap(a)', 'scan', 'remat'), False),
    ):
        scope: Any = types.SimpleNamespace(debug_path=path)
        assert lifting.is_in_scan(scope) is inside, path


def test_a_callback_of_a_frozen_parameter_and_the_names_of_operations():
    seen: list[float] = []

    class Body(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            with jax.named_scope('of_the_user'):
                y = nn.Frozen(Noted(name='noted'))(x)
            return y, None

    class Noted(linen.Module):
        @linen.compact
        def __call__(self, x):
            w = self.param('w', linen.initializers.ones, ())
            io_callback(lambda w: seen.append(float(w)), None, w, ordered=True)
            with jax.named_scope('inside'):
                return jnp.sin(w * x)

    # Flax 0.12.12 takes any callback for a value that changes from turn to turn.
    options = oracle.STACKED | {'check_constancy_invariants': False}
    stack = linen.scan(Body, length=3, **options)()
    variables = stack.init(jax.random.key(0), 0.5, None)
    seen.clear()
    stack.apply(variables, 0.5, None)
    jax.effects_barrier()
    assert seen == [1.0] * 3
    fn = jax.jit(jax.grad(lambda x: stack.apply(variables, x, None)[0]))
    text = fn.lower(0.5).as_text(debug_info=True)
    assert re.search(r'of_the_user/\S*inside', text)


# What a function makes of frozen weights.

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


def saves_products(cls: Any) -> Any:
    policy = jax.checkpoint_policies.dots_saveable
    return linen.remat(cls, prevent_cse=False, policy=policy)


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('width', (32, 128))
def test_what_a_function_makes_is_not_saved(form: str, width: int) -> None:
    """The weights of all layers, dequantized, are more than all temporary memory."""
    found = temporary(stack(FORMS[form]), width)
    # On the CPU, XLA copies bfloat16 stacks, whatever the program.
    dtype = jnp.bfloat16 if 'bfloat16' in form else jnp.int8
    naive = functools.partial(StoredWithCast, dtype)
    again = temporary(stack(naive, lift=saves_products), width)
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

    def flops(base: Any, stop: Any) -> float:
        args = jax.eval_shape(functools.partial(split, stack(base), 32))
        return programs.flops(step(stack(base), stop), *args)

    frozen = flops(lambda name: nn.Frozen(Merged(name=name)), bare)
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
    sizes = {name: size for name, (_, size) in found.items()}
    block = sizes.pop('int8, a block around the scan')
    assert len(set(sizes.values())) == 1 and block > sizes['float32'], found

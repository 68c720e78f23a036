"""`nn.Frozen` in the body of a scan costs what a stop outside of it costs."""

import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen
from jax.experimental import io_callback

from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.internals import lifting
from tests.helpers import oracle, programs

WIDTH, DEPTH, RANK = 64, 8, 2
X = jnp.linspace(-1.0, 1.0, 4 * WIDTH).reshape(4, WIDTH)


def bare(module: Any) -> Any:
    return module


class Adapted(linen.Module):
    wrap: Any = bare
    base: Any = functools.partial(linen.Dense, WIDTH)

    @linen.compact
    def __call__(self, x, _):
        normal = linen.initializers.normal()
        a = self.param('A', normal, (WIDTH, RANK))
        b = self.param('B', normal, (RANK, WIDTH))
        return jnp.tanh(self.wrap(self.base(name='base'))(x)) + x @ a @ b, None


class Stack(linen.Module):
    wrap: Any = bare
    lift: Any = bare
    base: Any = functools.partial(linen.Dense, WIDTH)

    @linen.compact
    def __call__(self, x):
        layers = linen.scan(
            self.lift(Adapted),
            variable_axes={'params': 0},
            split_rngs={'params': True, 'dropout': True},
            length=DEPTH,
        )
        return layers(self.wrap, self.base, name='layers')(x, None)[0]


def remat(cls: Any) -> Any:
    return linen.remat(cls, prevent_cse=False)


def is_base(path: str) -> bool:
    return '/base/' in f'/{path}'


def step(model: Any, selects: Any = None, x: Any = X) -> Any:
    def loss(params: Any, x: Any) -> Any:
        params = params if selects is None else oracle.stopped(params, selects)
        return jnp.sum(model.apply({'params': params}, x) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))


def params_of(model: Any) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0), X)['params']


# What stands in a scan, by how it is stopped: the memory of each of them.
def temporary_bytes(**fields: Any) -> dict[str, int]:
    plain = Stack(**fields)
    fns = {
        'frozen': step(Stack(nn.Frozen, **fields)),
        'hoisted': step(plain, is_base),
        'bare': step(plain),
    }
    args = params_of(plain), X
    return {name: programs.temporary_bytes(fn, *args) for name, fn in fns.items()}


def test_a_frozen_layer_in_a_scan_costs_no_copy_of_the_stack() -> None:
    found = temporary_bytes()
    assert found['frozen'] <= found['hoisted'], found
    assert found['frozen'] < found['bare'], found


class Jitted(linen.Module):
    """Frozen weights of small compiled helpers: a cheap one, and a product."""

    @linen.compact
    def __call__(self, x):
        w = self.param('w', linen.initializers.normal(), (WIDTH, WIDTH))
        return x @ jax.jit(lambda w: jax.nn.relu(w) @ w)(jax.nn.silu(w))


def test_what_helpers_make_of_frozen_weights() -> None:
    found = temporary_bytes(base=Jitted)
    assert found['frozen'] <= found['hoisted'], found
    plain = Stack(base=Jitted)
    params = oracle.init(plain, jax.random.key(0), X)['params']
    actual = step(Stack(nn.Frozen, base=Jitted))(params, X)
    oracle.assert_same(actual, step(plain, is_base)(params, X))


def test_under_remat_it_is_harmless_and_left_alone() -> None:
    found = temporary_bytes(lift=remat)
    assert found['frozen'] == found['hoisted'], found


def scan_of(layer: Any, length: int = 2) -> Any:
    return linen.scan(layer, length=length, **oracle.STACKED)


def grads(model: Any, params: Any, stop: Any = lambda p: p) -> Any:
    return oracle.grads(
        lambda p, x: model.apply({'params': stop(p)}, x, None)[0], params, X
    )


def test_a_call_that_uses_modules_of_the_body() -> None:
    """They belong to the trace of the body: the call has to stay in it."""

    class Layer(linen.Module):
        wrap: Any

        @linen.compact
        def __call__(self, x, _):
            other = linen.Dense(WIDTH, name='other')
            base = linen.Sequential([linen.Dense(WIDTH), lambda x: other(x)])
            return jnp.tanh(self.wrap(base)(x)), None

    model = scan_of(Layer)
    params = oracle.init(model(bare), jax.random.key(0), X, None)['params']
    model(nn.Frozen).init(jax.random.key(0), X, None)  # That costs nothing.
    with pytest.warns(errors.ScanMemoryWarning) as caught:
        actual = grads(model(nn.Frozen), params)
    assert caught.pop().filename == __file__  # Matched whole in tests/errors.
    oracle.assert_same(actual, grads(model(bare), params, oracle.stopped))


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

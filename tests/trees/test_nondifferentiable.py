"""A value that gets no gradient, and is its value in everything else."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization

import flax_sg as sg
from flax_sg import errors
from tests.helpers import oracle

ND = sg.NonDifferentiable


# Exact in both directions, with one trace.

KEYS = [jax.random.key(1), jax.random.key(2**31)]
VALUES = {
    'tree': [
        {'a': 1, 'b': [2.0, jnp.arange(3)], 'c': np.uint8(3), 'd': KEYS[0]},
        {'a': 5, 'b': [3.0, jnp.ones(3, int)], 'c': np.uint8(0), 'd': KEYS[1]},
    ],
    'python': [-7, 2**30 + 1, 0, -(2**31), 2**31 - 1],
    'int32': [np.int32(-7), np.int32(2**30 + 1), np.iinfo(np.int32).min],
    'uint32': [np.uint32(2**32 - 1), np.uint32(2**31)],
    'int16': [np.int16(-(2**15)), np.int16(5)],
    'bool': [True, False],
    'float': [0.1, -0.0, float('inf')],
    'bfloat16': [jnp.bfloat16(1.25), jnp.bfloat16(-3.0)],
    'complex': [1 + 2j, -3j],
    'array of bools': [jnp.array([True, False]), jnp.array([False, False])],
    'empty array': [jnp.zeros((0, 2), int)],
}
identity = jax.jit(lambda value: value)


@pytest.mark.parametrize('name', VALUES)
def test_values_are_exact_and_traced_once(name):
    traces: list[int] = []

    @jax.jit
    def fn(x):
        traces.append(1)
        return x.value, x

    for value in VALUES[name]:
        expected = identity(value)
        inner, whole = fn(ND(value))
        oracle.assert_same(inner, expected)
        oracle.assert_same(whole.value, expected)
        types = lambda t: [leaf.aval for leaf in jax.tree.leaves(t)]  # noqa: E731
        assert types(inner) == types(expected)
        oracle.assert_same(fn(whole)[0], expected)
        for array in jax.tree.leaves(ND(value)):
            assert jnp.issubdtype(jnp.result_type(array), jnp.inexact)
    assert len(traces) <= 2  # Once for Python's numbers, once for arrays.


def test_integers_of_64_bits():
    old = not hasattr(jax, 'enable_x64')
    with jax.experimental.enable_x64() if old else jax.enable_x64():
        for value in (2**62 + 1, -(2**63), np.uint64(2**64 - 1), -1):
            out = jax.jit(lambda x: x.value)(ND(value))
            assert int(out) == int(value)
            assert out.dtype == identity(value).dtype
        assert jax.jit(lambda x: x.value)(ND(0.1)).dtype == jnp.float64
    with pytest.raises(OverflowError):
        jax.jit(lambda x: x.value)(ND(2**31))


def test_what_is_no_number_is_static():
    traces: list[Any] = []

    @jax.jit
    def fn(x):
        traces.append(x.value)
        return 1.0

    thing = object()
    unhashable = {'not': {1, 2}}
    values = ('a', 'b', 'a', thing, thing, None, [1, 'x'], [2, 'x'])
    for value in (*values, unhashable, unhashable):
        fn(ND(value))
    assert traces[:3] == ['a', 'b', thing] and len(traces) == 6
    assert jax.tree.leaves(ND('a')) == []
    assert len({jax.tree.structure(ND(value)) for value in ('a', 'b', 'a')}) == 2
    grads = jax.grad(lambda p: p['x'] * len(p['s'].value))({'x': 1.0, 's': ND('text')})
    assert float(grads['x']) == 4.0


@pytest.mark.usefixtures('leaks')
def test_transformations_leak_nothing():
    n = ND(jnp.arange(3))

    @jax.jit
    def fn(x, n):
        y = jax.vmap(lambda n: n * x)(n)

        def body(carry, n):
            return carry + n * x, ND(n + carry.astype(int))

        total, steps = jax.lax.scan(body, 0.0 * x, n)
        inner = jax.grad(lambda x: jnp.sum(ND(x) * x))(x)
        return y, total, steps, inner

    with jax.numpy_dtype_promotion('standard'):
        y, total, steps, inner = fn(2.0, n)
        grads = jax.grad(lambda x: fn(x, n)[1])(2.0)
    oracle.assert_same(y, 2.0 * jnp.arange(3.0))
    assert (float(total), float(inner), float(grads)) == (6.0, 2.0, 3.0)
    assert steps.value.tolist() == [0, 1, 4]


def test_vmap_over_the_last_axis():
    values = jnp.arange(6).reshape(2, 3) - 2**30
    double = jax.vmap(lambda n: (n.value, ND(n * 2)), in_axes=1, out_axes=1)
    same, twice = double(ND(values))
    oracle.assert_same((same, twice.value), (values, values * 2))


def test_no_gradient_of_any_kind():
    x = jnp.array([1.0, 2.0])

    def fun(n, x):
        return jnp.sum(n**2 * x)

    def plain(n, x):
        return jnp.sum(jax.lax.stop_gradient(n) ** 2 * x)

    oracle.assert_same(jax.grad(fun, 1)(ND(x), x), jax.grad(plain, 1)(x, x))
    # Also where the value is computed from what is differentiated.
    computed = jax.grad(lambda y: fun(ND(3.0 * y), y))(x)
    oracle.assert_same(computed, jax.grad(lambda y: plain(3.0 * y, y))(x))
    assert oracle.is_zero(jax.grad(fun)(ND(x), x))
    assert oracle.is_zero(jax.hessian(fun)(ND(x), x))
    _, tangent = jax.jvp(fun, (ND(x), x), (ND(x), 0 * x))
    assert oracle.is_zero(tangent)


BINARY = [
    *('add', 'sub', 'mul', 'truediv', 'floordiv', 'mod', 'pow'),
    *('lt', 'le', 'gt', 'ge', 'eq', 'ne'),
]
BITS = ['and_', 'or_', 'xor', 'lshift', 'rshift']


@pytest.mark.parametrize('name', BINARY + BITS)
def test_arithmetic_and_comparisons(name):
    op = getattr(operator, name)
    numpys = np.array([5.0, 7.0], np.float32)
    more = [] if name in BITS else [(5.0, 2.0), (numpys, jnp.array([2.0, 3.0]))]
    for a, b in ((7, 3), *more):
        expected = op(a, b)
        for left, right in ((ND(a), b), (a, ND(b)), (ND(a), ND(b))):
            got = op(left, right)
            assert type(got) is type(expected)
            np.testing.assert_array_equal(got, expected)


def test_stands_for_its_value():
    n = ND(jnp.arange(6.0).reshape(2, 3))
    value = n.value
    assert (n.shape, n.dtype, n.ndim, n.size, len(n)) == ((2, 3), jnp.float32, 2, 6, 2)
    for got, expected in (
        (n[1], value[1]),
        (n[ND(1), ND(0)], value[1, 0]),
        (n[:, 1:], value[:, 1:]),
        (jnp.sin(n), jnp.sin(value)),
        (n.T, value.T),
        (n.at[0].set(1.0), value.at[0].set(1.0)),
        (n @ jnp.ones((3, 2)), value @ jnp.ones((3, 2))),
        (jnp.ones((3, 2)) @ n, jnp.ones((3, 2)) @ value),
        (-n, -value),
        (abs(n), abs(value)),
        (np.asarray(n), value),
        (list(n)[1], value[1]),
        (jnp.ones((2, 3)) * n, value),
    ):
        oracle.assert_same(jnp.asarray(got), jnp.asarray(expected))
    numbers = float(ND(2)), int(ND(2.5)), bool(ND(0)), complex(ND(1.0))
    assert numbers == (2.0, 2, False, 1)
    assert [10, 20][ND(1)] == 20
    assert list(range(ND(3))) == [0, 1, 2]
    assert f'{ND(0.5):.2f}' == '0.50'
    assert repr(ND(100)) == 'NonDifferentiable(100)'
    assert str(ND(100)) == '100'
    assert hash(ND(3)) == hash(3)
    assert round(ND(2.5)) == 2
    assert 2 in ND([1, 2])
    assert ND(ND(3)).value == 3
    assert ND(ND(3)) == 3
    assert divmod(ND(7), 2) == (3, 1)
    assert ND(functools.partial(pow, 2))(3) == 8
    assert ND(functools.partial(pow, 2)).args == (2,)


def test_weak_types_promote_as_numbers_do():
    # Dtype promotion is strict here: a strong int32 would raise.
    def fn(n, x):
        return n * x + n

    out = jax.jit(fn)(ND(3), jnp.ones(2, jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    with pytest.raises(Exception, match='implicit dtype promotion path'):
        jax.jit(fn)(ND(jnp.int32(3)), jnp.ones(2, jnp.bfloat16))


# Optimizers.


def train(tx: Any) -> Any:
    p = {'w': jnp.ones(3), 'n': ND(2**30 + 1), 'f': ND(0.3), 'b': ND(True)}
    state = tx.init(p)

    def loss(p: Any) -> Any:
        return jnp.sum(p['w']) * p['f'] * (p['n'] % 7)

    @jax.jit
    def step(p, state):
        value, grads = jax.value_and_grad(loss)(p)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value

    for _ in range(3):
        p, state, value = step(p, state)
    return p, value


@pytest.mark.usefixtures('standard_promotion')
def test_decay_is_refused_or_harmless():
    # Hazard 28. The smallest decay that would change the value changes the witness.
    p, value = train(optax.adamw(1e-3, weight_decay=1e-4))
    for name in ('n', 'f'):
        with pytest.raises(errors.ArgumentValueError, match=r'sg\.freeze'):
            p[name].value  # noqa: B018
    assert np.isnan(value)
    seen = jax.jit(lambda p: {k: p[k].value for k in 'nfb'})(p)
    assert np.isnan(seen['f'])
    assert int(seen['n']) == -(2**31)
    # A bool is what it was: decay changes no sign, and no zero.
    assert bool(seen['b'])
    # Without decay, or behind sg.freeze, it is its value.
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    for tx in (clipped, sg.freeze(optax.adamw(0.1, weight_decay=0.5))):
        p, value = train(tx)
        found = int(p['n']), float(p['f']), bool(p['b'])
        assert found == (2**30 + 1, np.float32(0.3), True)
        assert np.isfinite(value)
        assert not np.array_equal(p['w'], jnp.ones(3))


INTEGERS = [1001, 5, np.arange(1001, 1003), jnp.arange(3, dtype=jnp.uint8)]


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_cast_that_loses_integers_is_refused(dtype):
    def cast(x):
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), x)

    for value in INTEGERS:
        small = cast(ND(value))
        if dtype == jnp.float32:
            assert np.array_equal(small.value, value)
            continue
        for read in (lambda n: n.value, jax.jit(lambda n: n + 1)):
            with pytest.raises(errors.ArgumentValueError, match='was cast to'):
                read(small)
    # Floats are cast as all other leaves, and bools lose nothing.
    assert cast(ND(1.5)).value.dtype == dtype
    assert bool(cast(ND(True)).value)

    is_marked = lambda x: isinstance(x, ND)  # noqa: E731
    kept = lambda x: x if is_marked(x) else x.astype(dtype)  # noqa: E731
    params = {'n': ND(1001), 'w': jnp.ones(2)}
    assert int(jax.tree.map(kept, params, is_leaf=is_marked)['n']) == 1001


def test_copies():
    n = jax.jit(lambda n: n)(ND(jnp.array([3, 4])))
    for whole in (n, ND(3), ND('text')):
        for twin in oracle.copies(whole):
            assert type(twin.value) is type(whole.value)
            assert np.array_equal(twin.value, whole.value)
    stored = serialization.from_bytes(ND(jnp.zeros(2, int)), serialization.to_bytes(n))
    oracle.assert_same(stored.value, n.value)
    shapes = jax.eval_shape(lambda n: n, n)
    assert jax.tree.structure(shapes) == jax.tree.structure(n)
    assert 'NonDifferentiable' in repr(jax.tree.map(jnp.shape, n))


def test_a_key_is_given_by_its_value():
    """The key itself raises, in the words of JAX."""
    key, random = ND(jax.random.key(0)), jax.random
    for draw in random.uniform, random.split, lambda key: random.fold_in(key, 1):
        with pytest.raises(TypeError, match='PRNG key'):
            draw(key)
    assert float(random.uniform(key.value)) == float(random.uniform(random.key(0)))
    assert key.ndim == 0

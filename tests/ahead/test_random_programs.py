"""Random losses in two programs beside the losses: loops and calls in each other.

Parameters are trained as a whole or by rows, keys change or do not, and bodies of
loops, branches and checkpoints are random programs again.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import flax_sg as sg
from tests.helpers.splits import bits

NAMES = ('a', 'b', 'c')
PARAMS: Any = {
    **{
        name: jax.random.normal(jax.random.key(n), (4, 4)) / 2
        for n, name in enumerate(NAMES)
    },
    'stack': jax.random.normal(jax.random.key(8), (3, 4, 4)) / 2,
}
X = jax.random.normal(jax.random.key(9), (5, 4))
KEY = jax.random.key(7)


@jax.custom_vjp
def with_a_rule(u: Any, w: Any) -> Any:
    """A product whose gradients are others than JAX would find."""
    return jnp.tanh(u @ w)


def _forward(u: Any, w: Any) -> Any:
    return with_a_rule(u, w), (u, w)


def _backward(saved: Any, g: Any) -> Any:
    u, w = saved
    return 2 * g @ w.T, u.T @ jnp.clip(g, -0.1, 0.1)


with_a_rule.defvjp(_forward, _backward)


class Program:
    """A random program: a list of operations, each on values that were made before.

    Args:
        rng: what draws it.
        depth: how deep bodies may stand in each other.
        size: how many operations there are.
    """

    def __init__(self, rng: np.random.Generator, depth: int = 2, size: int = 6) -> None:
        kinds = [name for name in dir(self) if name.startswith('op_')]
        bodies = [name for name in dir(self) if name.startswith('in_')]
        self.plan: list[tuple[str, tuple[int, ...], Any]] = []
        for n in range(size):
            name = str(rng.choice(kinds + bodies * 2 if depth else kinds))
            inner = Program(rng, depth - 1, 3) if name.startswith('in_') else n
            picks = tuple(map(int, rng.integers(100, size=4)))
            self.plan.append((name, picks, inner))

    def __call__(self, params: Any, values: list[Any], key: Any) -> Any:
        values = [*values]
        for name, picks, inner in self.plan:
            u, v = (values[-1 - n % min(len(values), 4)] for n in picks[:2])
            w = params[NAMES[picks[2] % 3]]
            values.append(getattr(self, name)(u, v, w, params, key, inner, picks[3]))
        return values[-1] + 0.5 * values[-2]

    def op_product(self, u, v, w, *_):
        return jnp.tanh(u @ w)

    def op_sum(self, u, v, *_):
        return u + jnp.sin(v)

    def op_gate(self, u, v, *_):
        return jnp.where(u > 0, u, v * u)

    def op_attend(self, u, v, *_):
        return jax.nn.softmax(u @ v.T) @ v

    def op_sort(self, u, v, *_):
        return jnp.sort(u, axis=-1) * 0.5

    def op_noise(self, u, v, w, params, key, n, pick):
        return u + jax.random.normal(jax.random.fold_in(key, pick), u.shape)

    def op_stop(self, u, v, *_):
        return lax.stop_gradient(u) + v

    def op_layer(self, u, v, w, params, key, n, pick):
        return jnp.tanh(u @ params['stack'][pick % 3])

    def op_rule(self, u, v, w, *_):
        return with_a_rule(u, w)

    def op_score(self, u, v, w, *_):
        return jax.grad(lambda u: jnp.sum(jnp.tanh(u @ w) ** 2))(u)

    def op_mapped(self, u, v, w, *_):
        return jax.vmap(lambda row: jnp.tanh(row @ w) * row.sum())(u)

    def in_layers(self, u, v, w, params, key, inner, pick):
        def body(h, layer):
            h = jnp.tanh(h @ layer + inner(params, [v, h], key))
            return h, h.sum(0)

        h, sums = lax.scan(body, u, params['stack'], reverse=bool(pick % 2))
        return h + sums.mean()

    def in_time(self, u, v, w, params, key, inner, pick):
        def body(carry, x):
            h, other, n = carry
            new = jnp.tanh(inner(params, [other + x, h + n], key))
            mine = jnp.tanh(other @ params[NAMES[pick % 3]]) + x
            return (new, mine, n + 1), other if pick % 2 else new

        xs = jnp.stack([v, jnp.cos(v)])
        (h, other, _), ys = lax.scan(body, (u, v, 0.0), xs)
        return h + other + ys[0]

    def in_turns(self, u, v, w, params, key, inner, pick):
        def body(n, pair):
            h, other = pair
            return jnp.tanh(inner(params, [h, other], key)), jnp.tanh(other @ w)

        return sum(lax.fori_loop(0, 2, body, (u, v)))

    def in_while(self, u, v, w, params, key, inner, pick):
        def body(carry):
            n, h, other = carry
            new = jnp.tanh(inner(params, [v, other, h], key))
            mine = jnp.tanh(other @ params[NAMES[pick % 3]]) + jnp.cos(v @ w)
            return n + 1, *lax.stop_gradient((new, mine))

        def goes_on(carry):
            n, h, other = carry
            return (n < 2) | ((n < 4) & ((h if pick % 4 else other).sum() > 0))

        start = 0, *lax.stop_gradient((u, v))
        _, h, other = lax.while_loop(goes_on, body, start)
        return h + u + other

    def in_branch(self, u, v, w, params, key, inner, pick):
        which = v if pick % 2 else u
        branches = (
            lambda u, v: inner(params, [u, v], key),
            lambda u, v: jnp.tanh(u @ w) * v,
        )
        return lax.cond(which.sum() > 0, *branches, u, v)

    def in_checkpoint(self, u, v, w, params, key, inner, pick):
        def body(params, u, v):
            return inner(params, [u, v], key)

        return jax.checkpoint(body)(params, u, v)

    def in_jit(self, u, v, w, params, key, inner, pick):
        return jax.jit(lambda params, u, v: inner(params, [u, v], key))(params, u, v)


def assert_split(seed: int) -> None:
    """Value, aux and gradients are those of the loss, also after steps of training."""
    rng = np.random.default_rng(seed)
    program = Program(rng)

    def loss(params: Any, x: Any, key: Any) -> Any:
        noise = jax.random.normal(key, x.shape)
        out = program(params, [noise, x, jnp.tanh(x @ params['a'])], key)
        return jnp.mean(out**2), {'out': out, 'mean': out.mean(0)}

    trained = [name for name in (*NAMES, 'stack') if rng.integers(2)] or ['b']
    wrt: Any = sg.where(trained)
    if 'stack' in trained and rng.integers(2):
        others = [name for name in trained if name != 'stack']
        wrt = sg.at('stack', np.s_[int(rng.integers(1, 3)) :])
        wrt = wrt | sg.where(others) if others else wrt
    each = 2 if rng.integers(2) else ()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        ahead = sg.precompute(loss, PARAMS, X, KEY, wrt=wrt, each=each)
    data, last = ((X,), (KEY,)) if each else ((X, KEY), ())
    kept = jax.jit(ahead.early)(PARAMS, *data)
    # What is trained moves, and so do keys. Frozen rows stay.
    moving = sg.substitute(PARAMS, jax.tree.map(lambda w: w + 0.1, PARAMS), where=wrt)
    other = jax.random.key(3) if each else KEY
    again = jax.jit(ahead.early)(moving, *data)
    jax.tree.map(np.testing.assert_array_equal, *map(bits, (again, kept)))
    how: Any = {'wrt': wrt, 'has_aux': True, 'unused': 'ignore'}
    right = jax.jit(sg.value_and_grad(loss, **how))
    ours = jax.jit(sg.value_and_grad(ahead.late, **how))
    for params, key in (PARAMS, KEY), (moving, other):
        last = (key,) if each else ()
        pair = ours(params, kept, *last), right(params, X, key)
        assert jax.tree.structure(pair[0]) == jax.tree.structure(pair[1])
        for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
            scale = float(jnp.abs(b).max()) + 1e-3
            np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=1e-3)


class Model(nnx.Module):
    """A random program as a model, which draws a key and counts at each step."""

    def __init__(self, program: Program) -> None:
        self.program = program
        for name, value in PARAMS.items():
            setattr(self, name, nnx.Param(value))
        self.rngs, self.mean = nnx.Rngs(7), nnx.BatchStat(jnp.zeros(4))

    def __call__(self, x: Any) -> Any:
        params = {name: getattr(self, name)[...] for name in PARAMS}
        key = self.rngs.noise()
        noise = jax.random.normal(key, x.shape)
        out = self.program(params, [noise, x, jnp.tanh(x @ params['a'])], key)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * out.mean(0)
        return jnp.mean(out**2) + jnp.sum(self.mean[...] * out.mean(0))


def assert_split_in_nnx(seed: int) -> None:
    """A model goes on from step to step as the function alone would take it."""
    rng = np.random.default_rng(seed)
    program = Program(rng)
    model, other = Model(program), Model(program)
    trained = [name for name in PARAMS if rng.integers(2)] or ['b']
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        ahead = sg.precompute(Model.__call__, model, X, wrt=trained)
    kept = nnx.jit(ahead.early)(model, X)
    wrt = nnx.DiffState(0, nnx.All(nnx.Param, nnx.Any(*map(nnx.PathContains, trained))))
    ours = nnx.jit(nnx.value_and_grad(ahead.late, argnums=wrt))
    right = nnx.jit(nnx.value_and_grad(Model.__call__, argnums=wrt))
    for _ in range(2):
        results = ours(model, kept), right(other, X)
        pair = [*zip(results, map(nnx.state, (model, other)), strict=True)]
        for a, b in zip(*map(bits, map(jax.tree.leaves, pair)), strict=True):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            scale = np.abs(b).max() + 1e-3
            np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=1e-3)


# These three have each operation in them, and most in each body.
@pytest.mark.parametrize('seed', (15, 19, 31))
def test_random_programs(seed: int) -> None:
    assert_split(seed)


def test_a_random_program_as_a_model_of_nnx() -> None:
    assert_split_in_nnx(19)


@pytest.mark.long
@pytest.mark.parametrize('seed', range(100, 200))
def test_many_random_programs(seed: int) -> None:
    assert_split(seed)
    assert_split_in_nnx(seed)

"""Random losses in two programs beside the losses: values are equal bit for bit.

Parameters are trained as a whole or by rows, keys change or do not, refs are written,
and bodies of loops, branches and checkpoints are random programs again. Loops run turn
by turn, and each operation by itself: see ``stepwise``.
"""

import random
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_sg as sg
from tests.helpers import oracle
from tests.helpers.functions import SHAPE, Language, Values, Weights
from tests.helpers.stepwise import evaluate

NAMES = ('a', 'b', 'c')


def normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


PARAMS: Any = {name: normal(n, 3, 3) / 2 for n, name in enumerate(NAMES)}
PARAMS['stack'] = normal(8, 3, 3, 3) / 2
X = normal(9, *SHAPE)
KEY = jax.random.key(7)


def assert_close(found: Any, expected: Any) -> None:
    """The same, but for the order in which cotangents of one value are added."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            scale = np.abs(b).max(initial=1e-3)
            np.testing.assert_allclose(a / scale, b / scale, rtol=0, atol=1e-6)
            np.testing.assert_array_equal(a == 0, b == 0)
        else:
            oracle.assert_same(a, b)


def language(made: random.Random) -> Language:
    """Every other program has effects."""
    return Language(
        made, with_weights=True, with_effects=made.random() < 0.5, bound=jnp.tanh
    )


def results_of(program: Any, params: Any, x: Any, key: Any) -> Values:
    noise, a, b = jax.random.normal(key, SHAPE), params['a'], params['b']
    values = [noise, x, jnp.tanh((x + noise) @ a), jnp.tanh(x @ b)]
    return program(values, Weights(params, key))


@jax.numpy_rank_promotion('allow')
@jax.numpy_dtype_promotion('standard')
def assert_split(seed: int) -> str:
    """Value, aux and gradients are those of the loss, also after steps of training."""
    made = random.Random(seed)
    program = language(made).program()

    def loss(params: Any, x: Any, key: Any) -> Any:
        first, *others = results_of(program, params, x, key)
        return jnp.mean((first + 0.5 * others[0]) ** 2) + jnp.mean(others[1]), others

    trained = [name for name in NAMES if made.random() < 0.5] or ['b']
    first = made.choice([0, 1, 2, 3, 3])  # The layer from which the stack is trained.
    wrt = [*trained, *[sg.at('stack', np.s_[first:])] * (first < 3)]

    def mixed(fixed: Any, moving: Any) -> Any:
        """Parameters that are trained, and those that are not, of two trees."""
        out = {name: (fixed, moving)[name in trained][name] for name in NAMES}
        layers = [fixed['stack'][:first], moving['stack'][first:]]
        return {**out, 'stack': jnp.concatenate(layers)}

    def by_hand(params: Any, x: Any, key: Any) -> Any:
        return loss(mixed(jax.lax.stop_gradient(params), params), x, key)

    try:
        jax.eval_shape(jax.grad(by_hand, has_aux=True), PARAMS, X, KEY)
    except Exception:  # JAX cannot map some rules, nor derive some maps.
        return 'refused'
    each = made.choice([2, ()])
    with warnings.catch_warnings(action='ignore'):
        ahead = sg.precompute(loss, PARAMS, X, KEY, wrt=wrt, each=each)
    data = (X,) if each else (X, KEY)
    kept = evaluate(ahead.early, PARAMS, *data)
    # What is trained moves, and so do keys. Frozen rows stay.
    moving = mixed(PARAMS, jax.tree.map(lambda w: w + 0.1, PARAMS))
    oracle.assert_same(evaluate(ahead.early, moving, *data), kept)
    right, ours = (jax.value_and_grad(fn, has_aux=True) for fn in (by_hand, ahead.late))
    for params, key in (PARAMS, KEY), (moving, jax.random.key(3) if each else KEY):
        last = (key,) if each else ()
        found = evaluate(ours, params, kept, *last)
        expected = evaluate(right, params, X, key)
        oracle.assert_same(found[0], expected[0])
        assert_close(found[1], expected[1])
    return 'compared'


class Model(nnx.Module):
    """A random program as a model, which draws a key and counts at each step."""

    def __init__(self, program: Any) -> None:
        self.program = program
        for name, value in PARAMS.items():
            setattr(self, name, nnx.Param(value))
        self.rngs, self.mean = nnx.Rngs(7), nnx.BatchStat(jnp.zeros(SHAPE[1]))

    def __call__(self, x: Any) -> Any:
        params = {name: getattr(self, name)[...] for name in PARAMS}
        out = sum(results_of(self.program, params, x, self.rngs.noise()))
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * out.mean(0)
        return jnp.mean(out**2) + jnp.sum(self.mean[...] * out.mean(0))


@jax.numpy_rank_promotion('allow')
@jax.numpy_dtype_promotion('standard')
def assert_split_in_nnx(seed: int) -> None:
    """A model goes on from step to step as the function alone would take it."""
    made = random.Random(seed)
    program = Language(made, with_weights=True, bound=jnp.tanh).program()
    trained = [name for name in PARAMS if made.random() < 0.5] or ['b']
    with warnings.catch_warnings(action='ignore'):
        ahead = sg.precompute(Model.__call__, Model(program), X, wrt=trained)
    wrt = nnx.DiffState(0, nnx.All(nnx.Param, nnx.Any(*map(nnx.PathContains, trained))))

    def steps(fun: Any, *data: Any) -> Any:
        """Value and gradients of two steps, and the model after them."""
        graph, state = nnx.split(Model(program))

        def run(state: Any) -> Any:
            model = nnx.merge(graph, state)
            step = nnx.value_and_grad(fun, argnums=wrt)
            return [step(model, *data) for _ in range(2)], nnx.state(model)

        return evaluate(run, state)

    try:
        expected = steps(Model.__call__, X)
    except ValueError as error:  # JAX cannot differentiate some of the scans.
        assert 'Expected cotangent type' in str(error)
        return
    kept = evaluate(ahead.early, Model(program), X)
    assert_close(steps(ahead.late, kept), expected)


@pytest.mark.parametrize('seed', range(10))
def test_random_programs(seed: int) -> None:
    assert assert_split(seed) == 'compared'


def test_a_random_program_as_a_model_of_nnx() -> None:
    assert_split_in_nnx(22)


@pytest.mark.long
@pytest.mark.parametrize('seed', range(100, 400))
def test_many_random_programs(seed: int) -> None:
    if assert_split(seed) == 'compared':
        assert_split_in_nnx(seed)

"""Random models, each compared with the same one whose stops are written by hand."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import FlaxError

import flax_sg as sg
import interpreters
import oracle
import specs
from stepwise import evaluate

X = jnp.array([[1.0, -2.0, 0.5, 0.25], [-1.0, 0.75, 2.0, -0.5]])
RNGS = {name: jax.random.key(i) for i, name in enumerate(('params', 'dropout'))}
STATE = ['batch_stats', 'state', 'intermediates']


def uneven(tree: Any) -> Any:
    """Weights of which none is zero: initial biases would hide gradients."""
    leaves, treedef = jax.tree.flatten(tree)
    numbers = np.random.default_rng(0)
    return treedef.unflatten(
        [
            jnp.asarray(numbers.uniform(0.25, 1.0, leaf.shape), leaf.dtype)
            for leaf in leaves
        ]
    )


def assert_promise_kept(report: sg.flow.GradientFlow, gradients: list[Any]) -> None:
    """What a report does not say to flow is exactly zero.

    Args:
        report: the report.
        gradients: for each output the gradient, a tree of the parameters.
    """
    for row, gradient in zip(report.status, gradients, strict=True):
        leaves = jax.tree.leaves(gradient)
        for path, status, leaf in zip(report.parameters, row, leaves, strict=True):
            assert status == 'flows' or oracle.is_zero(leaf), path


def apply(model: Any, state: Any, mutable: Any, params: Any, x: Any) -> Any:
    """What a model computes and writes; parameters that it returns apart."""
    variables = {'params': params, 'ema': jax.tree.map(jnp.sin, params), **state}
    out, written = model.apply(variables, x, rngs=RNGS, mutable=mutable)
    return out, dict(written)


def with_gradients(fn: Any) -> Any:
    """The results of ``fn(params, x)``, and the gradient of its output."""

    def results(params: Any, x: Any) -> Any:
        (y, noise), pull_back, written = jax.vjp(fn, params, x, has_aux=True)
        weights = jnp.arange(1.0, 1.0 + y.size).reshape(y.shape)
        gradients = pull_back((weights, jnp.zeros_like(noise)))
        return y, noise, written, gradients

    return results


def with_tangents(fn: Any) -> Any:
    """The results of ``fn(params, x)``, and its derivative in one direction."""

    def results(params: Any, x: Any) -> Any:
        directions = jax.tree.map(jnp.ones_like, (params, x))
        primals, tangents, written = jax.jvp(fn, (params, x), directions, has_aux=True)
        return *primals, written, tangents[0]

    return results


@jax.numpy_rank_promotion('allow')
def check(spec: specs.Composite) -> None:
    """Compares the two interpretations of a model."""
    model = interpreters.Model(spec, by_hand=False)
    by_hand = interpreters.Model(spec, by_hand=True)
    try:
        variables = evaluate(by_hand.init, RNGS, X)
    except (FlaxError, ValueError):
        hypothesis.reject()  # Without a block or a stop: Flax cannot make this one.
    oracle.assert_same(evaluate(model.init, RNGS, X), variables)
    state = {col: tree for col, tree in variables.items() if col != 'params'}
    state.pop('intermediates', None)
    params = uneven(variables.get('params', {}))

    # No derivative of a while loop goes backwards.
    loops = specs.lifts(spec, 'while_loop')
    differentiate = with_tangents if loops else with_gradients

    def results(model: Any, mutable: Any) -> Any:
        fn = functools.partial(apply, model, state, mutable)
        return evaluate(differentiate(fn), params, X)

    expected = results(by_hand, STATE)
    oracle.assert_same(results(model, STATE), expected)
    if params and not loops:
        of_y = functools.partial(apply, model, state, STATE)
        report = sg.gradient_flow(lambda p: of_y(p, X)[0][0], params)
        assert_promise_kept(report, [expected[-1][0]])

    # Nothing is written into parameters, and reads after a block find what was there.
    *values, written, gradients = results(model, [*STATE, 'params'])
    *expected_values, expected_written, expected_gradients = expected
    oracle.assert_same(written.pop('params', {}), params)
    oracle.assert_same((values, written), (expected_values, expected_written))
    # Flax gives mutable parameters out of each transform: sums are taken in another
    # order, without any block too. What is stopped is stopped all the same.
    # And nn.custom_vjp gives no gradient of the parameters that it gives out.
    if not specs.lifts(spec, 'custom_vjp'):
        jax.tree.map(_assert_close, gradients, expected_gradients)


def _assert_close(actual: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_array_equal(actual == 0.0, expected == 0.0)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)


# With --hypothesis-profile=long.
LONG = hypothesis.settings.get_current_profile_name() == 'long'


@hypothesis.given(spec=specs.models(depth=2 if LONG else 1))
@hypothesis.settings(
    max_examples=2000 if LONG else 25,
    phases=[hypothesis.Phase.generate],  # To shrink a model takes many minutes.
)
def test_a_random_model_is_that_with_stops_by_hand(spec):
    check(spec)

"""Compares random models with the same models with stops by hand."""

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
    """Makes all weights nonzero: initial biases would hide gradients."""
    leaves, treedef = jax.tree.flatten(tree)
    numbers = np.random.default_rng(0)
    return treedef.unflatten(
        [
            jnp.asarray(numbers.uniform(0.25, 1.0, leaf.shape), leaf.dtype)
            for leaf in leaves
        ]
    )


def assert_promise_kept(report: sg.flow.GradientFlow, gradients: list[Any]) -> None:
    """Asserts zero gradients where the report says that no gradient flows.

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
        hypothesis.reject()  # Flax cannot create this model without blocks either.
    oracle.assert_same(evaluate(model.init, RNGS, X), variables)
    state = {col: tree for col, tree in variables.items() if col != 'params'}
    state.pop('intermediates', None)
    params = uneven(variables.get('params', {}))

    # A while loop has no reverse mode.
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

    # Parameters are not written, and reads after a block see the stored values.
    *values, written, gradients = results(model, [*STATE, 'params'])
    *expected_values, expected_written, expected_gradients = expected
    oracle.assert_same(written.pop('params', {}), params)
    oracle.assert_same((values, written), (expected_values, expected_written))
    # Each transform returns mutable parameters, so sums are taken in another
    # order, also without a block. Stopped parameters are still stopped.
    # And nn.custom_vjp gives no gradient to the parameters that it returns.
    if not specs.lifts(spec, 'custom_vjp'):
        jax.tree.map(_assert_close, gradients, expected_gradients)


def _assert_close(actual: jax.Array, expected: jax.Array) -> None:
    np.testing.assert_array_equal(actual == 0.0, expected == 0.0)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)


# With --hypothesis-profile=long.
LONG = hypothesis.settings.get_current_profile_name() == 'long'


@hypothesis.given(spec=specs.models(depth=2 if LONG else 1))
@hypothesis.settings(
    max_examples=2000 if LONG else 10,
    phases=[hypothesis.Phase.generate],  # Shrinking a model takes many minutes.
)
def test_a_random_model_is_that_with_stops_by_hand(spec):
    check(spec)

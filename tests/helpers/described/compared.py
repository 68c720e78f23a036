"""Compares random models with functions of the same parameters, with stops by hand."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import FlaxError

import flax_sg as sg
from tests.helpers import oracle
from tests.helpers.described import models, models_by_hand, real_models
from tests.helpers.described.by_hand import Values
from tests.helpers.stepwise import evaluate

X = jnp.array([[1.0, -2.0, 0.5, 0.25], [-1.0, 0.75, 2.0, -0.5]])
RNGS = {'params': jax.random.key(0)}


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


def with_derivatives(fn: Any, forward: bool) -> Any:
    """The results of ``fn(params, x)``, and the gradient of its output.

    A while loop has no reverse mode: ``forward`` takes the derivative in one direction.
    """

    def results(params: Any, x: Any) -> Any:
        if forward:
            directions = jax.tree.map(jnp.ones_like, (params, x))
            return jax.jvp(fn, (params, x), directions, has_aux=True)
        y, pull_back, written = jax.vjp(fn, params, x, has_aux=True)
        weights = jnp.arange(1.0, 1.0 + y.size).reshape(y.shape)
        return y, pull_back(weights), written

    return results


@jax.numpy_rank_promotion('allow')
def check(spec: models.Composite) -> None:
    """Compares the two interpretations of a model."""
    model, plain = real_models.model(spec), real_models.model(models.plain(spec))
    try:
        variables = evaluate(plain.init, RNGS, X)
    except (FlaxError, ValueError):
        hypothesis.reject()  # Flax cannot create this model without blocks either.
    oracle.assert_same(evaluate(model.init, RNGS, X), variables)
    params = uneven(variables.get('params', {}))

    def apply(mutable: Any, params: Any, x: Any, model: Any = model) -> Any:
        variables = {'params': params, 'ema': jax.tree.map(jnp.sin, params)}
        out = model.apply(variables, x, mutable=mutable)
        return out if mutable else (out, {})

    def by_hand(params: Any, x: Any) -> Any:
        values = Values(params, jax.tree.map(jnp.sin, params))
        return models_by_hand.Model(spec)(values, x), {}

    loops = models.lifts(spec, 'while_loop')
    if models.lifts(spec, 'custom_vjp') and not loops:
        bare = functools.partial(apply, False, model=plain)
        try:
            # Reports see the program as it is traced before its derivative.
            for fn in bare, jax.jit(bare):
                evaluate(with_derivatives(fn, forward=False), params, X)
        except Exception:
            hypothesis.reject()  # JAX refuses what Flax's rule closes over.

    def results(fn: Any) -> Any:
        return evaluate(with_derivatives(fn, forward=loops), params, X)

    *expected, _ = results(by_hand)
    *actual, _ = results(functools.partial(apply, False))
    jax.tree.map(assert_close, actual, expected)
    if params and not loops:
        report = sg.gradient_flow(lambda p: apply(False, p, X)[0], params)
        assert_promise_kept(report, [expected[1][0]])
    # Parameters are not written, and reads after a block see the stored values.
    # And nn.custom_vjp gives no gradient to the parameters that it returns.
    if not models.lifts(spec, 'custom_vjp'):
        *actual, written = results(functools.partial(apply, ['params']))
        oracle.assert_same(written.get('params', {}), params)
        jax.tree.map(assert_close, actual, expected)


def assert_close(actual: jax.Array, expected: jax.Array) -> None:
    """The same but for rounding; what is zero is exactly zero."""
    np.testing.assert_array_equal(actual == 0.0, expected == 0.0)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)

"""Compares random models with functions of the same parameters, with stops by hand."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import FlaxError

import flax_sg as sg
from tests.helpers import oracle
from tests.helpers.described import real_models
from tests.helpers.described.by_hand import CallsByHand
from tests.helpers.described.language import Call, Part, has_lift, plain
from tests.helpers.stepwise import evaluate

X = jnp.array([[1.0, -2.0, 0.5, 0.25], [-1.0, 0.75, 2.0, -0.5]])
RNGS = {'params': jax.random.key(0)}


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


class Compared:
    """Programs that call the same models, with blocks and by hand.

    Attributes:
        real, by_hand: what calls the models.
    """

    def __init__(self, models: Sequence[Part]) -> None:
        try:
            bare = [real_models.make(plain(model)) for model in models]
            variables = [oracle.init(one, RNGS, X) for one in bare]
        except (FlaxError, ValueError):
            hypothesis.reject()  # Flax cannot create it without blocks either.
        params = tuple(each.get('params', {}) for each in variables)
        self.real = real_models.RealCalls(tuple(models), params, X)
        self.by_hand = CallsByHand(tuple(models), params, X)
        for model, own in zip(models, params, strict=True):
            if has_lift(model, 'custom_vjp'):
                bare = real_models.RealCalls((plain(model),), (own,), X)
                try:
                    # Reports see the program as it is traced before its derivative.
                    bare.run((Call(), Call(how='jit')), ())
                except Exception:
                    hypothesis.reject()  # JAX refuses what Flax's rule closes over.

    def check_init(self) -> None:
        """Compares what ``init`` of the models makes with that without blocks."""
        for model, module in zip(self.real.models, self.real.modules, strict=True):
            bare = real_models.make(plain(model))
            found, wanted = (evaluate(one.init, RNGS, X) for one in (module, bare))
            oracle.assert_same(found, wanted)

    def check(self, *program: Any) -> list[Any]:
        """Runs a program, and then compares its results; returns those by hand."""
        for calls in self.real, self.by_hand:
            calls.start(program)
        # A block that is left open is not open in another thread.
        with ThreadPoolExecutor(1) as pool:
            found, by_hand = (
                [*pool.map(lambda result: result(), calls.results)]
                for calls in (self.real, self.by_hand)
            )
        jax.tree.map(assert_close, found, by_hand)
        return by_hand


def assert_close(actual: jax.Array, expected: jax.Array) -> None:
    """The same but for rounding; what is zero is exactly zero.

    A gradient that has vanished, in layers that are saturated, may be zero or not.
    """
    is_zero = [abs(x) < 1e-12 for x in (actual, expected)]
    np.testing.assert_array_equal(*is_zero)
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-5)

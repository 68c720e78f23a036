"""Compares random models with functions of the same parameters, with stops by hand."""

import hypothesis
import jax
from hypothesis import strategies as st

import flax_sg as sg
from tests.helpers.described import drawn
from tests.helpers.described.compared import Compared, X, assert_promise_kept
from tests.helpers.profile import LONG


@hypothesis.given(model=drawn.models(depth=2 if LONG else 1), data=st.data())
@hypothesis.settings(
    max_examples=2000 if LONG else 4,
    phases=[hypothesis.Phase.generate],  # Shrinking a model takes many minutes.
)
@jax.numpy_rank_promotion('allow')
def test_a_random_model_is_that_with_stops_by_hand(model, data):
    compared = Compared([model])
    compared.check_init()
    calls = drawn.calls([model], ['plain'])
    results = compared.check(*calls, *map(data.draw, map(drawn.ahead, calls)))
    if calls[0].how == 'plain':
        apply, params = compared.real.function(calls[0], ()), compared.real.params[0]
        report = sg.gradient_flow(lambda params: apply(params, X), params)
        assert_promise_kept(report, [results[0][1][''][0]])

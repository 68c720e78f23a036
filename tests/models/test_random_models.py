"""Compares random models with functions of the same parameters, with stops by hand."""

import hypothesis

from tests.helpers.described import models
from tests.helpers.described.compared import check
from tests.helpers.profile import LONG


@hypothesis.given(spec=models.models(depth=2 if LONG else 1))
@hypothesis.settings(
    max_examples=2000 if LONG else 4,
    phases=[hypothesis.Phase.generate],  # Shrinking a model takes many minutes.
)
def test_a_random_model_is_that_with_stops_by_hand(spec):
    check(spec)

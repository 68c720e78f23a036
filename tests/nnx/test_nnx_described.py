"""Random models of the common language, as those of NNX."""

import hypothesis
import jax
import jax.numpy as jnp

from flax_sg import nnx
from tests.helpers.described import drawn, nnx_models
from tests.helpers.described.by_hand import Model, Values
from tests.helpers.described.compared import Compared, X, assert_close
from tests.helpers.nnx_by_hand import pure
from tests.helpers.profile import LONG


@hypothesis.given(drawn.models(depth=1 + LONG, lifts=(*drawn.WRAPS, 'remat', 'jit')))
@hypothesis.settings(
    max_examples=2000 if LONG else 6, phases=[hypothesis.Phase.generate]
)
@jax.numpy_rank_promotion('allow')
def test_a_view_is_what_a_block_is(drawn_model):
    part = nnx_models.possible(drawn_model)
    [params] = Compared([part]).real.params

    def by_hand(params, x):
        return jnp.sum(Model(part)(Values(params, params), x) ** 2)

    def of_model(model, x):
        return jnp.sum(model(x) ** 2)

    expected = jax.jit(jax.value_and_grad(by_hand, (0, 1)))(params, X)
    model = nnx_models.Node(part, params)
    ours = nnx.jit(nnx.value_and_grad(of_model, argnums=(0, 1)))
    value, (grads, of_x) = ours(model, X)
    jax.tree.map(assert_close, (value, (pure(grads), of_x)), expected)

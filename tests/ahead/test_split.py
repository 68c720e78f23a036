"""A loss in two programs: what is kept."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_sg as sg
from flax_sg.ahead.cut import cheapest_cut

PARAMS = {
    name: jax.random.normal(jax.random.key(n), (4, 4)) / 2
    for n, name in enumerate(('a', 'b', 'c', 'd'))
}
X = jax.random.normal(jax.random.key(9), (3, 4))


def test_head_on_a_frozen_backbone() -> None:
    """The features alone are kept; the backbone may be away."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ params['a']) @ params['b'])

    ahead = sg.precompute(loss, PARAMS, jax.eval_shape(lambda: X), wrt='b')
    assert [x.shape for x in ahead.kept] == [(3, 4)]
    away = {k: v if k == 'b' else sg.ABSENT for k, v in PARAMS.items()}
    kept = jax.jit(ahead.early)(PARAMS, X)
    grads = jax.jit(sg.grad(ahead.late, wrt='b'))(away, kept)
    right = sg.grad(loss, wrt='b')(PARAMS, X)
    np.testing.assert_allclose(grads['b'], right['b'], rtol=1e-5)
    program = jax.make_jaxpr(ahead.late)(away, kept)
    products = [eqn for eqn in program.eqns if eqn.primitive.name == 'dot_general']
    assert len(products) == 1


def test_cheap_values_are_made_again() -> None:
    """Of what is broadcast the small array is kept."""

    def loss(params: Any, x: Any) -> Any:
        small = (x @ params['a']).sum()
        return jnp.sum(jnp.broadcast_to(small, (4, 4)) * params['b'])

    ahead = sg.precompute(loss, PARAMS, X, wrt='b')
    assert [x.shape for x in ahead.kept] == [()]


def test_nothing_to_keep() -> None:
    """It is said, if only frozen parameters and what changes are read."""
    with pytest.warns(UserWarning, match='Nothing is computed once'):
        sg.precompute(lambda params, key: params['a'] @ params['b'], PARAMS, X, each=1)


def test_cut_takes_the_fewest_bytes() -> None:
    """Two values made of one; one made of two; and one that is not cheap."""
    assert cheapest_cut({1: 8, 2: 8, 3: 8}, {2: [1], 3: [1]}, [2, 3]) == {1}
    assert cheapest_cut({1: 8, 2: 8, 3: 8}, {3: [1, 2]}, [3]) == {3}
    assert cheapest_cut({1: 8, 2: 99}, {}, [2]) == {2}

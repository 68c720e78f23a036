"""A loss in two programs beside the loss: values, gradients, and what is kept."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import flax_sg as sg
from flax_sg.ahead.cut import cheapest_cut

PARAMS = {
    name: jax.random.normal(jax.random.key(n), (4, 4)) / 2
    for n, name in enumerate(('a', 'b', 'c', 'd'))
}
X = jax.random.normal(jax.random.key(9), (3, 4))
KEY = jax.random.key(7)


def step(kind: int, u: Any, v: Any, w: Any) -> Any:
    """One of nine kinds of work on two values and a weight."""
    kinds = [
        lambda: u @ w,
        lambda: jnp.tanh(u) * v,
        lambda: jax.nn.relu(u @ w),
        lambda: jax.jit(lambda a, b: jnp.sin(a @ b))(u, w),
        lambda: jax.checkpoint(lambda a, b: jnp.tanh(a @ b) + a)(u, w),
        lambda: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), u, None, 2)[0],
        lambda: lax.cond(v.sum() > 0, lambda: u @ w, lambda: v),
        lambda: u + lax.stop_gradient(v) * (w @ w).sum(),
        lambda: jax.nn.softmax(u) + jnp.sort(v),
    ]
    return kinds[kind]()


def random_loss(seed: int) -> Any:
    """A loss of products, elementwise work, calls, loops and branches, at random."""
    rng = np.random.default_rng(seed)
    plan = [(int(rng.integers(9)), *rng.integers(100, size=3)) for _ in range(12)]

    def loss(params: Any, x: Any, key: Any) -> Any:
        weights = list(params.values())
        values = [x, jax.random.normal(key, x.shape)]
        for kind, i, j, k in plan:
            u, v = values[i % len(values)], values[j % len(values)]
            values.append(step(kind, u, v, weights[k % 4]))
        return jnp.mean(values[-1] ** 2) + jnp.mean(values[-2]), values[-3]

    return loss


@pytest.mark.parametrize('seed', range(25))
def test_random_programs(seed: int) -> None:
    """Values and gradients are exact; what is kept does not move with what changes."""
    loss, rng = random_loss(seed), np.random.default_rng(seed + 1000)
    trained = [name for name in PARAMS if rng.integers(2)] or ['a']
    wrt = trained
    each = [2] if rng.integers(2) else []
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        ahead = sg.precompute(loss, PARAMS, X, KEY, wrt=wrt, each=each)
    data = (X,) if each else (X, KEY)
    last = (KEY,) if each else ()
    # Loops and branches run compiled in both.
    program, form = jax.make_jaxpr(loss, return_shape=True)(PARAMS, X, KEY)

    def whole(*args: Any) -> Any:
        out = jaxpr_as_fun(program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(form), out)

    with jax.disable_jit():
        kept = ahead.early(PARAMS, *data)
        right = sg.value_and_grad(whole, wrt=wrt, has_aux=True, unused='ignore')(
            PARAMS, X, KEY
        )
        ours = sg.value_and_grad(ahead.late, wrt=wrt, has_aux=True, unused='ignore')(
            PARAMS, kept, *last
        )
    jax.tree.map(np.testing.assert_array_equal, ours, right)
    moved = {k: v + 1 if k in trained else v for k, v in PARAMS.items()}
    with jax.disable_jit():
        again = ahead.early(moved, *data)
    jax.tree.map(np.testing.assert_array_equal, again, kept)


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

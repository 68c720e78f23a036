"""Loops and checkpoints of which a part does not change, beside the whole ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import flax_sg as sg
from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.splits import PARAMS, TRAINED, XS, assert_split, products


@pytest.mark.parametrize('reverse', (False, True))
def test_a_frozen_torso_in_a_loop_over_time(reverse: bool):
    """Its features are stacked, and the loop that is left reads them."""

    def fun(params: Any, xs: Any) -> Any:
        def body(h: Any, x: Any) -> Any:
            features = jnp.tanh(x @ params['torso'])
            h = jnp.tanh(h @ params['cell'] + features)
            return h, (h @ params['head'], x)

        h, (out, same) = lax.scan(body, jnp.zeros((3, 4)), xs, reverse=reverse)
        return jnp.sum(h) + jnp.sum(out**2) + jnp.sum(same)

    ahead = assert_split(fun, XS, once=1)
    assert (6, 3, 4) in [k.shape for k in ahead.kept]
    assert 'at test_bodies.py' in str(ahead)


def test_a_carry_that_does_not_change():
    """A frozen cell goes on by itself; a trained one reads it, and is read by none."""

    def fun(params: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            a, b, n = carry
            a = jnp.tanh(a @ params['torso'] + x)
            b = jnp.tanh(b @ params['cell'] + a * n)
            return (a, b, n + 1), a.sum()

        start = jnp.zeros((3, 4)), jnp.zeros((3, 4)), 0.0
        (a, b, n), sums = lax.scan(body, start, xs)
        return jnp.sum(a @ params['head']) + jnp.sum(b) * n + jnp.sum(sums)

    assert_split(fun, XS, once=1)


def test_a_turn_reads_what_the_last_one_made_of_a_carry_that_does_not_change():
    """The carry is kept as it is before each turn, and is no carry of the late loop."""

    def fun(params: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            a, total = carry
            return (jnp.tanh(a @ params['torso'] + x), total + a @ params['head']), a

        (_, total), states = lax.scan(body, (XS[0], jnp.zeros((3, 4))), xs)
        return jnp.sum(total**2) + jnp.sum(states @ params['cell'])

    assert_split(fun, XS, once=1)


def test_a_carry_that_changes_after_a_turn():
    """What is known before the first turn alone stays in the loop."""

    def fun(params: Any, xs: Any) -> Any:
        def body(carry: Any, x: Any) -> Any:
            _, b = carry
            return (jnp.tanh(b @ params['torso']), x @ params['cell']), x @ params[
                'torso'
            ]

        (a, b), ys = lax.scan(body, (XS[0], XS[1]), xs)
        return jnp.sum(a + b) + jnp.sum(ys)

    ahead = sg.precompute(fun, PARAMS, XS, wrt=TRAINED)
    kept = ahead.early(PARAMS, XS)
    np.testing.assert_allclose(ahead.late(PARAMS, kept), fun(PARAMS, XS), rtol=1e-5)
    assert products(ahead.early, PARAMS, XS) == 1
    assert products(ahead.late, PARAMS, kept) == 2


@pytest.mark.parametrize('policy', (None, jax.checkpoint_policies.dots_saveable))
def test_a_frozen_tower_in_a_checkpoint(policy: Any):
    """It leaves the checkpoint; the rest is recomputed in the backward pass."""

    def fun(params: Any, x: Any) -> Any:
        def body(params: Any, x: Any) -> Any:
            y = jnp.sin(jnp.sin(x @ params['torso']) @ params['torso'])
            return jnp.sin(jnp.sin(y @ params['cell']) @ params['head'])

        return jnp.sum(jax.checkpoint(body, policy=policy)(params, x))

    ahead = assert_split(fun, XS[0], once=2)
    kept = ahead.early(PARAMS, XS[0])

    def hand(params: Any, y: Any) -> Any:
        def body(params: Any, y: Any) -> Any:
            return jnp.sin(jnp.sin(y @ params['cell']) @ params['head'])

        return jnp.sum(jax.checkpoint(body, policy=policy)(params, y))

    def backward(fun: Any) -> int:
        live = {k: PARAMS[k] for k in TRAINED}
        return products(jax.grad(lambda p: fun({**PARAMS, **p}, *kept)), live)

    assert backward(lambda p, *kept: ahead.late(p, [*kept])) == backward(hand)


def test_casts_of_frozen_weights_stay_in_the_checkpoint():
    """Made outside, they would be saved for each layer."""

    def fun(params: Any, x: Any) -> Any:
        def body(params: Any, x: Any, y: Any) -> Any:
            return jnp.sum(jnp.sin(x @ params['torso'])), jnp.sin(
                (y @ params['cell']) @ (2 * params['torso'])
            )

        a, b = jax.checkpoint(body)(params, x, params['head'])
        return a + jnp.sum(b)

    ahead = sg.precompute(fun, PARAMS, XS[0], wrt=TRAINED)
    kept = ahead.early(PARAMS, XS[0])
    program = jax.make_jaxpr(ahead.late)(PARAMS, kept)
    names = [eqn.primitive.name for eqn in program.eqns]
    assert 'mul' not in names and len(kept) == 1
    np.testing.assert_allclose(ahead.late(PARAMS, kept), fun(PARAMS, XS[0]), rtol=1e-5)


def test_loops_in_checkpoints_in_loops():
    """Each is split, from the outside in."""

    def fun(params: Any, xs: Any) -> Any:
        def inner(h: Any, x: Any) -> Any:
            return jnp.tanh(h @ params['cell'] + x @ params['torso']), None

        @jax.checkpoint
        def body(h: Any, x: Any) -> Any:
            h, _ = lax.scan(inner, h, jnp.stack([x, 2 * x]))
            return h, h @ params['head']

        h, out = lax.scan(body, jnp.ones((3, 4)), xs)
        return jnp.sum(h) + jnp.sum(out)

    ahead = assert_split(fun, XS, once=1)
    assert (6, 2, 3, 4) in [k.shape for k in ahead.kept]


def test_a_frozen_loop_in_a_loop() -> None:
    """It stays one loop: its last state is kept for each turn, and no other."""

    def fun(params: Any, xs: Any) -> Any:
        def layer(h: Any, _: None) -> Any:
            return jnp.tanh(h @ params['torso']), None

        def turn(h: Any, x: Any) -> Any:
            features, _ = lax.scan(layer, x, None, 3)
            return jnp.tanh(h @ params['cell'] + features), None

        return jnp.sum(lax.scan(turn, jnp.zeros((3, 4)), xs)[0] @ params['head'])

    ahead = assert_split(fun, XS, once=1)
    assert [k.shape for k in ahead.kept] == [(6, 3, 4)]


def test_models_of_linen():
    """``nn.remat`` around a frozen encoder and a head; ``nn.scan`` over time."""

    class Step(nn.Module):
        @nn.compact
        def __call__(self, h: Any, x: Any) -> Any:
            x = nn.Frozen(nn.Dense(4, name='torso'))(x)
            return nn.GRUCell(4, name='cell')(h, jnp.tanh(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, xs: Any) -> Any:
            scan = nn.scan(
                nn.remat(Step),
                variable_broadcast='params',
                split_rngs={'params': False},
            )
            return scan(name='scan')(jnp.zeros((3, 4)), xs)[1]

    net = Net()
    params = oracle.init(net, jax.random.key(0), XS)['params']

    def loss(params: Any, xs: Any) -> Any:
        return jnp.mean(net.apply({'params': params}, xs) ** 2)

    live = sg.live(loss, params, XS)
    ahead = sg.precompute(loss, params, XS, wrt=live)
    kept = ahead.early(params, XS)
    away = sg.partition(params, live)[0]
    ours = sg.value_and_grad(ahead.late, wrt=live)(away, kept)
    right = sg.value_and_grad(loss, wrt=live)(params, XS)
    for a, b in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert 'computed at each step' not in str(ahead)

"""``testing.moves`` on steps whose effect is written by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing
from flax_sg.testing.steps import WORDS
from tests.helpers import oracle

X = jnp.array([[0.5, -1.0, 2.0], [1.0, 0.25, -0.5]])
PARAMS: dict[str, Any] = {
    'tower': {'kernel': jnp.array([[0.5, 1.0], [-1.0, 2.0], [1.5, -0.5]])},
    'crown': {'bias': jnp.array([0.25, -0.75])},
}


def loss(params, x):
    features = jnp.dot(x, jax.lax.stop_gradient(params['tower']['kernel']))
    return jnp.sum((features + params['crown']['bias'][None]) ** 2)


def descends(rate=0.1, decay=0.0):
    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(
            lambda p, g: (p - rate * (g + decay * p)).astype(p.dtype), params, grads
        )

    return step


GRADS = jax.grad(loss)(PARAMS, X)
FLOW = sg.gradient_flow(loss, PARAMS, X)


def said(report):
    return {row['parameter']: (row['status'], row['reason']) for row in report.rows()}


@pytest.mark.parametrize('grads', [GRADS, FLOW], ids=['gradients', 'a report'])
def test_what_moves_has_a_gradient(grads):
    new = jax.jit(descends())(PARAMS, X)
    assert said(testing.moves(PARAMS, new, grads)) == {
        'crown/bias': ('moves', ''),
        'tower/kernel': ('still', ''),
    }
    testing.assert_moves_only(PARAMS, new, 'crown/**', grads)
    testing.assert_moves_only(PARAMS, new, 'crown/**')


STACK: dict[str, Any] = {
    'layers': {'w': jnp.linspace(1.0, 2.0, 24).reshape(8, 3), 'b': jnp.ones(8)},
    'head': jnp.ones(3),
}
UPPER = sg.at('layers/**', np.s_[6:])


def of_stack(params, x):
    params = sg.stop_gradient(params, sg.at('layers/**', np.s_[:6]))
    layers = jnp.tanh(params['layers']['w'] * params['layers']['b'][:, None])
    return jnp.sum(layers * (x * params['head'])[None])


def test_rows_are_told_from_the_rest(standard_promotion):
    x = jnp.array([0.5, -1.0, 2.0])
    live = sg.live(of_stack, STACK, x)
    tx = sg.freeze(optax.adamw(0.1), ~live)
    grads = sg.grad(of_stack, wrt=live)(STACK, x)
    updates, _ = tx.update(grads, tx.init(STACK), STACK)
    new = optax.apply_updates(STACK, updates)
    testing.assert_moves_only(STACK, new, live)
    testing.assert_moves_only(STACK, new, live, grads)
    testing.assert_moves_only(STACK, new, [UPPER, 'head'])
    found = testing.moves(STACK, new)
    assert said(found)['layers/w'] == ('partly', 'rows 0 to 5 stand still')
    assert said(found)['head'] == ('moves', '')
    assert 'layers/w   partly     rows 0 to 5 stand still' in str(found)
    assert repr(found) == 'Moves(2 moves, 1 partly, 0 stuck, 0 drifts, 0 still)'
    # Too much is named, or too little.
    for where, lines in {
        'layers/**': ['It moves head.', 'head: its value changes.'],
        'head': ['It moves layers/b, layers/w.', 'layers/b: its value changes.'],
    }.items():
        with pytest.raises(AssertionError) as caught:
            testing.assert_moves_only(STACK, new, where)
        assert str(caught.value).splitlines()[1:-1] == lines
    for rows, lines in (
        (
            np.s_[7:],
            ['It moves layers/w.', 'layers/w: row 6 changes, and was not named.'],
        ),
        (
            np.s_[:6],
            [
                'It does not move layers/w.',
                'layers/w: what is named of it stands still.',
                'It moves layers/w.',
                'layers/w: rows 6 to 7 change, and were not named.',
            ],
        ),
    ):
        where = [sg.at('layers/w', rows), sg.at('layers/b', np.s_[6:]), 'head']
        with pytest.raises(AssertionError) as caught:
            testing.assert_moves_only(STACK, new, where)
        assert str(caught.value).splitlines()[1:-1] == lines
    # Named, and not moved at all.
    with pytest.raises(AssertionError, match='It does not move layers/b, layers/w'):
        testing.assert_moves_only(STACK, {**STACK, 'head': new['head']}, live)


@pytest.mark.parametrize(
    'mask', [np.eye(8, 3, dtype=bool), np.arange(24).reshape(8, 3) % 5 == 0]
)
def test_elements_are_told_from_the_rest(mask):
    where = {'layers': {'w': mask, 'b': False}, 'head': False}
    w = STACK['layers']['w']
    new = {**STACK, 'layers': {**STACK['layers'], 'w': jnp.where(mask, w + 1.0, w)}}
    testing.assert_moves_only(STACK, new, where)
    one = {**new, 'layers': {**new['layers'], 'w': new['layers']['w'].at[7, 0].set(9)}}
    with pytest.raises(AssertionError, match='layers/w: row 7 changes, and was not na'):
        testing.assert_moves_only(STACK, one, where)
    turned = {**where, 'layers': {'w': ~mask, 'b': False}}
    with pytest.raises(AssertionError, match='what is named of it stands still'):
        testing.assert_moves_only(STACK, new, turned)


def test_weight_decay_moves_what_has_no_gradient():
    new = descends(decay=0.1)(PARAMS, X)
    assert said(testing.moves(PARAMS, new, GRADS))['tower/kernel'] == ('drifts', '')
    with pytest.raises(AssertionError) as caught:
        testing.assert_moves_only(PARAMS, new, 'crown/**', GRADS)
    assert str(caught.value) == (
        "Expected the step to move 'crown/**' and nothing else.\n"
        'It moves tower/kernel.\n'
        f'tower/kernel: {WORDS["drifts"].meaning}.\n'
        'To keep some as they are: sg.freeze(tx, where).'
    )
    # Without gradients, nobody can tell.
    assert said(testing.moves(PARAMS, new))['tower/kernel'] == ('moves', '')


@pytest.mark.parametrize('kind', [jnp.bfloat16, jnp.float16, jnp.float32])
def test_an_update_below_the_resolution_of_a_type(kind):
    """The update is not zero; the sum is the value itself (hazard 55)."""
    low = {'low': jnp.array([1.0, -3.0], kind), 'high': jnp.array([0.001, 2.0])}
    grads = jax.tree.map(jnp.ones_like, low)
    rate = float(jnp.finfo(kind).eps) / 8

    def step(params):
        return jax.tree.map(lambda p, g: (p - rate * g).astype(p.dtype), params, grads)

    new = step(low)
    assert (new['low'] == low['low']).all() and (new['high'] != low['high']).any()
    assert said(testing.moves(low, new, grads))['low'] == ('stuck', '')
    with pytest.raises(
        AssertionError, match='low: it has a gradient and stays: a mask'
    ):
        testing.assert_moves_only(low, new, True, grads)


def test_an_empty_array_and_an_old_nan_stand_still():
    """An array without elements has no mean, and nan is not equal to itself."""
    params = {'empty': jnp.ones((0, 3)), 'old': jnp.full(2, jnp.nan), 'w': jnp.ones(2)}
    new = {**params, 'w': params['w'] + 1.0}
    assert {
        row['parameter']: row['status'] for row in testing.moves(params, new).rows()
    } == {'empty': 'still', 'old': 'still', 'w': 'moves'}
    testing.assert_moves_only(params, new, 'w')
    gone = {**params, 'w': jnp.full(2, jnp.nan)}
    assert testing.moves(params, gone).status_of('w') == 'moves'


@pytest.mark.parametrize('value', [1e-30, 1e30, jnp.nan])
def test_a_gradient_whose_square_is_no_number(value):
    """The square of 1e-30 is 0.0 in float32, and that of 1e30 is inf."""
    params, grads = {'w': jnp.ones(2)}, {'w': jnp.full(2, value)}
    assert testing.moves(params, params, grads).status_of('w') == 'stuck'


def test_what_is_neither_a_number_nor_trained_is_left_out():
    tree = {'n': jnp.arange(3), 'key': jax.random.key(0), 'w': 1.0, 'c': 1.0 + 2.0j}
    other = {**tree, 'n': jnp.arange(3) + 1, 'c': 2.0 + 2.0j}
    found = testing.moves(tree, other, {'w': sg.ABSENT, 'c': 1.0j})
    assert said(found) == {'c': ('moves', ''), 'w': ('still', '')}
    with pytest.raises(sg.errors.UnknownNameError, match="no parameter 'tail'"):
        found.status_of('tail')


# States of all kinds


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, name='norm')(x)
        return nn.Dense(2, name='dense')(x)


class State(train_state.TrainState):
    batch_stats: Any = None


def test_a_train_state_and_its_running_statistics(standard_promotion):
    model = Normed()
    variables = oracle.init(model, jax.random.key(0), X)
    state = State.create(apply_fn=model.apply, tx=optax.adam(1e-2), **variables)

    @jax.jit
    def step(state, x):
        def of(params):
            variables = {'params': params, 'batch_stats': state.batch_stats}
            out, new = state.apply_fn(variables, x, mutable=['batch_stats'])
            return jnp.mean((out - 1.0) ** 2), new

        grads, new = jax.grad(of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, **new), grads

    new, grads = step(state, X)
    assert set(said(testing.moves(state.params, new.params, grads)).values()) == {
        ('moves', '')
    }
    testing.assert_moves_only(state.params, new.params, True)
    # The whole state is a tree as any other.
    found = said(testing.moves(state, new))
    assert found['params/dense/bias'] == ('moves', '')
    assert found['opt_state/0/mu/dense/bias'] == ('moves', '')
    two = [{'params': s.params, 'batch_stats': s.batch_stats} for s in (state, new)]
    for given in ({'params': grads}, grads):
        assert said(testing.moves(*two, given))['params/norm/bias'] == ('moves', '')
    # No optimizer moves statistics, so that none can freeze them.
    with pytest.raises(AssertionError) as caught:
        testing.assert_moves_only(*two, ['dense/**', 'norm/scale', 'norm/bias'])
    assert str(caught.value).splitlines()[1:] == [
        'It moves batch_stats/norm/mean, batch_stats/norm/var.',
        f'batch_stats/norm/mean: {WORDS["moves"].meaning}.',
        'To keep some as they are: sg.freeze(tx, where).',
    ]


def test_one_name_in_two_collections():
    tree = {'params': {'w': jnp.ones(2)}, 'ema': {'w': jnp.ones(2)}}
    new = {**tree, 'ema': {'w': jnp.zeros(2)}}
    assert said(testing.moves(tree, new, {'params': {'w': jnp.zeros(2)}})) == {
        'ema/w': ('drifts', ''),
        'params/w': ('still', ''),
    }


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (nnx.Linear(3, 3, rngs=rngs) for _ in range(2))
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(self.norm(self.first(x)))


def test_a_module_of_nnx_that_is_changed_in_place(standard_promotion):
    model = Tied(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def loss(model, x):
        return jnp.mean(model(x) ** 2)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(loss)(model, x)
        optimizer.update(model, grads)
        return grads

    before = jax.tree.map(jnp.copy, nnx.state(model))
    grads = step(model, optimizer, X)
    report = sg.gradient_flow(loss, model, X)
    for after in (model, nnx.state(model)):
        for given in (grads, report):
            found = said(testing.moves(before, after, given))
            # A tied weight is one.
            assert 'second/kernel' not in found
            assert found.pop('norm/mean') == ('drifts', '')
            assert found.pop('norm/var') == ('drifts', '')
            assert set(found.values()) == {('moves', '')}
    # The state of a module has the module's own Variables.
    for same in (model, nnx.state(model)):
        with pytest.raises(sg.errors.ArgumentValueError, match='changes in place'):
            testing.moves(same, model)


# What is shown


def test_sharded_arrays():
    mesh = jax.make_mesh((2,), ('rows',))
    sharding = NamedSharding(mesh, PartitionSpec('rows'))
    params = {'rows': jax.device_put(jnp.arange(4.0), sharding)}
    new = {'rows': params['rows'] * 2.0}
    for before in (params, jax.device_get(params)):
        assert testing.moves(before, new).status_of('rows') == 'moves'


def test_many_rows_are_counted():
    rows = {'w': jnp.ones((20, 2))}
    new = {'w': rows['w'].at[jnp.array([1, 3, 5, 6, 9, 12])].add(1.0)}
    assert said(testing.moves(rows, new))['w'] == (
        'partly',
        'rows 0, 2, 4 and 11 more stand still',
    )
    new = {'w': rows['w'].at[:19].add(1.0)}
    assert said(testing.moves(rows, new))['w'][1] == 'row 19 stands still'
    # What drifts says so, and which rows do not.
    grads = {'w': jnp.zeros((20, 2))}
    assert said(testing.moves(rows, new, grads))['w'] == (
        'drifts',
        'row 19 stands still',
    )


def test_the_share_of_elements_that_change():
    new = descends()(PARAMS, X)
    some = {**new, 'tower': {'kernel': PARAMS['tower']['kernel'].at[0].add(1.0)}}
    shares = [row['moved'] for row in testing.moves(PARAMS, some).rows()]
    assert shares == [1.0, np.float32(1 / 3)]


def test_a_mask_is_one_of_the_causes():
    new = {**descends()(PARAMS, X), 'crown': PARAMS['crown']}
    found = testing.moves(PARAMS, new, GRADS)
    assert found.status_of('crown/bias') == 'stuck'
    assert 'a mask, a rate of zero, or an update below' in str(found)
    with pytest.raises(AssertionError, match='crown/bias: it has a gradient and stays'):
        testing.assert_moves_only(PARAMS, new, True, GRADS)

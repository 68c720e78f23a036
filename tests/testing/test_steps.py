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

pytestmark = pytest.mark.every_case

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
WRITTEN = 'the step writes it: momentum, an average, running statistics'
FLOW = sg.gradient_flow(loss, PARAMS, X)


def said(report):
    return {row['parameter']: (row['status'], row['reason']) for row in report.rows()}


@pytest.mark.parametrize('grads', [GRADS, FLOW], ids=['gradients', 'a report'])
@pytest.mark.parametrize('jitted', [False, True])
def test_what_moves_has_a_gradient(grads, jitted):
    step = jax.jit(descends()) if jitted else descends()
    assert said(testing.moves(step, PARAMS, X, grads=grads)) == {
        'crown/bias': ('moves', ''),
        'tower/kernel': ('still', ''),
    }
    testing.assert_moves_only(step, 'crown/**', PARAMS, X, grads=grads)


def test_norms_are_those_of_the_arrays():
    report = testing.moves(descends(), PARAMS, X, grads=GRADS, times=2)
    by_hand = PARAMS
    for _ in range(2):
        by_hand = descends()(by_hand, X)
    bias, _ = report.rows()
    old = np.asarray(PARAMS['crown']['bias'])
    change = np.asarray(by_hand['crown']['bias']) - old
    gradient = np.asarray(GRADS['crown']['bias'])
    for name, value in (('size', old), ('change', change), ('gradient', gradient)):
        assert bias[name] == pytest.approx(np.linalg.norm(value), rel=1e-6)


def test_all_that_comes_back_is_given_to_the_next_step():
    def step(params, count, x):
        return {'counted': params['counted'] + count * x}, count + 1.0, x.sum()

    params = {'counted': jnp.zeros(4)}
    report = testing.moves(step, params, jnp.ones(()), jnp.ones(4), times=3)
    assert [row['change'] for row in report.rows()] == [12.0]  # 1 + 2 + 3, four times


def test_weight_decay_moves_what_has_no_gradient():
    report = testing.moves(descends(decay=0.1), PARAMS, X, grads=GRADS)
    assert said(report)['tower/kernel'] == ('drifts', 'it shrinks as by weight decay')
    with pytest.raises(AssertionError, match='weight decay') as caught:
        testing.assert_moves_only(report, 'crown/**')
    assert str(caught.value) == (
        "Expected the step to move 'crown/**' and nothing else.\n"
        'It moves tower/kernel.\n'
        'tower/kernel: it shrinks as by weight decay. '
        'If it should stay: sg.freeze(tx, where).'
    )
    # Without gradients, nobody can tell.
    assert said(testing.moves(descends(decay=0.1), PARAMS, X))['tower/kernel'] == (
        'moves',
        '',
    )


def test_momentum_moves_what_has_no_gradient(standard_promotion):
    tx = optax.sgd(0.1, momentum=0.9)

    @jax.jit
    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state, loss(params, x)

    _, state = tx.update(jax.tree.map(jnp.ones_like, PARAMS), tx.init(PARAMS))
    report = testing.moves(step, PARAMS, state, X, grads=GRADS)
    status, reason = said(report)['tower/kernel']
    assert status == 'drifts' and 'momentum' in reason


@pytest.mark.parametrize('kind', [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize('known', [True, False])
def test_an_update_below_the_resolution_of_a_type(kind, known):
    """The update is not zero; the sum is the value itself (hazard 55)."""
    params = jax.tree.map(lambda x: x.astype(kind), PARAMS)
    rate = 1e-3 * float(jnp.finfo(kind).eps)
    x = X.astype(kind)
    grads = jax.grad(loss)(params, x)
    assert grads['crown']['bias'].all()
    step = jax.jit(descends(rate))
    report = testing.moves(step, params, x, grads=grads if known else None, times=3)
    assert said(report) == {
        'crown/bias': (
            'stuck',
            f'its update is lost in the rounding of {jnp.dtype(kind).name}',
        ),
        'tower/kernel': ('still', ''),
    }
    with pytest.raises(AssertionError, match='Keep it in float32, or make larger'):
        testing.assert_moves_only(report, 'crown/**')


def test_updates_of_zero():
    idle = testing.moves(descends(0.0), PARAMS, X, grads=GRADS)
    status, reason = said(idle)['crown/bias']
    assert status == 'stuck' and 'the rate is zero' in reason

    def without(params, x):
        new = descends(decay=0.1)(params, x)
        return {**new, 'crown': params['crown']}

    status, reason = said(testing.moves(without, PARAMS, X, grads=GRADS))['crown/bias']
    assert status == 'stuck' and 'masked' in reason
    with pytest.raises(AssertionError, match='Look at the optimizer'):
        testing.assert_moves_only(without, True, PARAMS, X, grads=GRADS)


def test_an_average_that_is_lost_in_the_rounding():
    """A target network in bfloat16 follows its source in larger types alone."""
    nets = {
        'source_net': jnp.full(3, 1.01, jnp.bfloat16),
        'target_net': jnp.ones(3, jnp.bfloat16),
    }

    def step(nets):
        target = nets['target_net'] * 0.995 + nets['source_net'] * 0.005
        return {**nets, 'target_net': target.astype(nets['target_net'].dtype)}

    report = testing.moves(step, nets, times=5)
    assert [row['status'] for row in report.rows()] == ['still', 'stuck']
    assert report.status_of('target_net') == 'stuck'
    with pytest.raises(sg.errors.UnknownNameError, match="no parameter 'target'"):
        report.status_of('target')


def test_an_average_of_which_a_few_values_move():
    old = jnp.array([1.0, 2.0, 3.0, 0.0], jnp.bfloat16)

    def step(params):
        new = params['partly'].astype(jnp.float32) + 1e-4
        return {'partly': new.astype(params['partly'].dtype)}

    [row] = testing.moves(step, {'partly': old}).rows()
    assert (row['status'], row['moved']) == ('stuck', 0.25)
    assert row['reason'] == 'most of its update is lost in the rounding of bfloat16'
    # Rows that are not read may stand still.
    [row] = testing.moves(
        lambda p: {'rows': p['rows'].at[0].add(1)}, {'rows': old}
    ).rows()
    assert (row['status'], row['moved']) == ('moves', 0.25)


def test_what_comes_back_to_its_first_value_has_moved():
    flip = testing.moves(lambda p: {'flip': -p['flip']}, {'flip': jnp.ones(2)}, times=2)
    assert [(row['status'], row['change']) for row in flip.rows()] == [('moves', 0.0)]


def test_an_empty_array_and_an_old_nan_stand_still():
    """An array without elements has no mean, and nan is not equal to itself."""
    params = {'empty': jnp.ones((0, 3)), 'old': jnp.full(2, jnp.nan), 'w': jnp.ones(2)}
    report = testing.moves(lambda p: {**p, 'w': p['w'] + 1.0}, params)
    assert {name: status for name, (status, _) in said(report).items()} == {
        'empty': 'still',
        'old': 'still',
        'w': 'moves',
    }
    testing.assert_moves_only(report, 'w')


def test_a_gradient_whose_square_is_no_number():
    """The square of 1e-30 is 0.0 in float32, and that of 1e30 is inf."""
    params = {'small': jnp.full(2, 1e-30), 'large': jnp.full(2, 1e30)}
    grads = {'small': jnp.full(2, 1e-30), 'large': jnp.full(2, 1e30)}
    report = testing.moves(
        lambda p: jax.tree.map(lambda a: 0.9 * a, p), params, grads=grads
    )
    assert said(report) == {'small': ('moves', ''), 'large': ('moves', '')}


def test_a_value_that_is_not_finite():
    report = testing.moves(lambda p: {'nan': p['nan'] / 0.0}, {'nan': jnp.zeros(2)})
    assert said(report) == {'nan': ('moves', 'its value is not finite')}


def test_a_step_that_runs_in_no_other_type():
    def step(params):
        assert params['typed'].dtype == jnp.bfloat16
        return params

    typed = {'typed': jnp.ones(2, jnp.bfloat16)}
    assert said(testing.moves(step, typed)) == {'typed': ('still', '')}
    report = testing.moves(step, typed, grads=typed)
    assert said(report)['typed'][0] == 'stuck'


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
    variables = model.init(jax.random.key(0), X)
    state = State.create(apply_fn=model.apply, tx=optax.adam(1e-2), **variables)

    @jax.jit
    def step(state, x):
        def of(params):
            variables = {'params': params, 'batch_stats': state.batch_stats}
            out, new = state.apply_fn(variables, x, mutable=['batch_stats'])
            return jnp.mean((out - 1.0) ** 2), new

        grads, new = jax.grad(of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, **new), {'grads': grads}

    grads = step(state, X)[1]['grads']
    report = testing.moves(step, state, X, grads=grads, times=2)
    assert said(report) == {
        'dense/bias': ('moves', ''),
        'dense/kernel': ('moves', ''),
        'norm/bias': ('moves', ''),
        'norm/scale': ('moves', ''),
        'norm/mean': ('drifts', WRITTEN),
        'norm/var': ('drifts', WRITTEN),
    }
    testing.assert_moves_only(step, True, state, X)
    with pytest.raises(AssertionError, match='It moves norm/mean, norm/var'):
        testing.assert_moves_only(report, lambda path: path.collection == 'params')


def test_donated_buffers_are_copied():
    params = jax.tree.map(jnp.array, PARAMS)
    step = jax.jit(descends(), donate_argnums=0)
    for _ in range(2):
        report = testing.moves(step, params, jnp.array(X), times=3)
        assert report.status_of('crown/bias') == 'moves'
    assert not params['crown']['bias'].is_deleted()


def test_sharded_arrays():
    mesh = jax.make_mesh((2,), ('rows',))
    sharding = NamedSharding(mesh, PartitionSpec('rows'))
    params = {'rows': jax.device_put(jnp.arange(4.0), sharding)}
    seen: list[Any] = []

    def step(params):
        seen.append(params['rows'].sharding)
        return {'rows': params['rows'] * 2.0}

    assert testing.moves(step, params, times=2).status_of('rows') == 'moves'
    assert seen[0] == sharding


def test_a_module_of_nnx_that_is_changed_in_place():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model, x):
        def of(model):
            return jnp.mean(model(x) ** 2)

        grads = nnx.grad(of)(model)
        model.bias[...] = model.bias[...] - 0.1 * grads.bias[...]

    before = np.asarray(model.bias[...])
    report = testing.moves(step, model, X)
    assert {row['status'] for row in report.rows() if 'bias' in row['parameter']} == {
        'moves'
    }
    assert {row['status'] for row in report.rows() if 'kernel' in row['parameter']} == {
        'still'
    }
    np.testing.assert_array_equal(model.bias[...], before)

    # The same as a function of its state.
    graph, state = nnx.split(model)

    def pure(state, x):
        model = nnx.merge(graph, state)
        step(model, x)
        return nnx.state(model)

    statuses = [row['status'] for row in testing.moves(pure, state, X).rows()]
    assert sorted(statuses) == ['moves', 'still']
    nnx.update(model, state)


def test_the_optimizer_of_nnx(standard_promotion):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return jnp.mean(x)

    report = testing.moves(step, model, optimizer, X, times=2)
    assert [row['status'] for row in report.rows()] == ['moves', 'moves']


# What is shown

TABLE = """\
              one step   why
──────────────────────────────────────────────────────
layers_0..2   still
layers_3      drifts     it shrinks as by weight decay
top/bias      moves
top/kernel    still

moves   its value changes
drifts  it has no gradient, and its value changes
still   its value does not change

Moves: 2 (8 B)
Drifts: 4 (16 B)
Still: 14 (56 B)"""


def layered():
    values = jnp.array([1.0, 2.0])
    layer = {'bias': values, 'kernel': values * 3.0}
    params: dict[str, Any] = {f'layers_{n}': layer for n in range(4)}
    return {**params, 'top': layer}


def test_equal_rows_are_one():
    def step(params):
        shrunk = jax.tree.map(lambda x: x * 0.9, params['layers_3'])
        top = {**params['top'], 'bias': params['top']['bias'] + 1.0}
        return {**params, 'layers_3': shrunk, 'top': top}

    grads = {'top': {'bias': jnp.ones(2), 'kernel': sg.ABSENT}}
    report = testing.moves(step, layered(), grads=grads)
    assert str(report) == TABLE
    assert report._repr_html_().count('<tr') == 8
    assert repr(report) == 'Moves(1 moves, 0 stuck, 2 drifts, 7 still)'
    assert [row.name for row in report.matrix(0).rows] == [
        *('layers_0..2/bias', 'layers_0..2/kernel'),
        *('layers_3/bias', 'layers_3/kernel', 'top/bias', 'top/kernel'),
    ]


def test_a_picture(tmp_path):
    report = testing.moves(descends(decay=0.1), PARAMS, X, grads=GRADS)
    report.plot(tmp_path / 'moves.svg', dark=True)
    assert 'drifts' in (tmp_path / 'moves.svg').read_text()

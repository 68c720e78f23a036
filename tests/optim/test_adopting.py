"""States taken along: what fits is carried, and what does not is named."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import flax_sg as sg
import oracle
from flax_sg import errors

pytestmark = [pytest.mark.every_case, pytest.mark.usefixtures('standard_promotion')]

PARAMS: Any = {
    'a': jnp.array([3.0, 1.0]),
    'b': jnp.array([2.0, -1.0]),
    'c': jnp.array([[0.5, 0.25], [1.0, -2.0]]),
}
ADAM = optax.adam(0.1)


def loss(p: Any) -> Any:
    near = jnp.sum((p['a'] - 1.0) ** 4)
    return near + jnp.sum((p['b'] + p['a']) ** 2) + jnp.sum(p['c'] ** 2)


def trained(
    tx: Any, state: Any, steps: int, params: Any = PARAMS, **extra: Any
) -> tuple[Any, Any]:
    for _ in range(steps):
        value, grads = jax.value_and_grad(loss)(params)
        given = {'value': value, 'grad': grads, **extra} if extra else {}
        updates, state = tx.update(grads, state, params, **given)
        params = sg.apply_updates(params, updates)
    return params, state


# What remembers steps of all parameters together.
TOGETHER = {
    'lbfgs': (lambda: optax.lbfgs(0.01, linesearch=None), {}),
    'line search': (optax.lbfgs, {'value_fn': loss}),
    'backtracking': (
        lambda: optax.chain(
            optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10, store_grad=True)
        ),
        {'value_fn': loss},
    ),
    'optimistic': (lambda: optax.optimistic_gradient_descent(0.01), {}),
}


@pytest.mark.parametrize('name', TOGETHER)
def test_what_belongs_to_one_selection_begins_anew_with_another(name):
    make, extra = TOGETHER[name]
    tx = make()
    frozen = sg.freeze(tx, 'b')
    params, state = trained(frozen, frozen.init(PARAMS), 3, **extra)
    adopted = sg.adopt(tx, params, state)
    oracle.assert_same(adopted, tx.init(params))
    # By hand: as from the beginning.
    expected = trained(tx, tx.init(params), 2, params, **extra)
    oracle.assert_same(trained(tx, adopted, 2, params, **extra), expected)
    # With the same selection all of it is carried.
    oracle.assert_same(sg.adopt(frozen, params, state), state)


def test_one_array_for_all_parameters_is_refused():
    # The states of both selections have one shape: merged, they would be swapped.
    tx = optax.flatten(optax.sgd(1.0, momentum=0.9))
    state = sg.freeze(tx, 'a').init(PARAMS)
    for new in sg.freeze(tx, 'b'), sg.freeze(tx, ['b', 'c']), tx:
        with pytest.raises(errors.StructureError, match='one array for several'):
            sg.adopt(new, PARAMS, state)


def test_states_with_more_than_an_array_for_each_leaf():
    split = optax.contrib.split_real_and_imaginary(ADAM)
    params: Any = {**PARAMS, 'z': jnp.ones(2, jnp.complex64)}
    for tx in optax.sm3(0.1), split, optax.adafactor(0.1, min_dim_size_to_factor=2):
        frozen = sg.freeze(tx, ['c', 'z'] if tx is split else 'c')
        given = params if tx is split else PARAMS
        _, state = frozen.update(given, frozen.init(given), given)
        fresh = tx.init(given)
        thawed = sg.adopt(tx, given, state)
        assert jax.tree.structure(thawed) == jax.tree.structure(fresh)
        pairs = jax.tree_util.tree_leaves_with_path(thawed)
        olds = dict(jax.tree_util.tree_leaves_with_path(state))
        for (keys, leaf), new in zip(pairs, jax.tree.leaves(fresh), strict=True):
            oracle.assert_same(leaf, olds.get(keys, new))
        oracle.assert_same(sg.adopt(frozen, given, thawed), state)


def test_holes_of_a_restored_state_have_no_state(tmp_path):
    tx = sg.freeze(ADAM, 'a')
    params, state = trained(tx, tx.init(PARAMS), 2)
    whole = ADAM.init(params)
    by_flax = serialization.from_bytes(whole, serialization.to_bytes(state))
    assert by_flax[0].mu['a'] == {}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'state', state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / 'state', state)
    none = state[0]._replace(mu={**state[0].mu, 'a': None})
    for found in by_flax, restored, (none, *state[1:]):
        adopted = sg.adopt(ADAM, params, found)
        oracle.assert_same(adopted, sg.adopt(ADAM, params, state))
        assert oracle.is_zero(adopted[0].mu['a'])
        trained(ADAM, adopted, 1, params)
    for hole in None, {}:
        with pytest.raises(errors.StructureError, match='state is'):
            sg.adopt(ADAM, params, hole)


@pytest.mark.parametrize(
    'bad', ['text', [1.0], jnp.ones((1, 2)), jnp.ones(3), jnp.ones(2, jnp.bfloat16)]
)
def test_what_is_no_moment_is_named(bad):
    state = ADAM.init(PARAMS)
    state = (state[0]._replace(nu={**state[0].nu, 'b': bad}), *state[1:])
    with pytest.raises(errors.StructureError, match=r"state\[0\].nu\['b'\] is "):
        sg.adopt(ADAM, PARAMS, state)
    adopted = sg.adopt(ADAM, PARAMS, state, fresh='b')
    oracle.assert_same(adopted, ADAM.init(PARAMS))


def test_hyperparameters_are_those_of_the_new_transformation():
    adam = optax.inject_hyperparams(optax.adam)
    tx = sg.freeze(adam(learning_rate=0.1), 'a')
    params, state = trained(tx, tx.init(PARAMS), 2)
    adopted = sg.adopt(adam(learning_rate=0.5), params, state)
    assert float(adopted.hyperparams['learning_rate']) == 0.5
    oracle.assert_same(adopted.inner_state[0].mu['b'], state.inner_state[0].mu['b'])
    assert int(adopted.count) == 2


def test_rows_lose_their_moments_as_whole_arrays_do():
    _, state = trained(ADAM, ADAM.init(PARAMS), 3)
    rows = sg.freeze(ADAM, sg.at('c', 0))
    frozen = sg.adopt(rows, PARAMS, state)
    oracle.assert_same(frozen[0].mu['c'].rows, state[0].mu['c'][1:])
    oracle.assert_same(frozen[0].mu['a'], state[0].mu['a'])
    # After the thaw a gradient of zero moves neither.
    thawed = sg.adopt(ADAM, PARAMS, frozen)
    updates, _ = ADAM.update(jax.tree.map(jnp.zeros_like, PARAMS), thawed, PARAMS)
    assert oracle.is_zero(updates['c'][0])
    assert not oracle.is_zero(updates['c'][1])


def test_parameters_that_came_and_went():
    _, state = trained(ADAM, ADAM.init(PARAMS), 3)
    later = {'b': PARAMS['b'], 'lora': {'up': jnp.ones(3)}}
    adopted = sg.adopt(ADAM, later, state)
    oracle.assert_same(adopted[0].mu['b'], state[0].mu['b'])
    assert oracle.is_zero(adopted[0].mu['lora']['up'])
    assert int(adopted[0].count) == 3
    updates, _ = ADAM.update(later, adopted, later)
    assert jax.tree.structure(updates) == jax.tree.structure(later)
    with pytest.raises(errors.StructureError, match=r'state\[0\].mu is a dict'):
        sg.adopt(ADAM, {'other': jnp.ones(2)}, state)


def test_a_report_says_what_was_carried_fresh_and_dropped():
    tx = sg.freeze(ADAM, ['b', sg.at('c', 0)])
    _, state = trained(ADAM, ADAM.init(PARAMS), 1)
    found: dict[str, Any] = {}
    later = {**PARAMS, 'd': {'w': jnp.ones(2)}}
    sg.adopt(tx, later, state, fresh='a', report=found.update)
    assert found == {
        'carried': ['[0].count', 'c'],
        'fresh': ['a', 'd/w'],
        'dropped': ['b'],
    }
    # A head that was removed is named by its place.
    sg.adopt(ADAM, {'a': PARAMS['a']}, state, report=found.update)
    assert found['dropped'] == [f"[0].{m}['{n}']" for m in ('mu', 'nu') for n in 'bc']
    # What several states know counts as known; what goes back has its values.
    frozen = sg.adopt(tx, PARAMS, state)
    sg.adopt(ADAM, PARAMS, frozen, report=found.update)
    assert (found['fresh'], found['dropped']) == (['b'], [])
    sg.adopt(ADAM, PARAMS, frozen, state, report=found.update)
    assert (found['fresh'], found['dropped']) == ([], [])


def test_a_clip_in_front_is_given_a_state():
    clip = optax.clip_by_global_norm(1.0)
    _, state = trained(ADAM, ADAM.init(PARAMS), 2)
    adopted = sg.adopt(optax.chain(clip, ADAM), PARAMS, (clip.init(PARAMS), state))
    oracle.assert_same(adopted[1], state)


def test_another_transformation_is_named_by_its_place():
    clip = optax.clip_by_global_norm(1.0)
    state = optax.chain(clip, optax.sgd(0.1)).init(PARAMS)
    said = (
        r'state\[1\]\[0\] is an EmptyState, where the new state has a ScaleByAdamState'
    )
    with pytest.raises(errors.StructureError, match=said):
        sg.adopt(optax.chain(clip, ADAM), PARAMS, state)


def test_a_label_with_the_name_of_a_parameter():
    groups = {'a': ADAM, 'rest': optax.sgd(0.1, momentum=0.9)}
    tx = optax.multi_transform(
        groups, lambda p: sg.labels(p, {'a': ['a', 'b'], 'rest': 'c'})
    )
    _, state = trained(tx, tx.init(PARAMS), 2)
    moments = sg.adopt(tx, PARAMS, state, fresh='b').inner_states['a'].inner_state[0].mu
    before = state.inner_states['a'].inner_state[0].mu
    oracle.assert_same(moments['a'], before['a'])
    assert oracle.is_zero(moments['b'])

"""States taken along: what fits is carried, and what does not is named."""

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from jax.flatten_util import ravel_pytree

import flax_sg as sg
from flax_sg import errors
from tests.helpers import oracle

pytestmark = pytest.mark.usefixtures('standard_promotion')

PARAMS: Any = {
    'a': jnp.array([3.0, 1.0]),
    'b': jnp.array([2.0, -1.0]),
    'c': jnp.array([[0.5, 0.25], [1.0, -2.0]]),
}
ADAM, TRACE = optax.adam(0.1), optax.trace(0.9)


def loss(p: Any) -> Any:
    near = jnp.sum((p['a'] - 1.0) ** 4)
    return near + jnp.sum((p['b'] + p['a']) ** 2) + jnp.sum(p['c'] ** 2)


gradient = jax.jit(jax.grad(loss))


def trained(tx: Any, state: Any, steps: int, params: Any = PARAMS) -> tuple[Any, Any]:
    for _ in range(steps):
        updates, state = tx.update(gradient(params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def searching(params: Any, state: Any, tx: Any, where: Any, steps: int) -> Any:
    """Steps of an optimizer that calls functions: it is given the trained part."""
    part, rest = sg.partition(params, where)
    for _ in range(steps):
        of_part = lambda part: loss(sg.combine(part, rest))  # noqa: E731
        value, grads = jax.value_and_grad(of_part)(part)
        given = {'value': value, 'grad': grads, 'value_fn': of_part}
        updates, state = tx.update(grads, state, part, **given)
        part = optax.apply_updates(part, updates)
    return sg.combine(part, rest), state


# What remembers steps of all parameters together.
TOGETHER = {
    'lbfgs': lambda: optax.lbfgs(0.01, linesearch=None),
    'optimistic': lambda: optax.optimistic_gradient_descent(0.01),
    'line search': optax.lbfgs,
    'backtracking': lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10, store_grad=True)
    ),
}


@pytest.mark.parametrize('name', TOGETHER)
def test_what_belongs_to_one_selection_begins_anew_with_another(name):
    tx = TOGETHER[name]()
    frozen = sg.freeze(tx, 'b')
    where = ~sg.filters.as_filter('b')
    state = frozen.init(PARAMS)
    params, state = searching(PARAMS, state, tx, where, 3)
    adopted = sg.adopt(tx, params, state)
    oracle.assert_same(adopted, tx.init(params))
    # With the same selection all of it is carried.
    oracle.assert_same(sg.adopt(frozen, params, state), state)
    oracle.assert_same(sg.adopt(frozen, params, state, old=frozen), state)
    # Other rows are another selection, of arrays of the same shape; other elements too.
    rows = [sg.freeze(tx, sg.at('c', n)) for n in (0, 1)]
    steps = 2 if name in ('lbfgs', 'optimistic') else 0  # Without functions.
    for one, two in rows, (tx, sg.freeze(tx, sg.at('c', np.s_[0, :1]))):
        _, before = trained(one, one.init(params), steps, params)
        for old in one, None:
            adopted = sg.adopt(two, params, before, old=old)
            oracle.assert_same(adopted, two.init(params))


# What a state is made of, in which no array has the name of a parameter. In a list
# the first array is 'a', and 'b' for the new one: of one shape. So are the vectors.
NAMELESS: dict[str, tuple[Any, str]] = {
    'a list': (jax.tree.leaves, 'trace/0, trace/1 in'),
    'a vector': (lambda params: ravel_pytree(params)[0], 'trace in'),
}


@pytest.mark.parametrize('name', NAMELESS)
def test_what_optax_cannot_tell_begins_anew(name):
    of, said = NAMELESS[name]
    update = lambda updates, state, params=None: (updates, state)  # noqa: E731
    momentum = optax.GradientTransformation(lambda p: TRACE.init(of(p)), update)
    old, new = sg.freeze(momentum, 'b'), sg.freeze(momentum, 'a')
    state = jax.tree.map(jnp.ones_like, old.init(PARAMS))
    for made_by in None, old:
        with pytest.warns(UserWarning, match=f'{said} the state begins anew'):
            adopted = sg.adopt(new, PARAMS, state, old=made_by)
        oracle.assert_same(adopted, new.init(PARAMS))
    oracle.assert_same(sg.adopt(old, PARAMS, state, old=old), state)


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
        with pytest.raises(errors.StructureError, match='another transformation'):
            sg.adopt(ADAM, params, hole)


@pytest.mark.parametrize(
    'bad', ['text', [1.0], jnp.ones((1, 2)), jnp.ones(3), jnp.ones(2, jnp.bfloat16)]
)
def test_what_is_no_moment_begins_anew(bad):
    found: dict[str, Any] = {}
    _, whole = trained(ADAM, ADAM.init(PARAMS), 1)
    state = (whole[0]._replace(nu={**whole[0].nu, 'b': bad}), *whole[1:])
    adopted = sg.adopt(ADAM, PARAMS, state, report=found.update)
    assert oracle.is_zero(adopted[0].nu['b'])
    oracle.assert_same(adopted[0].mu, whole[0].mu)
    assert found['in part'] == ['b']


def test_a_report_says_what_was_carried_fresh_and_dropped():
    tx = sg.freeze(ADAM, ['b', sg.at('c', 0)])
    _, state = trained(ADAM, ADAM.init(PARAMS), 1)
    found: dict[str, Any] = {}
    later = {**PARAMS, 'd': {'w': jnp.ones(2)}}
    sg.adopt(tx, later, state, old=ADAM, report=found.update)
    told = {'carried': ['0/count', 'a'], 'in part': ['c'], 'fresh': ['d/w']}
    assert found == {**told, 'dropped': ['b']}
    # A head that was removed is named by its place.
    sg.adopt(ADAM, {'a': PARAMS['a']}, state, report=found.update)
    assert found['dropped'] == [f'0/{m}/{n}' for m in ('mu', 'nu') for n in 'bc']
    # What several states know counts as known; what goes back has its values.
    frozen = sg.adopt(tx, PARAMS, state, old=ADAM)
    sg.adopt(ADAM, PARAMS, frozen, old=tx, report=found.update)
    assert (found['in part'], found['fresh'], found['dropped']) == (['c'], ['b'], [])
    sg.adopt(ADAM, PARAMS, frozen, state, old=[tx, ADAM], report=found.update)
    all_of_it = {'carried': ['0/count', 'a', 'b', 'c']}
    assert found == {**all_of_it, 'in part': [], 'fresh': [], 'dropped': []}


def test_a_state_of_which_all_was_frozen_is_no_other_transformation():
    momentum = optax.sgd(0.1, momentum=0.9)
    nothing = sg.freeze(momentum, True).init(PARAMS)
    for old in None, sg.freeze(momentum, True):
        adopted = sg.adopt(momentum, PARAMS, nothing, old=old)
        oracle.assert_same(adopted, momentum.init(PARAMS))


GROUPS = {
    'count': lambda: optax.adam(0.1),
    'schedule': lambda: optax.adam(optax.constant_schedule(0.1)),
    'steps': lambda: optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation(),
    'factored': lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    'averaging': lambda: optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    'without moments': lambda: optax.scale_by_schedule(lambda n: 1.0 / (n + 1.0)),
}


@pytest.mark.parametrize('name', GROUPS)
def test_a_count_begins_anew_with_its_moments(name):
    make = GROUPS[name]
    where = {'one': '{a,b}', 'two': 'c'}
    groups = optax.multi_transform(
        {'one': make(), 'two': make()}, lambda params: sg.labels(params, where)
    )
    stage = sg.freeze(groups, 'c')
    params, state = PARAMS, stage.init(PARAMS)
    # By hand: an optimizer for each group, and the second one begins with the thaw.
    own, first = make(), {'a': PARAMS['a'], 'b': PARAMS['b']}
    by_first = own.init(first)
    for _ in range(4):
        grads = gradient(params)
        updates, state = stage.update(grads, state, params)
        _, by_first = own.update({k: grads[k] for k in first}, by_first, first)
        params = optax.apply_updates(params, updates)
        first = {k: params[k] for k in first}
    found: dict[str, Any] = {}
    adopted = sg.adopt(groups, params, state, report=found.update)
    grads = gradient(params)
    by_first, _ = own.update({k: grads[k] for k in first}, by_first, first)
    begins = own.init({'c': params['c']})
    is_kept = 'schedule', 'without moments'
    if name in is_kept:  # A schedule has no moments beside it, and goes on.
        of_schedule = lambda path, _: 'Schedule' in str(path)  # noqa: E731
        begins = optax.tree_utils.tree_set(begins, of_schedule, count=4)
    by_second, _ = own.update({'c': grads['c']}, begins, {'c': params['c']})
    updates, _ = groups.update(grads, adopted, params)
    oracle.assert_same(updates, {**by_first, **by_second})
    kept = [path for path in found['carried'] if path.startswith('inner_states/two')]
    assert len(kept) == (name in is_kept)


def test_a_count_that_is_shared_stays():
    params = {'a': jnp.ones(3), 'b': jnp.ones(3)}
    for frozen in 'a', sg.at('b', 0), sg.at('a', np.s_[1:]):
        tx, found = sg.freeze(ADAM, frozen), dict[str, Any]()
        _, state = tx.update(params, tx.init(params), params)
        adopted = sg.adopt(ADAM, params, state, old=tx, report=found.update)
        assert int(adopted[0].count) == 1
        assert '0/count' in found['carried']


def test_the_first_of_two_states_has_the_last_word():
    tx, params = optax.sgd(0.1, momentum=0.9), {'w': jnp.ones(2)}
    one, two = (jax.tree.map(lambda x, n=n: x + n, tx.init(params)) for n in (1, 2))
    oracle.assert_same(sg.adopt(tx, params, one, two), one)


def first_update(count: int) -> float:
    """The first update of a thawed parameter, beside that of a new Adam."""
    params = {'a': jnp.ones(2), 'b': jnp.ones(2)}
    tx = sg.freeze(ADAM, 'a')
    state = tx.init(params)
    for _ in range(count):
        _, state = tx.update(params, state, params)
    updates, _ = ADAM.update(params, sg.adopt(ADAM, params, state), params)
    anew, _ = ADAM.update(params, ADAM.init(params), params)
    return float(updates['a'][0] / anew['a'][0])


def test_a_count_that_is_older_than_moments_has_the_effect_that_the_page_tells():
    page = pathlib.Path(__file__, '../../../docs/stages.md').resolve().read_text()
    [row] = re.findall(r'times the first update of a new Adam \|(.*)', page)
    figures = [float(text) for text in row.strip(' |').split('|')]
    assert [round(first_update(n), 2) for n in (5, 20, 50, 200)] == figures[:4]
    assert 2.9 < figures[4] < 3.0  # The page computes its own.


def test_parameters_with_the_names_of_a_state():
    params = {'w': jnp.ones(2), 'mu': {'w': jnp.ones(3)}, 'nu': jnp.ones(4)}
    frozen = sg.freeze(ADAM, sg.at('w', np.s_[:1]))
    _, state = frozen.update(params, frozen.init(params), params)
    found: dict[str, Any] = {}
    adopted = sg.adopt(ADAM, params, state, old=frozen, report=found.update)
    for new, old in zip(adopted[0][1:], state[0][1:], strict=True):
        oracle.assert_same((new['mu'], new['nu']), (old['mu'], old['nu']))
        oracle.assert_same(new['w'], jnp.array([0.0, old['w'][0]]))
    assert (found['in part'], found['fresh']) == (['w'], [])


def test_numbers_for_rows_are_not_handed_to_other_rows():
    params = {'a': jnp.arange(1.0, 9.0).reshape(4, 2)}
    sm3 = optax.sm3(0.1, momentum=0.0)
    indices = np.s_[:2], [0, 1], np.s_[2:]
    one, same, two = (sg.freeze(sm3, sg.at('a', rows)) for rows in indices)
    _, state = one.update(params, one.init(params), params)
    adopted = sg.adopt(two, params, state, old=one)
    oracle.assert_same(adopted[0].mu, two.init(params)[0].mu)
    oracle.assert_same(sg.adopt(same, params, state, old=one), state)
    # A random key is none of these: it goes on.
    noise = optax.GradientTransformation(
        lambda p: jax.random.PRNGKey(0), lambda u, s, p=None: (u, s + jnp.uint32(1))
    )
    one, two = (sg.freeze(noise, sg.at('a', rows)) for rows in (np.s_[:2], np.s_[2:]))
    _, state = one.update(params, one.init(params), params)
    oracle.assert_same(sg.adopt(two, params, state, old=one), state)

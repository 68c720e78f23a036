"""Rows and layers that are trained: as if they were an array of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_sg as sg
from flax_sg import errors
from tests.helpers import oracle
from tests.helpers.optimizers import OPTIMIZERS
from tests.helpers.turns import in_turn

pytestmark = pytest.mark.usefixtures('standard_promotion')

# A stack of six layers, and an array beside it.
STACK = {'w': jnp.linspace(-1.0, 1.0, 120).reshape(6, 4, 5), 'b': jnp.ones((6, 5))}
PARAMS: Any = {'layers': STACK, 'head': jnp.linspace(0.5, 1.0, 5)}
MORE: dict[str, Any] = {'lion': lambda: optax.lion(0.1), 'sm3': lambda: optax.sm3(0.1)}
# Rows that are frozen, and the axes in which the layers stand.
CHOICES: dict[str, Any] = {
    'every other': (np.s_[::2], (6,)),
    'by number': ([0, 5], (6,)),
    'a mask': (np.array([True] * 5 + [False]), (6,)),
    'some layers of one stage': (np.s_[0, :2], (2, 3)),
    'the first four': (np.s_[:4], (6,)),
}


def loss(p: Any, x: Any) -> Any:
    w, b = p['layers']['w'].reshape(6, 4, 5), p['layers']['b'].reshape(6, 5)
    for n in range(6):
        x = jnp.tanh(x @ w[n].T @ w[n]) * b[n]
    return jnp.sum((x * p['head'] - 1.0) ** 2)


X = jnp.linspace(-1.0, 1.0, 5)


def of_layers(fn: Any, p: Any, *others: Any) -> Any:
    layers = jax.tree.map(fn, p['layers'], *(other['layers'] for other in others))
    return {'layers': layers, 'head': p['head']}


@pytest.mark.parametrize(
    ('name', 'choice'),
    [
        *in_turn({**OPTIMIZERS, **MORE}, CHOICES),
        *((name, 'some layers of one stage') for name in ('adafactor', 'lion')),
    ],
)
def test_training_is_that_of_the_rows_alone(name, choice):
    index, axes = CHOICES[choice]
    live = np.ones(axes, bool)
    live[index] = False
    make = {**OPTIMIZERS, **MORE}[name]
    tx, hand = sg.freeze(make(), sg.at('layers/**', index)), make()

    def rows(p):
        return of_layers(lambda x: x[live], p)

    def put(p, part):
        return of_layers(lambda y, x: x.at[live].set(y), part, p)

    @jax.jit
    def ours(p, state, x):
        updates, state = tx.update(jax.grad(loss)(p, x), state, p)
        return optax.apply_updates(p, updates), state

    @jax.jit
    def theirs(part, p, state, x):
        grads = rows(jax.grad(loss)(put(p, part), x))
        updates, state = hand.update(grads, state, part)
        return optax.apply_updates(part, updates), state

    params = of_layers(lambda x: x.reshape(*axes, *x.shape[1:]), PARAMS)
    p, part = params, rows(params)
    state, hand_state = tx.init(p), hand.init(part)
    for step in range(4):
        p, state = ours(p, state, X * step)
        part, hand_state = theirs(part, params, hand_state, X * step)
    oracle.assert_same(p, put(params, part))
    # The state has exactly the arrays that the optimizer of the rows has.
    oracle.assert_same(*map(jax.tree.leaves, (state, hand_state)))


def test_rows_of_one_axis_and_of_two_are_carried_to_each_other():
    params = {'w': PARAMS['layers']['w'].reshape(2, 3, 4, 5)}
    adam = optax.adam(0.1)
    layers, stage = (sg.freeze(adam, sg.at('w', i)) for i in (np.s_[0, :2], np.s_[0]))
    _, full = adam.update(params, adam.init(params), params)
    moments = full[0].mu['w']
    first = sg.adopt(layers, params, full, old=adam)
    oracle.assert_same(first[0].mu['w'], moments.reshape(6, 4, 5)[2:])
    second = sg.adopt(stage, params, first, old=layers)
    oracle.assert_same(second[0].mu['w'], moments[1:])
    back = sg.adopt(layers, params, second, old=stage)[0].mu['w']
    assert oracle.is_zero(back[0])
    oracle.assert_same(back[1:], moments[1])
    # Of other sizes nothing is known; single elements keep all.
    other = {'w': params['w'][:, :2]}
    adopted = sg.adopt(layers, other, first, old=layers)
    oracle.assert_same(adopted[0].mu, layers.init(other)[0].mu)
    elements = sg.freeze(adam, sg.at('w', np.s_[0, 0, 0, :2]))
    assert elements.init(params)[0].mu['w'].shape == (2, 3, 4, 5)


gradient = jax.jit(jax.grad(loss))


def trained(tx: Any, state: Any, p: Any = PARAMS) -> Any:
    for _ in range(2):
        updates, state = tx.update(gradient(p, X), state, p)
        p = optax.apply_updates(p, updates)
    return state


def test_rows_are_carried_when_the_choice_changes():
    adam = optax.adam(0.1)
    first, later = (sg.freeze(adam, sg.at('layers/*', np.s_[:n])) for n in (4, 2))
    old = trained(first, first.init(PARAMS))
    new = sg.adopt(later, PARAMS, old, old=first)
    known, found = old[0].mu['layers']['w'], new[0].mu['layers']['w']
    assert found.shape == (4, 4, 5)
    oracle.assert_same(found[2:], known)
    assert oracle.is_zero(found[:2])
    # All rows, and back again; what was trained before has its moments.
    whole = sg.adopt(adam, PARAMS, new, old=later)
    oracle.assert_same(whole[0].mu['layers']['w'][2:], found)
    assert oracle.is_zero(whole[0].mu['layers']['w'][:2])
    full = trained(adam, adam.init(PARAMS))
    both = sg.adopt(later, PARAMS, old, full, old=[first, adam])[0].mu['layers']['w']
    oracle.assert_same(both[2:], known)
    oracle.assert_same(both[:2], full[0].mu['layers']['w'][2:4])
    oracle.assert_same(sg.adopt(first, PARAMS, whole, old=adam), old)
    # One number for several rows begins anew, and of single numbers there are rows.
    tx = optax.adafactor(0.1, min_dim_size_to_factor=2)
    first, later = (sg.freeze(tx, sg.at('layers/*', np.s_[:n])) for n in (4, 2))
    state = trained(first, first.init(PARAMS))
    adopted = sg.adopt(later, PARAMS, state, old=first)
    assert jax.tree.structure(adopted) == jax.tree.structure(later.init(PARAMS))
    trained(later, adopted)


def test_a_state_does_not_tell_of_which_rows_it_is():
    """As many rows, one row that would be several, and all of them."""
    adam = optax.adam(0.1)
    indices = np.s_[:3], np.s_[3:], 0
    first, other, one = (sg.freeze(adam, ~sg.at('layers/w', i)) for i in indices)
    state = trained(first, first.init(PARAMS))
    for tx, made in (other, state), (first, one.init(PARAMS)):
        with pytest.raises(errors.StructureError, match='layers/w'):
            sg.adopt(tx, PARAMS, made)
    # All rows are trained now. The array may have grown as well.
    with pytest.warns(UserWarning, match=r'layers/w(.|\n)*old=old_tx'):
        thawed = sg.adopt(adam, PARAMS, state)
    assert oracle.is_zero(thawed[0].mu['layers']['w'])
    found: dict[str, Any] = {}
    moments = sg.adopt(other, PARAMS, state, old=first, report=found.update)[0].mu
    assert oracle.is_zero(moments['layers']['w'])
    assert found['fresh'] == ['0/count', 'layers/w']
    with pytest.raises(errors.StructureError, match='does not belong'):
        trained(first, one.init(PARAMS))
    with pytest.raises(errors.StructureError, match='does not belong'):
        trained(one, state)


MEASURED = {
    'a norm': lambda: {'norm': optax.tree.norm},
    'an average': lambda: {'norm': optax.measure_with_ema(optax.tree.norm, 0.9)},
    'a tree': lambda: {'all': lambda grads: jax.tree.map(jnp.abs, grads)},
    'both': lambda: {'norm': optax.tree.norm, 'all': lambda grads: grads},
}


@pytest.mark.skipif(not hasattr(optax, 'monitor'), reason='a later optax has it')
@pytest.mark.parametrize('rows', [np.s_[:2], [1, 4], np.s_[4:]])
@pytest.mark.parametrize('name', MEASURED)
def test_a_state_that_grows_at_the_first_update(name, rows):
    params = {'emb': jnp.linspace(1.0, 2.0, 15).reshape(5, 3), 'w': jnp.ones(3)}
    tx = optax.chain(optax.monitor(MEASURED[name]()), optax.adam(0.1))
    frozen, live = sg.freeze(tx, sg.at('emb', rows)), np.ones(5, bool)
    live[rows] = False

    def part(tree):
        return {**tree, 'emb': tree['emb'][live]}

    ours, state = frozen.init(params), tx.init(part(params))
    for update in (frozen.update, *[jax.jit(frozen.update)] * 2):
        expected, state = tx.update(part(params), state, part(params))
        updates, ours = update(params, ours, params)
        np.testing.assert_allclose(part(updates)['emb'], expected['emb'], rtol=1e-6)
        assert jax.tree.structure(ours) == jax.tree.structure(state)
        oracle.assert_same(
            [*map(jnp.shape, jax.tree.leaves(ours))],
            [*map(jnp.shape, jax.tree.leaves(state))],
        )
    # Its own errors stay its own, also when the state has grown.
    with pytest.raises(errors.StructureError, match='has another shape'):
        frozen.update({**params, 'emb': jnp.ones(2)}, ours, params)


@pytest.mark.parametrize('frozen', [True, False, sg.at(True, np.s_[:1])])
def test_a_bare_array_beside_the_value_of_the_loss(frozen):
    params, grads = jnp.ones((3, 2)), jnp.full((3, 2), 0.5)
    plateau = optax.contrib.reduce_on_plateau(patience=1)
    tx = sg.freeze(optax.chain(optax.sgd(0.1), plateau), frozen)
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update(grads, state, params, value=jnp.float32(1.0))
    assert float(state[1].best_value) == 1.0
    live = np.zeros((3, 2), bool) | (frozen is False)
    live[1:] |= frozen is not True
    np.testing.assert_allclose(updates, np.where(live, -0.05, -0.0) * state[1].scale)

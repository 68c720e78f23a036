"""A freeze around a freeze: both are one, through whatever stands between them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_sg as sg
from flax_sg import errors
from tests.helpers import oracle
from tests.helpers.turns import in_turn

pytestmark = pytest.mark.usefixtures('standard_promotion')

PARAMS: Any = {
    'w': jnp.linspace(-1.0, 1.0, 18).reshape(6, 3),
    'a': jnp.linspace(0.5, 1.0, 3),
    'b': jnp.linspace(2.0, 1.0, 3),
    'c': jnp.ones(2),
}


def loss(p: Any) -> Any:
    rows = jnp.sin(p['w'] * p['a'][None]) * p['b'][None]
    return jnp.sum(rows) + jnp.sum(p['w'] ** 4) + jnp.sum(p['c'] ** 2)


# What stands between both freezes; none of it looks at several parameters at once.
BETWEEN: dict[str, Callable[[Any], Any]] = {
    'nothing': lambda tx: tx,
    'a chain': lambda tx: optax.chain(optax.clip(0.5), tx, optax.scale(0.5)),
    'a freeze': lambda tx: sg.freeze(tx, 'c'),
    'steps': lambda tx: optax.MultiSteps(tx, 2),
    'finite': lambda tx: optax.apply_if_finite(tx, 2),
    'hyperparameters': lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale(rate))
    )(rate=0.5),
    'groups': lambda tx: optax.multi_transform(
        {'x': tx, 'y': optax.sgd(0.1)}, dict(w='x', a='x', b='x', c='y')
    ),
}
# What the inner one freezes, what the outer one does, and both together.
PAIRS: dict[str, tuple[Any, Any, Any]] = {
    'whole': ('a', 'b', ['a', 'b']),
    'the same': ('a', ['a', 'b'], ['a', 'b']),
    'rows and all': ('w', sg.at('w', np.s_[:2]), 'w'),
    'all and rows': (sg.at('w', np.s_[:2]), ['w', 'b'], ['w', 'b']),
    'leaves and rows': ('a', sg.at('w', [0, 1, 4]), ['a', sg.at('w', [0, 1, 4])]),
    'rows and leaves': (sg.at('w', np.s_[4:]), 'b', ['b', sg.at('w', np.s_[4:])]),
    # The outer one shows all of the array, so the rows of the inner one are its own.
    'rows and elements': (
        sg.at('w', np.s_[:2]),
        sg.at('w', np.s_[:, 1]),
        [sg.at('w', np.s_[:, 1]), sg.at('w', [0, 1])],
    ),
}


GRADS = [jax.grad(loss)(jax.tree.map(lambda x, n=n: x * n, PARAMS)) for n in (1, 2, 3)]


def pruned(full: Any, wrt: Any) -> Any:
    """The gradients that ``sg.grad(loss, wrt=wrt)`` returns."""
    part = sg.grad(lambda p: sum(map(jnp.sum, jax.tree.leaves(p))), wrt=wrt)(PARAMS)
    return {k: v if v is sg.ABSENT else v * full[k] for k, v in part.items()}


def steps(tx: Any, wrt: Any = None) -> Any:
    """Some steps, with gradients of what is trained alone if that is said."""
    params, state = PARAMS, tx.init(PARAMS)
    for full in GRADS:
        given = full if wrt is None else pruned(full, wrt)
        updates, state = tx.update(given, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize(('pair', 'between'), in_turn(PAIRS, BETWEEN, times=2))
def test_two_freezes_are_one(pair, between):
    inner, outer, both = PAIRS[pair]
    wrap = BETWEEN[between]
    nested = sg.freeze(wrap(sg.freeze(optax.adamw(0.1), inner)), outer)
    joined = sg.freeze(wrap(optax.adamw(0.1)), both)
    expected, _ = steps(joined)
    for wrt in None, ~sg.filters.as_filter(both):
        oracle.assert_same(steps(nested, wrt)[0], expected)


def test_the_state_has_what_neither_freezes():
    inner, outer, both = PAIRS['leaves and rows']
    nested = sg.freeze(sg.freeze(optax.adam(0.1), inner), outer)
    states = [steps(tx)[1] for tx in (nested, sg.freeze(optax.adam(0.1), both))]
    oracle.assert_same(*map(jax.tree.leaves, states))
    # A program that was jitted under other rows is not found again.
    jitted = sg.freeze(optax.adam(0.1), inner)
    jitted = optax.GradientTransformation(jax.jit(jitted.init), jax.jit(jitted.update))
    for rows in np.s_[:2], np.s_[2:4], np.s_[:2]:
        both = [inner, sg.at('w', rows)]
        moved = steps(sg.freeze(jitted, both[1]))[0]
        sg.testing.assert_moves_only(PARAMS, moved, ~sg.filters.as_filter(both))
        expected, _ = steps(sg.freeze(optax.adam(0.1), both))
        np.testing.assert_allclose(moved['w'], expected['w'], rtol=1e-6)


IN_ROWS: Any = {
    'rows': sg.at('w', np.s_[4:]),
    'the same rows': sg.at('w', np.s_[:2]),
    'rows of another': sg.at('a', np.s_[:1]),
    'columns': sg.at('w', np.s_[:, 1]),
    'elements': dict.fromkeys('abc', False) | {'w': np.eye(4, 3) == 1},
    'rows or columns': sg.at('w', 0) | sg.at('w', np.s_[:, 1]),
    'rows by shape': sg.arrays(lambda x: x.ndim == 2) & sg.at(True, 0),
}


@pytest.mark.parametrize('wrap', BETWEEN)
@pytest.mark.parametrize('name', IN_ROWS)
def test_rows_within_rows_are_refused(name, wrap):
    outer = sg.at('w', np.s_[:2])
    inner = sg.freeze(optax.adam(0.1), IN_ROWS[name], unused='ignore')
    tx = sg.freeze(BETWEEN[wrap](inner), outer)
    for call in tx.init, jax.jit(tx.init):
        with pytest.raises(errors.PartError, match='Name all of them in one'):
            call(PARAMS)


@pytest.mark.parametrize('between', ('nothing', 'a chain', 'a freeze'))
def test_a_condition_within_rows(between):
    """It tells no rows, so it holds for what is left of the array."""
    rows, adam, wrap = sg.at('w', np.s_[:2]), optax.adamw(0.1), BETWEEN[between]

    def nested(now: Any) -> Any:
        return sg.freeze(wrap(sg.freeze(adam, sg.where(['w', 'a']) & now)), rows)

    def joined(now: Any) -> Any:
        return sg.freeze(wrap(adam), [rows, sg.where(['w', 'a']) & now])

    def moved(of_step: Any, start: Any) -> Any:
        @jax.jit
        def step(params: Any, state: Any, full: Any, now: Any) -> Any:
            updates, state = of_step(now).update(full, state, params)
            return optax.apply_updates(params, updates), state

        params, state, seen = PARAMS, start.init(PARAMS), list[Any]()
        for full, now in zip(GRADS, (True, False, True), strict=True):
            params, state = step(params, state, full, now)
            seen.append(params)
        return seen

    expected = moved(joined, sg.freeze(wrap(adam), False))
    for ours, right in zip(moved(nested, nested(False)), expected, strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), ours, right)


def test_a_clip_between_both_counts_what_it_is_given():
    clip, sgd = optax.clip_by_global_norm(1.0), optax.sgd(1.0)
    tx = sg.freeze(optax.chain(clip, sg.freeze(sgd, 'a')), 'b')
    full, state = jax.grad(loss)(PARAMS), tx.init(PARAMS)
    updates, _ = tx.update(full, state, PARAMS)
    by_hand = clip.update({**full, 'b': None}, clip.init(None))[0]
    oracle.assert_same(updates['w'], -by_hand['w'])
    pruned, _ = tx.update(sg.grad(loss, wrt=['w', 'c'])(PARAMS), state, PARAMS)
    by_hand = clip.update({'w': full['w'], 'c': full['c']}, clip.init(None))[0]
    np.testing.assert_array_equal(pruned['w'], -by_hand['w'])


def test_what_no_freeze_drops_has_to_have_a_gradient():
    tx = sg.freeze(optax.chain(optax.clip(1.0), sg.freeze(optax.adam(0.1), 'a')), 'b')
    part = sg.grad(loss, wrt=['a', 'c'])(PARAMS)
    with pytest.raises(errors.StructureError, match="nothing at 'w' in the gradient"):
        tx.update(part, tx.init(PARAMS), PARAMS)


def test_rows_of_nested_freezes_are_adopted():
    adam = optax.adam(0.1)

    def nested(rows: Any) -> Any:
        inside = optax.chain(optax.clip(9.0), sg.freeze(adam, 'b'))
        return sg.freeze(inside, sg.at('w', rows))

    old, new = nested([0, 1, 5]), nested([3, 4, 5])
    _, state = steps(old)
    assert state[1][0].mu['w'].shape == (3, 3)
    found: dict[str, Any] = {}
    adopted = sg.adopt(new, PARAMS, state, old=old, report=found.update)
    whole = jnp.zeros((6, 3)).at[jnp.array([2, 3, 4])].set(state[1][0].mu['w'])
    oracle.assert_same(adopted[1][0].mu['w'], whole[jnp.array([0, 1, 2])])
    assert found['in part'] == ['w']
    with pytest.raises(errors.StructureError, match="rows of 'w' are frozen"):
        sg.adopt(new, PARAMS, state)

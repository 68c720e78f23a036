"""What is frozen for some steps of one program stands still, with its moments."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import flax_sg as sg
from flax_sg import errors
from flax_sg.filters import as_filter
from tests.helpers import oracle
from tests.helpers.optimizers import OPTIMIZERS
from tests.helpers.turns import in_turn

pytestmark = pytest.mark.usefixtures('standard_promotion')

PARAMS: Any = {
    'body': {'w': jnp.linspace(-1.0, 1.0, 6).reshape(3, 2), 'b': jnp.ones(2)},
    'last': {'w': jnp.linspace(0.5, 1.0, 8).reshape(2, 4), 'b': jnp.full(4, 0.25)},
    # As a count of optax is named.
    'count': jnp.array(2.0),
}
X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
MORE: dict[str, Any] = {
    'rows': lambda: sg.freeze(optax.adamw(0.1), sg.at('last/w', 0)),
    'amsgrad': lambda: optax.amsgrad(0.1),
    'memories': lambda: optax.chain(optax.scale_by_lbfgs(2), optax.scale(-0.1)),
    'schedule': lambda: optax.adamw(optax.linear_schedule(0.1, 0.01, 5)),
    'hyperparameters': lambda: optax.inject_hyperparams(optax.adamw)(0.1),
    'schedule-free': lambda: optax.contrib.schedule_free_adamw(0.1, warmup_steps=2),
    'averages': lambda: optax.chain(optax.adam(0.1), optax.ema(0.9)),
    'decay where': lambda: optax.adamw(
        0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    'around a freeze': lambda: optax.chain(
        optax.ema(0.9), sg.freeze(optax.adamw(0.1), 'body/b')
    ),
}


def gradients(params: Any, n: Any) -> Any:
    def loss(params: Any) -> Any:
        x = jnp.tanh((X + 0.1 * n) @ params['body']['w'] + params['body']['b'][None])
        y = x @ params['last']['w'] + params['last']['b'][None]
        return jnp.sum((params['count'] * y - 1.0) ** 2)

    return jax.grad(loss)(params)


def where_last(old: Any, new: Any, mask: Any) -> Any:
    """The new tree, or state, but below 'last' the old one where a mask is True."""

    def choose(keys: Any, new: Any, old: Any) -> Any:
        names = [getattr(key, 'key', None) for key in keys]
        if 'last' not in names:
            return new
        if isinstance(mask, dict):
            here = mask[names[names.index('last') + 1]]
            if new.shape[1:] == here.shape[1:]:  # Of some rows there is no state.
                here = here[len(here) - len(new) :]
            fits = new.shape[new.ndim - here.ndim :] == here.shape
            here = jnp.broadcast_to(here, new.shape) if fits else here.all()
            return jnp.where(here, old, new)
        return jnp.where(mask, old, new)

    return jax.tree_util.tree_map_with_path(choose, new, old)


def by_hand(tx: Any, mask: Any, n: Any, params: Any, state: Any) -> Any:
    grads = gradients(params, n)
    grads = where_last(jax.tree.map(jnp.zeros_like, grads), grads, mask)
    updates, after = tx.update(grads, state, params)
    new = optax.apply_updates(params, updates)
    return where_last(params, new, mask), where_last(state, after, mask)


def ours(tx: Any, mask: Any, n: Any, params: Any, state: Any) -> Any:
    where = mask_as_filter(mask)
    tx = sg.freeze(tx, where)
    updates, state = tx.update(gradients(params, n), state, params)
    return optax.apply_updates(params, updates), state


def mask_as_filter(mask: Any) -> Any:
    if isinstance(mask, dict):
        return {'body': False, 'last': mask, 'count': False}
    return as_filter('last/**') & mask


def elements(n: Any) -> Any:
    """A mask of elements, another one in each step."""
    return {'w': (jnp.arange(8).reshape(2, 4) + n) % 3 < 1, 'b': jnp.arange(4) < n - 2}


# What is frozen in each step: nothing, and from the third one on for a while.
MASKS: dict[str, Any] = {
    'a condition': lambda n: (n >= 2) & (n < 5),
    'elements': elements,
}


def run(step: Any, make: Any, mask: Any, params: Any) -> Any:
    tx = make()

    def body(carry: Any, n: Any) -> Any:
        params, state = step(tx, mask(n), n, *carry)
        return (params, state), params

    # Without 'last' in a chain, ``sg.freeze`` has the state of what it wraps.
    return jax.lax.scan(body, (params, tx.init(params)), jnp.arange(8))


@pytest.mark.parametrize(('name', 'mask'), in_turn({**OPTIMIZERS, **MORE}, MASKS))
def test_in_a_scan(name, mask):
    make = {**OPTIMIZERS, **MORE}[name]
    found, expected = (
        jax.jit(lambda p, step=step: run(step, make, MASKS[mask], p))(PARAMS)
        for step in (ours, by_hand)
    )
    oracle.assert_same(found, expected)
    moved = found[1]['last']['w']
    if mask == 'a condition':
        assert (moved[1] == moved[4]).all()
    assert (moved[1][1] != moved[-1][1]).all()


WEIGHT = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)


@pytest.mark.parametrize('start', [WEIGHT, jnp.array(2.0)])
def test_parameters_that_are_one_array(start):
    tx = optax.chain(optax.clip(0.5), optax.adamw(optax.linear_schedule(0.1, 0.0, 9)))

    def ours(carry, flag):
        params, state = carry
        updates, state = sg.freeze(tx, flag).update(jnp.sin(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    def hand(carry, flag):
        def choose(new, old):  # A count is an integer.
            is_count = jnp.issubdtype(new.dtype, jnp.integer)
            return new if is_count else jnp.where(flag, old, new)

        params, state = carry
        updates, after = tx.update(jnp.sin(params), state, params)
        new = optax.apply_updates(params, jnp.where(flag, -0.0, updates))
        return (new, jax.tree.map(choose, after, state)), None

    flags = jnp.array([False, False, True, True, False])
    run = jax.jit(jax.lax.scan, static_argnums=0)
    oracle.assert_same(
        *(run(fn, (start, tx.init(start)), flags) for fn in (ours, hand))
    )


def test_a_vector_of_all_parameters_cannot_stand_still():
    """``optax.flatten`` makes one array of all."""
    flat = optax.flatten(optax.adam(0.1))
    for mask in MASKS.values():
        with pytest.raises(errors.StructureError, match='to which parameters'):
            run(ours, lambda: flat, mask, PARAMS)


def test_the_state_is_that_without_the_condition():
    """Whichever of these makes it: all give the same program."""
    adam = optax.adam(0.1)
    params = {**PARAMS, 'steps': jnp.array(3)}

    def at_step(n, frozen=()):
        return sg.freeze(adam, [as_filter('last/**') & (n < 2), *frozen])

    made = jax.jit(lambda n: at_step(n).init(params))(0)
    oracle.assert_same(made, sg.freeze(adam, False).init(params))
    made = jax.jit(lambda n: at_step(n, ['body/w']).init(params))(0)
    oracle.assert_same(made, sg.freeze(adam, 'body/w').init(params))


def test_adopting_a_state_for_a_condition():
    """All that a freeze of some of them left out begins anew."""
    sgd, grads = optax.sgd(0.1, 0.9), PARAMS
    tx = sg.freeze(sgd, 'body/**')
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS)

    @jax.jit
    def adopted(n):
        new = sg.freeze(sgd, as_filter('last/**') & (n < 2))
        return sg.adopt(new, PARAMS, state)

    oracle.assert_same(adopted(0), sg.adopt(sgd, PARAMS, state))


def test_without_parameters_and_within_a_chain():
    """Momentum needs no parameters; a freeze may stand inside of a chain."""
    sgd, clip = optax.sgd(0.1, 0.9), optax.clip(0.5)
    state = sgd.init(PARAMS)
    for _ in range(2):
        _, state = sgd.update(PARAMS, state)

    @jax.jit
    def update(n):
        tx = optax.chain(clip, sg.freeze(sgd, as_filter('last/**') & (n < 2)))
        return tx.update(PARAMS, (optax.EmptyState(), state))

    clipped, _ = clip.update(PARAMS, clip.init(PARAMS))
    _, after = sgd.update(clipped, state)
    for n in 0, 2:
        found = update(n)[1][1]
        oracle.assert_same(found, where_last(state, after, jnp.array(n < 2)))


def test_a_condition_in_the_loss_has_to_be_given_to_the_optimizer_too(recwarn):
    """``sg.live`` knows that there is one, and cannot carry it."""
    held = lambda n: sg.where('last/**') & (n < 2)  # noqa: E731

    def loss(params: Any, n: Any) -> Any:
        p = sg.stop_gradient(params, held(n))
        x = jnp.tanh(jax.lax.stop_gradient(X @ p['body']['w']) + p['body']['b'][None])
        return jnp.sum((p['count'] * (x @ p['last']['w']) + p['last']['b'][None]) ** 2)

    live = sg.live(loss, PARAMS, 0)
    assert repr(live & True).count('condition on') == 1
    sgd = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.01, momentum=0.5))
    plain, grad = sg.freeze(sgd, ~live), sg.grad(loss, wrt=live)

    def three(filters: Any) -> Any:
        @jax.jit
        def step(params: Any, state: Any, n: Any) -> Any:
            tx = sg.freeze(sgd, filters(n))
            updates, state = tx.update(grad(params, n), state, params)
            return optax.apply_updates(params, updates), state

        params, state = PARAMS, plain.init(PARAMS)
        for n in range(4):
            params, state = step(params, state, n)
        return params

    found = three(lambda n: [~live, held(n)])
    assert not recwarn.list

    # By hand: the weights of last, and their moments, begin with the third step.
    @jax.jit
    def by_hand(params: Any, state: Any, n: Any) -> Any:
        updates, after = sgd.update(jax.grad(loss)(params, n), state, params)
        new = optax.apply_updates(params, updates)
        new['body']['w'] = params['body']['w']
        return where_last(params, new, n < 2), where_last(state, after, n < 2)

    params, state = PARAMS, sgd.init(PARAMS)
    for n in range(4):
        params, state = by_hand(params, state, n)
    oracle.assert_same(found, params)
    # Without the condition the held weights decay: that is said, once in a line.
    with pytest.warns(UserWarning, match='stops last/b, last/w for a while') as warned:
        three(lambda n: ~live)
    assert len({str(each.message) for each in warned}) == 1
    assert '[~live, where & (step < k)]' in str(warned[0].message)
    # Nothing is said of what is frozen in any case.
    frozen = sg.freeze(sgd, [~live, 'last/**'])
    frozen.update(grad(PARAMS, 0), frozen.init(PARAMS), PARAMS)

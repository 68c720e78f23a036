"""A filter that knows what it names: what is trained, or what is frozen."""

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_sg as sg
from flax_sg import errors, filters
from flax_sg import linen as nn
from tests.helpers import oracle

PARAMS: Any = {'body': {'w': jnp.ones(2)}, 'head': {'w': jnp.array([1.0, 3.0])}}
MODEL = nn.Sequential([nn.Dense(2), nn.Dense(1)])


def loss(params: Any) -> Any:
    return jnp.sum(jax.lax.stop_gradient(params['body']['w']) * params['head']['w'])


live = sg.live(loss, PARAMS)
UPPER = sg.at('w', np.s_[2:])
rows = sg.live(lambda p: jnp.sum(sg.stop_gradient(p, UPPER)['w']), {'w': jnp.ones(4)})


def test_the_side_of_expressions():
    both = sg.live(lambda p: jnp.sum(p['body']['w']), PARAMS)
    for where, side in {
        live: 'trained',
        ~live: 'frozen',
        ~~live: 'trained',
        live | both: 'trained',
        live & both: 'trained',
        ~live & ~both: 'frozen',
        ~(live | both): 'frozen',
        live | ~both: None,
        live & 'head/**': None,
        live | 'body/**': None,
        sg.at(live, 0): None,
        live & True: None,
        ~filters.as_filter('body/**'): None,
        rows: 'trained',
        pickle.loads(pickle.dumps(~live)): 'frozen',
    }.items():
        assert where.side == side
    assert repr(live) == "<live: 'head/w'>"
    assert repr(~(live | both)) == "~(<live: 'head/w'> | <live: 'body/w'>)"


def init(where: Any) -> Any:
    return sg.freeze(optax.sgd(0.1), where).init(PARAMS)


# What names what is frozen, and what names what is trained.
FROZEN = {
    'sg.freeze(tx, ~live)': init,
    'sg.mask(params, frozen=~live)': lambda where: sg.mask(PARAMS, frozen=where),
    'nn.stop_gradient(~live)': nn.stop_gradient,
}
ALSO_FROZEN = {
    'a wrapper': lambda where: nn.Frozen(MODEL, where),
    'a tree': lambda where: sg.stop_gradient(PARAMS, where),
    'a class': lambda where: nn.stop_gradient(nn.Dense, where),
    'one level': lambda where: nn.stop_gradient(where, levels=1),
}
TRAINED = {
    'wrt=live': lambda where: sg.grad(loss, wrt=where, unused='ignore'),
    'nn.train_only(live)': nn.train_only,
    'sg.mask(params, trained=live)': lambda where: sg.mask(PARAMS, trained=where),
}
ALSO_TRAINED = {
    'vjp': lambda where: sg.vjp(loss, PARAMS, wrt=where),
    'value_and_grad': lambda where: sg.value_and_grad(loss, wrt=where),
    'gradient_flow': lambda where: sg.gradient_flow(loss, PARAMS, wrt=where),
    'live': lambda where: sg.live(loss, PARAMS, wrt=where),
}


@pytest.mark.filterwarnings('ignore:sg.live. the function trains none')
@pytest.mark.parametrize('name', [*FROZEN, *ALSO_FROZEN, *TRAINED, *ALSO_TRAINED])
def test_the_other_side_raises(name):
    frozen = {**FROZEN, **ALSO_FROZEN}
    call = {**frozen, **TRAINED, **ALSO_TRAINED}[name]
    right, wrong = (~live, live) if name in frozen else (live, ~live)
    with pytest.raises(errors.FilterTypeError) as caught:
        call(wrong)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and repr(wrong) in lines[0]
    if name in {**FROZEN, **TRAINED}:
        assert lines[1].startswith(f'Write {name}, where live is the filter of')
    # As it is to be written; with a filter that has no side; and if it is meant.
    for where in right, right & True, wrong & True, 'head/**', {'body': True}:
        with_tree = isinstance(where, dict) and {**where, 'head': False}
        call(with_tree or where)


WITHOUT_SIDES = [
    lambda where: sg.labels(PARAMS, {'a': where}),
    lambda where: sg.partition(PARAMS, where),
    lambda where: sg.substitute(PARAMS, PARAMS, where=where),
    lambda where: sg.paths(PARAMS, where=where),
    lambda where: nn.substitute(PARAMS, where=where),
    lambda where: filters.as_filter('a') | where,
]


def test_none_is_no_filter():
    assert repr(sg.DECLARED) == 'DECLARED'
    sides = FROZEN, ALSO_FROZEN, TRAINED, ALSO_TRAINED
    for call in *(call for side in sides for call in side.values()), *WITHOUT_SIDES:
        with pytest.raises(errors.FilterTypeError, match='None is no filter'):
            call(None)


def test_what_is_meant_is_done():
    grads = sg.grad(lambda p: p['head']['w'].sum(), wrt=~live & True, unused='ignore')
    assert grads(PARAMS)['head'] == {'w': sg.ABSENT}
    tx = sg.freeze(optax.sgd(0.1), live & True)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert oracle.is_zero(updates['head']) and not oracle.is_zero(updates['body'])


def test_a_mask_of_optax_has_no_side_and_a_line_of_its_own():
    mask: Any = {'body': False, 'head': True}  # True is trained, as optax has it.
    tx = sg.freeze(optax.sgd(1.0), ~filters.as_filter(mask))
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    by_hand = optax.masked(optax.sgd(1.0), mask)
    expected, _ = by_hand.update(PARAMS, by_hand.init(PARAMS), PARAMS)
    oracle.assert_same(updates['head'], expected['head'])
    assert oracle.is_zero(updates['body'])


def test_rows_print_as_they_are_written():
    part = "<live: 'w'> & Index(np.s_[0:2])"
    assert (repr(rows), repr(~rows)) == (part, f'~({part})')
    assert repr(rows | 'b') == f"({part}) | Glob('b')"

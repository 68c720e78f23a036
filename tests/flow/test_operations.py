"""Programs with operations that few models have: what is said to be zero is zero."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.sparse.linalg import cg

import flax_sg as sg

pytestmark = pytest.mark.every_case

P = {'a': jnp.arange(1.0, 5.0), 'b': jnp.arange(2.0, 6.0)}
KEY, MASK = jax.random.key(0), np.array([1.0, 0.0, 0.0, 1.0], np.float32)
SPD = jnp.eye(4) * 2.0


def masked_in_a_loop(p: Any) -> Any:
    def turn(carry: Any, _: None) -> Any:
        return carry * MASK + p['b'] * 0.0, carry.sum()

    return jax.lax.scan(turn, p['a'], None, length=3)[1].sum()


def many_carries(p: Any) -> Any:
    """Each turn moves what is known by one place."""

    def turn(carry: Any, _: None) -> Any:
        return (carry[-1], *carry[:-1]), None

    first = (p['a'], *[jnp.zeros(4)] * 40)
    return jax.lax.scan(turn, first, None, length=50)[0][0].sum() + p['b'].sum()


OPERATIONS: dict[str, Any] = {
    'a key': lambda p: (p['a'] * jax.random.uniform(KEY, (4,))).sum(),
    'split': lambda p: sum(map(jnp.sum, jnp.split(p['a'] * np.zeros(4, 'f'), 2))),
    'a solver': lambda p: cg(lambda x: SPD @ x, p['a'])[0].sum() + 0.0 * p['b'].sum(),
    'padding': lambda p: jax.lax.pad(p['a'], 0.0, [(-1, 2, 0)]).sum(),
    'padding within': lambda p: jax.lax.pad(p['a'], 0.0, [(0, 1, 1)]).sum(),
    'a mask and not': lambda p: jnp.where(~(p['b'] > 3), p['a'], 0.0).sum(),
    'a constant mask and not': lambda p: jnp.where(~(MASK > 0), p['a'], 0.0).sum(),
    'a masked loop': masked_in_a_loop,
    'a loop of many': many_carries,
    'complex': lambda p: jnp.real(jax.lax.complex(p['a'], p['b']) * 1j).sum(),
}


@pytest.mark.parametrize('name', OPERATIONS)
def test_what_is_said_to_be_zero_is_zero(name):
    fn = OPERATIONS[name]
    flow, grads = sg.gradient_flow(fn, P), jax.grad(fn)(P)
    for parameter, grad in grads.items():
        status = flow.status_of('output', parameter)
        if status in ('stopped', 'unused'):
            assert not grad.any()


def test_a_part_that_is_asked_about():
    live = sg.live(lambda p: (p['a'] * p['b']).sum(), P, wrt=sg.at('a', np.s_[:2]))
    grads = sg.grad(lambda p: (p['a'] * p['b']).sum(), wrt=live, absent='zeros')(P)
    assert grads['a'].tolist() == [2.0, 3.0, 0.0, 0.0]
    assert not grads['b'].any()


def test_code_that_is_run_as_a_text_has_lines():
    names: dict[str, Any] = {'sg': sg, 'jnp': jnp, 'jax': jax, 'P': P}
    text = (
        'def loss(p):\n'
        "    return jnp.sum(jnp.sign(p['a']) * p['b'])\n"
        'flow = sg.gradient_flow(loss, P)\n'
    )
    exec(compile(text, '<string>', 'exec'), names)
    assert names['flow'].status_of('output', 'a') == 'stopped'
    assert '<string>:2' in names['flow'].why('output', 'a').lines[0]

"""A ``jax.jit`` with shardings of which a part does not change, beside the whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flax_sg as sg
from tests.helpers.splits import PARAMS, TRAINED, assert_same, assert_split

X = jax.random.normal(jax.random.key(9), (4, 4))
MESH = jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,))
ROWS = NamedSharding(MESH, PartitionSpec('data'))
WHOLE = NamedSharding(MESH, PartitionSpec())


def layers(params: Any, x: Any) -> Any:
    """A frozen tower and a head."""
    return jnp.sin(jnp.tanh(x @ params['torso']) @ params['torso']) @ params['head']


def loss_of(**options: Any) -> Any:
    """A loss of the layers, jitted."""
    jitted = jax.jit(layers, **options)
    return lambda params, x: jnp.sum(jitted(params, x) ** 2)


@pytest.mark.parametrize('out', (ROWS, None))
def test_shardings_are_constraints(out: Any):
    """The tower leaves the call, and what is kept is sharded as in it."""
    fun = loss_of(in_shardings=(WHOLE, ROWS), out_shardings=out)
    ahead = assert_split(fun, X, once=2)
    [kept] = jax.jit(ahead.early)(PARAMS, X)
    assert kept.sharding.is_equivalent_to(ROWS, 2)
    program = jax.jit(ahead.late).lower(PARAMS, [kept]).compile()
    assert 'sharding' in program.as_text()


@pytest.mark.parametrize('kind', ('donated', 'explicit'))
def test_other_calls(kind: str):
    """What is donated, and shardings that are part of types."""
    mesh = jax.make_mesh((1,), ('data',), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec())
    options: Any = {
        'donated': {'in_shardings': (WHOLE, ROWS), 'donate_argnums': 1},
        'explicit': {'out_shardings': sharding},
    }
    fun = loss_of(**options[kind])
    assert_split(fun, X, once=2)


def test_a_call_without_a_known_part_stays_one():
    """Constraints alone are no reason to take it apart."""

    def fun(params: Any, x: Any) -> Any:
        head = jax.jit(lambda w, x: x @ w, in_shardings=(WHOLE, ROWS))
        y = jnp.tanh(x @ params['torso'])
        return jnp.sum(head(params['head'], y) ** 2)

    ahead = assert_split(fun, X, once=1)
    program = jax.make_jaxpr(ahead.late)(PARAMS, ahead.early(PARAMS, X))
    assert any(eqn.primitive.name in ('jit', 'pjit') for eqn in program.eqns)


def test_examples():
    """A constraint mixes no examples."""
    fun = loss_of(in_shardings=(WHOLE, ROWS))
    ahead = sg.precompute(fun, PARAMS, X, wrt=TRAINED, examples=True)
    kept, order = ahead.early(PARAMS, X), np.array([2, 0, 3, 1])
    how: Any = {'wrt': TRAINED, 'unused': 'ignore'}
    ours = sg.value_and_grad(ahead.late, **how)(PARAMS, [x[order] for x in kept])
    assert_same(ours, sg.value_and_grad(fun, **how)(PARAMS, X[order]))

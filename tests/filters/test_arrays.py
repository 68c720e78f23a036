"""``sg.arrays``: leaves by their shape and dtype, wherever a filter may stand."""

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core.meta import Partitioned

import flax_sg as sg
from flax_sg import linen as nn
from tests.helpers import oracle


class Stack(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        scan = fnn.scan(lambda cell, x, _: (cell(x), None), length=3, **oracle.STACKED)
        x, _ = scan(fnn.Dense(4, name='arr_stack'), x, None)
        return fnn.Dense(1, name='arr_head')(x)


X = jnp.ones((2, 4))
PARAMS = oracle.init(Stack(), jax.random.key(0), X)['params']


MATRICES = sg.arrays(lambda a: a.ndim > 1 and a.shape[-2] == 4)


def loss(params):
    return jnp.sum(Stack().apply({'params': params}, X) ** 2)


def by_hand(params):
    return loss(oracle.stopped(params, lambda path: path.endswith('kernel')))


def in_block(params):
    with nn.stop_gradient(MATRICES):
        return loss(params)


def wrapped(params):
    frozen = nn.Frozen(Stack(), MATRICES)
    return jnp.sum(frozen.apply({'params': params}, X) ** 2)


@pytest.mark.parametrize('fn', [in_block, wrapped, jax.jit(in_block)])
def test_a_filter_like_others(fn):
    # In the body of the scan a kernel has one axis less: the filter is of the tree.
    expected = jax.grad(by_hand)(PARAMS)
    oracle.assert_same(jax.grad(fn)(PARAMS), expected)
    biases = sg.grad(loss, wrt=~MATRICES, absent='zeros')(PARAMS)
    oracle.assert_same(biases, expected)


def test_what_a_leaf_may_be():
    tree = {
        'array': jnp.ones((2, 2)),
        'box': Partitioned(np.ones(3, np.int8), ('a',)),
        'number': 1.0,
        'hidden': sg.NonDifferentiable(jnp.ones((2, 2))),
        'text': 'static',
        'absent': sg.ABSENT,
        'shape': jax.ShapeDtypeStruct((5,), jnp.bfloat16),
    }

    def taken(fn):
        part, _ = sg.partition(tree, sg.arrays(fn))
        return {name for name, leaf in part.items() if jax.tree.leaves(leaf)}

    assert taken(lambda a: a.size >= 3) == {'array', 'box', 'hidden', 'shape'}
    assert taken(lambda a: a.shape == ()) == {'number'}
    assert taken(lambda a: np.bool_(a.dtype == jnp.int8)) == {'box'}


def both(path):
    return path.name == 'kernel' and path.array.shape[-1] == 1


@pytest.mark.parametrize('where', [both, sg.arrays(lambda a: a.shape[-1] == 1)])
def test_a_function_may_ask_the_path_for_the_array(where):
    def in_block(params):
        with nn.stop_gradient(where):
            return loss(params)

    def selects(path):
        return path == 'arr_head/kernel' or (path == 'arr_head/bias' and where != both)

    expected = jax.grad(lambda params: loss(oracle.stopped(params, selects)))(PARAMS)
    for run in (jax.grad, lambda fn: jax.jit(jax.grad(fn))):
        oracle.assert_same(run(in_block)(PARAMS), expected)
    assert sg.mask(PARAMS, trained=where)['arr_head']['kernel']


def test_functions_of_one_code_that_differ_for_another_shape_alone():
    """In one block, and from block to block, around one compiled function."""
    dense = [fnn.Dense(n) for n in (2, 5)]
    params = [d.init(jax.random.key(0), X)['params'] for d in dense]
    losses = [lambda p, d=d: jnp.sum(d.apply({'params': p}, X)) for d in dense]
    steps = [jax.jit(jax.grad(loss)) for loss in losses]
    for most in (30, 12, 30, 12):
        small = sg.arrays(lambda a, most=most: a.ndim > 1 and a.size < most)
        with nn.stop_gradient(small):
            found = [step(p)['kernel'] for step, p in zip(steps, params, strict=True)]
        assert [oracle.is_zero(g) for g in found] == [True, most == 30]


def test_another_attribute_that_is_missing_is_the_error_of_python():
    params = {'dense': {'kernel': jnp.ones((2, 3))}}
    for wrong in (lambda path: path.nmae == 'bias', lambda path: None.ndim > 1):
        with pytest.raises(AttributeError):
            sg.mask(params, trained=wrong)

"""Opening and closing leave Flax, JAX's context and the thread as they were."""

import contextlib
import gc
import weakref
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

import oracle
from flax_sg import filters
from flax_sg import linen as nn
from flax_sg.engine import blocks
from flax_sg.forms.block_decorator import BlockDecorator
from flax_sg.rules import rules
from test_faults import assert_nothing_is_left

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
MODEL = fnn.Dense(3)
PARAMS = MODEL.init(jax.random.key(0), X)['params']


def apply(params: Any) -> Any:
    return MODEL.apply({'params': params}, X)


@pytest.fixture(autouse=True)
def _as_before():
    yield
    assert_nothing_is_left()


def test_a_user_context_of_the_user_is_left_alone():
    mine = jax.make_user_context('none')
    seen: list[Any] = []

    @jax.jit
    def fn(x):
        seen.append(mine.value)
        return x

    with mine('outer'):
        with nn.stop_gradient('kernel', unused='ignore'):
            fn(1.0)
            with mine('inner'):
                fn(1.0)
            fn(1.0)
        fn(1.0)
    fn(1.0)
    assert seen == ['outer', 'inner', 'outer', 'none']


class Fails(rules.StopGradient):
    """A rule that cannot be put into the keys of JAX's caches."""

    def __init__(self, error):
        object.__setattr__(self, 'error', error)

    def key(self):
        raise self.error


@pytest.mark.parametrize(
    ('error', 'inside'), [(ValueError, True), (KeyboardInterrupt, False)]
)
def test_an_error_while_a_block_opens(error, inside):
    raised = error('on purpose')
    block = BlockDecorator(filters.as_filter('bias'), Fails(raised))
    outer = nn.stop_gradient('kernel') if inside else contextlib.nullcontext()
    with outer:
        with pytest.raises(error) as caught, block:
            pytest.fail('the body must not run')
        assert caught.value is raised
        grads = jax.grad(lambda p: jnp.sum(apply(p)))(PARAMS)
        assert oracle.is_zero(grads['kernel']) == inside
        assert not oracle.is_zero(grads['bias'])


def test_a_long_block_frees_the_trees_it_has_seen():
    refs = []
    with nn.stop_gradient('kernel'):
        for i in range(3):
            params = jax.tree.map(lambda p, i=i: p + i, PARAMS)
            refs.append(weakref.ref(params['kernel']))
            jax.grad(lambda p: jnp.sum(apply(p)))(params)
            del params
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3
        assert list(blocks.thread.blocks[0].roots) == []

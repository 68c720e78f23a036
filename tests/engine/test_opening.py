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
from flax_sg import errors, filters
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


def test_modules_that_are_bound_one_after_the_other_in_a_block():
    """Each is gone with its turn, and what nobody reads of it counts as met."""
    refs = []
    with nn.stop_gradient('bias'):
        for i in range(3):
            params = jax.tree.map(lambda p, i=i: p + i, PARAMS)
            refs.append(weakref.ref(params['kernel']))
            bound = MODEL.bind({'params': params})
            assert bound.get_variable('params', 'kernel') is params['kernel']
            del params, bound
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3
        # Or the block would say that it had no effect.
        jax.grad(lambda p: jnp.sum(apply(p)))(PARAMS)


def test_a_module_that_is_older_than_the_block_and_ends_in_it():
    bound = [MODEL.bind({'params': PARAMS})]
    with nn.stop_gradient(lambda path: path == 'bias', unused='ignore'):
        kernel = bound.pop().get_variable('params', 'kernel')
    assert kernel is PARAMS['kernel']
    bound = [MODEL.bind({'params': PARAMS})]
    with (
        pytest.warns(errors.NothingStoppedWarning),  # The bias is there, and unread.
        nn.stop_gradient('bias'),
    ):
        bound.pop().get_variable('params', 'kernel')


@pytest.mark.usefixtures('leaks')
def test_a_module_bound_in_a_compiled_function():
    with nn.stop_gradient('bias'):
        grads = jax.jit(jax.grad(lambda p: jnp.sum(MODEL.bind({'params': p})(X))))(
            PARAMS
        )
    assert oracle.is_zero(grads['bias'])
    assert not oracle.is_zero(grads['kernel'])


def test_a_module_keeps_the_depth_of_the_apply_that_bound_it():
    """What another ``apply`` is given is no variable of the block's tree."""

    class Binds(fnn.Module):
        @fnn.compact
        def __call__(self, bound):
            if bound is None:
                w = self.param('w', fnn.initializers.ones, (3,))
                return MODEL.bind({'params': {**PARAMS, 'bias': w}})
            return bound(X)

    def loss(w, where):
        variables = {'params': {'w': w}}
        bound = Binds().apply(variables, None)
        with nn.stop_gradient(where, unused='ignore'):
            return jnp.sum(Binds().apply(variables, bound))

    w = jnp.ones(3)
    assert not oracle.is_zero(jax.grad(loss)(w, True))

"""Transforms of Flax in a block, and blocks in the bodies of some.

Those that random models have, too, come once for sure in one of these. Others are used
in programs. A block in a body is compared with a body that stops the weights by hand at
that place.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers.described.compared import check as check_model
from tests.helpers.described.language import (
    EVERYTHING,
    Block,
    Leave,
    Residual,
    Use,
    Where,
)
from tests.helpers.described.models import LIFTS, Composite, Kid, Leaf
from tests.helpers.described.uses import (
    USE,
    Route,
    X,
    both,
    check,
    fn_of,
    initialization_is_that_without_blocks,
    staged,
)
from tests.helpers.oracle import assert_same, is_zero, stopped


class Once(nn.Module):
    """A body without blocks."""

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(3, name='layer')(x))


def renamed(old: str, new: str) -> Callable[[Any], Any]:
    def walk(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        return {new if k == old else k: walk(v) for k, v in tree.items()}

    return walk


def swapped(tree: Any) -> Any:
    return {'params': tree.get('ema', {}), 'ema': tree.get('params', {})}


def renames(cls: Any) -> Any:
    return nn.map_variables(
        cls,
        mapped_collections='params',
        trans_in_fn=renamed('core', 'kernel'),
        trans_out_fn=renamed('kernel', 'core'),
        mutable=True,
    )


def swaps_collections(cls: Any) -> Any:
    return nn.map_variables(
        cls,
        mapped_collections=('params', 'ema'),
        trans_in_fn=swapped,
        trans_out_fn=swapped,
        mutable=True,
    )


def remat_scan(cls: Any) -> Any:
    return nn.remat_scan(cls, lengths=(2, 2))


PART = {
    'part': {
        'layer': {
            'kernel': 0.1 * jnp.arange(9.0).reshape(3, 3),
            'bias': jnp.arange(3.0),
        }
    }
}
# It cannot make its own.
OF_BOTH = {'params': PART, 'ema': jax.tree.map(jnp.cos, PART)}


class Around(Route):
    """A lifted class in a program; ``late``: it is made at its first use."""

    lift: Callable[[Any], Any] = renames
    late: bool = False

    def parts(self):
        make = functools.cache(lambda: self.lift(Once)(name='part'))
        if not self.late:
            make()
        return lambda x: make()(x)


@pytest.mark.parametrize(
    ('lift', 'kernel', 'variables'),
    [
        (remat_scan, 'kernel', None),
        (renames, 'core', None),
        (swaps_collections, 'kernel', OF_BOTH),
    ],
)
def test_in_a_block(lift, kernel, variables):
    kernels = Block(Where('name', (kernel,), 'glob'), (USE,), judged=True)

    def make(program):
        return Around(program, lift)

    check(make, (USE, kernels, USE), True, variables=variables)


def test_made_in_a_block():
    def make(program):
        return Around(program, late=True)

    check(make, (Block(EVERYTHING, (USE,)), USE), True)
    initialization_is_that_without_blocks(make)


# Those that random models have.


KERNELS = Where('name', ('w', 'kernel'))


@pytest.mark.parametrize('lift', LIFTS)
def test_a_lifted_function_around_blocks_and_in_them(lift):
    # What follows is saturated, and without residuals would leave no gradient.
    use, other = Residual((Use(0, lift),)), Residual((Use(1, lift, EVERYTHING),))
    body = (
        Block(KERNELS, (use, other, Leave()), 'scale'),
        Residual((USE,)),
        Residual((Block(EVERYTHING, (Block(KERNELS, (use,), 'collection'),)),)),
    )
    inner = Composite('setup', (Kid(Leaf('kept')),), (Block(KERNELS, (USE, USE)), USE))
    check_model(Composite('compact', (Kid(inner), Kid(Leaf('lora'))), body))


@pytest.mark.parametrize(
    'wraps',
    [
        *(('scan', 'vmap'), ('scan', 'scan')),
        *(('remat', 'scan'), ('stop', 'scan'), ('jit', 'stop')),
    ],
    ids=' of '.join,
)
def test_a_lifted_class_around_blocks_and_in_them(wraps):
    inside = USE, Block(KERNELS, (USE,)), USE
    inner = Composite('compact', (Kid(Leaf('dense')),), inside)
    body = USE, Block(EVERYTHING, (USE,)), USE
    check_model(Composite('compact', (Kid(inner, wraps, KERNELS),), body))


# A block in a lifted function. The owner is the module that the function gets.


def in_switch(use, part, x):
    branches = [lambda m, x: m(x), use, lambda m, x: x]
    return nn.switch(jnp.int32(jnp.sum(x) > 0), branches, part, x)


def in_jvp(use, part, x):
    tangents = jax.tree.map(jnp.cos, jax.lax.stop_gradient(part.variables['params']))
    return nn.jvp(use, part, (x,), (jnp.sin(x),), {'params': tangents})


def in_value_and_grad(use, part, x):
    return nn.value_and_grad(lambda m, x: jnp.sum(use(m, x)), part, x)


class Uses(nn.Module):
    lifted: Any
    use: Any

    @nn.compact
    def __call__(self, x):
        part = Once(name='part')
        y = part(x)
        return y, self.lifted(self.use, part, y), part(y)


def in_a_block(module, x):
    with nn.stop_gradient('**'):
        return module(x)


def by_hand(module, x):
    params = stopped(module.variables['params'])
    return module.clone(parent=None, name=None).apply({'params': params}, x)


@pytest.mark.parametrize(
    'lifted', [in_switch, in_jvp, in_value_and_grad], ids=lambda fn: fn.__name__
)
def test_in_a_lifted_function(lifted):
    actual, expected = (
        staged(both(fn_of(Uses(lifted, use), True)))(PART, X)
        for use in (in_a_block, by_hand)
    )
    assert_same(actual, expected)


# A filter sees the names outside of nn.map_variables.


def renamed_kernel_is_stopped(where: Any) -> bool:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            part = renames(Once)(name='part')
            with nn.stop_gradient(where):
                return jnp.sum(part(x))

    variables = {'params': renamed('kernel', 'core')(PART)}
    grad = jax.grad(Model().apply)(variables, X)['params']['part']['layer']
    assert not is_zero(grad['bias'])
    return is_zero(grad['core'])


def test_a_filter_takes_names_outside_of_map_variables():
    assert renamed_kernel_is_stopped('part/*/core')
    with pytest.raises(errors.UnusedFilterError):
        renamed_kernel_is_stopped('part/*/kernel')

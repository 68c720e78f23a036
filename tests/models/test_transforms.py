"""Transforms of Flax in a block, and blocks in the bodies of some.

A block in a body is compared with a body that stops the weights by hand at that place.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.described.language import EVERYTHING, Block, Where
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
from tests.helpers.lifts import DERIVATIVES, LIFTS
from tests.helpers.oracle import assert_same, stopped


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


# A block in a lifted function, and around it. The owner of one in it is the module that
# the function gets.


class Uses(nn.Module):
    lifted: Any
    use: Any
    around: Any = contextlib.nullcontext

    @nn.compact
    def __call__(self, x):
        part = Once(name='part')
        y = part(x)
        with self.around():
            z = self.lifted(self.use, part, y)
        return y, z, part(y)


def called(module, x):
    return module(x)


def in_a_block(module, x):
    with nn.stop_gradient('**'):
        return module(x)


def by_hand(module, x):
    params = stopped(module.variables['params'])
    return module.clone(parent=None, name=None).apply({'params': params}, x)


def forward(fn):
    """What a loop has, of which there is no reverse mode."""
    return lambda params, x: jax.jvp(
        fn, (params, x), (jax.tree.map(jnp.cos, params), x)
    )


@pytest.mark.parametrize(
    'lifted',
    ['switch', 'while_loop', *DERIVATIVES],
)
def test_in_a_lifted_function(lifted):
    derivatives = forward if lifted == 'while_loop' else both

    def run(*how):
        return staged(derivatives(fn_of(Uses((LIFTS | DERIVATIVES)[lifted], *how))))(
            PART, X
        )

    expected = run(by_hand)
    assert_same(run(in_a_block), expected)
    if lifted != 'jvp':  # The tangents that it is given begin in the block.
        assert_same(run(called, lambda: nn.stop_gradient('part/**')), expected)


class Layer(nn.Module):
    """A body of a lifted class, in which a module is used before, in and after."""

    use: Any

    @nn.compact
    def __call__(self, x, _):
        part = Once(name='part')
        return part(self.use(part, part(x))), None


MAPPED: Any = {'in_axes': (0, None), 'axis_size': 2, **oracle.STACKED}


@pytest.mark.parametrize(
    'lift',
    [
        lambda cls: nn.vmap(nn.scan(cls, length=2, **oracle.STACKED), **MAPPED),
        lambda cls: nn.scan(nn.vmap(cls, **MAPPED), length=2, **oracle.STACKED),
        lambda cls: nn.scan(nn.remat(cls), length=2, **oracle.STACKED),
        lambda cls: nn.remat(nn.scan(cls, length=2, **oracle.STACKED)),
    ],
    ids=['vmap of scan', 'scan of vmap', 'scan of remat', 'remat of scan'],
)
def test_in_a_lifted_class(lift):
    xs = jnp.stack([X, -X])
    variables = oracle.init(lift(Layer)(called), jax.random.key(0), xs, None)

    def run(use, around=contextlib.nullcontext, selects=lambda path: False):
        def fn(params, x):
            params = stopped(params, selects)
            with around():
                return lift(Layer)(use).apply({'params': params}, x, None)[0], {}

        return staged(both(fn))(variables['params'], xs)

    assert_same(run(in_a_block), run(by_hand))
    kernels = run(called, lambda: nn.stop_gradient('**/kernel'))
    is_kernel = lambda path: path.endswith('kernel')  # noqa: E731
    assert_same(kernels, run(called, selects=is_kernel))

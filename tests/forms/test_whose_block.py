"""Whose names a block means: those of the module whose method opens it.

Flax's stack of modules lacks methods that Flax does not wrap. Parent and child have the
same names here, and the parent calls the child's methods.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from flax_sg import linen as nn
from tests.helpers import oracle

KEY = jax.random.key(7)
X = jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)


def in_a_function(use: Any) -> Any:
    """A function of a helper file: the method that has called it is meant."""
    with nn.stop_gradient('enc/**'):
        return use()


class NoModule:
    """An object that is no module, and has a ``self`` of its own."""

    def use(self, use: Any) -> Any:
        with nn.stop_gradient('enc/**'):
            return use()


class Child(linen.Module):
    def setup(self):
        self.enc = linen.Dense(2)

    def __call__(self, x):
        return self.enc(x)

    @linen.nowrap
    def helper(self, use):
        with nn.stop_gradient('enc/**'):
            return use(self)

    @contextlib.contextmanager
    def frozen(self):
        with nn.stop_gradient('enc/**'):
            yield

    def steps(self, use):
        with nn.stop_gradient('enc/**'):
            yield use(self)

    @property
    @linen.nowrap
    def view(self):
        return functools.partial(Child.helper, self)

    @property
    def kernel(self):
        with nn.stop_gradient('enc/**'):
            return self.enc.variables['params']['kernel'] * 1.0

    @functools.cached_property
    def kept(self):
        with nn.stop_gradient('enc/**'):
            return self.enc.variables['params']['kernel'] * 1.0

    def method(self, use):
        with nn.stop_gradient('enc/**'):
            return use(self)


class Deeper(Child):
    """It has the helpers of its base class."""


def with_frozen(child: Any, use: Any) -> Any:
    with child.frozen():
        return use(child)


# Each stops the child's `enc`, and `use` reads that of the parent, too.
OF_CHILD = {
    'nowrap': lambda child, use: child.helper(use),
    'contextmanager': with_frozen,
    'generator': lambda child, use: next(child.steps(use)),
    'property': lambda child, use: child.view(use),
    'method': lambda child, use: child.method(use),
}
# Each stops the parent's.
OF_PARENT = {
    'a function': lambda child, use: in_a_function(lambda: use(child)),
    'no module': lambda child, use: NoModule().use(lambda: use(child)),
}


def gradients(way: Any, cls: Any, lift: Any = lambda fn: fn) -> Any:
    class Parent(linen.Module):
        def setup(self):
            self.child, self.enc = cls(), linen.Dense(2)

        def __call__(self, x):
            return lift(lambda self, x: way(self.child, self._both(x)))(self, x)

        def _both(self, x):
            return lambda child: jnp.sum(jnp.sin(child.enc(self.enc(x))))

    model = Parent()
    plain = {'child': linen.Dense(2), 'enc': linen.Dense(2)}
    params = {name: dense.init(KEY, X)['params'] for name, dense in plain.items()}
    params['child'] = {'enc': params['child']}

    def by_hand(params: Any, stopped: str) -> Any:
        layers = {'child': params['child']['enc'], 'parent': params['enc']}
        layers[stopped] = jax.lax.stop_gradient(layers[stopped])
        x = plain['enc'].apply({'params': layers['parent']}, X)
        return jnp.sum(jnp.sin(plain['child'].apply({'params': layers['child']}, x)))

    found = jax.grad(lambda p: model.apply({'params': p}, X))(params)
    hand = {which: jax.grad(by_hand)(params, which) for which in ('child', 'parent')}
    return found, hand


@pytest.mark.parametrize('cls', [Child, Deeper])
@pytest.mark.parametrize('way', OF_CHILD)
def test_a_method_of_the_child_means_the_child(way: str, cls: Any) -> None:
    found, by_hand = gradients(OF_CHILD[way], cls)
    oracle.assert_same(found, by_hand['child'])


@pytest.mark.parametrize('name', ['kernel', 'kept'])
def test_a_property_of_the_child_means_the_child(name: str) -> None:
    """The parent has other parameters of the same name."""

    def way(child: Any, use: Any) -> Any:
        return use(child) + jnp.sum(jnp.cos(getattr(child, name)))

    found, _ = gradients(way, Child)
    expected, _ = gradients(lambda child, use: use(child), Child)
    oracle.assert_same(found, expected)


@pytest.mark.parametrize('lift', [nn.remat, nn.jit], ids=['remat', 'jit'])
def test_in_the_body_of_a_lifted_function(lift: Any) -> None:
    found, _ = gradients(OF_CHILD['nowrap'], Child, lift)
    assert oracle.is_zero(found['child']) and not oracle.is_zero(found['enc'])


@pytest.mark.filterwarnings('ignore::flax_sg.errors.NothingStoppedWarning')
@pytest.mark.parametrize('way', OF_PARENT)
def test_what_is_no_method_means_the_one_that_runs(way: str) -> None:
    found, by_hand = gradients(OF_PARENT[way], Child)
    oracle.assert_same(found, by_hand['parent'])


def test_a_helper_of_a_bound_module_at_top_level() -> None:
    child = Child()
    variables = oracle.init(child, KEY, X)

    def loss(variables: Any) -> Any:
        return child.bind(variables).helper(lambda child: jnp.sum(child.enc(X)))

    assert oracle.is_zero(jax.grad(loss)(variables))

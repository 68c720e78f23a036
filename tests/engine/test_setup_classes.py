"""The engine watches every class with a ``setup``, for the values that it keeps.

Attribute hooks are on classes with a ``setup`` alone. A class may be defined after the
others were found, have attribute hooks of its own, or inherit them.
"""

import gc
import weakref
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

import oracle
from flax_sg import linen as nn

W = jnp.array([1.0, -2.0])
VARIABLES = {'params': {'w': W}}


def ones(key: Any) -> Any:
    return jnp.ones(2)


def class_that_keeps(*bases: type, **members: Any) -> Any:
    """A new class, of which there is no instance."""

    def setup(self: Any) -> None:
        self.w = self.param('w', ones)
        self.square = self.w**2

    members = {'setup': setup, '__module__': __name__, **members}
    return type('Keeps', (*bases, fnn.Module), members)


def read_kept(model: Any) -> Any:
    return model.w + model.square


def grads(use: Any) -> Any:
    """The gradient by ``w`` of what is read of it, outside and then in a block."""
    return jax.grad(lambda v: jnp.sum(use(v)))(VARIABLES)['params']['w']


def in_a_block(make: Any, read: Any = read_kept) -> Any:
    """The gradient where a model is made, bound and read in a block, and after it."""

    def use(variables: Any) -> Any:
        with nn.stop_gradient('w'):
            model = make()().bind(variables)
            stopped = read(model)
        return stopped + 3 * read(model)

    return grads(use)


def around_a_block(make: Any, read: Any = read_kept) -> Any:
    """The same for one that was set up before."""

    def use(variables: Any) -> Any:
        model = make()().bind(variables)
        before = read(model)
        with nn.stop_gradient('w'):
            stopped = read(model)
        return before + stopped + 2 * read(model)

    return grads(use)


BY_HAND = 3 * (1 + 2 * W)


class Plain:
    """No module: attributes of a module that inherits it are found by this class."""

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class Known(class_that_keeps()):
    """A base class that is found before any other one is made."""


CLASSES = {
    'a class that inherits': lambda: class_that_keeps(Known),
    'a setup that is inherited': lambda: type('Inherits', (Known,), {}),
    'a setup of no module': lambda: type(
        'Mixed', (type('Mixin', (), {'setup': Known.setup}), fnn.Module), {}
    ),
    'attributes by a method of another base': lambda: class_that_keeps(Known, Plain),
}


@pytest.mark.parametrize('use', [in_a_block, around_a_block])
@pytest.mark.parametrize('name', CLASSES)
def test_what_a_new_class_keeps_is_seen_in_a_block(name, use):
    oracle.assert_same(use(CLASSES[name]), BY_HAND)


def test_a_base_behind_a_class_that_keeps_finds_attributes():
    def find(self: Any, name: str) -> Any:
        return 2.0 if name == 'constant' else object.__getattribute__(self, name)

    behind = type('Behind', (), {'__getattribute__': find})
    cls: Any = type('Mixed', (Known, behind), {'constant': 1.0})
    with nn.stop_gradient('w', unused='ignore'):
        assert cls().bind(VARIABLES).constant == 2.0


def test_a_class_that_nobody_has_any_more_is_not_held():
    cls = class_that_keeps()
    with nn.stop_gradient('w', unused='ignore'):
        read_kept(cls().bind(VARIABLES))
    with nn.stop_gradient('w', unused='ignore'):
        pass
    ref = weakref.ref(cls)
    del cls
    jax.clear_caches()
    gc.collect()
    assert ref() is None

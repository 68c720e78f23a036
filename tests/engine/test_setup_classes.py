"""Values that ``setup`` keeps, and the classes of the modules that keep them.

A class gets a descriptor for each attribute in which its modules keep something. It may
be a new class, have a ``__getattribute__`` of its own, or inherit one.
"""

import copy
import dataclasses
import pickle
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.described.modules import Do

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


# A class whose modules keep values has descriptors in the places of these. Nobody who
# opens no block shall know.


class Shown(fnn.Module):
    """Keeps arrays in attributes that the class has, and has not."""

    square: Any = dataclasses.field(default=None, init=False)
    scale = 3.0

    def setup(self):
        self.w = self.param('w', ones)
        self.square = self.w**2
        self.scale = self.w * 2.0

    def __call__(self, x):
        return x * self.square


def set_up(variables: Any) -> Any:
    """A module whose ``setup`` has run: other attributes hide those of the class."""
    bound = Shown().bind(variables)
    assert bound.scale == 3.0
    assert bound.w is variables['params']['w']
    return bound


def test_attributes_are_where_they_would_be():
    bound = set_up(VARIABLES)
    oracle.assert_same(bound.square + bound.scale, W**2 + 2.0 * W)
    kept = {name: vars(bound)[name] for name in ('w', 'square', 'scale')}
    for copied in (copy.copy(bound), copy.deepcopy(bound)):
        oracle.assert_same({name: vars(copied)[name] for name in kept}, kept)
        oracle.assert_same(copied.square + copied.w, W**2 + W)
    assert bound.clone() == Shown() == pickle.loads(pickle.dumps(Shown()))
    table = fnn.tabulate(Shown(), jax.random.key(0))(jnp.ones(2))
    assert 'Total Parameters: 2' in table


def test_a_deep_copy_of_a_bound_module_is_another_tree():
    """A block of a method of the one covers nothing of the other."""

    def beside(self, other):
        with nn.stop_gradient('w'):
            return self.param('w', ones) * other.get_variable('params', 'w')

    def loss(variables):
        bound = Do(beside).bind(variables)
        return jnp.sum(bound(copy.deepcopy(bound)))

    oracle.assert_same(jax.grad(loss)(VARIABLES)['params']['w'], W)


def test_a_class_has_what_it_had():
    bound = set_up(VARIABLES)
    assert Shown.scale == Shown().scale == 3.0
    assert Shown().square is None
    assert not hasattr(Shown, 'w')
    with pytest.raises(AttributeError, match='no attribute'):
        Shown().bind(VARIABLES).other  # noqa: B018
    inherits: Any = type('Inherits', (Shown,), {'__annotations__': {'w': int}, 'w': 5})
    assert inherits.w == inherits().w == 5
    object.__delattr__(bound, 'scale')
    assert bound.scale == 3.0
    # Whoever sends a class of a notebook to another process sends descriptors with it.
    sent = pickle.loads(pickle.dumps(vars(Shown)['w']))
    with pytest.raises(AttributeError, match="no attribute 'w'"):
        sent.__get__(None, Shown)


def test_an_attribute_of_a_class_that_setup_hides():
    def loss(variables):
        bound = set_up(variables)
        with nn.stop_gradient('w'):
            stopped = bound.scale * bound.square
        return jnp.sum(stopped + bound.scale)

    oracle.assert_same(jax.grad(loss)(VARIABLES)['params']['w'], jnp.full(2, 2.0))


def test_an_argument_that_a_base_class_keeps():
    class Base(nn.Module):
        def setup(self):
            self.scale = self.param('scale', nn.initializers.ones, (2,))

        def __call__(self, x):
            return self.scale * x

    class Given(Base):
        scale: Any

        def setup(self):
            self.bias = self.param('bias', nn.initializers.zeros, (2,))

        def __call__(self, x):
            with nn.stop_gradient('bias'):
                return self.scale * x + self.bias

    def loss(bias):
        return jnp.sum(Given(scale=W).apply({'params': {'bias': bias}}, W))

    Base().init(jax.random.key(0), W)  # From now on ``Base`` keeps ``scale``.
    assert loss(W) == jnp.sum(W * W + W)
    assert oracle.is_zero(jax.grad(loss)(W))


def test_what_is_not_set_cannot_be_deleted():
    class Forgets(nn.Module):
        def setup(self):
            with pytest.raises(AttributeError, match='w'):
                del self.w
            self.w = self.param('w', nn.initializers.ones, (2,))

        def __call__(self):
            return self.w

    for _ in range(2):  # The class has a descriptor the second time.
        assert Forgets().apply(VARIABLES).tolist() == W.tolist()


# A metaclass of the user may do something else where a class gets an attribute.


class Complete(type(fnn.Module)):
    refuses: bool

    def __init__(cls, *args: Any) -> None:
        super().__init__(*args)
        type.__setattr__(cls, 'is_complete', True)

    def __setattr__(cls, name: str, value: Any) -> None:
        if not vars(cls).get('is_complete'):  # Flax gives it some.
            super().__setattr__(name, value)
        elif cls.refuses:
            raise TypeError(f'{cls.__name__} is complete')


@pytest.mark.parametrize('use', [in_a_block, around_a_block])
@pytest.mark.parametrize('refuses', [True, False])
def test_a_class_that_takes_no_attributes(refuses, use):
    def make() -> Any:
        members = {'setup': Known.setup, 'refuses': refuses}
        return Complete('Keeps', (fnn.Module,), members)

    plain = grads(lambda v: jnp.sum(read_kept(make()().bind(v))))
    oracle.assert_same(plain, 1 + 2 * W)
    oracle.assert_same(use(make), BY_HAND)


class ReadsInPostInit(fnn.Module):
    """Flax runs ``setup`` at once, in the constructor of a module that is bound."""

    given: Any = None

    def setup(self):
        self.w = self.param('w', ones)
        self.square = self.w**2
        self.layers = [
            fnn.Dense(n, name=name) for name, n in (self.given or {}).items()
        ]

    def __post_init__(self):
        super().__post_init__()
        if self.scope is not None:
            self.square  # noqa: B018

    def __call__(self):
        return self.w + self.square


class Holds(fnn.Module):
    """Makes such a module in ``setup``, or in its method."""

    in_setup: bool

    def setup(self):
        if self.in_setup:
            self.inner = ReadsInPostInit()

    @fnn.compact
    def __call__(self):
        return self.inner() if self.in_setup else ReadsInPostInit(name='inner')()


def own_block(self):
    inner = ReadsInPostInit(name='inner')
    with nn.stop_gradient('inner/w'):
        return inner()


def deeper(model: Any) -> Any:
    """Applies a model to the variables of one that stands in another."""
    return lambda v: model.apply({'params': {'inner': v['params']}})


def in_a_scan(variables: Any) -> Any:
    lifted = nn.stop_gradient(ReadsInPostInit, 'w')

    class Body(fnn.Module):
        @fnn.compact
        def __call__(self, carry, _):
            return carry + jnp.sum(lifted(name='inner')()), None

    scanned = fnn.scan(Body, variable_broadcast='params', split_rngs={}, length=3)
    return scanned().apply({'params': {'inner': variables['params']}}, 0.0, None)[0]


POST_INIT: dict[str, Any] = {
    'apply': ReadsInPostInit().apply,
    'bound': lambda v: ReadsInPostInit().bind(v)(),
    'of setup': deeper(Holds(True)),
    'of a method': deeper(Holds(False)),
}


@pytest.mark.parametrize('way', POST_INIT)
@pytest.mark.parametrize('around', [lambda f: f, jax.jit])
def test_a_constructor_that_reads_what_setup_makes(way, around):
    run = POST_INIT[way]
    plain = jax.grad(lambda v: jnp.sum(run(v)))(VARIABLES)

    def loss(rule: Any) -> Any:
        def of(variables: Any) -> Any:
            with rule:
                return jnp.sum(run(variables))

        return around(jax.grad(of))(VARIABLES)

    assert oracle.is_zero(loss(nn.stop_gradient('**/w')))
    halved = loss(nn.scale_gradient('**/w', 0.5))
    oracle.assert_same(halved, jax.tree.map(lambda g: g * 0.5, plain))
    other = loss(nn.substitute(lambda path, w: 2 * w))
    oracle.assert_same(other, {'params': {'w': 2 * (1 + 2 * 2 * W)}})
    oracle.assert_same(loss(nn.read_only('**/w')), plain)


def test_a_constructor_that_reads_before_a_block_and_in_wrappers():
    assert oracle.is_zero(grads(deeper(Do(own_block))))
    assert oracle.is_zero(grads(nn.Frozen(ReadsInPostInit()).apply))
    assert oracle.is_zero(grads(in_a_scan))

    def bound_before(variables: Any) -> Any:
        model = ReadsInPostInit().bind(variables)
        with nn.stop_gradient('w'):
            stopped = model()
        return stopped + 3 * model()

    oracle.assert_same(grads(bound_before), 3 * (1 + 2 * W))


def test_a_constructor_that_reads_and_a_field_with_an_order():
    """A copy of the module has the names of a dict in another order."""
    sorted_, mixed = {'a': 2, 'b': 2}, {'b': 2, 'a': 2}
    with nn.stop_gradient('w'):
        assert ReadsInPostInit(given=sorted_).apply(VARIABLES).shape == (2,)
    with pytest.raises(errors.BlockError, match='given'), nn.stop_gradient('w'):
        ReadsInPostInit(given=mixed).apply(VARIABLES)

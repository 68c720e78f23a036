"""Which leaves are trained, as the classes in a tree declare it."""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_sg as sg
from flax_sg.trees import trainable
from flax_sg.trees.leaves import leaves_of
from tests.helpers import oracle


@sg.trainable('kernel', 'bias')
class Whitened(flax.struct.PyTreeNode):
    """A layer with statistics that are moved to a device and not trained."""

    kernel: Any
    bias: Any
    mean: Any
    name: str = flax.struct.field(pytree_node=False, default='layer')


class Inherits(Whitened):
    """Declares nothing of its own."""


@sg.trainable('mean')
class Overrides(Whitened):
    """Trains something else."""


@sg.trainable()
class Fixed(NamedTuple):
    table: Any


@sg.trainable('inner')
@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Outer:
    inner: Any
    rest: Any


def layer(cls: Any = Whitened) -> Any:
    return cls(jnp.ones((2, 2)), jnp.ones((1, 2)), 0.5 * jnp.ones((1, 2)))


def loss(model: Any) -> Any:
    leaves = [jnp.asarray(leaf, jnp.float32) for leaf in jax.tree.leaves(model)]
    return sum(jnp.sum(leaf**2) for leaf in leaves)


MODELS: dict[str, tuple[Any, list[str]]] = {
    'a layer': (layer(), ['kernel', 'bias']),
    'in a dict': ({'a': layer(), 'w': 1.0}, ['a/kernel', 'a/bias', 'w']),
    'a subclass': ([layer(Inherits)], ['0/kernel', '0/bias']),
    'a subclass of its own mind': ([layer(Overrides)], ['0/mean']),
    'nothing': ({'t': Fixed(jnp.ones(2)), 'w': 1.0}, ['w']),
    'nested': (
        Outer({'a': layer()}, [layer(), 2.0]),
        ['inner/a/kernel', 'inner/a/bias'],
    ),
    'nested in what is not trained': (Fixed([layer()]), []),
    'not declared at all': ({'w': 1.0, 'n': 3, 'e': None}, ['w']),
    'none in it': (Outer(inner=None, rest=1.0), []),
}


@pytest.mark.parametrize('name', MODELS)
def test_everything_follows_the_declaration(name):
    model, trained = MODELS[name]
    names = leaves_of(model).paths
    expected = [path in trained for path in names]
    assert trainable.declared(model) == [p in trained or p == 'n' for p in names]
    assert jax.tree.leaves(sg.mask(model, trained=sg.DECLARED)) == expected
    frozen = jax.tree.leaves(sg.mask(model, frozen=sg.DECLARED))
    assert [not leaf for leaf in frozen] == expected
    grads = sg.grad(loss, absent='drop')(model)
    assert [g is not sg.ABSENT for g in leaves_of(grads).values] == expected
    tx = sg.freeze(optax.sgd(0.1, momentum=0.9))
    assert len(jax.tree.leaves(tx.init(model))) == len(trained)
    updates, _ = tx.update(sg.grad(loss)(model), tx.init(model), model)
    new = optax.apply_updates(model, updates)
    pairs = zip(leaves_of(new).values, leaves_of(model).values, strict=True)
    moved = [not np.array_equal(after, before) for after, before in pairs]
    assert moved == expected


def test_a_filter_at_the_call_overrides_it():
    model = {'a': layer(), 'w': 2.0}
    only = sg.grad(loss, wrt='a/mean')(model)
    oracle.assert_same(only['a'].mean, jnp.ones((1, 2)))
    assert only['a'].kernel is sg.ABSENT
    everything = sg.grad(loss, wrt=True)(model)
    oracle.assert_same(everything, jax.grad(loss)(model))
    assert jax.tree.leaves(sg.mask(model, trained=True)) == [True] * 4
    tx = sg.freeze(optax.sgd(0.1, momentum=0.9), 'w')
    assert len(jax.tree.leaves(tx.init(model))) == 3


def test_a_declaration_survives_a_decorator_that_makes_the_class_anew():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(slots=True)
    @sg.trainable('w')
    class Anew:
        w: Any
        mean: Any

    assert sg.mask(Anew(1.0, 2.0), trained=sg.DECLARED) == Anew(True, False)

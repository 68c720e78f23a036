"""Variables chosen by the class of the module that they lie in."""

import contextlib
import pickle
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import optax
import pytest

import flax_sg as sg
import oracle
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.filters import OfType, of_type
from flax_sg.filters.paths import Path

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
KEY = jax.random.key(0)


class Block(fnn.Module):
    norm: Any = fnn.LayerNorm

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        return self.norm(name='norm')(fnn.Dense(3, name='dense')(x))


class InScan(fnn.Module):
    @fnn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return Block(name='block')(x), None


class Adapter(fnn.Module):
    """Has the scope of its base, and a parameter of its own."""

    base: Any

    def setup(self) -> None:
        fnn.share_scope(self, self.base)

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        return self.base(x) * self.param('scale', fnn.initializers.ones, (1, 3))


class Boxes(fnn.Module):
    @fnn.compact
    def __call__(self, x: Any) -> Any:
        values = {'a': jnp.full((1, 3), 2.0), 'b': jnp.ones((1, 3))}
        tree = self.param('tree', lambda _: values)
        box = fnn.with_partitioning(fnn.initializers.ones, (None, 'x'))
        return x * tree['a'] * tree['b'] * self.param('box', box, (1, 3))


def scan_of_remat(name: str) -> Any:
    layers = fnn.scan(fnn.remat(InScan), length=2, **oracle.STACKED)(name=name)
    return lambda x: layers(x, None)[0]


CHILDREN: dict[str, Any] = {
    'compact': lambda name: Block(name=name),
    'scan of remat': scan_of_remat,
    'share_scope': lambda name: Adapter(Block(name=name)),
    'pytrees': lambda name: Boxes(name=name),
}


class Model(fnn.Module):
    """Two children and a norm of its own, in a block of its own or in none."""

    kind: str
    where: Any = None

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        block: Any = contextlib.nullcontext()
        if self.where is not None:
            block = nn.stop_gradient(self.where, unused='ignore')
        with block:
            for name in 'ab':
                x = CHILDREN[self.kind](name)(x)
            scale = self.param('scale', fnn.initializers.ones, (1, 3))
            return fnn.LayerNorm(name='top')(x) * scale


def is_in_norm(path: str) -> bool:
    return '/norm/' in f'/{path}' or path.startswith('top/')


def loss_of(model: Any) -> Any:
    return lambda params: jnp.sum(jnp.sin(model.apply({'params': params}, X)))


def by_path(params: Any) -> dict[str, Any]:
    return oracle.by_path(params, is_leaf=lambda x: isinstance(x, nn.Partitioned))


def trained(model: Any, params: Any) -> dict[str, bool]:
    """Which parameters get a gradient."""
    grads = jax.jit(jax.grad(loss_of(model)))(params)
    return {name: not oracle.is_zero(leaf) for name, leaf in by_path(grads).items()}


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize('kind', [kind for kind in CHILDREN if kind != 'compact'])
def test_in_every_extent(kind):
    params = jax.tree.map(lambda leaf: leaf + 0.3, Model(kind).init(KEY, X)['params'])
    names = list(by_path(params))
    # Norms and biases are trained: in a block in the model, in one around it, and by a
    # wrapper.
    rest = ~(of_type(fnn.LayerNorm) | '**/bias')
    expected = {name: is_in_norm(name) or name.endswith('/bias') for name in names}
    assert trained(Model(kind, rest), params) == expected
    with nn.stop_gradient(rest, unused='ignore'):
        assert trained(Model(kind), params) == expected
    assert trained(nn.Frozen(Model(kind), rest, unused='ignore'), params) == expected
    # Norms of one child are stopped.
    with nn.stop_gradient(of_type(fnn.LayerNorm) & 'a/**', unused='ignore'):
        found = trained(Model(kind), params)
    expected = {name: not (is_in_norm(name) and name[0] == 'a') for name in names}
    assert found == expected
    # The same filter, with the model, knows before it is asked by a model.
    told = of_type(fnn.LayerNorm, Model(kind), X)
    found = [told(Path.of('params', tuple(name.split('/')))) for name in names]
    assert found == list(map(is_in_norm, names))


class Named(fnn.Module):
    child: Any

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        return self.child(name='norm')(x)


class Other(fnn.LayerNorm):
    """Another class with the same parameters."""


def test_the_same_path_in_two_models():
    one, other = Named(fnn.LayerNorm), Named(Other)
    params = one.init(KEY, X)['params']

    def both(p: Any, q: Any) -> Any:
        return loss_of(one)(p) + loss_of(other)(q)

    for where, dead in ((of_type(Other), 1), (~of_type(Other), 0)):
        with nn.stop_gradient(where, unused='ignore'):
            grads = jax.grad(both, (0, 1))(params, params)
            assert [oracle.is_zero(g) for g in grads] == [dead == 0, dead == 1]
            for model in (one, other, one):  # Each has a program that JAX keeps.
                is_dead = model is (one, other)[dead]
                assert set(trained(model, params).values()) == {not is_dead}


class Switch(fnn.Module):
    """A name for one class in one call, and for another in the next."""

    @fnn.compact
    def __call__(self, x: Any, other: bool = True) -> Any:
        return (Other if other else fnn.LayerNorm)(name='norm')(x)


def test_a_name_that_is_used_again_for_another_class():
    params = Switch().init(KEY, X)['params']

    def loss(params: Any, *calls: bool) -> Any:
        def run(module: Any, x: Any) -> Any:
            return sum(module(x, other) for other in calls)

        return jnp.sum(jnp.sin(fnn.apply(run, Switch())({'params': params}, X)))

    with nn.stop_gradient(of_type(Other)):
        assert oracle.is_zero(jax.grad(loss)(params, True, True))
        for calls in ((True, False), (False, True)):
            assert not oracle.is_zero(jax.grad(loss)(params, *calls)['norm']['bias'])


class Below(fnn.Module):
    @fnn.compact
    def __call__(self, x: Any) -> Any:
        with nn.stop_gradient(of_type(Other)):
            return Switch(name='switch')(x)


class Top(fnn.Module):
    """Has the module with a block, perhaps in a transform."""

    below: Any

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        return Other(name='free')(self.below(name='below')(x))


def test_a_jitted_module_that_is_traced_already():
    model = Named(fnn.jit(Block))
    for _ in range(2):
        where = of_type(fnn.LayerNorm, model, X)
        assert where(Path.of('params', ('norm', 'norm', 'bias')))


@pytest.mark.parametrize('cls', [Below, fnn.remat(Below), fnn.jit(Below)])
def test_a_block_below_the_top(cls):
    params = Top(cls).init(KEY, X)['params']
    assert trained(Top(cls), params) == {
        'below/switch/norm/bias': False,
        'below/switch/norm/scale': False,
        'free/bias': True,
        'free/scale': True,
    }


class OneParent(Named):
    """One class of parents."""


class OtherParent(Named):
    """Another one."""


def test_a_jitted_module_in_parents_of_two_classes():
    where = of_type(fnn.LayerNorm) & of_type(OneParent)
    params = OneParent(fnn.jit(Block)).init(KEY, X)['params']
    jitted = fnn.jit(Block)
    with nn.stop_gradient(where, unused='ignore'):
        for cls in (OneParent, OtherParent, OneParent):
            found = trained(cls(jitted), params)
            assert found['norm/norm/bias'] is found['norm/norm/scale']
            assert found['norm/norm/bias'] is (cls is OtherParent)
            assert found['norm/dense/kernel']


def test_it_is_a_value():
    one, other = of_type((fnn.Dense, fnn.Embed)), OfType(fnn.Embed, fnn.Dense)
    assert one == other and hash(one) == hash(other) and one != of_type(fnn.Dense)
    assert repr(~one & 'a/**') == "~OfType(Dense, Embed) & Glob('a/**')"
    assert pickle.loads(pickle.dumps(one)) == one
    known = of_type(fnn.Dense, fnn.Dense(2), X)
    assert known == of_type(fnn.Dense, fnn.Dense(2), X)
    assert pickle.loads(pickle.dumps(known)) == known
    assert repr(known) == "<of_type(Dense): 'bias', 'kernel'>"
    with pytest.raises(TypeError, match='must be a class'):
        of_type(fnn.Dense(2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(AttributeError):
        one.classes = ()  # pyright: ignore[reportAttributeAccessIssue]


def test_for_trees():
    model = Model('compact')
    params = model.init(KEY, X)['params']
    norms = of_type(fnn.LayerNorm, model, X)
    mask = jax.tree.leaves(sg.mask(params, frozen=norms))
    assert mask == list(map(is_in_norm, trained(model, params)))
    grads = sg.grad(loss_of(model), wrt=norms)(params)
    assert len(jax.tree.leaves(grads)) == sum(mask)
    tx = sg.freeze(optax.sgd(1.0), norms)
    some = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(some, tx.init(params), params)
    moved = optax.apply_updates(params, updates)
    pairs = zip(jax.tree.leaves(moved), jax.tree.leaves(params), strict=True)
    assert [not jnp.any(a != b) for a, b in pairs] == mask
    with pytest.raises(errors.UnknownNameError, match='There was no'):
        sg.mask({'elsewhere': 1.0}, frozen=norms)
    with pytest.raises(errors.UnusedFilterError):
        sg.mask(params, frozen=of_type(fnn.Conv, model, X))


class Critic(fnn.Module):
    @fnn.compact
    def __call__(self, x: Any, action: Any) -> Any:
        return fnn.Dense(1, name='out')(fnn.LayerNorm(name='ln')(x) + action)


def test_a_tree_of_several_models():
    actor, critic = Named(fnn.LayerNorm), Critic()
    params = {
        'actor': actor.init(KEY, X)['params'],
        'critic': critic.init(KEY, X, X)['params'],
    }
    norms = of_type(fnn.LayerNorm, {'actor': (actor, X), 'critic': (critic, X, X)})
    frozen = {'bias': True, 'scale': True}
    assert sg.mask(params, frozen=norms) == {
        'actor': jax.tree.map(lambda _: True, params['actor']),
        'critic': {'ln': frozen, 'out': {'bias': False, 'kernel': False}},
    }
    # One that is not told of is not taken for one without such modules.
    with pytest.raises(errors.UnknownNameError, match='critic/ln/bias'):
        sg.mask(params, frozen=of_type(fnn.LayerNorm, {'actor': (actor, X)}))

"""Variables chosen by the class of the module that they lie in."""

import pickle
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.filters import of_type
from flax_sg.filters.paths import Path
from tests.helpers import oracle
from tests.helpers.lifts import LIFTS

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
    """Two children and a norm of its own."""

    kind: str

    @fnn.compact
    def __call__(self, x: Any) -> Any:
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


@pytest.mark.parametrize('kind', CHILDREN)
def test_variables_of_the_modules_of_a_class(kind):
    model = Model(kind)
    norms = of_type(fnn.LayerNorm, model, X)
    names = list(by_path(jax.eval_shape(model.init, KEY, X)['params']))
    found = [norms(Path.of('params', tuple(name.split('/')))) for name in names]
    assert found == list(map(is_in_norm, names))


class Named(fnn.Module):
    child: Any

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        return self.child(name='norm')(x)


def test_a_jitted_module_that_is_traced_already():
    model = Named(fnn.jit(Block))
    for _ in range(2):
        where = of_type(fnn.LayerNorm, model, X)
        assert where(Path.of('params', ('norm', 'norm', 'bias')))


@pytest.mark.parametrize('mount', ['enc', 'deep/enc'])
def test_a_wrapper_wherever_its_module_is_mounted(mount):
    """Names begin at the model that the filter was derived from."""
    backbone = Model('compact')
    norms = of_type(fnn.LayerNorm, backbone, X)

    def mounted(wrap: Any) -> Any:
        class Mount(fnn.Module):
            depth: int

            @fnn.compact
            def __call__(self, x):
                if self.depth > 1:
                    return Mount(1, name='deep')(x)
                return wrap(Model('compact', name='enc'))(x)

        return Mount(len(mount.split('/')))

    def is_norm(path: str) -> bool:
        return is_in_norm(path.removeprefix(f'{mount}/'))

    model = mounted(lambda module: nn.Frozen(module, norms))
    plain = mounted(lambda module: module)
    params = oracle.init(model, KEY, X)['params']
    expected = {name: not is_norm(name) for name in by_path(params)}
    assert trained(model, params) == expected
    with nn.stop_gradient(of_type(fnn.LayerNorm, plain, X)):
        assert trained(plain, params) == expected


def test_it_is_a_value():
    known = of_type(fnn.Dense, fnn.Dense(2), X)
    assert known == of_type(fnn.Dense, fnn.Dense(2), X)
    assert pickle.loads(pickle.dumps(known)) == known
    assert repr(known) == "<of_type(Dense): 'bias', 'kernel'>"


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


@pytest.mark.parametrize('lift', ['remat', 'vmap', 'cond'])
def test_a_module_that_a_lifted_function_takes(lift):
    """Flax calls the function once on a scope of its own, which has no path."""

    class Model(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            norm = fnn.LayerNorm(name='norm')
            x = LIFTS[lift](lambda norm, x: norm(x), norm, x)
            return fnn.Dense(3, name='out')(x)

    params = jax.eval_shape(Model().init, KEY, X)['params']
    assert sg.mask(params, trained=of_type(fnn.LayerNorm, Model(), X)) == {
        'norm': {'scale': True, 'bias': True},
        'out': {'kernel': False, 'bias': False},
    }

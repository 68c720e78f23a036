"""Static attributes of modules, and modules that share modules."""

import collections
import dataclasses
import functools
import logging
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import flax_sg as sg
from flax_sg import errors, nnx
from flax_sg.trees import nnx_paths
from tests.helpers import oracle
from tests.helpers.nnx_by_hand import Layer, total, zeros

ALL = [f'{name}/{leaf}' for name in ('body', 'head') for leaf in ('bias', 'kernel')]


class Base(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.body, self.head = Layer(rngs), Layer(rngs)

    def finish(self) -> None:
        """Sets what is static. Flax does not copy that, so a loss sets it, too."""

    def through(self, layer: Any, x: Any) -> Any:
        return layer(x)


class CachedList(Base):
    @functools.cached_property
    def layers(self):
        return [self.body, {'head': (self.head,)}]

    def features(self, x):
        return self.layers[1]['head'][0](self.layers[0](x))


class CachedVariable(Base):
    @functools.cached_property
    def kernels(self):
        return [self.body.kernel], self.head.kernel

    def features(self, x):
        [first], second = self.kernels
        bias = jnp.broadcast_to(self.body.bias, x.shape)
        return jnp.tanh(x @ first + bias) @ second


class WithoutPytree(Base, pytree=False):
    def finish(self):
        self.run, self.again = self.head.__call__, {1: self.through}

    def features(self, x):
        return self.run(self.again[1](self.body, x))


class WeakReferences(Base):
    """Children that know their parent, and do not keep it alive."""

    def finish(self):
        self.body.around, self.head.around = weakref.ref(self), weakref.proxy(self)

    def features(self, x):
        return self.body.around().head(self.head.around.body(x))


class InData(Base):
    """A list with an array in it is data, and so is a function beside."""

    def finish(self):
        self.several = nnx.data([jnp.ones(2), functools.partial(self.head)])

    def features(self, x):
        return self.several[1](self.body(x))


HELD = [CachedList, CachedVariable, WithoutPytree, WeakReferences, InData]


@pytest.mark.parametrize('make', HELD)
def test_layers_in_static_attributes_raise(make):
    """The view would call the model's own layers there."""
    model = make()
    model.finish()
    outside = total(model)
    with pytest.raises(errors.ArgumentTypeError, match='holds modules of the model'):
        nnx.stop_gradient(model, True)
    # What changes nothing reads there what it would read.
    oracle.assert_same(total(nnx.stop_gradient(model, False)), outside)


@pytest.mark.parametrize('where', ['body/*', True])
@pytest.mark.parametrize('make', [CachedList, CachedVariable])
def test_a_view_computes_a_cached_property_of_its_own(make, where):
    """The model has not read it yet."""
    takes = sg.filters.as_filter(where)
    unread = ['head/bias'] * (make is CachedVariable)
    stopped = sorted({path for path in ALL if takes(sg.Path(path))}.union(unread))
    frozen = lambda model: total(nnx.stop_gradient(model, where))  # noqa: E731
    assert zeros(frozen, make()) == stopped


@dataclasses.dataclass
class Plain:
    """An object that is no module."""

    layer: Any

    def __call__(self, x: Any) -> Any:
        return self.layer(x)


def deep(layer: Any) -> Any:
    run = layer.__call__
    for _ in range(5):
        run = lambda x, run=run: run(x)  # noqa: E731
        run = Plain(functools.wraps(run)(lambda x, run=run: run(x)))
    return run


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=['scale'], meta_fields=['fn']
)
@dataclasses.dataclass
class Node:
    """A node of JAX, with something static in it."""

    scale: Any
    fn: Any

    def __call__(self, x: Any) -> Any:
        return self.fn(x)


class Slots:
    """An object without a dict, which finds a layer in what it holds."""

    __slots__ = ('find', 'held')

    def __init__(self, held: Any, find: Any):
        self.held, self.find = held, find

    def __call__(self, x: Any) -> Any:
        return self.find(self.held)(x)


def in_a_cycle(layer: Any) -> Any:
    handlers = collections.defaultdict(list, {'layer': layer})
    handlers['again'] = [handlers, {layer}]
    return Slots(handlers, lambda held: held['again'][0]['layer'])


def many_in_a_row(layer: Any) -> Any:
    run = layer.__call__
    for _ in range(3000):
        run = Plain(run)
    return lambda x: run and layer(x)


# What holds a layer and is called in its place: one of each kind that is searched.
LEADS: dict[str, Any] = {
    'a partial': lambda layer: functools.partial(Layer.__call__, layer),
    'a jitted function': lambda layer: jax.jit(lambda x: layer(x)),
    'a default': lambda layer: lambda x, layer=layer: layer(x),
    'methods, closures and objects in depth': deep,
    'a dict, a set and slots in a cycle': in_a_cycle,
    'a weak dict': lambda layer: Slots(
        weakref.WeakValueDictionary({0: layer}), lambda held: held[0]
    ),
    'what is static in a node': lambda layer: Node('none', layer.__call__),
    'many in a row': many_in_a_row,
}


@pytest.mark.parametrize('name', LEADS)
def test_objects_that_lead_to_layers_raise(name):
    class Model(Base):
        def finish(self):
            self.run = LEADS[name](self.head)

        def features(self, x):
            return self.run(self.body(x))

    model = Model()
    model.finish()
    with pytest.raises(errors.ArgumentTypeError, match=r'Model\.run holds modules of'):
        nnx.stop_gradient(model, 'head/*')
    # What it reads is as before.
    view = nnx.stop_gradient(model, 'body/*')
    oracle.assert_same(total(view), total(model))


def test_a_logger_leads_to_no_model():
    """It leads to all loggers, and some keep what was logged."""

    class Keeps(logging.Handler):
        def emit(self, record):
            self.record = record

    logger = logging.getLogger('test_nnx_statics')
    logger.addHandler(Keeps())

    class Model(Base):
        def finish(self):
            self.logger = logger
            logger.warning('%s', self.head)

    model = Model()
    model.finish()
    assert nnx.stop_gradient(model, 'head/*').logger is logger


# Modules that share modules, level by level


def levels(depth: int) -> Any:
    model: Any = Layer(nnx.Rngs(0))
    for _ in range(depth):
        model = nnx.Dict(one=model, two=model)
    return model


def test_a_walk_takes_each_module_once(monkeypatch):
    model, apart = levels(10), []
    flatten = jax.tree_util.tree_flatten_with_path

    def counted(node, *args, **kwargs):
        apart.append(node)
        return flatten(node, *args, **kwargs)

    monkeypatch.setattr(jax.tree_util, 'tree_flatten_with_path', counted)
    for where in True, '**/kernel', 'two/**', '**/two/kernel', ['two/**', '**/bias']:
        apart.clear()
        view = nnx.stop_gradient(model, where)
        assert view.one is view.two and len(apart) == 11
        assert nnx.train_only(model, where).one is not model.one
    with pytest.raises(errors.UnusedFilterError, match="Nearest: 'one/one/"):
        nnx.stop_gradient(model, '**/kernle')
    other = levels(10)
    view = nnx.substitute(model, other)
    for _ in range(10):
        view, other = view.two, other.one
    oracle.assert_same(view.kernel[...], other.kernel[...])


def test_many_weights_that_are_not_shared_are_no_fault(monkeypatch):
    monkeypatch.setattr(nnx_paths, 'MOST_PATHS', 10)
    model = nnx.List([Layer(nnx.Rngs(0)) for _ in range(20)])
    model.append(model[0])
    view = nnx.stop_gradient(model, '20/kernel')
    assert view[0] is view[20] and view[0].kernel is not model[0].kernel
    with pytest.raises(errors.FilterTypeError, match='over 10 more paths'):
        nnx.stop_gradient(levels(5), '**/kernel')


def test_objects_around_that_hold_no_layers():
    class Model(Base):
        def finish(self):
            self.act, self.name = jax.nn.initializers.he_normal(), Plain('net')
            self.table, self.kind = {'a': self.name}, Layer
            self.loop = [1]
            self.loop.append(self.loop)

    model = Model()
    model.finish()
    view = nnx.stop_gradient(model, True)
    assert view.table['a'] is view.name and view.loop[1] is view.loop

"""Blocks that are not used as they can be; see test_errors."""

from __future__ import annotations

import importlib
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg.internals import optional

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)

ONES = fnn.initializers.ones


class Model(fnn.Module):
    """A dense layer by hand."""

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param('kernel', ONES, (2, 2))
        return x @ kernel + self.param('bias', ONES, (1, 2))

    def encode(self, x: Any) -> Any:
        return self(x)


MODEL = Model()

PARAMS = {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones((1, 2))}

VARIABLES = {'params': PARAMS}


def run(block: Any, model: Any = MODEL, variables: Any = VARIABLES) -> Any:
    with block:
        return model.apply(variables, X)


def in_steps(module: Any) -> Any:
    """A generator function."""
    yield module.name


class Named(Model):
    label = 'a model'


def later(module: Any) -> Any:
    """Returns before its body has run."""
    return in_steps(module)


@jax.jit
def encoded(variables: Any) -> Any:
    with nn.stop_gradient('kernel'):
        return MODEL.apply(variables, X)


class Calls(fnn.Module):
    """Has a kernel, and calls a function that opens a block for another one."""

    @fnn.compact
    def __call__(self) -> Any:
        return encoded(VARIABLES) @ self.param('kernel', ONES, (2, 2))


class Applies(fnn.Module):
    """Applies a model to weights of its own."""

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        own = Model(name='own')
        own(x)
        return Model(parent=None).apply(own.variables, x)


class Counts(fnn.Module):
    """Writes state in each call."""

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        count = self.variable('state', 'count', jnp.zeros, ())
        count.value = count.value + 1.0
        return x * self.param('scale', ONES, (1, 2))


def write_in_remat(collections: Any = True) -> None:
    state = {'count': jnp.zeros(())}
    variables = {'params': {'scale': jnp.ones((1, 2))}, 'state': state}
    with nn.stop_gradient(True, collections=collections):
        fnn.remat(Counts)().apply(variables, X, mutable='state')


class Lonely(fnn.Module):
    """A name that no other test has: what is known is warned of."""

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        return x * self.param('lonely', ONES, (1, 2))


def cached_beside(**options: Any) -> Any:
    """A program that has what is named, beside a model that has not."""
    first = fnn.Sequential([fnn.Dense(2)])
    variables = first.init(jax.random.key(0), X)
    step = jax.jit(lambda v: first.apply(v, X))
    with nn.stop_gradient('layers_0/kernel'):
        step(variables)
    with nn.stop_gradient('layers_0/kernel', **options):
        step(variables)
        return Lonely().apply({'params': {'lonely': X[:1]}}, X)


class ReadsBefore(fnn.Module):
    """Opens a block behind what it names, or around it."""

    @fnn.compact
    def __call__(self, x: Any) -> Any:
        before, head = Model(name='before'), Model(name='head')
        h = before(x)
        with nn.stop_gradient('before/**'):
            return head(h)


def read_before() -> None:
    ReadsBefore().apply({'params': {'before': PARAMS, 'head': PARAMS}}, X)


def reload(name: str) -> None:
    importlib.reload(importlib.import_module(name))


CASES: dict[str, Any] = {
    'the twin of several collections': lambda: nn.substitute(
        'ema', collections=['params', 'batch_stats']
    ),
    'an empty tree of values': lambda: nn.substitute({}),
    'an array of values': lambda: nn.substitute({'params': X}, collections=['params']),
    'values of a collection that is left out': lambda: nn.substitute(
        {'ema': {'bias': X}}, collections=['params', 'stats']
    ),
    'values of a module that is not bound': lambda: nn.substitute(MODEL),
    'a selected variable without a value': lambda: run(
        nn.substitute({'bias': 2.0 * PARAMS['bias']}, where='*')
    ),
    'values by name for a tree': lambda: sg.rewrite(
        PARAMS, nn.substitute({'bias': 2.0 * PARAMS['bias']})
    ),
    'a decorated function that returns a generator': lambda: nn.stop_gradient(
        later, 'kernel'
    )(MODEL.bind(VARIABLES)),
    'a name in methods= that is no method': lambda: nn.stop_gradient(
        Named, 'kernel', methods=['label']
    ),
    'a name in methods= that there is not': (
        lambda: nn.stop_gradient(Named, 'kernel', methods=['encod']),
        lambda: nn.stop_gradient(Named, 'kernel', methods=['encode']),
    ),
    'methods= of a function': lambda: nn.stop_gradient('kernel')(
        reload, methods=['encode']
    ),
    'levels': lambda: nn.stop_gradient('kernel', levels=2),
    'no name of flax.linen': lambda: nn.Densse,
    'a name that flax_sg has not': lambda: sg.gradinet_flow,
    'a package that is not installed': lambda: optional.optional(
        'no_such_package.part', 'Drawing', 'no-such-package'
    ),
    'a reload of what holds state': (
        lambda: reload('flax_sg.engine.blocks'),
        lambda: [reload('flax_sg.linen'), reload('flax_sg')],
    ),
    'a block behind what it names': read_before,
    'a cached program of another model': (
        cached_beside,
        lambda: cached_beside(unused='ignore'),
    ),
    'an apply inside of another one': (
        lambda: run(nn.stop_gradient('ker*'), Applies(), {'params': {'own': PARAMS}}),
        lambda: run(nn.stop_gradient('own/**'), Applies(), {'params': {'own': PARAMS}}),
    ),
    'a jitted function that opens a block for another model': lambda: Calls().init(
        jax.random.key(0)
    ),
    'a write in a transform in a block': (
        write_in_remat,
        lambda: write_in_remat('params'),
    ),
}

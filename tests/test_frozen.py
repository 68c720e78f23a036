"""`nn.Frozen`: the module without a place of its own, with weights that are stopped.

What it should compute comes from the same program without it, on copies of the weights
that are stopped by hand.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen
from flax.core import FrozenDict, meta

import oracle
import stepwise
from flax_sg import errors, filters
from flax_sg import linen as nn
from oracle import assert_same, is_zero, stopped

KEY = jax.random.key(7)
RNGS = {'params': KEY, 'dropout': jax.random.key(3)}
X = jnp.array([[0.5, -1.0, 2.0, 1.0], [1.5, 0.25, -0.75, -2.0]])
IDS = jnp.array([[0, 2, 1, 1], [3, 3, 0, 2]])

COLLECTIONS = ('params', 'batch_stats', 'counts', 'losses', 'intermediates')
STACKED: dict[str, Any] = {
    'variable_axes': dict.fromkeys(COLLECTIONS, 0),
    'split_rngs': dict.fromkeys(RNGS, True),
    'metadata_params': {'partition_name': None},
}

Wrap = Callable[[Any], Any]


def bare(module: Any) -> Any:
    """In the place of ``nn.Frozen``."""
    return module


# Modules to be frozen: all take an array of shape (2, 4) and return one.


class Keeps(linen.Module):
    """Keeps parameters, derived values and submodules, in several ways."""

    def setup(self):
        self.w = self.param('w', linen.initializers.normal(), (1, 4))
        self.w2 = jnp.tanh(self.w)
        self.layers = [linen.Dense(4), linen.Dense(4)]
        self.named = {'a': linen.Dense(4)}
        self.norm = linen.LayerNorm()

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x) * self.w2
        return self.named['a'](self.norm(x)) + self.w


class Noisy(linen.Module):
    """Draws dropout masks, twice from one module and in a child."""

    @linen.compact
    def __call__(self, x):
        drop = linen.Dropout(0.5, deterministic=False)
        x = drop(linen.Dense(4)(drop(x)))
        return linen.Sequential([linen.Dense(4), drop])(x)


class Sows(linen.Module):
    """Writes state and results."""

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4)(x)
        x = linen.BatchNorm(use_running_average=False)(x)
        self.sow('intermediates', 'seen', x)
        self.sow('losses', 'size', jnp.sum(x**2))
        count = self.variable('counts', 'n', lambda: jnp.zeros(()))
        count.value = count.value + 1.0
        return x * (1.0 + count.value)


class Boxed(linen.Module):
    """Parameters in boxes."""

    @linen.compact
    def __call__(self, x):
        init = linen.with_partitioning(linen.initializers.normal(), ('a', 'b'))
        return linen.Dense(4, kernel_init=init)(x)


class Tokens(linen.Module):
    """Reads one parameter by an attribute and by a method."""

    def setup(self):
        self.embed = linen.Embed(4, 4)

    def __call__(self, x):
        return self.embed.attend(x) @ self.embed.embedding + self.embed(IDS[:, 0])


class Recurrent(linen.Module):
    """An RNN whose cell belongs to the module around it."""

    def setup(self):
        self.cell = linen.GRUCell(4)
        self.rnn = linen.RNN(self.cell)

    def __call__(self, x):
        return self.rnn(x[:, None])[:, 0]


class Scanned(linen.Module):
    """A scan of a layer."""

    @linen.compact
    def __call__(self, x):
        layers = linen.scan(
            lambda layer, x, _: (jnp.tanh(layer(x)), None),
            length=2,
            **STACKED,
        )
        return layers(linen.Dense(4), x, None)[0]


MODULES: dict[str, Callable[[], Any]] = {
    'dense': lambda: linen.Dense(4),
    'norms': lambda: linen.Sequential(
        [linen.LayerNorm(), linen.DenseGeneral(4), linen.RMSNorm()]
    ),
    'attention': lambda: linen.MultiHeadDotProductAttention(2),
    'keeps': Keeps,
    'noisy': Noisy,
    'sows': Sows,
    'boxed': Boxed,
    'tokens': Tokens,
    'recurrent': Recurrent,
    'scanned': Scanned,
}


# Places for a wrapped module. The layers beside it are called 'other'.


class Compact(linen.Module):
    wrap: Wrap
    make: Any

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4, name='other')(x)
        inner = self.wrap(self.make())
        return linen.Dense(4, name='other_2')(inner(x))


class Setup(linen.Module):
    wrap: Wrap
    make: Any

    def setup(self):
        self.other = linen.Dense(4)
        self.inner = self.wrap(self.make())

    def __call__(self, x):
        return self.inner(self.other(x))


class Lists(linen.Module):
    wrap: Wrap
    make: Any

    def setup(self):
        self.inner = [self.wrap(self.make()), self.wrap(linen.Dense(4))]
        self.other = linen.Dense(4)

    def __call__(self, x):
        return self.inner[1](self.other(self.inner[0](x)))


class Dicts(linen.Module):
    wrap: Wrap
    make: Any

    def setup(self):
        self.inner = {'b': {'c': self.wrap(self.make())}, 'a': self.wrap(self.make())}
        self.other = linen.Dense(4)

    def __call__(self, x):
        return self.inner['a'](self.other(self.inner['b']['c'](x)))


class Field(linen.Module):
    inner: Any

    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, name='other')(self.inner(x))


class Shared(linen.Module):
    """A module that the parent of its users owns, used twice."""

    wrap: Wrap
    make: Any

    @linen.compact
    def __call__(self, x):
        inner = self.make()
        other = linen.Dense(4, name='other')
        x = linen.Sequential([self.wrap(inner), other])(x)
        return Field(self.wrap(inner))(x)


class Body(linen.Module):
    wrap: Wrap
    make: Any
    pair: bool = False

    @linen.compact
    def __call__(self, x, *unused):
        y = jnp.tanh(linen.Dense(4, name='other')(self.wrap(self.make())(x)))
        return (y, None) if self.pair else y


class Lifted(linen.Module):
    """A place in the body of a transform of a class."""

    lift: Any
    wrap: Wrap
    make: Any

    @linen.compact
    def __call__(self, x):
        if self.lift is linen.scan:
            scanned = linen.scan(Body, length=2, **STACKED)
            return scanned(self.wrap, self.make, True)(x, None)[0]
        if self.lift is linen.vmap:
            mapped = linen.vmap(Body, **STACKED)
            return mapped(self.wrap, self.make)(jnp.stack([x, -x]))[0]
        return self.lift(Body)(self.wrap, self.make)(x)


class Decorated(linen.Module):
    """A place in the body of transforms of methods."""

    wrap: Wrap
    make: Any

    def setup(self):
        self.inner = self.wrap(self.make())
        self.other = linen.Dense(4)

    @linen.jit
    def jitted(self, x):
        return self.inner(self.other(x))

    @linen.remat
    def rematted(self, x):
        return self.inner(self.other(x))

    def __call__(self, x):
        return self.jitted(x) + self.rematted(-x)


class Lent(linen.Module):
    """A wrapper that is passed to transforms of functions."""

    wrap: Wrap
    make: Any

    @linen.compact
    def __call__(self, x):
        inner = self.wrap(self.make())
        x = inner(x)
        x = linen.remat(lambda module, x: module(x))(inner, x)
        return linen.jit(lambda module, x: module(x))(inner, x)


PLACES: dict[str, Callable[[Wrap, Any], Any]] = {
    'top': lambda wrap, make: wrap(make()),
    'compact': Compact,
    'setup': Setup,
    'lists': Lists,
    'dicts': Dicts,
    'field': lambda wrap, make: Field(wrap(make())),
    'sequential': lambda wrap, make: linen.Sequential(
        [Field(linen.Dense(4)), wrap(make()), jnp.tanh]
    ),
    'shared': Shared,
    'decorated': Decorated,
    'lent': Lent,
    **{
        lift.__name__: functools.partial(Lifted, lift)
        for lift in (linen.jit, linen.remat, linen.vmap, linen.scan)
    },
}


def is_frozen(path: str) -> bool:
    """Whether a parameter belongs to a wrapped module, in every place above."""
    return not re.search(r'(^|/)(other|layers_0/inner)', path)


def call(model: Any, variables: Any, x: Any, selects: Any = None, **kwargs: Any) -> Any:
    """What a call gives, and all that it writes but parameters."""
    params = variables['params']
    if selects is not None:
        params = stopped(params, selects)
    out, written = model.apply(
        {**variables, 'params': params},
        x,
        rngs={'dropout': KEY},
        mutable=linen.DenyList('params'),
        capture_intermediates=True,
        **kwargs,
    )
    return {'out': jnp.ravel(out)}, written


def assert_same_program(
    model: Any, plain: Any, selects: Any = is_frozen, x: Any = X, **kwargs: Any
) -> None:
    """``model`` is ``plain`` with the selected parameters stopped by hand."""
    variables = plain.init(RNGS, x, **kwargs)
    assert_same(model.init(RNGS, x, **kwargs), variables)

    def fn(model: Any, selects: Any) -> Any:
        def of_params(params: Any, x: Any) -> Any:
            out, written = call(model, {**variables, 'params': params}, x, selects)
            # Gradients through what is written are in other tests.
            return {**out, 'rest': jax.lax.stop_gradient(written)}

        def apart(params: Any, x: Any) -> Any:
            out = of_params(params, x)
            return {'out': out['out']}, out['rest']

        return apart

    params = variables['params']
    actual = gradients(fn(model, None), params, x)
    assert_same(actual, gradients(fn(plain, selects), params, x))


def gradients(fn: Any, params: Any, x: Any) -> Any:
    """Results, the pull-back of the output, and what was written, step by step."""

    def both(params: Any, x: Any) -> Any:
        out, pull_back, written = jax.vjp(fn, params, x, has_aux=True)
        ramp = 1 + jnp.arange(out['out'].size, dtype=jnp.float32) % 7
        return out, pull_back({'out': ramp}), written

    return stepwise.evaluate(both, params, x)


@pytest.mark.parametrize('place', PLACES)
@pytest.mark.parametrize('name', MODULES)
def test_frozen_is_the_bare_module_with_stopped_weights(name: str, place: str) -> None:
    make = MODULES[name]
    plain = PLACES[place](bare, make)
    assert_same_program(PLACES[place](nn.Frozen, make), plain)

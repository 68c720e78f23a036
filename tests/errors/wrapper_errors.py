"""Wrappers and scans that are not used as they can be; see test_errors."""

from __future__ import annotations

from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np

import flax_sg as sg
from flax_sg import linen as nn
from tests.errors.block_errors import MODEL, ONES, PARAMS, VARIABLES, Model, X, run
from tests.helpers import oracle


class Steps(fnn.Dense):
    def steps(self, x: Any) -> Any:
        yield self(x)

    def listed(self, x: Any) -> Any:
        return [*self.steps(x)]


OF_STEPS = Steps(2).init(jax.random.key(0), X)


def mirrored(**options: Any) -> Any:
    class Shows(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            return nn.mirror(Model(name='m'), **options)(x)

    return Shows().apply({'params': {'m': PARAMS}}, X)


class StartsItself(Model):
    """A model with an ``apply`` of its own, as MaxText's."""

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        return fnn.Module.apply(self, *args, **kwargs)


class Calls(fnn.Module):
    """Calls a module that it is given, in a wrapper of its own."""

    @fnn.compact
    def __call__(self, x: Any, module: Any) -> Any:
        return nn.Frozen(module)(x)


def nested(wrap: Any) -> None:
    class Lifts(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            return fnn.remat(Calls)()(x, wrap(Model(name='m')))

    Lifts().init(jax.random.key(0), X)


class Layer(fnn.Module):
    """A layer of a stack, which may write its parameter."""

    writes: bool = False

    @fnn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        w = self.param('w', ONES, (2, 2))
        if self.writes:
            self.put_variable('params', 'w', 2.0 * w)
        return x * w, None


def run_at(where: Any) -> None:
    with nn.stop_gradient(where):
        stacked(None)


def shared_by_layers(**options: Any) -> Any:
    return nn.scan(Layer, frozen_layers=slice(0, 2), length=4, **options)


def stacked(frozen_layers: Any, writes: bool = False, mutable: Any = ()) -> Any:
    stack = nn.scan(Layer, length=4, frozen_layers=frozen_layers, **oracle.STACKED)
    params = {'params': {'w': jnp.ones((4, 2, 2))}}
    return stack(writes).apply(params, X, None, mutable=list(mutable))


class Body(fnn.Module):
    @fnn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        other = Model(name='other')
        return nn.Frozen(fnn.Sequential([Model(), lambda x: other(x)]))(x), None


def in_scan() -> None:
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), PARAMS)
    params = {'other': stack, 'Model_0': stack}
    model = fnn.scan(Body, length=2, **oracle.STACKED)()
    jax.eval_shape(lambda: model.apply({'params': params}, X, None))


class Doubled(fnn.Module):
    @fnn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return x + self.param('in_bits', jnp.zeros, (2,), jnp.int8).sum(), None


def around_scan() -> None:
    model = fnn.scan(Doubled, length=2, **oracle.STACKED)()
    variables = {'params': {'in_bits': jnp.zeros((2, 2), jnp.int8)}}
    with nn.substitute(lambda _, w: w.astype(jnp.float32), where='in_bits'):
        jax.eval_shape(lambda: model.apply(variables, jnp.float32(0), None))


OUT = {'kernel': X[:, :1], 'bias': X[0, :1]}


def shared(values: Any) -> Any:
    """A view, with other values, of a module that uses a module of its parent."""

    class Uses(fnn.Module):
        embed: Any

        @fnn.compact
        def __call__(self, x: Any) -> Any:
            return fnn.Dense(1, name='out')(self.embed.attend(x))

    class Parent(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            uses = Uses(fnn.Embed(2, 2, name='embed'), name='uses')
            return nn.mirror(uses, variables=values)(x)

    params = {'embed': {'embedding': X}, 'uses': {'out': OUT}}
    return Parent().apply({'params': params}, X)


class Renames(fnn.Module):
    @fnn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Frozen(fnn.Dense(3), name='base')(x)


def renames() -> None:
    Renames().init(jax.random.key(0), X)


def normalized(where: Any, state: str) -> Any:
    norm = fnn.BatchNorm(use_running_average=False)
    variables = oracle.init(norm, jax.random.key(0), jnp.ones((2, 3)))
    frozen = nn.Frozen(norm, where, state=state)
    return frozen.apply(variables, jnp.ones((2, 3)), mutable=['batch_stats'])


CASES: dict[str, Any] = {
    'a value for a variable outside of the module': (
        lambda: shared({'embed': {'embedding': X}, 'out': OUT}),
        lambda: shared(lambda path, value: 2.0 * value),
    ),
    'a method of a wrapped module that returns a generator': (
        lambda: nn.Frozen(Steps(2)).bind(OF_STEPS).steps(X),
        lambda: nn.Frozen(Steps(2)).bind(OF_STEPS).listed(X),
    ),
    'a wrapper in place of a block': (
        lambda: run(nn.Frozen(MODEL)),
        lambda: run(nn.stop_gradient(True)),
    ),
    'several filters that are no list': (
        lambda: nn.Frozen(MODEL, 'kernel', 'b/**'),
        lambda: nn.Frozen(MODEL, ['kernel', 'b/**']),
    ),
    'an update of others': lambda: mirrored(variables=VARIABLES, state='update'),
    'a wrapper as an argument of a lifted class': (
        lambda: nested(nn.Frozen),
        lambda: nested(lambda module: module),
    ),
    'what Python asks of a wrapper': lambda: nn.Frozen(MODEL).__wrapped__,
    'a layer that there is not': lambda: stacked([7]),
    'layers that there are not': lambda: stacked(slice(9, None)),
    'a number of layers': (
        lambda: stacked(2),
        lambda: [stacked(slice(2)), stacked([2])],
    ),
    'frozen layers of a part': (
        lambda: stacked({sg.at('w', 0): slice(2)}),
        lambda: stacked({'w': slice(2)}),
    ),
    'a frozen stack that is written': (
        lambda: stacked(slice(0, 2), True, ['params']),
        lambda: [stacked(slice(0, 2)), run_at(sg.at('w', np.s_[:2]))],
    ),
    'layers that share their parameters': (
        lambda: shared_by_layers(variable_broadcast='params'),
        lambda: shared_by_layers(variable_axes={'params': 0}),
    ),
    'a wrapper of a module with an apply of its own': lambda: nn.mirror(
        StartsItself()
    ).apply(VARIABLES, X),
    'a stop that scans keep': in_scan,
    'a function around a scan': around_scan,
    'wrapped class': lambda: nn.Frozen(fnn.Dense),
    'wrapped None': lambda: nn.mirror(None),
    'wrapper with a second name': renames,
    'state': lambda: nn.Frozen(MODEL, state='frozen'),
    'an evaluation for some steps': (
        lambda: jax.jit(lambda n: normalized(n < 2, 'eval'))(0),
        lambda: jax.jit(lambda n: normalized(n < 2, 'hold'))(0),
    ),
    'an evaluation in part': (
        lambda: normalized(sg.at(True, np.s_[:1]), 'eval'),
        lambda: normalized(sg.at(True, np.s_[:1]), 'hold'),
    ),
}

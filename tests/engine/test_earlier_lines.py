"""The warning of a block behind a read names the line that reads, and the value."""

from pathlib import Path
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers import oracle

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)
KEY = jax.random.key(0)
SOURCE = Path(__file__).read_text().splitlines()


class Base(fnn.Module):
    """Two modules, a list of modules and a parameter."""

    def setup(self):
        self.torso, self.head = fnn.Dense(2), fnn.Dense(2)
        self.layers = [fnn.Dense(2) for _ in range(2)]
        self.scale = self.param('scale', fnn.initializers.ones, (2, 2))


class Attribute(Base):
    def __call__(self, x):
        torso = self.torso
        features = self.torso(x)  # Attribute: features
        features = jnp.tanh(features)
        del torso
        with nn.stop_gradient('torso/**'):
            return self.head(features)


class Alias(Base):
    def __call__(self, x):
        torso = self.torso
        if x.ndim:
            y = torso(x)  # Alias: h
        with nn.stop_gradient('torso/**'):
            return self.head(y)


class Listed(Base):
    def __call__(self, x):
        z = x
        for layer in self.layers:
            z = layer(z)  # Listed: h
        with nn.stop_gradient('layers_*/**'):
            return self.head(z)


class Parameter(Base):
    def __call__(self, x):
        z = self.scale * x  # Parameter: z
        with nn.stop_gradient('scale'):
            return self.head(z)


class Embedded(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        table = fnn.Embed(2, 2, name='table')
        rows = table.embedding  # Embedded: rows
        rows = jnp.dot(x, rows)
        with nn.stop_gradient('table/**'):
            return fnn.Dense(2)(rows)


class Named(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        z = fnn.Dense(2, name='torso')(x)  # Named: z
        with nn.stop_gradient('torso/**'):
            return fnn.Dense(2, name='head')(z)


class OwnParameter(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        w = self.param('w', fnn.initializers.ones, (2, 2))  # OwnParameter: w
        with nn.stop_gradient('w'):
            return fnn.Dense(2)(x) * w


class Mounted(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        return Named(name='net')(x)


class OtherBranch(Base):
    """Nothing that runs before the block reads."""

    also: bool = False

    def __call__(self, x):
        torso = self.torso
        if self.also:
            return torso(x)
        else:
            with nn.stop_gradient('torso/**'):
                x = self.head(x)
        return torso(x)


class Automatic(fnn.Module):
    """The source does not tell which layer this is."""

    @fnn.compact
    def __call__(self, x):
        x = fnn.Dense(2)(x)
        with nn.stop_gradient('Dense_0/**'):
            return fnn.Dense(2)(x)


def text_of(run: Any) -> str:
    with pytest.warns(errors.NothingStoppedWarning) as caught:
        run()
    assert len(caught) == 1
    return str(caught[0].message)


def variables_of(model: Any) -> Any:
    """All variables of a model, whether ``init`` would reach them or not."""
    if not isinstance(model, Base):
        return model.init(KEY, X)
    dense = oracle.init(fnn.Dense(2), KEY, X)['params']
    names = 'torso', 'head', 'layers_0', 'layers_1'
    return {'params': {**dict.fromkeys(names, dense), 'scale': jnp.ones((2, 2))}}


@pytest.mark.parametrize(
    'cls',
    [
        Attribute,
        Alias,
        Listed,
        Parameter,
        Named,
        OwnParameter,
        Embedded,
        Mounted,
    ],
)
def test_the_line_and_the_value_are_named(cls):
    model = cls()
    variables = variables_of(model)
    text = text_of(lambda: jax.jit(model.apply)(variables, X))
    mark = 'Named' if cls is Mounted else cls.__name__
    [(line, value)] = [
        (number, code.split(f'  # {mark}: ')[1])
        for number, code in enumerate(SOURCE, 1)
        if f'  # {mark}: ' in code
    ]
    assert f'what it names was read at line {line}, before the block.\n' in text
    assert f'\nTo stop a value write jax.lax.stop_gradient({value}). Open' in text


@pytest.mark.parametrize('cls', [OtherBranch, Automatic])
def test_without_a_line_where_the_source_does_not_tell(cls):
    model = cls()
    variables = variables_of(model)
    text = text_of(lambda: model.apply(variables, X))
    assert 'had no effect: it selects nothing that was read in it.\n' in text
    assert '\nTo stop a value write jax.lax.stop_gradient(h). Open' in text


def test_at_top_level_and_where_there_is_no_source():
    bound = Base().bind(variables_of(Base()))

    def run() -> None:
        y = bound.torso(X)  # top level
        with nn.stop_gradient('torso/**'):
            bound.head(y)

    [line] = [n for n, code in enumerate(SOURCE, 1) if code.endswith('  # top level')]
    assert f'was read at line {line}, before' in text_of(run)
    program = (
        "y = bound.torso(X)\nwith nn.stop_gradient('torso/**'):\n    bound.head(y)\n"
    )
    names = {'bound': bound, 'X': X, 'nn': nn}
    text = text_of(lambda: exec(compile(program, 'cell_1', 'exec'), names))
    assert 'opened at cell_1:2, had no effect: it selects nothing' in text


def test_other_rules_stop_no_value():
    class Scaled(Base):
        def __call__(self, x):
            h = self.torso(x)
            with nn.scale_gradient('torso/**', 0.5):
                return self.head(h)

    text = text_of(lambda: Scaled().apply(variables_of(Scaled()), X))
    assert 'read at line' in text
    assert 'jax.lax.stop_gradient' not in text

"""What a wrapped method returns and what runs later, when no block is open."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers import oracle

KEY = jax.random.key(7)
X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)


class Encoder(linen.Module):
    def setup(self):
        self.layers = [linen.Dense(3), linen.Dense(3)]

    def __call__(self, x):
        return [layer(x) for layer in self.layers]

    # Each of these reads when somebody takes from it.

    def generator(self, x):
        for layer in self.layers:
            yield layer(x)

    def expression(self, x):
        return (layer(x) for layer in self.layers)

    def mapped(self, x):
        return map(lambda layer: layer(x), self.layers)

    def zipped(self, x):
        return (layer(y) for layer, y in zip(self.layers, [x, x], strict=True))

    def modules(self, x):
        return zip(self.layers, [x, x], strict=True)

    def sliced(self, x):
        return itertools.islice(self.mapped(x), 2)

    def nested(self, x):
        return x, {'features': [self.mapped(x)]}

    async def asynchronous(self, x):
        for layer in self.layers:
            yield layer(x)

    # These are finished.

    def finished(self, x):
        return iter(self(x))

    def pairs(self, x):
        return zip(range(2), self(x), strict=True)

    def numbered(self, x):
        return enumerate(y * 2 for y in self(x))

    def pairs_of_words(self, x):
        return zip([[[float(n)] for n in range(12_000)]], [self(x)], strict=True)

    def words(self, x):
        return zip([[*range(25_000)]], [self(x)], strict=True)

    def items(self, x):
        return dict(enumerate(self(x))).items()


LATER = (
    *('generator', 'expression', 'mapped', 'zipped', 'modules', 'sliced', 'nested'),
    'asynchronous',
)
FINISHED = ('finished', 'pairs', 'numbered', 'items', 'pairs_of_words', 'words')
WRAPPERS = {
    'Frozen': nn.Frozen,
    'mirror': nn.mirror,
    'a rule': nn.stop_gradient(True),
}
OF_A_CLASS = nn.stop_gradient(Encoder, True, methods=[*LATER, *FINISHED])


def used(wrap: Any, how: str) -> Any:
    """A loss of a model that goes through what a wrapped method returns."""

    class Model(linen.Module):
        def setup(self):
            self.encoder = wrap(Encoder())

        def __call__(self, x):
            return self.encoder(x)

        def use(self, x):
            leaves = jax.tree.leaves([*getattr(self.encoder, how)(x)])
            return sum(jnp.sum(y) for y in leaves if isinstance(y, jax.Array))

    model = Model()
    variables = oracle.init(model, KEY, X)
    return jax.value_and_grad(lambda v: model.apply(v, X, method='use'))(variables)


@pytest.mark.parametrize('how', LATER)
@pytest.mark.parametrize('wrapper', WRAPPERS)
def test_what_runs_later_is_refused(wrapper: str, how: str) -> None:
    with pytest.raises(errors.BlockError, match=rf'\(\.\.\.\)\)\.{how} is or holds'):
        used(WRAPPERS[wrapper], how)


@pytest.mark.parametrize('how', FINISHED)
@pytest.mark.parametrize('wrapper', [*WRAPPERS, 'a class'])
def test_what_is_finished_is_not(wrapper: str, how: str) -> None:
    value, gradients = used(WRAPPERS.get(wrapper, lambda module: OF_A_CLASS()), how)
    assert value == used(lambda module: module, how)[0]
    assert oracle.is_zero(gradients)


@pytest.mark.parametrize('how', LATER)
def test_of_a_class_and_a_function(how: str) -> None:
    variables = oracle.init(Encoder(), KEY, X)
    with pytest.raises(errors.ArgumentTypeError, match='lazy iterator'):
        OF_A_CLASS().apply(variables, X, method=how)
    bound = Encoder().bind(variables)
    with pytest.raises(errors.ArgumentTypeError, match='lazy iterator'):
        nn.stop_gradient(lambda module: getattr(module, how)(X), True)(bound)

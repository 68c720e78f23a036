"""What other libraries look up on a wrapper: signatures, interceptors, protocols.

They are represented by the few lines of theirs that look something up.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen

from flax_sg import linen as nn
from tests.helpers import oracle

KEY = jax.random.key(7)
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: Any, *, training: bool = False) -> Any:
        x = linen.Dense(3, name='backbone')(x)
        return linen.Dense(2, name='head')(jnp.tanh(x) * (2.0 if training else 1.0))

    def encode(self, x: Any, scale: float = 1.0) -> Any:
        return scale * self(x)


PARAMS = oracle.init(Net(), KEY, X)['params']


# Signatures.


class Positional(linen.Module):
    def __call__(self, first, second=2, *rest, flag=True):
        return first


@pytest.mark.parametrize('view', [nn.Frozen, nn.mirror, nn.stop_gradient(True)])
@pytest.mark.parametrize('module', [Net(), Positional()])
def test_a_call_has_the_signature_of_the_module(view: Any, module: Any) -> None:
    expected = inspect.signature(module.__call__)
    wrapper = view(module)
    assert inspect.signature(wrapper.__call__) == expected
    assert inspect.signature(view(wrapper).__call__) == expected
    assert wrapper.__call__.__doc__ == module.__call__.__doc__
    assert wrapper.__call__.__self__ is wrapper
    bound = module.bind(module.init(KEY, X))
    assert inspect.signature(view(bound).__call__) == expected


# Interceptors.


def seen_by_interceptors(model: Any, use: Any) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != 'setup':
            assert context.orig_method.func.__name__ == context.method_name
            seen.append((type(context.module).__name__, context.method_name))
        return next_fun(*args, **kwargs)

    with linen.intercept_methods(note):
        use(model)
    return seen


class Helps(linen.Module):
    def setup(self):
        self.w = self.param('w', linen.initializers.ones, (2, 2))

    @linen.nowrap
    def helper(self):
        return self.w

    def __call__(self):
        return self.w


class Holds(linen.Module):
    wrap: Any

    @linen.compact
    def __call__(self, x):
        inner = self.wrap(Net(name='net'))
        x = inner(x) + linen.remat(lambda m, x: m(x))(inner, x)
        return x + inner.encode(X)


def test_what_interceptors_see_no_wrapper_of() -> None:
    """Inside of a model the same as without wrappers; of reads nothing."""

    def calls(wrap: Any) -> Any:
        use = lambda model: model.apply({'params': {'net': PARAMS}}, X)  # noqa: E731
        seen = seen_by_interceptors(Holds(wrap), use)
        # Flax makes a method of what is lifted, of the module that it is handed.
        return [call for call in seen if call[1] != '<lambda>']

    assert calls(nn.Frozen) == calls(lambda module: module)

    def reads(model: Any) -> Any:
        bound = model.bind({'params': {'w': jnp.ones((2, 2))}})
        return bound.helper(), bound.w, bound.get_variable('params', 'w')

    assert seen_by_interceptors(nn.Frozen(Helps()), reads) == []


@pytest.mark.parametrize(
    'use',
    [
        lambda m: m.init(KEY, X),
        lambda m: m.bind({'params': PARAMS})(X),
        lambda m: m.apply({'params': PARAMS}, X, method=lambda m, x: m.encode(x)),
    ],
)
def test_around_the_whole_model_interceptors_see_the_module_alone(use: Any) -> None:
    plain = seen_by_interceptors(Net(), use)
    found = seen_by_interceptors(nn.Frozen(nn.mirror(Net())), use)
    assert found == plain

"""What other libraries look up on a wrapper: signatures, interceptors, protocols.

They are represented by the few lines of theirs that look something up.
"""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen

import oracle
from flax_sg import linen as nn
from flax_sg.forms import wrappers
from oracle import assert_same, stopped

KEY = jax.random.key(7)
X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)


class Net(linen.Module):
    """A backbone and a head, with one more method."""

    @linen.compact
    def __call__(self, x: Any, *, training: bool = False) -> Any:
        x = linen.Dense(3, name='backbone')(x)
        return linen.Dense(2, name='head')(jnp.tanh(x) * (2.0 if training else 1.0))

    def encode(self, x: Any, scale: float = 1.0) -> Any:
        return scale * self(x)


PARAMS = Net().init(KEY, X)['params']
BY_HAND = {'frozen': lambda path: True, 'backbone': lambda p: p.startswith('backbone')}
WRAPPED = {
    'frozen': nn.Frozen(Net()),
    'backbone': nn.Frozen(Net(), 'backbone/**'),
}


@functools.cache
def grads_by_hand(name: str, method: Any = None) -> Any:
    def fn(params: Any, x: Any) -> Any:
        params = stopped(params, BY_HAND[name])
        return Net().apply({'params': params}, x, method=method)

    return oracle.grads(fn, PARAMS, X)


def grads_of(model: Any, method: Any) -> Any:
    def fn(params: Any, x: Any) -> Any:
        return model.apply({'params': params}, x, method=method)

    return oracle.grads(fn, PARAMS, X)


# Signatures.


class Positional(linen.Module):
    def __call__(self, first, second=2, *rest, flag=True):
        return first


class NoCall(linen.Module):
    def encode(self, x):
        return x


class Calls(linen.Module):
    """Its call is a field: a function, and no method."""

    __call__ = staticmethod(lambda x: x)


class OfItsOwn(nn.Frozen):
    def __call__(self, x, extra=None):
        return super().__call__(x)


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


def test_the_signature_of_a_class_of_wrappers_and_of_no_call() -> None:
    anything = inspect.signature(lambda self, *args, **kwargs: None).parameters
    for cls in (nn.Frozen, wrappers.Rewritten):
        assert inspect.signature(cls.__call__).parameters.keys() == anything.keys()
    assert inspect.signature(OfItsOwn(Net()).__call__).parameters.keys() == {
        'x',
        'extra',
    }
    own = OfItsOwn(Net()).__call__
    found = inspect.signature(nn.Frozen(OfItsOwn(Net())).__call__)
    assert found == inspect.signature(own)
    for module in (NoCall(), Calls()):
        found = inspect.signature(nn.Frozen(module).__call__).parameters
        assert list(found) == ['args', 'kwargs']


def test_a_method_that_was_taken_is_that_of_the_wrapper() -> None:
    for name, model in WRAPPED.items():
        found = oracle.grads(
            lambda p, x, m=model: m.bind({'params': p}).__call__(x), PARAMS, X
        )
        assert_same(found, grads_by_hand(name))
        for method in (model.__call__, model.encode):
            assert_same(grads_of(model, method=method), grads_by_hand(name))


# Interceptors.


def unflaxified(module: Any, variables: Any, *args: Any, **kwargs: Any) -> Any:
    """What penzai's `unflaxify_apply` keeps: a clone of the module called first."""
    calls: list[Any] = []

    def reify(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != 'setup' and not calls:
            calls.append((context.module.clone(), context.method_name))
        return next_fun(*args, **kwargs)

    with linen.intercept_methods(reify):
        jax.eval_shape(lambda: module.apply(variables, *args, **kwargs))
    ((kept, name),) = calls
    return lambda params, x: kept.apply({'params': params}, x, method=name)


@pytest.mark.parametrize(
    ('name', 'method'),
    [('frozen', None), ('backbone', 'encode'), ('backbone', Net.__call__)],
)
def test_what_a_library_keeps_of_the_first_call_is_frozen(
    name: str, method: Any
) -> None:
    fn = unflaxified(WRAPPED[name], {'params': PARAMS}, X, method=method)
    assert_same(oracle.grads(fn, PARAMS, X), grads_by_hand(name))


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


USES: dict[str, Any] = {
    'apply': lambda m: m.apply({'params': PARAMS}, X),
    'init': lambda m: m.init(KEY, X),
    'bind': lambda m: m.bind({'params': PARAMS})(X),
    'in a function': lambda m: m.apply(
        {'params': PARAMS}, X, method=lambda m, x: m.encode(x)
    ),
}


class Helps(linen.Module):
    """Gives its parameter away."""

    def setup(self):
        self.w = self.param('w', linen.initializers.ones, (2, 2))

    @linen.nowrap
    def helper(self):
        return self.w

    def __call__(self):
        return self.w


class Holds(linen.Module):
    """Calls a wrapper, itself and in a lifted function."""

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


@pytest.mark.parametrize('use', USES)
def test_a_wrapper_that_is_the_whole_model_is_seen_around_the_module(use: str) -> None:
    plain = seen_by_interceptors(Net(), USES[use])
    first = plain[0][1]
    for view, name in ((nn.Frozen, 'Frozen'), (nn.mirror, 'Mirror')):
        found = seen_by_interceptors(view(Net()), USES[use])
        assert found == [(name, first), *plain]
    twice = seen_by_interceptors(nn.Frozen(nn.mirror(Net())), USES[use])
    assert twice == [('Frozen', first), ('Mirror', first), *plain]


def test_captured_results_are_those_of_the_module_alone() -> None:
    def captured(model: Any, around: Any) -> Any:
        with linen.intercept_methods(around):
            return model.apply(
                {'params': PARAMS},
                X,
                capture_intermediates=True,
                mutable=['intermediates'],
                method='encode',
            )

    through = lambda next_fun, args, kwargs, context: next_fun(*args, **kwargs)  # noqa: E731
    for model in WRAPPED.values():
        assert_same(captured(model, through), captured(Net(), through))


# Methods that a module may override.


def test_without_methods_of_their_own_they_are_those_of_flax() -> None:
    frozen = nn.Frozen(Net())
    for name in ('apply', 'init', 'init_with_output', 'lazy_init'):
        assert getattr(frozen, name).__func__ is getattr(linen.Module, name)
        assert getattr(nn.Frozen, name) is getattr(linen.Module, name)

"""``stop_gradient`` and ``train_only`` as people write them.

Around calls, and of module classes, methods and functions.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

from flax_sg import errors, filters
from flax_sg import linen as nn
from flax_sg.forms.block_decorator import BlockDecorator
from tests.helpers import oracle
from tests.helpers.left_over import forget_contexts


@pytest.fixture(autouse=True)
def _no_programs_of_other_tests() -> None:
    """Or they count as read in a block that has the same number."""
    forget_contexts()


X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
KEY = jax.random.key(0)


def stopped(variables: Any, *paths: str) -> Any:
    """Variables of which the parameters below these paths are stopped by hand."""
    params = oracle.stopped(variables['params'], oracle.below(*paths))
    return {**variables, 'params': params}


def assert_stops(model: Any, plain: Any, *paths: str, rest: Any = ()) -> None:
    """``model`` is ``plain`` but for the gradient of the parameters at these paths."""
    variables = oracle.init(plain, KEY, X, *rest)
    shapes = jax.eval_shape(lambda: model.init(KEY, X, *rest))
    assert shapes == jax.eval_shape(lambda: variables)
    oracle.assert_same_function(
        lambda v, x: model.apply(v, x, *rest),
        lambda v, x: plain.apply(stopped(v, *paths), x, *rest),
        *(variables, X),
    )


class Two(fnn.Module):
    width: int = 3

    def setup(self):
        self.enc = fnn.Dense(self.width)
        self.dec = fnn.Dense(3)

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        return jnp.tanh(self.enc(x))

    def decode(self, x):
        return self.dec(x)

    @property
    def kernel(self):
        return self.enc.variables['params']['kernel']


def body() -> Any:
    """A function of a module. A new one each time: Flax marks compact methods."""

    def call(self, x):
        return fnn.Dense(3, name='dec')(jnp.tanh(fnn.Dense(3, name='enc')(x)))

    return call


class Compact(fnn.Module):
    __call__ = fnn.compact(body())


class Outer(fnn.Module):
    """Makes modules of a class, named and unnamed, at a path below the root."""

    cls: Any

    @fnn.compact
    def __call__(self, x):
        return self.cls()(self.cls(name='named')(x))


STOP = nn.stop_gradient('enc/**')

# Classes of modules, each with a plain one, and the parameters that are stopped.
Case = tuple[Any, Any, tuple[str, ...]]
dense = functools.partial(fnn.Dense, 3)
of_dense = nn.stop_gradient(dense, 'kernel')
CLASSES: dict[str, Case] = {
    'of setup': (STOP(Two), Two, ('enc',)),
    'compact': (STOP(Compact), Compact, ('enc',)),
    'train only': (nn.train_only(Two, 'enc/**'), Two, ('dec',)),
    'a partial': (of_dense, dense, ('kernel',)),
    'at two depths': (
        lambda: Outer(functools.partial(Outer, STOP(Compact))),
        lambda: Outer(functools.partial(Outer, Compact)),
        (
            *('Outer_0/Compact_0/enc', 'Outer_0/named/enc'),
            *('named/Compact_0/enc', 'named/named/enc'),
        ),
    ),
}


def subclass(base: Any) -> Any:
    class Sub(base):
        factor: float = 2.0

        def decode(self, x):
            return self.factor * super().decode(x)

    return Sub


def method(decorate: Any) -> Any:
    class WithMethod(Two):
        @decorate
        def encode(self, x):
            """Words."""
            return super().encode(self.dec(x))

    return WithMethod


def of_children(decorate: Any) -> Any:
    """Paths are those of the module that is given, not of the one that calls."""
    fn = decorate(lambda module, x: module(x))

    class Uses(Two):
        def __call__(self, x):
            return fn(self.dec, jnp.tanh(fn(self.enc, x)))

    return Uses


def bound_method(decorate: Any) -> Any:
    class Uses(Two):
        def __call__(self, x):
            return self.dec(jnp.tanh(decorate(self.enc.__call__)(x)))

    return Uses


def plain(target: Any) -> Any:
    return target


KERNEL = nn.stop_gradient('kernel')
for _name, _make, _stop, _paths in (
    ('a method', method, STOP, ('enc',)),
    ('a function of children', of_children, KERNEL, ('enc/kernel', 'dec/kernel')),
    ('a bound method', bound_method, KERNEL, ('enc/kernel',)),
    ('a subclass of a lifted class', lambda stop: subclass(stop(Two)), STOP, ('enc',)),
):
    CLASSES[_name] = (_make(_stop), _make(plain), _paths)


def with_call(call: Any) -> Any:
    return type('Compact', (fnn.Module,), {'__call__': call, '__module__': __name__})


class Cell(fnn.Module):
    @fnn.compact
    def __call__(self, x, _):
        x = body()(self, x)
        return x, x


CLASSES |= {
    'compact above': (with_call(STOP(fnn.compact(body()))), Compact, ('enc',)),
    'compact below': (with_call(fnn.compact(STOP(body()))), Compact, ('enc',)),
    'two decorators': (
        with_call(STOP(nn.stop_gradient('dec/bias')(fnn.compact(body())))),
        Compact,
        ('enc', 'dec/bias'),
    ),
}
# Over and under Flax's own: one transform on both sides, to be compiled alike.
for _name, _lift in (
    ('jit', fnn.jit),
    ('vmap', functools.partial(fnn.vmap, **oracle.STACKED)),
    ('scan', functools.partial(fnn.scan, length=3, **oracle.STACKED)),
):
    _cls = Cell if _name == 'scan' else Compact
    if _name != 'vmap':
        CLASSES[f'{_name}, over'] = (STOP(_lift(_cls)), _lift(_cls), ('enc',))
    if _name != 'scan':
        CLASSES[f'{_name}, under'] = (_lift(STOP(_cls)), _lift(_cls), ('enc',))


@pytest.mark.parametrize('name', CLASSES)
def test_a_lifted_class_is_the_class_with_stopped_parameters(name):
    lifted, plain, paths = CLASSES[name]
    rest = (None,) if name.startswith('scan') else ()
    # The second time JAX has the traces of the first one.
    for _ in range(2 if name.startswith('jit') else 1):
        assert_stops(lifted(), plain(), *paths, rest=rest)
    if 'over' not in name and 'under' not in name:  # One by one, not compiled.
        oracle.assert_same(lifted().init(KEY, X), plain().init(KEY, X))


def test_a_lifted_class_is_the_class_by_name():
    lifted = nn.stop_gradient(fnn.Dense, 'kernel')
    for attribute in ('__name__', '__qualname__', '__module__', '__doc__'):
        assert getattr(lifted, attribute) == getattr(fnn.Dense, attribute)
    assert issubclass(lifted, fnn.Dense) and lifted is not fnn.Dense
    assert repr(lifted(3)) == repr(fnn.Dense(3))
    model = lifted(features=5, name='here')
    assert (model.features, model.name) == (5, 'here')
    assert model == model.clone() and hash(model) == hash(model.clone())
    partial = functools.partial(fnn.Dense, 3, use_bias=False)
    of_partial = nn.stop_gradient(partial, 'kernel')
    assert isinstance(of_partial, functools.partial)
    assert (of_partial.args, of_partial.keywords) == ((3,), {'use_bias': False})
    encode = method(STOP).encode
    assert (encode.__name__, encode.__doc__) == ('encode', 'Words.')
    shapes = jax.eval_shape(Outer(CLASSES['compact above'][0]).init, KEY, X)
    assert set(shapes['params']) == {'Compact_0', 'named'}


@pytest.mark.parametrize(
    ('methods', 'encode', 'decode'),
    [
        (['encode'], ('enc',), ()),
        (('encode', 'decode'), ('enc',), ('dec',)),
        ('decode', (), ('dec',)),
    ],
)
def test_methods(methods, encode, decode):
    class Uses(Two):
        def __call__(self, x):
            return self.encode(x), self.decode(x), self.dec(x), self.enc(x)

    def expected(v, x):
        call = Two().apply
        return (
            call(stopped(v, *encode), x, method='encode'),
            call(stopped(v, *decode), x, method='decode'),
            call(v, x, method=lambda mdl, x: mdl.dec(x)),
            call(v, x, method=lambda mdl, x: mdl.enc(x)),
        )

    lifted = nn.stop_gradient(Uses, '**', methods=methods)
    oracle.assert_same_function(lifted().apply, expected, Uses().init(KEY, X), X)


# Any function: the block is that of a ``with`` statement in its first line.


MODEL = Two()
VARIABLES = oracle.init(MODEL, KEY, X)
PARAMS = VARIABLES['params']


def call(params: Any, x: Any) -> Any:
    return MODEL.apply({'params': params}, x)


class Trainer:
    """No Module: its methods are functions like any other."""

    factor = 1.0

    @nn.stop_gradient('enc/**')
    def method(self, params, x):
        return call(params, x) * self.factor

    @nn.stop_gradient('enc/**')
    @staticmethod
    def static(params, x):
        return call(params, x)

    def __call__(self, params, x):
        return call(params, x)


@nn.train_only('dec/**')
def decorated(params, x):
    """Words."""
    return call(params, x)


JITTED = jax.jit(call)
ANY_FUNCTION: dict[str, Any] = {
    'a decorator': decorated,
    'target first': nn.stop_gradient(call, 'enc/**'),
    'a partial of apply': lambda p, x: STOP(functools.partial(MODEL.apply, x=x))(
        {'params': p}
    ),
    'a method': Trainer().method,
    'an object that is called': STOP(Trainer()),
    'a static method': Trainer.static,
    'a jitted function': STOP(JITTED),
    'in jit and of a jitted function': jax.jit(STOP(JITTED)),
}


@functools.cache
def grads_by_hand(*paths: str) -> Any:
    """The gradients of ``call`` with these parameters stopped by hand."""
    return oracle.grads(
        lambda p, x: MODEL.apply(stopped({'params': p}, *paths), x), PARAMS, X
    )


@pytest.mark.parametrize('case', ANY_FUNCTION)
def test_any_function(case):
    for _ in range(2 if 'jit' in case else 1):
        actual = oracle.grads(ANY_FUNCTION[case], PARAMS, X)
        oracle.assert_same(actual, grads_by_hand('enc'))
    # Nothing outside of the call, and no cache, has taken it over.
    fn = JITTED if 'jit' in case else call
    oracle.assert_same(oracle.grads(fn, PARAMS, X), grads_by_hand())


def test_two_decorated_versions_of_one_jitted_function():
    of_enc, of_dec = nn.stop_gradient(JITTED, 'enc/**'), nn.train_only(JITTED, 'enc/**')
    for fn, path in 2 * [(of_enc, 'enc'), (of_dec, 'dec')]:
        oracle.assert_same(oracle.grads(fn, PARAMS, X), grads_by_hand(path))


def test_a_decorated_function_looks_like_the_function():
    assert (decorated.__name__, decorated.__doc__) == ('decorated', 'Words.')
    assert str(inspect.signature(decorated)) == '(params, x)'
    for fn in (functools.partial(call, PARAMS), Trainer()):
        assert inspect.signature(STOP(fn)) == inspect.signature(fn)
    jitted = jax.jit(nn.stop_gradient(MODEL.apply, 'enc/**'), static_argnames='method')
    variables = {'params': PARAMS}
    expected = MODEL.apply(variables, X, method='encode')
    oracle.assert_same(jitted(variables, X, method='encode'), expected)


def test_a_method_that_flax_does_not_wrap_sets_up_nothing():
    class Kept(fnn.Module):
        def setup(self):
            self.w = self.param('w', fnn.initializers.ones, (3,))

        def __call__(self, x):
            return x * self.w

    mapped = fnn.vmap(Kept, axis_size=2, **oracle.STACKED)

    class Mean(mapped):
        @fnn.nowrap
        def __call__(self, x):
            return super().__call__(x).mean(0)

    for cls in (Mean, nn.stop_gradient(Mean, True)):
        assert cls().init(KEY, X)['params']['w'].shape == (2, 3)


class Kinds(fnn.Module):
    """What a class may have beside methods, each computed of both layers."""

    def setup(self):
        self.enc = fnn.Dense(3)
        self.dec = fnn.Dense(3)

    def __call__(self, x):
        return self.dec(self.enc(x))

    @staticmethod
    def static(module, x):
        return module.dec(module.enc(x))

    @classmethod
    def of_class(cls, module, x):
        assert type(module) is cls
        return module.dec(module.enc(x))

    def by_class(self, x):
        return self.of_class(self, x)

    @property
    def product(self):
        kernels = [m.variables['params']['kernel'] for m in (self.enc, self.dec)]
        return kernels[0] @ kernels[1]

    @functools.cached_property
    def kept(self):
        return self.product + 1.0


USES: dict[str, Any] = {
    'static': lambda model, x: model.static(model, x),
    'of_class': lambda model, x: model.by_class(x),
    'product': lambda model, x: x @ model.product,
    'kept': lambda model, x: x @ model.kept @ model.kept,
}


class Parent(fnn.Module):
    cls: Any

    def setup(self):
        self.net = self.cls()

    def __call__(self, x, use):
        return use(self.net, x)


@pytest.mark.parametrize('name', USES)
def test_static_methods_and_properties_stay_what_they_are(name: str) -> None:
    use = USES[name]
    lifted = nn.stop_gradient(Kinds, 'enc/**', methods=[name])
    static = inspect.getattr_static
    plain = {'net': Kinds().init(KEY, X)['params']}
    assert type(static(lifted, name)).__name__ in (
        type(static(Kinds, name)).__name__,
        '_DescriptorWrapper',
    )
    assert callable(getattr(lifted, name)) == callable(getattr(Kinds, name))
    oracle.assert_same_function(
        lambda v, x: Parent(lifted).apply(v, x, use),
        lambda v, x: Parent(Kinds).apply(stopped(v, 'net/enc'), x, use),
        *({'params': plain}, X),
    )


# Filters and options, and what an error says of a call.


def frozen(apply: Any) -> set[str]:
    """The layers that get no gradient."""
    grads = jax.grad(lambda v: jnp.sum(apply(v, X)))(VARIABLES)['params']
    return {name for name in grads if oracle.is_zero(grads[name])}


@pytest.mark.parametrize(
    ('where', 'stopped', 'trained'),
    [
        ('enc/**', {'enc'}, {'dec'}),
        (True, {'enc', 'dec'}, set()),
        (False, set(), {'enc', 'dec'}),
        (~filters.as_filter('dec/**'), {'enc'}, {'dec'}),
    ],
)
def test_polarity(where, stopped, trained):
    # `where` names what stop_gradient stops, and what train_only trains (hazard 21).
    assert frozen(nn.stop_gradient(where)(MODEL.apply)) == stopped
    assert frozen(nn.train_only(where)(MODEL.apply)) == trained


@pytest.mark.parametrize('make', [nn.stop_gradient, nn.train_only])
def test_options(make):
    rewrite = make('a', collections=['cache', 'params'], unused='ignore')
    assert isinstance(rewrite, BlockDecorator)
    assert make(where='enc/**') == make('enc/**')
    of_class = make(Two, where='enc/**')()
    assert frozen(of_class.apply) == frozen(make('enc/**')(MODEL.apply))
    assert (rewrite.collections, rewrite.unused) == (('cache', 'params'), 'ignore')
    make(Two, 'no', collections='cache', unused='ignore')().apply(VARIABLES, X)
    with pytest.raises(errors.UnusedFilterError):
        make(Two, 'enc/kernel', collections='cache')().apply(VARIABLES, X)
    with pytest.raises(TypeError, match='colections'):
        make('enc/**', colections='params')
    with pytest.raises(TypeError, match='positional argument'):
        make(Two, 'enc/**', 'dec/**')
    with pytest.raises(TypeError, match='where'):
        make()
    with pytest.raises(AttributeError, match='other'):
        make(Two, 'enc/**', methods=['other'])


# Errors say which call they come from, whatever line the traceback ends at.


def of_block(where: Any) -> Any:
    with nn.stop_gradient(where):  # opened: block
        return MODEL.apply(VARIABLES, X)


class Opens(Two):
    where: Any = None

    def __call__(self, x):
        with nn.stop_gradient(self.where):  # opened: method, init
            return super().__call__(x)


ORIGINS: dict[str, Callable[[Any], Any]] = {
    'block': of_block,
    'method': lambda where: Opens(where=where).apply(VARIABLES, X),
    'init': lambda where: Opens(where=where).init(KEY, X),
    'fn': lambda w: nn.stop_gradient(MODEL.apply, w)(VARIABLES, X),  # opened: fn
    'module': lambda w: nn.Frozen(MODEL, w).apply(VARIABLES, X),  # opened: module
}
LINES = {
    name: number
    for number, line in enumerate(Path(__file__).read_text().splitlines(), start=1)
    for name in line.partition('# opened: ')[2].split(', ')
}


@pytest.mark.parametrize('name', ORIGINS)
def test_an_error_says_which_call_it_comes_from(name):
    with pytest.raises(errors.UnusedFilterError) as caught:
        ORIGINS[name]('typo/**')
    place = f'test_lifted.py:{LINES[name]}'
    is_module = name == 'module'
    call = 'nn.Frozen(Two, ' if is_module else 'stop_gradient('
    origin = f"From {call}Glob('typo/**')), opened at {place}."
    assert [note for note in caught.value.__notes__ if 'From' in note] == [origin]

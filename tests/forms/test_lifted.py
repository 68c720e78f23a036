"""Module classes, methods and functions of a module, lifted by a rewrite."""

import concurrent.futures
import functools
import inspect
import threading
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import pytest

import oracle
import sequences
from flax_sg import errors
from flax_sg import linen as nn
from flax_sg.forms import rewrites


@pytest.fixture(autouse=True)
def _no_programs_of_other_tests() -> None:
    """Or they count as read in a block that has the same number."""
    sequences.forget_contexts()


X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
KEY = jax.random.key(0)


def grads_of(model: Any, variables: Any, **kwargs: Any) -> Any:
    """The gradient of each output with respect to variables and input."""
    return oracle.grads(lambda v, x: model.apply(v, x, **kwargs), variables, X)


def stopped(variables: Any, *paths: str) -> Any:
    """Variables of which the parameters below these paths are stopped by hand."""
    return {
        **variables,
        'params': oracle.stopped(
            variables['params'],
            lambda path: any(path == p or path.startswith(p + '/') for p in paths),
        ),
    }


def assert_stops(model: Any, plain: Any, *paths: str, **kwargs: Any) -> None:
    """``model`` is ``plain`` but for the gradient of the parameters at these paths."""
    variables = plain.init(KEY, X, **kwargs)
    shapes = jax.eval_shape(lambda: model.init(KEY, X, **kwargs))
    assert shapes == jax.eval_shape(lambda: variables)
    oracle.assert_same(
        model.apply(variables, X, **kwargs), plain.apply(variables, X, **kwargs)
    )
    oracle.assert_same(
        grads_of(model, variables, **kwargs),
        oracle.grads(
            lambda v, x: plain.apply(stopped(v, *paths), x, **kwargs), variables, X
        ),
    )


def assert_same_init(model: Any, plain: Any) -> None:
    oracle.assert_same(model.init(KEY, X), plain.init(KEY, X))


class Two(fnn.Module):
    """Two layers by setup, and methods beside ``__call__``."""

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


class Compact(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        return fnn.Dense(3, name='dec')(jnp.tanh(fnn.Dense(3, name='enc')(x)))


class Outer(fnn.Module):
    """Makes modules of a class, named and unnamed, at a path below the root."""

    cls: Any

    @fnn.compact
    def __call__(self, x):
        return self.cls()(self.cls(name='named')(x))


# Classes.


@pytest.mark.parametrize('plain', [Two, Compact])
@pytest.mark.parametrize('paths', [('enc',), ('enc/kernel', 'dec/bias'), ('dec',)])
def test_a_class(plain, paths):
    where = [*paths, *(f'{path}/**' for path in paths)]
    lifted = nn.stop_gradient(plain, where, unused='ignore')
    assert_stops(lifted(), plain(), *paths)
    assert_same_init(lifted(), plain())


def test_a_class_as_target_of_the_value():
    lifted = nn.stop_gradient('enc/**')(Two)
    assert_stops(lifted(), Two(), 'enc')
    assert_stops(nn.stop_gradient('enc/**').lift(Two)(), Two(), 'enc')
    assert_stops(nn.train_only('enc/**')(Two)(), Two(), 'dec')
    assert_stops(nn.train_only(Two, 'enc/**')(), Two(), 'dec')


def test_a_class_decorator():
    @nn.stop_gradient('enc/**')
    class Decorated(Two):
        """Words."""

    assert Decorated.__name__ == 'Decorated'
    assert Decorated.__doc__ == 'Words.'
    assert_stops(Decorated(), Two(), 'enc')


def test_a_lifted_class_keeps_its_name_and_its_paths():
    lifted = nn.stop_gradient(fnn.Dense, 'kernel')
    for attribute in ('__name__', '__qualname__', '__module__', '__doc__'):
        assert getattr(lifted, attribute) == getattr(fnn.Dense, attribute)
    assert issubclass(lifted, fnn.Dense)
    assert lifted is not fnn.Dense
    cls = functools.partial(lifted, 3)
    plain = Outer(functools.partial(fnn.Dense, 3))
    assert set(Outer(cls).init(KEY, X)['params']) == {'Dense_0', 'named'}
    assert_same_init(Outer(cls), plain)
    assert repr(lifted(3)) == repr(fnn.Dense(3))
    assert_stops(Outer(cls), plain, 'Dense_0/kernel', 'named/kernel')


def test_the_class_that_was_lifted_is_left_alone():
    def now():
        # Flax itself marks the fields of a class that is subclassed.
        return {k: v for k, v in vars(Two).items() if k != '__dataclass_fields__'}

    before = now()
    nn.stop_gradient(Two, 'enc/**', methods=['encode', '__call__'])
    after = now()
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] is not before[name]] == []


def test_a_partial_of_a_class():
    partial = functools.partial(fnn.Dense, 3, use_bias=False)
    lifted = nn.stop_gradient(partial, 'kernel')
    assert isinstance(lifted, functools.partial)
    assert (lifted.args, lifted.keywords) == ((3,), {'use_bias': False})
    assert_stops(lifted(), partial(), 'kernel')
    deeper = functools.partial(functools.partial(fnn.Dense, use_bias=False), 3)
    assert_stops(nn.stop_gradient('kernel')(deeper)(), partial(), 'kernel')


def test_fields_of_a_lifted_class():
    lifted = nn.stop_gradient(Two, 'enc/**')
    model = lifted(width=5, name='here')
    assert (model.width, model.name) == (5, 'here')
    assert model.clone(width=4).width == 4
    assert model == lifted(width=5, name='here')
    assert hash(model) == hash(lifted(width=5, name='here'))
    assert_stops(lifted(5), Two(5), 'enc')


def test_subclasses_of_a_lifted_class():
    class Sub(nn.stop_gradient(Two, 'enc/**')):
        factor: float = 2.0

        def decode(self, x):
            return self.factor * super().decode(x)

    class Plain(Two):
        def decode(self, x):
            return 2.0 * super().decode(x)

    assert_stops(Sub(), Plain(), 'enc')

    class Overrides(nn.stop_gradient(Two, 'enc/**')):
        def __call__(self, x):
            return self.decode(x) + super().__call__(x)

    class PlainOverrides(Two):
        def __call__(self, x):
            return self.decode(x) + super().__call__(x)

    assert_stops(Overrides(), PlainOverrides(), 'enc')


def test_a_class_lifted_twice():
    once = nn.stop_gradient(Two, 'enc/**')
    assert_stops(nn.stop_gradient(once, 'dec/kernel')(), Two(), 'enc', 'dec/kernel')
    assert_stops(nn.stop_gradient(once, 'enc/**')(), Two(), 'enc')


def test_methods():
    class Uses(Two):
        def __call__(self, x):
            return self.encode(x), self.decode(x), self.dec(x), self.enc(x)

    def expected(encode, decode, v, x):
        call = Two().apply
        return (
            call(stopped(v, *encode), x, method='encode'),
            call(stopped(v, *decode), x, method='decode'),
            call(v, x, method=lambda mdl, x: mdl.dec(x)),
            call(v, x, method=lambda mdl, x: mdl.enc(x)),
        )

    variables = Uses().init(KEY, X)
    cases: list[tuple[Any, tuple[str, ...], tuple[str, ...]]] = [
        (['encode'], ('enc',), ()),
        (('encode', 'decode'), ('enc',), ('dec',)),
        ('decode', (), ('dec',)),
        ([], (), ()),
    ]
    for methods, encode, decode in cases:
        lifted = nn.stop_gradient(Uses, '**', methods=methods)
        oracle.assert_same(
            grads_of(lifted(), variables),
            oracle.grads(functools.partial(expected, encode, decode), variables, X),
        )
    lifted = nn.stop_gradient('**').lift(Uses, methods=['encode'])
    oracle.assert_same(
        grads_of(lifted(), variables),
        oracle.grads(functools.partial(expected, ('enc',), ()), variables, X),
    )


@pytest.mark.parametrize(
    ('methods', 'near'),
    [
        (['encodee'], "'encode'"),
        ('decod', "'decode'"),
        (['encode', 'call'], "'__call__'"),
    ],
)
def test_an_unknown_method(methods, near):
    for lift in (
        lambda: nn.stop_gradient(Two, '**', methods=methods),
        lambda: nn.stop_gradient('**').lift(Two, methods),
        lambda: nn.stop_gradient(functools.partial(Two, 3), '**', methods=methods),
    ):
        with pytest.raises(
            errors.UnknownNameError, match='Two has no method'
        ) as caught:
            lift()
        assert near in str(caught.value)


@pytest.mark.parametrize('methods', [['width'], ['nothing']])
def test_a_field_is_no_method(methods):
    with pytest.raises(errors.UnknownNameError):
        nn.stop_gradient(Two, '**', methods=methods)


def test_a_setup_method_cannot_be_left_out_of_reach():
    # What setup keeps is seen by the methods that are lifted.
    class Keeps(fnn.Module):
        def setup(self):
            self.w = self.param('w', fnn.initializers.ones, (3, 3))
            self.w2 = jnp.tanh(self.w)

        def __call__(self, x):
            return x @ self.w2 + x @ self.w

    assert_stops(nn.stop_gradient(Keeps, 'w')(), Keeps(), 'w')


# Methods.


def test_a_method_of_a_module_with_setup():
    class Decorated(Two):
        @nn.stop_gradient('enc/**')
        def encode(self, x):
            return super().encode(self.dec(x))

    class Plain(Two):
        def encode(self, x):
            return super().encode(self.dec(x))

    assert_stops(Decorated(), Plain(), 'enc')
    assert_stops(Decorated(), Plain(), 'enc', method='encode')


@pytest.mark.parametrize('order', ['above', 'below'])
def test_a_compact_method(order):
    def body(self, x):
        return fnn.Dense(3, name='dec')(jnp.tanh(fnn.Dense(3, name='enc')(x)))

    stop = nn.stop_gradient('enc/**')

    class Decorated(fnn.Module):
        if order == 'above':
            __call__ = stop(fnn.compact(body))
        else:
            __call__ = fnn.compact(stop(body))

    assert_stops(Decorated(), Compact(), 'enc')
    assert_same_init(Decorated(), Compact())
    shapes = jax.eval_shape(Outer(Decorated).init, KEY, X)
    assert set(shapes['params']) == {'Decorated_0', 'named'}


def test_a_method_keeps_its_name_and_docstring():
    class Decorated(Two):
        @nn.stop_gradient('enc/**')
        def encode(self, x):
            """Words."""
            return super().encode(x)

    assert Decorated.encode.__name__ == 'encode'
    assert Decorated.encode.__doc__ == 'Words.'


def test_a_method_with_arguments_of_every_kind():
    class Decorated(Two):
        @nn.stop_gradient('enc/**')
        def __call__(self, x, *more, scale, flag=True, **rest):
            y = super().__call__(x) * scale
            for other in (*more, *rest.values()):
                y = y + other
            return y if flag else -y

    variables = Two().init(KEY, X)
    args, kwargs = (X, 2 * X), {'scale': 3.0, 'flag': False, 'last': X}
    actual = oracle.grads(lambda v: Decorated().apply(v, *args, **kwargs), variables)
    expected = oracle.grads(
        lambda v: -(Two().apply(stopped(v, 'enc'), X) * 3.0 + 2 * X + X), variables
    )
    oracle.assert_same(actual, expected)


def test_two_decorators_on_a_method():
    class Decorated(Two):
        @nn.stop_gradient('enc/**')
        @nn.stop_gradient('dec/bias')
        def __call__(self, x):
            return super().__call__(x)

    assert_stops(Decorated(), Two(), 'enc', 'dec/bias')


def test_a_property():
    class Decorated(Two):
        @property
        @nn.stop_gradient('enc/**')
        def kernel(self):
            return self.enc.variables['params']['kernel']

        def __call__(self, x):
            y = super().__call__(x)
            return y @ self.kernel, y @ super().kernel

    variables = Two().init(KEY, X)

    def expected(v, x):
        kernel = v['params']['enc']['kernel']
        y = Two().apply(v, x)
        return y @ jax.lax.stop_gradient(kernel), y @ kernel

    oracle.assert_same(
        grads_of(Decorated(), variables), oracle.grads(expected, variables, X)
    )


# Functions of a module.


def test_a_function():
    def fn(mdl, x, *, scale=1.0):
        return mdl.decode(mdl.encode(x)) * scale

    lifted = nn.stop_gradient(fn, 'enc/**')
    assert lifted.__name__ == 'fn'

    class Uses(Two):
        def __call__(self, x):
            return lifted(self, x, scale=2.0) + fn(self, x)

    variables = Two().init(KEY, X)

    def expected(v, x):
        return Two().apply(stopped(v, 'enc'), x) * 2.0 + Two().apply(v, x)

    oracle.assert_same(
        grads_of(Uses(), variables), oracle.grads(expected, variables, X)
    )
    oracle.assert_same(
        oracle.grads(
            lambda v, x: lifted(Two().bind(v), x, scale=2.0) + Two().apply(v, x),
            variables,
            X,
        ),
        oracle.grads(expected, variables, X),
    )


def test_a_function_of_a_child():
    # The paths are those of the module that is given, not of the one that calls.
    lifted = nn.stop_gradient(lambda mdl, x: mdl(x), 'kernel')

    class Uses(Two):
        def __call__(self, x):
            return lifted(self.dec, jnp.tanh(lifted(self.enc, x)))

    assert_stops(Uses(), Two(), 'enc/kernel', 'dec/kernel')


def test_a_function_as_a_decorator_with_a_child_made_in_it():
    @nn.stop_gradient('new/**')
    def make(mdl, x):
        return fnn.Dense(3, name='new')(x) + mdl.param(
            'w', fnn.initializers.ones, (1, 3)
        )

    class Uses(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            return make(self, x)

    class Plain(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            y = fnn.Dense(3, name='new')(x)
            return y + self.param('w', fnn.initializers.ones, (1, 3))

    assert_stops(Uses(), Plain(), 'new')


def test_a_bound_method():
    class Uses(Two):
        def __call__(self, x):
            return nn.stop_gradient(self.encode, 'enc/**')(x) + self.encode(x)

    variables = Two().init(KEY, X)

    def expected(v, x):
        encode = functools.partial(Two().apply, method='encode')
        return encode(stopped(v, 'enc'), x) + encode(v, x)

    oracle.assert_same(
        grads_of(Uses(), variables), oracle.grads(expected, variables, X)
    )

    def outside(v, x):
        bound = Two().bind(v)
        return nn.stop_gradient('enc/**')(bound.encode)(x) + bound.encode(x)

    oracle.assert_same(
        oracle.grads(outside, variables, X), oracle.grads(expected, variables, X)
    )


def test_a_bound_method_of_a_child():
    class Uses(Two):
        def __call__(self, x):
            return self.dec(jnp.tanh(nn.stop_gradient(self.enc.__call__, 'kernel')(x)))

    assert_stops(Uses(), Two(), 'enc/kernel')


def test_what_cannot_be_lifted():
    for target in (3, X, int, 'enc', None):
        with pytest.raises(errors.ArgumentTypeError):
            pytest.fail(f'{nn.stop_gradient(target, "enc/**")} from {target}')
        with pytest.raises(errors.ArgumentTypeError):
            pytest.fail(f'{nn.stop_gradient("enc/**")(target)} from {target}')


# Any function: the block is that of a ``with`` statement in its first line.


MODEL = Two()
PARAMS = MODEL.init(KEY, X)['params']


def call(params: Any, x: Any) -> Any:
    return MODEL.apply({'params': params}, x)


def stopped_call(*paths: str) -> Any:
    """``call`` with these parameters stopped by hand."""
    return lambda p, x: MODEL.apply(stopped({'params': p}, *paths), x)


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

    @staticmethod
    @nn.stop_gradient('enc/**')
    def decorated_first(params, x):
        return call(params, x)

    @nn.stop_gradient('enc/**')
    @classmethod
    def of_class(cls, params, x):
        return call(params, x) * cls.factor

    def __call__(self, params, x):
        return call(params, x)


@nn.train_only('dec/**')
def decorated(params, x):
    """Words."""
    return call(params, x)


def nested(params, x):
    @nn.stop_gradient('enc/**')
    def countdown(n):
        return countdown(n - 1) if n else call(params, x)

    return countdown(3)


STOP = nn.stop_gradient('enc/**')
JITTED = jax.jit(call)
ANY_FUNCTION: dict[str, Any] = {
    'a decorator': decorated,
    'target first': nn.stop_gradient(call, 'enc/**'),
    'a predicate': nn.stop_gradient(call, lambda path: path.startswith('enc')),
    'a lambda': STOP(lambda p, x: call(p, x)),
    'a bound method of an unbound module': lambda p, x: STOP(MODEL.apply)(
        {'params': p}, x
    ),
    'apply of a bound module': lambda p, x: STOP(MODEL.bind({'params': p}).apply)(
        {'params': p}, x
    ),
    'a partial of apply': lambda p, x: STOP(functools.partial(MODEL.apply, x=x))(
        {'params': p}
    ),
    'a partial': lambda p, x: STOP(functools.partial(call, p))(x),
    'keywords alone': lambda p, x: STOP(call)(params=p, x=x),
    'an unbound module first': lambda p, x: STOP(lambda m: m.apply({'params': p}, x))(
        MODEL
    ),
    'a module made in it': lambda p, x: STOP(lambda _: Two().apply({'params': p}, x))(
        MODEL
    ),
    'a method': Trainer().method,
    'a bound method': STOP(functools.partial(Trainer.__call__, Trainer())),
    'an object that is called': STOP(Trainer()),
    'a static method': Trainer.static,
    'a static method, decorated first': Trainer.decorated_first,
    'a class method': Trainer.of_class,
    'a class method of an instance': Trainer().of_class,
    'a jitted function': STOP(JITTED),
    'in jit': jax.jit(STOP(call)),
    'in jit and of a jitted function': jax.jit(STOP(JITTED)),
    'a gradient': lambda p, x: jax.vjp(STOP(call), p, x)[0],
    'vmap': lambda p, x: jax.vmap(STOP(call), (None, 0))(p, x),
    'checkpoint': jax.checkpoint(STOP(call)),
    'recursion': nested,
    'twice': STOP(nn.stop_gradient('enc/kernel')(call)),
}


@pytest.mark.parametrize('case', ANY_FUNCTION)
def test_any_function(case):
    for _ in range(2):
        oracle.assert_same(
            oracle.grads(ANY_FUNCTION[case], PARAMS, X),
            oracle.grads(stopped_call('enc'), PARAMS, X),
        )
    # Nothing outside of the call, and no cache, has taken it over.
    for fn in (call, JITTED):
        oracle.assert_same(oracle.grads(fn, PARAMS, X), oracle.grads(call, PARAMS, X))


def test_two_decorated_versions_of_one_jitted_function():
    of_enc, of_dec = nn.stop_gradient(JITTED, 'enc/**'), nn.train_only(JITTED, 'enc/**')
    for fn, path in 2 * [(of_enc, 'enc'), (of_dec, 'dec')]:
        oracle.assert_same(
            oracle.grads(fn, PARAMS, X), oracle.grads(stopped_call(path), PARAMS, X)
        )


def test_a_decorated_function_is_traced_once():
    traces = []

    @jax.jit
    def step(params):
        traces.append(1)
        return jnp.sum(call(params, X))

    for _ in range(3):
        jax.grad(nn.stop_gradient(step, lambda path: path.name == 'bias'))(PARAMS)
    assert len(traces) == 1


def test_a_decorated_function_looks_like_the_function():
    assert (decorated.__name__, decorated.__doc__) == ('decorated', 'Words.')
    assert str(inspect.signature(decorated)) == '(params, x)'
    for fn in (functools.partial(call, PARAMS), Trainer()):
        assert inspect.signature(STOP(fn)) == inspect.signature(fn)
    jitted = jax.jit(nn.stop_gradient(MODEL.apply, 'enc/**'), static_argnames='method')
    oracle.assert_same(
        jitted({'params': PARAMS}, X, method='encode'),
        MODEL.apply({'params': PARAMS}, X, method='encode'),
    )


def test_a_decorated_function_is_called_in_several_threads():
    """Each call has a block of its own, also while another thread is in one."""
    count = 8
    barrier = threading.Barrier(count)

    @nn.stop_gradient('enc/**')
    def loss(params, depth):
        barrier.wait(60)
        inner = loss(params, depth - 1) if depth else 0.0
        barrier.wait(60)
        return inner + jnp.sum(call(params, X))

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        grads = list(pool.map(lambda _: jax.grad(loss)(PARAMS, 2), range(count)))
    by_hand = stopped_call('enc')
    expected = jax.grad(lambda p: sum(jnp.sum(by_hand(p, X)) for _ in range(3)))
    for grad in grads:
        oracle.assert_same(grad, expected(PARAMS))


def test_a_decorated_function_in_a_method():
    """As with a block there, paths begin at the module whose method is running."""

    class Uses(Two):
        def __call__(self, x):
            encode = nn.stop_gradient(lambda x: self.enc(x), 'enc/**')
            return encode(x) + self.enc(x)

    class Outer(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            return Uses(name='uses')(x)

    variables = Outer().init(KEY, X)

    def expected(v, x):
        enc = {'params': v['params']['uses']['enc']}
        return sum(fnn.Dense(3).apply(e, x) for e in (jax.lax.stop_gradient(enc), enc))

    oracle.assert_same(
        grads_of(Outer(), variables), oracle.grads(expected, variables, X)
    )


def test_a_decorated_function_that_stops_nothing():
    with pytest.raises(errors.UnusedFilterError, match='no variable of a Flax module'):
        nn.stop_gradient(lambda x: 2 * x, 'nothing/**')(X)
    with pytest.raises(errors.UnusedFilterError, match='encoder'):
        nn.stop_gradient(call, 'encoder/**')(PARAMS, X)
    encode = functools.partial(MODEL.apply, {'params': PARAMS}, method='encode')
    with pytest.warns(errors.NothingStoppedWarning):
        nn.stop_gradient(encode, 'd?c/kernel')(X)


async def coroutine(params):
    return call(params, X)


async def in_turn(params):
    yield call(params, X)


def steps(params):
    yield call(params, X)


@pytest.mark.parametrize('fn', [coroutine, in_turn, steps], ids=lambda fn: fn.__name__)
def test_a_function_whose_body_runs_later_is_refused(fn):
    """A block around the call would be closed when the body reads its parameters."""

    def refused():
        return pytest.raises(errors.ArgumentTypeError, match='runs when the call')

    for target in (fn, functools.partial(fn, PARAMS), staticmethod(fn)):
        with refused():
            nn.stop_gradient(target, 'enc/**')
    returned = fn(PARAMS)
    for module in (None, MODEL.bind({'params': PARAMS})):
        with refused():
            nn.stop_gradient(lambda module: returned, True)(module)
    if fn is coroutine:
        returned.close()


def test_a_single_function_is_a_filter():
    rewrite = nn.stop_gradient(lambda path: path.startswith('enc'))
    assert isinstance(rewrite, rewrites.BlockDecorator)
    for fn in (rewrite(call), rewrite(MODEL.apply)):
        assert callable(fn)
    # A function that takes more than a path is no filter, and nothing to decorate.
    with pytest.raises(errors.FilterTypeError, match='cannot be called with a path'):
        nn.stop_gradient(call)


# With Flax's own transforms, over and under.


def _class_over(transform):
    return lambda: nn.stop_gradient(transform(Compact), 'enc/**')


def _class_under(transform):
    return lambda: transform(nn.stop_gradient(Compact, 'enc/**'))


def _method_over(transform):
    def make():
        class Compact(globals()['Compact']):
            @nn.stop_gradient('enc/**')
            @transform
            @fnn.compact
            def __call__(self, x):
                return fnn.Dense(3, name='dec')(jnp.tanh(fnn.Dense(3, name='enc')(x)))

        return Compact

    return make


def _method_under(transform):
    def make():
        class Compact(globals()['Compact']):
            @transform
            @nn.stop_gradient('enc/**')
            @fnn.compact
            def __call__(self, x):
                return fnn.Dense(3, name='dec')(jnp.tanh(fnn.Dense(3, name='enc')(x)))

        return Compact

    return make


@pytest.mark.parametrize(
    'place', [_class_over, _class_under, _method_over, _method_under]
)
@pytest.mark.parametrize('transform', [fnn.jit, fnn.remat])
def test_with_jit_and_remat(transform, place):
    lifted = place(transform)()
    # Under the same transform, so that the same program is compiled.
    plain = transform(Compact)
    for _ in range(2):
        assert_stops(lifted(), plain(), 'enc')
    outer, plain_outer = Outer(lifted), Outer(plain)
    if place in (_class_over, _class_under):
        shapes = jax.eval_shape(outer.init, KEY, X)
        assert shapes == jax.eval_shape(plain_outer.init, KEY, X)


@pytest.mark.parametrize('place', ['over', 'under'])
@pytest.mark.parametrize('axis', ['broadcast', 'stacked'])
def test_with_scan(axis, place):
    class Cell(fnn.Module):
        @fnn.compact
        def __call__(self, x, _):
            x = fnn.Dense(3, name='dec')(jnp.tanh(fnn.Dense(3, name='enc')(x)))
            return x, x

    options: dict[str, Any] = {'length': 3, 'split_rngs': {'params': axis == 'stacked'}}
    if axis == 'broadcast':
        options['variable_broadcast'] = 'params'
    else:
        options['variable_axes'] = {'params': 0}
    if place == 'over':
        lifted = nn.stop_gradient(fnn.scan(Cell, **options), 'enc/**')
    else:
        lifted = fnn.scan(nn.stop_gradient(Cell, 'enc/**'), **options)
    plain = fnn.scan(Cell, **options)
    variables = plain().init(KEY, X, None)
    shapes = jax.eval_shape(lambda: lifted().init(KEY, X, None))
    assert shapes == jax.eval_shape(lambda: variables)
    oracle.assert_same(
        oracle.grads(lambda v, x: lifted().apply(v, x, None), variables, X),
        oracle.grads(
            lambda v, x: plain().apply(stopped(v, 'enc'), x, None), variables, X
        ),
    )


def test_with_vmap():
    def fn(cls):
        return fnn.vmap(
            cls, variable_axes={'params': 0}, split_rngs={'params': True}, in_axes=0
        )

    assert_stops(nn.stop_gradient(fn(Compact), 'enc/**')(), fn(Compact)(), 'enc')
    assert_stops(fn(nn.stop_gradient(Compact, 'enc/**'))(), fn(Compact)(), 'enc')


# Judged per call, per instance.


def test_every_call_is_an_extent_of_its_own():
    class Uses(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            frozen = nn.stop_gradient(fnn.Dense, 'kernel')(3, name='frozen')
            live = fnn.Dense(3, name='live')
            return live(frozen(live(frozen(x))))

    class Plain(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            frozen, live = fnn.Dense(3, name='frozen'), fnn.Dense(3, name='live')
            return live(frozen(live(frozen(x))))

    assert_stops(Uses(), Plain(), 'frozen/kernel')


def test_a_lifted_class_is_relative_to_itself_wherever_it_stands():
    lifted = nn.stop_gradient(Compact, 'enc/**')

    class Deep(fnn.Module):
        cls: Any

        @fnn.compact
        def __call__(self, x):
            return Outer(self.cls, name='deep')(self.cls(name='here')(x))

    assert_stops(
        Deep(lifted),
        Deep(Compact),
        *('here/enc', 'deep/Compact_0/enc', 'deep/named/enc'),
    )
    assert_stops(lifted(), Compact(), 'enc')


def test_a_shared_instance_is_stopped_where_its_class_is_lifted():
    # The parameters are shared; the class of each instance decides.
    class Shares(fnn.Module):
        def setup(self):
            self.frozen = nn.stop_gradient(fnn.Dense, 'kernel')(3, use_bias=False)

        def __call__(self, x):
            y = self.frozen(x)
            return y @ self.frozen.variables['params']['kernel']

    variables = Shares().init(KEY, X)

    def expected(v, x):
        kernel = v['params']['frozen']['kernel']
        return (x @ jax.lax.stop_gradient(kernel)) @ kernel

    oracle.assert_same(
        grads_of(Shares(), variables), oracle.grads(expected, variables, X)
    )

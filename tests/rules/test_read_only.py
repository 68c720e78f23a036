"""``read_only``: real writes raise, and nothing else changes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen
from flax.core import apply

from flax_sg import core, errors
from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.extents import EXTENTS
from tests.helpers.oracle import assert_same

X = jnp.array([[1.0, -2.0, 0.5], [0.25, 0.75, -1.0]])
KEY = jax.random.key(0)


class Writer(linen.Module):
    """Writes in each of the ways that there are, or in none."""

    way: str

    def setup(self):
        self.w = self.param('w', linen.initializers.ones, (1, 3))
        self.count = self.variable('state', 'count', jnp.zeros, (1, 3))

    def __call__(self, x):
        y = x * self.w + self.count.value
        if not self.is_initializing():
            WAYS[self.way](self, y)
        return y


def _value(module, y):
    module.count.value = module.count.value + 1.0


def _put(module, y):
    module.put_variable('state', 'count', y[:1])


def _param(module, y):
    module.put_variable('params', 'w', module.get_variable('params', 'w') * 1.0)


def _sow(module, y):
    module.sow('intermediates', 'y', y)


def _create(module, y):
    module.scope.variable('state', 'new', jnp.zeros, (3,))


def _nothing(module, y):
    if module.is_mutable_collection('state'):
        module.count.value = module.count.value
    if module.is_mutable_collection('params'):
        module.put_variable('params', 'w', module.get_variable('params', 'w'))


WAYS: dict[str, Callable[[Any, Any], None]] = {
    fn.__name__.strip('_'): fn for fn in (_value, _put, _param, _sow, _create, _nothing)
}
WRITES = {
    'value': "wrote the variable 'count' of the collection 'state'",
    'put': "wrote the variable 'count' of the collection 'state'",
    'param': "wrote the variable 'w' of the collection 'params'",
    'sow': "created the variable 'y' of the collection 'intermediates'",
    'create': "created the variable 'new' of the collection 'state'",
}


def _scan(fn, module, x):
    scanned = nn.scan(
        lambda module, x, _: (fn(module, x), None),
        variable_carry='state',
        variable_axes={'intermediates': 0},
        length=2,
        **oracle.SHARED,
    )
    return scanned(module, x, None)[0]


def _vmap(fn, module, x):
    axes = {'params': None, 'state': None, 'intermediates': 0}
    mapped = nn.vmap(
        fn, variable_axes=axes, split_rngs={'params': False}, in_axes=None, axis_size=2
    )
    return mapped(module, x).mean(0)


def _cond(fn, module, x):
    return nn.cond(x.sum() > 0, fn, lambda module, x: x, module, x)


def _while(fn, module, x):
    return nn.while_loop(
        lambda module, carry: carry[0] < 2,
        lambda module, carry: (carry[0] + 1, fn(module, carry[1])),
        module,
        (0, x),
        carry_variables='state',
        broadcast_variables='params',
    )[1]


LIFTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    'none': lambda fn, module, x: fn(module, x),
    'jit': lambda fn, module, x: nn.jit(fn)(module, x),
    'remat': lambda fn, module, x: nn.remat(fn)(module, x),
    'scan': _scan,
    'vmap': _vmap,
    'cond': _cond,
    'while': _while,
}


class Model(linen.Module):
    lift: str
    way: str
    rewrite: Any = None

    def setup(self):
        self.writer = Writer(self.way)

    def __call__(self, x):
        def call(module: Any, x: Any) -> Any:
            return module(x)

        if self.is_initializing():
            return self.writer(x)
        if self.rewrite is None:
            return LIFTS[self.lift](call, self.writer, x)
        with self.rewrite:
            return LIFTS[self.lift](call, self.writer, x)


VARIABLES = Model('none', 'nothing').init(KEY, X)


def run(model: Any, variables: Any = VARIABLES, x: Any = X) -> Any:
    return model.apply(variables, x, mutable=True)


@pytest.mark.parametrize(
    ('lift', 'way'),
    [
        *(('none', way) for way in WRITES),
        *(
            (lift, way)
            for lift in ('jit', 'scan')
            for way in ('param', 'sow', 'create')
        ),
        *((lift, 'put') for lift in ('remat', 'vmap', 'cond', 'while')),
    ],
)
def test_a_write_raises(lift, way) -> None:
    message = (
        f"Writer.__call__ (at 'writer') {WRITES[way]} in the module at 'writer', "
        "which is read only under read_only(Glob('writer/**'), collections=True"
    )
    match = re.escape(message)
    with pytest.raises(errors.BlockError, match=match):
        run(Model(lift, way, nn.read_only('writer/**')))
    with pytest.raises(errors.BlockError, match=match), nn.read_only('writer/**'):
        run(Model(lift, way))


@pytest.mark.parametrize('lift', ['none', 'jit', 'remat', 'scan', 'while'])
def test_a_write_to_another_variable_is_none_of_ours(lift) -> None:
    for rewrite in (nn.read_only('writer/w'), nn.read_only(True, collections='params')):
        assert_same(run(Model(lift, 'value', rewrite)), run(Model(lift, 'value')))


@pytest.mark.parametrize('lift', LIFTS)
def test_what_is_handed_through_is_no_write(lift) -> None:
    plain, held = Model(lift, 'nothing'), Model(lift, 'nothing', nn.read_only(True))
    assert_same(run(held), run(plain))
    assert_same(run(held)[1], VARIABLES)
    if lift != 'while':  # No derivative of it goes backwards.
        assert_same(
            oracle.grads(functools.partial(run, held), VARIABLES, X),
            oracle.grads(functools.partial(run, plain), VARIABLES, X),
        )


def test_a_jitted_module_that_wrote_before_and_writes_after() -> None:
    model, held = Model('jit', 'value'), Model('jit', 'value', nn.read_only(True))
    for _ in range(2):
        assert float(run(model)[1]['state']['writer']['count'][0, 0]) == 1.0
        with pytest.raises(errors.BlockError):
            run(held)
    step = jax.jit(lambda v: run(model, v))
    for _ in range(2):
        assert float(step(VARIABLES)[1]['state']['writer']['count'][0, 0]) == 1.0
        with nn.read_only('writer/count'), pytest.raises(errors.BlockError):
            step(VARIABLES)


@pytest.mark.parametrize('extent', EXTENTS)
def test_at_every_extent(extent) -> None:
    model, rewrite = Model('jit', 'value'), nn.read_only('writer/*')
    with pytest.raises(errors.BlockError, match="wrote the variable 'count'"):
        EXTENTS[extent](rewrite, model, VARIABLES, X, mutable=True)


def test_each_leaf_of_each_variable_counts() -> None:
    """In one write of several variables, of two leaves each."""
    stored = {'a': (1.0, 2.0), 'b': (3.0, 4.0)}
    a, b = stored.values()
    writes = {
        'a': {'a': (a[0], 5.0), 'b': b},
        'b': {'a': a, 'b': (5.0, b[1])},
        'c': {**stored, 'c': b},
    }
    others = {'b': {'a': a, 'b': [*b]}}

    def write(where: Any, value: Any) -> Any:
        def fn(scope: Any) -> None:
            scope.put_variable('state', 'm', value)

        fn = core.lift(
            core.lift(fn, nn.read_only(where)), nn.read_only('none/**', unused='ignore')
        )
        return apply(fn, mutable=True)({'state': {'m': stored}})[1]

    for name, value in [*writes.items(), *others.items()]:
        with pytest.raises(errors.BlockError, match=f"'{name}' of the collection"):
            write('m/**', value)
    assert write('m/b', writes['a'])['state']['m'] == writes['a']
    assert write('m/**', {'a': a, 'b': b})['state']['m'] == stored


def test_initialization_creates_and_does_not_overwrite() -> None:
    class Inits(linen.Module):
        overwrites: bool

        @linen.compact
        def __call__(self, x):
            with nn.read_only(True):
                for lift in ('none', 'jit', 'remat'):
                    writer = Writer('nothing', name=lift)
                    x = LIFTS[lift](lambda m, x: m(x), writer, x)
                x = linen.BatchNorm(use_running_average=False)(x)
                state = self.variable('state', 'mean', jnp.zeros, (3,))
                if self.overwrites:
                    state.value = x.mean(0)
            return x

    variables = Inits(False).init(KEY, X)
    assert sorted(variables['params']) == ['BatchNorm_0', 'jit', 'none', 'remat']
    with pytest.raises(errors.BlockError, match=r"Inits\.__call__ .*'mean'"):
        Inits(True).init(KEY, X)


def test_a_setup_that_writes_before_a_block_in_a_method():
    """``setup`` runs again for what it has computed; its writes are no writes then."""

    class Model(linen.Module):
        def setup(self):
            self.w = self.param('w', linen.initializers.ones, (1, 3))
            self.count = self.variable('state', 'count', jnp.zeros, ())
            if not self.is_initializing():
                self.count.value += 1.0
            self.twice = 2.0 * self.w

        def __call__(self, x):
            with nn.read_only(True, collections=True):
                return x * self.twice

    variables = Model().init(KEY, X)

    @jax.jit
    def step(variables):
        return Model().apply(variables, X, mutable=['state'])

    y, state = step(variables)
    assert_same(y, 2.0 * X)
    assert_same(state, {'state': {'count': jnp.float32(1.0)}})

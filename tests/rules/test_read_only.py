"""``read_only``: real writes raise, and nothing else changes."""

import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from flax import linen
from flax.core import apply

from flax_sg import core, errors
from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.extents import EXTENTS
from tests.helpers.lifts import LIFTS
from tests.helpers.oracle import assert_same

X = jnp.array([[1.0, -2.0, 0.5], [0.25, 0.75, -1.0]])
KEY, ONES = jax.random.key(0), linen.initializers.ones


def _value(m, y):
    m.count.value = m.count.value + 1.0


def _nothing(m, y):
    if m.is_mutable_collection('state'):
        m.count.value = m.count.value
    if m.is_mutable_collection('params'):
        m.put_variable('params', 'w', m.get_variable('params', 'w'))


# How a module writes, and what the error says of it.
WAYS: dict[str, tuple[Any, str]] = {
    'value': (_value, "wrote the variable 'count' of the collection 'state'"),
    'put': (
        lambda m, y: m.put_variable('state', 'count', y[:1]),
        "wrote the variable 'count' of the collection 'state'",
    ),
    'param': (
        lambda m, y: m.put_variable('params', 'w', m.w * 1.0),
        "wrote the variable 'w' of the collection 'params'",
    ),
    'sow': (
        lambda m, y: m.sow('intermediates', 'y', y),
        "created the variable 'y' of the collection 'intermediates'",
    ),
    'create': (
        lambda m, y: m.scope.variable('state', 'new', jnp.zeros, (3,)),
        "created the variable 'new' of the collection 'state'",
    ),
    'nothing': (_nothing, ''),
}


class Writer(linen.Module):
    way: str

    def setup(self):
        self.w = self.param('w', ONES, (1, 3))
        self.count = self.variable('state', 'count', jnp.zeros, (1, 3))

    def __call__(self, x):
        y = x * self.w + self.count.value
        if not self.is_initializing():
            WAYS[self.way][0](self, y)
        return y


class Model(linen.Module):
    lift: str
    way: str
    rewrite: Any = nn.read_only(False)

    def setup(self):
        self.writer = Writer(self.way)

    def __call__(self, x):
        lift = LIFTS['none' if self.is_initializing() else self.lift]
        with self.rewrite:
            return lift(lambda module, x: module(x), self.writer, x)


VARIABLES = Model('none', 'nothing').init(KEY, X)


def run(*model: Any, variables: Any = VARIABLES) -> Any:
    return Model(*model).apply(variables, X, mutable=True)


class Row(NamedTuple):
    """A filter, transforms, ways to write, and whether these raise."""

    where: Any
    lifts: tuple[str, ...]
    ways: tuple[str, ...]
    raises: bool
    collections: Any = True


STEPS = ('none', 'jit', 'remat', 'scan', 'while_loop')
ROWS = [
    Row('writer/**', ('none',), ('value', 'put', 'param', 'sow', 'create'), True),
    Row('writer/**', ('jit', 'scan'), ('param', 'sow', 'create'), True),
    Row('writer/**', ('remat', 'vmap', 'cond', 'while_loop'), ('put',), True),
    Row('writer/w', STEPS, ('value',), False),
    Row(True, STEPS, ('value',), False, 'params'),
    Row(True, (*STEPS, 'vmap', 'cond'), ('nothing',), False),
]


@pytest.mark.parametrize(
    ('row', 'lift', 'way'),
    [(row, *of) for row in ROWS for of in itertools.product(row.lifts, row.ways)],
)
def test_a_write_raises_and_nothing_else_changes(row, lift, way) -> None:
    rewrite = nn.read_only(row.where, collections=row.collections)
    if row.raises:
        said = f"Writer.__call__ (at 'writer') {WAYS[way][1]} in the module at 'writer'"
        match = re.escape(f'{said}, which is read only under {rewrite!r}')
        with pytest.raises(errors.BlockError, match=match):
            run(lift, way, rewrite)
        with pytest.raises(errors.BlockError, match=match), rewrite:
            run(lift, way)
        return
    assert_same(run(lift, way, rewrite), run(lift, way))
    if way == 'nothing' and lift != 'while_loop':  # No derivative of it goes backwards.
        held, plain = (
            oracle.grads(lambda v, x, m=m: run(*m, variables=v), VARIABLES, X)
            for m in ((lift, way, rewrite), (lift, way))
        )
        assert_same(held, plain)


def test_a_jitted_module_that_wrote_before_and_writes_after() -> None:
    step = jax.jit(lambda v: run('jit', 'value', variables=v))
    for fn in (step, lambda v: run('jit', 'value', variables=v)) * 2:
        assert float(fn(VARIABLES)[1]['state']['writer']['count'][0, 0]) == 1.0
        with nn.read_only('writer/count'), pytest.raises(errors.BlockError):
            fn(VARIABLES)


@pytest.mark.parametrize('extent', EXTENTS)
def test_at_every_extent(extent) -> None:
    model, rewrite = Model('jit', 'value'), nn.read_only('writer/*')
    with pytest.raises(errors.BlockError, match="wrote the variable 'count'"):
        EXTENTS[extent](rewrite, model, VARIABLES, X, mutable=True)


# Of a variable ``m``, two of two leaves each: a filter, what is written, what raises.
A, B = (1.0, 2.0), (3.0, 4.0)
LEAVES = [
    ('m/**', {'a': (A[0], 5.0), 'b': B}, 'a'),
    ('m/**', {'a': A, 'b': (5.0, B[1])}, 'b'),
    ('m/**', {'a': A, 'b': B, 'c': B}, 'c'),
    ('m/**', {'a': A, 'b': [*B]}, 'b'),
    ('m/**', {'a': A, 'b': B}, ''),
    ('m/b', {'a': (A[0], 5.0), 'b': B}, ''),
]


@pytest.mark.parametrize(('where', 'value', 'raises'), LEAVES)
def test_each_leaf_of_each_variable_counts(where, value, raises) -> None:
    def fn(scope: Any) -> None:
        scope.put_variable('state', 'm', value)

    def write() -> Any:
        none = nn.read_only('none/**', unused='ignore')
        lifted = core.lift(core.lift(fn, nn.read_only(where)), none)
        return apply(lifted, mutable=True)({'state': {'m': {'a': A, 'b': B}}})[1]

    if raises:
        with pytest.raises(errors.BlockError, match=f"'{raises}' of the collection"):
            write()
    else:
        assert write()['state']['m'] == value


@pytest.mark.parametrize('overwrites', [False, True])
def test_initialization_creates_and_does_not_overwrite(overwrites) -> None:
    class Inits(linen.Module):
        @linen.compact
        def __call__(self, x):
            with nn.read_only(True):
                for lift in ('none', 'jit', 'remat'):
                    x = LIFTS[lift](lambda m, x: m(x), Writer('nothing', name=lift), x)
                x = linen.BatchNorm(use_running_average=False)(x)
                state = self.variable('state', 'mean', jnp.zeros, (3,))
                if overwrites:
                    state.value = x.mean(0)
            return x

    if overwrites:
        with pytest.raises(errors.BlockError, match=r"Inits\.__call__ .*'mean'"):
            Inits().init(KEY, X)
    else:
        names = sorted(Inits().init(KEY, X)['params'])
        assert names == ['BatchNorm_0', 'jit', 'none', 'remat']


def test_a_setup_that_writes_before_a_block_in_a_method():
    """``setup`` runs again for what it has computed; its writes are no writes then."""

    class Model(linen.Module):
        def setup(self):
            self.w = self.param('w', ONES, (1, 3))
            self.count = self.variable('state', 'count', jnp.zeros, ())
            if not self.is_initializing():
                self.count.value += 1.0
            self.twice = 2.0 * self.w

        def __call__(self, x):
            with nn.read_only(True, collections=True):
                return x * self.twice

    variables = Model().init(KEY, X)
    step = jax.jit(lambda v: Model().apply(v, X, mutable=['state']))
    y, state = step(variables)
    assert_same(y, 2.0 * X)
    assert_same(state, {'state': {'count': jnp.float32(1.0)}})

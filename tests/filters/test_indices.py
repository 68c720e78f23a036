"""Parts of arrays: the same at every extent as a mask that is written by hand."""

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import flax_sg as sg
from flax_sg import filters, testing
from flax_sg import linen as nn
from flax_sg.filters import Index
from tests.helpers import extents, oracle

ROWS, WIDTH = 6, 4
IDS = jnp.array([[0, 1, 5], [2, 3, 5]])
TABLE = 'embed/embedding'


class Words(linen.Module):
    """An embedding that is read by rows, and as a whole by ``attend``."""

    rows: int = ROWS

    @linen.compact
    def __call__(self, ids):
        embed = linen.Embed(self.rows, WIDTH, name='embed')
        return embed.attend(linen.Dense(WIDTH, name='dense')(embed(ids)))


PARAMS = oracle.init(Words(), jax.random.key(0), IDS)['params']
INDICES: dict[str, Any] = {
    'elements': np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH) % 3 == 0,
    'a list': [0, 3],
    'bools': np.arange(ROWS) > 2,
    'rows and columns': ([0, 2], [1, 3]),
}


def masked(params: Any, index: Any) -> Any:
    """Parameters of which a part of the table is stopped by hand."""
    table = params['embed']['embedding']
    mask = np.zeros(table.shape, bool)
    mask[index] = True
    seen = jnp.where(mask, jax.lax.stop_gradient(table), table)
    return {**params, 'embed': {'embedding': seen}}


def loss_of(params: Any, rows: int = ROWS) -> Any:
    return jnp.sum(Words(rows).apply({'params': params}, IDS) ** 2)


def grads_by_hand(index: Any) -> Any:
    return jax.value_and_grad(lambda params: loss_of(masked(params, index)))(PARAMS)


# index of an array of shape (3, 4, 5), and the shape of the smallest mask for it.
MASKS: list[tuple[Any, tuple[int, ...]]] = [
    (1, (3, 1, 1)),
    (np.s_[1:], (3, 1, 1)),
    (np.s_[::2, ::-3], (3, 4, 1)),
    (np.s_[:, 2], (1, 4, 1)),
    (np.s_[..., 1:3], (1, 1, 5)),
    (np.s_[0, ..., 4], (3, 1, 5)),
    (np.s_[:2, ...], (3, 1, 1)),
    (np.s_[0, 1, ..., 2], (3, 4, 5)),
    (np.s_[...], (1, 1, 1)),
    (np.s_[:], (1, 1, 1)),
    (np.s_[0, :, -1], (3, 1, 5)),
    ([0, 2], (3, 1, 1)),
    (np.s_[:, [0, 3], 1], (1, 4, 5)),
    (np.array([True, False, True]), (3, 1, 1)),
    (np.arange(12).reshape(3, 4) % 5 == 0, (3, 4, 1)),
    (np.array([[0, 1], [1, 0]]), (3, 1, 1)),
    (np.s_[[0, 1], [2, 3]], (3, 4, 1)),
    (np.s_[[0, 1], ..., [2, 3]], (3, 1, 5)),
    (np.True_, (1, 1, 1)),
]


@pytest.mark.parametrize(('index', 'small'), MASKS)
def test_masks_mean_what_numpy_means_and_are_small(index, small):
    expected = np.zeros((3, 4, 5), bool)
    expected[index] = True
    mask = filters.Part(Index(index)).mask((3, 4, 5), TABLE)
    assert (mask.shape, mask.dtype) == (small, bool)
    np.testing.assert_array_equal(np.broadcast_to(mask, (3, 4, 5)), expected)


def test_a_part_with_all_or_nothing():
    part = filters.Part(Index(0))
    assert (part & True) is (True & part) is (part | False) is (False | part) is part
    assert (part & False) is (False & part) is False
    assert (part | True) is (True | part) is True
    assert filters.negated(part) == filters.Part(~Index(0))
    assert filters.negated(True) is False
    assert filters.merged(True, 1, 2, TABLE) == 1
    leaf = object()
    assert filters.merged(part, leaf, leaf, TABLE) is leaf


@pytest.mark.parametrize('name', INDICES)
def test_a_block_stops_what_a_mask_stops(name):
    index = INDICES[name]

    @jax.value_and_grad
    def ours(params):
        with nn.stop_gradient(sg.at(TABLE, index)):
            return loss_of(params)

    value, grads = ours(PARAMS)
    oracle.assert_same((value, grads), grads_by_hand(index))
    table = np.asarray(grads['embed']['embedding'])
    assert not table[index].any()
    assert table.any()


@pytest.mark.parametrize('extent', extents.OF_STOPS)
def test_every_extent(extent):
    rewrite = nn.stop_gradient(sg.at(TABLE, np.s_[:3]))
    call = functools.partial(extents.OF_STOPS[extent], rewrite, Words())
    ours = jax.value_and_grad(lambda p: jnp.sum(call({'params': p}, IDS) ** 2))
    oracle.assert_same(ours(PARAMS), grads_by_hand(np.s_[:3]))


def test_the_gradient_call_differentiates_the_part():
    ours = sg.value_and_grad(loss_of, wrt=['dense/**', sg.at(TABLE, np.s_[3:])])
    oracle.assert_same(ours(PARAMS), grads_by_hand(np.s_[:3]))
    table = sg.grad(loss_of, wrt=sg.at(TABLE, np.s_[3:]))(PARAMS)
    assert table['dense']['kernel'] is sg.ABSENT


TABLES = {
    'not': (lambda: ~sg.at(TABLE, np.s_[:2]) & TABLE, np.s_[2:]),
    'or': (lambda: sg.at(TABLE, 0) | sg.at('embed/*', 2), [0, 2]),
    'and': (lambda: sg.at(TABLE, np.s_[:3]) & sg.at('**', np.s_[2:]), 2),
    'not both': (lambda: sg.at(TABLE, np.s_[:3]) & ~sg.at(TABLE, 1), [0, 2]),
    'with a whole leaf': (lambda: sg.at(TABLE, 1) | filters.as_filter(TABLE), np.s_[:]),
    'with none': (lambda: sg.at(TABLE, 1) | filters.as_filter(False), 1),
    'any of': (lambda: [sg.at(TABLE, 0), sg.at(TABLE, 5)], [0, 5]),
    'twice': (lambda: sg.at(sg.at(TABLE, np.s_[:3]), np.s_[1:]), [1, 2]),
}


@pytest.mark.parametrize('name', TABLES)
def test_filters_combine(name):
    make, rows = TABLES[name]
    mask = np.zeros((ROWS, WIDTH), bool)
    mask[rows] = True
    part = filters.as_filter(make())(sg.Path.of('params', ('embed', 'embedding')))
    assert (part is True) == (name == 'with a whole leaf')
    if part is not True:
        shown = np.broadcast_to(part.mask(mask.shape, TABLE), mask.shape)
        np.testing.assert_array_equal(shown, mask)
    assert filters.as_filter(make())(sg.Path.of('params', ('dense', 'bias'))) is False


# As values.


def test_equal_parts_are_one_filter():
    part = sg.at(TABLE, np.s_[:3])
    assert part == sg.at(TABLE, np.s_[: np.int64(3)])
    assert hash(part) == hash(sg.at(TABLE, np.s_[:3]))
    assert part != sg.at(TABLE, np.s_[:4])
    assert sg.at(TABLE, [1, 2]) == sg.at(TABLE, np.array([1, 2], np.int32))
    assert sg.at(TABLE, [1, 0]) != sg.at(TABLE, [True, False])
    assert repr(part) == "Glob('embed/embedding') & Index(np.s_[:3])"
    for whole in part, Index(np.s_[:, [1, 0]]):
        assert pickle.loads(pickle.dumps(whole)) == whole


def test_an_index_is_a_copy():
    rows = np.array([0, 1])
    index = Index(rows)
    rows[0] = 5
    assert index == Index([0, 1])


def test_a_mask_on_rows_is_as_small_as_the_rows():
    index = Index(np.s_[:100])
    assert filters.Part(index).mask((50_000, 1024), TABLE).shape == (50_000, 1)
    params = {**PARAMS, 'embed': {'embedding': jnp.ones((500, WIDTH))}}

    def ours(params):
        with nn.stop_gradient(sg.at(TABLE, np.s_[:100])):
            return loss_of(params, rows=500)

    def hand(params):
        table = params['embed']['embedding']
        mask = np.broadcast_to((np.arange(500) < 100)[:, None], table.shape)
        seen = jnp.where(mask, jax.lax.stop_gradient(table), table)
        return loss_of({**params, 'embed': {'embedding': seen}}, rows=500)

    testing.assert_same_program(jax.grad(ours), jax.grad(hand), params)


# Bad input.


def test_values_in_a_box_and_numbers_without_a_gradient():
    class Boxed(linen.Module):
        @linen.compact
        def __call__(self):
            init = linen.with_partitioning(linen.initializers.ones, ('a',))
            steps = self.param('steps', lambda key: jnp.arange(3))
            with nn.stop_gradient(sg.at(['w', 'steps'], np.s_[:2])):
                w = self.param('w', init, (3,))
                read = self.get_variable('params', 'steps')
                nothing = 0 * jnp.sum(steps).astype(float)
                return jnp.sum(w * read.astype(float)) + nothing

    variables = Boxed().init(jax.random.key(0))
    grads = jax.grad(Boxed().apply, allow_int=True)(variables)['params']
    assert grads['w'].value.tolist() == [0.0, 0.0, 2.0]


ALL_ROWS: dict[str, Any] = {
    'a slice': np.s_[:ROWS],
    'all axes': np.s_[:, :],
    'dots': ...,
    'numbers': [*range(ROWS)],
    'bools': np.ones(ROWS, bool),
    'elements': np.ones((ROWS, WIDTH), bool),
}
BOTH_HALVES = sg.at(TABLE, np.s_[:2]) | sg.at(TABLE, np.s_[2:])


@pytest.mark.parametrize('name', [*ALL_ROWS, 'both halves'])
def test_all_rows_are_the_leaf(name):
    rows = sg.at(TABLE, ALL_ROWS[name]) if name in ALL_ROWS else BOTH_HALVES
    by_name = sg.filters.as_filter(TABLE)
    both = sg.partition(PARAMS, rows)
    oracle.assert_same(both, sg.partition(PARAMS, by_name))
    oracle.assert_same(sg.partition(PARAMS, ~rows), both[::-1])
    assert sg.mask(PARAMS, frozen=rows) == sg.mask(PARAMS, frozen=by_name)
    assert sg.labels(PARAMS, {'a': rows, 'b': ~rows})['embed']['embedding'] == 'a'
    grads = sg.grad(loss_of, wrt=~rows)(PARAMS)
    oracle.assert_same(grads, sg.grad(loss_of, wrt=~by_name)(PARAMS))
    assert grads['embed']['embedding'] is sg.ABSENT

    def ours(params, where):
        with nn.stop_gradient(where):
            return loss_of(params)

    step = jax.jit(jax.grad(ours), static_argnums=1)
    programs = {step.lower(PARAMS, where).as_text() for where in (rows, by_name)}
    assert len(programs) == 1
    flow = sg.gradient_flow(lambda p: ours(p, rows), PARAMS)
    assert flow.status_of('output', TABLE) == 'stopped'
    frozen = (sg.freeze(optax.adam(0.1), where) for where in (rows, by_name))
    oracle.assert_same(*(tx.init(PARAMS) for tx in frozen))

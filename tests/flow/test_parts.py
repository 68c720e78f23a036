"""Parts of arrays that are stopped: in reports, ``sg.live``, tables and assertions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing
from tests.helpers import oracle
from tests.helpers.turns import in_turn

TABLE = 'embed/embedding'
IDS = jnp.array([0, 1, 1, 3, 4, 5])


class Words(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Dense(2)(nn.Embed(6, 3, name='embed')(ids))


PARAMS = oracle.init(Words(), jax.random.key(0), IDS)['params']


def read(params: Any) -> jax.Array:
    return jnp.sum(Words().apply({'params': params}, IDS) ** 2)


def with_table(params: Any, change: Any) -> jax.Array:
    table = params['embed']['embedding']
    return read({**params, 'embed': {'embedding': change(table)}})


def in_block(index: Any) -> Any:
    def loss(params):
        with nn.stop_gradient(sg.at(TABLE, index)):
            return read(params)

    return loss


def by_hand(change: Any) -> Any:
    return lambda params: with_table(params, change)


def in_a_scan(params: Any) -> jax.Array:
    def turn(total, _):
        return total + in_block(np.s_[:4])(params), None

    return lax.scan(turn, 0.0, length=2)[0]


def twice(params: Any) -> jax.Array:
    return in_block(np.s_[:4])(params) + in_block(np.s_[2:])(params)


stop = lax.stop_gradient
FIRST_FOUR, UPPER = np.arange(6)[:, None] < 4, np.s_[:4]
# Losses that stop the first four rows of the table.
OF_FOUR: dict[str, Any] = {
    'rows': in_block(UPPER),
    'jit': jax.jit(in_block(UPPER)),
    'checkpoint': jax.checkpoint(in_block(UPPER)),
    'scan': in_a_scan,
    'vmap': lambda p: jnp.sum(jax.vmap(lambda x: x * in_block(UPPER)(p))(jnp.ones(2))),
    'a tree': lambda params: read(sg.stop_gradient(params, sg.at(TABLE, UPPER))),
    'one level': lambda params: read(
        sg.rewrite(params, nn.stop_gradient(sg.at(TABLE, UPPER), levels=1))
    ),
    'a mask by hand': by_hand(lambda w: jnp.where(FIRST_FOUR, stop(w), w)),
    'a product by hand': by_hand(lambda w: w * ~FIRST_FOUR + stop(w) * FIRST_FOUR),
    'joined by hand': by_hand(lambda w: jnp.concatenate([stop(w[:4]), w[4:]])),
}
LOSSES = {name: (loss, FIRST_FOUR) for name, loss in OF_FOUR.items()}
# Others, and the elements of the table that each of them stops.
LOSSES |= {
    'one row': (in_block(-1), np.arange(6)[:, None] == 5),
    'rows here and there': (in_block([0, 2]), np.isin(np.arange(6), [0, 2])[:, None]),
    'a column': (in_block(np.s_[:, 1]), np.arange(3)[None] == 1),
    'a corner': (in_block(np.s_[:2, 1:]), np.outer(np.arange(6) < 2, np.arange(3) > 0)),
    'what one of two uses trains': (twice, np.isin(np.arange(6), [2, 3])[:, None]),
}
DECAY = optax.add_decayed_weights(0.5)
TRANSFORMS = {
    'adamw': lambda: optax.adamw(0.1, weight_decay=0.5),
    'momentum': lambda: optax.chain(DECAY, optax.sgd(0.1, momentum=0.9)),
}


def trained(loss: Any, params: Any, tx: Any) -> Any:
    """The parameters after three steps of what the loss trains."""
    live = sg.live(loss, params)
    tx = sg.freeze(tx, ~live)
    state = tx.init(params)
    for _ in range(3):
        grads = sg.grad(loss, wrt=live)(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.usefixtures('standard_promotion')
@pytest.mark.parametrize(('name', 'transform'), in_turn(LOSSES, TRANSFORMS))
def test_what_is_stopped_stays_to_the_last_bit(name, transform):
    loss, stopped = LOSSES[name]
    stopped = np.broadcast_to(stopped, (6, 3))
    new = trained(loss, PARAMS, TRANSFORMS[transform]())
    old = np.asarray(PARAMS['embed']['embedding'])
    np.testing.assert_array_equal(new['embed']['embedding'] == old, stopped)
    # The gradient by hand is zero in the same places.
    grads = jax.grad(loss)(PARAMS)['embed']['embedding']
    assert oracle.is_zero(np.where(stopped, grads, 0.0))
    report = sg.gradient_flow(loss, PARAMS)
    assert report.status_of('output', TABLE) == 'partly'
    assert report.count(report.names.index(TABLE)) == (~stopped).sum()
    testing.assert_stopped(report, sg.at(TABLE, stopped))
    testing.assert_flows(report, sg.at(TABLE, ~stopped))
    rest = ['Dense_0/*', sg.at(TABLE, ~stopped)]
    testing.assert_trains_only(report, rest)
    for holds, *args in (
        (testing.assert_stopped, report, TABLE),
        (testing.assert_flows, report, TABLE),
        (testing.assert_trains_only, report, ['Dense_0/*', TABLE]),
        (testing.assert_trains_only, report, 'Dense_0/*'),
        (testing.assert_trains_only, read, rest, PARAMS),
    ):
        with pytest.raises(sg.errors.ExpectationError):
            holds(*args)


def test_a_part_that_is_asked_about():
    params = {'a': jnp.arange(1.0, 5.0), 'b': jnp.arange(2.0, 6.0)}
    loss = lambda p: (p['a'] * p['b']).sum()  # noqa: E731
    live = sg.live(loss, params, wrt=sg.at('a', np.s_[:2]))
    grads = sg.grad(loss, wrt=live, absent='zeros')(params)
    assert grads['a'].tolist() == [2.0, 3.0, 0.0, 0.0]
    assert not grads['b'].any()


def test_a_part_that_depends_on_data_is_not_guessed():
    def loss(params, count):
        rows = jnp.arange(6)[:, None] < count
        return with_table(params, lambda table: jnp.where(rows, stop(table), table))

    def written(params):
        return with_table(params, lambda table: table.at[:4].set(stop(table[:4])))

    for args in (loss, PARAMS, 4), (loss, PARAMS, jnp.array(3)), (written, PARAMS):
        report = sg.gradient_flow(*args)
        assert report.status_of('output', TABLE) == 'partly'
        assert not report.why('output', TABLE).condition
        live = sg.live(*args)
        # What is trained is in it; what is not is not told.
        grads = sg.grad(args[0], wrt=live)(*args[1:])
        oracle.assert_same(grads, jax.grad(args[0])(*args[1:]))
        with pytest.raises(sg.errors.PartError, match='Name the part'):
            sg.freeze(optax.sgd(0.1), ~live).init(PARAMS)
        for holds in (testing.assert_flows, testing.assert_stopped):
            with pytest.raises(sg.errors.ExpectationError, match='trained in part'):
                holds(report, TABLE)


def test_rows_that_a_short_batch_does_not_read_are_not_frozen():
    """Live in one use, stopped in another: a longer batch gives them a gradient."""

    def loss(params, x):
        fixed = lax.stop_gradient(params['position'])[: len(x)]
        return jnp.sum(x * jnp.sin(params['position'][: len(x)]) * fixed)

    params = {'position': jnp.ones((8, 3))}
    report = sg.gradient_flow(loss, params, jnp.ones((4, 3)))
    assert report.status == (('flows',),)
    live = sg.live(loss, params, jnp.ones((4, 3)))
    assert sg.mask(params, trained=live) == {'position': True}
    args = params, jnp.ones((8, 3))
    oracle.assert_same(sg.grad(loss, wrt=live)(*args), jax.grad(loss)(*args))


@pytest.mark.parametrize('levels', [None, 1])
def test_only_rows_that_a_stop_cuts_are_frozen(levels):
    def loss(params):
        rule = nn.stop_gradient(sg.at('position', np.s_[:2]), levels=levels)
        return jnp.sum(sg.rewrite(params, rule)['position'][:4] ** 2)

    params = {'position': jnp.ones((8, 3))}
    live = sg.live(loss, params)
    part = sg.gradient_flow(loss, params).trained(0)
    frozen = np.arange(8)[:, None] < 2
    np.testing.assert_array_equal(part.mask((8, 3), 'position'), ~frozen)
    grads = sg.grad(loss, wrt=live)(params)
    np.testing.assert_array_equal(grads['position'], jax.grad(loss)(params)['position'])


def test_a_stop_around_what_jax_does_not_differentiate():
    """Whether the other rows are read cannot be asked: nothing is guessed."""

    def loss(params):
        table = params['position']
        turned = lax.while_loop(lambda v: v[0, 0] < 9.0, lambda v: v * 2.0, table)
        return jnp.sum(table[:4] ** 2 * lax.stop_gradient(turned)[:4])

    params = {'position': jnp.ones((8, 3))}
    assert sg.gradient_flow(loss, params).status == (('partly',),)
    with pytest.raises(sg.errors.PartError, match='Name the part'):
        sg.freeze(optax.sgd(0.1), ~sg.live(loss, params)).init(params)


# By name: of parameters and a row. A number for each row decides which branch runs.
BRANCHES = {
    'of two parameters': lambda p, row: lax.cond(
        row.sum() > 0, lambda: (p['w'] * row).sum(), lambda: p['b'] * row[0]
    ),
    'one of three': lambda p, row: lax.switch(
        *(jnp.argmax(row), [lambda: p['b'], lambda: p['w'].sum(), lambda: row[0]])
    ),
    'in another': lambda p, row: lax.cond(
        row.sum() > 0,
        lambda: lax.cond(row[0] > 0, lambda: (p['w'] * row).sum(), lambda: row[1]),
        lambda: p['b'] * row[0],
    ),
    'that stops': lambda p, row: lax.cond(
        row.sum() > 0,
        lambda: (p['w'] * row).sum(),
        lambda: lax.stop_gradient(p['b']) * row[0],
    ),
    'that is a stop': lambda p, row: (
        lax.cond(row.sum() > 0, lax.stop_gradient, lambda w: w, p['w']).sum() + p['b']
    ),
    'that stops a part': lambda p, row: lax.cond(
        row.sum() > 0,
        lambda: lax.select(row > 0, p['w'], lax.stop_gradient(p['w'])).sum(),
        lambda: p['b'],
    ),
}
ROWS = jnp.linspace(-1.0, 1.0, 10).reshape(2, 5)


def by_rows(fn: Any, rows: Any) -> Any:
    return jnp.sum(jax.vmap(fn)(rows))


def repeated(fn: Any, row: Any) -> Any:
    return lax.scan(lambda total, _: (total + fn(row), None), 0.0, None, length=2)[0]


FOR_EACH_ROW = {
    'vmap': lambda fn: by_rows(fn, ROWS),
    'of jit': lambda fn: by_rows(jax.jit(fn), ROWS),
    'of vmap': lambda fn: by_rows(jax.vmap(fn), ROWS[None]),
    'of a scan': lambda fn: by_rows(jax.checkpoint(lambda r: repeated(fn, r)), ROWS),
}


@pytest.mark.parametrize(('branch', 'way'), in_turn(BRANCHES, FOR_EACH_ROW))
def test_a_branch_for_each_row_is_reported_as_one_for_all(branch, way):
    """``vmap`` runs all branches, and stops their inputs for the other rows."""
    fn, params = BRANCHES[branch], {'w': jnp.ones(5), 'b': jnp.ones(())}
    for_all = sg.gradient_flow(lambda p: fn(p, ROWS[0]), params)

    def for_each(p):
        return FOR_EACH_ROW[way](lambda row: fn(p, row))

    assert str(sg.gradient_flow(for_each, params)) == str(for_all)


NUMBERS = jnp.arange(6)[:, None]
# By name: what is read of a table of six rows, beside a use of it that is stopped.
NOT_CHOSEN = {
    'a row of padding': lambda table, n: table.at[0].set(0.0),
    'rows of data': lambda table, n: table.at[jnp.array([0, 3]) % n].set(0.0),
    'a row of zeros': lambda table, n: lax.dynamic_update_index_in_dim(
        table, jnp.zeros(3), n, 0
    ),
    'the row of another': lambda table, n: table.at[0].set(1.0 + table[n] * 0.0),
    'rows that data leaves out': lambda table, n: jnp.where(n > NUMBERS, table, 0.0),
    'rows doubled by data': lambda table, n: jnp.where(n > NUMBERS, table, 2 * table),
    'rows rounded by data': lambda table, n: jnp.where(
        n > NUMBERS, table, lax.reduce_precision(table, 8, 7)
    ),
}


@pytest.mark.usefixtures('standard_promotion')
@pytest.mark.parametrize('name', NOT_CHOSEN)
def test_zeros_beside_a_use_that_is_stopped(name):
    """Nobody stops a part of the table: it is trained."""

    def loss(params, n):
        table = params['embed']['embedding']
        return jnp.sum(NOT_CHOSEN[name](table, n)[IDS] * jnp.sin(stop(table)))

    report = sg.gradient_flow(loss, PARAMS, jnp.array(3))
    assert report.status_of('output', TABLE) == 'flows'
    live = sg.live(loss, PARAMS, jnp.array(3))
    assert sg.mask(PARAMS, frozen=~live)['embed']['embedding'] is False
    testing.assert_trains_only(report, TABLE)


JOINED = {
    'slices': lambda w: (w[:2], w[2:]),
    'split': lambda w: jnp.split(w, [2]),
    'reversed': lambda w: (w[::-1][-2:][::-1], w[::-1][:-2]),
    'in steps': lambda w: (lax.slice(w, (0, 0), (2, 4)), lax.slice(w, (2, 0), (6, 4))),
    'cut by padding': lambda w: (
        lax.pad(w, 0.0, ((0, -4, 0), (0, 0, 0))),
        lax.pad(w, 0.0, ((-2, 0, 0), (1, 1, 0))),
    ),
    'flat': lambda w: (w.ravel()[:8], w.ravel()[8:]),
    'turned': lambda w: (w.T[:, :2], w.T[:, 2:]),
    'one after the other': lambda w: (w[:4][:2], w[1:][1:]),
    'of each example': lambda w: jax.vmap(lambda c: (c[:2], c[2:]), 1)(w),
}


@pytest.mark.usefixtures('standard_promotion')
@pytest.mark.parametrize('name', JOINED)
def test_a_stop_on_the_slice_of_one_of_two_that_are_joined(name):
    """The rows of ``a`` are trained, those of ``c`` are not."""

    def loss(params):
        a, c = JOINED[name](jnp.concatenate([params['a'], params['c']]))
        return jnp.sum(a**2) + jnp.sum(jnp.sin(a)) * jnp.sum(stop(c))

    params = {'a': jnp.ones((2, 4)), 'c': jnp.ones((4, 4))}
    assert not jax.grad(loss)(params)['c'].any()
    assert sg.gradient_flow(loss, params).status == (('flows', 'stopped'),)
    testing.assert_trains_only(loss, 'a', params)


def in_a_block(params, step):
    with nn.stop_gradient(sg.where(TABLE) & (step < 5)):
        return read(params)


EMBED = sg.where('embed/**')
# By name: a loss that stops the table until step 5.
CONDITIONS: dict[str, Any] = {
    'a tree': lambda p, step: read(sg.stop_gradient(p, EMBED & (step < 5))),
    'a block': in_a_block,
    'the opposite': lambda p, step: read(sg.stop_gradient(p, EMBED & ~(step >= 5))),
    'jit': jax.jit(in_a_block),
    'where by hand': lambda p, step: with_table(
        p, lambda table: jnp.where(step < 5, stop(table), table)
    ),
    'select by hand': lambda p, step: with_table(
        p, lambda table: lax.select(step < 5, stop(table), table)
    ),
    'a matrix of bools': lambda p, step: with_table(
        p, lambda table: jnp.where((step < 5)[None, None], stop(table), table)
    ),
    'two outputs': lambda p, step: {
        'free': jnp.sum(jnp.sin(p['Dense_0']['kernel'])),
        'bound': in_a_block(p, step),
    },
}


@pytest.mark.usefixtures('standard_promotion')
@pytest.mark.parametrize('name', CONDITIONS)
def test_what_a_condition_stops_is_trained_and_told(name):
    """It is never called frozen: at another step it gets a gradient."""
    loss, step = CONDITIONS[name], jnp.array(3)
    report = sg.gradient_flow(loss, PARAMS, step)
    output = report.outputs[0] if name != 'two outputs' else 'bound'
    assert report.status_of(output, TABLE) == 'flows'
    why = report.why(output, TABLE)
    assert 'test_parts.py' in why.condition
    last = f'While a condition holds, {why.condition} stops'
    assert ' '.join(str(why).split()).endswith(f'{last} it.')
    assert ' '.join(str(report).split()).endswith(f'{last} {TABLE}.')
    assert not report.why(output, 'Dense_0/kernel').condition
    live = sg.live(loss, PARAMS, step)
    assert repr(live).endswith(f", with a condition on '{TABLE}'>")
    assert live == sg.live(lambda p: jnp.sum(read(p)), PARAMS)
    assert sg.mask(PARAMS, frozen=~live)['embed']['embedding'] is False
    testing.assert_trains_only(report, True)

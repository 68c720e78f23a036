"""Frozen is frozen: exactly the optimizer that was given the trained part alone."""

import functools
import itertools
import warnings
from typing import Any

import chex
import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze as frozen_dict
from flax.core.meta import Partitioned
from flax.training import train_state
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import flax_sg as sg
from flax_sg import errors, testing
from tests.helpers import oracle
from tests.helpers.optimizers import OPTIMIZERS

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


class Net(fnn.Module):
    @fnn.compact
    def __call__(self, x):
        for name in ('layer_0', 'layer_1'):
            x = jnp.tanh(fnn.Dense(4, name=name)(x))
        return fnn.Dense(2, name='head')(x)


NET = Net()
PARAMS = jax.jit(NET.init)(jax.random.key(0), X)['params']


def loss(params: Any, x: Any = X) -> Any:
    return jnp.sum(NET.apply({'params': params}, x) ** 2)


GRADS = jax.grad(loss)(PARAMS)
FROZEN = {
    'one layer': ['layer_0/**'],
    'all but a bias': ~sg.filters.as_filter('head/bias'),
    'nothing': False,
    'everything': True,
}

pytestmark = pytest.mark.usefixtures('standard_promotion')


def live_of(tree: Any, frozen: Any) -> Any:
    """The trained part of nested dicts, by hand: a flat dict."""
    where = sg.filters.as_filter(frozen)
    leaves = flatten_dict(tree).items()
    return {k: leaf for k, leaf in leaves if not where(sg.Path.of('params', k))}


def rebuilt(tree: Any, live: Any) -> Any:
    return unflatten_dict({**flatten_dict(tree), **live})


# Optimizer, selection, and what the gradients have for the frozen ones.
ROWS = [
    *itertools.product(OPTIMIZERS, ['one layer'], ['drop']),
    *itertools.product(['clip'], FROZEN, ['drop', 'zeros']),
    *itertools.product(['adamw', 'accumulating'], ['one layer'], ['full', 'none']),
]


@pytest.mark.parametrize(('name', 'frozen', 'absent'), ROWS)
def test_training_is_that_of_the_live_part(name, frozen, absent):
    where = FROZEN[frozen]
    tx = sg.freeze(OPTIMIZERS[name](), where)
    by_hand: Any = OPTIMIZERS[name]()

    @jax.jit
    def ours(params, state, x):
        given: Any = {'wrt': ~sg.filters.as_filter(where), 'absent': absent}
        grads = sg.grad(loss, **({} if absent == 'full' else given))(params, x)
        updates, state = tx.update(grads, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def hand(live, rest, state, x):
        grads = jax.grad(lambda live: loss(rebuilt(rest, live), x))(live)
        updates, state = by_hand.update(grads, state, live)
        return optax.apply_updates(live, updates), state

    params, live = PARAMS, live_of(PARAMS, where)
    state, hand_state = tx.init(params), by_hand.init(live)
    for number in range(4):
        params, state = ours(params, state, X * (number + 1))
        live, hand_state = hand(live, PARAMS, hand_state, X * (number + 1))
    oracle.assert_same(params, rebuilt(PARAMS, live))
    # The state has exactly the arrays that the optimizer of the live part has.
    oracle.assert_same(*map(jax.tree.leaves, (state, hand_state)))


def test_updates_have_the_form_of_the_parameters():
    """Without parameters, that of the gradients."""
    where = 'layer_*/**'
    tx = sg.freeze(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)), where)
    state = tx.init(PARAMS)
    full, _ = jax.jit(tx.update)(GRADS, state, PARAMS)
    masked = jax.tree.map(lambda _: optax.MaskedNode(), GRADS) | {'head': GRADS['head']}
    for grads in (
        *(sg.grad(loss, wrt='head/**', absent=a)(PARAMS) for a in ('drop', 'zeros')),
        masked,
        {'head': GRADS['head']},
        {'head': GRADS['head'], 'layer_0': None},  # And no 'layer_1'.
    ):
        updates, _ = tx.update(grads, state, PARAMS)
        assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)
        new = optax.apply_updates(PARAMS, updates)
        oracle.assert_same(new['layer_0'], PARAMS['layer_0'])
        chex.assert_trees_all_close(updates['head'], full['head'], rtol=1e-6)
        if grads.keys() == PARAMS.keys() and grads is not masked:
            alone, _ = tx.update(grads, state)
            assert jax.tree.structure(alone) == jax.tree.structure(grads)
            oracle.assert_same(alone['head'], updates['head'])


def pointers(tree: Any) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


BOTH_TYPES = [('head/**', jnp.float32), (True, jnp.bfloat16)]


@pytest.mark.parametrize(('wrt', 'dtype'), BOTH_TYPES)
def test_frozen_buffers_are_the_same_under_donation(wrt, dtype):
    body_of = lambda params: {k: params[k] for k in params if k != 'head'}  # noqa: E731
    tx = sg.freeze(optax.adam(0.1), 'layer_*/**')
    params = jax.tree.map(lambda x: jnp.array(x, dtype), PARAMS)
    state = train_state.TrainState.create(apply_fn=NET.apply, params=params, tx=tx)
    state = jax.tree.map(jnp.copy, state)
    before = pointers(body_of(state.params))
    kept = jax.tree.map(np.array, body_of(params))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state):
        return state.apply_gradients(grads=sg.grad(loss, wrt=wrt)(state.params))

    for _ in range(3):
        state = step(state)
    assert pointers(body_of(state.params)) == before
    oracle.assert_same(body_of(state.params), kept)
    assert int(state.step) == 3


MARKED = {
    'body': {'w': 1.0, 'n': 3},
    'head': {'w': jnp.ones(2), 'm': sg.NonDifferentiable(1.0)},
    'key': jax.random.key(0),
}
STATS = {'params': {'w': 1.0}, 'batch_stats': {'m': 1.0}}
# The tree, the arguments, and where the mask is True.
MASKS = [
    (MARKED, {'trained': 'head/w'}, ['head/w']),
    (MARKED, {'frozen': 'body/**'}, ['body/w', 'body/n', 'head/m', 'key']),
    (MARKED, {'trained': True}, ['body/w', 'head/w']),
    (MARKED, {'frozen': False}, ['body/n', 'head/m', 'key']),
    (MARKED, {'frozen': True}, ['body/w', 'body/n', 'head/w', 'head/m', 'key']),
    (MARKED, {'trained': 'none', 'unused': 'ignore'}, []),
    (MARKED, {'frozen': 'none', 'unused': 'ignore'}, ['body/n', 'head/m', 'key']),
    (STATS, {'frozen': False}, []),
    (STATS, {'frozen': lambda p: p.collection == 'batch_stats'}, ['batch_stats/m']),
    ({'w': jax.ShapeDtypeStruct((2,), jnp.float32)}, {'trained': 'w'}, ['w']),
    # Nothing stands where nothing is.
    ({'body': sg.ABSENT, 'head': 1.0}, {'trained': 'head'}, ['head']),
    ({'body': sg.ABSENT, 'head': 1.0}, {'frozen': 'head'}, ['head']),
]


def test_masks_say_which_side_is_true():
    whole = lambda node: isinstance(node, sg.NonDifferentiable)  # noqa: E731
    for tree, given, true in MASKS:
        mask = sg.mask(tree, **given)
        assert jax.tree.structure(mask) == jax.tree.structure(tree, is_leaf=whole)
        for name, said in oracle.by_path(mask).items():
            assert said is (name in true), (given, name)


def test_masks_and_labels_keep_boxes_and_judge_their_filters():
    boxed = frozen_dict({'d': Partitioned(jnp.ones(2), ('x',))})
    assert sg.mask(boxed, trained='d')['d'].value is True
    pruned = {'body': sg.ABSENT, 'head': 1.0}
    assert sg.labels(pruned, {'fast': 'head'}) == {'body': sg.ABSENT, 'head': 'fast'}
    params = {'head': 1.0, 'body': 1.0}
    for name, call in {
        r'mask\(trained=...\)': lambda: sg.mask(params, trained='haed'),
        r'mask\(frozen=...\)': lambda: sg.mask(params, frozen='haed'),
        'labels': lambda: sg.labels(params, {'a': 'haed', 'b': True}),
        'freeze': lambda: sg.freeze(optax.sgd(0.1), 'haed').init(params),
    }.items():
        said = rf"^sg\.{name}: Glob\('haed'\) matches none of"
        with pytest.raises(errors.UnusedFilterError, match=said):
            call()


def test_labels():
    params = {'body': {'w': jnp.ones(2)}, 'head': {'w': jnp.ones(2), 'n': 3}}
    slow, fast, tail = {'slow': 'body/**'}, {'fast': 'head/**'}, {'fast': 'tail'}
    for labels, body, w, n in (
        (sg.labels(params, slow | fast), 'slow', 'fast', 'frozen'),
        (sg.labels(params, lambda path: path.parts[0], rest='a'), 'body', 'head', 'a'),
        (sg.labels(params, fast, rest='frozen'), 'frozen', 'fast', 'frozen'),
        (sg.labels(params, lambda path: None, rest='x'), 'x', 'x', 'x'),
        (sg.labels(params, tail, 'x', unused='ignore'), 'x', 'x', 'x'),
    ):
        assert labels == {'body': {'w': body}, 'head': {'w': w, 'n': n}}
    for where, said in (slow, "'head/w'"), (slow | fast | {'all': '**'}, '2 labels'):
        with pytest.raises(errors.StructureError, match=said):
            sg.labels(params, where)


def test_leaves_that_no_optimizer_can_take():
    # Hazard 26; and hazard 31, gradients of jax.grad with allow_int.
    marked = {'k': jax.random.key(0), 'm': 2**30 + 1, 'f': 0.3}
    params = {name: sg.NonDifferentiable(x) for name, x in marked.items()}
    params |= {'w': jnp.ones(2), 'i': jnp.arange(3)}
    tx = sg.freeze(optax.adamw(0.1, weight_decay=0.5))
    zeros = {name: jax.tree.map(jnp.zeros_like, params[name]) for name in 'mf'}
    integers = np.zeros(3, jax.dtypes.float0)
    grads = {'k': sg.ABSENT, 'w': jnp.ones(2), 'i': integers, **zeros}
    state = tx.init(params)
    assert sum(x.size for x in jax.tree.leaves(state)) == 5
    updates, state = tx.update(grads, state, params)
    new = optax.apply_updates(params, updates)
    kept, old = ({k: p[k] for k in 'ikmf'} for p in (new, params))
    oracle.assert_same(kept, jax.tree.map(jnp.asarray, old))
    assert not np.array_equal(new['w'], params['w'])
    assert new['m'].value == 2**30 + 1
    # Bare keys and text have no update.
    bare = {'k': jax.random.key(0), 's': 'text', 'w': jnp.ones(2)}
    updates, _ = tx.update({'w': jnp.ones(2)}, tx.init(bare), bare)
    assert updates['k'] is updates['s'] is sg.ABSENT


with pytest.warns(UserWarning, match='trains none of'):
    LIVE_NOTHING = sg.live(lambda p: 0.0, PARAMS)
NAMED = {
    'wrong way round': (PARAMS, '**', True),
    'what was selected already': ({'head': PARAMS['head']}, 'head/**', True),
    'a part of it': (PARAMS, 'head/**', False),
    'said plainly': (PARAMS, True, False),
    'nothing to train': ({'n': jnp.arange(3)}, False, False),
    'derived': (PARAMS, ~LIVE_NOTHING, False),
}


@pytest.mark.parametrize('name', NAMED)
def test_a_filter_that_freezes_everything_warns(name):
    params, where, warns = NAMED[name]
    with warnings.catch_warnings(record=True, action='always') as caught:
        sg.freeze(optax.sgd(0.1), where).init(params)
        sg.freeze(optax.sgd(0.1), where, unused='ignore').init(params)
    texts = [str(w.message) for w in caught]
    assert ['nothing is trained' in text for text in texts] == [True] * warns
    fix = 'sg.freeze(tx, ~sg.where(where))'
    for text in texts:
        assert fix in text
        eval(fix, {'sg': sg, 'tx': optax.sgd(0.1), 'where': where})


def test_fp8_values_are_replaced_by_their_gradient():
    """By the ``TrainState`` of Flax, which takes pruned gradients."""
    name = '_overwrite_with_gradient'
    params = {'params': PARAMS, name: {'layer_0': {'scale': jnp.array(1.0)}}}

    def fun(p):
        return loss(p['params']) * p[name]['layer_0']['scale']

    tx = sg.freeze(optax.adamw(0.1), 'layer_*/**')
    state = train_state.TrainState.create(apply_fn=NET.apply, params=params, tx=tx)
    for _ in range(2):
        pruned = sg.grad(fun, wrt='head/**')(state.params)
        full = jax.grad(fun)(state.params)
        state, other = (state.apply_gradients(grads=grads) for grads in (pruned, full))
        oracle.assert_same(state.params, other.params)
        oracle.assert_same(state.params[name], full[name])
        oracle.assert_same(state.params['params']['layer_0'], PARAMS['layer_0'])
    with pytest.raises(errors.ArgumentValueError, match='no optimizer may see'):
        sg.freeze(optax.sgd(0.1), 'head/**').init(params)


def test_what_the_optimizer_is_given():
    seen: dict[str, Any] = {}

    def update(updates, state, params=None, **extra):
        seen.update(updates=updates, params=params, **extra)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda params: {'m': params}, update)
    tx = sg.freeze(spy, 'body')
    mark = sg.NonDifferentiable(4.0)
    params = {'body': object(), 'head': 3.0, 'mark': mark}
    grads = {'body': 2.0, 'head': 1.0, 'mark': mark}
    pruned = {'body': sg.ABSENT, 'head': 1.0, 'mark': sg.ABSENT}
    state = tx.init(params)
    assert state == {'m': {**pruned, 'head': 3.0}}
    extra = {'grad': grads, 'value': 5.0, 'other': {'head': 1.0}, 'fun': print}
    updates, new = tx.update(grads, state, params, **extra)
    assert updates['body'] is sg.ABSENT  # As an object has no update.
    assert updates['head'] == 1.0
    assert new == state
    shown = {**extra, 'grad': pruned}
    assert seen == {'updates': pruned, 'params': {**pruned, 'head': 3.0}, **shown}
    tx.update(grads, state, **extra)
    assert seen == {'updates': pruned, 'params': None, **shown}
    for name in ('value_fn', 'grad_fn', 'obj_fn'):
        with pytest.raises(errors.ArgumentTypeError, match=f'got {name}='):
            tx.update(grads, state, params, **{name: print})
    with pytest.raises(errors.StructureError, match="'head'"):
        tx.update({'body': 2.0}, state, params)
    with pytest.raises(errors.PartError, match="does not fit 'head', an array"):
        sg.freeze(spy, sg.at('head', 0)).update(grads, state, params)
    # Of an array it sees the rows that are trained.
    tx = sg.freeze(spy, sg.at('w', 0))
    more = {'rates': {'w': 0.5}, 'other': {'w': np.array([5.0, 6.0])}}
    updates, _ = tx.update({'w': np.full(2, -2.0)}, state, {'w': np.ones(2)}, **more)
    assert seen['updates']['w'].tolist() == [-2.0]
    assert seen['rates'] == {'w': 0.5} and seen['other']['w'].tolist() == [6.0]
    assert str(updates['w']) == '[-0. -2.]'
    # Of an array in part it sees no gradient there, and its update there is taken back.
    tx = sg.freeze(spy, sg.at('w', np.s_[:, 0]))
    updates, _ = tx.update({'w': np.full((1, 2), -2.0)}, state, {'w': np.ones((1, 2))})
    assert str(seen['updates']['w']) == '[[ 0. -2.]]'
    assert str(updates['w']) == '[[-0. -2.]]'


def test_the_update_of_what_is_frozen_is_a_constant_that_adds_nothing():
    params = {
        'f': np.full((2, 3), -0.0, np.float32),
        'c': np.ones(2, np.complex64),
        'h': np.ones(2, jnp.bfloat16),
        'i': np.ones(2, np.int8),
        'u': np.ones((), np.uint8),
        'o': np.array([True, False]),
        'n': 1.5,
        'mark': sg.NonDifferentiable(np.ones(2, np.float32)),
    }
    tx = sg.freeze(optax.sgd(0.1), True)
    for grads in ({}, {'f': np.ones((2, 3), np.float16)}):
        updates, _ = tx.update(grads, tx.init(params), params)
        for leaf, update in zip(*map(jax.tree.leaves, (params, updates)), strict=True):
            assert update.shape == np.shape(leaf)
            assert update.dtype == jnp.result_type(leaf)
            assert not any(update.strides)
            exact = not jnp.issubdtype(update.dtype, jnp.inexact)
            assert exact or np.signbit(np.real(update).astype(float)).all()
        new = jax.jit(optax.apply_updates)(params, updates)
        oracle.assert_same(new, jax.tree.map(jnp.asarray, params))
    # Without parameters they are those of the gradients.
    odd = {'absent': sg.ABSENT, 'float0': np.zeros(3, jax.dtypes.float0)}
    updates, _ = tx.update(odd, tx.init({}))
    assert updates['absent'] is sg.ABSENT
    assert updates['float0'].dtype == jax.dtypes.float0


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
def test_what_is_frozen_goes_through_a_program_as_it_is(kind):
    """With explicit shardings XLA adds minus zero, and leaves out zero."""
    mesh = Mesh(np.array(jax.devices()[:4]), ('data',), axis_types=(kind,))
    sharding = NamedSharding(mesh, PartitionSpec('data'))
    leaf = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=sharding)
    params = {'backbone': leaf, 'head': leaf}
    labels = {'backbone': 'frozen', 'head': 'live'}
    sgd = optax.sgd(0.1)

    def step(tx, params, grads):
        updates, _ = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates)

    sides = {'live': sgd, 'frozen': optax.set_to_zero()}
    both = sg.freeze(sgd, 'backbone'), optax.multi_transform(sides, labels)
    with jax.set_mesh(mesh):
        steps = [jax.jit(functools.partial(step, tx), donate_argnums=0) for tx in both]
        testing.assert_same_program(*steps, params, params)
        text = testing.optimized_hlo(steps[0], params, params)
        assert text.count(' add(') + text.count(' subtract(') == 1
        minus = jax.device_put(np.full((64, 64), -0.0, np.float32), sharding)
        zeros = {name: jnp.copy(minus) for name in params}
        new = steps[0](zeros, {name: jnp.ones_like(minus) for name in params})
    assert np.signbit(new['backbone']).all()


def test_pruned_gradients_for_an_optimizer_of_optax_say_what_to_write():
    """The rest of the message is that of JAX, which differs between versions."""
    params, tx = {'a': 1.0, 'b': 2.0}, optax.adam(0.1)
    pruned = sg.grad(lambda p: p['a'] * p['b'], wrt='a')(params)
    with pytest.raises((ValueError, errors.AbsentLeafError), match=r'sg\.freeze'):
        tx.update(pruned, tx.init(params), params)
    # Around sg.freeze, what stands outside gets all, with zeros for what is frozen.
    stopped = optax.chain(sg.freeze(tx, 'b'), optax.ema(0.9))
    updates, _ = stopped.update(pruned, stopped.init(params), params)
    assert float(updates['b']) == 0.0


# Gradients for each example, and what optax reads as a whole tree.

TWO = {'body': jnp.ones((2, 3)), 'head': jnp.full((2, 3), 2.0)}


@pytest.mark.parametrize('clip', [1e9, 1.0])
def test_gradients_for_each_example(clip):
    grads = {'body': jnp.ones((4, 2, 3)), 'head': jnp.arange(24.0).reshape(4, 2, 3)}
    private = optax.contrib.differentially_private_aggregate(clip, 0.0, 0)
    dpsgd = optax.chain(private, optax.sgd(0.5))
    tx = sg.freeze(dpsgd, 'body')
    updates, _ = jax.jit(tx.update)(grads, tx.init(TWO), TWO)
    head = {'head': TWO['head']}
    by_hand = jax.jit(dpsgd.update)
    expected, _ = by_hand({'head': grads['head']}, dpsgd.init(head), head)
    oracle.assert_same(updates['head'], expected['head'])
    # What is frozen has the shape of the parameter, not that of its gradients.
    oracle.assert_same(optax.apply_updates(TWO, updates)['body'], TWO['body'])
    # Indices are those of the parameter.
    tx = sg.freeze(dpsgd, ['body', sg.at('head', 0)])
    updates, _ = jax.jit(tx.update)(grads, tx.init(TWO), TWO)
    grads = {'head': grads['head'].at[:, 0].set(0.0)}
    expected, _ = by_hand(grads, dpsgd.init(head), head)
    oracle.assert_same(updates['head'][1], expected['head'][1])
    assert oracle.is_zero(updates['head'][0])
    # An optimizer that does not add them up gives an update for each.
    tx = sg.freeze(optax.sgd(1.0), ['body', sg.at('head', np.s_[:, 0])])
    updates, _ = tx.update(grads, tx.init(TWO), TWO)
    oracle.assert_same(updates['head'][..., 1:], -grads['head'][..., 1:])
    assert oracle.is_zero(updates['head'][..., 0])


def quadratic(p: Any) -> Any:
    return jnp.sum(p['a'] ** 2) + jnp.sum(p['b'] ** 2 * p['a'])


PAIR = {'a': jnp.array([1.0, 2.0]), 'b': jnp.array([3.0, -1.0])}


def test_a_large_frozen_part_is_no_constant_of_the_program():
    """JAX warns of two gigabytes that are captured; here a warning is an error."""
    shapes = {'backbone': (1024, 1024, 1024), 'head': (3,)}
    params = {k: jax.ShapeDtypeStruct(v, np.float32) for k, v in shapes.items()}
    tx = sg.freeze(optax.sgd(0.1), 'backbone')

    def step(params, state, grads):
        return optax.apply_updates(params, tx.update(grads, state, params)[0])

    state = jax.eval_shape(tx.init, params)
    lowered = jax.jit(step, donate_argnums=0).lower(params, state, params)
    # It goes through as it is.
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 1000


def test_what_optax_reads_as_a_whole_tree():
    """It is given the trained part, too."""
    tx = sg.freeze(optax.contrib.schedule_free_sgd(0.1), 'a')
    whole = optax.contrib.schedule_free_sgd(0.1)
    state = tx.init(PAIR)
    with pytest.raises(errors.AbsentLeafError, match=r'write sg.combine'):
        optax.contrib.schedule_free_eval_params(state, PAIR)
    part, rest = sg.partition(PAIR, 'b')
    found = sg.combine(optax.contrib.schedule_free_eval_params(state, part), rest)
    live = {'b': PAIR['b']}
    expected = optax.contrib.schedule_free_eval_params(whole.init(live), live)
    oracle.assert_same(found, {**PAIR, **expected})

    tx, specs = sg.freeze(optax.adam(0.1), 'a'), {'a': 'A', 'b': 'B'}
    state = tx.init(PAIR)

    of = functools.partial(optax.tree_map_params, tx, lambda x, spec: spec, state)
    with pytest.raises(ValueError, match=r'another part of the tree'):
        of(specs)
    assert of(sg.partition(specs, 'b')[0])[0].mu == {'a': sg.ABSENT, 'b': 'B'}


def test_lookahead_goes_around():
    tx = optax.lookahead(sg.freeze(optax.adamw(0.1, weight_decay=0.5), 'a'), 2, 0.5)
    params = optax.LookaheadParams.init_synced(PAIR)
    state = tx.init(params)
    for _ in range(5):
        grads = sg.grad(quadratic, wrt='b', absent='zeros')(params.fast)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    for found in params:
        oracle.assert_same(found['a'], PAIR['a'])
        assert not np.array_equal(found['b'], PAIR['b'])


def test_an_error_of_the_optimizer_is_that_of_the_state_only_if_it_does_not_fit():
    def update(updates, state, params=None):
        raise ValueError('of its own')

    params = {'body': 1.0, 'head': jnp.ones(())}
    for init in lambda p: [*map(float, jax.tree.leaves(p))], lambda p: {'m': p}:
        tx = sg.freeze(optax.GradientTransformation(init, update), 'body')
        state = tx.init(params)
        with pytest.raises(ValueError, match=r'^of its own$'):
            tx.update(params, state, params)
    with pytest.raises(errors.StructureError, match='does not belong'):
        tx.update(params, frozen_dict(state), params)


def test_the_repr_of_a_freeze_says_what_is_frozen():
    tx = sg.freeze(optax.adam(1e-3), ['body/**', '**/bias'])
    assert repr(tx) == "sg.freeze(tx, Glob('body/**') | Glob('**/bias'))"
    assert repr(sg.freeze(tx)) == 'sg.freeze(tx, DECLARED)'
    assert repr(tx._replace(init=tx.init)) == repr(tx)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)

"""Frozen is frozen: exactly the optimizer that was given the trained part alone."""

import functools
import itertools
from typing import Any

import flax
import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.core import freeze as frozen_dict
from flax.core.meta import Partitioned
from flax.traverse_util import flatten_dict, unflatten_dict

import flax_sg as sg
import oracle
import programs
from flax_sg import errors, testing
from flax_sg import linen as nn

X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)


class Net(fnn.Module):
    depth: int = 2
    width: int = 4

    @fnn.compact
    def __call__(self, x):
        for number in range(self.depth):
            x = jnp.tanh(fnn.Dense(self.width, name=f'layer_{number}')(x))
        return fnn.Dense(2, name='head')(x)


NET = Net()
PARAMS = NET.init(jax.random.key(0), X)['params']


def loss(params: Any, x: Any = X) -> Any:
    return jnp.sum(NET.apply({'params': params}, x) ** 2)


GRADS = jax.grad(loss)(PARAMS)
FROZEN = {
    'one layer': ['layer_0/**'],
    'all but a bias': ~sg.filters.as_filter('head/bias'),
    'nothing': False,
    'everything': True,
}
OPTIMIZERS = {
    'adamw': lambda: optax.adamw(0.1, weight_decay=0.5),
    'clip': lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
    'factored': lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    'accumulating': lambda: optax.MultiSteps(optax.adamw(0.1), every_k_schedule=2),
}

pytestmark = pytest.mark.usefixtures('standard_promotion')


def live_of(tree: Any, frozen: Any) -> Any:
    """The trained part of nested dicts, by hand: a flat dict."""
    where = sg.filters.as_filter(frozen)
    leaves = flatten_dict(tree).items()
    return {k: leaf for k, leaf in leaves if not where(sg.Path.of('params', k))}


def rebuilt(tree: Any, live: Any) -> Any:
    return unflatten_dict({**flatten_dict(tree), **live})


def assert_close(actual: Any, expected: Any, **tolerance: float) -> None:
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, **tolerance), actual, expected
    )


@pytest.mark.parametrize(
    ('name', 'frozen'),
    [
        *((name, 'one layer') for name in OPTIMIZERS),
        *(('clip', frozen) for frozen in ('all but a bias', 'nothing', 'everything')),
    ],
)
def test_training_is_that_of_the_live_part(name, frozen):
    where = FROZEN[frozen]
    tx = sg.freeze(OPTIMIZERS[name](), where)
    by_hand: Any = OPTIMIZERS[name]()

    @jax.jit
    def ours(params, state, x):
        grads = sg.grad(loss, wrt=~sg.filters.as_filter(where))(params, x)
        updates, state = tx.update(grads, state, params)
        return sg.apply_updates(params, updates), state

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


def test_updates_are_shaped_like_the_gradients():
    where = 'layer_*/**'
    tx = sg.freeze(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)), where)
    update = jax.jit(tx.update)
    full, _ = update(GRADS, tx.init(PARAMS), PARAMS)
    assert jax.tree.structure(full) == jax.tree.structure(GRADS)
    oracle.assert_same(optax.apply_updates(PARAMS, full)['layer_0'], PARAMS['layer_0'])
    for absent, params in (
        *itertools.product(('drop', 'masked'), (None, PARAMS)),
        *((absent, PARAMS) for absent in ('none', 'zeros', 'pruned by hand')),
    ):
        grads = {'head': GRADS['head']}
        if absent != 'pruned by hand':
            grads = sg.grad(loss, wrt='head/**', absent=absent)(PARAMS)
        updates, _ = tx.update(grads, tx.init(PARAMS), params)
        assert jax.tree.structure(updates) == jax.tree.structure(grads)
        new = sg.apply_updates(PARAMS, updates)
        expected = optax.apply_updates(PARAMS['head'], updates['head'])
        oracle.assert_same(new['head'], expected)
        assert_close(updates['head'], full['head'], rtol=1e-6)
        assert new['layer_0']['kernel'] is PARAMS['layer_0']['kernel']


def test_the_program_is_that_of_the_live_part():
    tx, plain = sg.freeze(optax.adamw(0.1), 'layer_*/**'), optax.adamw(0.1)

    def ours(params, state, x):
        grads = sg.grad(loss, wrt='head/**')(params, x)
        updates, state = tx.update(grads, state, params)
        return sg.apply_updates(params, updates)['head'], state

    def hand(params, state, x):
        grads = jax.grad(lambda head: loss({**params, 'head': head}, x))(params['head'])
        updates, state = plain.update(grads, state, params['head'])
        return optax.apply_updates(params['head'], updates), state

    args = (PARAMS, plain.init(PARAMS['head']), X)
    compiled = programs.compiled(ours, PARAMS, tx.init(PARAMS), X)
    testing.assert_same_program(compiled, hand, *args)


def pointers(tree: Any) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize('wrt', ['head/**', True])
def test_frozen_buffers_are_the_same_under_donation(wrt):
    def body_of(params):
        return {name: params[name] for name in params if name != 'head'}

    tx = sg.freeze(optax.adam(0.1), 'layer_*/**')
    params = jax.tree.map(jnp.copy, PARAMS)
    state = sg.TrainState.create(apply_fn=NET.apply, params=params, tx=tx)
    before, kept = pointers(body_of(params)), jax.tree.map(np.array, body_of(params))

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
    for call, name in (
        (lambda: sg.mask(params, trained='haed'), r'mask\(trained=...\)'),
        (lambda: sg.mask(params, frozen='haed'), r'mask\(frozen=...\)'),
        (lambda: sg.labels(params, {'a': 'haed', 'b': True}), 'labels'),
        (lambda: sg.freeze(optax.sgd(0.1), 'haed').init(params), 'freeze'),
    ):
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
    with pytest.raises(errors.UnusedFilterError, match=r"Glob\('tail'\)"):
        sg.labels(params, tail, rest='frozen')


def test_leaves_that_no_optimizer_can_take():
    # Hazard 26; and hazard 31, gradients of jax.grad with allow_int.
    params = {
        'w': jnp.ones(2),
        'i': jnp.arange(3),
        'k': jax.random.key(0),
        's': 'text',
        'm': sg.NonDifferentiable(2**30 + 1),
        'f': sg.NonDifferentiable(0.3),
    }
    tx = sg.freeze(optax.adamw(0.1, weight_decay=0.5))
    grads = {
        **{k: sg.ABSENT for k in 'ks'},
        'w': jnp.ones(2),
        'i': np.zeros(3, jax.dtypes.float0),
        'm': jax.tree.map(jnp.zeros_like, params['m']),
        'f': jax.tree.map(jnp.zeros_like, params['f']),
    }
    state = tx.init(params)
    assert sum(x.size for x in jax.tree.leaves(state)) == 5
    updates, state = tx.update(grads, state, params)
    new = sg.apply_updates(params, updates)
    assert all(new[k] is params[k] for k in 'iksmf')
    assert not np.array_equal(new['w'], params['w'])
    assert new['m'].value == 2**30 + 1
    del params['k'], params['s'], grads['k'], grads['s'], params['i'], grads['i']
    plain = optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])
    assert int(plain['m']) == 2**30 + 1
    assert float(plain['f']) == np.float32(0.3)


def test_adopting_a_state_forgets_nothing():
    traces: list[int] = []

    def train(tx, params, state, steps):
        @jax.jit
        def step(params, state):
            traces.append(1)
            updates, state = tx.update(jax.grad(loss)(params), state, params)
            return sg.apply_updates(params, updates), state

        for _ in range(steps):
            params, state = step(params, state)
        return params, state

    adam = optax.adam(0.1)
    # All is trained, then two layers are frozen, then one of them is thawed.
    params, full = train(adam, PARAMS, adam.init(PARAMS), 3)
    tx = sg.freeze(adam, 'layer_*/**')
    state = sg.adopt(tx, params, full)
    assert state[0].mu['layer_1']['bias'] is sg.ABSENT
    oracle.assert_same(state[0].mu['head'], full[0].mu['head'])
    params, state = train(tx, params, state, 2)
    tx, before = sg.freeze(adam, 'layer_0/**'), state
    state = sg.adopt(tx, params, before, full)
    oracle.assert_same(state[0].mu['head'], before[0].mu['head'])
    oracle.assert_same(state[0].mu['layer_1'], full[0].mu['layer_1'])
    assert state[0].mu['layer_0']['bias'] is sg.ABSENT
    assert int(state[0].count) == 5
    params, state = train(tx, params, state, 2)
    assert len(traces) == 3

    # The same by hand: full moments, and those of frozen layers are put back.
    hand, (moments, *rest) = train(adam, PARAMS, adam.init(PARAMS), 3)
    for frozen in (('layer_0', 'layer_1'), ('layer_0',)):
        for _ in range(2):
            before = hand, moments
            grads = jax.grad(loss)(hand)
            updates, (moments, *rest) = adam.update(grads, (moments, *rest), hand)
            hand = optax.apply_updates(hand, updates)
            for name in frozen:
                hand = {**hand, name: before[0][name]}
                mu = {**moments.mu, name: before[1].mu[name]}
                nu = {**moments.nu, name: before[1].nu[name]}
                moments = moments._replace(mu=mu, nu=nu)
    assert_close(params, hand, rtol=1e-5, atol=1e-6)
    oracle.assert_same(params['layer_0'], hand['layer_0'])


def test_adopting_in_groups_of_optax():
    # A group keeps optax's own sentinel for what belongs to another group.
    groups = {'layers': optax.adam(0.1), 'head': optax.adam(0.2)}
    group_of = lambda path: 'head' if path.startswith('head') else 'layers'  # noqa: E731
    grouped = optax.multi_transform(groups, lambda p: sg.labels(p, group_of))
    tx = sg.freeze(grouped, 'layer_*/**')
    state = tx.init(PARAMS)
    _, state = tx.update(GRADS, state, PARAMS)
    head = state.inner_states['head']
    tx = sg.freeze(grouped, 'layer_0/**')
    state = sg.adopt(tx, PARAMS, state)
    _, state = tx.update(GRADS, state, PARAMS)
    now = state.inner_states
    # Alone: the head took two steps, the thawed layer one, the frozen one none.
    for name, rate, steps in (('head', 0.2, 2), ('layer_1', 0.1, 1)):
        alone = optax.adam(rate)
        expected = alone.init(PARAMS[name])
        for _ in range(steps):
            _, expected = alone.update(GRADS[name], expected, PARAMS[name])
        group = 'head' if name == 'head' else 'layers'
        oracle.assert_same(now[group].inner_state[0].mu[name], expected[0].mu)
    assert head.inner_state[0].mu['layer_1']['bias'] is sg.ABSENT
    assert now['layers'].inner_state[0].mu['layer_0']['bias'] is sg.ABSENT


def test_what_no_state_knows_starts_anew():
    adam = optax.adam(0.1)
    tx = sg.freeze(adam, ['layer_0/**', 'layer_1/**'])
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    before = state[0].mu['head']
    for name, tx in ('layer_1', sg.freeze(adam, 'layer_0/**')), ('layer_0', adam):
        state = sg.adopt(tx, PARAMS, state)
        assert oracle.is_zero(state[0].mu[name])
        oracle.assert_same(state[0].mu['head'], before)
    assert int(state[0].count) == 1
    assert jax.tree.structure(state) == jax.tree.structure(adam.init(PARAMS))
    with pytest.raises(errors.StructureError, match='another transformation'):
        sg.adopt(optax.sgd(0.1, momentum=0.9), PARAMS, state)


def test_a_filter_is_judged_when_the_state_is_made():
    tx = sg.freeze(optax.sgd(0.1), 'layer_0/**')
    state, other = tx.init(PARAMS), {'head': PARAMS['head']}
    with pytest.raises(errors.UnusedFilterError, match=r'layer_0/\*\*'):
        tx.init(other)
    # Gradients that stand for the parameters may lack what the filter names.
    assert list(tx.update(other, state)[0]) == ['head']
    sg.freeze(optax.sgd(0.1), 'layer_0/**', unused='ignore').init(other)


def test_checkpoints(tmp_path):
    def start():
        tx = sg.freeze(optax.adamw(0.1), 'layer_*/**')
        params = {**PARAMS, 'extra': {'m': sg.NonDifferentiable(3)}}
        return sg.TrainState.create(apply_fn=NET.apply, params=params, tx=tx)

    @jax.jit
    def step(state):
        return state.apply_gradients(grads=sg.grad(loss, wrt='head/**')(state.params))

    state = step(start())
    expected = step(state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'state', state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / 'state', state)
    # And with the serialization of Flax.
    other = serialization.from_bytes(start(), serialization.to_bytes(state))
    for found in map(step, (restored, other)):
        oracle.assert_same(found.opt_state, expected.opt_state)
        oracle.assert_same(*(jax.tree.leaves(s.params) for s in (found, expected)))
        assert int(found.params['extra']['m']) == 3


def test_fp8_values_are_replaced_by_their_gradient():
    params = {
        'params': PARAMS,
        '_overwrite_with_gradient': {'layer_0': {'scale': jnp.array(1.0)}},
    }

    def fun(p):
        scale = p['_overwrite_with_gradient']['layer_0']['scale']
        return loss(p['params']) * scale

    tx = sg.freeze(optax.adamw(0.1), 'layer_*/**')
    state = sg.TrainState.create(apply_fn=NET.apply, params=params, tx=tx)
    name = '_overwrite_with_gradient'
    for _ in range(2):
        pruned = sg.grad(fun, wrt='head/**')(state.params)
        full = jax.grad(fun)(state.params)
        state, other = (state.apply_gradients(grads=grads) for grads in (pruned, full))
        oracle.assert_same(state.params, other.params)
        oracle.assert_same(state.params[name], full[name])
        oracle.assert_same(state.params['params']['layer_0'], PARAMS['layer_0'])
    with pytest.raises(errors.ArgumentValueError, match='no optimizer may see'):
        sg.freeze(optax.sgd(0.1), 'head/**').init(params)


@flax.struct.dataclass
class Layer:
    body: Any
    head: Any


def test_a_train_state_of_a_dataclass():
    tx = sg.freeze(optax.sgd(0.5, 0.5), 'body')
    params = Layer(jnp.ones(2), jnp.full(2, 3.0))
    state = sg.TrainState.create(apply_fn=None, params=params, tx=tx)
    for _ in range(2):
        grads = sg.grad(lambda p: jnp.sum(p.body * p.head**2), wrt='head')(state.params)
        state = state.apply_gradients(grads=grads)
    first = 3.0 - 0.5 * 6.0
    head = first - 0.5 * (2.0 * first + 0.5 * 6.0)
    oracle.assert_same(state.params, Layer(jnp.ones(2), jnp.full(2, head)))
    assert state.params.body is params.body
    assert int(state.step) == 2


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
    called: list[Any] = []
    extra = {'grad': grads, 'value': 5.0, 'other': {'head': 1.0}, 'fun': called.append}
    updates, new = tx.update(grads, state, params, value_fn=called.append, **extra)
    assert (updates['body'], updates['head']) == (0.0, 1.0)
    assert np.signbit(updates['body'])
    assert new == state
    value_fn = seen.pop('value_fn')
    shown = {**extra, 'grad': pruned}
    assert seen == {'updates': pruned, 'params': {**pruned, 'head': 3.0}, **shown}
    value_fn({**pruned, 'head': 7.0})
    assert called == [{**params, 'head': 7.0}]
    # Without the parameters no function can be given them.
    tx.update(grads, state, value_fn=called.append, **extra)
    assert seen.pop('value_fn') == called.append
    assert seen == {'updates': pruned, 'params': None, **shown}
    tx.update(grads, state, params, value_fn=5)
    assert seen['value_fn'] == 5
    with pytest.raises(errors.StructureError, match="'head'"):
        tx.update({'body': 2.0}, state, params)
    with pytest.raises(errors.PartError, match="does not fit 'head', an array"):
        sg.freeze(spy, sg.at('head', 0)).update(grads, state, params)
    # Of an array it sees the rows that are trained.
    tx = sg.freeze(spy, sg.at('w', 0))
    updates, _ = tx.update({'w': np.full(2, -2.0)}, state, {'w': np.ones(2)})
    assert seen['updates']['w'].rows.tolist() == [-2.0]
    assert str(updates['w']) == '[-0. -2.]'
    # Of an array in part it sees no gradient there, and its update there is taken back.
    tx = sg.freeze(spy, sg.at('w', np.s_[:, 0]))
    updates, _ = tx.update({'w': np.full((1, 2), -2.0)}, state, {'w': np.ones((1, 2))})
    assert str(seen['updates']['w']) == '[[ 0. -2.]]'
    assert str(updates['w']) == '[[-0. -2.]]'


def test_an_error_of_the_optimizer_is_that_of_the_state_only_if_it_does_not_fit():
    def update(updates, state, params=None):
        raise ValueError('of its own')

    tx = sg.freeze(optax.GradientTransformation(lambda p: {'m': p}, update), 'body')
    params = {'body': 1.0, 'head': 2.0}
    state = tx.init(params)
    with pytest.raises(ValueError, match=r'^of its own$'):
        tx.update(params, state, params)
    with pytest.raises(errors.StructureError, match='does not belong'):
        tx.update(params, frozen_dict(state), params)


def test_the_update_of_what_is_frozen_is_a_constant_that_adds_nothing():
    grads = {
        'f': np.ones((2, 3), np.float32),
        'c': np.ones(2, np.complex64),
        'h': np.ones(2, jnp.bfloat16),
        'i': np.ones(2, np.int8),
        'o': np.ones(2, bool),
        'n': 1.5,
    }
    odd = {
        'absent': sg.ABSENT,
        'float0': np.zeros(3, jax.dtypes.float0),
        'mark': sg.NonDifferentiable(np.ones(2, np.float32)),
    }
    tx = sg.freeze(optax.sgd(0.1), True)
    updates, _ = tx.update({**grads, **odd}, tx.init({}), {**grads, **odd})
    for name, grad in grads.items():
        update = updates[name]
        assert (update.shape, update.dtype) == (np.shape(grad), jnp.result_type(grad))
        assert not any(update.strides)
        assert not update.any()
        assert name in 'io' or np.signbit(np.real(update).astype(float)).all()
    assert updates['absent'] is sg.ABSENT
    assert updates['float0'] is odd['float0']
    assert type(updates['mark']) is sg.NonDifferentiable
    assert np.signbit(updates['mark'].value).all()


ADDED: dict[str, tuple[Any, Any]] = {
    'a number': (np.full(1, 2.0, np.float16), 2.0),
    'zeros, which are a number to add': (np.zeros(1, np.float16), 0.0),
    'a constant': (np.broadcast_to(np.float16(2.0), (1,)), 2.0),
    'nothing': (None, None),
    'no leaf': (sg.ABSENT, None),
    'of another group': (optax.MaskedNode(), None),
    'a constant that adds nothing': (np.broadcast_to(-np.float16(0.0), (1,)), None),
    'float0': (np.zeros(1, jax.dtypes.float0), None),
}


def test_what_is_added_and_what_is_passed_on():
    w = jnp.array([-0.0], jnp.float16)
    for name, (update, expected) in ADDED.items():
        new = sg.apply_updates({'w': w}, {'w': update})['w']
        assert (new is w) == (expected is None), name
        if expected is not None:
            assert str(new) == f'[{expected:.0f}.]'
            assert new.dtype == jnp.float16
    empty = np.ones((2, 0))
    assert sg.apply_updates([empty], [np.ones((2, 0))])[0] is empty


def test_pruned_gradients_for_an_optimizer_of_optax_say_what_to_write():
    """The rest of the message is that of JAX, which differs between versions."""
    params, tx = {'a': 1.0, 'b': 2.0}, optax.adam(0.1)
    pruned = sg.grad(lambda p: p['a'] * p['b'], wrt='a')(params)
    stopped = sg.freeze(tx, 'b')
    for wrong, said in (
        (tx, "ABSENT: no gradient was computed for 'b'.*sg.freeze"),
        (optax.MultiSteps(stopped, 2), r"reads 'b'\.\s+sg.freeze goes outermost"),
        (optax.chain(stopped, optax.ema(0.9)), r"'b'\.\s+sg.freeze goes outermost"),
    ):
        with pytest.raises((ValueError, errors.AbsentLeafError), match=said):
            wrong.update(pruned, wrong.init(params), params)


# Gradients for each example, and functions of the parameters.

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


def quadratic(p: Any) -> Any:
    return jnp.sum(p['a'] ** 2) + jnp.sum(p['b'] ** 2 * p['a'])


PAIR = {'a': jnp.array([1.0, 2.0]), 'b': jnp.array([3.0, -1.0])}
ADVERSARY = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
OPAQUE = optax.contrib.sam(optax.sgd(0.1), ADVERSARY, opaque_mode=True)
HUTCHINSON = optax.contrib.hutchinson_estimator_diag_hessian()
# The optimizer, and the functions that its update is given, of a function.
OF_FUNCTIONS = {
    'sam': (OPAQUE, lambda f: {'grad_fn': lambda p, step: jax.grad(f)(p)}),
    'hutchinson': (HUTCHINSON, lambda f: {'obj_fn': f}),
    'sophia': (optax.contrib.sophia(0.1), lambda f: {'obj_fn': f}),
    'line search': (optax.lbfgs(), lambda f: {'value_fn': f, 'value': 1.0, 'grad': {}}),
}


@pytest.mark.parametrize('name', OF_FUNCTIONS)
def test_functions_of_the_parameters_get_those_that_are_frozen(name):
    tx, given = OF_FUNCTIONS[name]
    frozen = sg.freeze(tx, 'a')
    grads = jax.grad(quadratic)(PAIR)
    live = {'b': PAIR['b']}

    def by_hand(live):
        return quadratic({**PAIR, **live})

    for pruned in (grads, {**grads, 'a': sg.ABSENT}, {'b': grads['b']}):
        extra, of_live = given(quadratic), given(by_hand)
        if 'grad' in extra:
            extra['grad'], of_live['grad'] = pruned, {'b': grads['b']}
        got, _ = frozen.update(grads, frozen.init(PAIR), PAIR, **extra)
        expected, _ = tx.update({'b': grads['b']}, tx.init(live), live, **of_live)
        oracle.assert_same(got['b'], expected['b'])
        assert oracle.is_zero(got['a'])


def test_a_part_is_frozen_in_the_functions_too():
    seen: list[Any] = []

    def update(updates, state, params, *, grad_fn, value_fn):
        further = jax.tree.map(lambda x: x + 5.0, params)
        value_fn(further)
        seen.extend(jax.tree.leaves(grad_fn(further, 0)))
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda p: (), update)

    def noted(p, *_):
        seen.append(p['w'])
        return p

    # In columns, and in rows.
    for where, w, in_functions, given in (
        (np.s_[:, 0], [[1.0, 2.0]], [[1.0, 7.0]], [[0.0, 7.0]]),
        (0, [[1.0], [2.0]], [[1.0], [7.0]], [[7.0]]),
    ):
        seen.clear()
        params, tx = {'w': jnp.array(w)}, sg.freeze(spy, sg.at('w', where))
        tx.update(params, (), params, grad_fn=noted, value_fn=noted)
        assert [leaf.tolist() for leaf in seen] == [in_functions, in_functions, given]


def test_what_optax_reads_as_a_whole_tree():
    """Each message says what to write; here is that."""
    tx = sg.freeze(optax.contrib.schedule_free_sgd(0.1), 'a')
    whole = optax.contrib.schedule_free_sgd(0.1)
    state = tx.init(PAIR)
    with pytest.raises(errors.AbsentLeafError, match='schedule_free_eval_params'):
        optax.contrib.schedule_free_eval_params(state, PAIR)
    part, rest = sg.partition(PAIR, 'b')
    found = sg.combine(optax.contrib.schedule_free_eval_params(state, part), rest)
    live = {'b': PAIR['b']}
    expected = optax.contrib.schedule_free_eval_params(whole.init(live), live)
    oracle.assert_same(found, {**PAIR, **expected})

    tx, specs = sg.freeze(optax.adam(0.1), 'a'), {'a': 'A', 'b': 'B'}
    state = tx.init(PAIR)

    def specs_of(specs):
        return optax.tree_map_params(tx, lambda x, spec: spec, state, specs)

    with pytest.raises(ValueError, match=r'Give it trees of the trained part'):
        specs_of(specs)
    assert specs_of(sg.partition(specs, 'b')[0])[0].mu == {'a': sg.ABSENT, 'b': 'B'}

    tx = sg.freeze(optax.lbfgs(), 'a')
    state = tx.init(PAIR)
    with pytest.raises(TypeError, match='Give it a function of the trained part'):
        optax.value_and_grad_from_state(quadratic)(PAIR, state=state)
    of_part = optax.value_and_grad_from_state(lambda p: quadratic(sg.combine(p, rest)))
    value, grads = of_part(part, state=state)
    assert float(value) == float(quadratic(PAIR))
    oracle.assert_same(grads['b'], jax.grad(quadratic)(PAIR)['b'])
    tx.update(grads, state, PAIR, value=value, grad=grads, value_fn=quadratic)


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


def test_a_group_or_a_mask_of_which_all_is_frozen():
    """It still names what exists."""
    groups = {'slow': 'layer_*/**', 'fast': 'head/**'}
    rates = {'slow': optax.sgd(0.1), 'fast': optax.sgd(0.2)}
    by_group = optax.multi_transform(rates, lambda p: sg.labels(p, groups))
    masked = optax.masked(optax.sgd(0.2), lambda p: sg.mask(p, trained='layer_*/**'))
    for inner in by_group, masked:
        tx = sg.freeze(inner, 'layer_*/**')
        updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
        assert oracle.is_zero(updates['layer_0'])
    assert not oracle.is_zero(updates['head'])


NOT_GIVEN = [
    lambda: sg.freeze(optax.sgd(0.1), None),
    lambda: sg.mask(PAIR, trained=None),
    lambda: sg.mask(PAIR, frozen=None),
    lambda: sg.labels(PAIR, {'a': None}),
    lambda: sg.partition(PAIR, None),
    lambda: sg.stop_gradient(PAIR, None),
    lambda: sg.substitute(PAIR, PAIR, where=None),
    lambda: sg.adopt(optax.sgd(0.1), PAIR, (), fresh=None),
    lambda: sg.grad(quadratic, wrt=None),
    lambda: sg.vjp(quadratic, PAIR, wrt=None),
    lambda: sg.gradient_flow(quadratic, PAIR, wrt=None),
    lambda: sg.live(quadratic, PAIR, wrt=None),
    lambda: sg.paths(PAIR, where=None),
    lambda: nn.substitute(PAIR, where=None),
    lambda: nn.stop_gradient(None),
    lambda: nn.train_only(None),
    lambda: nn.Frozen(nn.Dense(2), None),
    lambda: sg.filters.as_filter(None),
    lambda: sg.filters.as_filter('a') | None,
]


def test_none_is_no_filter():
    assert repr(sg.DECLARED) == 'DECLARED'
    for call in NOT_GIVEN:
        with pytest.raises(errors.FilterTypeError, match='None is no filter'):
            call()


def test_an_option_that_means_nothing():
    for call in (
        lambda: sg.freeze(optax.sgd(0.1), unused='typo'),
        lambda: sg.mask(PAIR, trained='a', unused='typo'),
        lambda: sg.mask(PAIR, trained=sg.DECLARED, unused='typo'),
        lambda: sg.labels(PAIR, {'a': True}, unused='typo'),
        lambda: sg.grad(quadratic, unused='typo'),
        lambda: sg.jvp(quadratic, (PAIR,), (PAIR,), unused='typo'),
    ):
        with pytest.raises(errors.FilterValueError, match="unused='typo'"):
            call()


def test_a_part_that_there_is_not():
    tx = sg.freeze(optax.sgd(0.1), sg.at('a', 99))
    with pytest.raises(errors.PartError, match='out of bounds'):
        tx.init(PAIR)

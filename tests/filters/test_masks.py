"""Trees of boolean arrays: everywhere as ``jnp.where`` with a mask by hand."""

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
from flax_sg import errors, filters, testing
from flax_sg import linen as nn
from tests.helpers import extents, oracle, traced
from tests.helpers.traced import PARAMS, X, around_jit, in_block, loss, of_tree
from tests.helpers.turns import in_turn

# Some of most arrays, all of one, nothing of another.
MASK: Any = {
    **jax.tree.map(lambda w: np.asarray(w > 0.1), PARAMS),
    'head': {'kernel': np.ones((3, 2), bool), 'bias': False},
}
OTHER = jax.tree.map(np.logical_not, MASK)
FULL = jax.tree.map(lambda m, w: np.broadcast_to(m, w.shape), MASK, PARAMS)


def masked(params: Any, mask: Any) -> Any:
    return jax.tree.map(
        lambda w, m: jnp.where(m, jax.lax.stop_gradient(w), w), params, mask
    )


def by_hand(params: Any, mask: Any) -> Any:
    return loss(masked(params, mask))


WAYS = {'block': in_block, 'tree': of_tree, 'around a jitted function': around_jit}
HAND = jax.jit(jax.value_and_grad(by_hand))(PARAMS, FULL)


def read_in_jit(cell: Any) -> Any:
    """The cell, as a module that a jitted function reads."""

    class Reads(cell):
        def __call__(self, x, _):
            def layer(x):
                dense = self.get_variable('params', 'dense')
                return jnp.tanh(x @ dense['kernel'] + dense['bias'][None])

            return jax.jit(layer)(x), None

    return Reads


# What runs in the body of a scan gets slices, and asks about what is stored.
BODIES = [traced.bare, linen.remat, linen.jit, read_in_jit]


@pytest.mark.parametrize(('extent', 'body'), in_turn(extents.OF_STOPS, BODIES))
def test_every_extent(extent, body):
    call = functools.partial(
        extents.OF_STOPS[extent], nn.stop_gradient(MASK), traced.Net(body)
    )
    ours = jax.value_and_grad(lambda p: jnp.sum(call({'params': p}, X) ** 2))
    oracle.assert_same(ours(PARAMS), HAND)


def test_the_compiled_program_is_that_with_where():
    for name in 'block', 'tree':
        ours, hand = jax.grad(WAYS[name]), jax.grad(by_hand)
        testing.assert_same_program(ours, hand, PARAMS, FULL)


# Masks that change in the training step.


def large(params: Any) -> Any:
    return jax.tree.map(lambda w: abs(w) > 0.2, params)


OTHERS = jax.tree.map(np.logical_not, FULL)


def run(how: str, fn: Any) -> Any:
    return traced.TRACED[how](fn, FULL, OTHERS, large)


@functools.cache
def traced_by_hand(how: str, is_jitted: bool) -> Any:
    of_params = traced.jitted_loss if is_jitted else loss
    return run(how, lambda params, mask: of_params(masked(params, mask)))


@pytest.mark.parametrize(('how', 'name'), in_turn(traced.TRACED, WAYS))
def test_traced_masks(how, name):
    # XLA may fuse other operations of a jitted function.
    by_hand = traced_by_hand(how, WAYS[name] is around_jit)
    oracle.assert_same(run(how, WAYS[name]), by_hand)


def test_one_program_serves_all_traced_masks():
    for name in WAYS:
        ours, hand = (jax.jit(jax.grad(fn)) for fn in (WAYS[name], by_hand))
        for mask in FULL, OTHERS, FULL:
            oracle.assert_same(ours(PARAMS, mask), hand(PARAMS, mask))
        assert ours._cache_size() == 1


def test_masks_of_values_do_not_find_the_programs_of_others():
    for mask in FULL, OTHERS, MASK:
        ours, hand = (jax.grad(fn)(PARAMS, mask) for fn in (around_jit, by_hand))
        oracle.assert_same(ours, hand)


# Everything else that takes a tree of bools.


def test_the_gradient_call():
    value, grads = sg.value_and_grad(loss, wrt=OTHER)(PARAMS)
    assert grads['head'].pop('kernel') is sg.ABSENT
    hand_value, hand = HAND
    hand = {**hand, 'head': {'bias': hand['head']['bias']}}
    oracle.assert_same((value, grads), (hand_value, hand))
    traced = jax.jit(lambda p, mask: sg.grad(loss, wrt=mask)(p))(PARAMS, OTHERS)
    oracle.assert_same(traced, jax.jit(jax.grad(by_hand))(PARAMS, FULL))


def test_combined_with_other_filters():
    where = filters.as_filter(MASK) & ~filters.as_filter('**/bias') | 'head/bias'
    is_kernel = lambda keys, m: m & (oracle.names_of(keys)[-4:] != 'bias')  # noqa: E731
    mask = jax.tree_util.tree_map_with_path(is_kernel, FULL)
    mask['head']['bias'] = np.ones(2, bool)
    for ours, hand in (where, mask), (~filters.as_filter(MASK), OTHERS):
        expected = jax.grad(by_hand)(PARAMS, hand)
        oracle.assert_same(jax.grad(in_block)(PARAMS, ours), expected)


@pytest.mark.usefixtures('standard_promotion')
def test_the_optimizer_keeps_what_the_mask_freezes_and_full_moments():
    tx, hand = sg.freeze(optax.adamw(0.1), MASK), optax.adamw(0.1)
    state, hand_state = tx.init(PARAMS), hand.init(PARAMS)
    moments = state[0].mu
    assert moments['head']['kernel'] is sg.ABSENT
    assert moments['one']['kernel'].shape == (3, 3)
    assert moments['one']['bias'].shape == (3,)  # No rows are cut out for a mask.
    params, gradient = PARAMS, jax.jit(jax.grad(loss))
    for _ in range(3):
        grads = gradient(params)
        updates, state = tx.update(grads, state, params)
        seen = jax.tree.map(lambda g, m: jnp.where(m, 0.0, g), grads, FULL)
        moved, hand_state = hand.update(seen, hand_state, params)
        step = lambda w, u, m: jnp.where(m, w, w + u)  # noqa: E731
        expected = jax.tree.map(step, params, moved, FULL)
        params = optax.apply_updates(params, updates)
        oracle.assert_same(params, expected)


def test_a_part_of_the_tree_and_back():
    part, rest = sg.partition(PARAMS, MASK)
    kernel, mask = PARAMS['one']['kernel'], FULL['one']['kernel']
    np.testing.assert_array_equal(part['one']['kernel'], kernel[mask])
    assert part['head']['bias'] is rest['head']['kernel'] is sg.ABSENT
    assert repr(rest['one']['kernel']) == f'<{(~mask).sum()} of 9 elements>'
    for both in (part, rest), (rest, part):
        oracle.assert_same(sg.combine(*both), PARAMS)
    joined = lambda part, rest: loss(sg.combine(part, rest))  # noqa: E731
    grads = jax.jit(jax.grad(joined))(part, rest)
    hand = jax.jit(jax.grad(by_hand))(PARAMS, OTHERS)
    np.testing.assert_array_equal(grads['one']['kernel'], hand['one']['kernel'][mask])
    # A mask may take nothing of an array.
    w = jnp.arange(6.0).reshape(3, 2)
    twice = filters.as_filter({'w': np.eye(3, 2, dtype=bool)})
    nothing, all_of_it = sg.partition({'w': w}, twice & sg.at('w', np.s_[2:]))
    assert nothing['w'].shape == (0,)
    oracle.assert_same(sg.combine(nothing, all_of_it), {'w': w})


def test_masks_for_other_libraries():
    trained = sg.mask(PARAMS, trained=MASK)
    assert jax.tree.structure(trained) == jax.tree.structure(PARAMS)
    assert trained['head'] == {'kernel': True, 'bias': False}
    np.testing.assert_array_equal(trained['one']['kernel'], MASK['one']['kernel'])
    frozen = sg.mask(PARAMS, frozen=MASK)
    assert filters.as_filter(trained) == filters.as_filter(frozen)
    rows = sg.mask({'w': jnp.ones((2, 2))}, trained=sg.at('w', 0))['w']
    assert rows.tolist() == [[True, True], [False, False]]


def test_a_mask_of_a_traced_mask():
    oracle.assert_same(jax.jit(lambda m: sg.mask(PARAMS, trained=m))(FULL), FULL)


def test_a_tree_of_one_array_and_a_list():
    w = jnp.array([1.0, 2.0, 3.0])
    grads = jax.grad(lambda w: jnp.sum(sg.stop_gradient(w, w > 1.5) ** 2))(w)
    assert grads.tolist() == [2.0, 0.0, 0.0]
    of_pair = lambda p: sum(map(jnp.sum, sg.stop_gradient(p, [p[0] > 1.5, True])))  # noqa: E731
    grads = jax.grad(of_pair)([w, w])
    oracle.assert_same(grads, [jnp.array([1.0, 0.0, 0.0]), jnp.zeros(3)])


def test_a_box():
    boxed = {'w': linen.Partitioned(jnp.ones(2), ('a',))}
    mask = {'w': linen.Partitioned(np.array([True, False]), ('a',))}
    grads = jax.grad(lambda p: jnp.sum(sg.stop_gradient(p, mask)['w'].value))(boxed)
    assert grads['w'].value.tolist() == [0.0, 1.0]


def test_as_values():
    filter_ = filters.as_filter(MASK)
    assert filter_ == filters.as_filter(jax.tree.map(np.copy, MASK))
    assert hash(filter_) == hash(filters.as_filter(jax.tree.map(np.copy, MASK)))
    assert filter_ != filters.as_filter(OTHER)
    assert filters.as_filter(FULL) == filter_
    assert pickle.loads(pickle.dumps(filter_)) == filter_
    given = np.array([True, False])
    copied = filters.as_filter({'w': given})
    assert repr(copied) == "BoolTree({'w': Part(elements=Mask(bool[2]))})"
    given[:] = True
    assert copied != filters.as_filter({'w': given})
    assert filters.as_filter({'w': np.zeros((0, 2), bool)}).may_be_empty


# Bad input.


def test_where_a_traced_mask_has_no_values():
    def flows(mask):
        testing.assert_flows(functools.partial(in_block, where=mask), mask, PARAMS)

    for use in flows, lambda mask: sg.partition(PARAMS, mask):
        with pytest.raises(errors.PartError, match='the mask is traced'):
            jax.jit(use)(FULL)

"""States of every transformation of optax: whose they are, whatever is frozen."""

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import serialization

import flax_sg as sg
from flax_sg import errors
from tests.helpers import oracle
from tests.helpers.optimizers import filled

pytestmark = pytest.mark.usefixtures('standard_promotion')

PARAMS: Any = {'w': jnp.ones((6, 9)), 'b': jnp.ones(6), 'c': jnp.ones((2, 3))}
ADAM, GROUPS = optax.adam(0.1), {'w': 'x', 'b': 'y', 'c': 'x'}


# What takes more than numbers has a row below, or in test_wrappers.
NO_NUMBERS = {
    *('inner', 'inner_factory', 'fast_optimizer', 'base_optimizer', 'optimizer', 'tx'),
    *('measure', 'measure_name', 'transforms', 'args', 'seed'),
}


def of_optax() -> Iterator[tuple[str, Callable[[], Any]]]:
    """What makes a transformation of numbers, by its name."""
    for module in optax, optax.contrib:
        for name, fn in vars(module).items():
            made = inspect.isfunction(fn) and inspect.signature(fn)
            if made and 'GradientTransformation' in str(made.return_annotation):
                given = [p for p in made.parameters.values() if p.default is p.empty]
                if not (NO_NUMBERS & {p.name for p in given} or name.startswith('_')):
                    takes = [0.1] * len(given)
                    yield f'{module.__name__}.{name}', functools.partial(fn, *takes)


WRAPPED: dict[str, Any] = {
    'momentum': optax.sgd(0.1, 0.9),
    'rmsprop with momentum': optax.rmsprop(0.1, momentum=0.9),
    'centered rmsprop': optax.rmsprop(0.1, centered=True),
    'steps': optax.MultiSteps(ADAM, 2).gradient_transformation(),
    'apply_if_finite': optax.apply_if_finite(ADAM, 3),
    'flatten': optax.flatten(ADAM),
    'hyperparameters': optax.inject_hyperparams(optax.adam)(0.1),
    'masked': optax.masked(ADAM, dict(w=True, b=False, c=True)),
    'mechanic': optax.contrib.mechanize(ADAM),
    'sam': optax.contrib.sam(ADAM, optax.sgd(0.1)),
    'groups': optax.partition({'x': ADAM, 'y': optax.trace(0.9)}, GROUPS),
}
NAMES = [*dict(of_optax()), *WRAPPED]


@functools.cache
def made(name: str) -> Any:
    """The transformation, and a state of it."""
    with warnings.catch_warnings(action='ignore'):
        tx = WRAPPED[name] if name in WRAPPED else dict(of_optax())[name]()
    return tx, tx.init(PARAMS)


def test_nearly_all_of_optax_is_here():
    assert len(NAMES) >= 100


# One array for all, and what remembers steps of all, begin anew.
TOGETHER = 'flatten', 'lbfgs', 'linesearch', 'optimistic'


@pytest.mark.filterwarnings('ignore:sg.adopt. .* begins anew:UserWarning')
@pytest.mark.parametrize('name', NAMES)
def test_what_is_frozen_may_change(name):
    tx, _ = made(name)
    stages = [tx, sg.freeze(tx, 'b'), sg.freeze(tx, ['b', 'c'])]
    for old, new in itertools.permutations(stages, 2):
        state, begun = filled(old.init(PARAMS)), new.init(PARAMS)
        for old_tx in None, old:
            adopted = sg.adopt(new, PARAMS, state, old=old_tx)
            assert jax.tree.structure(adopted) == jax.tree.structure(begun)
            known, fresh = oracle.by_path(state), oracle.by_path(begun)
            for path, value in oracle.by_path(adopted).items():
                if 'hyperparams' in path or path not in known:
                    oracle.assert_same(value, fresh[path])
                elif value.ndim == 0 and 'muon' in name:
                    continue  # The count of a group of which all was frozen.
                elif not any(word in name for word in TOGETHER):
                    oracle.assert_same(value, known[path])


def records(state: Any) -> set[str]:
    """The classes of the records in a state that hold something."""
    own = {type(state).__name__} if hasattr(state, '_fields') else set()
    is_child = lambda node: node is not state  # noqa: E731
    children = [x for x in jax.tree.leaves(state, is_leaf=is_child) if x is not state]
    inside = set[str]().union(*map(records, children))
    return own | inside if jax.tree.leaves(state) else set()


@pytest.mark.parametrize('name', NAMES)
def test_another_transformation_is_refused(name):
    _, state = made(name)
    own, number = moments(state), NAMES.index(name)
    for step in range(1, len(NAMES), 5):
        tx, other = made(NAMES[(number + step) % len(NAMES)])
        if own and moments(other) and own != moments(other):
            assert_refused(tx, state)


def assert_refused(tx: Any, state: Any) -> None:
    with pytest.raises(errors.StructureError, match='another transformation'):
        sg.adopt(tx, PARAMS, state)


def moments(state: Any) -> set[str]:
    """The records in a state that remember more than a count."""
    return {name for name in records(state) if name not in NO_MOMENTS}


# They count steps, or have a random key.
NO_MOMENTS = (
    *('EmptyState', 'ScaleByScheduleState', 'AddNoiseState'),
    *('DifferentiallyPrivateAggregateState', 'ReduceLROnPlateauState'),
)


SWITCHES = {
    'rmsprop': optax.rmsprop(0.1),
    'adabelief': optax.adabelief(0.1),
    'lion': optax.lion(0.1),
    'momentum': optax.sgd(0.1, 0.9),
    'plain': optax.sgd(0.1),
    'amsgrad': optax.amsgrad(0.1),
    'flattened': optax.flatten(ADAM),
    'adagrad': optax.adagrad(0.1),
    'centered': optax.rmsprop(0.1, centered=True),
}


@pytest.mark.parametrize('frozen', [False, 'b', ['b', 'w']])
@pytest.mark.parametrize('name', SWITCHES)
def test_one_common_name_is_no_proof(name, frozen):
    other = SWITCHES[name]
    for old, new in (other, ADAM), (ADAM, other):
        state = sg.freeze(old, frozen).init(PARAMS)
        for tx in new, sg.freeze(new, 'c'):
            assert_refused(tx, state)
        # As plain dicts there are names alone: AdaBelief has those of Adam.
        stored = serialization.msgpack_restore(serialization.to_bytes(state))
        if name not in ('adabelief', 'plain'):
            assert_refused(new, stored)


def test_a_vector_of_all_parameters_is_no_count():
    flat, plain = optax.flatten(optax.sgd(0.1, 0.9)), optax.sgd(0.1)
    for old, new in (flat, plain), (plain, flat):
        assert_refused(new, old.init(PARAMS))


def test_the_same_moments_beside_another_schedule_go_on():
    by_schedule = optax.adamw(optax.constant_schedule(0.1))
    for old, new in itertools.permutations((ADAM, optax.adamw(0.1), by_schedule), 2):
        _, state = old.update(PARAMS, old.init(PARAMS), PARAMS)
        adopted = sg.adopt(new, PARAMS, state)
        oracle.assert_same(adopted[0], state[0])
        assert jax.tree.structure(adopted) == jax.tree.structure(new.init(PARAMS))


def test_groups_of_which_one_was_frozen_and_now_the_other():
    groups = optax.partition(dict.fromkeys('xy', optax.trace(0.9)), GROUPS)
    old, new = sg.freeze(groups, 'b'), sg.freeze(groups, ['w', 'c'])
    oracle.assert_same(sg.adopt(new, PARAMS, old.init(PARAMS)), new.init(PARAMS))


def test_a_state_of_other_parameters_is_refused_and_one_of_frozen_ones_is_not():
    momentum = optax.sgd(0.1, 0.9)
    with pytest.raises(errors.StructureError, match='or of other parameters'):
        sg.adopt(momentum, {'other': jnp.ones(2)}, momentum.init(PARAMS))
    one, other = (sg.freeze(momentum, name) for name in (['w', 'c'], ['b', 'c']))
    adopted = sg.adopt(one, PARAMS, other.init(PARAMS))
    oracle.assert_same(adopted, one.init(PARAMS))


@pytest.mark.parametrize('count', [6, 12])
def test_the_numbers_of_mechanic_are_no_flattened_vector(count):
    params = {'a': jnp.ones(count - 2), 'b': jnp.ones(2), 'c': jnp.ones(3)}
    mechanic = optax.contrib.mechanize(ADAM)
    tx = sg.freeze(mechanic, 'c')
    for old, new in (tx, mechanic), (mechanic, tx), (tx, sg.freeze(mechanic, 'b')):
        state = filled(old.init(params))
        adopted = sg.adopt(new, params, state)
        for name in 'r', 'm', 'v', 's', 'count':
            oracle.assert_same(getattr(adopted, name), getattr(state, name))


BODY = {'kernel': jnp.ones((4, 3)), 'bias': jnp.ones(3)}
GROWN: dict[str, tuple[Any, Any]] = {
    'a head with more classes': (
        {'kernel': jnp.ones((3, 2)), 'bias': jnp.ones(2)},
        {'kernel': jnp.ones((3, 5)), 'bias': jnp.ones(5)},
    ),
    'fewer classes': (jnp.ones(5), jnp.ones(2)),
    'a grown vocabulary': (jnp.ones((5, 3)), jnp.ones((8, 3))),
    'more layers': (jnp.ones((2, 3, 3)), jnp.ones((4, 3, 3))),
    'another rank': (jnp.ones(3), jnp.ones((3, 1))),
    'another dtype': (jnp.ones(3), jnp.ones(3, jnp.bfloat16)),
}


@pytest.mark.parametrize('frozen', [False, 'body/bias', sg.at('body/kernel', 0)])
@pytest.mark.parametrize('name', GROWN)
def test_what_has_another_shape_begins_anew_and_the_rest_goes_on(name, frozen):
    before, after = ({'body': BODY, 'top': top} for top in GROWN[name])
    tx, found = sg.freeze(optax.adamw(0.1), frozen), dict[str, Any]()
    old = None if frozen is False or frozen == 'body/bias' else tx
    _, state = tx.update(before, tx.init(before), before)
    adopted = sg.adopt(tx, after, state, old=old, report=found.update)
    made = tx.init(after)
    for name in 'mu', 'nu':
        by_hand = {**getattr(state[0], name), 'top': getattr(made[0], name)['top']}
        oracle.assert_same(getattr(adopted[0], name), by_hand)
    assert int(adopted[0].count) == 1
    tops = oracle.by_path({'top': after['top']})
    assert found['fresh'] == sorted(tops)


def test_a_warning_says_how_rows_that_were_there_keep_their_moments():
    before, after = {'emb': jnp.ones((5, 3))}, {'emb': jnp.ones((8, 3))}
    _, state = ADAM.update(before, ADAM.init(before), before)
    with pytest.warns(UserWarning, match=r'old=sg.freeze\(tx, sg.at\(.emb., np.s_\[5:'):
        adopted = sg.adopt(ADAM, after, state)
    oracle.assert_same(adopted, ADAM.init(after))
    as_rows = sg.freeze(ADAM, sg.at('emb', np.s_[5:]))
    adopted = sg.adopt(ADAM, after, state, old=as_rows)
    for name in 'mu', 'nu':
        by_hand = jnp.zeros((8, 3)).at[:5].set(getattr(state[0], name)['emb'])
        oracle.assert_same(getattr(adopted[0], name)['emb'], by_hand)


def test_rows_of_arrays_that_a_wrapper_has_made_of_another_shape():
    # The inner freeze sees arrays of two rows, or of three.
    if not (galore := getattr(optax.contrib, 'scale_by_galore', None)):
        pytest.skip('another release of optax has it')

    def of_rank(rank: int) -> Any:
        rows = sg.freeze(optax.trace(0.9), sg.at('w', np.s_[:1]))
        return galore(rank=rank, base_optimizer=rows)

    params = {'w': jnp.ones((9, 6))}
    old, new = of_rank(2), of_rank(3)
    state = filled(old.init(params))
    adopted = sg.adopt(new, params, state, old=old)
    made, values = oracle.by_path(new.init(params)), oracle.by_path(adopted)
    [path] = [path for path in made if 'trace' in path]
    oracle.assert_same(values[path], made[path])

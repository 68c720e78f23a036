"""A freeze inside of other transformations is found, whatever wraps it."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import flax_sg as sg
from flax_sg import errors
from tests.helpers import oracle
from tests.helpers.optimizers import filled
from tests.helpers.turns import in_turn

pytestmark = pytest.mark.usefixtures('standard_promotion')

PARAMS: Any = {'w': jnp.ones((6, 9)), 'b': jnp.ones(6)}
ADAM = optax.scale_by_adam()
OLD, NEW = [0, 1, 2], [1, 2, 3]  # The rows that are trained, by both freezes.


def rows(trained: list[int], size: int = 6) -> Any:
    """What is frozen."""
    return sg.at(True, [n for n in range(size) if n not in trained])


def two(trained: list[int], size: int = 6) -> Any:
    """Two freezes in one chain, of which the second trains a row less."""
    first = sg.freeze(optax.trace(0.9), rows(trained, size))
    second = sg.freeze(ADAM, rows(trained[1:], size))
    return optax.chain(optax.clip(1.0), first, optax.scale(0.5), second)


def is_early(step: Any) -> Any:
    return step < 3


def of_labels(make: Any) -> Callable[[Any], Any]:
    return lambda tx: make({'a': tx, 'b': optax.ema(0.5)}, {'w': 'a', 'b': 'b'})


def with_a_rate(make: Any) -> Callable[[Any], Any]:
    return lambda tx: make(lambda rate: optax.chain(tx, optax.scale(rate)))(rate=0.1)


# How each wrapper is written around a transformation.
WRAPPERS: dict[str, Callable[[Any], Any]] = {
    'MultiSteps': lambda tx: optax.MultiSteps(tx, 2),
    'apply_if_finite': lambda tx: optax.apply_if_finite(tx, 3),
    'chain': lambda tx: optax.chain(optax.ema(0.5), tx),
    'conditionally_mask': lambda tx: optax.conditionally_mask(tx, is_early),
    'conditionally_transform': (lambda tx: optax.conditionally_transform(tx, is_early)),
    'flatten': optax.flatten,
    'inject_hyperparams': with_a_rate(optax.inject_hyperparams),
    'inject_stateful_hyperparams': with_a_rate(optax.inject_stateful_hyperparams),
    'lbfgs': lambda tx: optax.lbfgs(linesearch=tx),
    'lookahead': lambda tx: optax.lookahead(tx, 5, 0.5),
    'masked': lambda tx: optax.masked(tx, {'w': True, 'b': False}),
    'monitor': lambda tx: optax.monitor({'seen': tx}),
    'multi_transform': of_labels(optax.multi_transform),
    'named_chain': lambda tx: optax.named_chain(('one', tx)),
    'partition': of_labels(optax.partition),
    'selective_transform': lambda tx: optax.selective_transform(
        tx, freeze_mask={'w': False, 'b': True}
    ),
    'with_extra_args_support': optax.with_extra_args_support,
    'contrib.galore': lambda tx: optax.contrib.galore(0.1, rank=2, base_optimizer=tx),
    'contrib.scale_by_galore': lambda tx: optax.contrib.scale_by_galore(
        rank=2, base_optimizer=tx
    ),
    'contrib.mechanize': optax.contrib.mechanize,
    'contrib.sam': lambda tx: optax.contrib.sam(tx, tx),
    'contrib.schedule_free': lambda tx: optax.contrib.schedule_free(tx, 0.1),
    'contrib.sophia': lambda tx: optax.contrib.sophia(0.1, hessian_diagonal_fn=tx),
    'contrib.split_real_and_imaginary': optax.contrib.split_real_and_imaginary,
}


def wrappers_of_optax() -> Iterator[str]:
    """What takes a transformation, as the annotations of the package say."""
    for module in optax, optax.contrib:
        for name, fn in vars(module).items():
            if inspect.isfunction(fn) or inspect.isclass(fn):
                given = inspect.signature(fn).parameters.values()
                if any('GradientTransformation' in str(p.annotation) for p in given):
                    yield f'{module.__name__}.{name}'.removeprefix('optax.')


def test_every_wrapper_has_a_row():
    assert {*wrappers_of_optax()} <= WRAPPERS.keys()


def params_of(name: str) -> tuple[Any, int]:
    """The parameters, and how many rows the arrays have of which a freeze is told."""
    if name == 'lookahead':
        return optax.LookaheadParams(PARAMS, PARAMS), 6
    if name == 'contrib.split_real_and_imaginary':
        return {**PARAMS, 'z': jnp.ones(6, jnp.complex64)}, 6
    return PARAMS, 60 if name == 'flatten' else 6


def by_hand(state: Any, new: Any, size: int, trained: list[int]) -> dict[str, Any]:
    """The right values for a new state: whole arrays, filled and cut by hand."""
    known, out = oracle.by_path(state), dict[str, Any]()
    for path, made in oracle.by_path(new).items():
        # What the freezes train: the second one a row less.
        names = path.split('/')
        pairs = {*itertools.pairwise(names)}
        is_second = bool(pairs & {('3', 'mu'), ('3', 'nu')})
        if not (is_second or ('1', 'trace') in pairs):
            out[path] = made if 'hyperparams' in names else known[path]
            continue
        was, now = (jnp.array(rows[is_second:]) for rows in (OLD, trained))
        whole = jnp.zeros((size, *made.shape[1:]), made.dtype)
        out[path] = whole.at[was].set(known[path])[now]
    return out


@pytest.mark.filterwarnings('ignore:inject_stateful_hyperparams:DeprecationWarning')
@pytest.mark.filterwarnings('ignore:sg.adopt. .* begins anew:UserWarning')
@pytest.mark.parametrize('name', WRAPPERS)
def test_moments_stay_with_their_rows(name):
    if name not in wrappers_of_optax():
        pytest.skip('another release of optax has it')
    params, size = params_of(name)
    old, new = (WRAPPERS[name](two(trained, size)) for trained in (OLD, NEW))
    state = filled(old.init(params))
    for tx, trained in (new, NEW), (old, OLD):
        made, adopted = tx.init(params), sg.adopt(tx, params, state, old=old)
        assert jax.tree.structure(adopted) == jax.tree.structure(made)
        if name == 'flatten':  # optax cannot tell, so other rows begin anew.
            oracle.assert_same(adopted, state if trained is OLD else made)
            oracle.assert_same(sg.adopt(tx, params, state), made)
            continue
        right = by_hand(state, made, size, trained)
        oracle.assert_same(oracle.by_path(adopted), right)
        with pytest.raises(errors.StructureError, match='rows of'):
            sg.adopt(tx, params, state)


def asking(tx: Any) -> Any:
    """A transformation that asks for a value when it begins."""

    def init(params: Any) -> Any:
        assert all(np.asarray(leaf * 2.0).any() for leaf in jax.tree.leaves(params))
        return tx.init(params)

    return optax.GradientTransformation(init, tx.update)


def jitted(tx: Any) -> Any:
    return optax.GradientTransformation(jax.jit(tx.init), jax.jit(tx.update))


@pytest.mark.parametrize('wrap', [asking, jitted])
def test_functions_of_others_that_make_states(wrap):
    old, new = (
        optax.chain(wrap(sg.freeze(optax.trace(0.9), rows(trained))), optax.scale(0.5))
        for trained in (OLD, NEW)
    )
    state = filled(old.init(PARAMS))
    for _ in range(2):  # The second time, JAX finds the program.
        adopted = sg.adopt(new, PARAMS, state, old=old)
        was, now = state[0].trace['w'], adopted[0].trace['w']
        oracle.assert_same(now[:2], was[1:])
        assert oracle.is_zero(now[2])
        with pytest.raises(errors.StructureError, match='rows of'):
            sg.adopt(new, PARAMS, state)


def through_msgpack(state: Any, path: Any) -> Any:
    return serialization.from_bytes(state, serialization.to_bytes(state))


def as_plain_dicts(state: Any, path: Any) -> Any:
    return serialization.msgpack_restore(serialization.to_bytes(state))


def through_orbax(state: Any, path: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / 'state', state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / 'state', state)


@pytest.mark.parametrize(
    ('through', 'name'),
    in_turn(
        (through_msgpack, as_plain_dicts, through_orbax),
        ('chain', 'multi_transform'),
    ),
)
def test_a_state_that_was_stored(through, name, tmp_path):
    old, new = (WRAPPERS[name](two(trained)) for trained in (OLD, NEW))
    state = filled(old.init(PARAMS))
    adopted = sg.adopt(new, PARAMS, through(state, tmp_path), old=old)
    oracle.assert_same(adopted, sg.adopt(new, PARAMS, state, old=old))

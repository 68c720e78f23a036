"""Random programs: a gradient that a report calls zero is zero, at random points."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_sg as sg
from tests.helpers import oracle
from tests.helpers.functions import SHAPE, Language, Values
from tests.helpers.profile import LONG

NAMES = 'abcd'


def params_of(seed: int) -> dict[str, jax.Array]:
    draw = np.random.default_rng(seed).normal
    return {name: jnp.asarray(draw(size=SHAPE), jnp.float32) for name in NAMES}


def check(seed: int) -> str:
    """Compares the report with gradients; says what was learnt."""
    run = Language(random.Random(seed), with_refs=True).program()
    losses = random.Random(seed + 1).sample(range(len(NAMES)), 2)

    def fn(params: dict[str, Any]) -> Values:
        out = run([params[name] for name in NAMES])
        return [out[n] for n in losses]

    try:
        jax.eval_shape(fn, params_of(seed))
    except AssertionError:  # JAX 0.10 cannot map some device_put twice.
        return 'refused'

    # Without jit, JAX refuses some derivatives of rules that it knows with it.
    @jax.jit
    def grads_of(params: Any) -> Any:
        return [
            jax.vjp(lambda p, k=k: fn(p)[k], params)[1](params['a'])[0]
            for k in range(len(losses))
        ]

    try:
        gradients = [grads_of(params_of(seed + n)) for n in range(3)]
    except Exception as error:
        try:
            sg.gradient_flow(fn, params_of(seed))
        except sg.errors.ArgumentTypeError:
            return 'refused'
        raise AssertionError(f'jax.grad raises {error!r}') from error
    report = sg.gradient_flow(fn, params_of(seed))
    loose = 0
    for k in range(len(losses)):
        for n, path in enumerate(report.parameters):
            found = [np.asarray(g[k][path]) for g in gradients]
            said, status = report.trained(n, [k]), report.status[k][n]
            mask = np.broadcast_to(
                said.mask(SHAPE, path) if isinstance(said, sg.filters.Part) else said,
                SHAPE,
            )
            is_trained = said is not False
            assert (status in ('flows', 'partly')) == is_trained
            for gradient in found:
                zero = ~mask & ~np.isnan(gradient)
                assert not gradient[zero].any(), (seed, k, path, status)
            loose += is_trained and all(oracle.is_zero(g) for g in found)
    return f'loose {loose}'


@jax.numpy_rank_promotion('allow')
@jax.numpy_dtype_promotion('standard')
@pytest.mark.parametrize('first', range(0, 5000 if LONG else 8, 4))
def test_what_is_called_zero_is_zero(first):
    for seed in range(first, first + 4):
        check(seed)


@jax.numpy_rank_promotion('allow')
@jax.numpy_dtype_promotion('standard')
@pytest.mark.filterwarnings('ignore:sg.live')
@pytest.mark.parametrize('seed', range(1000 if LONG else 12))
def test_live_is_what_the_outputs_of_a_report_train_together(seed):
    run = Language(random.Random(seed), with_refs=True).program()
    params = params_of(seed)

    def fn(params: dict[str, Any]) -> Any:
        return dict(enumerate(run([params[name] for name in NAMES])))

    try:
        report = sg.gradient_flow(fn, params)
    except (sg.errors.ArgumentTypeError, AssertionError) as error:
        with pytest.raises(type(error)):
            sg.live(fn, params)
        return
    live = sg.live(fn, params)
    for n, path in enumerate(report.parameters):
        assert repr(live(path)) == repr(report.trained(n)), path

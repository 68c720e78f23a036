"""What is computed ahead, given other arguments than it was traced with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flax_sg.ahead import precompute

PARAMS: Any = {'body': jnp.ones((2, 2)), 'head': jnp.ones(2)}
X = jnp.ones((3, 2))


def loss(params: Any, x: Any) -> Any:
    return jnp.sum(x @ params['body'] @ params['head'])


def noisy(params: Any, x: Any) -> Any:
    jax.debug.callback(lambda x: None, x)
    return loss(params, x)


def split() -> Any:
    return precompute(loss, PARAMS, X, wrt='head')


CASES: dict[str, tuple[Any, ...]] = {
    'parameters that change at each step': (
        lambda: precompute(loss, PARAMS, X, each=0),
        'ArgumentTypeError: each=(0,) | wrt=',
    ),
    'a callback that is computed once': (
        lambda: precompute(noisy, PARAMS, X, wrt='head'),
        'ArgumentTypeError: ahead_errors.py:LINE | each=',
    ),
    'nothing to compute once': (
        lambda: precompute(loss, PARAMS, X, each=1),
        'UserWarning: Nothing is kept',
    ),
    'a batch of another size': (
        lambda: split().early(PARAMS, X[:2]),
        'ArgumentTypeError: sg.precompute',
    ),
    'other parameters computed once': (
        lambda: split().early({'head': PARAMS['head']}, X),
        'ArgumentTypeError: sg.ABSENT',
    ),
    'a batch left out': (
        lambda: split().early(PARAMS),
        'TypeError: early takes 2',
    ),
    'what is kept left out': (
        lambda: split().late(PARAMS),
        'TypeError: late takes 2',
    ),
    'what is kept of a smaller batch': (
        lambda: split().late(PARAMS, [X[:2]]),
        'ArgumentTypeError: early | sg.precompute',
        lambda: split().late(PARAMS, [X]),
    ),
}

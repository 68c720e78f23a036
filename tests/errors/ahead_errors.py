"""What is computed ahead, given other arguments than it was traced with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import flax_sg as sg

PARAMS: Any = {'body': jnp.ones((2, 2)), 'head': jnp.ones(2)}
X = jnp.ones((3, 2))


def loss(params: Any, x: Any) -> Any:
    return jnp.sum(x @ params['body'] @ params['head'])


def flagged(params: Any, x: Any, flag: bool) -> Any:
    return loss(params, x) if flag else 0.0


def noisy(params: Any, x: Any) -> Any:
    jax.debug.callback(lambda x: None, x)
    return loss(params, x)


def mapped(check_vma: bool) -> Any:
    mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec('data')

    def early(x: Any) -> Any:
        return split().early(PARAMS, x)

    return jax.shard_map(
        early, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )


def split() -> Any:
    return sg.precompute(loss, PARAMS, X, wrt='head')


CASES: dict[str, tuple[Any, ...]] = {
    'parameters that change at each step': (
        lambda: sg.precompute(loss, PARAMS, X, each=0),
        'ArgumentTypeError: each=0 | wrt=',
    ),
    'a callback that is computed once': (
        lambda: sg.precompute(noisy, PARAMS, X, wrt='head'),
        'ArgumentTypeError: ahead_errors.py:LINE | each=',
    ),
    'nothing to compute once': (
        lambda: sg.precompute(loss, PARAMS, X, each=1),
        'UserWarning: Nothing is computed once',
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
        'TypeError: early takes argument 0, argument 1',
    ),
    'what is kept left out': (
        lambda: split().late(PARAMS),
        'TypeError: late takes argument 0, what is kept',
    ),
    'what is kept of a smaller batch': (
        lambda: split().late(PARAMS, [X[:2]]),
        'ArgumentTypeError: Array 0 | sg.precompute',
        lambda: split().late(PARAMS, [X]),
    ),
    'other arrays than were kept': (
        lambda: split().late(PARAMS, [X, X]),
        'ArgumentTypeError: 2 arrays | early | late',
    ),
    'a shard, and none was traced': (
        lambda: mapped(True)(X),
        'ArgumentTypeError: Argument 1 is a shard | check_vma=False',
        lambda: mapped(False)(X),
    ),
    'each= names no argument': (
        lambda: sg.precompute(loss, PARAMS, X, each='key'),
        "ArgumentTypeError: each='key' | 'key' | 2 arguments",
    ),
    'another flag than was traced': (
        lambda: sg.precompute(flagged, PARAMS, X, True, wrt='head').early(
            PARAMS, X, False
        ),
        'ArgumentTypeError: Argument 2 is False | True | sg.precompute',
    ),
    'frozen parameters left out that are read': (
        lambda: split().early({**PARAMS, 'body': sg.ABSENT}, X),
        'AbsentLeafError: body in argument 0 | early | ahead_errors.py:LINE',
    ),
    'arguments given by name to the wrong part': (
        lambda: split().early(PARAMS, x=X),
        'TypeError: early takes argument 0, argument 1',
    ),
}

"""Errors name the function that was called: arguments exchanged, a dict of losses."""

import importlib
import itertools
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flax_sg as sg
from flax_sg import filters, testing
from flax_sg import linen as nn

PARAMS = {'body': jnp.ones((3, 3)), 'head': jnp.ones(3)}
X = jnp.ones((1, 3))
NET = nn.Dense(2)
GRAPH = flax.nnx.Linear(2, 2, rngs=flax.nnx.Rngs(0))


def loss(params: Any) -> jax.Array:
    return jnp.sum(params['body'] @ params['head'])


class Options(dict[str, Any]):
    """Keyword arguments."""


GRADIENTS = jax.grad(loss)(PARAMS)
FOLDER = tempfile.TemporaryDirectory()
# The call that is right, for each public function of several arguments.
CALLS: dict[str, tuple[Any, ...]] = {
    'sg.adopt': (optax.adam(0.1), PARAMS, optax.adam(0.1).init(PARAMS)),
    'sg.at': ('body', np.s_[:1]),
    'sg.freeze': (optax.adam(0.1), 'body'),
    'sg.grad': (loss,),
    'sg.gradient_flow': (loss, PARAMS),
    'sg.labels': (PARAMS, {'slow': 'body', 'fast': 'head'}),
    'sg.live': (loss, PARAMS),
    'sg.mask': (PARAMS, Options(trained='body')),
    'sg.partition': (PARAMS, 'body'),
    'sg.partition_n': (PARAMS, {'slow': 'body', 'fast': 'head'}),
    'sg.paths': (NET, X),
    'sg.precompute': (loss, PARAMS, Options(wrt='head')),
    'sg.rewrite': (PARAMS, nn.scale_gradient('body', 0.5)),
    'sg.stop_gradient': (PARAMS, 'body'),
    'sg.store': (np.tanh, np.ones((2, 3)), FOLDER.name, Options(batch_size=1)),
    'sg.substitute': (PARAMS, {'body': jnp.ones((3, 3))}),
    'sg.tabulate': (NET, X),
    'sg.value_and_grad': (loss,),
    'sg.vjp': (loss, PARAMS),
    'filters.of_type': (nn.Dense, NET, X),
    'testing.assert_flows': (loss, 'head', PARAMS),
    'testing.assert_moves_only': (PARAMS, PARAMS, False),
    'testing.assert_same_program': (loss, loss, PARAMS),
    'testing.assert_stopped': (loss, False, PARAMS),
    'testing.assert_trains_only': (loss, ['body', 'head'], PARAMS),
    'testing.optimized_hlo': (loss, PARAMS),
}
# flax_sg.nnx asks for flax 0.12.1.
HAS_NNX = hasattr(flax.nnx.Variable, 'get_value')
if HAS_NNX:
    CALLS |= {
        'nnx.Optimizer': (GRAPH, optax.adam(0.1), Options(wrt='kernel')),
        'nnx.where': (GRAPH, 'kernel'),
    }
# These take one argument, or as many of one kind as they are given.
OTHERS = {
    *('sg.ABSENT', 'sg.DECLARED', 'sg.NonDifferentiable', 'sg.Path', 'sg.arrays'),
    *('sg.core', 'sg.errors', 'sg.filters', 'sg.linen', 'sg.testing'),
    *('sg.Rows', 'sg.combine', 'sg.trainable', 'sg.where', 'testing.moves'),
    *('filters.Collection', 'filters.Filter', 'filters.Where'),
}


def call(name: str, args: tuple[Any, ...]) -> Any:
    room, _, name = name.partition('.')
    module = sg if room == 'sg' else importlib.import_module(f'flax_sg.{room}')
    fn, options = getattr(module, name), {}
    if isinstance(args[-1], Options):
        *args, options = args
    out = fn(*args, **options)
    return out(PARAMS) if name in ('grad', 'value_and_grad') else out


def wrong(args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Two arguments exchanged; a dict of losses, and gradients, for a loss."""
    given = [n for n, arg in enumerate(args) if not isinstance(arg, Options)]
    for n, k in itertools.combinations(given, 2):
        order = list(args)
        order[n], order[k] = args[k], args[n]
        if args[n] is not args[k]:
            yield tuple(order)
    for n, other in itertools.product(given, ({'one': loss}, GRADIENTS)):
        if args[n] is loss:
            yield (*args[:n], other, *args[n + 1 :])


def test_every_public_function_is_called():
    names = {f'sg.{name}' for name in sg.__all__}
    names |= {f'testing.{name}' for name in testing.__all__}
    names |= {f'filters.{name}' for name in filters.__all__}
    assert names - OTHERS <= CALLS.keys()


@pytest.mark.parametrize('name', CALLS)
def test_an_error_names_the_function_that_was_called(name: str):
    with warnings.catch_warnings(action='ignore'):
        call(name, CALLS[name])
        for args in wrong(CALLS[name]):
            with pytest.raises(sg.errors.FlaxSGError) as raised:
                call(name, args)
            _, _, called = name.rpartition('.')
            assert called in str(raised.value)
            assert len(str(raised.value)) < 600


def test_a_state_and_parameters_that_are_exchanged_are_told_so():
    for tx in (optax.adam(0.1), sg.freeze(optax.adam(0.1), 'body')):
        with pytest.raises(sg.errors.ArgumentTypeError, match='are exchanged'):
            sg.adopt(tx, tx.init(PARAMS), PARAMS)
    # A tuple of networks, and an optimizer whose state is a dict, are in order.
    both = {'mu': (1.0, 2.0)}
    tx = optax.GradientTransformation(lambda p: {'mu': p}, lambda u, s, p: (u, s))
    assert sg.adopt(tx, (1.0, 2.0), both) == both

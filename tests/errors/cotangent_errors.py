"""Programs with rules for cotangents that fail, and what they say; see test_errors."""

from __future__ import annotations

import contextlib
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp

from flax_sg import linen as nn

PARAMS = {'enc': {'w': jnp.ones((2, 3)), 'b': jnp.ones(3)}}


class Uses(fnn.Module):
    @fnn.compact
    def __call__(self):
        return sum(jnp.sum(x) for x in jax.tree.leaves(self.variables['params']))


def loss(params: Any) -> jax.Array:
    return Uses().apply({'params': params})


def grads(rule: Any) -> Any:
    def under(params: Any) -> jax.Array:
        with rule:
            return loss(params)

    return jax.grad(under)(PARAMS)


def summed(path: Any, ct: Any) -> Any:
    return jnp.sum(ct)


@jax.jit
def traced(factor: Any) -> Any:
    return grads(nn.map_cotangent('enc/w', lambda path, ct: factor * ct))


CLIP = nn.clip_gradient(True, global_norm=1.0)


def integer() -> None:
    with nn.scale_gradient('steps', 0.5):
        Uses().apply({'params': {'steps': jnp.array(3), 'w': jnp.ones(2)}})


def in_a_body(around: bool = False) -> None:
    class Body(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            with contextlib.nullcontext() if around else CLIP:
                return fnn.Dense(1)(x)

    class Model(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            with CLIP if around else contextlib.nullcontext():
                return fnn.remat(Body)(name='body')(x)

    x = jnp.ones((1, 1))
    params = Model().init(jax.random.key(0), x)
    jax.grad(lambda p: jnp.sum(Model().apply(p, x)))(params)


LIKE_ITS_PARAMETER = '\nA cotangent has the shape and the dtype of its parameter.'
ONE_BOUND = (
    ': expected one of value=, norm= and global_norm=.\n'
    'Write nn.clip_gradient(where, global_norm=1.0); for two, nest two blocks.'
)

CASES: dict[str, tuple[Any, ...]] = {
    'a function that changes the shape': (
        lambda: grads(nn.map_cotangent('enc/w', summed)),
        "CotangentError: the cotangent of 'enc/w' is float32[2, 3], and what summed "
        f'at cotangent_errors.py:LINE returns is float32[].{LIKE_ITS_PARAMETER}',
    ),
    'an integer': (
        integer,
        "CotangentError: scale_gradient(Glob('steps'), 0.5) selects 'steps', which has "
        'no cotangent: it holds int32[].\n'
        'Select real or complex variables; True takes those and no others.',
    ),
    'clip without a bound': (
        lambda: nn.clip_gradient('enc/**'),
        f'ArgumentValueError: clip_gradient() was given no bound{ONE_BOUND}',
        'nn.clip_gradient(where, global_norm=1.0)',
    ),
    'clip below zero': (
        lambda: nn.clip_gradient('enc/**', norm=-1.0),
        'ArgumentValueError: norm=-1.0: expected a number from 0 on.',
    ),
    'a factor for each': (
        lambda: nn.scale_gradient('enc/**', jnp.ones(2)),
        'ArgumentValueError: factor has the shape (2,): expected one number.',
    ),
    'a factor that is a text': (
        lambda: nn.scale_gradient('enc/**', '0.5'),
        "ArgumentTypeError: '0.5' (str) is no number for factor.\n"
        'Write a number or an array of numbers.',
    ),
    'a reversed text': (
        lambda: nn.reverse_gradient('enc/**', '0.5'),
        "ArgumentTypeError: '0.5' (str) is no number for factor.\n"
        'Write a number or an array of numbers.',
    ),
    'a bound that is a list': (
        lambda: nn.clip_gradient('enc/**', norm=[1.0]),
        'ArgumentTypeError: a list is no number for norm.\n'
        'Write a number or an array of numbers.',
    ),
    'a cotangent that is a text': (
        lambda: nn.replace_cotangent('enc/**', 'zeros'),
        "ArgumentTypeError: 'zeros' (str) is no value for a cotangent.\n"
        'Write a number or an array of numbers.',
    ),
    'no function of the cotangent': (
        lambda: nn.map_cotangent('enc/**', None),
        'ArgumentTypeError: None is no function of a cotangent.\n'
        'Write nn.map_cotangent(where, lambda path, ct: 2.0 * ct).',
    ),
    'a text for the function of the cotangent': (
        lambda: nn.map_cotangent('enc/**', lambda path, ct, x: ct, 'x'),
        "ArgumentTypeError: 'x' (str) is no value for a cotangent.\n"
        'Write a number or an array of numbers.',
    ),
    'one path instead of two': (
        lambda: nn.copy_cotangent('enc/w'),
        "ArgumentTypeError: 'enc/w' (str) is no dict of paths.\n"
        "Write nn.copy_cotangent({'target': 'source'}).",
    ),
    'a path where values are expected': (
        lambda: nn.substitute('enc/**', lambda path, value: value),
        "ArgumentTypeError: 'enc/**' (str) is no module, class or function.\n"
        "Write nn.substitute(values, where='enc/**').",
    ),
    'a function that reads a tracer': (
        lambda: traced(2.0),
        'ArgumentTypeError: <lambda> at cotangent_errors.py:LINE reads a traced value '
        "(float32[]) as 'factor'.\n"
        'Hand it over: nn.map_cotangent(where, fn, value) calls fn(path, cotangent, '
        'value).',
    ),
    'a rule that takes parameters together in a body': (
        in_a_body,
        'BlockError: clip_gradient(Constant(True), global_norm=1.0) was opened in the '
        "body of a transform (nn.scan, nn.remat, ...), and 'Dense_0/kernel' is "
        'read there.\n'
        'It takes its parameters together, and a body knows those alone that the '
        'transform hands it.\n'
        'Open the block around the transform: with nn.clip_gradient(...): '
        'model.apply(variables, x).',
        lambda: in_a_body(around=True),
    ),
}


def counted(path: Any, ct: Any) -> Any:
    return ct / jnp.sum(ct)


where, path, fn, value = 'enc/w', 'enc/w', counted, 1.0

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


CASES: dict[str, Any] = {
    'a function of another shape': lambda: grads(nn.map_cotangent('enc/w', summed)),
    'an integer': integer,
    'clip without a bound': (
        lambda: nn.clip_gradient('enc/**'),
        'nn.clip_gradient(where, global_norm=1.0)',
    ),
    'clip below zero': lambda: nn.clip_gradient('enc/**', norm=-1.0),
    'a factor for each': lambda: nn.scale_gradient('enc/**', jnp.ones(2)),
    'a factor that is a text': lambda: nn.scale_gradient('enc/**', '0.5'),
    'a cotangent that is a text': lambda: nn.replace_cotangent('enc/**', 'zeros'),
    'no function of the cotangent': lambda: nn.map_cotangent('enc/**', None),
    'one path instead of two': lambda: nn.copy_cotangent('enc/w'),
    'a path where values are expected': lambda: nn.substitute(
        'enc/**', lambda path, value: value
    ),
    'a function that reads a tracer': lambda: traced(2.0),
    'a rule that takes parameters together in a body': (
        in_a_body,
        lambda: in_a_body(around=True),
    ),
}


def counted(path: Any, ct: Any) -> Any:
    return ct / jnp.sum(ct)


where, path, fn, value = 'enc/w', 'enc/w', counted, 1.0

"""Experiments in one process: nothing of one that is over is kept."""

import gc
import weakref
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp

import flax_sg as sg
from flax_sg import linen as nn

X = jnp.ones((1, 2))


def experiment(number: int, watched: list[weakref.ref[Any]]) -> None:
    """Classes, data, filters and programs of its own."""
    data = jnp.full((64, 64), float(number))
    name = f'layer_{number % 3}'

    class Body(fnn.Module):
        def setup(self):
            self.scale = 2.0 * self.param('scale', fnn.initializers.ones, (1, 2))

        def __call__(self, x):
            return x * self.scale + jnp.mean(data)

    lifted = nn.scale_gradient('scale', 1.0 + number)(Body)
    stopped = nn.stop_gradient(Body, 'scale')

    class Net(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            x = nn.Frozen(fnn.Dense(2), lambda path: path.name == 'bias')(x)
            x = fnn.jit(Body)(name=name)(x) + lifted(name='lifted')(x)
            return stopped(name='stopped')(x)

    model = Net()
    params = jax.eval_shape(model.init, jax.random.key(0), X)['params']

    def where(path: sg.Path) -> bool:
        return path.startswith(name)

    def loss(params: Any) -> Any:
        return jnp.sum(model.apply({'params': params}, X))

    step = jax.jit(jax.grad(loss))
    with nn.stop_gradient(where):
        jax.eval_shape(step, params)
        jax.eval_shape(step, params)
    things = [data, Body, Net, lifted, stopped, model, where, loss, step]
    watched += map(weakref.ref, things)


def test_an_experiment_that_is_over_is_freed():
    watched: list[weakref.ref[Any]] = []
    for number in range(12):
        experiment(number, watched)
    jax.clear_caches()
    for _ in range(3):  # A class that is freed frees the class below it.
        gc.collect()
    assert [ref() for ref in watched if ref() is not None] == []

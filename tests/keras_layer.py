"""Checks a wrapper in `keras.layers.FlaxLayer`; test_protocols runs this program.

It runs in its own process. Keras reads its backend from the environment and does not
support the strict flags of all other tests.
"""

import json
import os
import sys

os.environ['KERAS_BACKEND'] = 'jax'

import jax
import jax.numpy as jnp
import keras
from flax import linen

from flax_sg import linen as nn
from oracle import assert_same, is_zero, stopped

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Net(linen.Module):
    """Drops inputs and normalizes by the batch, in training alone."""

    @linen.compact
    def __call__(self, x, training=False):
        x = linen.Dense(5, name='backbone')(x)
        x = linen.BatchNorm(use_running_average=not training, name='norm')(x)
        x = linen.Dropout(0.5, deterministic=not training)(x)
        return linen.Dense(2, name='head')(x)


def run(module, selects, training):
    """Output, state and gradients of one call of a Keras layer of a module."""
    # Keras needs TensorFlow to make the variables itself.
    variables = module.init(jax.random.key(0), X)
    layer = keras.layers.FlaxLayer(module, variables=variables, seed=3)
    layer(X)
    flat, _ = jax.tree_util.tree_flatten_with_path(layer.params['params'])
    paths = {id(v): '/'.join(key.key for key in keys) for keys, v in flat}
    order = [paths[id(v)] for v in layer.trainable_variables]
    trained = {paths[id(v)]: v.value for v in layer.trainable_variables}
    state = [v.value for v in layer.non_trainable_variables]

    def call(trained):
        chosen = stopped(trained, selects)
        values = [chosen[path] for path in order]
        out, written = layer.stateless_call(values, state, X, training=training)
        return out.sum(), (out, written)

    grads, (out, written) = jax.grad(call, has_aux=True)(trained)
    return {'out': out, 'written': written, 'grads': grads}


def main():
    """Compares a frozen backbone with one that is stopped by hand."""
    found = {}
    for training in (False, True):
        frozen = run(nn.Frozen(Net(), 'backbone/**'), lambda path: False, training)
        by_hand = run(Net(), lambda path: 'backbone' in path, training)
        assert_same(frozen, by_hand)
        found[training] = frozen
    of_backbone = {k: g for k, g in found[True]['grads'].items() if 'backbone' in k}
    assert len(of_backbone) == 2
    assert is_zero(of_backbone) and not is_zero(found[True]['grads'])
    json.dump(
        {
            'dropped': bool((found[True]['out'] != found[False]['out']).any()),
            'statistics': not is_zero(
                jax.tree.map(
                    jnp.subtract,
                    found[True]['written'][:2],
                    found[False]['written'][:2],
                )
            ),
        },
        sys.stdout,
    )


if __name__ == '__main__':
    main()

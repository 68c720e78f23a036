"""numpyro: a Bayesian regression on features of a flax module with a frozen layer."""

import flax.linen
import jax
import jax.numpy as jnp
import numpyro
import steps
from numpyro import distributions
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from numpyro.optim import optax_to_numpyro

import flax_sg as sg
from flax_sg import linen as nn

x = jax.random.normal(jax.random.key(0), (12, 5))
y = jnp.sin(x[:, 0])


class Net(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        x = flax.linen.tanh(flax.linen.Dense(8, name='features')(x))
        return flax.linen.Dense(1, name='head')(x)[:, 0]


def model():
    net = flax_module('net', Net(), x)
    sigma = numpyro.sample('sigma', distributions.LogNormal())
    numpyro.sample('y', distributions.Normal(net(x), sigma), obs=y)


guide = AutoNormal(model)
svi = SVI(model, guide, numpyro.optim.Adam(1e-2), Trace_ELBO())
state = svi.init(jax.random.key(1))
params = svi.get_params(state)


def loss(params):
    return Trace_ELBO().loss(jax.random.key(2), params, model, guide)


steps.check(
    'numpyro, Trace_ELBO',
    loss,
    params,
    in_model='features/**',
    in_tree='net$params/features/**',
    is_frozen=lambda path: path.startswith('net$params/features/'),
)


# numpyro's own step, with the optimizer of flax_sg.
def frozen_model():
    with nn.stop_gradient('features/**'):
        model()


tx = sg.freeze(steps.DECAY, 'net$params/features/**')
ours = SVI(frozen_model, guide, optax_to_numpyro(tx), Trace_ELBO())
state, _ = jax.jit(ours.update)(ours.init(jax.random.key(1)))
after = ours.get_params(state)
steps.assert_same(after['net$params']['features'], params['net$params']['features'])
head = after['net$params']['head']['kernel']
assert not jnp.array_equal(head, params['net$params']['head']['kernel'])
print('numpyro, SVI.update with sg.freeze: the frozen layer stays, the head moves')

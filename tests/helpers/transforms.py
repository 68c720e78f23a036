"""Transforms of JAX around a function of parameters and an input."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# A transform of a function of params and x, to another one, or to a tree of outputs.


def tangents(*primals: Any) -> Any:
    return jax.lax.stop_gradient(jax.tree.map(jnp.cos, primals))


def custom_vjp(fn: Any) -> Any:
    wrapped = jax.custom_vjp(fn)
    wrapped.defvjp(
        lambda *args: jax.vjp(fn, *args), lambda pull_back, ct: pull_back(ct)
    )
    return wrapped


def custom_jvp(fn: Any) -> Any:
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return wrapped


def scan_over_params(fn: Any) -> Any:
    def step(x, params):
        return fn(params, x), x

    def wrapped(params, x):
        stack = jax.tree.map(lambda p: jnp.stack([p, jnp.sin(p)]), params)
        return jax.lax.scan(step, x, stack)

    return wrapped


def scan_closed_over(fn: Any) -> Any:
    return lambda params, x: jax.lax.scan(
        lambda x, _: (fn(params, x), None), x, None, length=2
    )[0]


def hessian(fn: Any) -> Any:
    def scalar(kernel, params, x):
        params = {'dense': {**params['dense'], 'kernel': kernel}}
        return jnp.sum(fn(params, x) ** 2)

    return lambda params, x: jax.hessian(scalar)(params['dense']['kernel'], params, x)


def grad_penalty(fn: Any) -> Any:
    """The gradient of a loss with the gradient of x in it."""

    def penalty(params, x):
        return jnp.sum(jax.grad(lambda x: jnp.sum(fn(params, x)))(x) ** 2)

    return jax.grad(penalty, argnums=(0, 1))


def shard_mapped(fn: Any) -> Any:
    mesh = jax.make_mesh((1,), ('i',))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=(spec, spec), out_specs=spec)


NAMED = jax.checkpoint_policies.save_only_these_names('dense')
AROUND: dict[str, Callable[[Any], Any]] = {
    'jit': jax.jit,
    'checkpoint_names': functools.partial(jax.checkpoint, policy=NAMED),
    'checkpoint_of_jit': lambda fn: jax.checkpoint(jax.jit(fn)),
    'vmap_params': lambda fn: (
        lambda params, x: jax.vmap(fn, (0, None))(
            jax.tree.map(lambda p: jnp.stack([p, jnp.sin(p)]), params), x
        )
    ),
    'vmap_of_jit': lambda fn: jax.vmap(jax.jit(fn), (None, 0)),
    'scan_over_params': scan_over_params,
    'scan_closed_over': scan_closed_over,
    'cond': lambda fn: (
        lambda params, x: jax.lax.cond(
            jnp.sum(x) > 0, fn, lambda params, x: 2 * fn(params, x), params, x
        )
    ),
    'fori_loop': lambda fn: (
        lambda params, x: jax.lax.fori_loop(0, 2, lambda i, x: fn(params, x), x)
    ),
    'jvp': lambda fn: lambda *args: jax.jvp(fn, args, tangents(*args)),
    'hessian': hessian,
    'grad_penalty': grad_penalty,
    'custom_vjp': custom_vjp,
    'custom_jvp': custom_jvp,
    'custom_gradient': lambda fn: jax.custom_gradient(functools.partial(jax.vjp, fn)),
    'shard_map': shard_mapped,
    'jit_of_grad_of_scan': lambda fn: jax.jit(
        jax.grad(lambda *args: jnp.sum(scan_closed_over(fn)(*args)), argnums=(0, 1))
    ),
}

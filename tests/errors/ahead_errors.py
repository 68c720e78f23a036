"""What is computed ahead, given other arguments than it was traced with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import flax_sg as sg

PARAMS: Any = {'body': jnp.ones((2, 2)), 'head': jnp.ones(2)}
X = jnp.ones((3, 2))


def loss(params: Any, x: Any) -> Any:
    return jnp.sum(x @ params['body'] @ params['head'])


def normalized(params: Any, x: Any) -> Any:
    return loss(params, jnp.tanh(x @ params['body'] - x.mean(0, keepdims=True)))


def keyed(params: Any, x: Any, key: Any) -> Any:
    return loss(params, x) * jax.random.uniform(key)


def flagged(params: Any, x: Any, flag: bool) -> Any:
    return loss(params, x) if flag else 0.0


def views(params: Any, x: Any, y: Any) -> Any:
    return loss(params, jnp.tanh(jnp.concatenate([x, y]) @ params['body']))


def powers(params: Any, x: Any, n: int) -> Any:
    for _ in range(n):
        x = jnp.tanh(x @ params['body'])
    return jnp.sum(x @ params['head'])


def distilled(params: Any, teacher: Any, x: Any) -> Any:
    return loss(params, x - teacher(x))


def mapped(check_vma: bool) -> Any:
    mesh = jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec('data')

    def early(x: Any) -> Any:
        return split().early(PARAMS, x)

    return jax.shard_map(
        early, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )


def split(fun: Any = loss, *data: Any, **how: Any) -> Any:
    return sg.precompute(fun, PARAMS, *(data or (X,)), wrt='head', **how)


def of_examples(fun: Any, *data: Any) -> Any:
    return split(fun, *data, examples=True)


def view(params: Any, x: Any, y: Any) -> Any:
    return views(params, x[None], y[None])


def in_another_mode() -> Any:
    rngs = nnx.Rngs(0)
    body, head = (nnx.Linear(2, 2, rngs=rngs) for _ in range(2))
    model = nnx.Sequential(body, nnx.Dropout(0.5, rngs=rngs), head)
    ahead = sg.precompute(lambda m, x: m(x).sum(), model, X, wrt='layers/2/**')
    kept = ahead.early(model, X)
    model.eval()
    return ahead.late(model, kept)


where, ahead = 'head', split()

CASES: dict[str, Any] = {
    'parameters that change': lambda: sg.precompute(loss, PARAMS, X, each=0),
    'nothing to compute once': lambda: sg.precompute(loss, PARAMS, X, each=1),
    'a teacher that draws another mask at each step': lambda: sg.precompute(
        distilled, PARAMS, nnx.Dropout(0.5, rngs=nnx.Rngs(0)), X, wrt='head'
    ),
    'a batch of another size': lambda: split().early(PARAMS, X[:2]),
    'other parameters first': lambda: split().early({'head': PARAMS['head']}, X),
    'a list in place of an array': lambda: split().early(PARAMS, [X, X]),
    'a model in another mode': in_another_mode,
    'a batch left out': lambda: split().early(PARAMS),
    'what is kept left out': lambda: split().late(PARAMS),
    'what is kept of a smaller batch': (
        lambda: split().late(PARAMS, [X[:2]]),
        lambda: split().late(PARAMS, [X]),
    ),
    'the data in place of what was kept': lambda: split().late(PARAMS, X),
    'other arrays than were kept': lambda: split().late(PARAMS, [X, X]),
    'a shard, and none was traced': (lambda: mapped(True)(X), lambda: mapped(False)(X)),
    'each= names no argument': lambda: sg.precompute(loss, PARAMS, X, each='key'),
    'another flag than was traced': (
        lambda: split(flagged, X, True).early(PARAMS, X, False)
    ),
    'a number that the function asked for': (
        lambda: split(powers, X, 2).early(PARAMS, X, 3),
        lambda: split(powers, X, 3).early(PARAMS, X, 3),
    ),
    'two views joined along the batch': (
        lambda: of_examples(views, X, X),
        lambda: jax.vmap(split(view, X[0], X[0]).early, (None, 0, 0))(PARAMS, X, X),
    ),
    'examples along another axis': (
        lambda: of_examples(lambda p, x, y: loss(p, x.T) * y.mean(), X.T, X[:, 0]),
        lambda: of_examples(lambda p, x, y: loss(p, x) * y.mean(), X, X[:, 0]),
    ),
    'a key among examples': lambda: of_examples(keyed, X, jax.random.key(0)),
    'a frozen layer behind the mean of a batch': lambda: of_examples(normalized, X),
    'frozen parameters left out that are read': lambda: split().early(
        {**PARAMS, 'body': sg.ABSENT}, X
    ),
    'arguments given by name to the wrong part': lambda: split().early(PARAMS, x=X),
}

"""Trees, optimizers and derivatives that do not fit, and fixes; see test_errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import flax_sg as sg
from flax_sg import linen as nn

PARAMS: Any = {'head': {'w': 1.0}, 'body': {'w': 2.0}}
HEAD = {'head': {'w': 1.0}}
where = 'head/**'
# In a wrong place.
HEADS: Any = 'head/**'
LIST: Any = ['head']
VECTORS: Any = {'a': jnp.ones(2), 'b': jnp.ones(2)}
THREE = {**VECTORS, 'b': jnp.ones(3)}


def product(params: Any) -> Any:
    return params['head']['w'] * params['body']['w']


def state_of(frozen: str) -> None:
    """Updates with the state for what one filter leaves."""
    tx = sg.freeze(optax.sgd(0.1, 0.9), 'head/w')
    state = sg.freeze(optax.sgd(0.1, 0.9), frozen).init(PARAMS)
    params = {name: {'w': jnp.ones(1)} for name in PARAMS}
    tx.update(params, state, params)


def paused(step: Any) -> None:
    """Updates with the state for a condition that holds in all steps."""
    head, sgd = sg.filters.as_filter('head/w'), optax.sgd(0.1, 0.9)
    state = sg.freeze(sgd, head & True).init(PARAMS)
    sg.freeze(sgd, head & (step < 2)).update(PARAMS, state, PARAMS)


def momentum_of(tx: Any) -> None:
    """An update in which a traced condition freezes a parameter."""
    tx = sg.freeze(tx, sg.where('a') & (jnp.ones(()) > 0))
    tx.update(VECTORS, tx.init(VECTORS), VECTORS)


def gradients(grads: Any) -> None:
    tx = sg.freeze(optax.sgd(0.1), 'head/w')
    tx.update(grads, tx.init(PARAMS), PARAMS)


def in_part(gradient: Any) -> None:
    tx = sg.freeze(optax.sgd(0.1), sg.at('w', 0))
    params = {'w': jnp.ones((2, 3))}
    tx.update({'w': gradient}, tx.init(params), params)


def rows(where: Any) -> Any:
    return sg.freeze(optax.sgd(0.1, 0.9), ~where)


def cast(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)


def dot(params: Any) -> Any:
    return jnp.sum(params['a'] * params['b'])


params, loss = PARAMS, product
adam = optax.adam(0.1)
frozen = sg.freeze(adam, 'a')


class Declared(NamedTuple):
    kernel: Any
    mean: Any


CASES: dict[str, Any] = {
    'a value without a leaf': lambda: sg.substitute(PARAMS, {'head': {'v': 3.0}}),
    'a leaf without a value': lambda: sg.substitute(PARAMS, HEAD, where='**'),
    'a flat tree of values': lambda: sg.substitute(PARAMS, {'head/w': 3.0}),
    'collections and parameters': lambda: sg.substitute({'params': PARAMS}, PARAMS),
    'labels that are none': lambda: sg.partition_n(PARAMS, HEADS),
    'pruned updates for a function of optax': lambda: optax.apply_updates(
        PARAMS, sg.grad(product, wrt='head/w')(PARAMS)
    ),
    'the state of another selection': lambda: state_of('body/w'),
    'a state of all parameters, as a traced condition needs it': lambda: frozen.update(
        VECTORS, adam.init(VECTORS), VECTORS
    ),
    'a state that lacks what a traced condition may train': lambda: jax.jit(paused)(0),
    'moments of which optax does not tell whose they are': (
        lambda: jax.jit(lambda: momentum_of(optax.flatten(optax.trace(0.9))))(),
        lambda: jax.jit(lambda: momentum_of(optax.trace(0.9)))(),
    ),
    'the state of another optimizer': lambda: sg.adopt(
        adam, PARAMS, optax.sgd(0.1, 0.9).init(PARAMS)
    ),
    'dicts of another optimizer': lambda: sg.adopt(
        adam, PARAMS, {'0': {'trace': HEAD}}
    ),
    'a hole in place of a state': lambda: sg.adopt(adam, PARAMS, None),
    'an argument that there is not': lambda: sg.grad(product, argnums=1)(PARAMS),
    'outputs without others': lambda: sg.gradient_flow(product, PARAMS, has_aux=True),
    'a keyword of other libraries': lambda: sg.grad(product, of=nn.Dense(1)),
    'a filter in the place of argnums': lambda: sg.grad(product, HEADS)(PARAMS),
    'an array in place of a tree': lambda: sg.grad(product, wrt='head/w')(jnp.ones(2)),
    'nothing to differentiate': lambda: sg.grad(product, wrt=False),
    'one filter for what is trained and what is frozen': (
        lambda: gradients(sg.grad(product, wrt='head/w')(PARAMS)),
        'sg.grad(loss, wrt=~sg.where(where))',
    ),
    'a mask without a side': lambda: sg.mask(PARAMS, 'head/**'),
    'a filter in place of a block': (
        lambda: sg.stop_gradient(HEADS),
        lambda: nn.stop_gradient(HEADS),
    ),
    'a module in place of a tree': lambda: sg.stop_gradient(fnn.Dense(2), True),
    'parameters in place of a function': lambda: sg.grad(PARAMS),
    'no rewrite': lambda: sg.rewrite(PARAMS, HEADS),
    'values that are none': lambda: sg.substitute(PARAMS, None),
    'no transformation': lambda: sg.adopt(PARAMS, adam, adam.init(PARAMS)),
    'a state in place of its transformation': (
        lambda: sg.adopt(adam, VECTORS, adam.init(VECTORS), old=adam.init(VECTORS)),
        lambda: sg.adopt(adam, VECTORS, adam.init(VECTORS), old=[adam]),
    ),
    'rows of a state that nobody names': lambda: sg.adopt(
        sg.freeze(adam, sg.at('b', 1)),
        VECTORS,
        sg.freeze(adam, sg.at('b', 0)).init(VECTORS),
    ),
    'a line search over all parameters': (
        lambda: frozen.update(VECTORS, frozen.init(VECTORS), VECTORS, value_fn=dot),
        'sg.partition(params, ~sg.where(where))',
    ),
    'a gradient of another leaf': lambda: gradients({**PARAMS, 'tail': {'w': 1.0}}),
    'a gradient that is a tree': lambda: frozen.update(
        {'a': 1.0, 'b': {}}, frozen.init(VECTORS), VECTORS
    ),
    'one row of a state for several': lambda: rows(sg.at('b', np.s_[:2])).update(
        THREE, rows(sg.at('b', np.s_[:1])).init({**THREE, 'b': jnp.ones(2)}), THREE
    ),
    'rows within rows': lambda: sg.freeze(
        rows(sg.at('a', 0)), sg.at('b', np.s_[:1])
    ).init(VECTORS),
    'a gradient of another shape': lambda: in_part(jnp.ones((3, 2))),
    'a filter in place of inputs': lambda: sg.paths(PARAMS, 'head/**'),
    'parts without a star': lambda: sg.combine(sg.partition(PARAMS, 'head/w')),
    'a label that is a list': lambda: sg.labels(PARAMS, lambda path: LIST),
    'no label': lambda: sg.labels(PARAMS, {'fast': 'head/w'}),
    'a filter in place of a tree': lambda: sg.partition('head/w', PARAMS),
    'an integer in too few bits': lambda: cast(sg.NonDifferentiable(1001)).value,
    'bools and globs': lambda: sg.partition(PARAMS, [True, 'head/w']),
    'fields in a list': lambda: sg.trainable(LIST),
    'overlapping parts': lambda: sg.combine({'a': {'w': 3.0}}, {'a': {'w': 1.0}}),
    'parts of two kinds': lambda: sg.combine([1.0], (sg.ABSENT,)),
    'parts of two trees': lambda: sg.combine({'a': {'w': 3.0}}, {'a': {'v': 1.0}}),
    'two labels': lambda: sg.partition_n({'gln': 1.0}, {'gln': 'gln', 'all': True}),
    'wrt= of an integer': lambda: sg.grad(lambda p: p['w'], wrt='step')(
        {'w': 1.0, 'step': 3}
    ),
    'absent=': lambda: sg.grad(lambda p: p, absent='zero'),
    'a changed value': lambda: (
        jax.tree.map(lambda x: 0.5 * x, sg.NonDifferentiable(3)).value
    ),
    'a field that is not there': lambda: sg.grad(jnp.sum)(
        sg.trainable('kernal')(Declared)(3.0, 3.0)
    ),
    'freezing no optimizer': (
        lambda: sg.freeze('adam', 'a'),
        "sg.freeze(optax.adam(1e-3), 'backbone/**')",
    ),
    'an optimizer for values that are gradients': lambda: sg.mask(
        {'_overwrite_with_gradient': {'s': 1.0}}, frozen=True
    ),
}

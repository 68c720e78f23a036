"""Trees, optimizers and derivatives that do not fit, and fixes; see test_errors."""

from __future__ import annotations

from typing import Any

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

CASES: dict[str, tuple[Any, ...]] = {
    'a value without a leaf': (
        lambda: sg.substitute(PARAMS, {'head': {'v': 3.0}}),
        "UnusedFilterError: 'head/v' | 'head/w'",
    ),
    'a leaf without a value': (
        lambda: sg.substitute(PARAMS, HEAD, where='**'),
        "StructureError: 'body/w' | 'params' | sg.ABSENT",
    ),
    'a flat tree of values': (
        lambda: sg.substitute(PARAMS, {'head/w': 3.0}),
        "UnusedFilterError: 'head/w' | "
        "flax.traverse_util.unflatten_dict(tree, sep='/')",
    ),
    'a collection in place of parameters': (
        lambda: sg.substitute({'params': PARAMS}, PARAMS),
        "UnusedFilterError: 'body/w' | 'params/body/w'",
    ),
    'labels that are none': (
        lambda: sg.partition_n(PARAMS, HEADS),
        "FilterTypeError: 'head/**' | 'gln_*/**'",
    ),
    'pruned updates for a function of optax': (
        lambda: optax.apply_updates(PARAMS, sg.grad(product, wrt='head/w')(PARAMS)),
        "AbsentLeafError: 'zeros' | sg.freeze(tx, where)",
    ),
    'the state of what is frozen in a plain optimizer': (
        lambda: adam.update(VECTORS, frozen.init(VECTORS), VECTORS),
        'AbsentLeafError: ABSENT | sg.adopt(tx, params, state)',
    ),
    'the state of what is frozen in a chain': (
        lambda: optax.sgd(0.1, 0.9).update(
            VECTORS, sg.freeze(optax.sgd(0.1, 0.9), 'a').init(VECTORS), VECTORS
        ),
        'AbsentLeafError: ABSENT | sg.adopt(tx, params, state)',
    ),
    'the state of another selection': (
        lambda: state_of('body/w'),
        "StructureError: 'body/w' | sg.adopt(tx, params, state, old=old_tx)",
    ),
    'a state that lacks what a traced condition may train': (
        lambda: jax.jit(paused)(0),
        "StructureError: 'body/w' | sg.freeze(tx, False).init(params)",
    ),
    'the state of another optimizer': (
        lambda: sg.adopt(adam, PARAMS, optax.sgd(0.1, 0.9).init(PARAMS)),
        "StructureError: TraceState | '0' | ScaleByAdamState | "
        'sg.adopt(tx, params, state)',
    ),
    'plain dicts of another optimizer': (
        lambda: sg.adopt(adam, PARAMS, {'0': {'trace': HEAD}}),
        "StructureError: '0/trace/*' | '0/count' | sg.adopt(tx, params, state)",
    ),
    'a hole in place of a state': (
        lambda: sg.adopt(adam, PARAMS, None),
        "StructureError: nothing | '0/count' | sg.adopt(tx, params, state)",
    ),
    'an argument that there is not': (
        lambda: sg.grad(product, argnums=1)(PARAMS),
        'ArgumentTypeError: argnums=1: expected different positions of 1 arguments.',
    ),
    'an argument of a report that there is not': (
        lambda: sg.gradient_flow(product, PARAMS, argnums=1),
        'ArgumentTypeError: argnums=1: expected different positions of 1 arguments.',
    ),
    'a filter in the place of argnums of a report': (
        lambda: sg.gradient_flow(product, PARAMS, argnums=where),
        "ArgumentTypeError: argnums='head/**' | wrt='head/**'",
    ),
    'no argument': (
        lambda: sg.live(product, PARAMS, argnums=None),
        'ArgumentTypeError: argnums=None',
    ),
    'outputs without others': (
        lambda: sg.gradient_flow(product, PARAMS, has_aux=True),
        'TypeError: tree_errors.py:LINE',
    ),
    'a keyword of other libraries': (
        lambda: sg.grad(product, of=nn.Dense(1)),
        'ArgumentTypeError: of= | bare, variables = bound.unbind()',
    ),
    'a keyword of jax.grad': (
        lambda: sg.value_and_grad(product, allow_int=True),
        'ArgumentTypeError: allow_int=',
    ),
    'a filter in the place of argnums': (
        lambda: sg.grad(product, HEADS)(PARAMS),
        "ArgumentTypeError: sg.grad(fun, wrt='head/**')",
    ),
    'nothing to differentiate': (
        lambda: sg.grad(product, wrt=False),
        "UnusedFilterError: 'head/**'",
    ),
    'one filter for what is trained and what is frozen': (
        lambda: gradients(sg.grad(product, wrt='head/w')(PARAMS)),
        "StructureError: 'body/w' | sg.freeze(tx, where)",
        'sg.grad(loss, wrt=~sg.where(where))',
    ),
    'a mask of neither side': (
        lambda: sg.mask(PARAMS),
        "ArgumentValueError: sg.mask(params, trained='head/**') | "
        "sg.mask(params, frozen='backbone/**')",
    ),
    'a mask without a side': (
        lambda: sg.mask(PARAMS, 'head/**'),
        "ArgumentValueError: sg.mask(params, trained='head/**') | "
        "sg.mask(params, frozen='backbone/**')",
    ),
    'a filter in place of a block': (
        lambda: sg.stop_gradient(HEADS),
        "ArgumentTypeError: 'head/**' | nn.stop_gradient(where) | "
        'sg.stop_gradient(tree, where)',
        lambda: nn.stop_gradient(HEADS),
    ),
    'a module in place of a tree': (
        lambda: sg.stop_gradient(fnn.Dense(2), True),
        'ArgumentTypeError: a Dense is a module of linen | nn.Frozen(module, where) | '
        'sg.stop_gradient(tree, where)',
    ),
    'a module in place of a tree to take apart': (
        lambda: sg.partition(fnn.Dense(2), True),
        'ArgumentTypeError: a Dense | sg.partition(tree, where)',
    ),
    'parameters in place of a function': (
        lambda: sg.grad(PARAMS),
        "ArgumentTypeError: sg.grad(loss, wrt='head/**')",
    ),
    'no rewrite': (
        lambda: sg.rewrite(PARAMS, HEADS),
        "ArgumentTypeError: 'head/**' | "
        "sg.rewrite(tree, nn.scale_gradient('encoder/**', 0.5))",
    ),
    'values that are none': (
        lambda: sg.substitute(PARAMS, None),
        'UnusedFilterError: sg.substitute',
    ),
    'parameters in place of a transformation': (
        lambda: sg.adopt(PARAMS, adam, adam.init(PARAMS)),
        'ArgumentTypeError: sg.adopt(tx, params, state, old=old_tx)',
    ),
    'a state in place of its transformation': (
        lambda: sg.adopt(adam, VECTORS, adam.init(VECTORS), old=adam.init(VECTORS)),
        'ArgumentTypeError: is no transformation, nor one for each state | '
        'sg.adopt(tx, params, state, old=old_tx)',
        lambda: sg.adopt(adam, VECTORS, adam.init(VECTORS), old=[adam]),
    ),
    'two transformations for one state': (
        lambda: sg.adopt(adam, VECTORS, adam.init(VECTORS), old=[adam, adam]),
        'ArgumentTypeError: is no transformation, nor one for each state',
    ),
    'rows of a state that nobody names': (
        lambda: sg.adopt(
            sg.freeze(adam, sg.at('b', 1)),
            VECTORS,
            sg.freeze(adam, sg.at('b', 0)).init(VECTORS),
        ),
        "StructureError: 'b' | sg.adopt(tx, params, state, old=old_tx)",
    ),
    'a line search over all parameters': (
        lambda: frozen.update(VECTORS, frozen.init(VECTORS), VECTORS, value_fn=dot),
        'ArgumentTypeError: sg.combine(part, rest)',
        'sg.partition(params, ~sg.where(where))',
    ),
    'a line search that is given values': (
        lambda: frozen.update(
            VECTORS, frozen.init(VECTORS), VECTORS, value=1.0, grad=1.0, value_fn=dot
        ),
        'ArgumentTypeError: '
        'tx.update(grads, state, part, value=value, grad=grad, value_fn=of_part)',
    ),
    'a gradient of what is no parameter': (
        lambda: gradients({**PARAMS, 'tail': {'w': 1.0}}),
        "StructureError: 'tail/w' | 'head/w'",
    ),
    'a gradient that is a tree': (
        lambda: frozen.update({'a': 1.0, 'b': {}}, frozen.init(VECTORS), VECTORS),
        "StructureError: 'b'",
    ),
    'one row of a state for several': (
        lambda: rows(sg.at('b', np.s_[:2])).update(
            THREE, rows(sg.at('b', np.s_[:1])).init({**THREE, 'b': jnp.ones(2)}), THREE
        ),
        "StructureError: 'b' | sg.adopt(tx, params, state, old=old_tx)",
    ),
    'rows within rows': (
        lambda: sg.freeze(rows(sg.at('a', 0)), sg.at('b', np.s_[:1])).init(VECTORS),
        "PartError: 'a' | sg.freeze(tx, [sg.at(where, np.s_[:2]), "
        'sg.at(where, np.s_[4:])])',
    ),
    'a gradient of another shape': (
        lambda: in_part(jnp.ones((3, 2))),
        "StructureError: 'w'",
    ),
    'a filter in place of inputs': (
        lambda: sg.paths(PARAMS, 'head/**'),
        "ArgumentTypeError: 'head/**' | sg.paths(tree, where='head/**')",
    ),
    'parts without a star': (
        lambda: sg.combine(sg.partition(PARAMS, 'head/w')),
        'ArgumentTypeError: sg.combine(*parts)',
    ),
    'a label that is a list': (
        lambda: sg.labels(PARAMS, lambda path: LIST),
        "FilterTypeError: 'body/w' | sg.labels",
    ),
    'no label': (
        lambda: sg.labels(PARAMS, {'fast': 'head/w'}),
        "StructureError: 'body/w' | 'frozen'",
    ),
    'a filter in place of a tree': (
        lambda: sg.partition('head/w', PARAMS),
        "ArgumentTypeError: 'head/w' | sg.partition(tree, where)",
    ),
    'an integer in too few bits': (
        lambda: cast(sg.NonDifferentiable(1001)).value,
        'ArgumentValueError: jax.tree.map(cast, tree, is_leaf=',
    ),
    'bools and globs': (
        lambda: sg.partition(PARAMS, [True, 'head/w']),
        "FilterTypeError: tree of bools | sg.where('encoder/**') & (step < k)",
    ),
    'a condition beside a glob': (
        lambda: sg.where('head/w', jnp.array(True)),
        "FilterTypeError: sg.where('encoder/**') & (step < k)",
        lambda: sg.where('head/w') & jnp.array(True),
    ),
    'fields in a list': (
        lambda: sg.trainable(LIST),
        "ArgumentTypeError: sg.trainable('kernel', ...)",
    ),
}

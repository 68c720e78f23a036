"""Trees, optimizers and derivatives that do not fit, and fixes; see test_errors."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import optax

import flax_sg as sg
from flax_sg import linen as nn

PARAMS = {'head': {'w': 1.0}, 'body': {'w': 2.0}}
HEAD = {'head': {'w': 1.0}}


def product(params: Any) -> Any:
    return params['head']['w'] * params['body']['w']


def state_of(frozen: str) -> None:
    """Updates with the state for what one filter leaves."""
    tx = sg.freeze(optax.sgd(0.1, 0.9), 'head/w')
    state = sg.freeze(optax.sgd(0.1, 0.9), frozen).init(PARAMS)
    params = {name: {'w': jnp.ones(1)} for name in PARAMS}
    tx.update(params, state, params)


def gradients(grads: Any) -> None:
    tx = sg.freeze(optax.sgd(0.1), 'head/w')
    tx.update(grads, tx.init(PARAMS), PARAMS)


OTHER_STATE = (
    'the state does not belong to what sg.freeze trains of these parameters.\n'
    'Make it with tx.init(params), or keep what it knows: sg.adopt(tx, params, state).'
)
NOTHING = (
    "Glob('haed/w') matches none of the 2 variables.\n"
    "Nearest: 'head/w', 'body/w'.\n"
    "Did you mean 'head/w'?\n"
    "If nothing has to match, pass unused='ignore'."
)
adam = optax.adam(0.1)
jvp = functools.partial(sg.jvp, product, (PARAMS,))

CASES: dict[str, tuple[Any, ...]] = {
    'a value without a leaf': (
        lambda: sg.substitute(PARAMS, {'head': {'v': 3.0}}),
        "UnusedFilterError: sg.substitute has a value for 'head/v', which is no "
        "variable (nearest: 'head/w').\n"
        'Spell names as the variables, from below the collection. If some may be '
        "missing, pass unused='ignore'.",
    ),
    'a leaf without a value': (
        lambda: sg.substitute(PARAMS, HEAD, where='**'),
        "StructureError: nn.substitute: there is no value for 'body/w' of the "
        "collection 'params' in the tree.\n"
        'Fix: give one, or leave the variable out with substitute(..., where=).',
    ),
    'labels that are none': (
        lambda: sg.partition_n(PARAMS, 'head/**'),
        "FilterTypeError: 'head/**' classifies nothing: expected filters by label, "
        "such as {'gln': 'gln_*/**', ...}, or a function of the path.",
    ),
    'updates for what is no parameter': (
        lambda: sg.apply_updates(PARAMS, {'tail': {'w': 1.0}}),
        'StructureError: the parameters and the updates have different structures.\n'
        "  'tail/w': in the updates, not in the parameters; nearest there: 'head/w'",
    ),
    'pruned updates for a function of optax': (
        lambda: optax.apply_updates(PARAMS, sg.grad(product, wrt='head/w')(PARAMS)),
        "AbsentLeafError: optax.apply_updates adds ABSENT to 'body/w': no gradient was "
        'computed for this parameter.\n'
        'Write sg.apply_updates(params, updates), and sg.freeze(tx, where) for tx.',
    ),
    'a filter of wrt= that matches nothing': (
        lambda: sg.grad(product, wrt='haed/w')(PARAMS),
        f'UnusedFilterError: sg.grad(wrt=...): {NOTHING}',
    ),
    'the state of another selection': (
        lambda: state_of('body/w'),
        'StructureError: ' + OTHER_STATE,
    ),
    'the state of another optimizer': (
        lambda: sg.adopt(adam, PARAMS, optax.sgd(0.1).init(PARAMS)),
        'StructureError: sg.adopt got a state of another transformation, or of other '
        'parameters.\n'
        'Give the state of what sg.freeze wraps: sg.adopt(tx, params, state).',
    ),
    'tangents of another tree': (
        lambda: jvp(({'head': 1.0},)),
        'StructureError: the argument and the tangents have different structures.\n'
        "  'body/w' and 1 more: in the argument, not in the tangents; nearest there: "
        "'head'\n"
        "  'head': in the tangents, not in the argument; nearest there: 'head/w'",
    ),
    'a tangent that is absent': (
        lambda: jvp(({**HEAD, 'body': {'w': sg.ABSENT}},)),
        "StructureError: there is nothing at 'body/w' in the tangents, and it is "
        'differentiated.\n'
        'Give an array there, or leave the path out of wrt=.',
    ),
    'no tangents': (
        lambda: jvp(()),
        'TypeError: the tangents: expected 1, one tree for each argument, got 0',
    ),
    'an argument that there is not': (
        lambda: sg.grad(product, argnums=1)(PARAMS),
        'TypeError: differentiating with respect to argnums=1 requires at least 2 '
        'positional arguments to be passed by the caller, but got only 1 positional '
        'arguments',
    ),
    'an argument of a report that there is not': (
        lambda: sg.gradient_flow(product, PARAMS, argnums=1),
        'TypeError: argnums=1 is out of range: arguments are counted from 0, and 1 '
        'were given.',
    ),
    'outputs without others': (
        lambda: sg.gradient_flow(product, PARAMS, has_aux=True),
        'TypeError: With has_aux=True the function has to return a pair (outputs, '
        'aux), but product at tree_errors.py:LINE returned float32[].',
    ),
    'an argument beside a module': (
        lambda: sg.grad(lambda: 1.0, argnums=1, of=nn.Dense(1)),
        'ArgumentValueError: with of=, argnums=1: expected 0.',
    ),
    'a filter in the place of argnums': (
        lambda: sg.grad(product, 'head/**'),
        "ArgumentTypeError: argnums='head/**' names no positions of arguments.\n"
        "Name leaves with wrt=: sg.grad(fun, wrt='head/**').",
    ),
    'nothing to differentiate': (
        lambda: sg.grad(product, wrt=False),
        'UnusedFilterError: sg.grad(wrt=False) differentiates nothing: wrt= selects '
        'what has a gradient.\n'
        "Name the trained leaves, such as wrt='head/**', or pass unused='ignore'.",
    ),
    'one filter for what is trained and what is frozen': (
        lambda: gradients(sg.grad(product, wrt='head/w')(PARAMS)),
        "StructureError: sg.freeze(tx, Glob('head/w')) freezes 'head/w', which has a "
        "gradient, and trains 'body/w', which has none.\n"
        'wrt= selects what has a gradient, sg.freeze what is frozen: one filter means '
        'opposite things there.\n'
        'Write where = sg.filters.as_filter(...): sg.freeze(tx, ~where) goes with '
        'sg.grad(loss, wrt=where).',
    ),
    'a mask of neither side': (
        lambda: sg.mask(PARAMS),
        'ArgumentValueError: mask() got neither of trained= and frozen=.\n'
        'A mask is True at what you name, and the other way round it freezes what '
        'should be trained.\n'
        "Write sg.mask(params, trained='head/**') or sg.mask(params, "
        "frozen='backbone/**').",
    ),
}

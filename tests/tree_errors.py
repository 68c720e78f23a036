"""Trees, optimizers and derivatives that do not fit, and fixes; see test_errors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn

PARAMS = {'head': {'w': 1.0}, 'body': {'w': 2.0}}
HEAD = {'head': {'w': 1.0}}
BOUND = nn.Dense(1).bind({'params': {'kernel': jnp.ones((1, 1)), 'bias': jnp.ones(1)}})


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


def stepped(tx: Any, grads: Any) -> None:
    state = sg.TrainState.create(apply_fn=product, params=PARAMS, tx=tx)
    state.apply_gradients(grads=grads)


jvp = functools.partial(sg.jvp, product, (PARAMS,))

CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    'no parts': (sg.combine, TypeError, 'combine() takes at least one part'),
    'a value without a leaf': (
        lambda: sg.substitute(PARAMS, {'head': {'v': 3.0}}),
        errors.UnusedFilterError,
        'nn.substitute: 1 value without a variable:\n'
        "  'head/v', nearest 'head/w'\n"
        'Fix: spell them as the variables, or take them out. If they may be '
        "missing, pass unused='ignore'.",
    ),
    'a leaf without a value': (
        lambda: sg.substitute(PARAMS, HEAD, where='**'),
        errors.StructureError,
        "nn.substitute: there is no value for 'body/w' of the collection "
        "'params' in the tree.\n"
        'Fix: give one, or leave the variable out with substitute(..., where=).',
    ),
    'labels that are none': (
        lambda: sg.partition_n(PARAMS, 'head/**'),
        errors.FilterTypeError,
        "'head/**' classifies nothing: expected filters by label, such as "
        "{'gln': 'gln_*/**', ...}, or a function of the path.",
    ),
    'updates for what is no parameter': (
        lambda: sg.apply_updates(PARAMS, {'tail': {'w': 1.0}}),
        errors.StructureError,
        'the parameters and the updates have different structures.\n'
        "  'tail/w': in the updates, not in the parameters; nearest there: "
        "'head/w'",
    ),
    'pruned gradients for an optimizer of all': (
        lambda: stepped(optax.sgd(0.1), HEAD),
        errors.StructureError,
        'the parameters that an optimizer without sg.freeze is for and the '
        'gradient have different structures.\n'
        "  'body/w': in the parameters that an optimizer without sg.freeze is "
        "for, not in the gradient; nearest there: 'head/w'",
    ),
    'the state of another selection': (
        lambda: state_of('body/w'),
        errors.StructureError,
        'the state for what is trained and the state that was given have '
        'different structures.\n'
        "  \"[0].trace['body']['w']\": in the state for what is trained, not "
        'in the state that was given; nearest there: '
        "\"[0].trace['head']['w']\"\n"
        "  \"[0].trace['head']['w']\": in the state that was given, not in "
        'the state for what is trained; nearest there: '
        "\"[0].trace['body']['w']\"",
    ),
    'gradients of other parameters': (
        lambda: gradients({'tail': {'w': 1.0}}),
        errors.StructureError,
        'the parameters and the gradient have different structures.\n'
        "  'tail/w': in the gradient, not in the parameters; nearest there: "
        "'head/w'",
    ),
    'tangents of another tree': (
        lambda: jvp(({'head': 1.0},)),
        errors.StructureError,
        'the argument and the tangents have different structures.\n'
        "  'body/w' and 1 more: in the argument, not in the tangents; nearest "
        "there: 'head'\n"
        "  'head': in the tangents, not in the argument; nearest there: "
        "'head/w'",
    ),
    'a tangent that is absent': (
        lambda: jvp(({**HEAD, 'body': {'w': sg.ABSENT}},)),
        errors.StructureError,
        "there is nothing at 'body/w' in the tangents, and it is "
        'differentiated.\n'
        'Give an array there, or leave the path out of wrt=.',
    ),
    'no tangents': (
        lambda: jvp(()),
        TypeError,
        'the tangents: expected 1, one tree for each argument, got 0',
    ),
    'an argument that there is not': (
        lambda: sg.grad(product, argnums=1)(PARAMS),
        TypeError,
        'differentiating with respect to argnums=1 requires at least 2 '
        'positional arguments to be passed by the caller, but got only 1 '
        'positional arguments',
    ),
    'an argument of a report that there is not': (
        lambda: sg.gradient_flow(product, PARAMS, argnums=1),
        TypeError,
        'argnums=1: arguments are counted from 0, and 1 were given',
    ),
    'outputs without others': (
        lambda: sg.gradient_flow(product, PARAMS, has_aux=True),
        TypeError,
        'with has_aux=True the function has to return a pair (outputs, aux), '
        'got float32[]',
    ),
    'an argument beside a module': (
        lambda: sg.grad(lambda: 1.0, argnums=1, of=nn.Dense(1)),
        errors.ArgumentValueError,
        'with of=, argnums=1 is none of the choices:\n  0: the variables of the module',
    ),
    'an attribute of an absent leaf': (
        lambda: sg.ABSENT.shape,
        errors.AbsentLeafError,
        'there is no leaf here: ABSENT stands for one that is in another part '
        'of the tree, or that was not selected, so that no gradient was '
        'computed.\n'
        "Select it in where= or wrt=, or pass absent='zeros' to the gradient "
        'call.',
    ),
    'what Python asks of an absent leaf': (
        lambda: sg.ABSENT.__wrapped__,
        AttributeError,
        '__wrapped__',
    ),
    'what Python asks of a leaf without gradient': (
        lambda: sg.NonDifferentiable(3).__wrapped__,
        AttributeError,
        '__wrapped__',
    ),
}

FIXES: dict[str, str | Callable[[], Any]] = {
    'no parts': lambda: sg.combine(PARAMS),
    'a value without a leaf': lambda: (
        sg.substitute(PARAMS, {'head': {'w': 3.0}}),
        sg.substitute(PARAMS, {'head': {'v': 3.0}}, unused='ignore'),
    ),
    'a leaf without a value': lambda: sg.substitute(PARAMS, HEAD, where='head/**'),
    'labels that are none': lambda: sg.partition_n(
        PARAMS, {'head': 'head/**', 'body': 'body/**'}
    ),
    'updates for what is no parameter': lambda: sg.apply_updates(PARAMS, HEAD),
    'pruned gradients for an optimizer of all': lambda: stepped(
        sg.freeze(optax.sgd(0.1), 'body/w'), HEAD
    ),
    'the state of another selection': lambda: state_of('head/w'),
    'gradients of other parameters': lambda: gradients({'body': {'w': 1.0}}),
    'tangents of another tree': lambda: jvp((PARAMS,)),
    'a tangent that is absent': lambda: (
        jvp((PARAMS,)),
        sg.jvp(product, (PARAMS,), ({**HEAD, 'body': {'w': sg.ABSENT}},), wrt='head/w'),
    ),
    'no tangents': lambda: jvp((PARAMS,)),
    'an argument that there is not': lambda: sg.grad(product, argnums=0)(PARAMS),
    'an argument of a report that there is not': lambda: sg.gradient_flow(
        product, PARAMS, argnums=0
    ),
    'outputs without others': lambda: sg.gradient_flow(
        lambda params: (product(params), 'aux'), PARAMS, has_aux=True
    ),
    'an argument beside a module': lambda: [
        sg.grad(lambda: jnp.sum(BOUND(jnp.ones(1))), of=BOUND, **options)()
        for options in ({}, {'argnums': 0})
    ],
    'an attribute of an absent leaf': lambda: (
        sg.grad(product, wrt='head/w', absent='zeros')(PARAMS)['body']['w'].shape
    ),
    'what Python asks of an absent leaf': lambda: repr(sg.ABSENT),
    'what Python asks of a leaf without gradient': lambda: (
        sg.NonDifferentiable(3).value
    ),
}

"""Trees, optimizers and derivatives that do not fit, and fixes; see test_errors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flax_sg as sg
from flax_sg import linen as nn

PARAMS: Any = {'head': {'w': 1.0}, 'body': {'w': 2.0}}
HEAD = {'head': {'w': 1.0}}
# In a wrong place.
HEADS: Any = 'head/**'
NONE: Any = None
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


def gradients(grads: Any) -> None:
    tx = sg.freeze(optax.sgd(0.1), 'head/w')
    tx.update(grads, tx.init(PARAMS), PARAMS)


def lookahead() -> None:
    tx = sg.freeze(optax.lookahead(optax.sgd(0.1), 2, 0.5), 'head/**')
    tx.init(optax.LookaheadParams.init_synced(PARAMS))


def in_part(gradient: Any) -> None:
    tx = sg.freeze(optax.sgd(0.1), sg.at('w', 0))
    params = {'w': jnp.ones((2, 3))}
    tx.update({'w': gradient}, tx.init(params), params)


def rows(where: Any) -> Any:
    return sg.freeze(optax.sgd(0.1, 0.9), ~where)


def cast(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)


def vector(params: Any) -> Any:
    return jnp.stack([product(params), 1.0])


def three(params: Any) -> Any:
    return (product(params),) * 3


def reads_all() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return {name: 2.0 * update for name, update in updates.items()}, state

    tx = sg.freeze(optax.GradientTransformation(lambda p: (), update), 'a')
    tx.update(VECTORS, tx.init(VECTORS), VECTORS)


def eval_params() -> None:
    tx = sg.freeze(optax.contrib.schedule_free_sgd(0.1), 'a')
    optax.contrib.schedule_free_eval_params(tx.init(VECTORS), VECTORS)


def dot(params: Any) -> Any:
    return jnp.sum(params['a'] * params['b'])


def run_of(tx: Any, absent: str, state: Any) -> None:
    grads = sg.grad(dot, wrt='b', absent=absent)(VECTORS)
    tx.update(grads, state, VECTORS)


OTHER_STATE = (
    'the state does not belong to what sg.freeze trains: {!r}.\n'
    'Make it with tx.init(params), or keep what it knows: sg.adopt(tx, params, state, '
    'old=old_tx).'
)
OTHER = (
    'It is the state of another transformation, or of other parameters: give that of '
    'what sg.freeze wraps, sg.adopt(tx, params, state).'
)
ABSENT = (
    'this leaf is frozen, was not selected, or is in another part of the tree.\n'
    "For zeros, pass absent='zeros' to the gradient call; to join parts of a tree, "
    'write sg.combine.\n'
    'An optimizer passes over it inside of sg.freeze(tx, where), which goes outermost.'
)
NOTHING = (
    "Glob('haed/w') matches none of the 2 variables.\n"
    "Nearest: 'head/w', 'body/w'.\n"
    "Did you mean 'head/w'?\n"
    "If nothing has to match, pass unused='ignore'."
)
adam = optax.adam(0.1)
frozen = sg.freeze(adam, 'a')

CASES: dict[str, tuple[Any, ...]] = {
    'a value without a leaf': (
        lambda: sg.substitute(PARAMS, {'head': {'v': 3.0}}),
        "UnusedFilterError: A tree of values has a value for 'head/v', which is no "
        "variable (nearest: 'head/w').\n"
        'Spell names as the variables, from below the collection. If some may be '
        "missing, pass unused='ignore'.",
    ),
    'a leaf without a value': (
        lambda: sg.substitute(PARAMS, HEAD, where='**'),
        "StructureError: There is no value for 'body/w' of the collection 'params' in "
        'the tree.\n'
        'Give one, or leave the variable out: by where= of substitute, by sg.ABSENT in '
        'its place for nn.mirror.',
    ),
    'a flat tree of values': (
        lambda: sg.substitute(PARAMS, {'head/w': 3.0}),
        "UnusedFilterError: A tree of values is flat: it has 'head/w' for nested "
        'names.\n'
        "Nest it: flax.traverse_util.unflatten_dict(tree, sep='/').",
    ),
    'a collection in a glob': (
        lambda: sg.partition({'params': PARAMS, 'ema': PARAMS}, 'ema/**'),
        "UnusedFilterError: Glob('ema/**') matches none of the 4 variables.\n"
        "Nearest: 'body/w', 'head/w'.\n"
        "Paths begin below the collection: filters.Collection('ema').\n"
        "If nothing has to match, pass unused='ignore'.",
    ),
    'a collection in place of parameters': (
        lambda: sg.substitute({'params': PARAMS}, PARAMS),
        "UnusedFilterError: A tree of values has a value for 'body/w' and 1 more, "
        "which is no variable (nearest: 'params/body/w').\n"
        'Spell names as the variables, from below the collection. If some may be '
        "missing, pass unused='ignore'.",
    ),
    'labels that are none': (
        lambda: sg.partition_n(PARAMS, HEADS),
        "FilterTypeError: 'head/**' (str) classifies nothing: expected filters by "
        "label, such as {'gln': 'gln_*/**', ...}, or a function of the path.",
    ),
    'pruned updates for a function of optax': (
        lambda: optax.apply_updates(PARAMS, sg.grad(product, wrt='head/w')(PARAMS)),
        f'AbsentLeafError: ABSENT is no array: {ABSENT}',
    ),
    'a filter of wrt= that matches nothing': (
        lambda: sg.grad(product, wrt='haed/w')(PARAMS),
        f'UnusedFilterError: wrt=...: {NOTHING}',
    ),
    'the state of another selection': (
        lambda: state_of('body/w'),
        'StructureError: ' + OTHER_STATE.format('body/w'),
    ),
    'the state of another optimizer': (
        lambda: sg.adopt(adam, PARAMS, optax.sgd(0.1, 0.9).init(PARAMS)),
        "StructureError: sg.adopt: the state has '0/trace/*', where the new state has "
        "'0/count'.\n"
        f'{OTHER}',
    ),
    'an argument that there is not': (
        lambda: sg.grad(product, argnums=1)(PARAMS),
        'ArgumentTypeError: argnums=1: expected different positions of 1 arguments.\n'
        'To name leaves by path, write wrt=: sg.grad(fun, wrt=1).',
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
        lambda: sg.grad(product, HEADS)(PARAMS),
        "ArgumentTypeError: argnums='head/**': expected different positions of 1 "
        'arguments.\n'
        "To name leaves by path, write wrt=: sg.grad(fun, wrt='head/**').",
    ),
    'nothing to differentiate': (
        lambda: sg.grad(product, wrt=False),
        'UnusedFilterError: wrt=False differentiates nothing: wrt= selects '
        'what has a gradient.\n'
        "Name the trained leaves, such as wrt='head/**', or pass unused='ignore'.",
    ),
    'one filter for what is trained and what is frozen': (
        lambda: gradients(sg.grad(product, wrt='head/w')(PARAMS)),
        "StructureError: there is nothing at 'body/w' in the gradient, and it is not "
        'frozen.\n'
        'wrt= selects what has a gradient, sg.freeze what is frozen.\n'
        'Write sg.grad(loss, wrt=~where) beside sg.freeze(tx, where).',
    ),
    'a mask of neither side': (
        lambda: sg.mask(PARAMS),
        'ArgumentValueError: mask() got neither of trained= and frozen=.\n'
        'A mask is True at what you name, and the other way round it freezes what '
        'should be trained.\n'
        "Write sg.mask(params, trained='head/**') or sg.mask(params, "
        "frozen='backbone/**').",
    ),
    'parameters in place of a function': (
        lambda: sg.grad(PARAMS),
        'ArgumentTypeError: a dict is no function to differentiate.\n'
        "Write sg.grad(loss, wrt='head/**')(params).",
    ),
    'an argument twice': (
        lambda: sg.grad(jnp.multiply, (0, -2))(2.0, 3.0),
        'ArgumentTypeError: argnums=(0, -2): expected different positions of 2 '
        'arguments.\n'
        'To name leaves by path, write wrt=: sg.grad(fun, wrt=(0, -2)).',
    ),
    'no rewrite': (
        lambda: sg.rewrite(PARAMS, HEADS),
        "ArgumentTypeError: 'head/**' (str) is no rule with a filter.\n"
        "Write sg.rewrite(tree, nn.scale_gradient('encoder/**', 0.5)).",
    ),
    'values that are none': (
        lambda: sg.substitute(PARAMS, None),
        'UnusedFilterError: sg.substitute got None without a value.\n'
        "If there may be none, pass {} and unused='ignore'.",
    ),
    'parameters in place of a transformation': (
        lambda: sg.adopt(PARAMS, adam, adam.init(PARAMS)),
        'ArgumentTypeError: a dict is no optax transformation.\n'
        'Write sg.adopt(tx, params, state, old=old_tx).',
    ),
    'no state': (
        lambda: sg.adopt(adam, PARAMS, None),
        'StructureError: sg.adopt: the state has nothing, where the new state has '
        "'0/count'.\n"
        f'{OTHER}',
    ),
    'rows of a state that nobody names': (
        lambda: sg.adopt(
            sg.freeze(adam, sg.at('b', 1)),
            VECTORS,
            sg.freeze(adam, sg.at('b', 0)).init(VECTORS),
        ),
        "StructureError: sg.adopt: rows of 'b' are frozen, in the old state or in the "
        'new one.\n'
        'A state does not tell which rows it is of.\n'
        'Give the transformation that made it: sg.adopt(tx, params, state, '
        'old=old_tx).',
    ),
    'a line search over all parameters': (
        lambda: frozen.update(VECTORS, frozen.init(VECTORS), VECTORS, value_fn=dot),
        'ArgumentTypeError: tx.update got value_fn=, a function of all parameters, and '
        'sg.freeze shows its optimizer the trained ones only.\n'
        'Give optax the trained part, and the optimizer without sg.freeze:\n'
        'part, rest = sg.partition(params, ~where)\n'
        'of_part = lambda part: loss(sg.combine(part, rest))\n'
        'updates, state = tx.update(grads, state, part, value_fn=of_part)\n'
        'params = sg.combine(optax.apply_updates(part, updates), rest)',
    ),
    'a gradient of what is no parameter': (
        lambda: gradients({**PARAMS, 'tail': {'w': 1.0}}),
        'StructureError: the parameters and the gradient have different structures.\n'
        "  'tail/w': in the gradient, not in the parameters; nearest there: 'head/w'",
    ),
    'a gradient that is a tree': (
        lambda: frozen.update({'a': 1.0, 'b': {}}, frozen.init(VECTORS), VECTORS),
        "StructureError: the gradient has a dict at 'b', where an array is expected.",
    ),
    'one row of a state for several': (
        lambda: rows(sg.at('b', np.s_[:2])).update(
            THREE, rows(sg.at('b', np.s_[:1])).init({**THREE, 'b': jnp.ones(2)}), THREE
        ),
        'StructureError: ' + OTHER_STATE.format('b'),
    ),
    'a gradient of another shape': (
        lambda: in_part(jnp.ones((3, 2))),
        "StructureError: the gradient at 'w' has another shape than the parameter.\n"
        'Expected: float32[2, 3]\n'
        'Found:    float32[3, 2]',
    ),
    'a filter in place of inputs': (
        lambda: sg.paths(PARAMS, 'head/**'),
        "ArgumentTypeError: 'head/**' (str) is no input: a tree has none.\n"
        "Write sg.paths(tree, where='encoder/**').",
    ),
    'parts without a star': (
        lambda: sg.combine(sg.partition(PARAMS, 'head/w')),
        'ArgumentTypeError: combine() got a tuple of 2 parts as one tree.\n'
        'Give it each part: sg.combine(*parts).',
    ),
    'a label that is a list': (
        lambda: sg.labels(PARAMS, lambda path: LIST),
        'FilterTypeError: sg.labels: The function of labels returned a list for '
        "'body/w'.\n"
        'Return one label, such as a str, or None if it knows none.',
    ),
    'no label': (
        lambda: sg.labels(PARAMS, {'fast': 'head/w'}),
        "StructureError: The leaf at 'body/w' has no label.\n"
        "Give it one: add a filter that takes it, or pass rest='frozen'.",
    ),
    'a filter in place of a tree': (
        lambda: sg.partition('head/w', PARAMS),
        "ArgumentTypeError: 'head/w' (str) is no tree: the tree comes first, then the "
        'filter.\n'
        'Write sg.partition(tree, where).',
    ),
    'an integer in too few bits': (
        lambda: cast(sg.NonDifferentiable(1001)).value,
        'ArgumentValueError: A NonDifferentiable of int32 was cast to bfloat16, which '
        'cannot hold it: it is stored as float32.\n'
        'Cast the other leaves alone: jax.tree.map(cast, tree, is_leaf=lambda x: '
        'isinstance(x, sg.NonDifferentiable)), where cast returns these as they are.',
    ),
    'bools and globs': (
        lambda: sg.partition(PARAMS, [True, 'head/w']),
        'FilterTypeError: a list holds bools beside other filters.\n'
        'A sequence of bools alone is a tree of bools, in the shape of the variables; '
        'one of filters means any of them.\n'
        "Write one of the two: [True, False] or ['encoder/**', 'head/bias'].",
    ),
    'no filter from a configuration': (
        lambda: sg.freeze(adam, NONE),
        'FilterTypeError: None is no filter. Was a key of a configuration '
        'misspelled?\n'
        'A filter is a glob, a compiled regular expression, a function of the path, a '
        'bool, a tree of bools, or a list of these.\n'
        'To lift a class, write nn.stop_gradient(nn.Dense, where); for a module, '
        'nn.Frozen(module, where); for a model of NNX (from flax_sg import nnx), '
        'nnx.stop_gradient(model, where); for an array, jax.lax.stop_gradient(x).',
    ),
    'fields in a list': (
        lambda: sg.trainable(LIST),
        'ArgumentTypeError: trainable() got a list, and takes names of fields.\n'
        "Write @sg.trainable('kernel', ...) above a pytree class.",
    ),
    'an empty list to differentiate': (
        lambda: sg.grad(product, wrt=[]),
        'UnusedFilterError: wrt=[] differentiates nothing: wrt= selects what '
        'has a gradient.\n'
        "Name the trained leaves, such as wrt='head/**', or pass unused='ignore'.",
    ),
    'a frozen state for a function of optax': (
        eval_params,
        f'AbsentLeafError: ABSENT is no array: {ABSENT}',
    ),
}

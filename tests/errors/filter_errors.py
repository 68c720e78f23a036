"""Filters that mean nothing, or not what they say, and their fixes; see test_errors."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing
from flax_sg.filters import as_filter, of_type

PARAMS = {'head': {'w': 1.0}, 'body': {'w': 2.0}}
VARIABLES = {'params': PARAMS}
a, b = as_filter('head/*'), as_filter('body/*')


def split(where: Any, **options: Any) -> Any:
    """The head alone, by a filter that means it; raises if that is not so."""
    part, _ = sg.partition(PARAMS, where, **options)
    assert jax.tree.leaves(part) == [1.0]


def rows(index: Any) -> Any:
    """The gradient of an array of which a part is selected."""
    return sg.grad(lambda p: jnp.sum(p['w']), wrt=sg.at('w', index))({'w': jnp.ones(2)})


def elements(mask: Any) -> Any:
    return sg.partition({'w': jnp.ones(2)}, mask)[0]


def elements_stopped(mask: Any) -> Any:
    return sg.stop_gradient({'w': jnp.ones(2)}, mask)


async def later(path: Any) -> bool:
    return path.startswith('head')


def of_two(path: str, leaf: object) -> bool:
    return path.startswith('head')


def assigned() -> None:
    head = as_filter(lambda path: path.startswith('head'))
    head.fn = later  # pyright: ignore[reportAttributeAccessIssue]


def decided(flag: Any) -> Any:
    return sg.partition(PARAMS, lambda path: flag and path.startswith('head'))[0]


def found(flag: Any) -> Any:
    flags = {'head': flag}
    return sg.partition(PARAMS, lambda path: bool(flags.get(path.parts[0])))[0]


class Model(fnn.Module):
    """Reads its parameters at once."""

    @fnn.compact
    def __call__(self) -> Any:
        return sum(map(jnp.sum, jax.tree.leaves(self.variables['params'])))


actor, tree = fnn.Sequential([fnn.Dense(2)]), {'layers_0': True}


def of_two_models(block: Any) -> None:
    x, key = jnp.ones((2, 2)), jax.random.key(0)

    class Critic(fnn.Module):
        @fnn.compact
        def __call__(self, x: Any) -> Any:
            return fnn.Dense(1, name='q')(x)

    pi, q = actor.init(key, x), Critic().init(key, x)
    with block:
        Critic().apply(q, actor.apply(pi, x))


def of_dense(*model: Any) -> Any:
    return of_type(fnn.Dense, *(model or OF))


def loss(params: Any) -> Any:
    return {'loss': params['head']['w'] * params['body']['w']}


def of_integers(where: Any) -> None:
    flow = sg.gradient_flow(loss, PARAMS)
    shapes = (jax.ShapeDtypeStruct((), jnp.int32), *flow.shapes[1:])
    testing.assert_flows(dataclasses.replace(flow, shapes=shapes), where)


CASES: dict[str, Any] = {
    'a predicate of arrays': (
        lambda: split(lambda w: w.ndim < 2),
        lambda: sg.partition(PARAMS, sg.arrays(lambda a: a.ndim < 2)),
    ),
    'a class, and no model': (lambda: split(of_type(fnn.Dense)), of_dense),
    'an object in place of a class': (lambda: of_type(fnn.Dense(2), *OF), of_dense),
    'variables in place of a model': (lambda: of_dense(VARIABLES), of_dense),
    'variables in place of inputs': (
        lambda: of_dense(OF[0], VARIABLES, OF[1]),
        of_dense,
    ),
    'a part that is asked for its truth': (
        lambda: bool(sg.at('w', 0)(sg.Path('w'))),
        lambda: sg.at('w', 0)(sg.Path('w')) is not False,
    ),
    'a Variable in place of a filter': lambda: as_filter(nnx.Param(jnp.ones(2))),
    'a name in braces': (
        lambda: split('{head,bdy}/w'),
        lambda: sg.partition(PARAMS, '{head,body}/w'),
    ),
    'a condition of what may be written': (
        lambda: jax.jit(lambda flag: nn.read_only(as_filter('w') & flag))(True),
        lambda: nn.read_only(as_filter('w') & bool(jnp.array(True))),
    ),
    'an empty glob': lambda: as_filter(''),
    'braces in braces': (
        lambda: as_filter('{encoder/{a,b},decoder}/**'),
        "['encoder/{a,b}', 'decoder']",
    ),
    'a class of characters for numbers': (
        lambda: as_filter('head_[0-11]/**'),
        lambda: as_filter('head_{0..11}/**'),
    ),
    'parts that exclude each other': lambda: split(a & b),
    'an index that is no integer': (
        lambda: sg.at('w', 0.5),
        "sg.at('embed/embedding', np.s_[:100])",
    ),
    'an index that is traced': (
        lambda: jax.jit(rows)(1),
        lambda: jax.jit(elements_stopped)({'w': jnp.array([True, False])}),
    ),
    'an index that is off': lambda: rows(np.s_[5]),
    'no filter': lambda: as_filter(iter(['head/w'])),
    'a Module class': (
        lambda: as_filter(fnn.Dense),
        'nn.stop_gradient(nn.Dense, where)',
    ),
    'a module': (lambda: as_filter(Model()), 'nn.Frozen(module, where)'),
    'an array': (lambda: as_filter(jnp.ones(2)), 'jax.lax.stop_gradient(x)'),
    'a pattern on bytes': lambda: split(re.compile(b'head/.*')),
    'a function of two': lambda: split(of_two),
    'a filter that is assigned to': assigned,
    'a match in place of a bool': lambda: split(lambda path: re.match('head', path)),
    'a predicate that reads a tracer': (
        lambda: jax.jit(decided)(True),
        lambda: jax.jit(decided, static_argnames='flag')(flag=True),
    ),
    'a predicate that finds a tracer': lambda: jax.jit(found)(True),
    'what is trained, to be frozen': (
        lambda: sg.freeze(tx, live),
        'sg.freeze(tx, ~live)',
    ),
    'a function of the tree, as optax has masks': (
        lambda: split(lambda tree: sg.mask(tree, frozen='head/*')),
        lambda: split(sg.mask(PARAMS, frozen='head/*')),
    ),
    'the complement of what is declared': (
        lambda: ~sg.DECLARED,
        'sg.freeze(tx, sg.DECLARED)',
    ),
    'the truth of a filter': lambda: a and b,
    'a tree without an answer': lambda: split({'head': True}),
    'a tree with collections': lambda: split({'params': {'head': True, 'body': False}}),
    'a typo in a tree': lambda: jax.jit(
        lambda flag: sg.stop_gradient(
            PARAMS, {'head': flag, 'body': False, 'bdoy': flag}
        )
    )(True),
    'a tree of another model': (
        lambda: of_two_models(nn.stop_gradient(tree)),
        'nn.Frozen(actor, tree)',
    ),
    'a tree of numbers': lambda: split({'head': 1, 'body': False}),
    'a mask of another shape': lambda: elements({'w': np.array([True, False, True])}),
    'a mask without values': (
        lambda: jax.jit(elements)({'w': np.array([True, False])}),
        lambda: elements({'w': np.asarray(jnp.array([True, False]))}),
    ),
    'a condition without a value': (
        lambda: jax.jit(lambda flag: split(a & flag))(True),
        lambda: split(a & bool(jnp.array(True))),
    ),
    'no answer for an array': (
        lambda: split(sg.arrays(lambda a: a.ndim)),
        lambda: sg.partition(PARAMS, sg.arrays(lambda a: a.ndim == 0)),
    ),
    'integers that are trained': lambda: of_integers('body/*'),
    'an unknown output': lambda: testing.assert_flows(
        loss, 'head/*', PARAMS, output='los'
    ),
}

x, module, value, where = jnp.ones((2, 2)), fnn.Dense(2), jnp.ones(2), '**'

OF = fnn.Dense(2), jnp.ones((2, 2))
tx, live = optax.sgd(0.1), sg.live(lambda params: params['head']['w'], PARAMS)

"""Filters that mean nothing, or not what they say, and their fixes; see test_errors."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np

import flax_sg as sg
from flax_sg import linen as nn
from flax_sg import testing
from flax_sg.filters import as_filter, of_type

PARAMS = {'head': {'w': 1.0}, 'body': {'w': 2.0}}
TREE = {'head': True, 'body': False}
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


def returned(flag: Any) -> Any:
    flags = {'head': flag, 'body': False}
    return sg.partition(PARAMS, lambda path: flags[path.parts[0]])[0]


class Model(fnn.Module):
    """Reads its parameters at once."""

    @fnn.compact
    def __call__(self) -> Any:
        return sum(map(jnp.sum, jax.tree.leaves(self.variables['params'])))


def in_block(where: Any) -> None:
    with nn.stop_gradient(where):
        Model().apply({'params': PARAMS})


def loss(params: Any) -> Any:
    return {'loss': params['head']['w'] * params['body']['w']}


def of_integers(where: Any) -> None:
    flow = sg.gradient_flow(loss, PARAMS)
    shapes = (jax.ShapeDtypeStruct((), jnp.int32), *flow.shapes[1:])
    testing.assert_flows(dataclasses.replace(flow, shapes=shapes), where)


BOOL = (
    "Return True or False for every path, as lambda path: path.startswith('encoder') "
    'does. Pass values that it depends on by static_argnames of jax.jit.'
)


def no_filter(what: str) -> str:
    return (
        f'FilterTypeError: {what} is no filter.\n'
        'A filter is a glob, a compiled regular expression, a function of the path, a '
        'bool, a tree of bools, or a list of these.\n'
        'To lift a class, write nn.stop_gradient(nn.Dense, where); for a module, '
        'nn.Frozen(module, where); for a model of NNX (from flax_sg import nnx), '
        'nnx.stop_gradient(model, where); for an array, jax.lax.stop_gradient(x).'
    )


def predicate(name: str, problem: str, fix: str) -> str:
    where = f'{name} at filter_errors.py:LINE'
    return f'FilterTypeError: Predicate({where}) {problem}.\n{fix}'


def unused(glob: str, advice: str) -> str:
    said = f'{glob} matches none of the 2 variables.\n{advice}'
    return f"UnusedFilterError: {said}\nIf nothing has to match, pass unused='ignore'."


CASES: dict[str, tuple[Any, ...]] = {
    'a class, and no model': (
        lambda: split(of_type(fnn.Dense)),
        'FilterTypeError: of_type(Dense) was given no model: a variable does not know '
        'the class of its module.\n'
        'Give the model and example inputs: filters.of_type(Dense, model, x).',
        lambda: of_type(fnn.Dense, *OF),
    ),
    'an empty glob': (
        lambda: as_filter(''),
        "ArgumentValueError: No path fits the glob '': names are not empty, and '**' "
        'stands alone between slashes.\n'
        "Write 'gln/**' for everything in gln, '**/*kernel' for names that end in "
        "kernel, '**' for every variable, and a list for several globs.",
    ),
    'parts that exclude each other': (
        lambda: split(a & b),
        unused(
            "Glob('head/*') & Glob('body/*')",
            'Each part matches something, but no variable is in all of them.',
        ),
    ),
    'an index that is no integer': (
        lambda: sg.at('w', 0.5),
        'PartError: 0.5 (float) is no index: give ints, slices, ..., arrays of ints '
        'or bools, or a tuple of these.\n'
        "Write it as numpy does: sg.at('embed/embedding', np.s_[:100]).",
        "sg.at('embed/embedding', np.s_[:100])",
    ),
    'an index that is off': (
        lambda: rows(np.s_[5]),
        "PartError: Index(np.s_[5]) does not fit 'w', an array of shape (2,): index 5 "
        'is out of bounds for axis 0 with size 2.\n'
        'Name elements that the array has, or other variables in sg.at.',
    ),
    'no filter': (
        lambda: as_filter(iter(['head/w'])),
        no_filter('a list_iterator'),
    ),
    'a Module class': (
        lambda: as_filter(fnn.Dense),
        no_filter('the class Dense'),
        'nn.stop_gradient(nn.Dense, where)',
    ),
    'a module': (
        lambda: as_filter(Model()),
        no_filter('a Model'),
        'nn.Frozen(module, where)',
    ),
    'an array': (
        lambda: as_filter(jnp.ones(2)),
        no_filter('an array (float32[2])'),
        'jax.lax.stop_gradient(x)',
    ),
    'a pattern on bytes': (
        lambda: split(re.compile(b'head/.*')),
        "FilterTypeError: re.compile(b'head/.*') is a pattern on bytes, and paths are "
        'str.\n'
        "Write re.compile('head/.*').",
    ),
    'a function of two': (
        lambda: split(of_two),
        predicate(
            'of_two',
            "cannot be called with a path: missing a required argument: 'leaf'",
            'To lift a function of a module, write nn.stop_gradient(fn, where), or '
            '@nn.stop_gradient(where) above it.',
        ),
    ),
    'a filter that is assigned to': (
        assigned,
        "FrozenInstanceError: cannot assign to field 'fn'",
    ),
    'a match in place of a bool': (
        lambda: split(lambda path: re.match('head', path)),
        predicate('<lambda>', "returned None for the path 'body/w'", BOOL),
    ),
    'a predicate that reads a tracer': (
        lambda: jax.jit(decided)(True),
        predicate('<lambda>', "reads a traced value (bool[]) as 'flag'", BOOL),
        lambda: jax.jit(decided, static_argnames='flag')(flag=True),
    ),
    'a predicate that finds a tracer': (
        lambda: jax.jit(found)(True),
        predicate('<lambda>', 'reads a traced value', BOOL),
    ),
    'the truth of a filter': (
        lambda: a and b,
        "FilterTypeError: Glob('head/*') is neither true nor false: `not`, `and` and "
        '`or` would drop a part of a filter.\n'
        'Write ~a, a & b, a | b.',
    ),
    'a tree without an answer': (
        lambda: split({'head': True}),
        "ArgumentValueError: A tree of bools has no answer for the variable 'body/w' "
        "of the collection 'params'.\n"
        'Give True or False for it. A tree starts below the collection: give '
        'tree[collection].',
    ),
    'a tree of numbers': (
        lambda: split({'head': 1, 'body': False}),
        "FilterTypeError: A tree of bools has 1 (int) at 'head'.\n"
        'Give True or False at every leaf, or an array of bools in its shape, and one '
        "of them for all that is in a box: {'gln': True, 'dec': {'bias': False}}.\n"
        'For a tree of other arrays write sg.stop_gradient(tree, where).',
    ),
    'a mask of another shape': (
        lambda: elements({'w': np.array([True, False, True])}),
        "PartError: Mask(bool[3]) does not fit 'w', an array of shape (2,): the shapes "
        'differ.\n'
        'Give an array of bools in the shape of the variable, or True or False.',
    ),
    'a mask without values': (
        lambda: jax.jit(elements)({'w': np.array([True, False])}),
        "PartError: Which elements of 'w' are meant is known when the program runs: "
        'the mask is traced.\n'
        'Blocks, sg.stop_gradient, wrt= and the update of sg.freeze take such a mask. '
        'Here give its values: numpy.asarray(mask), outside of jax.jit.',
        lambda: elements({'w': np.asarray(jnp.array([True, False]))}),
    ),
    'a tree with too much': (
        lambda: split({**TREE, 'tail': True}),
        "UnusedFilterError: A tree of bools has a value for 'tail', which is no "
        "variable (nearest: 'head/w').\n"
        'Spell names as the variables, from below the collection. If some may be '
        "missing, pass unused='ignore'.",
    ),
    'no answer for an array': (
        lambda: split(sg.arrays(lambda a: a.ndim)),
        'FilterTypeError: arrays(<lambda> at filter_errors.py:LINE) returned 0 (int) '
        "for the path 'body/w'.\n"
        'Return a bool: sg.arrays(lambda a: a.ndim > 1).',
        lambda: sg.partition(PARAMS, sg.arrays(lambda a: a.ndim == 0)),
    ),
    'integers that are trained': (
        lambda: of_integers('body/*'),
        "ArgumentTypeError: Glob('body/*') selects only what cannot be "
        "differentiated: 'body/w' (int32[]).\n"
        'Select real or complex leaves; True takes those and no others.',
    ),
    'an output that there is not': (
        lambda: testing.assert_flows(loss, 'head/*', PARAMS, output='los'),
        "UnknownNameError: The report has no output 'los'. Did you mean 'loss'?",
    ),
}

x, module, value, where = jnp.ones((2, 2)), fnn.Dense(2), jnp.ones(2), '**'

OF = fnn.Dense(2), jnp.ones((2, 2))

"""Filters that mean nothing, or not what they say, and their fixes; see test_errors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np

import flax_sg as sg
from flax_sg import errors, testing
from flax_sg import linen as nn
from flax_sg.filters import Part, as_filter, of_type

PARAMS = {'head': {'w': 1.0}, 'body': {'w': 2.0}}
TREE = {'head': True, 'body': False}
BOXED = {'w': nn.Partitioned({'a': 1.0, 'b': 2.0}, names=(None,))}
a, b = as_filter('head/*'), as_filter('body/*')


def split(where: Any, **options: Any) -> Any:
    """The head alone, by a filter that means it; raises if that is not so."""
    part, _ = sg.partition(PARAMS, where, **options)
    assert jax.tree.leaves(part) == [1.0]


def rows(index: Any) -> Any:
    """The gradient of an array of which a part is selected."""
    return sg.grad(lambda p: jnp.sum(p['w']), wrt=sg.at('w', index))({'w': jnp.ones(2)})


async def later(path: Any) -> bool:
    return path.startswith('head')


def several(path: Any) -> Any:
    yield path.startswith('head')


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


STATIC = (
    'Which variables are meant has to be known while the program is traced.\n'
    'Fix: make the choice static, by static_argnames of jax.jit for example.'
)


def in_remat(where: Any) -> Any:
    model = fnn.remat(fnn.Dense)(2, use_bias=False)
    with nn.scale_gradient(where, 0.5, unused='ignore'):
        return model.apply({'params': {'kernel': jnp.eye(2)}}, jnp.ones((2, 2)))


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    'a bad range': (
        lambda: as_filter('[z-a]*'),
        errors.FilterValueError,
        "The glob '[z-a]*' has a bad [...]: bad character range z-a.",
    ),
    'a class, and no model': (
        lambda: split(of_type(fnn.Dense)),
        errors.FilterTypeError,
        "OfType(Dense) has to know the class of the module that holds 'body/w', "
        'which is not known here.\n'
        'Fix: give the model and example inputs, such as '
        'filters.of_type(nn.BatchNorm, model, x).',
    ),
    'a class, asked for a path': (
        lambda: of_type(fnn.Dense)(sg.Path('head/w')),
        errors.FilterTypeError,
        "OfType(Dense) has to know the class of the module that holds 'head/w', "
        'which is not known here.\n'
        'Fix: give the model and example inputs, such as '
        'filters.of_type(nn.BatchNorm, model, x).',
    ),
    'a class in a block that reads a whole tree': (
        lambda: in_block(~of_type(fnn.Dense)),
        errors.FilterTypeError,
        "~OfType(Dense) has to know the class of the module that holds 'head/w', "
        'which is not known here.\n'
        'Fix: give the model and example inputs, such as '
        'filters.of_type(nn.BatchNorm, model, x).',
    ),
    'a class in the body of a transform': (
        lambda: in_remat(of_type(fnn.Dense)),
        errors.FilterTypeError,
        "OfType(Dense) has to know the class of the module that holds 'kernel', "
        'which is not known here.\n'
        'Fix: give the model and example inputs, such as '
        'filters.of_type(nn.BatchNorm, model, x).',
    ),
    'a class that is none': (
        lambda: of_type(fnn.Dense(1)),
        errors.FilterTypeError,
        'filters.of_type was given a Dense, and expects a Module class.\n'
        'Fix: write filters.of_type(nn.BatchNorm), or a tuple of classes.',
    ),
    'a model that is none': (
        lambda: of_type(fnn.Dense, PARAMS),
        errors.FilterTypeError,
        'filters.of_type was given a dict as the model.\n'
        'Fix: give the module and example inputs, such as '
        'filters.of_type(nn.BatchNorm, model, x).',
    ),
    'an empty glob': (
        lambda: as_filter(''),
        errors.FilterValueError,
        "The glob '' is empty.\nFix: write '**' for every variable.",
    ),
    'a negated glob': (
        lambda: split('!body/**'),
        errors.FilterValueError,
        "The glob '!body/**' begins with '!', which negates nothing here.\n"
        "Fix: write ~as_filter('body/**'), with as_filter from flax_sg.filters.",
    ),
    'a slash at the end': (
        lambda: split('head/'),
        errors.FilterValueError,
        "The glob 'head/' ends in '/', and no path does.\n"
        "Fix: write 'head/**' for everything inside.",
    ),
    'two slashes': (
        lambda: split('head//w'),
        errors.FilterValueError,
        "The glob 'head//w' has '//' in it.\nFix: write 'head/w'.",
    ),
    'glued stars': (
        lambda: split('head**'),
        errors.FilterValueError,
        "The glob 'head**' has '**' glued to other characters.\n"
        "Fix: write '*' within one component and '**' alone between slashes, "
        "such as 'head*/**'.",
    ),
    'half a bracket': (
        lambda: as_filter('x[0/*'),
        errors.FilterValueError,
        "The glob 'x[0/*' has a '[' without its ']'.\n"
        "Fix: write 'x[[]0/*' for a bracket in a name.",
    ),
    'half a bracket of what may be a name': (
        lambda: split('head/w['),
        errors.UnusedFilterError,
        "Glob('head/w[') selected nothing: it matches none of the 2 variables.\n"
        'Nearest paths:\n'
        "  'head/w'\n"
        "  'body/w'\n"
        "Hint: it has a '[' without its ']'.\n"
        "If an empty selection is meant, pass unused='ignore'.",
    ),
    'a bracket in the name of a module': (
        lambda: sg.partition({'x[0]': {'w': 1.0}}, 'x[0]/*'),
        errors.UnusedFilterError,
        "Glob('x[0]/*') selected nothing: it matches none of the 1 variable.\n"
        'Nearest paths:\n'
        "  'x[0]/w'\n"
        "Hint: '[' begins a set of characters. Write 'x[[]0]/*'.\n"
        "If an empty selection is meant, pass unused='ignore'.",
    ),
    'dots between names': (
        lambda: split('head.*'),
        errors.UnusedFilterError,
        "Glob('head.*') selected nothing: it matches none of the 2 variables.\n"
        'Nearest paths:\n'
        "  'head/w'\n"
        "  'body/w'\n"
        "Hint: names are joined by '/'. Write 'head/*'.\n"
        "If an empty selection is meant, pass unused='ignore'.",
    ),
    'braces': (
        lambda: split('{head,neck}/w'),
        errors.UnusedFilterError,
        "Glob('{head,neck}/w') selected nothing: it matches none of the 2 variables.\n"
        'Nearest paths:\n'
        "  'head/w'\n"
        "  'body/w'\n"
        "Hint: braces stand for themselves. Write 'head/w'.\n"
        "If an empty selection is meant, pass unused='ignore'.",
    ),
    'a traced index': (
        lambda: jax.jit(lambda i: sg.at('w', i))(1),
        errors.FilterTypeError,
        'the index of sg.at is a traced value (int32[]), and which elements '
        'are meant has to be known while the program is traced.\n'
        'Fix: give numbers or numpy arrays.',
    ),
    'a slice of no numbers': (
        lambda: sg.at('w', slice('a', None)),
        errors.PartError,
        "'a' is no index: expected ints, slices, ..., arrays of ints or of "
        'bools, or a tuple of these.\n'
        "Write it as numpy does: sg.at('embed/embedding', np.s_[:100]).",
    ),
    'an index that is off': (
        lambda: rows(np.s_[5]),
        errors.PartError,
        "Index(np.s_[5]) does not fit 'w', an array of shape (2,): index 5 is "
        'out of bounds for axis 0 with size 2.\n'
        'Give the elements of that array, or name other variables in sg.at.',
    ),
    'a part that is no index': (
        lambda: Part(as_filter('w')).mask((2,), 'w'),
        TypeError,
        "Glob('w') is no expression of indices",
    ),
    'no filter': (
        lambda: as_filter(0.5),
        errors.FilterTypeError,
        '0.5 (float) is no filter.\n'
        'Accepted:\n'
        "  'gln_*/**'                   a glob on whole path components\n"
        "  re.compile('gln_[0-9]+/.*')  a regular expression for the whole path\n"
        '  lambda path: ...             a function of the path that returns a '
        'bool\n'
        '  True, False                  every variable, none\n'
        "  {'gln': True, 'dec': False}  a tree of bools\n"
        "  ['gln/**', 'dec/**']         any of several; filters also combine "
        'with ~ & |',
    ),
    'an iterator': (
        lambda: split(iter(['head/w'])),
        errors.FilterTypeError,
        'a list_iterator is no filter.\n'
        'Accepted:\n'
        "  'gln_*/**'                   a glob on whole path components\n"
        "  re.compile('gln_[0-9]+/.*')  a regular expression for the whole path\n"
        '  lambda path: ...             a function of the path that returns a '
        'bool\n'
        '  True, False                  every variable, none\n'
        "  {'gln': True, 'dec': False}  a tree of bools\n"
        "  ['gln/**', 'dec/**']         any of several; filters also combine "
        'with ~ & |\n'
        'Fix: an iterator is empty after its first use; give a list.',
    ),
    'None': (
        lambda: as_filter(None),
        errors.FilterTypeError,
        'None is no filter.\n'
        'Accepted:\n'
        "  'gln_*/**'                   a glob on whole path components\n"
        "  re.compile('gln_[0-9]+/.*')  a regular expression for the whole path\n"
        '  lambda path: ...             a function of the path that returns a '
        'bool\n'
        '  True, False                  every variable, none\n'
        "  {'gln': True, 'dec': False}  a tree of bools\n"
        "  ['gln/**', 'dec/**']         any of several; filters also combine "
        'with ~ & |\n'
        'Fix: write False for no variable, True for every one.',
    ),
    'a number': (
        lambda: as_filter(1),
        errors.FilterTypeError,
        '1 (int) is no filter.\n'
        'Accepted:\n'
        "  'gln_*/**'                   a glob on whole path components\n"
        "  re.compile('gln_[0-9]+/.*')  a regular expression for the whole path\n"
        '  lambda path: ...             a function of the path that returns a '
        'bool\n'
        '  True, False                  every variable, none\n'
        "  {'gln': True, 'dec': False}  a tree of bools\n"
        "  ['gln/**', 'dec/**']         any of several; filters also combine "
        'with ~ & |\n'
        'Fix: write True.',
    ),
    'bytes': (
        lambda: split(b'head/**'),
        errors.FilterTypeError,
        "b'head/**' (bytes) is no filter.\n"
        'Accepted:\n'
        "  'gln_*/**'                   a glob on whole path components\n"
        "  re.compile('gln_[0-9]+/.*')  a regular expression for the whole path\n"
        '  lambda path: ...             a function of the path that returns a '
        'bool\n'
        '  True, False                  every variable, none\n'
        "  {'gln': True, 'dec': False}  a tree of bools\n"
        "  ['gln/**', 'dec/**']         any of several; filters also combine "
        'with ~ & |\n'
        "Fix: write 'head/**'.",
    ),
    'a pattern on bytes': (
        lambda: split(re.compile(b'head/.*')),
        errors.FilterTypeError,
        "re.compile(b'head/.*') is a pattern on bytes; paths are str.\n"
        "Fix: write re.compile('head/.*').",
    ),
    'a class': (
        lambda: as_filter(str),
        errors.FilterTypeError,
        'The class str is no filter.\n'
        'Accepted:\n'
        "  'gln_*/**'                   a glob on whole path components\n"
        "  re.compile('gln_[0-9]+/.*')  a regular expression for the whole path\n"
        '  lambda path: ...             a function of the path that returns a '
        'bool\n'
        '  True, False                  every variable, none\n'
        "  {'gln': True, 'dec': False}  a tree of bools\n"
        "  ['gln/**', 'dec/**']         any of several; filters also combine "
        'with ~ & |',
    ),
    'a Module class': (
        lambda: as_filter(fnn.Dense),
        errors.FilterTypeError,
        'The Module class Dense is no filter: a filter says which variables.\n'
        'Fix: to lift the class, write nn.stop_gradient(nn.Dense, where), with '
        "where such as '**'.",
    ),
    'a module': (
        lambda: as_filter(Model()),
        errors.FilterTypeError,
        'The module Model(...) is no filter: a filter says which variables.\n'
        'Fix: open a block around the call:\n'
        '  with nn.stop_gradient(where):\n'
        '    y = module(x)\n'
        'or wrap the module, for all that goes through the wrapper:\n'
        '  nn.Frozen(module, where)',
    ),
    'an array': (
        lambda: as_filter(jnp.ones(2)),
        errors.FilterTypeError,
        'an array (float32[2]) is no filter: a filter says which variables.\n'
        'Fix: to stop the gradient of a value, write jax.lax.stop_gradient(x).',
    ),
    'an async predicate': (
        lambda: split(later),
        errors.FilterTypeError,
        'Predicate(later at filter_errors.py:LINE) is async: it returns no '
        'bool.\n'
        'Expected: True or False for every path, known without running JAX.\n'
        "Fix: write lambda path: path.startswith('gln').",
    ),
    'a generator': (
        lambda: split(several),
        errors.FilterTypeError,
        'Predicate(several at filter_errors.py:LINE) is a generator function: '
        'it returns no bool.\n'
        'Expected: True or False for every path, known without running JAX.\n'
        "Fix: write lambda path: path.startswith('gln').",
    ),
    'a function of two': (
        lambda: split(of_two),
        errors.FilterTypeError,
        'Predicate(of_two at filter_errors.py:LINE) cannot be called with a '
        "path: it is (path: 'str', leaf: 'object') -> 'bool'.\n"
        'Expected: a function of the path alone, such as lambda path: '
        "path.startswith('gln').\n"
        'Fix: to lift a function of a module, write nn.stop_gradient(fn, '
        'where); as a decorator, @nn.stop_gradient(where).',
    ),
    'a filter that is assigned to': (
        assigned,
        dataclasses.FrozenInstanceError,
        "cannot assign to field 'fn'",
    ),
    'a match in place of a bool': (
        lambda: split(lambda path: re.match('head', path)),
        errors.FilterTypeError,
        'Predicate(<lambda> at filter_errors.py:LINE) returned None for the '
        "path 'body/w'.\n"
        'Expected: True or False for every path, known without running JAX.\n'
        'Fix: return a bool on every way through it, as lambda path: '
        "path.startswith('gln').",
    ),
    'nothing in place of a bool': (
        lambda: split(lambda path: None),
        errors.FilterTypeError,
        'Predicate(<lambda> at filter_errors.py:LINE) returned None for the '
        "path 'body/w'.\n"
        'Expected: True or False for every path, known without running JAX.\n'
        'Fix: return a bool on every way through it, as lambda path: '
        "path.startswith('gln').",
    ),
    'the truth of a filter': (
        lambda: a and b,
        errors.FilterTypeError,
        "Glob('head/*') is neither true nor false: `not`, `and` and `or` would "
        'drop a part of a filter.\n'
        'Fix: write ~a, a & b, a | b.',
    ),
    'a tree without an answer': (
        lambda: split({'head': True}),
        errors.FilterValueError,
        "A tree of bools has no answer for the variable 'body/w' of the "
        "collection 'params'.\n"
        "Nearest in the tree: 'head'.\n"
        "Fix: give 'body' the value True or False in the tree.",
    ),
    'a tree with the collection': (
        lambda: in_block({'params': TREE}),
        errors.FilterValueError,
        "A tree of bools has no answer for the variable 'head/w' of the "
        "collection 'params'.\n"
        "Nearest in the tree: 'params/head', 'params/body'.\n"
        "Fix: a tree starts below the collection. Give tree['params'] in place "
        'of tree.',
    ),
    'a tree with a number for a name': (
        lambda: split({0: True}),
        errors.FilterTypeError,
        'A tree of bools has the key 0 (int) at its top.\n'
        'Expected: the names of modules and variables, which are str.',
    ),
    'a tree of numbers': (
        lambda: split({'head': 1, 'body': 0}),
        errors.FilterTypeError,
        "A tree of bools has 1 (int) at 'head'.\n"
        "Expected: True or False at every leaf, such as {'gln': True, 'dec': "
        "{'kernel': False, 'bias': True}}.",
    ),
    'a tree that splits a variable': (
        lambda: sg.partition(BOXED, {'w': {'a': True, 'b': False}}),
        errors.FilterValueError,
        "A tree of bools has both True and False within 'w', "
        'whose leaves share one path.\n'
        'Fix: give it one bool.',
    ),
    'a tree with too much': (
        lambda: split({**TREE, 'tail': True}),
        errors.FilterValueError,
        'A tree of bools has 1 leaf without a variable:\n'
        "  'tail', nearest 'head/w'\n"
        'Fix: take them out of the tree, or spell them as the variables.',
    ),
    'a predicate that reads a tracer': (
        lambda: jax.jit(decided)(True),
        errors.FilterTypeError,
        'Predicate(<lambda> at filter_errors.py:LINE) reads a traced value (bool[]) '
        f"as 'flag'.\n{STATIC}",
    ),
    'a predicate that finds a tracer': (
        lambda: jax.jit(found)(True),
        errors.FilterTypeError,
        f'Predicate(<lambda> at filter_errors.py:LINE) reads a traced value.\n{STATIC}',
    ),
    'a predicate that returns a tracer': (
        lambda: jax.jit(returned)(True),
        errors.FilterTypeError,
        'Predicate(<lambda> at filter_errors.py:LINE) returned a traced value '
        f'(bool[]).\n{STATIC}',
    ),
    'unused= of a tree': (
        lambda: split('head/w', unused='warn'),
        errors.FilterValueError,
        "unused='warn': expected 'raise' or 'ignore'.",
    ),
    'unused in a tree': (
        lambda: split('haed/w'),
        errors.UnusedFilterError,
        "Glob('haed/w') selected nothing: it matches none of the 2 variables.\n"
        'Nearest paths:\n'
        "  'head/w'\n"
        "  'body/w'\n"
        "Did you mean 'head/w'?\n"
        "If an empty selection is meant, pass unused='ignore'.",
    ),
    'parts that exclude each other': (
        lambda: split(a & b),
        errors.UnusedFilterError,
        "Glob('head/*') & Glob('body/*') selected nothing: it matches none of "
        'the 2 variables.\n'
        'Nearest paths:\n'
        "  'head/w'\n"
        "  'body/w'\n"
        'Hint: its parts match something each, and no variable is in all of '
        'them.\n'
        "If an empty selection is meant, pass unused='ignore'.",
    ),
    'parts that exclude each other in a block': (
        lambda: in_block(a & b),
        errors.UnusedFilterError,
        "Glob('head/*') & Glob('body/*') selected nothing: it matches none of "
        'the 2 variables.\n'
        'Nearest paths:\n'
        "  'head/w'\n"
        "  'body/w'\n"
        'Hint: its parts match something each, and no variable is in all of '
        'them.\n'
        "If an empty selection is meant, pass unused='ignore'.",
    ),
    'integers that are trained': (
        lambda: of_integers('body/*'),
        errors.NotDifferentiableError,
        "Glob('body/*') selects only what cannot be differentiated:\n"
        "  'body/w': int32[]\n"
        'Select real or complex leaves; True takes those and no others.',
    ),
    'an output that there is not': (
        lambda: testing.assert_flows(loss, 'head/*', PARAMS, output='los'),
        errors.UnknownNameError,
        "The report has no output 'los'. Did you mean 'loss'?",
    ),
}

x, module, value, where = jnp.ones((2, 2)), fnn.Dense(2), jnp.ones(2), '**'

OF = fnn.Dense(2), jnp.ones((2, 2))
DENSE = {'kernel': 1.0, 'bias': 2.0}

FIXES: dict[str, str | Callable[[], Any]] = {
    'a bad range': lambda: as_filter('[a-z]*'),
    'a class, and no model': lambda: sg.partition(DENSE, of_type(fnn.Dense, *OF)),
    'a class, asked for a path': lambda: of_type(fnn.Dense, *OF)(
        sg.Path.of('params', ('bias',))
    ),
    'a class in a block that reads a whole tree': lambda: of_type(fnn.Dense, *OF),
    'a class in the body of a transform': lambda: in_remat(of_type(fnn.Dense, *OF)),
    'a class that is none': lambda: of_type(fnn.BatchNorm),
    'a model that is none': lambda: of_type(fnn.Dense, *OF),
    'an empty glob': lambda: as_filter('**'),
    'a negated glob': lambda: split(eval("~as_filter('body/**')")),
    'a slash at the end': lambda: split('head/**'),
    'two slashes': lambda: split('head/w'),
    'glued stars': lambda: split('head*/**'),
    'half a bracket': lambda: sg.partition({'x[0': {'w': 1.0}}, 'x[[]0/*'),
    'half a bracket of what may be a name': lambda: split('head/w'),
    'a bracket in the name of a module': lambda: sg.partition(
        {'x[0]': {'w': 1.0}}, 'x[[]0]/*'
    ),
    'dots between names': lambda: split('head/*'),
    'braces': lambda: split('head/w'),
    'a traced index': lambda: rows(np.array([1])),
    'a slice of no numbers': "sg.at('embed/embedding', np.s_[:100])",
    'an index that is off': lambda: rows(np.s_[1]),
    'a part that is no index': lambda: Part(sg.filters.Index(0)).mask((2,), 'w'),
    'no filter': lambda: as_filter('gln_*/**'),
    'an iterator': lambda: split(list(iter(['head/w']))),
    'None': lambda: (as_filter(False), as_filter(True)),
    'a number': lambda: as_filter(True),
    'bytes': lambda: split('head/**'),
    'a pattern on bytes': lambda: split(re.compile('head/.*')),
    'a class': lambda: as_filter(True),
    'a Module class': 'nn.stop_gradient(nn.Dense, where)',
    'a module': 'nn.Frozen(module, where)',
    'an array': 'jax.lax.stop_gradient(x)',
    'an async predicate': lambda: split(lambda path: path.startswith('head')),
    'a generator': lambda: split(lambda path: path.startswith('head')),
    'a function of two': lambda: nn.stop_gradient(of_two, where),
    'a filter that is assigned to': lambda: as_filter(several.__name__),
    'a match in place of a bool': lambda: split(
        lambda path: re.match('head', path) is not None
    ),
    'nothing in place of a bool': "lambda path: path.startswith('gln')",
    'the truth of a filter': lambda: (~a, a & b, a | b),
    'a tree without an answer': lambda: split({'head': True, 'body': False}),
    'a tree with the collection': lambda: in_block({'params': TREE}['params']),
    'a tree with a number for a name': lambda: sg.partition(
        {'0': 1.0, 'w': 2.0}, {'0': True, 'w': False}
    ),
    'a tree of numbers': lambda: split(TREE),
    'a tree that splits a variable': lambda: sg.partition(BOXED, {'w': True}),
    'a tree with too much': lambda: split(TREE),
    'a predicate that reads a tracer': lambda: jax.jit(decided, static_argnames='flag')(
        flag=True
    ),
    'a predicate that finds a tracer': lambda: jax.jit(found, static_argnames='flag')(
        flag=True
    ),
    'a predicate that returns a tracer': lambda: jax.jit(
        returned, static_argnames='flag'
    )(flag=True),
    'unused= of a tree': lambda: split('head/w', unused='ignore'),
    'unused in a tree': lambda: (
        split('head/w'),
        sg.partition(PARAMS, 'haed/w', unused='ignore'),
    ),
    'parts that exclude each other': lambda: sg.partition(PARAMS, a | b),
    'parts that exclude each other in a block': lambda: in_block(a | b),
    'integers that are trained': lambda: of_integers('head/*'),
    'an output that there is not': lambda: testing.assert_flows(
        loss, 'head/*', PARAMS, output='loss'
    ),
}

"""Filters: what they select, how they combine and compare, and what is refused."""

import collections
import contextlib
import copy
import functools
import itertools
import operator
import pickle
import re
from typing import Any

import cloudpickle
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flax_sg as sg
import oracle
from flax_sg import errors
from flax_sg.filters import (
    And,
    BoolTree,
    Constant,
    Derived,
    Filter,
    Glob,
    Not,
    Or,
    Predicate,
    Regex,
    as_filter,
)
from flax_sg.filters.asking import as_function, decide, find_unused, kinds_of, shape_of
from flax_sg.filters.expressions import unused_filter
from flax_sg.filters.names import Names
from flax_sg.filters.paths import Path
from flax_sg.linen import Frozen, stop_gradient
from oracle import stopped

pytestmark = pytest.mark.every_case


def path(text: str, collection: str = 'params', owner: tuple[str, ...] = ()) -> Path:
    """A path at top level, or one outside its owner if it begins with a slash."""
    if text.startswith('/'):
        return Path.of(collection, tuple(text[1:].split('/')), ('owner',))
    return Path.of(collection, (*owner, *text.split('/')), owner)


PATHS = [path(p) for p in ('gln/kernel', 'gln/bias', 'dec/kernel', 'scale', '/cell/w')]


def is_kernel(path):
    return path.name == 'kernel'


# Names that mean something in a glob, as e3nn and others give to parameters.
LITERALS = [
    'w[0,0] 1x0e',
    'mlp/w[0,0] 1x0e,2x1o',
    'a[b',
    'a[]',
    'a[z-a]',
    'w?',
    'w*',
    '{x,y}/z',
    'a.b.c',
    'a\\b',
    '/cell/w[0]',
]
OF_A_PATH_ONLY = ['w**2', '!w', '[!w]', '*', '**', 'a/**', '[ab]/!c']


@pytest.mark.parametrize('text', LITERALS)
def test_a_string_that_is_a_path_means_that_path(text):
    glob = as_filter(text)
    assert glob == Glob(text) and hash(glob) == hash(Glob(text))
    assert repr(glob) == f'Glob({text!r})'
    assert pickle.loads(pickle.dumps(glob)) == glob
    assert glob(path(text)) is True
    for other in PATHS:
        assert glob(other) is False
    assert (~glob)(path(text)) is False


@pytest.mark.parametrize('text', LITERALS + OF_A_PATH_ONLY)
def test_a_path_means_itself_alone(text):
    this = path(text)
    chosen = as_filter(this)
    assert chosen(this) is True
    # What the same characters would mean in a glob.
    others = [path(p) for p in ('w0 1x0e', 'w, 1x0e', 'wx', 'w', 'wab2', 'a', 'a/x/y')]
    assert not any(map(chosen, [*PATHS, *others]))
    assert eval(repr(chosen)) == chosen == as_filter(path(text, 'batch_stats'))
    assert pickle.loads(pickle.dumps(chosen)) == chosen
    assert [p for p in (this, *PATHS) if as_filter([this, 'scale'])(p)] == [
        this,
        PATHS[3],
    ]


class Irreps(nn.Module):
    """Parameters with the names that e3nn gives, here and in a submodule."""

    names: tuple[str, ...]
    where: Any = None

    @nn.compact
    def __call__(self, x):
        block = contextlib.nullcontext()
        if self.where is not None:
            block = stop_gradient(self.where)
        with block:
            for name in self.names:
                x = x * self.param(name, nn.initializers.constant(2.0), (1,))
        return x


@pytest.mark.parametrize('text', ['w[0,0] 1x0e', 'a[b', 'w?', '{x,y}', 'a.b'])
@pytest.mark.parametrize('kind', [str, path])
def test_a_literal_path_is_the_same_in_every_extent(text, kind):
    names, x = (text, 'w[9] 1x0e', 'b'), jnp.ones((2,))
    where = kind(text)
    params = Irreps(names).init(jax.random.key(0), x)['params']

    def grads(model, params=params):
        return oracle.grads(lambda p: model.apply({'params': p}, x), params)

    def by_hand(params):
        return Irreps(names).apply({'params': stopped(params, text.__eq__)}, x)

    expected = oracle.grads(by_hand, params)
    oracle.assert_same(grads(Irreps(names, where)), expected)
    oracle.assert_same(grads(Frozen(Irreps(names), where)), expected)
    oracle.assert_same(grads(stop_gradient(Irreps, where)(names)), expected)
    with stop_gradient(where):
        oracle.assert_same(grads(Irreps(names)), expected)
    tree = {name: name == text for name in names}
    assert sg.mask(params, frozen=where) == tree
    assert jax.tree.leaves(sg.partition(params, where)[0]) == [params[text]]
    only = sg.grad(lambda p: jnp.sum(Irreps(names).apply({'params': p}, x)), wrt=where)
    found = only(params)
    assert [name for name in names if jax.tree.leaves(found[name])] == [text]
    tx = sg.freeze(optax.sgd(1.0), where)
    updates, _ = tx.update(params, tx.init(params), params)
    moved = sg.apply_updates(params, updates)
    assert {name for name in names if moved[name] != params[name]} == {*names} - {text}


def test_a_path_without_special_characters_is_its_glob():
    assert as_filter(path('gln/kernel')) == Glob('gln/kernel')
    # A tree that is one leaf has the path ''.
    leaf = as_filter(Path.of('params', ('',)))
    assert leaf(Path.of('params', ('',))) and not any(map(leaf, PATHS))


class Named:
    """A predicate that is an object."""

    def __init__(self, name):
        self.name = name

    def __call__(self, path):
        return path.name == self.name

    def method(self, path):
        return path.name == self.name


class Unhashable(Named):
    """One that compares by value, and so has no hash."""

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other):
        return isinstance(other, Unhashable) and self.name == other.name


NAMED = Named('kernel')
UNHASHABLE = Unhashable('kernel')


# What each kind of argument selects of PATHS

SELECTIONS: dict[str, tuple[Any, list[str]]] = {
    'glob': ('gln/*', ['gln/kernel', 'gln/bias']),
    'glob that is a Path': (path('gln/kernel'), ['gln/kernel']),
    'glob that is a numpy str': (np.str_('scale'), ['scale']),
    'glob for everything': (
        '**',
        ['gln/kernel', 'gln/bias', 'dec/kernel', 'scale', '/cell/w'],
    ),
    'regular expression': (re.compile('gln/.*'), ['gln/kernel', 'gln/bias']),
    'regular expression, a part of a path': (re.compile('kernel'), []),
    'regular expression with a flag': (re.compile('SCALE', re.I), ['scale']),
    'lambda': (lambda p: p.startswith('gln'), ['gln/kernel', 'gln/bias']),
    'lambda on an attribute': (lambda p: p.module == '', ['scale']),
    'function': (is_kernel, ['gln/kernel', 'dec/kernel']),
    'numpy bool as the result': (lambda p: np.bool_(p == 'scale'), ['scale']),
    'callable object': (Named('bias'), ['gln/bias']),
    'bound method': (Named('bias').method, ['gln/bias']),
    'partial': (functools.partial(lambda n, p: p.name == n, 'bias'), ['gln/bias']),
    'builtin': ({'scale'}.__contains__, ['scale']),
    'True': (True, ['gln/kernel', 'gln/bias', 'dec/kernel', 'scale', '/cell/w']),
    'False': (False, []),
    'numpy bool': (np.False_, []),
    'tree': (
        {
            'gln': {'kernel': True, 'bias': False},
            'dec': {'kernel': True},
            'scale': 0 > 1,
        },
        ['gln/kernel', 'dec/kernel'],
    ),
    'prefix of a tree': (
        {'gln': True, 'dec': False, 'scale': True},
        ['gln/kernel', 'gln/bias', 'scale'],
    ),
    'frozen tree of numpy bools': (
        flax.core.freeze({'gln': np.True_, 'dec': np.False_, 'scale': np.False_}),
        ['gln/kernel', 'gln/bias'],
    ),
    'list': (['scale', re.compile('dec.*')], ['dec/kernel', 'scale']),
    'tuple with a function': (
        (is_kernel, 'scale'),
        ['gln/kernel', 'dec/kernel', 'scale'],
    ),
    'set': ({'scale', 'gln/bias'}, ['gln/bias', 'scale']),
    'keys of a dict': ({'scale': 1}.keys(), ['scale']),
    'deque': (collections.deque(['scale']), ['scale']),
    'nested lists': ([['scale'], ['gln/bias', []]], ['gln/bias', 'scale']),
    'empty list': ([], []),
    'filter': (~Glob('**/kernel'), ['gln/bias', 'scale', '/cell/w']),
    'and': (Glob('gln/*') & is_kernel, ['gln/kernel']),
    'or': (Glob('scale') | {'gln': True, 'dec': False, 'scale': False} | [], None),
}
SELECTIONS['or'] = (SELECTIONS['or'][0], ['gln/kernel', 'gln/bias', 'scale'])


@pytest.mark.parametrize('row', SELECTIONS.values(), ids=SELECTIONS)
def test_selects(row):
    where, expected = row
    chosen = as_filter(where)
    assert [p for p in PATHS if chosen(p)] == expected
    assert [p for p in PATHS if (~chosen)(p)] == [p for p in PATHS if p not in expected]
    assert all(type(chosen(p)) is bool for p in PATHS)


def test_a_glob_that_can_mean_nothing_is_refused_at_once():
    with pytest.raises(errors.FilterValueError, match="ends in '/'"):
        Glob('gln/')


def test_kinds():
    assert as_filter('a') == Glob('a')
    assert as_filter(re.compile('a')) == Regex(re.compile('a'))
    assert as_filter(True) == as_filter(np.True_) == Constant(True)
    assert as_filter({'a': True}) == BoolTree({'a': True})
    assert as_filter(is_kernel) == Predicate(is_kernel)
    assert as_filter([]) == as_filter(()) == as_filter(set()) == Constant(False)
    assert as_filter(['a']) == as_filter(['a', 'a']) == Glob('a')
    assert as_filter(['a', 'b']) == Or((Glob('a'), Glob('b')))
    chosen = Glob('a')
    assert as_filter(chosen) is chosen


# Values

A, B, C = Glob('a'), Glob('b'), Glob('c/**')

ATOMS: dict[str, tuple[Filter, tuple[Filter, ...]]] = {
    'constant': (Constant(True), ()),
    'atom': (A, (A,)),
    'not': (~A, (A,)),
    'twice': ((A & B) | (A & ~C), (A, B, C)),
    'equal ones': (Glob('a') | ~Glob('a'), (A,)),
    'constant beside': (A & True, (A,)),
    'all kinds': (
        A | re.compile('r') | is_kernel | {'t': True},
        (A, Regex(re.compile('r')), Predicate(is_kernel), BoolTree({'t': True})),
    ),
}


@pytest.mark.parametrize('row', ATOMS.values(), ids=ATOMS)
def test_atoms(row):
    chosen, atoms = row
    assert chosen.atoms == atoms


EQUAL: dict[str, tuple[Any, Any]] = {
    'glob': ('a', 'a'),
    'regex': (re.compile('a', re.I), re.compile('a', re.I)),
    'function': (is_kernel, is_kernel),
    'method': (NAMED.method, NAMED.method),
    'object that has no hash': (UNHASHABLE, UNHASHABLE),
    'tree, in another order': ({'a': True, 'b': False}, {'b': False, 'a': True}),
    'tree, numpy': ({'a': True}, flax.core.freeze({'a': np.True_})),
    'tree, an empty branch': ({'a': True, 'b': {}}, {'a': True}),
    'or, in another order': (['a', 'b'], ['b', 'a']),
    'and, in another order': (A & B, B & A),
    'nested or': ((A | B) | C, A | (B | C)),
    'twice the same': ([A, B, A], [A, B]),
    'double not': (~~(A & B), A & B),
    'not a constant': (~as_filter(True), False),
}

UNEQUAL: dict[str, tuple[Any, Any]] = {
    'glob': ('a', 'b'),
    'glob and regex': ('a', re.compile('a')),
    'regex flags': (re.compile('a'), re.compile('a', re.I)),
    'lambda, written twice': (lambda p: p == 'a', lambda p: p == 'a'),
    'methods of two objects': (Named('a').method, Named('a').method),
    'objects that have no hash': (UNHASHABLE, Unhashable('kernel')),
    'tree, a value': ({'a': True}, {'a': False}),
    'tree, a name': ({'a': True}, {'b': True}),
    'tree, its depth': ({'a': {'b': True}}, {'a': True}),
    'and, or': (A & B, A | B),
    'not': (A, ~A),
    'constant': (True, False),
    'a part more': (A | B, A | B | C),
    'a glob and its name': ('a', lambda p: p == 'a'),
}


@pytest.mark.parametrize('row', EQUAL.values(), ids=EQUAL)
def test_equal(row):
    one, other = map(as_filter, row)
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize('row', UNEQUAL.values(), ids=UNEQUAL)
def test_unequal(row):
    one, other = map(as_filter, row)
    assert one != other


def test_a_filter_is_equal_to_no_other_thing():
    assert A != 'a'
    assert Constant(True) != True  # noqa: E712


REPRS: dict[str, tuple[Filter, str]] = {
    'glob': (A, "Glob('a')"),
    'regex': (Regex(re.compile('a', re.I)), "Regex(re.compile('a', re.IGNORECASE))"),
    'constant': (Constant(False), 'Constant(False)'),
    'tree': (BoolTree({'a': {'b': np.True_}}), "BoolTree({'a': {'b': True}})"),
    'not': (~A, "~Glob('a')"),
    'not of several': (~(A | B), "~(Glob('a') | Glob('b'))"),
    'and': (A & B & C, "Glob('a') & Glob('b') & Glob('c/**')"),
    'and of or': (A & (B | C), "Glob('a') & (Glob('b') | Glob('c/**'))"),
    'or of and': (A | B & ~C, "Glob('a') | (Glob('b') & ~Glob('c/**'))"),
    'and of not': (~(A & B) & C, "~(Glob('a') & Glob('b')) & Glob('c/**')"),
    'or of nothing': (Or(()), 'Or(())'),
    'and of nothing': (And(()), 'And(())'),
    'or of one': (Not(Or((A,))), "~Glob('a')"),
}


@pytest.mark.parametrize('row', REPRS.values(), ids=REPRS)
def test_repr_is_the_expression(row):
    chosen, text = row
    assert repr(chosen) == text
    for p in PATHS[:-2]:
        if not chosen.atoms or not isinstance(chosen.atoms[0], BoolTree):
            assert eval(text)(p) == chosen(p)


def test_repr_of_a_set_is_the_same_in_every_run():
    names = set('hgfedcba')
    assert repr(as_filter(names)) == ' | '.join(f"Glob('{n}')" for n in 'abcdefgh')


def test_repr_of_predicates():
    line = is_kernel.__code__.co_firstlineno
    assert (
        repr(Predicate(is_kernel)) == f'Predicate(is_kernel at test_filters.py:{line})'
    )
    one = lambda p: True  # noqa: E731
    line = one.__code__.co_firstlineno
    assert repr(~Predicate(one)) == f'~Predicate(<lambda> at test_filters.py:{line})'
    assert repr(Predicate(functools.partial(one))) == repr(Predicate(one))
    line = Named.method.__code__.co_firstlineno
    method = f'Predicate(Named.method at test_filters.py:{line})'
    assert repr(Predicate(Named('a').method)) == method
    assert repr(Predicate(Named('a'))) == 'Predicate(Named)'


PICKLED: dict[str, Filter] = {
    'all kinds': (A & ~B) | Regex(re.compile('x', re.I)) | BoolTree({'a': {'b': True}}),
    'constant': Constant(True),
    'predicate': Predicate(is_kernel) & Glob('**'),
}


@pytest.mark.parametrize('chosen', PICKLED.values(), ids=PICKLED)
@pytest.mark.parametrize('protocol', range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles(chosen, protocol):
    hash(chosen)  # A hash that was kept would be wrong in another process.
    twin = pickle.loads(pickle.dumps(chosen, protocol))
    assert twin == chosen
    assert repr(twin) == repr(chosen)
    assert hash(twin) == hash(chosen)
    assert b'_hash' not in pickle.dumps(chosen, protocol)
    assert copy.deepcopy(chosen) == chosen


def test_cloudpickles_a_lambda():
    name = 'bias'
    chosen = Predicate(lambda p: p.name == name) | 'scale'
    twin = cloudpickle.loads(cloudpickle.dumps(chosen))
    assert [p for p in PATHS if twin(p)] == ['gln/bias', 'scale']


@pytest.mark.parametrize('row', EQUAL.values(), ids=EQUAL)
def test_immutable(row):
    chosen = as_filter(row[0])
    with pytest.raises(AttributeError):
        chosen.pattern = 'b'  # pyright: ignore[reportAttributeAccessIssue]


def test_a_tree_is_copied():
    given_tree = {'a': {'b': True}}
    chosen = BoolTree(given_tree)
    given_tree['a']['b'] = False
    assert chosen(path('a/b'))
    with pytest.raises(TypeError):
        chosen.tree['a'] = False  # pyright: ignore[reportIndexIssue]


OTHER_SIDES: dict[str, tuple[Any, Filter]] = {
    'str': ('b', B),
    'pattern': (re.compile('b'), Regex(re.compile('b'))),
    'bool': (True, Constant(True)),
    'numpy bool': (np.True_, Constant(True)),
    'dict': ({'b': True}, BoolTree({'b': True})),
    'list': (['b', 'c/**'], B | C),
    'tuple': (('b',), B),
    'set': ({'b'}, B),
    'function': (is_kernel, Predicate(is_kernel)),
    'filter': (~B, ~B),
}


@pytest.mark.parametrize('row', OTHER_SIDES.values(), ids=OTHER_SIDES)
def test_operators_take_anything(row):
    other, expected = row
    assert A & other == And((A, expected))
    assert other & A == And((expected, A))
    assert A | other == Or((A, expected))
    assert other | A == Or((expected, A))


@pytest.mark.parametrize(
    'other', [3, None, jnp.ones(2), np.ones(2), np.array([True]), str]
)
def test_operators_refuse_what_is_no_filter(other):
    with pytest.raises(errors.FilterTypeError):
        A & other
    with pytest.raises(errors.FilterTypeError):
        A | other
    with pytest.raises(errors.FilterTypeError):
        other & A


def test_no_truth_value():
    with pytest.raises(errors.FilterTypeError) as caught:
        A and B  # noqa: B018
    assert str(caught.value) == (
        "Glob('a') is neither true nor false: `not`, `and` and `or` would drop a part "
        'of a filter.\n'
        'Fix: write ~a, a & b, a | b.'
    )


NAMES = st.sampled_from([A, B, C])
EXPRESSIONS = st.recursive(
    NAMES | st.booleans().map(Constant),
    lambda inner: (
        st.builds(Filter.__and__, inner, inner)
        | st.builds(Filter.__or__, inner, inner)
        | st.builds(Filter.__invert__, inner)
    ),
    max_leaves=8,
)
ALL_RESULTS = [
    {atom for atom, took in zip((A, B, C), values, strict=True) if took}
    for values in itertools.product([False, True], repeat=3)
]


def table(chosen: Filter) -> list[bool]:
    """The value of an expression for every value of its atoms."""
    return [chosen._evaluate(took, set()) for took in ALL_RESULTS]


@given(EXPRESSIONS, EXPRESSIONS)
def test_expressions_obey_the_laws(x, y):
    assert table(~(x & y)) == table(~x | ~y)
    assert table(~(x | y)) == table(~x & ~y)
    assert table(x & y) == [a and b for a, b in zip(table(x), table(y), strict=True)]
    assert table(x | y) == [a or b for a, b in zip(table(x), table(y), strict=True)]
    assert table(~x) == [not a for a in table(x)]
    assert table(x & True) == table(x | False) == table(x)
    assert table(eval(repr(x))) == table(x)
    assert set(x.atoms) | set(y.atoms) == set((x & y).atoms)


# What a block asks a filter


@pytest.mark.parametrize('row', SELECTIONS.values(), ids=SELECTIONS)
def test_decide_says_the_same_and_which_atoms_took_something(row):
    chosen = as_filter(row[0])
    for p in PATHS:
        matched: set[Filter] = {C}
        assert decide(chosen, p, matched) == chosen(p)
        assert matched == {C, *(atom for atom in chosen.atoms if atom(p))}


def test_decide_asks_each_function_once():
    asked = []

    def spy(path):
        asked.append(path)
        return False

    for chosen in (as_filter(spy), ~as_filter(spy), (A & spy) | (B & spy) | spy):
        asked.clear()
        decide(chosen, PATHS[0], set())
        assert asked == [PATHS[0]]


def fresh() -> Any:
    return lambda p: True


SHAPES: dict[str, tuple[Any, Any, bool]] = {
    'glob': ('a', 'a', True),
    'globs': ('a', 'b', False),
    'one lambda made twice': (fresh(), fresh(), True),
    'in an expression': (A & ~as_filter(fresh()), A & ~as_filter(fresh()), True),
    'partials of it': (functools.partial(fresh()), fresh(), True),
    'other expressions': (A & as_filter(fresh()), A | as_filter(fresh()), False),
    'beside another glob': (A & as_filter(fresh()), B & as_filter(fresh()), False),
    'two lambdas': (lambda p: True, lambda p: True, False),
    'methods of two objects': (Named('a').method, Named('b').method, True),
    'objects of one class': (Named('a'), Named('b'), True),
    'objects of two classes': (Named('a'), UNHASHABLE, False),
    'written in C': (operator.methodcaller('a'), operator.methodcaller('b'), True),
}


@pytest.mark.parametrize('row', SHAPES.values(), ids=SHAPES)
def test_filters_that_are_spelled_alike_have_one_shape(row):
    one, other, alike = row
    one, other = as_filter(one), as_filter(other)
    assert (shape_of(one) == shape_of(other)) is alike
    if alike:
        assert hash(shape_of(one)) == hash(shape_of(other))


def test_functions_in_a_filter_are_known():
    values = (A & ~B) | BoolTree({'a': True}) | Derived(frozenset(), frozenset())
    assert Predicate not in kinds_of(values)
    for chosen in (as_filter(is_kernel), ~as_filter(is_kernel), values | is_kernel):
        assert Predicate in kinds_of(chosen)
    assert as_function(as_filter(is_kernel)) == (is_kernel, False)
    assert as_function(~as_filter(is_kernel)) == (is_kernel, True)
    for chosen in (A, ~A, A & is_kernel, as_filter(True)):
        assert as_function(chosen) is None


def test_a_function_that_finds_nothing_is_asked_for_nothing_else():
    asked = []

    def spy(path):
        asked.append(path)
        return False

    message = str(unused_filter(as_filter(spy), MET, ENC))
    assert 'selected nothing' in message and 'Hint' not in message
    assert asked == []


def test_a_list_of_thousands_of_paths_is_looked_up(monkeypatch):
    names = [f'layer_{n}/w[{n}]' if n % 2 else f'layer_{n}/w' for n in range(2000)]
    paths = [path(name) for name in names]
    asked: list[Path] = []
    monkeypatch.setattr(Glob, '_matches', lambda self, p: asked.append(p))
    for where in (names[::2], paths):
        chosen, matched = as_filter(where), set()
        said = [decide(~~chosen, p, matched) for p in paths]
        assert said == [str(p) in where for p in paths]
        assert matched == set(chosen.atoms)
    assert asked == []


# What is refused

KINDS = """\
Accepted:
  'gln_*/**'                   a glob on whole path components
  re.compile('gln_[0-9]+/.*')  a regular expression for the whole path
  lambda path: ...             a function of the path that returns a bool
  True, False                  every variable, none
  {'gln': True, 'dec': False}  a tree of bools
  ['gln/**', 'dec/**']         any of several; filters also combine with ~ & |"""


class Model(nn.Module):
    """A module, which stands for no filter."""

    def __call__(self, x):
        return x


REFUSED: dict[str, tuple[Any, str]] = {
    'None': (
        None,
        f'None is no filter.\n{KINDS}\n'
        'Fix: write False for no variable, True for every one.',
    ),
    'int': (1, f'1 (int) is no filter.\n{KINDS}\nFix: write True.'),
    'float': (0.5, f'0.5 (float) is no filter.\n{KINDS}'),
    'bytes': (b'gln', f"b'gln' (bytes) is no filter.\n{KINDS}\nFix: write 'gln'."),
    'bytes that are no text': (
        b'\xff',
        f"b'\\xff' (bytes) is no filter.\n{KINDS}\nFix: write '\ufffd'.",
    ),
    'object': (object(), f'an object is no filter.\n{KINDS}'),
    'iterator': (
        iter(['a']),
        f'a list_iterator is no filter.\n{KINDS}\n'
        'Fix: an iterator is empty after its first use; give a list.',
    ),
    'in a list': (['a', 3], f'3 (int) is no filter.\n{KINDS}\nFix: write True.'),
    'class': (str, f'The class str is no filter.\n{KINDS}'),
    'partial of a class': (
        functools.partial(int, base=2),
        f'The class int is no filter.\n{KINDS}',
    ),
    'Module class of Flax': (
        nn.Dense,
        'The Module class Dense is no filter: a filter says which variables.\n'
        'Fix: to lift the class, write nn.stop_gradient(nn.Dense, where), with where '
        "such as '**'.",
    ),
    'Module class': (
        Model,
        'The Module class Model is no filter: a filter says which variables.\n'
        'Fix: to lift the class, write nn.stop_gradient(Model, where), with where '
        "such as '**'.",
    ),
    'partial of a Module class': (
        functools.partial(nn.Dense, 3),
        'The Module class Dense is no filter: a filter says which variables.\n'
        'Fix: to lift the class, write nn.stop_gradient(nn.Dense, where), with where '
        "such as '**'.",
    ),
    'module': (
        Model(),
        'The module Model(...) is no filter: a filter says which variables.\n'
        'Fix: open a block around the call:\n'
        '  with nn.stop_gradient(where):\n'
        '    y = module(x)\n'
        'or wrap the module, for all that goes through the wrapper:\n'
        '  nn.Frozen(module, where)',
    ),
    'jax array': (
        jnp.ones((2, 3)),
        'an array (float32[2, 3]) is no filter: a filter says which variables.\n'
        'Fix: to stop the gradient of a value, write jax.lax.stop_gradient(x).',
    ),
    'numpy array': (
        np.ones(2, np.int8),
        'an array (int8[2]) is no filter: a filter says which variables.\n'
        'Fix: to stop the gradient of a value, write jax.lax.stop_gradient(x).',
    ),
    'pattern on bytes': (
        re.compile(b'gln'),
        "re.compile(b'gln') is a pattern on bytes; paths are str.\n"
        "Fix: write re.compile('gln').",
    ),
    'pattern on bytes that are no text': (
        re.compile(b'\xff'),
        "re.compile(b'\\xff') is a pattern on bytes; paths are str.\n"
        "Fix: write re.compile('\ufffd').",
    ),
    'tree with an int': (
        {'gln': {'kernel': 1}},
        "A tree of bools has 1 (int) at 'gln/kernel'.\n"
        'Expected: True or False at every leaf, such as '
        "{'gln': True, 'dec': {'kernel': False, 'bias': True}}.",
    ),
    'tree with None': (
        {'gln': None},
        "A tree of bools has None at 'gln'.\n"
        'Expected: True or False at every leaf, such as '
        "{'gln': True, 'dec': {'kernel': False, 'bias': True}}.",
    ),
    'tree of parameters': (
        {'gln': jnp.ones(2)},
        "A tree of bools has an array (float32[2]) at 'gln'.\n"
        'Expected: True or False at every leaf, such as '
        "{'gln': True, 'dec': {'kernel': False, 'bias': True}}.",
    ),
    'tree with a list of str': (
        {'gln': ['kernel']},
        "A tree of bools has 'kernel' (str) at 'gln'.\n"
        'Expected: True or False at every leaf, such as '
        "{'gln': True, 'dec': {'kernel': False, 'bias': True}}.",
    ),
    'tree with a number on top': (
        {0: True},
        'A tree of bools has the key 0 (int) at its top.\n'
        'Expected: the names of modules and variables, which are str.',
    ),
    'tree with a number for a name': (
        {'gln': {0: True}},
        "A tree of bools has the key 0 (int) at 'gln'.\n"
        'Expected: the names of modules and variables, which are str.',
    ),
}


@pytest.mark.parametrize('row', REFUSED.values(), ids=REFUSED)
def test_refused(row):
    where, message = row
    with pytest.raises(errors.FilterTypeError) as caught:
        as_filter(where)
    assert str(caught.value) == message
    assert isinstance(caught.value, TypeError)


def test_tracer_refused():
    @jax.jit
    def traced(x):
        as_filter(x)

    with pytest.raises(errors.FilterTypeError) as caught:
        traced(1.0)
    assert str(caught.value) == (
        'a traced value (float32[]) is no filter: a filter says which variables.\n'
        'Fix: to stop the gradient of a value, write jax.lax.stop_gradient(x).'
    )


async def coroutine(path):
    return True


async def async_generator(path):
    yield True


def generator(path):
    yield True


class AsyncCall:
    async def __call__(self, path):
        return True


def no_path() -> bool:
    return True


def path_and_leaf(path: str, leaf: object) -> bool:
    return True


def a_method(self: object, x: object) -> bool:
    return True


@pytest.mark.parametrize(
    ('fn', 'said'),
    [
        (no_path, 'Predicate(no_path at test_filters.py:{}) {}: it is () -> bool.'),
        (
            path_and_leaf,
            'Predicate(path_and_leaf at test_filters.py:{}) {}: it is '
            '(path: str, leaf: object) -> bool.',
        ),
        (
            a_method,
            'Predicate(a_method at test_filters.py:{}) {}: it is '
            '(self: object, x: object) -> bool.',
        ),
    ],
)
def test_functions_of_anything_but_a_path_are_refused_at_once(fn, said):
    # Among them what stands below a decorator that was given no filter.
    with pytest.raises(errors.FilterTypeError) as error_info:
        as_filter(fn)
    line = fn.__code__.co_firstlineno
    assert str(error_info.value).splitlines() == [
        said.format(line, 'cannot be called with a path'),
        'Expected: a function of the path alone, such as '
        "lambda path: path.startswith('gln').",
        'Fix: to lift a function of a module, write nn.stop_gradient(fn, where); as a '
        'decorator, @nn.stop_gradient(where).',
    ]


@pytest.mark.parametrize(
    'fn',
    [
        lambda path, name='kernel': path.name == name,
        lambda *paths: paths[0].name == 'kernel',
        functools.partial(lambda name, path: path.name == name, 'kernel'),
        operator.methodcaller('endswith', '/kernel'),
    ],
)
def test_functions_that_can_be_called_with_a_path_are_taken(fn):
    kernel, bias = (Path.of('params', ('a', name)) for name in ('kernel', 'bias'))
    assert [as_filter(fn)(path) for path in (kernel, bias)] == [True, False]


@pytest.mark.parametrize(
    'fn, problem',
    [
        (coroutine, 'is async'),
        (async_generator, 'is async'),
        (AsyncCall(), 'is async'),
        (generator, 'is a generator function'),
        (functools.partial(generator), 'is a generator function'),
    ],
)
def test_functions_that_return_no_bool_are_refused_at_once(fn, problem):
    with pytest.raises(errors.FilterTypeError) as caught:
        as_filter(fn)
    assert str(caught.value).partition(') ')[2] == (
        f'{problem}: it returns no bool.\n'
        'Expected: True or False for every path, known without running JAX.\n'
        "Fix: write lambda path: path.startswith('gln')."
    )


RESULTS: dict[str, tuple[Any, str, str]] = {
    'None': (
        lambda p: None,
        'None',
        "return a bool on every way through it, as lambda path: path.startswith('gln')",
    ),
    'match': (
        lambda p: re.match('gln', p),
        'a Match',
        'return match is not None, or give the re.Pattern in place of it',
    ),
    'int': (lambda p: 1, '1 (int)', "write lambda path: path.startswith('gln')"),
    'array': (
        lambda p: jnp.bool_(True),
        'an array (bool[])',
        "write lambda path: path.startswith('gln')",
    ),
    'path': (
        lambda p: p and p.module,
        "'gln' (str)",
        "write lambda path: path.startswith('gln')",
    ),
    'class': (
        lambda p: nn.Dense,
        'the class Dense',
        "write lambda path: path.startswith('gln')",
    ),
}


@pytest.mark.parametrize('row', RESULTS.values(), ids=RESULTS)
def test_a_predicate_returns_a_bool(row):
    fn, what, fix = row
    line = fn.__code__.co_firstlineno
    with pytest.raises(errors.FilterTypeError) as caught:
        Predicate(fn)(path('gln/kernel'))
    assert str(caught.value) == (
        f'Predicate(<lambda> at test_filters.py:{line}) returned {what} for the path '
        "'gln/kernel'.\n"
        'Expected: True or False for every path, known without running JAX.\n'
        f'Fix: {fix}.'
    )


def test_a_predicate_that_computes_under_jit():
    chosen = Predicate(lambda p: jnp.asarray(len(p)) > 3)

    @jax.jit
    def traced():
        chosen(path('gln/kernel'))

    with pytest.raises(errors.FilterTypeError, match=r'traced value \(bool\[\]\)'):
        traced()


def test_an_error_in_a_predicate_says_where():
    def failing(path):
        raise KeyError('x')

    line = failing.__code__.co_firstlineno
    with pytest.raises(KeyError) as caught:
        as_filter(failing)(path('gln/kernel'))
    assert caught.value.__notes__ == [
        f'raised by Predicate(failing at test_filters.py:{line}) for the path '
        "'gln/kernel'"
    ]


# Trees of bools


def test_a_tree_covers_nothing_outside_its_owner():
    assert not BoolTree({'cell': True})(path('/cell/w'))


def test_a_tree_answers_within_a_variable():
    # The variable `stats` holds a dict.
    assert BoolTree({'stats': {'mean': True, 'var': True}})(path('stats'))
    assert not BoolTree({'stats': {'mean': False, 'var': False}})(path('stats'))


def test_leaves_of_a_box_share_a_path():
    box = nn.Partitioned(True, names=(None,))
    assert BoolTree({'kernel': box}) == BoolTree({'kernel': True})
    assert BoolTree({'pair': (False, np.False_)}) == BoolTree({'pair': False})


@pytest.mark.parametrize(
    'build',
    [
        lambda: BoolTree({'a': {'stats': nn.Partitioned((True, False), ())}}),
        lambda: BoolTree({'a': {'stats': {'m': True, 'v': False}}})(path('a/stats')),
    ],
)
def test_leaves_of_a_variable_agree(build):
    with pytest.raises(errors.FilterValueError) as caught:
        build()
    assert str(caught.value) == (
        "A tree of bools has both True and False within 'a/stats', whose leaves share "
        'one path.\n'
        'Fix: give it one bool.'
    )


MISFITS: dict[str, tuple[dict[str, Any], Path, str]] = {
    'a branch too few': (
        {'gln': True, 'enc': False},
        path('dec/kernel'),
        "A tree of bools has no answer for the variable 'dec/kernel' of the "
        "collection 'params'.\n"
        "Nearest in the tree: 'enc', 'gln'.\n"
        "Fix: give 'dec' the value True or False in the tree.",
    ),
    'a leaf too few': (
        {'gln': {'kernel': True}},
        path('gln/bias'),
        "A tree of bools has no answer for the variable 'gln/bias' of the "
        "collection 'params'.\n"
        "Nearest in the tree: 'gln/kernel'.\n"
        "Fix: give 'gln/bias' the value True or False in the tree.",
    ),
    'the collection on top': (
        {'params': {'gln': True}},
        path('gln/bias'),
        "A tree of bools has no answer for the variable 'gln/bias' of the "
        "collection 'params'.\n"
        "Nearest in the tree: 'params/gln'.\n"
        "Fix: a tree starts below the collection. Give tree['params'] in place of "
        'tree.',
    ),
    'an empty tree': (
        {},
        path('gln/bias', 'cache'),
        "A tree of bools has no answer for the variable 'gln/bias' of the "
        "collection 'cache'.\n"
        "Fix: give 'gln' the value True or False in the tree.",
    ),
}


@pytest.mark.parametrize('row', MISFITS.values(), ids=MISFITS)
def test_a_tree_that_has_no_answer(row):
    tree, where, message = row
    with pytest.raises(errors.FilterValueError) as caught:
        BoolTree(tree)(where)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


MISSING: dict[str, tuple[dict[str, Any], list[str]]] = {
    'none': ({'gln': {'kernel': True, 'bias': False}, 'dec': True}, []),
    'a leaf': ({'gln': {'kernel': True, 'kernl': False}}, ['gln/kernl']),
    'a branch': ({'gln': True, 'enc': {'a': True, 'b': False}}, ['enc/a', 'enc/b']),
    'only False': ({'glm': False}, ['glm']),
    'a part of a name': ({'gl': True}, ['gl']),
    'outside the owner': ({'cell': True}, ['cell']),
    'below a variable': (
        {'scale': {'mean': True}, 'gln': True},
        ['scale/mean'],
    ),
}


def missing(tree: Any, paths: list[Path]) -> list[str]:
    """The error for the leaves of a tree that belong to no variable, as lines."""
    error = find_unused(BoolTree(tree), set(), paths, None, True)
    return [] if error is None else str(error).splitlines()


@pytest.mark.parametrize('row', MISSING.values(), ids=MISSING)
def test_missing(row):
    tree, expected = row
    found = [line.split("'")[1] for line in missing(tree, PATHS)[1:-1]]
    assert found == expected


def test_missing_message():
    lines = missing({'gln': {'kernl': True}, **dict.fromkeys('abc', False)}, PATHS)
    assert lines[0] == 'A tree of bools has 4 leaves without a variable:'
    assert lines[1] == "  'gln/kernl', nearest 'gln/kernel'"
    assert lines[4:] == [
        '  and 1 more',
        'Fix: take them out of the tree, or spell them as the variables.',
    ]
    assert missing({'a': True}, []) == [
        'A tree of bools has 1 leaf without a variable:',
        "  'a'",
        'Fix: take them out of the tree, or spell them as the variables.',
    ]


# What selects nothing

ENC = ('enc',)
MET = [
    path('gln_0/kernel', owner=ENC),
    path('gln_0/bias', owner=ENC),
    path('gln_1/kernel', owner=ENC),
    path('dec/dense/kernel', owner=ENC),
    Path.of('params', ('cell', 'kernel'), ENC),
]
TOP = [path('gln_0/kernel'), path('dec/bias'), path('norm/mean', 'batch_stats')]

HINTS: dict[str, tuple[Any, list[Path], tuple[str, ...] | None, str | None]] = {
    'collection': (
        'params/gln_0/**',
        MET,
        ENC,
        "paths do not start with the collection 'params'. Write 'gln_0/**'.",
    ),
    'collection alone': (
        'params/**',
        MET,
        ENC,
        "paths do not start with the collection 'params'. Write '**'.",
    ),
    'collection, and nothing in it': (
        'params',
        MET,
        ENC,
        "paths do not start with the collection 'params'. Write '**'.",
    ),
    'another collection': (
        'batch_stats/norm/**',
        TOP,
        (),
        "paths do not start with the collection 'batch_stats'. Write 'norm/**'.",
    ),
    'collection, with a slash': (
        '/params/gln_0/**',
        MET,
        ENC,
        "paths do not start with the collection 'params'. Write 'gln_0/**'.",
    ),
    'params, where there are none': (
        'params/norm/*',
        TOP[2:],
        (),
        "paths do not start with the collection 'params'. Write 'norm/*'.",
    ),
    'no collection': ('Xparams/gln_0/**', MET, ENC, None),
    'collection and a typo': (
        'params/glm/**',
        MET,
        ENC,
        "paths do not start with the collection 'params'.",
    ),
    'collection, dots': (
        'params.gln_0.kernel',
        MET,
        ENC,
        "paths do not start with the collection 'params'. Write 'gln_0/kernel'.",
    ),
    'collection, regex': (
        re.compile('^params/gln_.*'),
        MET,
        ENC,
        "paths do not start with the collection 'params'. Write re.compile('gln_.*').",
    ),
    'dots': (
        'gln_0.kernel',
        MET,
        ENC,
        "names are joined by '/'. Write 'gln_0/kernel'.",
    ),
    'colons': (
        'gln_0::*',
        TOP,
        None,
        "names are joined by '/'. Write 'gln_0/*'.",
    ),
    'dots and a typo': ('glm_0.kernel', MET, ENC, None),
    'composed': (
        'caf\u00e9/*',
        [path('cafe\u0301/w')],
        (),
        "it is spelled with other code points. Write 'cafe\u0301/*'.",
    ),
    'decomposed': (
        'cafe\u0301/*',
        [path('caf\u00e9/w')],
        (),
        "it is spelled with other code points. Write 'caf\u00e9/*'.",
    ),
    'decomposed and a typo': ('cafe\u0301s/*', [path('caf\u00e9/w')], (), None),
    'dots, in brackets': ('gln_0[.]*', MET, ENC, None),
    'dots, regex': (
        re.compile(r'gln_\d\.kernel'),
        MET,
        ENC,
        r"names are joined by '/'. Write re.compile('gln_\\d/kernel').",
    ),
    'absolute': (
        'enc/gln_0/**',
        MET,
        ENC,
        "'enc/gln_0/kernel' is an absolute path; the block was opened by the module "
        "at 'enc', and there it is 'gln_0/kernel'.",
    ),
    'absolute, two modules deep': (
        'a/b/w',
        [Path.of('params', ('a', 'b', 'w'), ('a', 'b'))],
        ('a', 'b'),
        "'a/b/w' is an absolute path; the block was opened by the module at 'a/b', and "
        "there it is 'w'.",
    ),
    'absolute of none': ('Xenc/gln_0/**', MET, ENC, None),
    'absolute, with a slash': (
        '/enc/gln_0/**',
        MET,
        ENC,
        "'enc/gln_0/kernel' is an absolute path; the block was opened by the module "
        "at 'enc', and there it is 'gln_0/kernel'.",
    ),
    'absolute, regex': (
        re.compile('enc/dec/.*'),
        MET,
        ENC,
        "'enc/dec/dense/kernel' is an absolute path; the block was opened by the "
        "module at 'enc', and there it is 'dec/dense/kernel'.",
    ),
    'absolute at top level': (
        '/gln_0/**',
        TOP,
        (),
        "paths do not begin with '/'. Write 'gln_0/**'.",
    ),
    'outside the module': (
        'cell/*',
        MET,
        ENC,
        "'/cell/kernel' lies outside the module that opened the block; its path begins "
        "with '/'. Write '/cell/*'.",
    ),
    'a module': (
        'gln_*',
        MET,
        ENC,
        "it names a module; variables are inside. Write 'gln_*/**'.",
    ),
    'a module, regex': (
        re.compile('dec'),
        MET,
        ENC,
        "it names a module; variables are inside. Write re.compile('dec/.*').",
    ),
    'another depth': (
        'dense/kernel',
        MET,
        ENC,
        "it matches at another depth. Write '**/dense/kernel'.",
    ),
    'a module of one letter, regex': (
        re.compile('X'),
        [path('X/kernel')],
        (),
        "it names a module; variables are inside. Write re.compile('X/.*').",
    ),
    'a module, regex with flags': (
        re.compile('DEC', re.IGNORECASE | re.DOTALL),
        MET,
        ENC,
        'it names a module; variables are inside. Write '
        "re.compile('DEC/.*', re.IGNORECASE|re.DOTALL).",
    ),
    'a part, regex with a flag inside': (
        re.compile('(?i)ENSE'),
        MET,
        ENC,
        "it matches a part of 'dec/dense/kernel', and has to match the whole path.",
    ),
    'a part, regex': (
        re.compile('ense'),
        MET,
        ENC,
        "it matches a part of 'dec/dense/kernel', and has to match the whole path. "
        "Write re.compile('.*ense.*').",
    ),
    'dots, with all inside': (
        'dec.*',
        MET,
        ENC,
        "names are joined by '/'. Write 'dec/**'.",
    ),
    'dots, all of a module': (
        'enc.layer.*.mlp',
        [path('enc/layer/0/mlp/kernel')],
        (),
        "names are joined by '/'. Write 'enc/layer/*/mlp/**'.",
    ),
    'dots, at another depth': (
        'dense.kernel',
        MET,
        ENC,
        "names are joined by '/'. Write '**/dense/kernel'.",
    ),
    'collection, dots, with all inside': (
        'params.dec.*',
        MET,
        ENC,
        "paths do not start with the collection 'params'. Write 'dec/**'.",
    ),
    'braces': (
        '{gln_0,dec}/**',
        MET,
        ENC,
        "braces stand for themselves. Write ['gln_0/**', 'dec/**'].",
    ),
    'braces, one of them a typo': (
        'gln_{0,7}/{kernel,bias}',
        MET,
        ENC,
        "braces stand for themselves. Write ['gln_0/kernel', 'gln_0/bias'].",
    ),
    'braces in braces, and dots': (
        '{gln_{0,1},dec}.*',
        MET,
        ENC,
        "braces stand for themselves. Write ['gln_0/*', 'dec/**', 'gln_1/*'].",
    ),
    'braces with a range': (
        'gln_{0..1}/*',
        MET,
        ENC,
        "braces stand for themselves. Write ['gln_0/*', 'gln_1/*'].",
    ),
    'braces around one name': (
        '{gln_0}/kernel',
        MET,
        ENC,
        "braces stand for themselves. Write 'gln_0/kernel'.",
    ),
    'braces and a typo': ('{glm_0,deck}/**', MET, ENC, None),
    'too many braces': ('{gln_0..999}/**', MET, ENC, None),
    'a range from a letter': ('gln_{a..z}/**', MET, ENC, None),
    'brackets in the name of a module': (
        'w[0,0] 1x0e/**',
        [path('w[0,0] 1x0e/kernel')],
        (),
        "'[' begins a set of characters. Write 'w[[]0,0] 1x0e/**'.",
    ),
    'an open bracket in the name of a module': (
        'w[0',
        [path('w[0/kernel')],
        (),
        "it has a '[' without its ']'. Write 'w[[]0/**'.",
    ),
    'a bad range and nothing like it': (
        'gln_[1-0]',
        MET,
        ENC,
        'it has a bad [...]: bad character range 1-0.',
    ),
    'one of several networks': (
        'policy/params/kernel',
        MET,
        ENC,
        "the paths of each model begin at its own root, without 'policy'. Use "
        "sg.stop_gradient(tree, 'policy/params/kernel') for a tree of several "
        'networks, or open a block around one apply.',
    ),
    'a typo': ('glm_0/**', MET, ENC, None),
    'a typo, regex': (re.compile('glm_0/.*'), MET, ENC, None),
    'predicate on the collection': (
        lambda p: p.startswith('params/gln'),
        MET,
        ENC,
        None,
    ),
    'predicate': (lambda p: p.startswith('glm'), MET, ENC, None),
    'tree of False': (
        {'gln_0': False},
        MET,
        ENC,
        'no leaf of the tree is True: True selects, False leaves out.',
    ),
    'tree of True': ({'glm': True}, MET, ENC, None),
    'names': (Names(frozenset({('params', ('glm_0',))})), MET, ENC, None),
    'and': (
        Glob('gln_0/**') & 'dec/**',
        MET,
        ENC,
        'its parts match something each, and no variable is in all of them.',
    ),
}


@pytest.mark.parametrize('row', HINTS.values(), ids=HINTS)
def test_hint(row):
    where, met, owner, hint = row
    message = str(unused_filter(as_filter(where), met, owner))
    found = [line for line in message.splitlines() if line.startswith('Hint: ')]
    assert found == ([] if hint is None else [f'Hint: {hint}'])


@pytest.mark.parametrize('row', HINTS.values(), ids=HINTS)
def test_the_hints_help(row):
    where, met, _, hint = row
    if hint is not None and ' Write ' in hint:
        written = eval(hint.partition(' Write ')[2].rstrip('.'))
        assert any(map(as_filter(written), met))
    if not isinstance(where, dict):
        assert not any(map(as_filter(where), met))


MEANT: dict[str, tuple[str, list[Path], str | None]] = {
    'a letter': ('glm_0/**', MET, 'gln_0/**'),
    'two letters': ('gnl_*/**', MET, 'gln_*/**'),
    'a module, without its inside': ('deck', MET, 'dec/**'),
    'a variable': ('**/kernal', MET, '**/kernel'),
    'another depth': ('dens/kernel', MET, '**/dense/kernel'),
    'two names': ('deck/dens/*', MET, 'dec/dense/*'),
    'two as close as each other': ('gln_2/**', MET, None),
    'nothing like it': ('xyz/**', MET, None),
    'names that exist, elsewhere': ('dec/gln_0/**', MET, None),
}


@pytest.mark.parametrize('row', MEANT.values(), ids=MEANT)
def test_did_you_mean(row):
    pattern, met, meant = row
    lines = str(unused_filter(as_filter(pattern), met, ENC)).splitlines()
    found = [line for line in lines if line.startswith('Did you mean')]
    assert found == ([] if meant is None else [f"Did you mean '{meant}'?"])
    if meant is not None:
        assert any(map(as_filter(meant), met))


def glm_biases(path):
    """Not 'dec/bias'."""
    return path.startswith('glm')


UNUSED: dict[str, tuple[Any, list[Path], tuple[str, ...] | None, str]] = {
    'in a module': (
        'params/gln_0/**',
        MET,
        ENC,
        "Glob('params/gln_0/**') selected nothing: it matches none of the 5 "
        'variables.\n'
        "Paths are relative to the module at 'enc'.\n"
        'Nearest paths:\n'
        "  'gln_0/bias'\n"
        "  'gln_0/kernel'\n"
        "  'gln_1/kernel'\n"
        "Hint: paths do not start with the collection 'params'. Write 'gln_0/**'.\n"
        "If an empty selection is meant, pass unused='ignore'.",
    ),
    'at top level': (
        re.compile('glm_0/.*'),
        TOP[:1],
        (),
        "Regex(re.compile('glm_0/.*')) selected nothing: it matches none of the 1 "
        'variable.\n'
        'Nearest paths:\n'
        "  'gln_0/kernel'\n"
        "If an empty selection is meant, pass unused='ignore'.",
    ),
    'nothing there': (
        'params/gln/**',
        [],
        None,
        "Glob('params/gln/**') selected nothing: there are no variables.\n"
        "If an empty selection is meant, pass unused='ignore'.",
    ),
    'a function with a name in it': (
        glm_biases,
        TOP,
        None,
        f'Predicate(glm_biases at test_filters.py:'
        f'{glm_biases.__code__.co_firstlineno}) selected nothing: it matches none '
        'of the 3 variables.\n'
        'Nearest paths:\n'
        "  'gln_0/kernel'\n"
        "  'norm/mean'\n"
        "  'dec/bias'\n"
        "If an empty selection is meant, pass unused='ignore'.",
    ),
    'objects': (
        Predicate(Named('kernel')) & Named('missing'),
        MET,
        None,
        'Predicate(Named) & Predicate(Named) selected nothing: it matches none of the '
        '5 variables.\n'
        'Paths look like this:\n'
        "  'gln_0/kernel'\n"
        "  'gln_0/bias'\n"
        "  'gln_1/kernel'\n"
        'Hint: its parts match something each, and no variable is in all of them.\n'
        "If an empty selection is meant, pass unused='ignore'.",
    ),
    'a function without names': (
        Named('missing').method,
        TOP,
        None,
        f'Predicate(Named.method at test_filters.py:'
        f'{Named.method.__code__.co_firstlineno}) selected nothing: it matches none '
        'of the 3 variables.\n'
        'Paths look like this:\n'
        "  'gln_0/kernel'\n"
        "  'dec/bias'\n"
        "  'norm/mean'\n"
        "If an empty selection is meant, pass unused='ignore'.",
    ),
}


@pytest.mark.parametrize('row', UNUSED.values(), ids=UNUSED)
def test_unused_message(row):
    where, met, owner, message = row
    error = unused_filter(as_filter(where), met, owner)
    assert str(error) == message
    assert isinstance(error, ValueError)


def test_a_tree_looks_for_what_is_true():
    tree = BoolTree({'b': {'x': False}, 'a': {'a': True}})
    lines = str(unused_filter(tree, [path('xx/xx'), path('b/x')], None)).splitlines()
    assert lines[1:-1] == ['Nearest paths:', "  'b/x'", "  'xx/xx'"]


def test_same_names_in_two_collections_are_two_variables():
    met = [path('norm/scale'), path('norm/scale', 'batch_stats')]
    lines = str(unused_filter(as_filter('glm'), met, None)).splitlines()
    assert lines[0].endswith('none of the 2 variables.')
    assert lines[2:-1] == ["  'norm/scale'"]


@pytest.mark.parametrize(
    'error',
    [
        unused_filter(as_filter('glm'), TOP, None),
        errors.FilterValueError('x'),
        errors.FilterTypeError('x'),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pickle(error):
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert str(twin) == str(error)
    assert isinstance(error, errors.FlaxSGError)


@pytest.mark.parametrize(
    ('names', 'shown'),
    [
        ('ba', '<m/a, m/b>'),
        ('cba', '<m/a, m/b, m/c>'),
        ('dcba', '<m/a, m/b, m/c, and 1 more>'),
        ('edcba', '<m/a, m/b, m/c, and 2 more>'),
    ],
)
def test_names_are_shown_by_the_first_three(names, shown):
    chosen = Names(frozenset(('params', ('m', name)) for name in names))
    assert repr(chosen) == shown
    error = find_unused(chosen, set(), [path('m/a'), path('m/b', 'cache')], None, True)
    absent = len(names) - 1
    assert f' {absent} value{"s" * (absent > 1)} without' in str(error)

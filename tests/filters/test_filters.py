"""Filters: what they select, how they combine and compare, and what is refused."""

import collections
import copy
import functools
import itertools
import operator
import pickle
import re
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flax_sg as sg
from flax_sg import errors, linen
from flax_sg.filters import (
    And,
    BoolTree,
    Collection,
    Constant,
    Filter,
    Glob,
    Or,
    Predicate,
    Regex,
    as_filter,
)
from flax_sg.filters.expressions import decide
from flax_sg.filters.paths import Path
from flax_sg.filters.unused import find_unused


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
    *('w[0,0] 1x0e', 'a[b', 'a[]', 'a[z-a]', 'w?', 'w*', '{x,y}/z', 'a.b.c', 'a\\b'),
    '/cell/w[0]',
]
OF_A_PATH_ONLY = ['w**2', '!w', '[!w]', '*', '**', 'a/**', '[ab]/!c']


@pytest.mark.parametrize('text', LITERALS + OF_A_PATH_ONLY)
def test_a_path_means_itself_alone(text):
    this = path(text)
    chosen = as_filter(this)
    # What the same characters would mean in a glob.
    others = [path(p) for p in ('w0 1x0e', 'w, 1x0e', 'wx', 'w', 'wab2', 'a', 'a/x/y')]
    alone = [chosen]
    if text in LITERALS:  # A str that is a path means that path too.
        alone.append(as_filter(text))
        assert alone[1] == Glob(text) and repr(alone[1]) == f'Glob({text!r})'
    for one in alone:
        assert one(this) is True and (~one)(this) is False
        assert not any(map(one, PATHS))
        assert pickle.loads(pickle.dumps(one)) == one
    assert not any(map(chosen, others))
    assert eval(repr(chosen)) == chosen == as_filter(path(text, 'batch_stats'))
    either = as_filter([this, 'scale'])
    assert [p for p in (this, *PATHS) if either(p)] == [this, PATHS[3]]


class Named:
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

K, B, D, S, W = PATHS
FROZEN = flax.core.freeze({'gln': np.True_, 'dec': np.False_, 'scale': np.False_})
SELECTIONS: list[tuple[Any, list[Path]]] = [
    ('gln/*', [K, B]),
    (path('gln/kernel'), [K]),
    (np.str_('scale'), [S]),
    ('**', [K, B, D, S, W]),
    (re.compile('gln/.*'), [K, B]),
    (re.compile('kernel'), []),
    (re.compile('SCALE', re.I), [S]),
    (lambda p: p.module == '', [S]),
    (is_kernel, [K, D]),
    (lambda p: np.bool_(p == 'scale'), [S]),
    (Named('bias'), [B]),
    (Named('bias').method, [B]),
    (functools.partial(lambda n, p: p.name == n, 'bias'), [B]),
    ({'scale'}.__contains__, [S]),
    (lambda path, name='kernel': path.name == name, [K, D]),
    (lambda path, *, name='kernel': path.name == name, [K, D]),
    (lambda *paths: paths[0].name == 'kernel', [K, D]),
    (functools.lru_cache(is_kernel), [K, D]),
    (operator.methodcaller('endswith', '/kernel'), [K, D]),
    (True, PATHS),
    (False, []),
    (np.False_, []),
    ({'gln': {'kernel': True, 'bias': False}, 'dec': True, 'scale': 0 > 1}, [K, D]),
    ({'gln': True, 'dec': False, 'scale': True}, [K, B, S]),
    (FROZEN, [K, B]),
    (['scale', re.compile('dec.*')], [D, S]),
    ((is_kernel, 'scale'), [K, D, S]),
    ({'scale', 'gln/bias'}, [B, S]),
    ({'scale': 1}.keys(), [S]),
    (collections.deque(['scale']), [S]),
    ([['scale'], ['gln/bias', []]], [B, S]),
    ([], []),
    (~Glob('**/kernel'), [B, S, W]),
    (Glob('gln/*') & is_kernel, [K]),
    (Glob('scale') | {'gln': True, 'dec': False, 'scale': False} | [], [K, B, S]),
]


@pytest.mark.parametrize('row', SELECTIONS)
def test_selects(row):
    where, expected = row
    chosen = as_filter(where)
    for p in PATHS:
        assert chosen(p) is (p in expected) and (~chosen)(p) is (p not in expected)
        matched: set[Filter] = {Glob('x')}
        assert decide(chosen, p, matched) == chosen(p)
        assert matched == {Glob('x'), *(atom for atom in chosen.atoms if atom(p))}


# Values

A, B, C = Glob('a'), Glob('b'), Glob('c/**')


EQUAL: list[tuple[Any, Any]] = [
    ('a', Glob('a')),
    (re.compile('a'), Regex(re.compile('a'))),
    (np.True_, Constant(True)),
    ({'a': True}, BoolTree({'a': True})),
    ([], Constant(False)),
    (set(), Constant(False)),
    (['a', 'b'], Or((Glob('a'), Glob('b')))),
    (re.compile('a', re.I), re.compile('a', re.I)),
    (is_kernel, Predicate(is_kernel)),
    (NAMED.method, NAMED.method),
    (UNHASHABLE, UNHASHABLE),
    ({'a': True, 'b': False}, {'b': False, 'a': True}),
    ({'a': True}, flax.core.freeze({'a': np.True_})),
    ({'a': True, 'b': {}}, {'a': True}),
    (['a', 'b'], ['b', 'a']),
    (A & B, B & A),
    ((A | B) | C, A | (B | C)),
    ([A, B, A], [A, B]),
    (~~(A & B), A & B),
    (~as_filter(True), False),
    (np.True_ & A, And((Constant(True), A))),
    (A & ['b', 'c/**'], And((A, B | C))),
    ({'b': True} | A, Or((BoolTree({'b': True}), A))),
    (is_kernel & A, And((Predicate(is_kernel), A))),
    (A | is_kernel, Or((A, Predicate(is_kernel)))),
]

UNEQUAL: list[tuple[Any, Any]] = [
    ('a', 'b'),
    ('a', re.compile('a')),
    (re.compile('a'), re.compile('a', re.I)),
    (lambda p: p == 'a', lambda p: p == 'a'),
    (Named('a').method, Named('a').method),
    (UNHASHABLE, Unhashable('kernel')),
    ({'a': True}, {'a': False}),
    ({'a': True}, {'b': True}),
    ({'a': {'b': True}}, {'a': True}),
    (A & B, A | B),
    (A, ~A),
    (True, False),
    (A | B, A | B | C),
    ('a', lambda p: p == 'a'),
]


@pytest.mark.parametrize('row', EQUAL)
def test_equal(row):
    one, other = map(as_filter, row)
    assert sg.where(row[0]) == one == other and hash(one) == hash(other)
    with pytest.raises(AttributeError):  # Filters are immutable.
        one.pattern = 'b'  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize('row', UNEQUAL)
def test_unequal(row):
    one, other = map(as_filter, row)
    assert one != other != row[0]


@pytest.mark.parametrize(
    'chosen',
    [
        (A & ~B) | Regex(re.compile('x', re.I)) | BoolTree({'a': {'b': True}}),
        Constant(True),
        Predicate(is_kernel) & Glob('**'),
    ],
)
def test_pickles(chosen):
    hash(chosen)  # A hash that was kept would be wrong in another process.
    twin = pickle.loads(pickle.dumps(chosen))
    assert twin == chosen == copy.deepcopy(chosen)
    assert (repr(twin), hash(twin)) == (repr(chosen), hash(chosen))
    assert b'_hash' not in pickle.dumps(chosen)


def test_where_of_several_means_any_of_them():
    trees: list[Any] = [{'gln': True, 'dec': False}, {'gln': False, 'dec': True}]
    assert sg.where('gln/**', 'dec/**') == Or((Glob('gln/**'), Glob('dec/**')))
    # In a list, trees of bools would be one tree.
    either = sg.where(*trees)
    assert [either(Path(f'{name}/kernel')) for name in ('gln', 'dec')] == [True, True]
    assert either == Or(tuple(map(BoolTree, trees)))
    assert sg.where('gln/**', is_kernel)(Path('dec/kernel')) is True


NAMES = st.sampled_from([A, B, C])


def joined(inner: Any) -> Any:
    pairs = [st.builds(fn, inner, inner) for fn in (operator.and_, operator.or_)]
    return st.one_of(*pairs, st.builds(operator.invert, inner))


EXPRESSIONS = st.recursive(NAMES | st.booleans().map(Constant), joined, max_leaves=8)
ALL_RESULTS = [
    {atom for atom, took in zip((A, B, C), values, strict=True) if took}
    for values in itertools.product([False, True], repeat=3)
]


def tied(took: set[Any]) -> Path:
    """A weight that has the path of each of these globs."""
    weight = path('tied')
    weight.also = lambda: (path(glob.pattern) for glob in took)
    return weight


def table(chosen: Filter) -> list[bool]:
    """The value of an expression for every value of its atoms."""
    return [chosen(tied(took)) for took in ALL_RESULTS]


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


def test_decide_asks_each_function_once():
    asked = []

    def spy(path):
        asked.append(path)
        return False

    for chosen in (as_filter(spy), ~as_filter(spy), (A & spy) | (B & spy) | spy):
        asked.clear()
        decide(chosen, PATHS[0], set())
        assert asked == [PATHS[0]]


HERE = 'here'


def with_default(path: Any, name: str = 'a') -> bool:
    return path.startswith(name)


def of_cell(name: str) -> Any:
    return lambda path: path.startswith(name)


# A function that reads the path alone is a value; of others the answers are asked.
VALUES: list[tuple[Any, bool]] = [
    (lambda path: path.startswith('a'), True),
    (lambda path: path.array is not None and path.array.ndim > 1, True),
    (lambda path: [part for part in path.parts if part != path.name] == ['a'], True),
    (lambda path: path.startswith(HERE), False),
    (lambda path: any(part == 'a' for part in path.parts), False),  # `any` is a name.
    (lambda path: (lambda: HERE)() == path, False),
    (lambda path: __import__('time').time() > 0, False),
    (of_cell('a'), False),
    (with_default, False),
    (functools.partial(with_default, name='b'), False),
    (Named('a').method, False),
    (Named('a'), False),
    (operator.methodcaller('startswith', 'a'), False),
]


@pytest.mark.parametrize('row', VALUES)
def test_a_function_of_the_path_alone_is_a_value(row):
    fn, is_value = row
    assert ('code' in as_filter(fn).needs) is not is_value
    assert ('code' in (~as_filter(fn) | A).needs) is not is_value


def test_a_long_list_of_paths_is_looked_up(monkeypatch):
    names = [f'layer_{n}/w[{n}]' if n % 2 else f'layer_{n}/w' for n in range(200)]
    paths = [path(name) for name in names]
    asked, matches = list[Path](), Glob.matches

    def spy(glob, path):
        asked.append(path)
        return matches(glob, path)

    monkeypatch.setattr(Glob, 'matches', spy)
    for where in (names[::2], paths):
        chosen, matched = as_filter(where), set()
        said = [decide(~~chosen, p, matched) for p in paths]
        assert said == [str(p) in where for p in paths]
        assert matched == set(chosen.atoms)
    # A variable's own glob is asked, and none of the hundreds of others.
    assert len(asked) <= 2 * len(paths)


def test_a_path_in_a_list_takes_the_leaves_of_the_variable():
    inner, other = (Path.of('params', ('a', name, '0'), inner=1) for name in 'wv')
    matched: set[Filter] = set()
    chosen = as_filter(['a/w', 'b/w'])
    assert [decide(chosen, p, matched) for p in (inner, other)] == [True, False]
    assert matched == {Glob('a/w')}
    assert as_filter(['a/w/0', 'b'])(inner) is True


# What is refused: see errors/filter_errors.py


# Trees of bools


def test_a_tree_answers_for_whole_variables_inside_its_owner():
    assert not BoolTree({'cell': True})(path('/cell/w'))
    box = nn.Partitioned(True, names=(None,))
    assert BoolTree({'kernel': box}) == BoolTree({'kernel': True})
    assert not BoolTree({'pair': (True, np.False_)})(path('pair/1'))
    said = "has no answer for the variable 'gln/b' of the collection 'params'"
    with pytest.raises(errors.ArgumentValueError, match=said):
        BoolTree({'gln': {'b': {'mean': True}}})(path('gln/b'))


def test_every_leaf_of_a_tree_is_a_variable():
    for tree, expected in (
        ({'gln': True, 'enc': {'a': True, 'b': False}}, "'enc/a' and 1 more, which"),
        ({'glm': False}, "'glm', which is no variable (nearest: 'gln/"),
        ({'cell': True}, "'cell', which"),  # It is outside of the owner.
        ({'scale': {'mean': True}, 'gln': True}, "'scale/mean', which"),
    ):
        error = find_unused(BoolTree(tree), set(), PATHS, None, True)
        assert str(error).startswith(f'A tree of bools has a value for {expected}')
    tree = {'gln': {'kernel': True, 'bias': False}, 'dec': True}
    assert find_unused(BoolTree(tree), set(), PATHS, None, True) is None


# What selects nothing


def glm(path):
    return path.startswith('glm')


NET = ['encoder/fc/kernel', 'encoder/fc/bias', 'head/kernel', 'head/bias']

# What people write for some variables, the variables, and what the error says.
MISTAKES: list[tuple[Any, list[str], str]] = [
    ('params/head/**', NET, "Leave out the collection: 'head/**'."),
    ('params/head', NET, "Leave out the collection: 'head/**'."),
    ('params/encodr/**', NET, "Leave out the collection: 'encoder/**'."),
    ('head/.*', NET, "A str is a glob: write re.compile('head/.*')."),
    ('norm/mean', NET, 'Parameters alone are looked at: for running averages write'),
    ('head/(w|kernel)', NET, "A str is a glob: write re.compile('head/(w|kernel)')."),
    ('/head/kernel', NET, "Did you mean 'head/kernel'?"),
    (('encoder', 'kernel'), NET, "Did you mean 'encoder/**'?"),
    ('head', NET, "Did you mean 'head/**'?"),
    ('haed', NET, "Did you mean 'head/**'?"),
    ('encoder/**', ['encoder_0/w', 'encoder_1/w'], "Did you mean 'encoder_*/**'?"),
    (re.compile('enc/.*'), ['enc_0/w', 'enc_1/w'], "Did you mean 'enc_.*/.*'?"),
    # A module of a list, as PyTorch, Python and a person name it.
    ('blocks/0/**', ['blocks_0/w', 'blocks_1/w'], "Did you mean 'blocks_0/**'?"),
    ('blocks[0]', ['blocks_0/w', 'blocks_1/w'], "Did you mean 'blocks_0/**'?"),
    ('blocks.1.w', ['blocks_0/w', 'blocks_1/w'], "Did you mean 'blocks_1/w'?"),
    ('net/blocks/*/w', ['net/blocks_0/w'], "Did you mean 'net/blocks_*/w'?"),
    ('laeyr_7', [f'layer_{n}' for n in range(201)], "Did you mean 'layer_7'?"),
    ('fc/**', NET, "Nearest: 'encoder/fc/bias', 'encoder/fc/kernel'"),
    ('encoder.fc.kernel', NET, "Names are joined by '/': 'encoder/fc/kernel'."),
    ('*fc*', NET, "'*' matches within one name: '**/*fc*/**'."),
    ('encoder.fc.*', NET, "Names are joined by '/': 'encoder/fc/**'."),
    ('encoder.fc', NET, "Names are joined by '/': 'encoder/fc/**'."),
    ('head.kernel', NET, "Names are joined by '/': 'head/kernel'."),
    ('head.*', NET, "A str is a glob: write re.compile('head.*')."),
    ('head_0/**', NET, 'A pattern matches whole paths'),
    ('!head/**', NET, 'A pattern matches whole paths'),
    # Nothing that is left names something, or it is no pattern.
    ('decodr_7/*/**', NET, 'A pattern matches whole paths'),
    ('(', NET, 'A pattern matches whole paths'),
    ('(.kernel', NET, 'A pattern matches whole paths'),
    ('a..b', NET, 'A pattern matches whole paths'),
]


@pytest.mark.parametrize(('where', 'names', 'line'), MISTAKES)
def test_a_mistake_that_many_make_is_told(where, names, line):
    paths = [Path.of('params', tuple(name.split('/'))) for name in names]
    found = as_filter(where)
    error = find_unused(found, set(), paths, None, any(map(found, paths)))
    [told] = [text for text in str(error).splitlines() if text.startswith(line)]
    # What is advised fits.
    kind = re.compile if isinstance(where, re.Pattern) else str
    for advised in re.findall(r"(?:mean|collection:) '([^']+)'", told):
        assert any(map(as_filter(kind(advised)), paths))


@pytest.mark.parametrize(
    ('where', 'line'),
    [
        ('inner/enc/**', "Paths begin at the module of the block: 'enc/**'."),
        ('inner/enc/kernel', "Paths begin at the module of the block: 'enc/kernel'."),
        (re.compile('inner/enc/.*'), "Paths begin at the module of the block: 'enc/.*"),
        ('out/**', "It is outside of the module of the block: '**/out/**'."),
        (
            re.compile('out/.*'),
            "It is outside of the module of the block: '.*/out/.*'.",
        ),
        # The front is no text.
        ('in*/enc/**', 'A pattern matches whole paths'),
        ('inner/dec/**', 'A pattern matches whole paths'),
    ],
)
def test_a_path_from_the_root_is_told(where, line):
    class Inner(nn.Module):
        out: Any

        @nn.compact
        def __call__(self, x):
            with linen.stop_gradient(where):
                return self.out(nn.Dense(2, name='enc')(x))

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Inner(nn.Dense(2, name='out'), name='inner')(x)

    with pytest.raises(errors.UnusedFilterError) as caught:
        Outer().init(jax.random.key(0), jnp.ones((1, 2)))
    assert any(text.startswith(line) for text in str(caught.value).splitlines())
    if "'" in line:  # What is advised is right.
        write = line.split("'")[1]
        where = re.compile(write) if isinstance(where, re.Pattern) else write
        Outer().init(jax.random.key(0), jnp.ones((1, 2)))


TWELVE = [f'layer_{n}/w' for n in range(13)]
PADDED = [f'l{n:02}' for n in range(8, 12)]


@pytest.mark.parametrize(
    ('text', 'takes'),
    [
        ('layer_{0..11}/w', TWELVE[:12]),
        ('layer_{11..0}/**', TWELVE[:12]),
        ('layer_{2..2}/*', TWELVE[2:3]),
        ('layer_{0..1}{0..2}/w', TWELVE[10:]),
        ('layer_{00..11}/w', TWELVE[10:12]),
        ('layer_{3,10..11}/w', TWELVE[3:4]),
        ('layer_{3,10,11}/w', [TWELVE[3], *TWELVE[10:12]]),
        ('{layer_1,layer_12}/**', [TWELVE[1], TWELVE[12]]),
        ('layer_{[0-2],1?}/w', [*TWELVE[:3], *TWELVE[10:]]),
        ('{layer_4/w,layer_5/*,**/x}', TWELVE[4:6]),
        ('layer_1{,2}/w', [TWELVE[1], TWELVE[12]]),
        ('layer_[0-9]/w', TWELVE[:10]),
        ('layer_{1}/w', []),
        (r'layer_\{0..11}/w', []),
        (r'layer_{1,2\}/w', []),
        ('l{08..11}', PADDED),
    ],
)
def test_numbers_and_alternatives_in_braces(text, takes):
    glob = as_filter(text)
    assert [p for p in [*TWELVE, *PADDED, 'l8'] if glob(path(p))] == takes
    assert pickle.loads(pickle.dumps(glob)) == glob and repr(glob) == f'Glob({text!r})'
    # A variable whose path it is means itself.
    assert glob(path(text))


STACK = {'layers': {'w': jnp.ones((3, 2)), 'b': jnp.ones(3)}, 'head': jnp.ones(2)}


@pytest.mark.parametrize('where', ['layers/0/**', 'layers_2/w'])
def test_one_layer_does_not_mean_the_stack(where: str):
    with pytest.raises(errors.UnusedFilterError, match='A pattern matches whole paths'):
        sg.partition(STACK, where)


BRACES = [
    ('{encoder,haed}/**', "'haed' in Glob('{encoder,haed}/**') matches none of the 4"),
    ('{encoder,haed}/**', "Did you mean 'head/**'?"),
    ('{encoder, head}/**', "no spaces around: '{encoder,head}/**'."),
    ('{encoder,head}/{fc/kernel,nothing}', "'head' in Glob"),
    ('{decoder,head}/{kernel,bias}', "'decoder' in Glob"),
    ('**/{kernel,scale}', "'scale' in Glob"),
]


@pytest.mark.parametrize(
    'where', ['{a,{b,c}}', 'x/{l_{0..3},head}', '{a,{b,{c,d}}}', '{{a,b},{c,d}}/w']
)
def test_braces_in_braces_are_refused(where: str):
    with pytest.raises(errors.ArgumentValueError, match='braces in braces'):
        as_filter(where)
    # What follows a backslash is text.
    as_filter(where.replace('{', r'\{'))


@pytest.mark.parametrize(('where', 'said'), BRACES)
def test_each_name_in_braces_is_checked(where: str, said: str):
    tree = flax.traverse_util.unflatten_dict(dict.fromkeys(NET, 1.0), sep='/')
    for chosen in where, [where, '**'], ~as_filter(where):
        with pytest.raises(errors.UnusedFilterError) as info:
            sg.partition(tree, chosen)
        assert said in str(info.value)
    sg.partition(tree, where, unused='ignore')


def test_right_braces_are_taken():
    tree = flax.traverse_util.unflatten_dict(dict.fromkeys(NET, 1.0), sep='/')
    sg.partition(tree, '{encoder/fc,head}/{kernel,bias}')
    sg.partition(tree, '{encoder/fc/kernel,head/*}')
    sg.partition(tree, '{encoder,head}/{fc/kernel,bias}')  # Not each pair is there.


def test_a_collection_is_named_in_a_tree_of_several():
    agent = {'params': {'w': 1.0, 'b': 2.0}, 'target': {'w': 3.0, 'b': 4.0}}
    target = Collection('target')
    assert repr(target & 'w') == "Collection('target') & Glob('w')"
    assert target == Collection('target') != Collection('params')
    assert sg.mask(agent, trained=target & 'w') == {
        'params': {'w': False, 'b': False},
        'target': {'w': True, 'b': False},
    }
    grads = sg.grad(lambda a: a['params']['w'] * a['target']['w'], wrt=~target)(agent)
    assert grads['params']['w'] == 3.0
    assert grads['target'] == {'w': sg.ABSENT, 'b': sg.ABSENT}
    with pytest.raises(errors.UnusedFilterError, match="are 'params', 'target'"):
        sg.partition(agent, Collection('targt'))
    for where in 'target', 'target/**', ~as_filter('target/*'):
        with pytest.raises(errors.UnusedFilterError, match=r"Collection\('target'\)"):
            sg.partition(agent, where)

"""Path, globs on paths, and the nearest paths."""

import dataclasses
import enum

import pytest

from flax_sg.errors import ArgumentValueError
from flax_sg.errors.nearest import nearest
from flax_sg.filters import as_filter
from flax_sg.filters.paths import Path
from flax_sg.filters.patterns import Glob, glob_regex
from tests.helpers import oracle

# Path

ATTRIBUTES = ('parts', 'name', 'module', 'absolute', 'outside')

# absolute path, owner: the path, its module, whether it is outside of the owner
PATHS = [
    ('enc/gln/kernel', 'enc', 'gln/kernel', 'gln', False),
    ('enc/scale', 'enc', 'scale', '', False),
    ('enc/kernel', '', 'enc/kernel', 'enc', False),
    ('scale', '', 'scale', '', False),
    ('cell/a/w', 'enc', '/cell/a/w', '/cell/a', True),
    ('scale', 'enc', '/scale', '/', True),
    ('enc2/w', 'enc', '/enc2/w', '/enc2', True),
    ('a/kernel', 'a/b', '/a/kernel', '/a', True),
    ('enc', 'enc', '/enc', '/', True),  # A variable with the name of the owner.
]


def names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split('/')))


@pytest.mark.parametrize('row', PATHS)
def test_attributes_of_a_path_and_its_copies(row):
    absolute, owner, text, module, outside = row
    made = Path.of('cache', names(absolute), names(owner))
    expected = (names(text), names(text)[-1], module, absolute, outside)
    for path in oracle.copies(made):
        assert (type(path), str(path), path.collection) == (Path, text, 'cache')
        assert tuple(getattr(path, name) for name in ATTRIBUTES) == expected


def test_it_is_a_str():
    path, text = Path.of('params', ('gln', 'kernel')), 'gln/kernel'
    assert isinstance(path, str) and path == text and path.startswith('gln')
    assert (hash(path), repr(path)) == (hash(text), repr(text))
    assert type(path[:3]) is str


# Globs

# pattern, paths that fit, paths that do not
GLOBS = {
    'a whole path': ('gln/kernel', ['gln/kernel'], ['gln', 'x/gln/kernel', 'gln/k']),
    'no prefix': ('gln', ['gln'], ['gln2', 'my_gln', 'gln/kernel']),
    'star within one component': ('*/kernel', ['a/kernel'], ['kernel', 'a/b/kernel']),
    'star at the end': ('gln_*', ['gln_0', 'gln_'], ['gln', 'gln_0/kernel']),
    'star in the middle': ('a*c', ['ac', 'abc', 'abbc'], ['ab', 'a/c', 'abcd']),
    'star in two places': ('*a*', ['a', 'bab'], ['b', 'a/a']),
    'question mark': ('gln_?', ['gln_0'], ['gln_', 'gln_10', 'gln_/']),
    'set': ('gln_[01]', ['gln_0', 'gln_1'], ['gln_2', 'gln_X', 'gln_', 'gln_[01]']),
    'range': ('gln_[0-9]', ['gln_0', 'gln_9'], ['gln_a', 'gln_-']),
    'not in a set': ('gln_[!01]', ['gln_2', 'gln_!'], ['gln_0', 'gln_1', 'gln_']),
    'not in a set, with a hat': ('a[^b]', ['ac', 'a^'], ['ab', 'a/']),
    'bracket in a set': ('a[]]', ['a]'], ['a[', 'a']),
    'set of characters with a meaning': (r'a[[^&~|]', ['a[', 'a^', 'a~'], ['a-', 'a']),
    'escape in a set': (r'a[\]\d\-]', ['a]', 'ad', 'a-'], ['a1', 'a\\']),
    'a set never takes a slash': ('a[+-9]b', ['a+b', 'a.b'], ['a/b']),
    'half a bracket': ('a[b/[!/*', ['a[b/[!/c'], ['ab/!/c', 'a[b/!/c']),
    'empty brackets': ('a[]/*', ['a[]/b'], ['a/b']),
    'a backward range': ('a[z-b]*', ['a[z-b]', 'a[z-b]c'], ['ab', 'az', 'a-']),
    'escaped star': (r'a\*', ['a*'], ['ab', 'a', r'a\b']),
    'escaped mark and bracket': (r'\?\[0]', ['?[0]'], ['a0', 'a[0]']),
    'escaped exclamation mark': (r'\!a', ['!a'], ['a', r'\!a']),
    'characters with a meaning elsewhere': ('a.b+(c)$', ['a.b+(c)$'], ['axb+(c)$']),
    'double star at the end': ('gln/**', ['gln/a', 'gln/a/b'], ['gln', 'gln2/a']),
    'double star in front': ('**/k', ['k', 'a/k', 'a/b/k'], ['ak', 'k/a']),
    'double star within': ('a/**/k', ['a/k', 'a/b/k', 'a/b/c/k'], ['k', 'ak', 'a/bk']),
    'double star alone': ('**', ['', 'a', 'a/b', 'a/b/c'], []),
    'double star and star': ('**/*', ['a', 'a/b', 'a/b/c'], []),
    'star and double star': ('*/**', ['a/b', 'a/b/c'], ['a']),
    'double star twice': ('**/a/**', ['a/b', 'x/a/b', 'x/a/b/c'], ['a', 'x/a', 'ba/c']),
    'neighbouring double stars': ('a/**/**', ['a/b', 'a/b/c'], ['a']),
    'only inside the owner': ('*/kernel', ['a/kernel'], ['/kernel', '/a/kernel']),
    'only inside, by set': ('[!a]/kernel', ['b/kernel'], ['/kernel', '//kernel']),
    'outside the owner': ('/cell/*', ['/cell/kernel'], ['cell/kernel', '/cell']),
    'all outside the owner': ('/**', ['/kernel', '/cell/kernel'], ['kernel', 'a/k']),
    'outside, at any depth': ('/**/k', ['/k', '/a/k'], ['k', 'a/k']),
    'double star outside': ('**/kernel', ['/kernel', '/a/kernel', 'kernel'], ['/a']),
    'everything outside too': ('**', ['/a', '/a/b', 'a'], []),
    'a name of one letter': ('X', ['X'], ['a', 'x', 'XX']),
    'a name that is blank': (' ', [' '], ['a', '']),
    'a name with a newline': ('a*', ['a\n', 'a\nb'], ['\na']),
}


@pytest.mark.parametrize('row', GLOBS.values(), ids=GLOBS)
def test_glob(row):
    pattern, fitting, others = row
    fullmatch = glob_regex(pattern).fullmatch
    assert [path for path in [*fitting, *others] if fullmatch(path)] == fitting


@pytest.mark.parametrize(
    'pattern',
    ['', '/', 'Xs/dense/', 'gln//kernel', '//gln', 'gln**', 'x/***', 'a/**, b/**'],
)
def test_bad_glob(pattern):
    with pytest.raises(ArgumentValueError, match=r'^No path fits the glob ') as caught:
        Glob(pattern)
    assert repr(pattern) in str(caught.value)


def test_a_long_glob_is_fast():
    # '(.*/)*' in front of '(.*/)*' would take longer than the universe exists.
    pattern = '/'.join(['**'] * 40 + ['x'])
    assert not glob_regex(pattern).fullmatch('/'.join('a' * 40))


# nearest


def test_nearest_is_ordered_distinct_and_bounded():
    paths = ['b/x', 'gln/a', 'gln/a', 'gln/a/deeper']
    assert nearest('gln/a', paths) == ['gln/a', 'gln/a/deeper', 'b/x']
    assert nearest('gln/a', paths, 1) == ['gln/a']
    assert nearest('gln/a', []) == []
    for pattern in ('*', '/**'):  # Without a name all are equally near.
        assert nearest(pattern, paths, 2) == ['b/x', 'gln/a']


@pytest.mark.parametrize('text', ['aa/kernel', '/cell/w', 'w', 'w[0,0] 1x0e', 'a//b'])
def test_a_path_that_is_written_is_copied_as_it_is(text):
    path = Path(text)
    names = text.removeprefix('/').split('/')
    assert (path, path.parts, path.name) == (text, tuple(names), names[-1])
    assert path.module == text.rpartition('/')[0]

    @dataclasses.dataclass
    class Config:
        where: Path

    for again in *oracle.copies(path), dataclasses.asdict(Config(path))['where']:
        assert (type(again), again, again.key) == (Path, path, path.key)


def test_a_member_of_an_enum_is_its_text():
    member = enum.Enum('Freeze', {'BACKBONE': 'backbone/**'}, type=str).BACKBONE
    assert as_filter(member) == as_filter('backbone/**')
    assert as_filter([member, 'head']) == as_filter(['backbone/**', 'head'])

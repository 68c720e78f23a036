"""Path, globs on paths, and the nearest paths."""

import copy
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flax_sg.errors import FilterValueError
from flax_sg.filters.paths import Path, glob_regex, nearest

pytestmark = pytest.mark.every_case

# Path

ATTRIBUTES = ('str', 'parts', 'name', 'module', 'collection', 'absolute', 'outside')

# absolute path, owner; what the path is and what its attributes are
PATHS = {
    'inside a module': (
        ('enc', 'gln_0', 'dense', 'kernel'),
        ('enc',),
        'gln_0/dense/kernel',
        ('gln_0', 'dense', 'kernel'),
        'kernel',
        'gln_0/dense',
        'params',
        'enc/gln_0/dense/kernel',
        False,
    ),
    'on the owner itself': (
        ('enc', 'scale'),
        ('enc',),
        'scale',
        ('scale',),
        'scale',
        '',
        'params',
        'enc/scale',
        False,
    ),
    'at top level': (
        ('enc', 'kernel'),
        (),
        'enc/kernel',
        ('enc', 'kernel'),
        'kernel',
        'enc',
        'params',
        'enc/kernel',
        False,
    ),
    'on the root, at top level': (
        ('scale',),
        (),
        'scale',
        ('scale',),
        'scale',
        '',
        'params',
        'scale',
        False,
    ),
    'outside the owner': (
        ('cell', 'dense', 'kernel'),
        ('enc',),
        '/cell/dense/kernel',
        ('cell', 'dense', 'kernel'),
        'kernel',
        '/cell/dense',
        'params',
        'cell/dense/kernel',
        True,
    ),
    'on the root, outside the owner': (
        ('scale',),
        ('enc',),
        '/scale',
        ('scale',),
        'scale',
        '/',
        'params',
        'scale',
        True,
    ),
    'a name that begins like the owner': (
        ('enc2', 'kernel'),
        ('enc',),
        '/enc2/kernel',
        ('enc2', 'kernel'),
        'kernel',
        '/enc2',
        'params',
        'enc2/kernel',
        True,
    ),
    'half of the owner': (
        ('a', 'kernel'),
        ('a', 'b'),
        '/a/kernel',
        ('a', 'kernel'),
        'kernel',
        '/a',
        'params',
        'a/kernel',
        True,
    ),
    'at the place of the owner': (
        ('enc',),
        ('enc',),
        '/enc',
        ('enc',),
        'enc',
        '/',
        'params',
        'enc',
        True,
    ),
}


@pytest.mark.parametrize('row', PATHS.values(), ids=PATHS)
def test_attributes(row):
    absolute, owner, *expected = row
    path = Path.of('params', absolute, owner)
    found = [str(path), *(getattr(path, name) for name in ATTRIBUTES[1:])]
    assert dict(zip(ATTRIBUTES, found, strict=True)) == dict(
        zip(ATTRIBUTES, expected, strict=True)
    )


@pytest.mark.parametrize('row', PATHS.values(), ids=PATHS)
@pytest.mark.parametrize(
    'copied',
    [
        copy.copy,
        copy.deepcopy,
        *(
            lambda path, p=protocol: pickle.loads(pickle.dumps(path, p))
            for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
        ),
    ],
)
def test_copies_keep_everything(row, copied):
    absolute, owner, *_ = row
    path = Path.of('cache', absolute, owner)
    twin = copied(path)
    assert type(twin) is Path
    for name in ATTRIBUTES[1:]:
        assert getattr(twin, name) == getattr(path, name)
    assert twin == path


def test_it_is_a_str():
    path = Path.of('params', ('gln', 'kernel'))
    assert isinstance(path, str)
    assert path == 'gln/kernel'
    assert hash(path) == hash('gln/kernel')
    assert path.startswith('gln')
    assert repr(path) == "'gln/kernel'"
    assert type(path[:3]) is str


def test_from_root_forgets_the_owner():
    path = Path.of('cache', ('enc', 'dense', 'kernel'), ('enc',))
    assert path == 'dense/kernel'
    assert path.from_root() == 'enc/dense/kernel'
    assert path.from_root().collection == 'cache'


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


# pattern, and the message; the patterns that it recommends
BAD_GLOBS = {
    'empty': (
        '',
        "The glob '' is empty.\nFix: write '**' for every variable.",
    ),
    'slash at the end': (
        'gln/',
        "The glob 'gln/' ends in '/', and no path does.\n"
        "Fix: write 'gln/**' for everything inside.",
    ),
    'slash at the end of more': (
        'Xs/dense/',
        "The glob 'Xs/dense/' ends in '/', and no path does.\n"
        "Fix: write 'Xs/dense/**' for everything inside.",
    ),
    'slash alone': (
        '/',
        "The glob '/' ends in '/', and no path does.\n"
        "Fix: write '**' for everything inside.",
    ),
    'two slashes': (
        'gln//kernel',
        "The glob 'gln//kernel' has '//' in it.\nFix: write 'gln/kernel'.",
    ),
    'two slashes in front': (
        '//gln',
        "The glob '//gln' has '//' in it.\nFix: write '/gln'.",
    ),
    'double star behind a name': (
        'gln**',
        "The glob 'gln**' has '**' glued to other characters.\n"
        "Fix: write '*' within one component and '**' alone between slashes, "
        "such as 'gln*/**'.",
    ),
    'double star before a name': (
        '**kernel',
        "The glob '**kernel' has '**' glued to other characters.\n"
        "Fix: write '*' within one component and '**' alone between slashes, "
        "such as '**/*kernel'.",
    ),
    'double star behind a letter': (
        'X**',
        "The glob 'X**' has '**' glued to other characters.\n"
        "Fix: write '*' within one component and '**' alone between slashes, "
        "such as 'X*/**'.",
    ),
    'double star before a letter': (
        '**X',
        "The glob '**X' has '**' glued to other characters.\n"
        "Fix: write '*' within one component and '**' alone between slashes, "
        "such as '**/*X'.",
    ),
    'double star before a dot': (
        '**.kernel',
        "The glob '**.kernel' has '**' glued to other characters.\n"
        "Fix: write '*' within one component and '**' alone between slashes, "
        "such as '**/kernel'.",
    ),
    'double star within a name': (
        'x/a**b',
        "The glob 'x/a**b' has '**' glued to other characters.\n"
        "Fix: write '*' within one component and '**' alone between slashes, "
        "such as 'x/a*/**/*b'.",
    ),
    'double star behind a dot': (
        'gln.**',
        "The glob 'gln.**' has '**' glued to other characters.\n"
        "Fix: write '*' within one component and '**' alone between slashes, "
        "such as 'gln/**'.",
    ),
    'triple star': (
        'gln/***',
        "The glob 'gln/***' has '**' glued to other characters.\n"
        "Fix: write '*' within one component and '**' alone between slashes, "
        "such as 'gln/**'.",
    ),
    'exclamation mark': (
        '!gln/**',
        "The glob '!gln/**' begins with '!', which negates nothing here.\n"
        "Fix: write ~as_filter('gln/**'), with as_filter from flax_sg.filters.",
    ),
    'open bracket': (
        'gln_[0',
        "The glob 'gln_[0' has a '[' without its ']'.\n"
        "Fix: write 'gln_[[]0' for a bracket in a name.",
    ),
    'empty bracket': (
        'gln_[]',
        "The glob 'gln_[]' has a '[' without its ']'.\n"
        "Fix: write 'gln_[[]]' for a bracket in a name.",
    ),
    'open brackets': (
        'a[b/gln_[01]/[c[/**',
        "The glob 'a[b/gln_[01]/[c[/**' has a '[' without its ']'.\n"
        "Fix: write 'a[[]b/gln_[01]/[[]c[[]/**' for a bracket in a name.",
    ),
    'backward range': (
        'gln_[9-0]',
        "The glob 'gln_[9-0]' has a bad [...]: bad character range 9-0.",
    ),
}


@pytest.mark.parametrize('row', BAD_GLOBS.values(), ids=BAD_GLOBS)
def test_bad_glob(row):
    pattern, message = row
    with pytest.raises(FilterValueError) as caught:
        glob_regex(pattern)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)
    # What it recommends is a pattern that is accepted.
    for fix in re.findall(r"(?:write|such as|as_filter\() ?('[^' ]+')", message):
        if fix != "'*'":
            glob_regex(fix.strip("'"))


def fits(pattern: str, path: str) -> bool:
    """What a glob means, said without regular expressions."""
    wanted, names = pattern.split('/'), path.split('/')
    if path.startswith('/'):
        if not pattern.startswith('/') and wanted[0] != '**':
            return False
        names = names[1:]
    elif pattern.startswith('/'):
        return False
    return components_fit(wanted[pattern.startswith('/') :], names)


def components_fit(wanted: list[str], names: list[str]) -> bool:
    if not wanted or wanted == ['**']:
        return bool(names) == bool(wanted)
    if wanted[0] == '**':
        rests = (names[start:] for start in range(len(names) + 1))
        return any(components_fit(wanted[1:], rest) for rest in rests)
    return (
        bool(names)
        and characters_fit(wanted[0], names[0])
        and components_fit(wanted[1:], names[1:])
    )


def characters_fit(wanted: str, name: str) -> bool:
    if not wanted:
        return not name
    if wanted[0] == '*':
        rests = (name[start:] for start in range(len(name) + 1))
        return any(characters_fit(wanted[1:], rest) for rest in rests)
    if wanted[0] == '[':
        members, _, rest = wanted[1:].partition(']')
        takes = (name[:1] in members[1:]) != (members[0] == '!')
        members_fit = takes if members[0] == '!' else name[:1] in members
        return bool(name) and members_fit and characters_fit(rest, name[1:])
    first = bool(name) and wanted[0] in ('?', name[0])
    return first and characters_fit(wanted[1:], name[1:])


TOKENS = st.sampled_from(['a', 'b', '?', '*', '[ab]', '[!a]', '.'])
COMPONENTS = st.one_of(
    st.just('**'),
    st.lists(TOKENS, min_size=1, max_size=4)
    .map(lambda tokens: re.sub(r'\*+', '*', ''.join(tokens)))
    .filter(bool),
)
ROOTS = st.sampled_from(['', '', '/'])
PATTERNS = st.builds(
    lambda root, names: root + '/'.join(names),
    ROOTS,
    st.lists(COMPONENTS, min_size=1, max_size=4),
)
SEEN_PATHS = st.builds(
    lambda root, names: root + '/'.join(names),
    ROOTS,
    st.lists(st.text('ab.', min_size=1, max_size=3), min_size=1, max_size=4),
)


@given(PATTERNS, st.lists(SEEN_PATHS, min_size=1, max_size=8))
def test_globs_mean_what_the_slow_matcher_says(pattern, paths):
    fullmatch = glob_regex(pattern).fullmatch
    assert [bool(fullmatch(p)) for p in paths] == [fits(pattern, p) for p in paths]


@given(SEEN_PATHS)
def test_a_path_is_a_glob_of_itself(path):
    assert glob_regex(path).fullmatch(path)
    assert fits(path, path)


def test_a_long_glob_is_fast():
    # '(.*/)*' in front of '(.*/)*' would take longer than the universe exists.
    pattern = '/'.join(['**'] * 40 + ['x'])
    assert not glob_regex(pattern).fullmatch('/'.join('a' * 40))


# nearest

MODEL = ['gln_0/kernel', 'gln_0/bias', 'dec/dense/kernel', 'encoder/norm/scale']

NEAREST = {
    'a typo in a module': ('gnl_0/**', ['gln_0/kernel', 'gln_0/bias']),
    'a typo in a variable': ('**/kernal', ['gln_0/kernel', 'dec/dense/kernel']),
    'another case': ('Encoder/**', ['encoder/norm/scale']),
    'a part of a name': ('enc/**', ['encoder/norm/scale']),
    'a module in the middle': ('nrom/*', ['encoder/norm/scale']),
    'a regular expression': (r'^dec/dens/ker\w+$', ['dec/dense/kernel']),
    'a leading slash': ('/dec/dense', ['dec/dense/kernel']),
}


@pytest.mark.parametrize('row', NEAREST.values(), ids=NEAREST)
def test_nearest(row):
    pattern, expected = row
    assert sorted(nearest(pattern, MODEL, len(expected))) == sorted(expected)


# pattern, paths with the nearest first
ORDERED = {
    'one component': ('ab', ['gln/a', 'scale']),
    'two components': ('a/a', ['b/x', 'gln_0/bias']),
    'two components, one of them met': ('dec/x', ['b/x', 'dense']),
    'part of a longer path': ('x/gl', ['gln/a', 'b/x']),
    'a leading slash': ('/ab', ['b/x', 'gln/a']),
    'outside the owner': ('a/X/gln', ['/X/dense', 'b/x']),
    'a module deep inside': ('gln', ['x/y/gln/z', 'glnx']),
    'stars say nothing': ('gln/**', ['dense', 'b/x']),
    'more than two hundred letters': ('b' + 40 * 'layer', ['c' + 40 * 'layer', 'dec']),
}


@pytest.mark.parametrize('row', ORDERED.values(), ids=ORDERED)
def test_nearest_comes_first(row):
    pattern, expected = row
    assert nearest(pattern, expected[::-1]) == nearest(pattern, expected) == expected


@pytest.mark.parametrize('pattern', ['*', '/**'])
@pytest.mark.parametrize('paths', [['scale', 'b/x'], ['b/x', 'scale'], ['a', '/X/a']])
def test_without_a_name_all_are_equally_near(pattern, paths):
    assert nearest(pattern, paths) == paths


def test_nearest_is_ordered_distinct_and_bounded():
    paths = ['b/x', 'gln/a', 'gln/a', 'gln/a/deeper']
    assert nearest('gln/a', paths) == ['gln/a', 'gln/a/deeper', 'b/x']
    assert nearest('gln/a', paths, 1) == ['gln/a']
    assert nearest('gln/a', 'abcdef') == ['a', 'b', 'c']
    assert nearest('gln/a', []) == []
    assert nearest('**', paths, 2) == ['b/x', 'gln/a']

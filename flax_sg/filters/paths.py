"""The path of a variable as a filter sees it; globs on paths; the nearest paths."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from flax.core.frozen_dict import FrozenDict
from flax.core.meta import AxisMetadata

from flax_sg import errors

_S = TypeVar('_S', bound=str)

# What Flax nests variables in: modules, collections.
SUBTREES = (dict, FrozenDict)


class Inner(str):
    """A name within the value of a variable: a field of a dataclass, an index."""


class Classes(NamedTuple):
    """The classes of the modules that a variable lies in.

    Attributes:
        found: those that are known, that of the module which holds it first.
        complete: whether these are all.
    """

    found: tuple[type, ...]
    complete: bool


class Path(str):
    """The path of one variable: a str of names joined by '/'.

    It is relative to its *owner*, the module that opened the block; a variable that
    lies outside of it is seen under its absolute path with a leading '/'. Being a
    str, it compares, hashes and slices like one: two variables of the same name in
    two collections have equal paths and differ in ``collection`` only.

    A variable may hold a tuple or a dataclass. Each leaf of such a variable has a path
    of its own, which begins with that of the variable: ``path.variable``.

    >>> path = Path.of('params', ('enc', 'gln_0', 'dense', 'kernel'), owner=('enc',))
    >>> path
    'gln_0/dense/kernel'
    >>> path.parts, path.name, path.module
    (('gln_0', 'dense', 'kernel'), 'kernel', 'gln_0/dense')
    >>> path.collection, path.absolute
    ('params', 'enc/gln_0/dense/kernel')
    >>> Path.of('params', ('cell', 'kernel'), owner=('enc',))
    '/cell/kernel'
    """

    parts: tuple[str, ...]
    """The names of the path; of the absolute one where it lies outside the owner."""
    collection: str
    """The collection of the variable, such as 'params'."""
    is_inner: bool = False
    """Whether it is the path of a leaf within the value of a variable."""
    classes: Classes | None = None
    """The classes of the modules around it, where a filter has to know them."""
    _absolute: tuple[str, ...]
    _owner: tuple[str, ...]
    _depth: int

    @classmethod
    def of(
        cls,
        collection: str,
        absolute: tuple[str, ...],
        owner: tuple[str, ...] = (),
        classes: Classes | None = None,
    ) -> Path:
        """Returns the path of a variable as its owner sees it.

        Args:
            collection: the collection it is in.
            absolute: its names from the root of the variables tree, its own last; then
                those within its value, each an ``Inner``.
            owner: the names of the module that the path is relative to.
            classes: the classes of the modules around the variable, if they are known.
        """
        depth = len(owner)
        # A variable may have the name of a module (in another collection): the
        # variable at the owner's own path is not inside the owner.
        names = _names_of_variable(absolute)
        inside = names > depth and absolute[:depth] == owner
        parts = absolute[depth:] if inside else absolute
        self = str.__new__(cls, '/'.join(parts) if inside else '/' + '/'.join(parts))
        self.parts = parts
        self.collection = collection
        self.classes = classes
        self._absolute = absolute
        self._owner = owner
        self._depth = names
        self.is_inner = names < len(absolute)
        return self

    @property
    def variable(self) -> Path:
        """The path of the variable that the leaf belongs to; most often the same."""
        if not self.is_inner:
            return self
        names = self._absolute[: self._depth]
        return Path.of(self.collection, names, self._owner, self.classes)

    @property
    def name(self) -> str:
        """The variable's own name, such as 'kernel'."""
        return self._absolute[self._depth - 1]

    @property
    def module(self) -> str:
        """The module that holds the variable, '' for the owner itself."""
        variable = self.variable
        return variable[: -len(self.name) - 1] or ('/' if self.outside else '')

    @property
    def absolute(self) -> str:
        """The path from the root of the variables tree, without a leading '/'."""
        return '/'.join(self._absolute)

    @property
    def outside(self) -> bool:
        """Whether the variable lies outside the owner."""
        return self.parts is self._absolute and bool(self._owner)

    @property
    def key(self) -> tuple[Any, ...]:
        """All that tells it from others: paths of equal text may mean two variables."""
        return self.collection, self._absolute, self._owner, self._depth, self.classes

    def from_root(self) -> Path:
        """The path of the same variable as it is seen at top level."""
        return Path.of(self.collection, self._absolute)

    def __reduce__(self) -> Any:
        return Path.of, (self.collection, self._absolute, self._owner)


def _names_of_variable(absolute: tuple[str, ...]) -> int:
    """How many names lead to the variable; all, in a tree that is no dict of them."""
    inner = (n for n, name in enumerate(absolute) if type(name) is Inner)
    return next(inner, 0) or len(absolute)


def names_within(
    value: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[tuple[tuple[Inner, ...], Any]]:
    """Yields the leaves of a variable's value, with their names within it.

    A box (``nn.Partitioned``) is one leaf, whatever is in it.

    >>> list(names_within((1.0, {'u': 2.0}))), list(names_within(3.0))
    ([(('0',), 1.0), (('1', 'u'), 2.0)], [((), 3.0)])

    Args:
        value: any pytree.
        is_leaf: what else is one leaf.
    """
    if isinstance(value, jax.Array):  # Nearly always.
        yield (), value
        return
    pairs, _ = jax.tree_util.tree_flatten_with_path(
        value,
        is_leaf=lambda node: (
            isinstance(node, AxisMetadata) or (is_leaf is not None and is_leaf(node))
        ),
    )
    for keys, leaf in pairs:
        yield tuple(Inner(name_of(key)) for key in keys), leaf


def name_of(key: Any) -> str:
    """The name that one key of a key path of JAX has in a path."""
    for attribute in ('name', 'idx', 'key'):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def nearest(pattern: str, paths: Iterable[_S], n: int = 3) -> list[_S]:
    """Returns the n paths that look most like a pattern, the nearest first.

    What is compared is the run of components of a path that fits the pattern's
    literal part best, so that a module's name finds the variables inside it.

    >>> nearest('gl/**', ['enc/bias', 'dec/kernel', 'gln/kernel', 'gln/bias'], 2)
    ['gln/bias', 'gln/kernel']
    """
    names = re.sub(r'[^\w/]+', '', pattern).casefold().split('/')
    literal = '/'.join(filter(None, names))
    width = literal.count('/') + 1
    matcher = difflib.SequenceMatcher(b=literal, autojunk=False)

    def likeness(text: str) -> float:
        matcher.set_seq1(text.casefold())
        # 'enc' means 'encoder' rather than 'dec'.
        begins = bool(literal) and text.casefold().startswith(literal)
        return matcher.ratio() + begins

    def score(path: str) -> tuple[float, float]:
        names = path.strip('/').split('/')
        runs = ('/'.join(names[i : i + width]) for i in range(len(names)))
        return max(map(likeness, runs)), likeness(path)

    # sorted is stable: paths that look alike stay in the order they came in.
    return sorted(dict.fromkeys(paths), key=score, reverse=True)[:n]


def in_natural_order(paths: Sequence[str]) -> list[int]:
    """Returns the numbers of some paths so that 'layer_2' comes before 'layer_10'.

    Names that differ in more than numbers stay in the order in which they come.

    >>> in_natural_order(['b/10', 'b/2', 'a'])
    [1, 0, 2]
    """
    first: dict[str, int] = {}

    def key(number: int) -> list[tuple[int, tuple[int, ...]]]:
        stem, out = '', []
        for name in paths[number].split('/'):
            stem += '/' + _NUMBER.sub('0', name)
            place = first.setdefault(stem, len(first))
            out.append((place, tuple(map(int, _NUMBER.findall(name)))))
        return out

    return sorted(range(len(paths)), key=key)


_NUMBER = re.compile('[0-9]{1,99}')


def escaped(path: str) -> str:
    r"""Returns the glob that fits one path and no other.

    >>> print(escaped('w[0,0] 1x0e'))
    w\[0,0] 1x0e
    """
    return re.sub(r'[\\*?\[]|^!', r'\\\g<0>', path)


def literal(pattern: str) -> str | None:
    r"""Returns the one path that a glob fits, None if it may fit several.

    >>> print(literal(r'w\[0,0] 1x0e'), literal('gln_*/**'))
    w[0,0] 1x0e None
    """
    out: list[str] = []
    for token in _TOKEN.finditer(pattern):
        character = token['escaped'] or token['literal']
        if character is None or _is_open(token):
            return None
        out.append(character)
    return ''.join(out)


@functools.lru_cache(maxsize=1024)
def glob_regex(pattern: str) -> re.Pattern[str]:
    r"""Translates a glob on whole path components, to be used with ``fullmatch``.

    >>> bool(glob_regex('gln_*/**').fullmatch('gln_0/dense/kernel'))
    True

    Args:
        pattern: as ``flax_sg.filters.Glob`` explains.

    Raises:
        FilterValueError: if the pattern can mean nothing.
    """
    rooted = pattern.startswith('/')
    names = pattern[rooted:].split('/')
    _check_glob(pattern, names)
    # Neighbouring '**' say the same as one, and would make matching slow.
    names = [n for i, n in enumerate(names) if n != '**' or names[i - 1 : i] != ['**']]
    if names == ['**'] and not rooted:
        return re.compile('(?s:.*)')  # A tree that is one leaf has the path ''.
    # A leading '**' covers variables outside the owner too.
    out = ['/' if rooted else '/?' if names[0] == '**' else '']
    for name in names[:-1]:
        out.append('(?:[^/]+/)*' if name == '**' else _component(name, pattern) + '/')
    last = names[-1]
    out.append('(?:[^/]+/)*[^/]+' if last == '**' else _component(last, pattern))
    try:
        return re.compile(''.join(out))
    except re.error as error:
        raise _glob_error(pattern, f'has a bad [...]: {error.msg}') from None


def _glob_error(pattern: str, problem: str, fix: str = '') -> errors.FilterValueError:
    fix = f'\nFix: {fix}.' if fix else ''
    return errors.FilterValueError(f'The glob {pattern!r} {problem}.{fix}')


def check_glob(pattern: str) -> None:
    """Raises for a glob that can mean nothing.

    An open bracket is let through where nothing else makes it a glob: then it may be in
    the name of a variable.
    """
    _check_glob(pattern, pattern.removeprefix('/').split('/'))
    if '*' in pattern or '?' in pattern:
        glob_regex(pattern)


def _check_glob(pattern: str, names: Sequence[str]) -> None:
    if not pattern:
        raise _glob_error(pattern, 'is empty', "write '**' for every variable")
    if pattern.startswith('!'):
        raise _glob_error(
            pattern,
            "begins with '!', which negates nothing here",
            f'write ~as_filter({pattern[1:]!r}), with as_filter from flax_sg.filters',
        )
    if pattern.endswith('/'):
        inside = '/'.join(filter(None, names)) + '/**'
        raise _glob_error(
            pattern,
            "ends in '/', and no path does",
            f'write {inside.lstrip("/")!r} for everything inside',
        )
    if '' in names:
        fixed = re.sub('/+', '/', pattern)
        raise _glob_error(pattern, "has '//' in it", f'write {fixed!r}')
    if any('**' in name and name != '**' for name in names):
        fixed = '/'.join(map(_unglued, names))
        raise _glob_error(
            pattern,
            "has '**' glued to other characters",
            "write '*' within one component and '**' alone between slashes, such as "
            f'{fixed!r}',
        )


def _unglued(name: str) -> str:
    """What was probably meant by a component such as 'a**' or 'a.**'."""
    if '**' not in name:
        return name
    *firsts, last = re.split(r'\*{2,}', name)
    out: list[str] = []
    for text in firsts:
        stem = text.rstrip('.:\\')
        out.extend([*([stem if stem != text else f'{stem}*'] if text else []), '**'])
    stem = last.lstrip('.:\\')
    out.extend([stem if stem != last else f'*{stem}'] if last else [])
    return '/'.join(out)


_TOKEN = re.compile(
    r'\\(?P<escaped>.)|(?P<wild>[*?])'
    r'|\[(?P<negated>[!^]?)(?P<members>\]?(?:\\.|[^\]\\])*)\]|(?P<literal>.)',
    re.DOTALL,
)


def _component(name: str, pattern: str) -> str:
    """The regular expression of one component."""
    if not name.strip('*'):
        return '[^/]+'  # A component is never empty.
    return ''.join(_token(token, pattern) for token in _TOKEN.finditer(name))


def _token(token: re.Match[str], pattern: str) -> str:
    if token['wild']:
        return '[^/]*' if token['wild'] == '*' else '[^/]'
    if token['members']:
        members = re.sub(
            r'\\(.)|([\[\]^&~|])', lambda m: re.escape(m[1] or m[2]), token['members']
        )
        return f'(?!/)[{"^" if token["negated"] else ""}{members}]'
    if _is_open(token):
        raise _glob_error(
            pattern,
            "has a '[' without its ']'",
            f'write {with_literal_brackets(pattern)!r} for a bracket in a name',
        )
    return re.escape(token['escaped'] or token['literal'])


def with_literal_brackets(pattern: str) -> str:
    """The glob with each open bracket written as a character of a name."""
    return '/'.join(_TOKEN.sub(_closed, name) for name in pattern.split('/'))


def _is_open(token: re.Match[str]) -> bool:
    return token['literal'] == '[' or token['members'] == ''


def _closed(token: re.Match[str]) -> str:
    return f'[[]{token[0][1:]}' if _is_open(token) else token[0]

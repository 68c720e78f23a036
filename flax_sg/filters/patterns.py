"""Filters by pattern: globs and regular expressions on whole paths."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from flax_sg import errors
from flax_sg.filters.expressions import Atom, Filter
from flax_sg.filters.hints import Syntax
from flax_sg.filters.paths import Owner, Path


@dataclasses.dataclass(frozen=True, eq=False)
class Glob(Atom):
    r"""The variables whose whole path fits a pattern, by the rules of gitignore.

    ``*``, ``?``, ``[abc]`` and ``[!abc]`` match characters within one component.
    ``**`` alone between slashes matches any number of components: none or more at
    the start and in the middle, one or more at the end (everything inside). ``\``
    takes the next character literally. Brackets that are no set mean themselves.

    A pattern that is the path of a variable fits that variable too, whatever characters
    are in it: ``'w[0,0] 1x0e'``. A ``sg.Path`` in place of a str fits nothing else.

    A variable outside the module that opened the block has a path with a leading '/'.
    A pattern fits such a path only if the pattern begins with '/' or with ``**``.

    >>> gln = Glob('gln_*/**')
    >>> paths = [('gln_0', 'dense', 'kernel'), ('gln_0',), ('my_gln_0', 'kernel')]
    >>> [gln(Path.of('params', names)) for names in paths]
    [True, False, False]

    Raises:
        FilterValueError: if no path can fit the pattern.
    """

    pattern: str

    def __post_init__(self) -> None:
        if _SPECIAL.search(self.pattern):
            glob_regex(self.pattern)
        else:  # Filters may name thousands of variables: nothing is compiled for those.
            _check_glob(self.pattern)

    @classmethod
    def of_path(cls, path: str) -> Filter:
        """The filter for one path: its characters mean themselves."""
        try:
            return cls(re.sub(r'[\\*?\[]|^!', r'\\\g<0>', path))
        except errors.FilterValueError:  # A name is empty: '' or 'a//b'.
            return Regex(re.compile(re.escape(path)))

    @functools.cached_property
    def _value(self) -> Hashable:
        return self.pattern

    @functools.cached_property
    def _fullmatch(self) -> Callable[[str], object]:
        return glob_regex(self.pattern).fullmatch

    @functools.cached_property
    def _only(self) -> tuple[str, ...]:
        path = literal(self.pattern)
        return () if path is None else tuple({path, self.pattern})

    def _matches(self, path: Path) -> bool:
        if self._only:
            return path in self._only
        return path == self.pattern or self._fullmatch(path) is not None

    def __repr__(self) -> str:
        return f'Glob({self.pattern!r})'

    def _advice(self, paths: Sequence[Path], owner: Owner) -> str:
        syntax = Syntax(glob_regex, '**', r'\.|::|\\+', '**/{}')
        return syntax.advice(self.pattern, paths, owner)


@dataclasses.dataclass(frozen=True, eq=False)
class Regex(Atom):
    """The variables whose whole path matches a compiled regular expression.

    The whole path has to match (``fullmatch``), so that 'gln' does not freeze
    'my_gln' by mistake. A pattern that matches nothing raises.

    >>> gln = Regex(re.compile(r'gln_[0-9]+/.*'))
    >>> gln(Path.of('params', ('gln_0', 'kernel')))
    True
    >>> gln(Path.of('params', ('my_gln_0', 'kernel')))
    False

    Raises:
        FilterTypeError: for a pattern on bytes.
    """

    pattern: re.Pattern[str]

    def __post_init__(self) -> None:
        text: Any = self.pattern.pattern
        if not isinstance(text, str):
            raise errors.FilterTypeError(
                f'{self.pattern!r} is a pattern on bytes, and paths are str.\n'
                f'Write re.compile({text.decode(errors="replace")!r}).'
            )

    @functools.cached_property
    def _value(self) -> Hashable:
        return self.pattern

    def _matches(self, path: Path) -> bool:
        return self.pattern.fullmatch(path) is not None

    def __repr__(self) -> str:
        return f'Regex({self.pattern!r})'

    def _advice(self, paths: Sequence[Path], owner: Owner) -> str:
        flags = re.RegexFlag(self.pattern.flags) & ~re.UNICODE

        def compiled(text: str) -> re.Pattern[str]:
            return re.compile(text, flags)

        def spelled(text: str) -> str:
            return f're.compile({text!r}{f", {flags!r}" if flags else ""})'

        syntax = Syntax(compiled, '.*', r'\\\.|::', '.*{}.*', spelled)
        return syntax.advice(self.pattern.pattern.lstrip('^'), paths, owner)


# What a glob may be made of. A set ends within its component.
_TOKEN = re.compile(
    r'\\(?P<escaped>[^/])|(?P<wild>[*?])|\[(?P<negated>[!^]?)'
    r'(?P<members>(?:\]|\\[^/]|[^\]\\/])(?:\\[^/]|[^\]\\/])*)\]|(?P<literal>.)',
    re.DOTALL,
)
_SPECIAL = re.compile(r'[*?\[]')


def literal(pattern: str) -> str | None:
    r"""Returns the one path that a glob fits, None if it may fit several.

    >>> print(literal(r'w\[0,0] 1x0e'), literal('gln_*/**'))
    w[0,0] 1x0e None
    """
    if not _SPECIAL.search(pattern) and '\\' not in pattern:  # Nearly always.
        return pattern
    characters = [t['escaped'] or t['literal'] for t in _TOKEN.finditer(pattern)]
    return None if None in characters else ''.join(characters)


@functools.lru_cache(maxsize=1024)
def glob_regex(pattern: str) -> re.Pattern[str]:
    r"""Translates a glob on whole path components, to be used with ``fullmatch``.

    >>> bool(glob_regex('gln_*/**').fullmatch('gln_0/dense/kernel'))
    True

    Args:
        pattern: as ``flax_sg.filters.Glob`` explains.

    Raises:
        FilterValueError: if no path can fit the pattern.
    """
    _check_glob(pattern)
    rooted = pattern.startswith('/')
    names = pattern[rooted:].split('/')
    # Neighbouring '**' say the same as one, and would make matching slow.
    names = [n for i, n in enumerate(names) if n != '**' or names[i - 1 : i] != ['**']]
    if names == ['**'] and not rooted:
        return re.compile('(?s:.*)')  # A tree that is one leaf has the path ''.
    # A leading '**' covers variables outside the owner too.
    out = ['/' if rooted else '/?' if names[0] == '**' else '']
    for name in names[:-1]:
        out.append('(?:[^/]+/)*' if name == '**' else _component(name) + '/')
    out.append('(?:[^/]+/)*[^/]+' if names[-1] == '**' else _component(names[-1]))
    return re.compile(''.join(out))


def _component(name: str) -> str:
    """The regular expression of one component."""
    if not name.strip('*'):
        return '[^/]+'  # A component is never empty.
    return ''.join(map(_token, _TOKEN.finditer(name)))


def _token(token: re.Match[str]) -> str:
    if token['wild']:
        return '[^/]*' if token['wild'] == '*' else '[^/]'
    if token['members']:
        members = re.sub(
            r'\\(.)|([\[\]^&~|])', lambda m: re.escape(m[1] or m[2]), token['members']
        )
        try:
            re.compile(f'[{members}]')
        except re.error:  # A range such as 'z-a'.
            return re.escape(token[0])
        return f'(?!/)[{"^" if token["negated"] else ""}{members}]'
    return re.escape(token['escaped'] or token['literal'])


def _check_glob(pattern: str) -> None:
    """Raises for a glob that no path can fit."""
    if not pattern:
        raise _glob_error(pattern, 'is empty', "'**' for every variable")
    if pattern.startswith('!'):
        fix = f'~flax_sg.filters.as_filter({pattern[1:]!r})'
        raise _glob_error(pattern, "begins with '!', which negates nothing here", fix)
    if pattern.endswith('/'):
        inside = re.sub('/+', '/', f'{pattern}/**').lstrip('/')
        fix = f'{inside!r} for everything inside'
        raise _glob_error(pattern, "ends in '/', and no path does", fix)
    if '//' in pattern:
        fix = repr(re.sub('/+', '/', pattern))
        raise _glob_error(pattern, "has '//' in it", fix)
    if any('**' in name and name != '**' for name in pattern.split('/')):
        fixed = pattern
        for glued, separate in _GLUED:
            fixed = re.sub(glued, separate, fixed)
        raise _glob_error(pattern, "has '**' beside other characters", f'{fixed!r}')


_GLUED = (
    (r'\*{2,}', '**'),
    (r'[.:\\]+\*\*', '/**'),
    (r'\*\*[.:\\]+', '**/'),
    (r'([^/*])\*\*', r'\1*/**'),
    (r'\*\*([^/*])', r'**/*\1'),
)


def _glob_error(pattern: str, problem: str, fix: str) -> errors.FilterValueError:
    return errors.FilterValueError(f'The glob {pattern!r} {problem}.\nWrite {fix}.')

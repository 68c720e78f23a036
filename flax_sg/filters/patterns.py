"""Filters by pattern: globs and regular expressions on whole paths.

A pattern that matches no variable raises an error, which says what to write.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from flax_sg import errors
from flax_sg.filters import hints
from flax_sg.filters.expressions import Atom, Need
from flax_sg.filters.paths import Owner, Path, all_paths


@dataclasses.dataclass(frozen=True, eq=False)
class Glob(Atom):
    r"""The variables whose whole path fits a pattern, by the rules of gitignore.

    ``*``, ``?``, ``[abc]`` and ``[!abc]`` match characters within one component.
    ``{0..11}`` matches the numbers from 0 to 11, ``{enc,dec}`` one of these texts;
    braces in braces are refused.
    ``**`` alone between slashes matches any number of components: none or more at
    the start and in the middle, one or more at the end (everything inside). ``\``
    takes the next character literally. Brackets and braces that are no set mean
    themselves.

    A pattern that is the path of a variable fits that variable too, whatever characters
    are in it: ``'w[0,0] 1x0e'``. A ``sg.Path`` in place of a str fits nothing else.

    A variable outside the module that opened the block has a path with a leading '/'.
    A pattern fits such a path only if the pattern begins with '/' or with ``**``: write
    ``'**/encoder/**'`` for a shared module, wherever it is.

    >>> from flax_sg import Path
    >>> from flax_sg.filters import Glob
    >>> gln = Glob('gln_*/**')
    >>> paths = [('gln_0', 'dense', 'kernel'), ('gln_0',), ('my_gln_0', 'kernel')]
    >>> [gln(Path.of('params', names)) for names in paths]
    [True, False, False]

    Raises:
        ArgumentValueError: if no path can fit the pattern, braces are in braces, or a
            class in it looks like a range of numbers: ``[0-11]`` means the characters 0
            and 1.
    """

    pattern: str

    def __post_init__(self) -> None:
        nested = _NESTED.search(self.pattern)
        if nested and ',' in nested[0]:
            raise errors.ArgumentValueError(
                f'The glob {self.pattern!r} has braces in braces: {nested[0]!r}.\n'
                "Write a list of globs: ['encoder/{a,b}', 'decoder']. For a brace that "
                "is meant as it is write a backslash in front: r'\\{'."
            )
        for token in _TOKEN.finditer(self.pattern):
            ends = re.fullmatch('([0-9]+)-([0-9]+)', token['members'] or '')
            if ends and len(ends[0]) > 3:
                numbers = f'{{{ends[1]}..{ends[2]}}}'
                write = self.pattern.replace(token[0], numbers)
                raise errors.ArgumentValueError(
                    f'The class {token[0]} in the glob {self.pattern!r} matches one '
                    'character, and no number of two digits.\n'
                    f'For numbers write braces: {write!r} has the range as shells do.\n'
                    "For single characters list them: '[012]'."
                )
        globs = [each.removeprefix('/').split('/') for each in _expanded(self.pattern)]
        names = [name for glob in globs for name in glob]
        if '' in names or any('**' in name and name != '**' for name in names):
            raise errors.ArgumentValueError(
                f'No path fits the glob {self.pattern!r}: names are not empty, and '
                "'**' stands alone between slashes.\n"
                "Write 'gln/**' for everything in gln, '**/*kernel' for names that end "
                "in kernel, '**' for every variable, and a list for several globs."
            )

    @functools.cached_property
    def _fullmatch(self) -> Callable[[str], object]:
        return glob_regex(self.pattern).fullmatch

    @functools.cached_property
    def only(self) -> str | None:
        """The pattern itself, if no character in it has a meaning."""
        return None if _SPECIAL.search(self.pattern) else self.pattern

    @functools.cached_property
    def own_needs(self) -> frozenset[Need]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The names of all variables, if each name in braces has to fit one."""
        return frozenset({'names'} if self._alternatives else ())

    @functools.cached_property
    def _alternatives(self) -> list[tuple[str, list[str]]]:
        return alternatives(self.pattern)

    def unused(
        self, matches: bool, paths: Sequence[Path], owner: Owner
    ) -> errors.FlaxSGError | None:
        """The error if the pattern, or a name in braces in it, fits no variable."""
        error = super().unused(matches, paths, owner)
        if error or not self._alternatives:
            return error
        every = [each for path in paths for each in all_paths(path)]
        if self.pattern in every:
            return None
        names = [*every, *(path.variable for path in every if path.is_inner)]
        for name, globs in self._alternatives:
            if any(any(map(glob_regex(glob).fullmatch, names)) for glob in globs):
                continue
            advice = hints.advice(globs[0], every, 'encoder/**', glob_regex)
            if name != name.strip():
                write = self.pattern.replace(name, name.strip())
                advice = f'Names in braces have no spaces around: {write!r}.'
            return errors.UnusedFilterError(
                f'{name!r} in {self!r} matches none of the {len(paths)} variables.',
                advice,
                "If some names need not match, pass unused='ignore'.",
            )
        return None

    def matches(self, path: Path) -> bool:
        """Whether the pattern fits the path, or is the path."""
        if self.only is not None:
            return path == self.only
        return path == self.pattern or self._fullmatch(path) is not None

    def _advice(self, paths: Sequence[Path]) -> str:
        every = [each for path in paths for each in all_paths(path)]
        return hints.advice(self.pattern, every, 'encoder/**', glob_regex)

    def __repr__(self) -> str:
        return f'Glob({self.pattern!r})'


@dataclasses.dataclass(frozen=True, eq=False)
class Regex(Atom):
    """The variables whose whole path matches a compiled regular expression.

    The whole path has to match (``fullmatch``), so that 'gln' does not freeze
    'my_gln' by mistake. A pattern that matches nothing raises.

    >>> import re
    >>> from flax_sg import Path
    >>> from flax_sg.filters import Regex
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

    def matches(self, path: Path) -> bool:
        """Whether the expression matches the whole path."""
        return self.pattern.fullmatch(path) is not None

    def _advice(self, paths: Sequence[Path]) -> str:
        every = [each for path in paths for each in all_paths(path)]
        return hints.advice(self.pattern.pattern, every, 'encoder/.*', re.compile)

    def __repr__(self) -> str:
        return f'Regex({self.pattern!r})'


# What a glob may be made of. A set ends within its component.
_TOKEN = re.compile(
    r'\\(?P<escaped>[^/])|(?P<wild>[*?])|\[(?P<negated>[!^]?)'
    r'(?P<members>(?:\]|\\[^/]|[^\]\\/])(?:\\[^/]|[^\]\\/])*)\]'
    r'|\{(?P<first>[0-9]+)\.\.(?P<last>[0-9]+)\}|(?P<literal>.)',
    re.DOTALL,
)
_SPECIAL = re.compile(r'[*?\[\\{]')


# Names in braces. What follows a backslash is text.
_PART = r'(?:\\.|[^{}\\])*'
_BRACES = re.compile(rf'(?<!\\)\{{({_PART},{_PART})\}}', re.DOTALL)
_NESTED = re.compile(rf'(?<!\\)\{{{_PART}(?:\{{{_PART}\}}{_PART})+\}}', re.DOTALL)


def _parts(pattern: str) -> list[list[str]]:
    """The parts of a glob in a row: of text one, of names in braces all of them.

    >>> _parts('{enc,dec}/w')
    [[''], ['enc', 'dec'], ['/w']]
    """
    parts = _BRACES.split(pattern)
    return [
        re.split(r'(?<!\\),', part) if n % 2 else [part] for n, part in enumerate(parts)
    ]


def _expanded(pattern: str) -> list[str]:
    """The globs that ``{a,b}`` in a glob stands for.

    >>> _expanded('{enc,dec}/{u,w}')
    ['enc/u', 'enc/w', 'dec/u', 'dec/w']
    """
    return [*dict.fromkeys(map(''.join, itertools.product(*_parts(pattern))))]


def alternatives(pattern: str) -> list[tuple[str, list[str]]]:
    """Each name in braces, and the globs that it leads to.

    >>> alternatives('{enc,dec}/{u,w}')[2:]
    [('u', ['enc/u', 'dec/u']), ('w', ['enc/w', 'dec/w'])]
    """
    parts = _parts(pattern)
    return [
        (name, [*map(''.join, itertools.product(*parts[:n], [name], *parts[n + 1 :]))])
        for n, names in enumerate(parts)
        for name in names
        if n % 2 and name
    ]


def glob_regex(pattern: str) -> re.Pattern[str]:
    r"""Translates a glob on whole path components, to be used with ``fullmatch``.

    >>> bool(glob_regex('gln_*/**').fullmatch('gln_0/dense/kernel'))
    True

    Args:
        pattern: as ``flax_sg.filters.Glob`` explains.
    """
    globs = _expanded(pattern)
    if len(globs) > 1:
        return re.compile('|'.join(f'(?:{glob_regex(x).pattern})' for x in globs))
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
    if token['first']:
        ends = sorted((token['first'], token['last']), key=int)
        # As in shells, '{08..11}' has numbers of two digits each.
        width = (
            max(map(len, ends)) if any(len(x) > 1 and x[0] == '0' for x in ends) else 0
        )
        numbers = range(int(ends[0]), int(ends[1]) + 1)
        return f'(?:{"|".join(str(n).zfill(width) for n in numbers)})'
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

"""Filters by pattern: globs and regular expressions on whole paths.

A pattern that matches no variable raises an error, which says what was probably meant.
"""

from __future__ import annotations

import abc
import dataclasses
import difflib
import functools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from flax_sg import errors
from flax_sg.filters.expressions import Atom
from flax_sg.filters.paths import Owner, Path

_S = TypeVar('_S', bound=str)


class _Pattern(Atom):
    """What globs and regular expressions share: hints for one that matches nothing."""

    everything: ClassVar[str]
    """The pattern for all variables inside a module."""
    separators: ClassVar[str]
    """A regular expression for what people write in place of '/'."""
    anywhere: ClassVar[str]
    """A format for a pattern that matches at any depth."""

    @abc.abstractmethod
    def _text(self) -> str:
        """The pattern as it is written."""

    @abc.abstractmethod
    def _compiled(self, text: str) -> re.Pattern[str]:
        """Another pattern, as a regular expression."""

    def _fits(self, text: str) -> Callable[[str], object]:
        try:
            return self._compiled(text).fullmatch
        except re.error:
            return lambda path: None

    def _advice(self, paths: Sequence[Path], owner: Owner) -> str:
        for meant, why in self._candidates(paths, owner):
            # Where dots join names, ``encoder.*`` means all that is in the encoder.
            for text in (meant, f'{meant.removesuffix("/*")}/{self.everything}'):
                if any(map(self._fits(text), paths)):
                    return f'Did you mean {text!r}? {why}'.rstrip()
        near = nearest(self._text(), paths)
        return f'Nearest: {", ".join(repr(str(path)) for path in near)}.'

    def _candidates(
        self, paths: Sequence[Path], owner: Owner
    ) -> Iterator[tuple[str, str]]:
        """Yields what may have been meant, and why the pattern does not say it."""
        slashed = re.sub(self.separators, '/', self._text())
        names = slashed.lstrip('/').split('/')
        collections = {'params', *(path.collection for path in paths)}
        for depth, name in enumerate(names[:2], 1):
            if name in collections:
                rest = '/'.join(names[depth:]) or self.everything
                yield rest, f'Paths start below the collection {name!r}.'
        yield f'{self._text()}/{self.everything}', 'Variables are inside the module.'
        yield slashed, "'/' joins names."
        yield slashed.lstrip('/'), "Only paths outside the module begin with '/'."
        yield f'/{slashed}', 'Paths outside the module begin with a slash.'
        if owner and tuple(names[: len(owner)]) == owner:
            relative = '/'.join(names[len(owner) :]) or self.everything
            yield relative, f'Paths are relative to the module at {"/".join(owner)!r}.'
        for form in ('NFC', 'NFD'):
            yield unicodedata.normalize(form, slashed), 'Its Unicode form differs.'
        yield self.anywhere.format(slashed), 'A pattern matches the whole path.'
        respelled = self._respelled(slashed, paths)
        yield respelled, ''
        yield self.anywhere.format(respelled), ''

    def _respelled(self, pattern: str, paths: Sequence[Path]) -> str:
        """The pattern with the nearest name for each that no path has."""
        names = {name for path in paths for name in path.parts}
        # 'layer_*' is near to 'layers_*', which stands for names with numbers.
        names |= {re.sub('[0-9]+', '*', name) for name in names}
        out: list[str] = []
        for name in pattern.split('/'):
            if name.strip('*') and not any(map(self._fits(name), names)):
                name = (difflib.get_close_matches(name, sorted(names), 1) or [name])[0]
            out.append(name)
        return '/'.join(out)


@dataclasses.dataclass(frozen=True, eq=False)
class Glob(_Pattern):
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

    everything = '**'
    separators = r'\.|::|\\+'
    anywhere = '**/{}'
    pattern: str

    def __post_init__(self) -> None:
        _check_glob(self.pattern)

    @functools.cached_property
    def _fullmatch(self) -> Callable[[str], object]:
        return glob_regex(self.pattern).fullmatch

    @functools.cached_property
    def only(self) -> str | None:
        """The pattern itself, if no character in it has a meaning."""
        return None if _SPECIAL.search(self.pattern) else self.pattern

    def matches(self, path: Path) -> bool:
        """Whether the pattern fits the path, or is the path."""
        if self.only is not None:
            return path == self.only
        return path == self.pattern or self._fullmatch(path) is not None

    def _text(self) -> str:
        return self.pattern

    def _compiled(self, text: str) -> re.Pattern[str]:
        return glob_regex(text)

    def __repr__(self) -> str:
        return f'Glob({self.pattern!r})'

    def _advice(self, paths: Sequence[Path], owner: Owner) -> str:
        if '{' in self.pattern:
            return "'{' and '}' mean themselves: write a list of patterns."
        return super()._advice(paths, owner)


@dataclasses.dataclass(frozen=True, eq=False)
class Regex(_Pattern):
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

    everything = '.*'
    separators = r'\\\.|::'
    anywhere = '.*{}.*'
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

    def _text(self) -> str:
        return self.pattern.pattern.lstrip('^')

    def _compiled(self, text: str) -> re.Pattern[str]:
        return re.compile(text, self.pattern.flags)

    def __repr__(self) -> str:
        return f'Regex({self.pattern!r})'


# What a glob may be made of. A set ends within its component.
_TOKEN = re.compile(
    r'\\(?P<escaped>[^/])|(?P<wild>[*?])|\[(?P<negated>[!^]?)'
    r'(?P<members>(?:\]|\\[^/]|[^\]\\/])(?:\\[^/]|[^\]\\/])*)\]|(?P<literal>.)',
    re.DOTALL,
)
_SPECIAL = re.compile(r'[*?\[\\]')


def glob_regex(pattern: str) -> re.Pattern[str]:
    r"""Translates a glob on whole path components, to be used with ``fullmatch``.

    >>> bool(glob_regex('gln_*/**').fullmatch('gln_0/dense/kernel'))
    True

    Args:
        pattern: as ``flax_sg.filters.Glob`` explains.
    """
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
        problem, fix = 'is empty', "'**' for every variable"
    elif pattern.startswith('!'):
        problem = "begins with '!', which negates nothing here"
        fix = f'~flax_sg.filters.as_filter({pattern[1:]!r})'
    elif pattern.endswith('/'):
        problem = "ends in '/', and no path does"
        fix = f'{pattern.rstrip("/") + "/**"!r} for everything inside'
    elif '//' in pattern:
        problem, fix = "has '//' in it", repr(re.sub('/+', '/', pattern))
    elif any('**' in name and name != '**' for name in pattern.split('/')):
        problem = "has '**' beside other characters"
        fix = "'**' alone between slashes, as in 'gln*/**' or '**/*kernel'"
    else:
        return
    raise errors.FilterValueError(f'The glob {pattern!r} {problem}.\nWrite {fix}.')


def nearest(pattern: str, paths: Iterable[_S], n: int = 3) -> list[_S]:
    """Returns the n paths that look most like a pattern, the nearest first.

    The pattern is compared with the part of each path that fits it best. So the name of
    a module finds the variables inside the module.

    >>> nearest('gl/**', ['enc/bias', 'dec/kernel', 'gln/kernel', 'gln/bias'], 2)
    ['gln/bias', 'gln/kernel']
    """
    wanted = re.sub(r'[^\w/]+', '', pattern).casefold().strip('/')
    width = wanted.count('/') + 1
    matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)

    def likeness(text: str) -> float:
        matcher.set_seq1(text)
        # 'enc' means 'encoder' rather than 'dec'.
        return matcher.ratio() + text.startswith(wanted)

    def score(path: str) -> tuple[float, float]:
        names = path.casefold().strip('/').split('/')
        runs = ('/'.join(names[i : i + width]) for i in range(len(names)))
        return max(map(likeness, runs)), likeness(path.casefold())

    # sorted is stable: paths that look alike stay in the order they came in.
    return sorted(dict.fromkeys(paths), key=score, reverse=True)[:n]

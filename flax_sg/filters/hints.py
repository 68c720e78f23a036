"""What an error says of a filter that matches no variable, and what was meant."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from flax_sg import errors
from flax_sg.filters.paths import Owner, Path

_S = TypeVar('_S', bound=str)
_MOST_ALTERNATIVES = 64  # A hint with more patterns than this helps nobody.


def nearest(pattern: str, paths: Iterable[_S], n: int = 3) -> list[_S]:
    """Returns the n paths that look most like a pattern, the nearest first.

    The pattern is compared with the part of each path that fits it best. So the name of
    a module finds the variables inside the module.

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


def unused_filter(
    where: object, advice: str, paths: Sequence[Path], owner: Owner
) -> errors.UnusedFilterError:
    """The error for a filter, or one part of it, that matches no variable.

    Args:
        where: the filter.
        advice: what was probably meant; '' if nothing is known.
        paths: the path of every variable.
        owner: the names of the module that the paths are relative to.
    """
    some = f'{len(paths)} variable{"s" * (len(paths) != 1)}'
    there = f'none of the {some}' if paths else 'nothing'
    under = f' under {"/".join(owner)!r}' if owner else ''
    if not paths:
        advice = 'There are no variables.'
    lines = [
        f'{where!r} matches {there}{under}.',
        advice or f'Paths look like this: {_listed(dict.fromkeys(paths))}.',
        "If nothing has to match, pass unused='ignore'.",
    ]
    return errors.UnusedFilterError('\n'.join(lines))


def _listed(paths: Iterable[str]) -> str:
    return ', '.join(repr(str(path)) for path in itertools.islice(paths, 3))


def nearest_to(text: str | None, paths: Sequence[Path]) -> str:
    """A line that names the paths most like a text, '' without a text."""
    return f'Nearest: {_listed(nearest(text, paths))}.' if text and paths else ''


@dataclasses.dataclass(frozen=True)
class Syntax:
    """How one kind of pattern is written: globs, or regular expressions.

    Attributes:
        compiled: makes a regular expression of a pattern.
        everything: the pattern that matches all variables inside a module.
        separators: a regular expression for what people write in place of '/'.
        anywhere: a format for a pattern that matches at any depth.
        spelled: writes a pattern as code.
    """

    compiled: Callable[[str], re.Pattern[str]]
    everything: str
    separators: str
    anywhere: str
    spelled: Callable[[str], str] = repr

    def advice(self, pattern: str, paths: Sequence[Path], owner: Owner) -> str:
        """A line that says what was probably meant; the nearest paths if unknown."""
        for meant, why in self._candidates(pattern, paths, owner):
            if found := self._inside(meant, paths):
                return f'Did you mean {self.spelled(found)}? {why}'.rstrip()
        alternatives = [
            found
            for text in expanded(pattern)
            if (found := self._inside(self._slashed(text), paths))
        ]
        if alternatives:
            return f"Did you mean {alternatives!r}? '{{' and '}}' mean themselves."
        return nearest_to(pattern, paths)

    def _slashed(self, pattern: str) -> str:
        return re.sub(self.separators, '/', pattern)

    def _inside(self, pattern: str, paths: Iterable[str]) -> str | None:
        """A pattern if it matches something, or that for all inside the module.

        ``encoder.*`` means all that is in it where names are joined by dots.
        """
        inside = f'{pattern.removesuffix("/*")}/{self.everything}'
        fits = (text for text in (pattern, inside) if any(map(self._fits(text), paths)))
        return next(fits, None)

    def _fits(self, pattern: str) -> Callable[[str], object]:
        try:
            return self.compiled(pattern).fullmatch
        except (errors.FilterValueError, re.error):
            return lambda path: None

    def _candidates(
        self, pattern: str, paths: Sequence[Path], owner: Owner
    ) -> Iterator[tuple[str, str]]:
        """Yields what may have been meant, and why the pattern does not say it."""
        slashed = self._slashed(pattern)
        names = slashed.lstrip('/').split('/')
        collections = {'params', *(path.collection for path in paths)}
        for depth, name in enumerate(names[:2], 1):
            if name in collections:
                rest = '/'.join(names[depth:]) or self.everything
                yield rest, f'Paths start below the collection {name!r}.'
        yield f'{pattern}/{self.everything}', 'Variables are inside the module.'
        yield slashed, "'/' joins names."
        yield slashed.lstrip('/'), "Only paths outside the module begin with '/'."
        yield f'/{slashed}', 'Paths outside the module begin with a slash.'
        if owner and tuple(names[: len(owner)]) == owner:
            relative = '/'.join(names[len(owner) :]) or self.everything
            yield relative, f'Paths are relative to the module at {"/".join(owner)!r}.'
        for form in ('NFC', 'NFD'):
            yield unicodedata.normalize(form, slashed), 'Its Unicode form differs.'
        yield self.anywhere.format(slashed), 'A pattern matches the whole path.'
        yield pattern.replace('[', '[[]'), "'[' begins a set of characters."
        if '{' not in pattern and (respelled := self._respelled(slashed, paths)):
            yield respelled, ''
            yield self.anywhere.format(respelled), ''

    def _respelled(self, pattern: str, paths: Sequence[Path]) -> str | None:
        """The pattern with the nearest name for each that no path has.

        None where several names are as near as each other.
        """
        names = {name for path in paths for name in path.parts}
        # 'layer_*' is near to 'layers_*', which stands for names with numbers.
        names |= {re.sub('[0-9]+', '*', name) for name in names}
        out: list[str] = []
        for name in pattern.split('/'):
            if name.strip('*') and not any(map(self._fits(name), names)):
                near = difflib.get_close_matches(name, names, 2)
                if not near or len({_likeness(name, one) for one in near}) < len(near):
                    return None
                name = near[0]
            out.append(name)
        return '/'.join(out)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, one).ratio()


_BRACES = re.compile(r'\{([^{}]+)\}')
_RANGE = re.compile(r'([0-9]{1,4})\.\.([0-9]{1,4})')


def expanded(pattern: str) -> list[str]:
    """The patterns that one with braces means in a shell; none if too many.

    >>> expanded('enc_{0..1}/{w,b}')
    ['enc_0/w', 'enc_0/b', 'enc_1/w', 'enc_1/b']
    """
    found = list(itertools.islice(_alternatives(pattern), _MOST_ALTERNATIVES + 1))
    many = len(found) > _MOST_ALTERNATIVES
    return [] if many or found == [pattern] else list(dict.fromkeys(found))


def _alternatives(pattern: str) -> Iterator[str]:
    braces = _BRACES.search(pattern)
    if braces is None:
        yield pattern
        return
    inside = braces[1].split(',')
    if ends := _RANGE.fullmatch(braces[1]):
        inside = list(map(str, range(int(ends[1]), int(ends[2]) + 1)))
    for name in inside:
        yield from _alternatives(
            pattern[: braces.start()] + name + pattern[braces.end() :]
        )

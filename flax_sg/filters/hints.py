"""What was probably meant by a pattern that matches no path."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from flax_sg import errors
from flax_sg.filters.paths import Path

# A brace expression, or a range in one, as shells take them; the innermost ones.
_BRACES = re.compile(r'\{([^{}]+)\}')
_RANGE = re.compile(r'([0-9]{1,4})\.\.([0-9]{1,4})')
_MOST = 64  # How many patterns braces may stand for, to be worth a hint.


def separated_by_slashes(pattern: str) -> str:
    """A glob with '/' in place of what separates names elsewhere."""
    return re.sub(r'\.|::|\\+', '/', pattern)


def expanded(pattern: str) -> list[str]:
    """The patterns that one with braces stands for in a shell; none if too many.

    >>> expanded('enc_{0..1}/{w,b}')
    ['enc_0/w', 'enc_0/b', 'enc_1/w', 'enc_1/b']
    """
    found = [pattern]
    while any(map(_BRACES.search, found)):
        found = list(itertools.chain.from_iterable(map(_one_expanded, found)))
        if len(found) > _MOST:
            return []
    return list(dict.fromkeys(found))


def _one_expanded(pattern: str) -> list[str]:
    braces = _BRACES.search(pattern)
    if braces is None:
        return [pattern]
    inside = braces[1].split(',')
    if ends := _RANGE.fullmatch(braces[1]):
        first, last = int(ends[1]), int(ends[2])
        inside = list(map(str, range(first, last + 1)))
    return [
        pattern[: braces.start()] + name + pattern[braces.end() :] for name in inside
    ]


@dataclasses.dataclass(frozen=True)
class TextHints:
    """What may have been meant by a pattern that matches no path.

    Attributes:
        compiled: makes a regular expression of a pattern.
        written: how a pattern is spelled in a program.
        everything: the pattern that matches all below a module.
        paths: the paths of all variables.
        owner: path of the module that they are relative to.
    """

    compiled: Callable[[str], re.Pattern[str]]
    written: Callable[[str], str]
    everything: str
    paths: Sequence[Path]
    owner: tuple[str, ...] | None

    def first(self, pattern: str, paths: Iterable[str] | None = None) -> str | None:
        """The first path that a pattern matches."""
        try:
            fullmatch = self.compiled(pattern).fullmatch
        except (errors.FilterValueError, re.error):
            return None
        paths = self.paths if paths is None else paths
        return next((path for path in paths if fullmatch(path)), None)

    def inside(self, pattern: str) -> str | None:
        """The pattern if it matches something, or that for all inside of what it names.

        ``encoder.*`` means all that is in it where names are joined by dots.
        """
        module = pattern.removesuffix('/*')
        for found in (pattern, f'{module}/{self.everything}'):
            if self.first(found):
                return found
        return None

    def alternatives(self, pattern: str) -> list[str]:
        """The patterns that braces stand for in a shell, as far as they match."""
        if '{' not in pattern:
            return []
        found = (
            self.inside(text) or self.inside(separated_by_slashes(text))
            for text in expanded(pattern)
        )
        return [text for text in found if text is not None]

    def find(self, pattern: str, separated: str) -> str | None:
        """The first hint that holds.

        Args:
            pattern: the pattern, without an anchor.
            separated: the pattern with '/' in place of other separators.
        """
        head, _, rest = separated.lstrip('/').partition('/')
        collections = {'params', *(path.collection for path in self.paths)}
        if head not in collections and rest.partition('/')[0] in collections:
            return (
                f'the paths of each model begin at its own root, without {head!r}. '
                f'Use sg.stop_gradient(tree, {self.written(pattern)}) for a tree of '
                'several networks, or open a block around one apply.'
            )
        if head in collections:
            found = self.inside(rest or self.everything)
            write = f' Write {self.written(found)}.' if found else ''
            return f'paths do not start with the collection {head!r}.{write}'
        if separated != pattern and (found := self.inside(separated)):
            return f"names are joined by '/'. Write {self.written(found)}."
        for form in ('NFC', 'NFD'):
            same = unicodedata.normalize(form, pattern)
            if same != pattern and self.first(same):
                write = self.written(same)
                return f'it is spelled with other code points. Write {write}.'
        inside = f'{pattern}/{self.everything}'
        return self._absolute(pattern.lstrip('/')) or (
            f'it names a module; variables are inside. Write {self.written(inside)}.'
            if self.first(inside)
            else None
        )

    def respelled(self, pattern: str) -> str | None:
        """The pattern with other names where no path has them, if it then matches.

        None where several names are as close as each other.
        """
        names = {name for path in self.paths for name in path.parts}
        # 'layer_*' is close to 'layers_*', which stands for names with numbers.
        names |= {_NUMBER.sub('*', name) for name in names}
        out: list[str] = []
        for name in pattern.split('/'):
            if not name.strip('*') or any(map(self.compiled(name).fullmatch, names)):
                out.append(name)
                continue
            near = difflib.get_close_matches(name, names, 2)
            if not near or len({_likeness(name, other) for other in near}) < len(near):
                return None
            out.append(near[0])
        found = '/'.join(out)
        return self.inside(found) or self.inside(f'**/{found}')

    def _absolute(self, relative: str) -> str | None:
        path = next((p for p in self.paths if self.first(relative, [p.absolute])), None)
        if path is None:
            return None
        if path.outside:
            return (
                f'{str(path)!r} lies outside the module that opened the block; its '
                f"path begins with '/'. Write {self.written('/' + relative)}."
            )
        if not self.owner:
            return f"paths do not begin with '/'. Write {self.written(relative)}."
        return (
            f'{path.absolute!r} is an absolute path; the block was opened by the '
            f'module at {"/".join(self.owner)!r}, and there it is {str(path)!r}.'
        )


_NUMBER = re.compile('[0-9]+')


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, one).ratio()

"""What was probably meant by a pattern that matches no path."""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from flax_sg.errors import FilterValueError
from flax_sg.paths import Path


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
        except (FilterValueError, re.error):
            return None
        paths = self.paths if paths is None else paths
        return next((path for path in paths if fullmatch(path)), None)

    def find(self, pattern: str, separated: str) -> str | None:
        """The first hint that holds.

        Args:
            pattern: the pattern, without an anchor.
            separated: the pattern with '/' in place of other separators.
        """
        head, _, rest = separated.lstrip('/').partition('/')
        if head in {'params', *(path.collection for path in self.paths)}:
            rest = rest or self.everything
            write = f' Write {self.written(rest)}.' if self.first(rest) else ''
            return f'paths do not start with the collection {head!r}.{write}'
        if separated != pattern and self.first(separated):
            return f"names are joined by '/'. Write {self.written(separated)}."
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

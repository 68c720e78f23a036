"""Elementary filters: a glob, a regular expression, a function of the path."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from flax_sg import functions
from flax_sg.errors import FilterTypeError
from flax_sg.filters.expressions import Atom, Filter, Owner
from flax_sg.filters.hints import TextHints
from flax_sg.filters.refusals import EXAMPLE, RESULT_FIXES, brief
from flax_sg.paths import Path, glob_regex


@dataclasses.dataclass(frozen=True, eq=False)
class Glob(Atom):
    r"""The variables whose whole path fits a pattern, by the rules of gitignore.

    ``*``, ``?``, ``[abc]`` and ``[!abc]`` stand for characters within one component;
    ``**`` alone between slashes stands for any number of components: none or more at
    the start and in the middle, one or more at the end (everything inside). ``\``
    takes the next character literally.

    A variable outside the module that opened the block has a path with a leading '/':
    a pattern fits it only if it begins with '/' or with ``**``.

    >>> gln = Glob('gln_*/**')
    >>> paths = [('gln_0', 'dense', 'kernel'), ('gln_0',), ('my_gln_0', 'kernel')]
    >>> [gln(Path.of('params', names)) for names in paths]
    [True, False, False]
    """

    pattern: str

    def __post_init__(self) -> None:
        glob_regex(self.pattern)

    @functools.cached_property
    def _value(self) -> Hashable:
        return self.pattern

    @functools.cached_property
    def _fullmatch(self) -> Callable[[str], object]:
        return glob_regex(self.pattern).fullmatch

    def _matches(self, path: Path) -> bool:
        return self._fullmatch(path) is not None

    def __repr__(self) -> str:
        return f'Glob({self.pattern!r})'

    def _text(self) -> str:
        return self.pattern

    def _hint(self, paths: Sequence[Path], owner: Owner) -> str | None:
        hints = TextHints(glob_regex, repr, '**', paths, owner)
        deeper = '**/' + self.pattern
        return hints.find(
            self.pattern, separated=re.sub(r'\.|::|\\+', '/', self.pattern)
        ) or (
            f'it matches at another depth. Write {deeper!r}.'
            if hints.first(deeper)
            else None
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Regex(Atom):
    """The variables whose whole path matches a compiled regular expression.

    It is ``fullmatch``, not ``search``: a pattern that takes 'my_gln' for 'gln' would
    stop the wrong gradients silently, one that matches nothing raises.

    >>> gln = Regex(re.compile(r'gln_[0-9]+/.*'))
    >>> gln(Path.of('params', ('gln_0', 'kernel')))
    True
    >>> gln(Path.of('params', ('my_gln_0', 'kernel')))
    False
    """

    pattern: re.Pattern[str]

    def __post_init__(self) -> None:
        text: Any = self.pattern.pattern
        if not isinstance(text, str):
            raise FilterTypeError(
                f'{self.pattern!r} is a pattern on bytes; paths are str.\n'
                f'Fix: write re.compile({text.decode(errors="replace")!r}).'
            )

    @functools.cached_property
    def _value(self) -> Hashable:
        return self.pattern

    def _matches(self, path: Path) -> bool:
        return self.pattern.fullmatch(path) is not None

    def __repr__(self) -> str:
        return f'Regex({self.pattern!r})'

    def _text(self) -> str:
        return self.pattern.pattern

    def _hint(self, paths: Sequence[Path], owner: Owner) -> str | None:
        def compiled(text: str) -> re.Pattern[str]:
            return re.compile(text, self.pattern.flags)

        def written(text: str) -> str:
            flags = re.RegexFlag(self.pattern.flags) & ~re.UNICODE
            return f're.compile({text!r}{f", {flags!r}" if flags else ""})'

        text = self.pattern.pattern.lstrip('^')
        hints = TextHints(compiled, written, '.*', paths, owner)
        found = hints.find(text, separated=re.sub(r'\\\.|::', '/', text))
        part = next((path for path in paths if self.pattern.search(path)), None)
        if found is None and part is not None:
            around = f'.*{text}.*'
            write = f' Write {written(around)}.' if hints.first(around) else ''
            found = (
                f'it matches a part of {str(part)!r}, and has to match the whole path.'
                f'{write}'
            )
        return found


class Predicate(Atom):
    """The variables for which a function of the path returns True.

    Two predicates are equal when their functions are: in code and in all that the
    code reads (``functions.function_key``), so that a fresh lambda on every step is
    no new filter. What the code reads may change: the key is taken when the predicate
    is made, and taken anew by ``snapshot``.

    >>> def named(name):
    ...     return Predicate(lambda path: path.name == name)
    >>> named('bias') == named('bias'), named('bias') == named('kernel')
    (True, False)

    Raises:
        FilterTypeError: if the function is async or a generator, takes anything but
            one path, or, when called, returns anything but a bool.
        TracerInFilterError: if it reads a traced value.
    """

    fn: Callable[[Path], Any]
    _key: Hashable

    # No dataclass: where a filter stands in a field of a module, ``nn.jit`` would look
    # at the fields of the dataclass and take each fresh lambda for another module.
    def __init__(self, fn: Callable[[Path], Any]) -> None:
        object.__setattr__(self, 'fn', fn)
        for fn in (self.fn, type(self.fn).__call__):
            if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
                raise self._type_error('is async: it returns no bool')
            if inspect.isgeneratorfunction(fn):
                raise self._type_error('is a generator function: it returns no bool')
        if not _takes_a_path(self.fn):
            raise FilterTypeError(
                f'{self!r} cannot be called with a path: it is '
                f'{inspect.signature(self.fn)}.\n'
                f'Expected: a function of the path alone, such as {EXAMPLE}.\n'
                'Fix: to lift a function of a module, write nn.stop_gradient(fn, '
                'where); as a decorator, @nn.stop_gradient(where).'
            )
        object.__setattr__(self, '_key', functions.function_key(self.fn))

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f'cannot assign to field {name!r}')

    def __reduce__(self) -> Any:
        return Predicate, (self.fn,)

    @functools.cached_property
    def _value(self) -> Hashable:
        return self._key

    def snapshot(self) -> Filter:
        """The same function, with what it reads as it is now."""
        now = Predicate(self.fn)
        return self if now == self else now

    def changed(self) -> bool:
        """Whether what it reads is not what it was when the key was taken."""
        key = functions.function_key(self.fn)
        # One that cannot be compared is equal to no other in the first place.
        return key != self._key and not isinstance(key, functions.Incomparable)

    def _matches(self, path: Path) -> bool:
        try:
            result = self.fn(path)
        except Exception as error:
            error.add_note(f'raised by {self!r} for the path {str(path)!r}')
            raise
        if isinstance(result, (bool, np.bool_)):
            return bool(result)
        raise self._type_error(
            f'returned {brief(result)} for the path {str(path)!r}',
            RESULT_FIXES.get(type(result)),
        )

    def _type_error(self, problem: str, fix: str | None = None) -> FilterTypeError:
        return FilterTypeError(
            f'{self!r} {problem}.\n'
            'Expected: True or False for every path, known without running JAX.\n'
            f'Fix: {fix or f"write {EXAMPLE}"}.'
        )

    def __repr__(self) -> str:
        return f'Predicate({functions.describe(self.fn)})'

    def _text(self) -> str | None:
        code = getattr(self.fn, '__code__', None)
        constants = code.co_consts if isinstance(code, types.CodeType) else ()
        doc = self.fn.__doc__
        return next((c for c in constants if isinstance(c, str) and c != doc), None)

    def _hint(self, paths: Sequence[Path], owner: Owner) -> str | None:
        for path in paths:
            if self._accepts(Path.of(path.collection, (path.collection, *path.parts))):
                longer = f'{path.collection}/{path}'
                return (
                    f'it is True for {longer!r}, and paths do not start with the '
                    'collection. Ask for path.collection beside the path.'
                )
            if self._accepts(path.parts):
                return (
                    f'it is True for the tuple {path.parts!r}, and a path is a str. '
                    'Ask for path.parts.'
                )
            if self._accepts(path.from_root()):
                return (
                    f'it is True for the absolute path {path.absolute!r}, which is '
                    f'{str(path)!r} here. Ask for path.absolute.'
                )
        return None

    def _accepts(self, path: Any) -> bool:
        try:
            return bool(self.fn(path))
        except Exception:  # It was not made for such a path.
            return False


def _takes_a_path(fn: Callable[..., Any]) -> bool:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # Written in C: it does not say.
        return True
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True

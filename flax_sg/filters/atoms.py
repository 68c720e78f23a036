"""Elementary filters: a glob, a regular expression, a function of the path."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from flax_sg import errors
from flax_sg.filters import functions
from flax_sg.filters.expressions import Atom, Filter, Owner
from flax_sg.filters.hints import TextHints, separated_by_slashes
from flax_sg.filters.paths import (
    Path,
    check_glob,
    escaped,
    glob_regex,
    literal,
    with_literal_brackets,
)
from flax_sg.filters.refusals import EXAMPLE, RESULT_FIXES, brief


@dataclasses.dataclass(frozen=True, eq=False)
class Glob(Atom):
    r"""The variables whose whole path fits a pattern, by the rules of gitignore.

    ``*``, ``?``, ``[abc]`` and ``[!abc]`` stand for characters within one component;
    ``**`` alone between slashes stands for any number of components: none or more at
    the start and in the middle, one or more at the end (everything inside). ``\``
    takes the next character literally.

    A pattern that is the path of a variable fits that variable too, whatever characters
    are in it: ``'w[0,0] 1x0e'``. A ``sg.Path`` in place of a str fits nothing else.

    A variable outside the module that opened the block has a path with a leading '/':
    a pattern fits it only if it begins with '/' or with ``**``.

    >>> gln = Glob('gln_*/**')
    >>> paths = [('gln_0', 'dense', 'kernel'), ('gln_0',), ('my_gln_0', 'kernel')]
    >>> [gln(Path.of('params', names)) for names in paths]
    [True, False, False]
    """

    pattern: str

    def __post_init__(self) -> None:
        check_glob(self.pattern)

    @classmethod
    def of_path(cls, path: str) -> Filter:
        """The filter for one path: no character in it stands for others."""
        try:
            return cls(escaped(path))
        except errors.FilterValueError:  # A name that is empty: '' or 'a//b'.
            return Regex(re.compile(re.escape(path)))

    @functools.cached_property
    def _value(self) -> Hashable:
        return self.pattern

    @functools.cached_property
    def _fullmatch(self) -> Callable[[str], object]:
        try:
            return glob_regex(self.pattern).fullmatch
        except errors.FilterValueError:  # Then it can be the path of a variable only.
            return lambda path: None

    @functools.cached_property
    def _only(self) -> tuple[str, ...]:
        path = literal(self.pattern)
        return () if path is None else tuple({path, self.pattern})

    def _matches(self, path: Path) -> bool:
        return path == self.pattern or self._fullmatch(path) is not None

    def __repr__(self) -> str:
        return f'Glob({self.pattern!r})'

    def _text(self) -> str:
        return self.pattern

    def _hint(self, paths: Sequence[Path], owner: Owner) -> str | None:
        hints = TextHints(glob_regex, repr, '**', paths, owner)
        try:
            glob_regex(self.pattern)
        except errors.FilterValueError as error:
            problem = (
                str(error)
                .partition('\n')[0]
                .removeprefix(f'The glob {self.pattern!r} ')
            )
            found = hints.inside(with_literal_brackets(self.pattern))
            return f'it {problem}' + (f' Write {found!r}.' if found else '')
        deeper = '**/' + self.pattern
        literal = self.pattern.replace('[', '[[]')
        separated = separated_by_slashes(self.pattern)
        if found := hints.find(self.pattern, separated):
            return found
        if hints.first(deeper):
            return f'it matches at another depth. Write {deeper!r}.'
        if separated != self.pattern and (found := hints.inside('**/' + separated)):
            return f"names are joined by '/'. Write {found!r}."
        if hints.first(literal):
            return f"'[' begins a set of characters. Write {literal!r}."
        if found := hints.alternatives(self.pattern):
            write = found if len(found) > 1 else found[0]
            return f'braces stand for themselves. Write {write!r}.'
        return None

    def _meant(self, paths: Sequence[Path]) -> str | None:
        return TextHints(glob_regex, repr, '**', paths, None).respelled(self.pattern)


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
            raise errors.FilterTypeError(
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

    The function may read anything: a config, a table, a file. It is asked when a block
    opens and when a variable is read, and what it *answers* decides whether JAX finds
    a program again. Two predicates are equal if their functions are the same object.

    >>> bias = Predicate(lambda path: path.name == 'bias')
    >>> [bias(Path.of('params', ('dense', name))) for name in ('bias', 'kernel')]
    [True, False]

    Raises:
        FilterTypeError: if the function is async or a generator, takes anything but
            one path, or, when called, returns anything but a bool.
        FilterTypeError: if it reads a traced value.
    """

    fn: Callable[[Path], Any]

    # No dataclass: where a filter stands in a field of a module, ``nn.jit`` would look
    # at the fields of the dataclass.
    def __init__(self, fn: Callable[[Path], Any]) -> None:
        object.__setattr__(self, 'fn', fn)
        for fn in (self.fn, type(self.fn).__call__):
            if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
                raise self._type_error('is async: it returns no bool')
            if inspect.isgeneratorfunction(fn):
                raise self._type_error('is a generator function: it returns no bool')
        if not _takes_a_path(self.fn):
            raise errors.FilterTypeError(
                f'{self!r} cannot be called with a path: it is '
                f'{inspect.signature(self.fn)}.\n'
                f'Expected: a function of the path alone, such as {EXAMPLE}.\n'
                'Fix: to lift a function of a module, write nn.stop_gradient(fn, '
                'where); as a decorator, @nn.stop_gradient(where).'
            )
        traced = functions.tracer_in(self.fn)
        if traced is not None:
            name, value = traced
            raise self._tracer_error(f'reads {brief(value)} as {name!r}')

    def __reduce__(self) -> Any:
        return Predicate, (self.fn,)

    @functools.cached_property
    def _value(self) -> Hashable:
        try:
            hash(self.fn)
        except TypeError:
            return id(self.fn)
        return self.fn

    @functools.cached_property
    def _shape(self) -> Hashable:
        return functions.shape_of(self.fn)

    def _as_function(self) -> tuple[Callable[[Path], Any], bool]:
        return self.fn, False

    def _matches(self, path: Path) -> bool:
        try:
            result = self.fn(path)
        except jax.errors.ConcretizationTypeError as error:
            raise self._tracer_error('reads a traced value') from error
        except Exception as error:
            error.add_note(f'raised by {self!r} for the path {str(path)!r}')
            raise
        if isinstance(result, (bool, np.bool_)):
            return bool(result)
        if isinstance(result, Tracer):
            raise self._tracer_error(f'returned {brief(result)}')
        raise self._type_error(
            f'returned {brief(result)} for the path {str(path)!r}',
            RESULT_FIXES.get(type(result)),
        )

    def _type_error(
        self, problem: str, fix: str | None = None
    ) -> errors.FilterTypeError:
        return errors.FilterTypeError(
            f'{self!r} {problem}.\n'
            'Expected: True or False for every path, known without running JAX.\n'
            f'Fix: {fix or f"write {EXAMPLE}"}.'
        )

    def _tracer_error(self, problem: str) -> errors.FilterTypeError:
        return errors.FilterTypeError(
            f'{self!r} {problem}.\n'
            'Which variables are meant has to be known while the program is traced.\n'
            'Fix: make the choice static, by static_argnames of jax.jit for example.'
        )

    def __repr__(self) -> str:
        return f'Predicate({functions.describe(self.fn)})'

    def _text(self) -> str | None:
        code = getattr(self.fn, '__code__', None)
        constants = code.co_consts if isinstance(code, types.CodeType) else ()
        doc = self.fn.__doc__
        return next((c for c in constants if isinstance(c, str) and c != doc), None)


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

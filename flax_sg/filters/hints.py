"""What a pattern that matches nothing was meant to be, and the paths nearest to it."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from flax_sg.errors.nearest import nearest
from flax_sg.filters.paths import Path

_Compile: TypeAlias = Callable[[str], re.Pattern[str]]


def advice(
    pattern: str, paths: Sequence[Path], example: str, compiled: _Compile
) -> str:
    """The last lines of an error: the nearest paths, and what to write.

    Args:
        pattern: a pattern that fits no path.
        paths: the paths of all variables.
        example: a pattern of the same kind that matches.
        compiled: makes the regular expression of a pattern.
    """
    # A pattern may begin with the collection, or with names of modules further out.
    by_text = {f'{path.collection}/{path.absolute}': str(path) for path in paths}
    near = list(dict.fromkeys(by_text[text] for text in nearest(pattern, by_text)))
    hint = _of_a_collection(pattern, paths, near[0], compiled)
    hint = hint or _of_the_root(pattern, paths, compiled)
    for text in (pattern, _of_a_list(pattern)):
        if not hint and (respelled := _respelled(text, near[0], paths, compiled)):
            hint = f'Did you mean {respelled!r}?'
    if not hint and compiled is not re.compile:
        hint = _of_a_glob(pattern, paths, compiled)
    whole = 'A pattern matches whole paths, from below the collection: '
    hint = hint or f'{whole}{example!r} matches all variables in encoder.'
    return f'Nearest: {", ".join(map(repr, near))}.\n{hint}'


def _of_a_list(pattern: str) -> str:
    """A pattern with the modules of a list as Flax names them.

    >>> [*map(_of_a_list, ['blocks/0/**', 'blocks[0]', 'blocks.*.w', 'head/**'])]
    ['blocks_0/**', 'blocks_0', 'blocks_*/w', 'head/**']
    """
    numbers = r'[/.\[](\d+|\*|\{\d+\.\.\d+\})\]?(?![\w*-])'
    joined = re.sub(numbers, r'_\1', pattern)
    return pattern if joined == pattern else re.sub(r'(?<!\.)\.(?![.*])', '/', joined)


def _of_a_collection(
    pattern: str, paths: Sequence[Path], near: str, compiled: _Compile
) -> str:
    """The hint for a pattern that begins with the name of a collection, or ''."""
    collections = {path.collection for path in paths}
    first, _, below = pattern.partition('/')
    if first not in collections:
        state = first == 'batch_stats' or pattern.rpartition('/')[2] in ('mean', 'var')
        if state and collections == {'params'}:
            return (
                'Parameters alone are looked at: for running averages write '
                "collections='batch_stats', in a view of NNX kind=nnx.BatchStat."
            )
        return ''
    inside = [path for path in paths if path.collection == first]
    respelled = _respelled(below, near, inside, compiled) if below else ''
    if len(collections) == 1:
        return f'Leave out the collection: {respelled!r}.' if respelled else ''
    if not respelled and below not in ('', '**'):
        return ''
    and_below = f' & {respelled!r}' if respelled and below != '**' else ''
    write = f'filters.Collection({first!r})'
    return f'Paths begin below the collection: {write}{and_below}.'


def _of_the_root(pattern: str, paths: Sequence[Path], compiled: _Compile) -> str:
    """The hint for a pattern that begins at the root, in a module below it; or ''."""
    for path in paths:
        if path == path.absolute or not _fits(pattern, [path.absolute], compiled):
            continue
        front = path.absolute.removesuffix(path)
        if path.outside:
            problem, write = (
                'It is outside of the module of the block',
                f'{_many(compiled)}/{pattern}',
            )
        elif pattern.startswith(front):
            problem, write = (
                'Paths begin at the module of the block',
                pattern[len(front) :],
            )
        else:
            continue
        return f'{problem}: {write!r}.'
    return ''


def _of_a_glob(pattern: str, paths: Sequence[Path], compiled: _Compile) -> str:
    """The hint for what is no glob: names with dots, a regular expression; or ''."""
    dotted = pattern.replace('.', '/')
    every = f'{dotted.removesuffix("/*")}/**'
    # 'head.*' is more likely a regular expression.
    if pattern.count('.') > pattern.endswith('.*'):
        for write in (every,) if dotted.endswith('/*') else (dotted, every):
            if _fits(write, paths, compiled):
                return f"Names are joined by '/': {write!r}."
    if _fits(pattern, paths, re.compile) and re.search(r'\.[*+]|[\\^$|(+]', pattern):
        return f'A str is a glob: write re.compile({pattern!r}).'
    if stars := _crossing(pattern, paths, compiled):
        return f"'*' matches within one name: {stars!r}."
    return ''


def _crossing(pattern: str, paths: Sequence[str], compiled: _Compile) -> str:
    """The glob for a pattern of fnmatch, whose '*' crosses slashes; or ''."""
    if '*' not in pattern or not _fits(fnmatch.translate(pattern), paths, re.compile):
        return ''
    globs = f'**/{pattern}/**', f'**/{pattern}', f'{pattern}/**'
    return next((each for each in globs if _fits(each, paths, compiled)), '')


def _fits(text: str, paths: Sequence[str], compiled: _Compile) -> bool:
    """Whether a pattern fits one of the paths."""
    try:
        return any(map(compiled(text).fullmatch, paths))
    except re.error:
        return False


def _respelled(
    pattern: str, near: str, paths: Sequence[Path], compiled: _Compile
) -> str:
    """The pattern, or all below or above it, with names of a path for others like them.

    >>> paths = [Path.of('params', ('encoder', 'w'))]
    >>> [_respelled(each, paths[0], paths, re.compile) for each in ('encodr', 'w', 'b')]
    ['encoder/.*', '.*/w', '']

    Returns:
        A pattern that fits one of the paths; '' if there is none.
    """
    names = pattern.strip('/').split('/')
    for n, (name, other) in enumerate(zip(names, near.split('/'), strict=False)):
        # A name that is no identifier, such as 'gln_*', has a meaning in the pattern.
        if re.fullmatch(rf'{re.escape(name)}_\d+', other):  # One of a list of modules.
            names[n] = f'{name}_.*' if compiled is re.compile else f'{name}_*'
        elif (name + other).isidentifier() and _numbers(name) <= _numbers(other):
            names[n] = (*difflib.get_close_matches(name, [other], 1, 0.75), name)[0]
    text = '/'.join(names)
    many = _many(compiled)
    candidates = text, f'{text}/{many}', f'{many}/{text}'
    return next((each for each in candidates if _fits(each, paths, compiled)), '')


def _numbers(name: str) -> bool:
    """Whether a name ends in a number: 'layers_0' is one layer, and 'layers' all."""
    return name[-1:].isdigit()


def _many(compiled: _Compile) -> str:
    """The pattern of any number of names."""
    return '.*' if compiled is re.compile else '**'

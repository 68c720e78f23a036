"""What a pattern that matches nothing was meant to be, and the paths nearest to it."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from flax_sg.filters.paths import Path

_Compile: TypeAlias = Callable[[str], re.Pattern[str]]


def advice(
    pattern: str, paths: Sequence[Path], example: str, compiled: _Compile
) -> str:
    """The last lines of an error: the nearest paths, and what to write.

    Args:
        pattern: a pattern that fits no path.
        paths: the paths of all variables.
        example: a pattern of this kind.
        compiled: makes the regular expression of such a pattern.
    """
    # A pattern may begin with the collection, or with names of modules further out.
    known = {f'{path.collection}/{path.absolute}': str(path) for path in paths}
    near = list(dict.fromkeys(known[text] for text in nearest(pattern, known)))
    hint = next(
        _meant(pattern, paths, near[0], compiled),
        f'A pattern matches whole paths, from below the collection: {example!r} takes '
        'all variables in encoder.',
    )
    return f'Nearest: {", ".join(map(repr, near))}.\n{hint}'


def _meant(
    pattern: str, paths: Sequence[Path], near: str, compiled: _Compile
) -> Iterator[str]:
    """What may be meant, in whole sentences; the likeliest comes first."""

    def fits_in(paths: Sequence[Path], text: str) -> bool:
        try:
            return any(map(compiled(text).fullmatch, paths))
        except re.error:
            return False

    fits = functools.partial(fits_in, paths)
    if fits(respelled := _respelled(pattern, near)):
        yield f'Did you mean {respelled!r}?'
    if compiled is re.compile:
        return
    if pattern[0] in '!-~' and fits(rest := pattern[1:]):
        yield f'For all other variables write ~filters.as_filter({rest!r}).'
    several = split(pattern)
    if len(several) > 1 and all(map(fits, several)):
        yield f'For several globs write a list: {several!r}.'
    if pattern.endswith('/value') and fits(rest := pattern.removesuffix('/value')):
        yield f'No path ends in /value, the inside of a box or a Variable: {rest!r}.'
    try:
        is_regex = any(map(re.compile(pattern).fullmatch, paths))
        is_found = any(map(re.compile(pattern).search, paths))
    except re.error:
        is_regex = is_found = False
    if is_regex and re.search(r'\.[*+]|[\\^$|(+]', pattern):
        glob = pattern.replace('.*', '**')
        write = f'write {glob!r}, or ' if fits(glob) else 'write '
        yield f'A str is a glob: {write}re.compile({pattern!r}).'
    if '|' in pattern and is_found:
        write = f're.compile({f".*({pattern}).*"!r})'
        yield f"A str is a glob, and '|' has no meaning in it: write {write}."
    collections = {path.collection for path in paths}
    names = pattern.split('/')
    of_state = names[0] == 'batch_stats' or names[-1] in ('mean', 'var')
    if of_state and collections == {'params'}:
        yield (
            'A block looks at parameters alone: for running averages write '
            "collections='batch_stats'."
        )
    for text in dict.fromkeys((pattern, pattern.replace('.', '/'))):
        first, _, below = text.partition('/')
        if first in collections and len(collections) > 1:
            its = f'filters.Collection({first!r})'
            if below in ('', '**'):
                yield f'Paths begin below the collection: {its}.'
            inside = [path for path in paths if path.collection == first]
            fits_there = functools.partial(fits_in, inside)
            found = _moved(below, inside, fits_there, compiled)
            for rest in found if below else ():
                yield f'Paths begin below the collection: {its} & {rest!r}.'
        is_collection = bool(below) and first in collections
        inner = below if is_collection else text
        for moved in (text, _respelled(inner, near)):
            for found in _moved(moved, paths, fits, compiled):
                if text != pattern:
                    yield f"Names are separated by '/': {found!r}."
                elif is_collection:
                    yield f'Leave out the collection: {found!r}.'
                yield f'Did you mean {found!r}?'


def split(text: str) -> list[str]:
    """The globs in a text with several, by commas and the like.

    >>> split('a/**, b/**')
    ['a/**', 'b/**']
    """
    return [part for part in re.split(r'[\s,;|]+', text) if part]


def _moved(
    pattern: str,
    paths: Sequence[Path],
    fits: Callable[[str], bool],
    compiled: _Compile,
) -> Iterator[str]:
    """A glob with other leading names, or for all that is inside: those that fit."""
    if '' in pattern.split('/')[1:]:
        return
    for text in (pattern, f'{pattern}/**'):
        if fits(text):
            yield text
        names = text.split('/')
        for n in range(1, len(names)):
            # What is left has to name something.
            if names[n].strip('*') and fits(rest := '/'.join(names[n:])):
                yield rest
        if not names[0].strip('*'):
            continue
        below = re.compile(f'(.*?)/{compiled(text).pattern}')
        above = [m[1].split('/') for path in paths if (m := below.fullmatch(path))]
        if len({*map(len, above)}) > 1:
            yield f'**/{text}'
        elif above:
            columns = (set(column) for column in zip(*above, strict=True))
            same = (each.pop() if len(each) == 1 else '*' for each in columns)
            yield '/'.join([*same, text])


def _respelled(pattern: str, path: str) -> str:
    """The pattern, with the names of a path in place of names that look like them.

    >>> _respelled('encodr/**', 'encoder/kernel')
    'encoder/**'
    """
    names, there = pattern.split('/'), path.split('/')
    for n, (name, other) in enumerate(zip(names, there, strict=False)):
        # What is no identifier may have a meaning in the pattern.
        if (name + other).isidentifier():
            names[n] = (*difflib.get_close_matches(name, [other], 1, 0.75), name)[0]
    return '/'.join(names)


def nearest(pattern: str, paths: Iterable[str], n: int = 3) -> list[str]:
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

    # Of thousands of paths, those are compared that share most pairs of letters.
    pairs = {wanted[i : i + 2] for i in range(len(wanted) - 1)}

    def shared(path: str) -> int:
        text = path.casefold()
        return sum(pair in text for pair in pairs)

    several = list(dict.fromkeys(paths))
    if len(several) > 200:
        several.sort(key=shared, reverse=True)
    # sorted is stable: paths that look alike stay in the order they came in.
    return sorted(several[:200], key=score, reverse=True)[:n]
